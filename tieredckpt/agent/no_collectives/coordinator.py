"""Saves without collectives: each rank hands in its part, the agent commits when it has them all.

No rank knows the others' parts, so the agent makes the plan and the manifest of them. A gathering
is open from the first part until the last one came, a rank failed or gave up, or a process that
had contributed ended. A rank stays inside its save for as long as its part lies in an open
gathering, so parts of two passes over the same step never meet. Nothing here is on disk: an agent
that starts anew knows none, and ranks that still wait contribute again.

Of a group on several hosts one agent decides, that of its rank 0; the others hand over what they
have (:mod:`.participant`) and are asked once more, when all is together, whether they stand
by it. Parts of a host that does not answer then, or has them no more, are missing again. What
both sides do alike is here: which parts fit together, what becomes of a save whose ranks fail, and
what is said of it.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, Literal, TypeVar

import msgspec

from tieredckpt import failpoints
from tieredckpt.errors import (
    AgentError,
    CapacityError,
    RemoteProtocolError,
    TieredCkptError,
    TierUnavailableError,
    UsageError,
)
from tieredckpt.format.manifest import Manifest, SegmentRef, decode_manifest, encode_manifest
from tieredckpt.format.plan_record import encoded_plan_id
from tieredckpt.rpc.messages import agent as m
from tieredckpt.rpc.messages.base import describe_error
from tieredckpt.rpc.messages.no_collectives import HandOver, RankSegment, Taken

NAMES_SHOWN = 100
RANKS_SHOWN = 16
MISSING_SHOWN = 16

OPEN_MAX = 64
"""Open saves of one namespace: one per stream is what a job that works has."""
KEPT_MAX = 256
"""Saves remembered, so that each rank hears of the outcome; the oldest go first."""
PLANS_BYTES_MAX = 1 << 30
"""Plans of the parts of all open saves of a namespace."""
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


@dataclass(slots=True)
class GatheredSave:
    """One save, as far as one host knows it. Guarded by the namespace's lock."""

    key: m.GatheringKey
    step: int
    world_size: int
    group: str
    """Digest of the ranks that it is of."""
    parts: dict[int, m.Contribute] = field(default_factory=dict)
    members: dict[int, tuple[str, str | None]] = field(default_factory=dict)
    """By rank, the session and the segment that it came with; stays when it is over."""
    state: Literal["open", "committing", "committed", "failed"] = "open"
    save_id: str | None = None
    differing: dict[str, list[list[int]]] = field(default_factory=dict)
    error: m.ErrorReply | None = None

    def commit(self, save_id: str | None) -> None:
        """It is a checkpoint."""
        self.state, self.save_id = "committed", save_id
        self.parts.clear()

    def fail(self, error: m.ErrorReply) -> None:
        """It never becomes a checkpoint; its segments are free again."""
        self.state, self.error = "failed", error
        self.parts.clear()

    def end(self, error: m.ErrorReply) -> None:
        """Somebody has left it: it fails, if it is open."""
        if self.state == "open":
            self.fail(error)

    def missing_ranks(self) -> tuple[int, ...]:
        """Ranks that have not contributed, the first of them."""
        missing = (rank for rank in range(self.world_size) if rank not in self.parts)
        return tuple(itertools.islice(missing, MISSING_SHOWN))

    def outcome(self) -> m.Gathered:
        """What ranks are told."""
        if self.state == "committed":
            return m.Gathered(state="committed", save_id=self.save_id, differing=self.differing)
        if self.state == "failed":
            return m.Gathered(state="failed", error=self.error)
        return m.Gathered(state="open", missing=self.missing_ranks())


Save = TypeVar("Save", bound=GatheredSave)


class GatheredSaves(Generic[Save]):
    """Those of one namespace that one side knows. Thread-safe.

    Args:
        lock: The node's lock.
        manifests: What is committed in memory.
    """

    def __init__(
        self, lock: threading.RLock, manifests: Callable[[], tuple[Manifest, ...]]
    ) -> None:
        self._lock = lock
        self._manifests = manifests
        self._known: dict[m.GatheringKey, Save] = {}

    def ask(self, request: m.AskGathering) -> m.Gathered:
        """See :class:`tieredckpt.rpc.messages.agent.AskGathering`."""
        with self._lock:
            found = self._known.get(request.key)
            if found is None:
                return m.Gathered(state="unknown")
            lost = request.rank is not None and request.rank not in found.parts
            if lost and found.state == "open" and request.give_up is None:
                return m.Gathered(state="unknown")  # an agent before this one had that part
            if request.give_up is not None:
                found.end(request.give_up)
            return found.outcome()

    def segments(self) -> set[str]:
        """Segments whose save is not decided. The caller holds the lock."""
        return {
            each.part.segment_id
            for found in self._known.values()
            for each in found.parts.values()
            if each.part is not None
        }

    def num_open(self) -> int:
        """Saves that wait for a part, or for the outcome. The caller holds the lock."""
        return sum(found.state == "open" for found in self._known.values())

    def drop_session(self, session_id: str) -> None:
        """A process ended: what it contributed to cannot become a checkpoint any more.

        It could, but nobody would be there to say that the ranks went on from it.
        """
        with self._lock:
            for found in self._known.values():
                ended = [r for r, each in found.parts.items() if each.session_id == session_id]
                if ended:
                    why = not_applied(
                        f"rank {ended[0]}'s process ended before all ranks had sealed step "
                        f"{found.step} of stream {found.key.stream!r}"
                    )
                    self._left(found, ended, describe_error(why))

    def _left(self, found: Save, ranks: Sequence[int], why: m.ErrorReply) -> None:
        """The processes of these ranks have ended. The caller holds the lock."""
        found.end(why)

    def _keep(self, made: Save) -> Save:
        """Remember a new save, in the place of the oldest that is over. The caller holds the lock.

        Raises:
            UsageError: Too many are open.
        """
        if self.num_open() >= OPEN_MAX:
            raise UsageError(
                f"{OPEN_MAX} saves without collectives are waiting for ranks already: call "
                "dcp.save on all ranks of the group"
            )
        for key in [k for k, each in self._known.items() if each.state in ("committed", "failed")]:
            if len(self._known) < KEPT_MAX:
                break
            del self._known[key]
        self._known[made.key] = made
        return made

    def _take(self, found: Save, request: m.Contribute) -> bool:
        """Add a part to an open save. If it does not fit the others the save ends; then False.

        The caller holds the lock.
        """
        stream, rank = request.key.stream, request.rank
        if (wrong := self._why_not(found, request)) is not None:
            found.end(wrong)
            return False
        # A rank that saves anew has left its earlier saves.
        for other in self._known.values():
            same = (other.key.stream, other.key.epoch) == (stream, request.key.epoch)
            if same and other is not found and other.state == "open" and rank in other.parts:
                why = superseded(other.step, stream, f"rank {rank} has started a newer save")
                other.end(describe_error(why))
        held = sum(len(p.plan) for each in self._known.values() for p in each.parts.values())
        if held + len(request.plan) > PLANS_BYTES_MAX:
            too_many = CapacityError(
                f"the plans of the ranks are over {PLANS_BYTES_MAX >> 20} MiB together: save with "
                "collectives, where each piece is planned once",
                needed_bytes=held + len(request.plan),
                available_bytes=PLANS_BYTES_MAX,
                limit="plans of one save",
            )
            found.end(describe_error(too_many))
            return False
        found.parts[rank], found.members[rank] = request, member(request)
        return True

    def _why_not(self, found: Save, request: m.Contribute) -> m.ErrorReply | None:
        """Why a save fails with this part: it is of another save, or its rank has none."""
        stream, rank = request.key.stream, request.rank
        if found.group != request.members:
            return describe_error(two_groups(stream))
        if (found.step, found.world_size) != (request.step, request.world_size):
            return describe_error(
                UsageError(
                    f"the ranks save different things into stream {stream!r}: step {found.step} by "
                    f"{found.world_size} ranks, and rank {rank} step {request.step} by "
                    f"{request.world_size} ranks. Call dcp.save the same number of times on all "
                    "ranks since the last engine.load, and give each group its own stream"
                )
            )
        before = found.parts.get(rank)
        if request.error is None and before is not None and before.session_id != request.session_id:
            return describe_error(two_processes(rank, stream))
        return request.error


@dataclass(slots=True, kw_only=True)
class _Gathering(GatheredSave):
    """A save that this host decides on."""

    hosts: dict[int, str] = field(default_factory=dict)
    """By rank, the host that its part lies on."""
    expected: frozenset[str] = frozenset()
    """All hosts of the group, as far as rank 0 has said."""

    def end(self, error: m.ErrorReply) -> None:
        """Somebody has left it: it fails, unless it is committed just now."""
        GatheredSave.end(self, error)
        if self.state == "committing":
            self.error = self.error or error

    def reopen(self, missing: Iterable[str]) -> None:
        """It is not committed now: the parts of these hosts have to come again."""
        self.state = "open"
        for rank in [each for each, host in self.hosts.items() if host in missing]:
            self.parts.pop(rank, None)
        if self.error is not None:
            self.fail(self.error)

    def contributed(self, host: str) -> tuple[RankSegment, ...]:
        """What the ranks of ``host`` have contributed."""
        return tuple(
            RankSegment(rank=rank, segment_id=self.members[rank][1])
            for rank in sorted(self.parts)
            if self.hosts[rank] == host
        )


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
        self._merged: dict[tuple[str, ...], tuple[str, bytes]] = {}

    # --- what ranks ask ---------------------------------------------------------------------------

    def contribute(self, request: m.Contribute, host: str | None = None) -> m.Gathered:
        """See :class:`tieredckpt.rpc.messages.agent.Contribute`; ``host``: whose rank it is of."""
        if request.rank >= request.world_size:
            raise RemoteProtocolError(f"rank {request.rank} of {request.world_size}")
        if request.error is None and (request.draft is not None) != (request.rank == 0):
            raise RemoteProtocolError("rank 0 alone sends the draft of the manifest")
        with self._lock:
            done = committed_with(self._manifests(), request)
            if done is not None:
                return m.Gathered(state="committed", save_id=done)
            found = self._known.get(request.key) or self._begin(request)
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
                "step %d of %s is not committed yet: no answer about their parts from %s",
                found.step, found.key.stream, ", ".join(sorted(missing)),
            )  # fmt: skip

    def take_over(self, request: HandOver) -> Taken:
        """See :class:`tieredckpt.rpc.messages.no_collectives.HandOver`.

        Raises:
            RemoteProtocolError: It is malformed.
            UsageError: Its parts belong to no save of this group.
        """
        header = (request.key, request.step, request.world_size, request.members)
        for part in request.parts:
            if (part.key, part.step, part.world_size, part.members) != header or part.rank == 0:
                raise RemoteProtocolError(f"host {request.host} forwards parts of another save")
            self.contribute(part, request.host)
        with self._lock:
            found = self._known.get(request.key)
            if (save_id := committed_as(self._manifests(), request.have)) is not None:
                return Taken(outcome=m.Gathered(state="committed", save_id=save_id), wanted=())
            if found is None and request.give_up is not None:
                found = self._begin(request)
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

    def _begin(self, of: m.Contribute | HandOver) -> _Gathering:
        return self._keep(_Gathering(of.key, of.step, of.world_size, of.members))

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
                "the ranks have not opened their engines together: call Engine.open on all ranks "
                "after init_process_group"
            )
        plan, data = self._merge(parts)
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

    def _merge(self, parts: Sequence[m.Contribute]) -> tuple[str, bytes]:
        """Id and encoded plan of all parts, merged once per structure. No lock is held.

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


def member(request: m.Contribute) -> tuple[str, str | None]:
    """Who contributes what: the session and the segment."""
    part = request.part
    return request.session_id, part.segment_id if part is not None else None


def committed_with(manifests: Iterable[Manifest], request: m.Contribute) -> str | None:
    """The checkpoint that this very part is in already; an agent that died knew."""
    return committed_as(manifests, (RankSegment(rank=request.rank, segment_id=member(request)[1]),))


def committed_as(manifests: Iterable[Manifest], have: Iterable[RankSegment]) -> str | None:
    """The checkpoint that one of these segments is in, and so all of them."""
    wanted = {each.segment_id for each in have} - {None}
    for manifest in manifests if wanted else ():
        if any(ref.id in wanted for ref in manifest.segments):
            return manifest.save_id
    return None


def differing_values(parts: Sequence[m.Contribute]) -> dict[str, list[list[int]]]:
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


def two_processes(rank: int, stream: str) -> UsageError:
    """They say that they are the same rank."""
    return UsageError(
        f"two processes save as rank {rank} into stream {stream!r}: give each group its own "
        "stream, and no_dist=True only to a group of one (engine.writer(step, group=[rank]))"
    )


def two_groups(stream: str) -> UsageError:
    """Their parts never become one checkpoint."""
    return UsageError(
        f"two groups of ranks save into stream {stream!r} at once: give each its own stream"
    )


def superseded(step: int, stream: str, why: str) -> TierUnavailableError:
    """Somebody has left the save behind."""
    return not_applied(f"step {step} of stream {stream!r} never came together: {why}")


def host_lost(host: str, step: int, stream: str) -> TierUnavailableError:
    """A host with ranks of the group is no more."""
    return not_applied(
        f"host {host} does not answer, and not all ranks had sealed step {step} of stream "
        f"{stream!r}"
    )


def not_applied(text: str) -> TierUnavailableError:
    """A failure after which nothing is committed, for certain."""
    return TierUnavailableError(text, tier="memory", outcome="not_applied")
