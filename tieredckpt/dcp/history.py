"""The coordinator's memory of the run: which attempt this is, and what each stream went on from.

An attempt is opened when a load succeeds or at the first save, whichever comes first. All streams
that this process knows are named whenever an attempt is opened, so that their line goes on.
"""

from __future__ import annotations

import logging
import secrets
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import msgspec

from tieredckpt.errors import (
    NotFoundError,
    RemoteProtocolError,
    TierUnavailableError,
    UsageError,
)
from tieredckpt.format.manifest import (
    Ancestor,
    AttemptId,
    AttemptRecord,
    Manifest,
    decode_attempt,
)
from tieredckpt.policy.schedule import LastSpill, TierSchedule, due_tiers
from tieredckpt.recovery.plan import RecoveryPlan, plan_recovery
from tieredckpt.tiers.facts import Holdings, decode_holdings
from tieredckpt.transport.client import AgentClient
from tieredckpt.transport.messages import BaseSpec

log = logging.getLogger(__name__)

_STREAMS_SHOWN = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class SavePlace:
    """Where a save stands on the time line, and where it goes."""

    save_id: str
    attempt: AttemptId
    seq: int
    parent: str | None
    lineage: tuple[Ancestor, ...]
    tiers: tuple[str, ...]


@dataclass(slots=True, kw_only=True)
class _Stream:
    head: str | None
    """The newest checkpoint that this process restored or committed."""
    lineage: tuple[Ancestor, ...] = ()
    next_seq: int = 0
    in_doubt: Manifest | None = None
    """A commit of unknown outcome."""
    spilled: dict[str, LastSpill] = field(default_factory=dict)


class History:
    """See the module. Used on the coordinator only, by one save or load at a time."""

    def __init__(self, client: AgentClient, tiers: Sequence[TierSchedule]) -> None:
        self._client = client
        self._tiers = tiers
        self._attempt: AttemptRecord | None = None
        self._streams: dict[str, _Stream] = {}
        self._read: dict[str, Manifest] = {}
        self.plans_sent: set[str] = set()
        """Ids of plans that the agent certainly had at the last commit."""

    def recovery_plan(
        self,
        stream: str,
        *,
        step: int | None = None,
        save_id: str | None = None,
        exclude: frozenset[str] = frozenset(),
    ) -> RecoveryPlan:
        """What could be restored now, as far as this host's agent can see."""
        return read_plan(self._client, stream, step=step, save_id=save_id, exclude=exclude)

    # --- loading ---------------------------------------------------------------------------------

    def restored(self, stream: str, manifest: Manifest, known: Iterable[Manifest]) -> None:
        """All ranks restored ``manifest``: training goes on from it, in a new attempt.

        Args:
            stream: The stream that was restored.
            manifest: Of the checkpoint.
            known: Manifests of the stream; those up to the restored step say what was spilled.
        """
        self._streams[stream] = _Stream(
            head=manifest.save_id, spilled=_spilled([*known, manifest], manifest.step)
        )
        self._read.pop(stream, None)
        # If opening fails the next save must open one: in the old one it would stand behind.
        self._attempt = None
        self._open_attempt()

    def nothing_to_restore(self, stream: str) -> None:
        """There certainly is no checkpoint, or the user said to begin anew.

        Warns if other streams hold some: a folder in ``checkpoint_id`` names a stream, and who
        loads another one than was saved would silently begin anew.
        """
        held = read_holdings(self._client).tiers
        others = sorted({fact.stream for tier in held for fact in tier.manifests} - {stream})
        if others:
            names = ", ".join(map(repr, others[:_STREAMS_SHOWN]))
            warnings.warn(
                f"stream {stream!r} of this namespace holds no checkpoint, so nothing was loaded; "
                f"other streams do: {names} (engine.load(state, stream=...); the folder in "
                "dcp.save's checkpoint_id names the stream)",
                stacklevel=2,
            )
        self._streams[stream] = _Stream(head=None)
        self._attempt = None

    def was_read(self, stream: str, manifest: Manifest) -> None:
        """A bare ``dcp.load`` read a checkpoint.

        It counts as what training goes on from until the stream is first saved or loaded by
        ``engine.load``; later ones do not, as they may be for evaluation.
        """
        if stream not in self._streams:
            self._read[stream] = manifest

    # --- saving ----------------------------------------------------------------------------------

    def check_may_save(self, stream: str) -> None:
        """Whether a save may begin; opens the attempt at the first one.

        Raises:
            UsageError: The stream holds checkpoints, and this process has loaded none of them.
            TierUnavailableError: A tier cannot say whether it holds checkpoints of the stream.
            StaleAttemptError: A newer start of this run has taken over.
        """
        known = self._streams.get(stream)
        if known is None:
            self._take_up(stream)
        elif known.in_doubt is not None:
            self._settle(known)
        if self._attempt is None:
            self._open_attempt()

    def _take_up(self, stream: str) -> None:
        read = self._read.get(stream)
        if read is not None:
            self.restored(stream, read, ())
            return
        plan = self.recovery_plan(stream)
        held = len(plan.candidates) + len(plan.refused)
        if held:
            raise UsageError(
                f"the stream {stream!r} of this namespace holds {held} checkpoint(s) already, and "
                "this process has loaded none: call engine.load(state) before the first save, or "
                "choose another namespace"
            )
        if plan.incomplete:
            raise TierUnavailableError(
                "whether this namespace holds checkpoints is not known, as not every tier answers: "
                f"{'; '.join(plan.incomplete)}; repair it, or call engine.load(state, "
                "fresh_start=True) to begin anew",
                outcome="not_applied",
            )
        self._streams[stream] = _Stream(head=None)

    def _settle(self, known: _Stream) -> None:
        manifest = known.in_doubt
        assert manifest is not None
        try:
            exists = self._client.progress(manifest.save_id).levels.get("memory") == "done"
        except NotFoundError:
            exists = False
        known.in_doubt = None
        if exists:
            self._went_on(known, manifest)

    def begin_save(self, stream: str, step: int, now_s: float) -> SavePlace:
        """The identity of a save. Its number is used up even if the save then fails."""
        known = self._streams[stream]
        attempt = self._attempt
        assert attempt is not None
        seq = known.next_seq
        known.next_seq += 1
        return SavePlace(
            save_id=secrets.token_hex(16),
            attempt=AttemptId(attempt.number, attempt.id),
            seq=seq,
            parent=known.head,
            lineage=known.lineage,
            tiers=due_tiers(self._tiers, step, known.spilled, now_s),
        )

    def saved(self, manifest: Manifest) -> None:
        """The commit succeeded."""
        self._went_on(self._streams[manifest.stream], manifest)

    def save_unknown(self, manifest: Manifest) -> None:
        """The commit's outcome is not known; the next save asks."""
        self._streams[manifest.stream].in_doubt = manifest
        self.plans_sent = set()

    def _went_on(self, known: _Stream, manifest: Manifest) -> None:
        known.head = manifest.save_id
        for tier in manifest.tiers:
            known.spilled[tier] = LastSpill(step=manifest.step, at_s=manifest.created_at_s)

    def _open_attempt(self) -> None:
        bases = tuple(
            BaseSpec(stream=stream, save_id=known.head) for stream, known in self._streams.items()
        )
        record = decode_attempt(self._client.open_attempt(secrets.token_hex(16), bases))
        lineages = {base.stream: base.lineage for base in record.bases}
        for stream, known in self._streams.items():
            known.lineage = lineages.get(stream, ())
            known.next_seq = 0
        self._attempt = record


def read_plan(
    client: AgentClient,
    stream: str,
    *,
    step: int | None = None,
    save_id: str | None = None,
    exclude: frozenset[str] = frozenset(),
) -> RecoveryPlan:
    """Ask the agent what it holds, and plan the recovery from that."""
    plan = plan_recovery(
        [read_holdings(client)], stream=stream, step=step, save_id=save_id, exclude=exclude
    )
    for warning in plan.warnings:
        log.warning("stream %s: %s", stream, warning)
    return plan


def read_holdings(client: AgentClient) -> Holdings:
    """What the agent holds of its namespace. Raises AgentError, RemoteProtocolError."""
    data = client.holdings()
    try:
        return decode_holdings(data)
    except (ValueError, msgspec.MsgspecError) as error:
        raise RemoteProtocolError(f"the agent's holdings are malformed: {error}") from error


def _spilled(manifests: Iterable[Manifest], up_to_step: int) -> dict[str, LastSpill]:
    found: dict[str, LastSpill] = {}
    for manifest in sorted(manifests, key=lambda m: (m.attempt.number, m.seq)):
        if manifest.step <= up_to_step:
            for tier in manifest.tiers:
                found[tier] = LastSpill(step=manifest.step, at_s=manifest.created_at_s)
    return found
