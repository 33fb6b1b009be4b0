"""Saves without collectives: each rank hands in its part, the agent commits when it has them all.

No rank knows the others' parts, so the agent makes the plan and the manifest of them. A gathering
is open from the first part until the last one came, a rank failed or gave up, or a process that
had contributed ended. A rank stays inside its save for as long as its part lies in an open
gathering, so parts of two passes over the same step never meet. Nothing here is on disk: an agent
that starts anew knows none, and ranks that still wait contribute again.

Of a group on several hosts one agent decides, that of its rank 0; the others hand over what they
have (:mod:`.gathering_elsewhere`) and are asked once more, when all is together, whether they stand
by it. Parts of a host that does not answer then, or has them no more, are missing again.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from tieredckpt import failpoints
from tieredckpt.agent.gathering_plans import MergedPlans
from tieredckpt.agent.gathering_rules import (
    Key,
    committed_as,
    committed_with,
    differing_values,
    host_lost,
    key_of,
    member,
    process_ended,
    superseded,
    too_many_plans,
    two_groups,
    two_processes,
    why_not,
)
from tieredckpt.errors import (
    AgentError,
    RemoteProtocolError,
    TieredCkptError,
    UsageError,
)
from tieredckpt.format.manifest import Manifest, SegmentRef, decode_manifest, encode_manifest
from tieredckpt.transport import messages as m
from tieredckpt.transport.gathering_messages import HandOver, RankSegment, Taken
from tieredckpt.transport.replies import describe_error

OPEN_MAX = 64
"""Open gatherings of one namespace: one per stream is what a job that works has."""
KEPT_MAX = 256
"""Gatherings remembered, so that each rank hears of the outcome; the oldest go first."""
MISSING_SHOWN = 16
PLANS_BYTES_MAX = 1 << 30
"""Plans of the parts of all open gatherings of a namespace."""
log = logging.getLogger(__name__)

Commit = Callable[[m.Commit], m.Committed]
Parts = Mapping[str, tuple[RankSegment, ...]]
"""By host, what its ranks have contributed."""
Confirm = Callable[[m.GatheringKey, Parts], frozenset[str]]
"""Whether other hosts stand by their parts: those that do not have them, or do not answer. Raises
if one says no."""


@dataclass(slots=True)
class _Gathering:
    """One save. Guarded by the namespace's lock."""

    key: m.GatheringKey
    step: int
    world_size: int
    group: str
    """Digest of the ranks that it is of."""
    parts: dict[int, m.Contribute] = field(default_factory=dict)
    hosts: dict[int, str] = field(default_factory=dict)
    """By rank, the host that its part lies on."""
    expected: frozenset[str] = frozenset()
    """All hosts of the group, as far as rank 0 has said."""
    members: dict[int, tuple[str, str | None]] = field(default_factory=dict)
    """By rank, the session and the segment that it came with; stays when it is committed."""
    state: Literal["open", "committing", "committed", "failed"] = "open"
    save_id: str | None = None
    differing: dict[str, list[list[int]]] = field(default_factory=dict)
    error: m.ErrorReply | None = None
    ended: m.ErrorReply | None = None
    """Why it fails, should it turn out that it cannot be committed just now."""

    def fail(self, error: TieredCkptError | m.ErrorReply) -> None:
        """It never becomes a checkpoint; its segments are free again."""
        self.state = "failed"
        self.error = describe_error(error) if isinstance(error, TieredCkptError) else error
        self.parts.clear()

    def end(self, error: m.ErrorReply) -> None:
        """Somebody has left it: it fails, unless it is committed just now."""
        if self.state == "open":
            self.fail(error)
        elif self.state == "committing":
            self.ended = self.ended or error

    def reopen(self, missing: Iterable[str]) -> None:
        """It is not committed now: the parts of these hosts have to come again."""
        self.state = "open"
        for rank in [each for each, host in self.hosts.items() if host in missing]:
            self.parts.pop(rank, None)
        if self.ended is not None:
            self.fail(self.ended)

    def contributed(self, host: str) -> tuple[RankSegment, ...]:
        """What the ranks of ``host`` have contributed."""
        return tuple(
            RankSegment(rank=rank, segment_id=self.members[rank][1])
            for rank in sorted(self.parts)
            if self.hosts[rank] == host
        )

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
        confirm: Asks other hosts; never called for ranks that are all on this one.
        lost: Hosts that do not answer any more.
    """

    def __init__(
        self,
        lock: threading.RLock,
        host_id: str,
        manifests: Callable[[], tuple[Manifest, ...]],
        commit: Commit,
        confirm: Confirm = lambda key, parts: frozenset(),
        lost: Callable[[], frozenset[str]] = frozenset,
    ) -> None:
        self._confirm = confirm
        self._lost = lost
        self._lock = lock
        self._host_id = host_id
        self._manifests = manifests
        self._commit = commit
        self._known: dict[Key, _Gathering] = {}
        self._plans = MergedPlans()

    # --- what ranks ask ---------------------------------------------------------------------------

    def contribute(self, request: m.Contribute, host: str | None = None) -> m.Gathered:
        """See :class:`tieredckpt.transport.messages.Contribute`; ``host``: whose rank it is of."""
        if request.rank >= request.world_size:
            raise RemoteProtocolError(f"rank {request.rank} of {request.world_size}")
        if request.error is None and (request.draft is not None) != (request.rank == 0):
            raise RemoteProtocolError("rank 0, and no other, brings the draft of the manifest")
        with self._lock:
            done = committed_with(self._manifests(), request)
            if done is not None:
                return m.Gathered(state="committed", save_id=done)
            found = self._find(request)
            if found.state != "open" and found.group != request.members:
                raise two_groups(request.key.stream)
            if found.state == "committed" and found.members.get(request.rank) != member(request):
                raise two_processes(request.rank, request.key.stream)
            if found.state != "open":
                return found.outcome()
            taken = self._take(found, request, host or self._host_id)
            if not taken or len(found.parts) < found.world_size:
                return found.outcome()
            found.state = "committing"
            parts = [found.parts[rank] for rank in range(found.world_size)]
            places = [found.hosts[rank] for rank in range(found.world_size)]
            elsewhere = {h: found.contributed(h) for h in set(places) - {self._host_id}}
        self._decide(found, parts, places, elsewhere)
        return found.outcome()

    def _decide(
        self, found: _Gathering, parts: list[m.Contribute], places: list[str], elsewhere: Parts
    ) -> None:
        """Commit what is together; no lock is held."""
        save_id = None
        error: TieredCkptError | None = AgentError(
            "the agent failed while it committed (see its log)", outcome="unknown"
        )
        missing: frozenset[str] = frozenset()
        try:
            found.differing = differing_values(parts)
            commit = self._commit_of(parts, places)
            if elsewhere:
                failpoints.reach("agent.gather.before_confirm")
                missing = self._confirm(found.key, elsewhere)
                failpoints.reach("agent.gather.after_confirm")
            if not missing:
                if self._commit(commit).need_plan:
                    raise AgentError("the plan that was just stored is gone", outcome="not_applied")
                save_id = decode_manifest(commit.manifest).save_id
            error = None
        except TieredCkptError as failed:
            error = failed
        finally:
            with self._lock:
                if error is not None:
                    found.fail(error)
                elif save_id is None:
                    found.reopen(missing)
                else:
                    found.state, found.save_id = "committed", save_id
                    found.parts.clear()
                    self._supersede(found)
        if error is not None:
            log.warning("step %d of %s was not committed: %s", found.step, found.key.stream, error)
        elif missing:
            log.warning(
                "step %d of %s is not committed yet: %s did not answer for the parts there",
                found.step, found.key.stream, ", ".join(sorted(missing)),
            )  # fmt: skip

    def ask(self, request: m.AskGathering) -> m.Gathered:
        """See :class:`tieredckpt.transport.messages.AskGathering`."""
        with self._lock:
            found = self._known.get(key_of(request.key))
            if found is None:
                return m.Gathered(state="unknown")
            lost = request.rank is not None and request.rank not in found.parts
            if lost and found.state == "open" and request.give_up is None:
                return m.Gathered(state="unknown")  # an agent before this one had that part
            if request.give_up is not None:
                found.end(request.give_up)
            return found.outcome()

    def take_over(self, request: HandOver) -> Taken:
        """See :class:`tieredckpt.transport.gathering_messages.HandOver`.

        Raises:
            RemoteProtocolError: It is malformed.
            UsageError: Its parts belong to no save of this group.
        """
        header = (request.key, request.step, request.world_size, request.members)
        for part in request.parts:
            if (part.key, part.step, part.world_size, part.members) != header or part.rank == 0:
                raise RemoteProtocolError(f"host {request.host} hands over parts of another save")
            self.contribute(part, request.host)
        with self._lock:
            found = self._known.get(key_of(request.key))
            if (save_id := committed_as(self._manifests(), request.have)) is not None:
                return Taken(outcome=m.Gathered(state="committed", save_id=save_id), wanted=())
            if found is None and request.give_up is not None:
                found = self._begin(*header)
            if found is None:
                wanted = [each.rank for each in request.have]
                return Taken(outcome=m.Gathered(state="unknown"), wanted=tuple(wanted))
            if found.group != request.members:
                raise two_groups(request.key.stream)
            if request.give_up is not None:
                found.end(request.give_up)
            for each in request.have:
                mine = found.members.get(each.rank)
                if found.state == "committed" and (mine is None or mine[1] != each.segment_id):
                    raise two_processes(each.rank, request.key.stream)
            known = frozenset(found.contributed(request.host)) if found.state == "open" else None
            wanted = [x.rank for x in request.have if known is not None and x not in known]
            return Taken(outcome=found.outcome(), wanted=tuple(wanted))

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
                if ended:
                    found.end(describe_error(process_ended(ended[0], found.step, found.key.stream)))

    def drop_host(self, host: str) -> None:
        """A host of the job does not answer any more: what has ranks there is not waited for."""
        with self._lock:
            for found in self._known.values():
                if host in found.expected or host in {found.hosts[rank] for rank in found.parts}:
                    found.end(describe_error(host_lost(host, found.step, found.key.stream)))

    # --- inside -----------------------------------------------------------------------------------

    def _find(self, request: m.Contribute) -> _Gathering:
        found = self._known.get(key_of(request.key))
        if found is not None:
            return found
        return self._begin(request.key, request.step, request.world_size, request.members)

    def _begin(self, key: m.GatheringKey, step: int, world_size: int, group: str) -> _Gathering:
        if self.num_open() >= OPEN_MAX:
            raise UsageError(
                f"{OPEN_MAX} saves without collectives are waiting for ranks already: call "
                "dcp.save on all ranks of the group"
            )
        self._forget_oldest()
        found = self._known[key_of(key)] = _Gathering(key, step, world_size, group)
        return found

    def _forget_oldest(self) -> None:
        ended = [k for k, each in self._known.items() if each.state in ("committed", "failed")]
        for key in ended:
            if len(self._known) < KEPT_MAX:
                return
            del self._known[key]

    def _take(self, found: _Gathering, request: m.Contribute, host: str) -> bool:
        """Add a part. If it does not fit the others the gathering fails; then False."""
        stream, rank = request.key.stream, request.rank
        before = found.parts.get(rank)
        wrong = why_not(found, request)
        if wrong is None and before is not None and before.session_id != request.session_id:
            wrong = describe_error(two_processes(rank, stream))
        if wrong is not None:
            found.fail(wrong)
            return False
        # A rank that saves anew has left its earlier saves.
        for other in self._known.values():
            same = (other.key.stream, other.key.epoch) == (stream, request.key.epoch)
            if same and other is not found and other.state == "open" and rank in other.parts:
                other.fail(superseded(other.step, stream, f"rank {rank} has gone on"))
        held = sum(len(p.plan) for each in self._known.values() for p in each.parts.values())
        if held + len(request.plan) > PLANS_BYTES_MAX:
            found.fail(too_many_plans(held + len(request.plan), PLANS_BYTES_MAX))
            return False
        found.parts[rank], found.hosts[rank] = request, host
        found.members[rank] = member(request)
        if rank == 0:
            found.expected = frozenset(request.hosts)
            for gone in sorted(self._lost() & found.expected)[:1]:
                found.fail(host_lost(gone, found.step, stream))
                return False
        return True

    def _supersede(self, newest: _Gathering) -> None:
        for other in self._known.values():
            if other.key.stream == newest.key.stream and other.state == "open":
                why = f"step {newest.step} was committed meanwhile"
                other.fail(superseded(other.step, other.key.stream, why))

    def _commit_of(self, parts: list[m.Contribute], places: list[str]) -> m.Commit:
        """The commit of the checkpoint of all parts. No lock is held."""
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
        plan, data = self._plans.merge(parts)
        refs = tuple(
            SegmentRef(each.part.segment_id, each.part.size, each.part.root, host)
            for each, host in zip(parts, places, strict=True)
            if each.part is not None
        )
        writers = {ref.host for ref in refs}
        made = msgspec.structs.replace(
            draft,
            plan=plan,
            segments=refs,
            replicas=tuple(each for each in draft.replicas if each.host in writers),
        )
        try:
            manifest = encode_manifest(made)
        except ValueError as error:
            raise RemoteProtocolError(f"the parts make no manifest: {error}") from error
        return m.Commit(
            session_id=first.session_id, run=first.run, manifest=manifest, plan=data,
            attempt=first.attempt,
        )  # fmt: skip
