"""Listing, awaiting and pinning checkpoints from a training script, without collectives."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from tieredckpt.dcp.job.session import Session
from tieredckpt.errors import NotFoundError, WaitError
from tieredckpt.format.manifest import Manifest
from tieredckpt.policy.history import candidates
from tieredckpt.recovery.evidence import read_attempts
from tieredckpt.recovery.other_hosts import manifests_in, read_holdings
from tieredckpt.rpc.agent_client import LEAST_WAIT_S
from tieredckpt.rpc.messages.agent import PIN_WAIT_S_MAX, AddRecord
from tieredckpt.storage.holdings import Holdings

POLL_S_MIN = 0.002
POLL_S = 0.05
ARRIVAL_S = 10.0
"""How long a host that did not commit a save waits for its manifest before it asks other hosts, and
between two such requests."""

HOSTS_SHOWN = 3

_GONE_BAD = {
    "failed": "it failed there",
    "superseded": "newer checkpoints are copied there instead",
    "not_scheduled": "the tier's schedule leaves it out (see `every` of the tier)",
}
_NOT_REPLICATED = {
    "failed": "its replication failed",
    "superseded": "a newer checkpoint was replicated instead",
    "not_scheduled": "it has no replicas (one host, or memory.replicas is 0)",
}

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointInfo:
    """A checkpoint that can be restored.

    Attributes:
        tiers: The tiers that have a complete copy of every segment, nearest first.
        destined: The tiers that it is copied to, besides memory.
        created_at_s: Seconds since 1970 by the coordinator's clock.
        tags: As given to the writer; ``origin: live`` is what live recovery saved.
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
    tags: Mapping[str, str]


def list_checkpoints(session: Session, stream: str) -> list[CheckpointInfo]:
    """The restorable checkpoints of the timeline, newest first."""
    found = []
    for candidate in session.history.recovery_plan(stream).candidates:
        manifest = candidate.manifest
        complete = [
            [source.tier for source in sources if source.intact] for sources in candidate.sources
        ]
        order = list(dict.fromkeys(tier for tiers in complete for tier in tiers))
        found.append(
            CheckpointInfo(
                step=manifest.step,
                stream=stream,
                save_id=manifest.save_id,
                attempt=manifest.attempt.number,
                world_size=manifest.world_size,
                size_bytes=sum(ref.size for ref in manifest.segments),
                tiers=tuple(tier for tier in order if all(tier in tiers for tiers in complete)),
                destined=manifest.tiers,
                created_at_s=manifest.created_at_s,
                tags=manifest.tags,
            )
        )
    return found


def wait_for(session: Session, step: int, level: str, timeout_s: float, stream: str) -> None:
    """Wait until the newest checkpoint of ``step`` is at ``level``. Raises WaitError."""
    known = ("memory", "replicated", *(tier.name for tier in session.config.tiers))
    if level not in known:
        raise WaitError(
            f"there is no level {level!r}; there are {', '.join(known)}", reason="not_found"
        )
    begun_s = time.monotonic()
    until_s = begun_s + timeout_s
    save_id = _save_of(session, step, stream, until_s)
    what = f"step {step} of stream {stream!r}"
    wait_for_save(session, save_id, what, level, until_s, begun_s=begun_s)


def wait_for_save(
    session: Session,
    save_id: str,
    what: str,
    level: str,
    until_s: float,
    *,
    arrives_s: float = 0.0,
    begun_s: float | None = None,
) -> None:
    """Wait until this checkpoint is at ``level``.

    Args:
        session: The rank's.
        save_id: The checkpoint.
        what: The checkpoint's name in messages.
        level: A level of :func:`wait_for`.
        until_s: The deadline, by the monotonic clock.
        arrives_s: By that clock: until then the manifest may be on its way to this host.
        begun_s: By that clock, for messages: when the caller began to wait; None: now.

    Raises:
        WaitError: It will not reach the level, or not in time.
    """
    begun_s = time.monotonic() if begun_s is None else begun_s
    pause_s = POLL_S_MIN
    while True:
        try:
            progress = session.client.progress(
                save_id, awaited=level, within_s=until_s - time.monotonic()
            )
        except NotFoundError:
            if time.monotonic() >= min(arrives_s, until_s):
                raise
            time.sleep(POLL_S)
            continue
        reached = progress.levels.get(level, "not_scheduled")
        if reached == "done":
            return
        error = progress.errors.get(level)
        why = f": {error}" if error else ""
        if reached in _GONE_BAD:
            because = _GONE_BAD[reached]
            if level == "replicated":
                because = _NOT_REPLICATED[reached]
            raise WaitError(f"{what} will not reach {level!r}: {because}{why}", reason=reached)
        now_s = time.monotonic()
        if now_s >= until_s:
            raise WaitError(
                f"{what} has not reached {level!r} after {now_s - begun_s:.3g} s "
                f"(it is {reached}){why}",
                reason="timeout",
            )
        time.sleep(min(pause_s, until_s - now_s))
        pause_s = min(2 * pause_s, POLL_S)


def _save_of(session: Session, step: int, stream: str, until_s: float) -> str:
    # The manifest reaches the coordinator's host first, and other hosts a moment later.
    arrives_s = min(until_s, time.monotonic() + ARRIVAL_S) if session.peers is not None else 0.0
    mine, others = session.history.attempt_id, session.history.others()
    scan_s = LEAST_WAIT_S
    mute: Mapping[str, str] = {}
    while True:
        # The newest save of this job is in memory. Tiers, which may be slow, are asked only if it
        # is not there, and briefly as long as it may still arrive in memory.
        now_s = time.monotonic()
        left_s = max(0.0, until_s - now_s)
        holdings = read_holdings(session.client, within_s=left_s, tiers=False)
        found = _newest_of(holdings, step, stream, mine)
        if found is not None and found.attempt.id == mine:
            return found.save_id
        patience_s = min(scan_s, left_s) if now_s < arrives_s else left_s
        holdings = read_holdings(session.client, within_s=max(LEAST_WAIT_S, patience_s))
        found = _newest_of(holdings, step, stream, mine)
        if found is not None:
            return found.save_id
        if now_s >= arrives_s:
            coming = False
            if others is not None and left_s > 0:
                asked = others.ask_all(holdings, limit_s=left_s)
                mute = asked.unreachable or {}
                coming = any(_newest_of(each, step, stream, mine) for each in asked.holdings)
            if left_s <= 0 or not (coming or mute):  # certain only if all answer
                raise _no_step(step, stream, holdings, mute)
            arrives_s = min(until_s, time.monotonic() + ARRIVAL_S)
        scan_s *= 2  # an interrupted scan starts anew, and would never finish in the same time
        time.sleep(POLL_S)


def _no_step(step: int, stream: str, holdings: Holdings, mute: Mapping[str, str]) -> WaitError:
    failed = [f"{tier.tier}: {tier.error}" for tier in holdings.tiers if not tier.available]
    where = f", as far as its tiers answer ({'; '.join(failed)})" if failed else ""
    if mute:
        hosts = "; ".join(f"{host}: {why}" for host, why in sorted(mute.items())[:HOSTS_SHOWN])
        more = f"; and {len(mute) - HOSTS_SHOWN} more" if len(mute) > HOSTS_SHOWN else ""
        where += f"; hosts that may know of it do not answer ({hosts}{more})"
    return WaitError(f"there is no step {step} in stream {stream!r}{where}", reason="not_found")


def _newest_of(holdings: Holdings, step: int, stream: str, mine: str) -> Manifest | None:
    """This job's own save first: another job may have saved the same step."""
    saved = [each for each in manifests_in(holdings, stream) if each.step == step]
    return max(saved, key=lambda each: _rank(each, mine), default=None)


def _rank(manifest: Manifest, mine: str) -> tuple[bool, int, int]:
    return manifest.attempt.id == mine, manifest.attempt.number, manifest.seq


# --- pins -----------------------------------------------------------------------------------------


def pin(
    session: Session,
    kind: Literal["pin", "unpin"],
    step: int,
    stream: str,
    timeout_s: float,
    reason: str = "",
) -> str:
    """Pin or unpin a checkpoint; see ``Engine.pin`` and ``Engine.unpin``."""
    until_s = time.monotonic() + max(0.0, timeout_s)  # in this order NaN becomes 0
    manifest = _candidate(session, step, stream, until_s)
    found = session.client.pin(
        AddRecord(
            stream=stream,
            save_id=manifest.save_id,
            kind=kind,
            text=reason[:4096],
            wait_s=min(max(until_s - time.monotonic(), 0.0), PIN_WAIT_S_MAX),
        )
    )
    for tier, why in found.owed.items():
        log.warning(
            "the %s of step %d counts, and is not in tier %s yet, which gets it when it answers: "
            "%s", kind, step, tier, why,
        )  # fmt: skip
    return manifest.save_id


def _candidate(session: Session, step: int, stream: str, until_s: float) -> Manifest:
    # A checkpoint in memory is pinned without waiting for a tier that does not answer, and the
    # other tiers have time to record the pin.
    for tiers in (False, True):
        left_s = max(LEAST_WAIT_S, until_s - time.monotonic())
        holdings = read_holdings(session.client, within_s=left_s, tiers=tiers)
        found = candidates(manifests_in(holdings), read_attempts([holdings])[0], stream)
        for manifest in found:
            if manifest.step == step:
                return manifest
    raise NotFoundError(
        f"this host knows no checkpoint of step {step} of stream {stream!r} on the timeline",
        key=str(step),
        what="step",
    )
