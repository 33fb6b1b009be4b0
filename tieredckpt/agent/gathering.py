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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from tieredckpt import failpoints
from tieredckpt.agent.gathering_rules import (
    GatheredSave,
    GatheredSaves,
    committed_as,
    committed_with,
    differing_values,
    host_lost,
    member,
    superseded,
    two_groups,
    two_processes,
)
from tieredckpt.errors import AgentError, RemoteProtocolError, TieredCkptError, UsageError
from tieredckpt.format.manifest import Manifest, SegmentRef, decode_manifest, encode_manifest
from tieredckpt.format.plan_record import encoded_plan_id
from tieredckpt.transport import messages as m
from tieredckpt.transport.gathering_messages import HandOver, RankSegment, Taken
from tieredckpt.transport.replies import describe_error

MERGED_MAX = 16
MERGED_BYTES_MAX = 64 << 20
"""Merged plans remembered, so that an unchanged structure is merged once per stream."""
log = logging.getLogger(__name__)

Commit = Callable[[m.Commit], m.Committed]
Parts = Mapping[str, tuple[RankSegment, ...]]
"""By host, what its ranks have contributed."""
Confirm = Callable[[m.GatheringKey, Parts], frozenset[str]]
"""Whether other hosts stand by their parts: those that do not have them, or do not answer. Raises
if one says no."""


@dataclass(slots=True, kw_only=True)
class _Gathering(GatheredSave):
    """A save that this host decides on."""

    hosts: dict[int, str] = field(default_factory=dict)
    """By rank, the host that its part lies on."""
    expected: frozenset[str] = frozenset()
    """All hosts of the group, as far as rank 0 has said."""
    ended: m.ErrorReply | None = None
    """Why it fails, should it turn out that it cannot be committed just now."""

    def end(self, error: m.ErrorReply) -> None:
        """Somebody has left it: it fails, unless it is committed just now."""
        GatheredSave.end(self, error)
        if self.state == "committing":
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


class MergedPlans:
    """The plans of one save's parts become the checkpoint's plan, once per structure.

    Of one namespace. Thread-safe; its lock is never held while plans are merged.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._merged: dict[tuple[str, ...], tuple[str, bytes]] = {}

    def merge(self, parts: Sequence[m.Contribute]) -> tuple[str, bytes]:
        """Id and encoded plan of all parts.

        Raises:
            UsageError: What the ranks have does not fit together.
            RemoteProtocolError, IntegrityError: A plan is none.
        """
        # What decodes plans needs numpy, 8 MiB that most agents never use: it is imported at the
        # first save without collectives.
        from tieredckpt.format.plan import decode_plan, encode_plan
        from tieredckpt.format.plan_merge import merge_plans

        ids = tuple(encoded_plan_id(each.plan) for each in parts)
        known = self._merged.get(ids)
        if known is None:
            plans = [decode_plan(each.plan) for each in parts]
            for part, plan in zip(parts, plans, strict=True):
                if len(plan.structures) != (part.part is not None):
                    raise RemoteProtocolError(f"rank {part.rank}'s plan is not of its one segment")
            data = encode_plan(merge_plans(plans))
            known = encoded_plan_id(data), data
        with self._lock:
            self._merged.pop(ids, None)
            self._merged[ids] = known
            while (
                len(self._merged) > MERGED_MAX
                or sum(len(data) for _, data in self._merged.values()) > MERGED_BYTES_MAX
            ):
                del self._merged[next(iter(self._merged))]
        return known


class Gatherings(GatheredSaves[_Gathering]):
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
        super().__init__(lock, manifests)
        self._confirm = confirm
        self._lost = lost
        self._host_id = host_id
        self._commit = commit
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
            found = self._known.get(request.key) or self._begin(
                request.key, request.step, request.world_size, request.members
            )
            if found.state != "open" and found.group != request.members:
                raise two_groups(request.key.stream)
            if found.state == "committed" and found.members.get(request.rank) != member(request):
                raise two_processes(request.rank, request.key.stream)
            if found.state != "open":
                return found.outcome()
            taken = self._place(found, request, host or self._host_id)
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
                    found.fail(describe_error(error))
                elif save_id is None:
                    found.reopen(missing)
                else:
                    found.commit(save_id)
                    self._supersede(found)
        if error is not None:
            log.warning("step %d of %s was not committed: %s", found.step, found.key.stream, error)
        elif missing:
            log.warning(
                "step %d of %s is not committed yet: %s did not answer for the parts there",
                found.step, found.key.stream, ", ".join(sorted(missing)),
            )  # fmt: skip

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
            found = self._known.get(request.key)
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

    def drop_host(self, host: str) -> None:
        """A host of the job does not answer any more: what has ranks there is not waited for."""
        with self._lock:
            for found in self._known.values():
                if host in found.expected or host in {found.hosts[rank] for rank in found.parts}:
                    found.end(describe_error(host_lost(host, found.step, found.key.stream)))

    # --- inside -----------------------------------------------------------------------------------

    def _begin(self, key: m.GatheringKey, step: int, world_size: int, group: str) -> _Gathering:
        return self._keep(_Gathering(key, step, world_size, group))

    def _place(self, found: _Gathering, request: m.Contribute, host: str) -> bool:
        """Add a part that lies on ``host``; False: the save failed."""
        if not self._take(found, request):
            return False
        found.hosts[request.rank] = host
        if request.rank == 0:
            found.expected = frozenset(request.hosts)
            for gone in sorted(self._lost() & found.expected)[:1]:
                found.fail(describe_error(host_lost(gone, found.step, request.key.stream)))
                return False
        return True

    def _supersede(self, newest: _Gathering) -> None:
        for other in self._known.values():
            if other.key.stream == newest.key.stream and other.state == "open":
                why = f"step {newest.step} was committed meanwhile"
                other.fail(describe_error(superseded(other.step, other.key.stream, why)))

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
