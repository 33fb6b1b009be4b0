"""Looking at checkpoints from a training script: no collectives, one request to the agent."""

from __future__ import annotations

import time
from dataclasses import dataclass

from tieredckpt.dcp.held import read_holdings
from tieredckpt.dcp.session import Session
from tieredckpt.errors import IntegrityError, WaitError
from tieredckpt.format.manifest import Manifest, decode_manifest

POLL_S = 0.05

_GONE_BAD = {
    "failed": "it failed there",
    "superseded": "a newer checkpoint was copied there instead",
    "not_scheduled": "it is not destined for it (see `every` of the tier)",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointInfo:
    """A checkpoint that can be restored.

    Attributes:
        tiers: Where a whole copy of every segment is, nearest first.
        destined: The tiers that it goes to, besides memory.
        created_at_s: Seconds since 1970 by the coordinator's clock.
    """

    step: int
    stream: str
    save_id: str
    attempt: int
    world_size: int
    size_bytes: int
    tiers: tuple[str, ...]
    destined: tuple[str, ...]
    created_at_s: float


def list_checkpoints(session: Session, stream: str) -> list[CheckpointInfo]:
    """The restorable checkpoints of the time line, newest first."""
    found = []
    for candidate in session.history.recovery_plan(stream).candidates:
        manifest = candidate.manifest
        whole = [
            [source.tier for source in sources if source.intact] for sources in candidate.sources
        ]
        order = list(dict.fromkeys(tier for tiers in whole for tier in tiers))
        found.append(
            CheckpointInfo(
                step=manifest.step,
                stream=stream,
                save_id=manifest.save_id,
                attempt=manifest.attempt.number,
                world_size=manifest.world_size,
                size_bytes=sum(ref.size for ref in manifest.segments),
                tiers=tuple(tier for tier in order if all(tier in tiers for tiers in whole)),
                destined=manifest.tiers,
                created_at_s=manifest.created_at_s,
            )
        )
    return found


def wait_for(session: Session, step: int, level: str, timeout_s: float | None, stream: str) -> None:
    """Wait until the newest checkpoint of ``step`` is at ``level``. Raises WaitError."""
    if level == "replicated":
        raise NotImplementedError("replicas on other hosts are not in this release")
    known = ("memory", *(tier.name for tier in session.config.tiers))
    if level not in known:
        raise WaitError(
            f"there is no level {level!r}; there are {', '.join(known)}", reason="not_found"
        )
    save_id = _save_of(session, step, stream)
    limit_s = session.config.save.timeout_s if timeout_s is None else timeout_s
    until_s = time.monotonic() + limit_s
    while True:
        progress = session.client.progress(save_id)
        reached = progress.levels.get(level, "not_scheduled")
        if reached == "done":
            return
        error = progress.errors.get(level)
        why = f": {error}" if error else ""
        if reached in _GONE_BAD:
            raise WaitError(
                f"step {step} of stream {stream!r} will not reach {level!r}: "
                f"{_GONE_BAD[reached]}{why}",
                reason=reached,
            )
        if time.monotonic() >= until_s:
            raise WaitError(
                f"step {step} of stream {stream!r} has not reached {level!r} after {limit_s:g} s "
                f"(it is {reached}){why}",
                reason="timeout",
            )
        time.sleep(min(POLL_S, max(0.0, until_s - time.monotonic())))


def _save_of(session: Session, step: int, stream: str) -> str:
    found: Manifest | None = None
    for tier in read_holdings(session.client).tiers:
        for fact in tier.manifests:
            if fact.stream != stream or fact.manifest is None:
                continue
            try:
                manifest = decode_manifest(fact.manifest)
            except IntegrityError:
                continue
            if manifest.step == step and (found is None or _age(found) < _age(manifest)):
                found = manifest
    if found is None:
        raise WaitError(f"there is no step {step} in stream {stream!r}", reason="not_found")
    return found.save_id


def _age(manifest: Manifest) -> tuple[int, int]:
    return manifest.attempt.number, manifest.seq
