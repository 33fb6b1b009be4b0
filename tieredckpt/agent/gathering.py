"""Saves without collectives: each rank hands in its part, the agent commits when it has them all.

No rank knows the others' parts, so the agent makes the plan and the manifest of them. A gathering
is open from the first part until the last one came, a rank failed or gave up, or a process that
had contributed ended. A rank stays inside its save for as long as its part lies in an open
gathering, so parts of two passes over the same step never meet. Nothing here is on disk: an agent
that starts anew knows none, and ranks that still wait contribute again.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from tieredckpt.errors import (
    AgentError,
    CapacityError,
    RemoteProtocolError,
    TieredCkptError,
    TierUnavailableError,
    UsageError,
)
from tieredckpt.format.manifest import Manifest, SegmentRef, decode_manifest, encode_manifest
from tieredckpt.format.plan import Plan, decode_plan, encode_plan, plan_id
from tieredckpt.format.plan_merge import merge_plans
from tieredckpt.transport import messages as m
from tieredckpt.transport.replies import describe_error

OPEN_MAX = 64
"""Open gatherings of one namespace: one per stream is what a job that works has."""
KEPT_MAX = 256
"""Gatherings remembered, so that each rank hears of the outcome; the oldest go first."""
MISSING_SHOWN = 16
NAMES_SHOWN = 100
RANKS_SHOWN = 16
PLANS_BYTES_MAX = 1 << 30
"""Plans of the parts of all open gatherings of a namespace."""
MERGED_MAX = 16
MERGED_BYTES_MAX = 64 << 20
"""Merged plans remembered, so that an unchanged structure is merged once per stream."""

log = logging.getLogger(__name__)

_Key = tuple[str, str, int]
Commit = Callable[[m.Commit], m.Committed]


@dataclass(slots=True)
class _Gathering:
    """One save. Guarded by the namespace's lock."""

    key: m.GatheringKey
    step: int
    world_size: int
    group: str
    """Digest of the ranks that it is of."""
    parts: dict[int, m.Contribute] = field(default_factory=dict)
    members: dict[int, tuple[str, str | None]] = field(default_factory=dict)
    """By rank, the session and the segment that it came with; stays when it is committed."""
    state: Literal["open", "committing", "committed", "failed"] = "open"
    save_id: str | None = None
    differing: dict[str, list[list[int]]] = field(default_factory=dict)
    error: m.ErrorReply | None = None

    def fail(self, error: TieredCkptError) -> None:
        """It never becomes a checkpoint; its segments are free again."""
        self.state, self.error = "failed", describe_error(error)
        self.parts.clear()

    def outcome(self) -> m.Gathered:
        if self.state == "committed":
            return m.Gathered(state="committed", save_id=self.save_id, differing=self.differing)
        if self.state == "failed":
            return m.Gathered(state="failed", error=self.error)
        missing: list[int] = []
        for rank in range(self.world_size):
            if rank not in self.parts and len(missing) < MISSING_SHOWN:
                missing.append(rank)
        return m.Gathered(state="open", missing=tuple(missing))


class Gatherings:
    """Those of one namespace. Thread-safe.

    Args:
        lock: The node's lock; never held while plans are merged.
        host_id: This host.
        manifests: What is committed in memory.
        commit: :meth:`tieredckpt.agent.namespace.Namespace.commit`.
    """

    def __init__(
        self,
        lock: threading.RLock,
        host_id: str,
        manifests: Callable[[], tuple[Manifest, ...]],
        commit: Commit,
    ) -> None:
        self._lock = lock
        self._host_id = host_id
        self._manifests = manifests
        self._commit = commit
        self._known: dict[_Key, _Gathering] = {}
        self._merged: dict[tuple[str, ...], tuple[str, bytes]] = {}

    # --- what ranks ask ---------------------------------------------------------------------------

    def contribute(self, request: m.Contribute) -> m.Gathered:
        """See :class:`tieredckpt.transport.messages.Contribute`."""
        if request.rank >= request.world_size:
            raise RemoteProtocolError(f"rank {request.rank} of {request.world_size}")
        if request.error is None and (request.draft is not None) != (request.rank == 0):
            raise RemoteProtocolError("rank 0, and no other, brings the draft of the manifest")
        with self._lock:
            done = self._committed_with(request)
            if done is not None:
                return m.Gathered(state="committed", save_id=done)
            found = self._find(request)
            if found.state != "open" and found.group != request.members:
                raise _two_groups(request.key.stream)
            if found.state == "committed" and found.members.get(request.rank) != _member(request):
                raise _two_processes(request.rank, request.key.stream)
            if found.state != "open":
                return found.outcome()
            if not self._take(found, request) or len(found.parts) < found.world_size:
                return found.outcome()
            found.state = "committing"
            parts = [found.parts[rank] for rank in range(found.world_size)]
        save_id = None
        error: TieredCkptError | None = AgentError(
            "the agent failed while it committed (see its log)", outcome="unknown"
        )
        try:
            found.differing = _differing(parts)
            save_id = self._commit_parts(parts)
            error = None
        except TieredCkptError as failed:
            error = failed
        finally:
            with self._lock:
                if error is not None:
                    found.fail(error)
                else:
                    found.state, found.save_id = "committed", save_id
                    found.parts.clear()
                    self._supersede(found)
        if error is not None:
            log.warning("step %d of %s was not committed: %s", found.step, found.key.stream, error)
        return found.outcome()

    def ask(self, request: m.AskGathering) -> m.Gathered:
        """See :class:`tieredckpt.transport.messages.AskGathering`."""
        with self._lock:
            found = self._known.get(_key(request.key))
            if found is None:
                return m.Gathered(state="unknown")
            lost = request.rank is not None and request.rank not in found.parts
            if lost and found.state == "open" and request.give_up is None:
                return m.Gathered(state="unknown")  # an agent before this one had that part
            if request.give_up is not None and found.state == "open":
                found.state, found.error = "failed", request.give_up
                found.parts.clear()
            return found.outcome()

    # --- what the node asks -----------------------------------------------------------------------

    def segments(self) -> set[str]:
        """Segments that an open gathering needs. The caller holds the lock."""
        return {
            each.part.segment_id
            for found in self._known.values()
            for each in found.parts.values()
            if each.part is not None
        }

    def num_open(self) -> int:
        """Gatherings that wait for a part. The caller holds the lock."""
        return sum(found.state == "open" for found in self._known.values())

    def drop_session(self, session_id: str) -> None:
        """A process ended: what it contributed to cannot become a checkpoint any more.

        It could, but nobody would be there to say that the ranks went on from it.
        """
        with self._lock:
            for found in self._known.values():
                ended = [r for r, each in found.parts.items() if each.session_id == session_id]
                if ended and found.state == "open":
                    found.fail(
                        TierUnavailableError(
                            f"rank {ended[0]}'s process ended before all ranks had sealed step "
                            f"{found.step} of stream {found.key.stream!r}",
                            tier="memory",
                            outcome="not_applied",
                        )
                    )

    # --- inside -----------------------------------------------------------------------------------

    def _committed_with(self, request: m.Contribute) -> str | None:
        """The checkpoint that this very part is in already; an agent that died knew."""
        part = request.part
        for manifest in self._manifests() if part is not None else ():
            if part is not None and any(ref.id == part.segment_id for ref in manifest.segments):
                return manifest.save_id
        return None

    def _find(self, request: m.Contribute) -> _Gathering:
        key = _key(request.key)
        found = self._known.get(key)
        if found is None:
            if self.num_open() >= OPEN_MAX:
                raise UsageError(
                    f"{OPEN_MAX} saves without collectives are waiting for ranks already: call "
                    "dcp.save on all ranks of the group"
                )
            self._forget_oldest()
            found = self._known[key] = _Gathering(
                request.key, request.step, request.world_size, request.members
            )
        return found

    def _forget_oldest(self) -> None:
        ended = [k for k, each in self._known.items() if each.state in ("committed", "failed")]
        for key in ended:
            if len(self._known) < KEPT_MAX:
                return
            del self._known[key]

    def _take(self, found: _Gathering, request: m.Contribute) -> bool:
        """Add a part. If it does not fit the others the gathering fails; then False."""
        stream, rank = request.key.stream, request.rank
        if found.group != request.members:
            found.fail(_two_groups(stream))
            return False
        if (found.step, found.world_size) != (request.step, request.world_size):
            found.fail(
                UsageError(
                    f"the ranks save different things into stream {stream!r}: step {found.step} by "
                    f"{found.world_size} ranks, and rank {rank} step {request.step} by "
                    f"{request.world_size} ranks. Call dcp.save the same number of times on all "
                    "ranks since the last engine.load, and give each group its own stream"
                )
            )
            return False
        if request.error is not None:
            found.state, found.error = "failed", request.error
            found.parts.clear()
            return False
        before = found.parts.get(rank)
        if before is not None and before.session_id != request.session_id:
            found.fail(_two_processes(rank, stream))
            return False
        # A rank that saves anew has left its earlier saves.
        for other in self._known.values():
            same = (other.key.stream, other.key.epoch) == (stream, request.key.epoch)
            if same and other is not found and other.state == "open" and rank in other.parts:
                other.fail(_superseded(other, f"rank {rank} has gone on"))
        held = sum(len(p.plan) for each in self._known.values() for p in each.parts.values())
        if held + len(request.plan) > PLANS_BYTES_MAX:
            found.fail(
                CapacityError(
                    f"the plans of the ranks are over {PLANS_BYTES_MAX >> 20} MiB together: save "
                    "with collectives, where each piece is planned once",
                    needed_bytes=held + len(request.plan),
                    available_bytes=PLANS_BYTES_MAX,
                    limit="plans of one save",
                )
            )
            return False
        found.parts[rank] = request
        found.members[rank] = _member(request)
        return True

    def _supersede(self, newest: _Gathering) -> None:
        for other in self._known.values():
            if other.key.stream == newest.key.stream and other.state == "open":
                other.fail(_superseded(other, f"step {newest.step} was committed meanwhile"))

    def _commit_parts(self, parts: list[m.Contribute]) -> str:
        """Commit the checkpoint of all parts. No lock is held."""
        draft = decode_manifest(parts[0].draft or b"")
        first = parts[0]
        if (draft.stream, draft.step, draft.world_size) != (
            first.key.stream,
            first.step,
            first.world_size,
        ):
            raise RemoteProtocolError("the draft of the manifest is of another save")
        if len({each.run for each in parts}) > 1:
            raise UsageError(
                "the ranks have opened their engines apart: call Engine.open on all ranks "
                "together, after init_process_group"
            )
        plan, data = self._plan_of(parts)
        refs = tuple(
            SegmentRef(each.part.segment_id, each.part.size, each.part.root, self._host_id)
            for each in parts
            if each.part is not None
        )
        try:
            manifest = encode_manifest(msgspec.structs.replace(draft, plan=plan, segments=refs))
        except ValueError as error:
            raise RemoteProtocolError(f"the parts make no manifest: {error}") from error
        request = m.Commit(session_id=first.session_id, run=first.run, manifest=manifest, plan=data)
        if self._commit(request).need_plan:
            raise AgentError("the plan that was just stored is gone", outcome="not_applied")
        return draft.save_id

    def _plan_of(self, parts: list[m.Contribute]) -> tuple[str, bytes]:
        ids = tuple(plan_id(each.plan) for each in parts)
        known = self._merged.get(ids)
        if known is None:
            merged = merge_plans([_part_plan(each) for each in parts])
            data = encode_plan(merged)
            known = plan_id(data), data
        with self._lock:
            self._merged.pop(ids, None)
            self._merged[ids] = known
            while (
                len(self._merged) > MERGED_MAX
                or sum(len(data) for _, data in self._merged.values()) > MERGED_BYTES_MAX
            ):
                del self._merged[next(iter(self._merged))]
        return known


def _part_plan(part: m.Contribute) -> Plan:
    plan = decode_plan(part.plan)
    if len(plan.structures) != (part.part is not None):
        raise RemoteProtocolError(f"rank {part.rank}'s plan is not of its one segment")
    return plan


def _differing(parts: list[m.Contribute]) -> dict[str, list[list[int]]]:
    """Names under which ranks have different values, the first of them.

    Raises:
        UsageError: One of them must be the same on all.
    """
    groups: dict[str, dict[bytes, list[int]]] = {}
    strict: set[str] = set()
    for part in parts:
        for value in part.values:
            ranks = groups.setdefault(value.name, {}).setdefault(value.digest, [])
            ranks.append(part.rank)
            if value.must_agree:
                strict.add(value.name)
    found = {name: list(each.values()) for name, each in groups.items() if len(each) > 1}
    for name in found:
        if name in strict:
            ranks = [each[0] for each in found[name]]
            raise UsageError(
                f"ranks with one per-rank coordinate have different values: {name[:200]!r} (rank "
                f"{ranks[0]} differs from rank {ranks[1]}); give per_rank a coordinate= that tells "
                "them apart",
                keys=[name[:200]],
            )
    return {
        name: [ranks[:RANKS_SHOWN] for ranks in found[name][:RANKS_SHOWN]]
        for name in list(found)[:NAMES_SHOWN]
    }


def _key(key: m.GatheringKey) -> _Key:
    return key.stream, key.epoch, key.ordinal


def _member(request: m.Contribute) -> tuple[str, str | None]:
    part = request.part
    return request.session_id, part.segment_id if part is not None else None


def _two_processes(rank: int, stream: str) -> UsageError:
    return UsageError(
        f"two processes save as rank {rank} into stream {stream!r}: give each group its own "
        "stream, and no_dist=True only to a group of one (engine.writer(step, group=[rank]))"
    )


def _two_groups(stream: str) -> UsageError:
    return UsageError(
        f"two groups of ranks save into stream {stream!r} at once: give each its own stream"
    )


def _superseded(found: _Gathering, why: str) -> TierUnavailableError:
    return TierUnavailableError(
        f"step {found.step} of stream {found.key.stream!r} never came together: {why}",
        tier="memory",
        outcome="not_applied",
    )
