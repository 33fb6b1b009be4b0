"""Saves without collectives over hosts: those that another one decides on, and all together.

The parts of this host's ranks are gathered here and handed over together. Until this host has said
that it stands by them (:meth:`HostGatherings.confirm`) a failure here is final at once, and nothing
can be committed without being asked; from then on only the host that decides knows the outcome. Of
segments that were sealed at an agent before this one, that one may have said so.
What is committed is heard of with the manifest, as any checkpoint; else by asking again, while
ranks wait: no thread and no timer is here.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from tieredckpt import failpoints
from tieredckpt.agent.no_collectives.coordinator import (
    Commit,
    GatheredSave,
    GatheredSaves,
    Gatherings,
    Parts,
    committed_with,
    member,
    not_applied,
    two_processes,
)
from tieredckpt.agent.peering.peering import Across
from tieredckpt.errors import (
    AgentError,
    NotFoundError,
    RemoteProtocolError,
    TieredCkptError,
    TierUnavailableError,
    UsageError,
)
from tieredckpt.format.manifest import Manifest, SegmentRef
from tieredckpt.rpc.messages import agent as m
from tieredckpt.rpc.messages import no_collectives as gm
from tieredckpt.rpc.messages.base import describe_error, described_error
from tieredckpt.storage.memory.pool import SlotPool

CONFIRM_S = 5.0
"""The most that a commit waits for hosts to stand by their parts; the caller may wait for it at
another host's line, which gives up after 10 s."""
HAND_OVER_BYTES_MAX = 64 << 20
"""Plans in one message; the rest follows."""
ASK_S_MIN = 0.01
ASK_S_MAX = 0.5
"""How often the other host is asked; of what is committed its manifest tells."""
TELLS_MAX = 3
"""How often it is told that this host has left a save; if it does not hear, it asks in vain."""


@dataclass(slots=True, kw_only=True)
class Handed(GatheredSave):
    """A save that another host decides on, as far as it is this host's."""

    decider: str
    here: int
    """Ranks of the group on this host."""
    fresh: set[int] = field(default_factory=set)
    """Ranks whose part was never sent."""
    wanted: set[int] = field(default_factory=set)
    """Ranks whose part the other side lacks, as far as is known."""
    gone: set[int] = field(default_factory=set)
    """Ranks whose process has ended."""
    promised: bool = False
    """The other side was told, by this agent or may be by one before, that this host stands by it.
    """
    missing: tuple[int, ...] = ()
    leaving: m.ErrorReply | None = None
    """To be told to the other side: it fails, if it is open there."""
    tells: int = 0
    asking: bool = False
    next_s: float = 0.0
    pause_s: float = ASK_S_MIN
    trouble: str = ""
    """Why the other side was asked in vain the last time."""

    @property
    def in_doubt(self) -> bool:
        """Whether it may be committed without asking this host again. If its ranks had nothing to
        write, an agent before this one may have promised that and left no trace.
        """
        parts = self.parts.values()
        return self.promised or (bool(parts) and all(each.part is None for each in parts))

    @property
    def have(self) -> tuple[gm.RankSegment, ...]:
        """Also when it is over: who is told late that this host left must see what that is of."""
        return tuple(
            gm.RankSegment(rank=r, segment_id=self.members[r][1]) for r in sorted(self.members)
        )

    def end(self, error: m.ErrorReply) -> None:
        """A rank here has left it. Nothing is committed without asking this host once more, unless
        it has promised: then only the other side knows.
        """
        if self.state == "open":
            self.leaving = self.leaving or error
            if not self.in_doubt:
                self.fail(error)

    def commit(self, save_id: str | None) -> None:
        """It is a checkpoint: nobody has left it."""
        GatheredSave.commit(self, save_id)
        self.leaving = None

    def missing_ranks(self) -> tuple[int, ...]:
        """See :class:`GatheredSave`: as the other side said last."""
        return self.missing

    def is_due(self, now_s: float) -> bool:
        """Whether to ask the other side now."""
        if self.leaving is not None and self.tells < (1 if self.state == "open" else TELLS_MAX):
            return True
        complete = bool(self.fresh) and len(self.parts) >= self.here
        return self.state == "open" and (complete or now_s >= self.next_s)


class HostGatherings(GatheredSaves[Handed]):
    """Those of one namespace, whichever host decides on them. Thread-safe.

    What this host decides on is handed on to
    :class:`~tieredckpt.agent.no_collectives.coordinator.Gatherings`.

    Args:
        lock: The node's lock; never held while another host is asked.
        across: The other hosts.
        manifests: What is committed in memory.
        commit: :meth:`tieredckpt.agent.namespace.Namespace.commit`.
        check: Raises unless a segment is sealed here as the reference says.
        is_live: Whether a session's process still holds its lease; may call :meth:`drop_session`.
        pool: The host's slots: what is sealed there now was sealed at an agent before this one.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        lock: threading.RLock,
        across: Across,
        manifests: Callable[[], tuple[Manifest, ...]],
        commit: Commit,
        check: Callable[[SegmentRef], None],
        is_live: Callable[[str], bool],
        pool: SlotPool,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(lock, manifests)
        self._across = across
        self._peers = across.peers
        self._is_live = is_live
        self._check = check
        labels = [slot.label for slot in pool.slots()]
        self._old = frozenset(label.segment_id for label in labels if label.state == "sealed")
        self._clock = clock
        self._here = Gatherings(
            lock, across.peers.host_id, manifests, commit, self._confirm_all, across.peers.lost
        )
        across.hooks.on_manifest.append(self.committed)
        across.hooks.on_lost.append(self._here.drop_host)

    # --- what ranks ask ---------------------------------------------------------------------------

    def contribute(self, request: m.Contribute, local_world_size: int) -> m.Gathered:
        """See :class:`tieredckpt.rpc.messages.agent.Contribute`."""
        host = self._peers.host_id
        if request.decider in ("", host):
            if not request.decider:
                self._across.check_gathering(request.world_size, local_world_size)
            return self._here.contribute(request)
        if request.decider not in self._peers.members():
            raise UsageError(
                f"host {request.decider} is to commit this save, and agent {host} does not know it "
                "as a host of this job: open the engines of all ranks together"
            )
        if request.draft is not None or not 0 < request.rank < request.world_size:
            raise RemoteProtocolError(
                f"rank {request.rank} of {request.world_size}: rank 0 alone sends a draft, on the "
                "host that commits"
            )
        with self._lock:
            done = committed_with(self._manifests(), request)
            if done is not None:
                return m.Gathered(state="committed", save_id=done)
            found = self._known.get(request.key) or self._keep(
                Handed(
                    request.key, request.step, request.world_size, request.members,
                    decider=request.decider, here=request.here,
                )
            )  # fmt: skip
            if found.state == "committed" and found.members.get(request.rank) != member(request):
                raise two_processes(request.rank, request.key.stream)
            if found.state == "open":
                self._take(found, request)
            self._press(found)
            return found.outcome()

    def ask(self, request: m.AskGathering) -> m.Gathered:
        """See :class:`tieredckpt.rpc.messages.agent.AskGathering`."""
        with self._lock:
            found = self._known.get(request.key)
            if found is None:
                return self._here.ask(request)
            if request.give_up is not None:
                why = _with_trouble(request.give_up, found)
                request = msgspec.structs.replace(request, give_up=why)
            outcome = super().ask(request)
            if outcome.state != "unknown":
                self._press(found)
            return outcome

    # --- what other hosts ask ---------------------------------------------------------------------

    def take_over(self, request: gm.HandOver) -> gm.Taken:
        """See :class:`tieredckpt.rpc.messages.no_collectives.HandOver`."""
        if request.host == self._peers.host_id or request.host not in self._peers.members():
            raise UsageError(f"host {request.host[:128]!r} is not another host of this job")
        if any(part.decider != self._peers.host_id for part in request.parts):
            raise RemoteProtocolError(f"host {self._peers.host_id} does not commit these parts")
        return self._here.take_over(request)

    def confirm(self, request: gm.ConfirmParts) -> gm.Confirmed:
        """See :class:`tieredckpt.rpc.messages.no_collectives.ConfirmParts`."""
        with self._lock:
            found = self._known.get(request.key)
            if found is None or found.decider != request.host:
                return gm.Confirmed(state="unknown")
            if found.state == "committed":
                return gm.Confirmed(state="yes")
            if found.state == "open" and found.have != request.have:
                return gm.Confirmed(state="unknown")
            for part in list(found.parts.values()):
                # Whose process has ended: drop_session is called, and notes why it fails.
                if self._is_live(part.session_id) and part.part is not None:
                    self._check_sealed(found, part.part)
            if found.leaving is not None:
                # If it was promised before, only an answer of the other side makes that undone:
                # this request may be an old one.
                return gm.Confirmed(state="no", error=found.leaving)
            if found.state == "failed":
                return gm.Confirmed(state="no", error=found.error)
            failpoints.reach("agent.gather.before_promise")
            found.promised = True
            return gm.Confirmed(state="yes")

    def _check_sealed(self, found: Handed, part: m.SealedPart) -> None:
        try:
            self._check(SegmentRef(part.segment_id, part.size, part.root, self._peers.host_id))
        except TieredCkptError as error:
            found.end(describe_error(error))

    def _confirm_all(self, key: m.GatheringKey, parts: Parts) -> frozenset[str]:
        answers: dict[str, gm.Confirmed] = {}

        def ask(host: str) -> None:
            request = gm.ConfirmParts(host=self._peers.host_id, key=key, have=parts[host])
            answers[host] = self._peers.ask(host, request)

        answered = self._across.exchange.each(parts, ask, CONFIRM_S)
        found = {host: answers[host] for host in answered}
        for answer in (found[host] for host in sorted(found)):
            if answer.state == "no" and answer.error is not None:
                raise described_error(answer.error)
            if answer.state == "no":
                raise not_applied("a host has left the save without a reason")
        return frozenset(h for h in parts if h not in found or found[h].state != "yes")

    # --- what the node asks -----------------------------------------------------------------------

    def segments(self) -> set[str]:
        """Segments that a save needs which is not decided. The caller holds the lock."""
        return self._here.segments() | super().segments()

    def drop_session(self, session_id: str) -> None:
        """A process ended: what it contributed to cannot become a checkpoint any more."""
        self._here.drop_session(session_id)
        super().drop_session(session_id)

    def _left(self, found: Handed, ranks: Sequence[int], why: m.ErrorReply) -> None:
        found.end(why)
        found.gone.update(ranks)
        if found.state == "open" and found.gone >= found.parts.keys():
            found.fail(why)  # nobody waits for the outcome any more
        self._press(found)

    def committed(self, manifest: Manifest) -> None:
        """A checkpoint is in this host's memory."""
        with self._lock:
            for found in self._known.values():
                if found.state == "open" and any(
                    committed_with((manifest,), part) for part in found.parts.values()
                ):
                    found.commit(manifest.save_id)

    # --- parts ------------------------------------------------------------------------------------

    def _take(self, found: Handed, request: m.Contribute) -> bool:
        rank = request.rank
        is_new = rank not in found.parts or member(found.parts[rank]) != member(request)
        if not super()._take(found, request):
            return False
        if is_new:
            found.fresh.add(rank)
            found.wanted.add(rank)
        found.promised |= request.part is not None and request.part.segment_id in self._old
        return True

    def _why_not(self, found: Handed, request: m.Contribute) -> m.ErrorReply | None:
        wrong = super()._why_not(found, request)
        if wrong is not None or found.decider == request.decider:
            return wrong
        return describe_error(
            UsageError(
                f"ranks name both host {found.decider} and host {request.decider} to commit step "
                f"{found.step} of stream {request.key.stream!r}: give both ranks the same process "
                "group"
            )
        )

    # --- asking the other side --------------------------------------------------------------------

    def _press(self, found: Handed) -> None:
        """Have the other side asked, if that is due and nobody does. The caller holds the lock."""
        if not found.asking and found.is_due(self._clock()):
            found.asking = self._across.exchange.at_once(lambda: self._relay(found))

    def _relay(self, found: Handed) -> None:
        done = False
        try:
            while (request := self._next(found)) is not None:
                self._hand_over(found, request)
            done = True
        finally:
            if not done:
                with self._lock:
                    found.asking = False

    def _next(self, found: Handed) -> gm.HandOver | None:
        """What to say now; None: nothing, and whoever presses next begins anew."""
        with self._lock:
            if not found.is_due(self._clock()):
                found.asking = False
                return None
            parts: list[m.Contribute] = []
            size = 0
            for rank in sorted(found.wanted & found.parts.keys()):
                size += len(found.parts[rank].plan)
                if parts and size > HAND_OVER_BYTES_MAX:
                    break
                parts.append(found.parts[rank])
            found.tells += found.leaving is not None
            found.fresh.difference_update(part.rank for part in parts)
            found.fresh.intersection_update(found.parts)
            found.next_s = self._clock() + found.pause_s
            found.pause_s = min(2 * found.pause_s, ASK_S_MAX)
            return gm.HandOver(
                host=self._peers.host_id, key=found.key, step=found.step, members=found.group,
                world_size=found.world_size, have=found.have, parts=tuple(parts),
                give_up=found.leaving,
            )  # fmt: skip

    def _hand_over(self, found: Handed, request: gm.HandOver) -> None:
        try:
            failpoints.reach("agent.gather.before_hand")
            taken = self._peers.ask(found.decider, request)
            failpoints.reach("agent.gather.after_hand")
        except (TierUnavailableError, NotFoundError) as error:
            with self._lock:
                found.trouble = error.message
                if found.state == "open" and found.decider in self._peers.lost():
                    found.fail(describe_error(self._lose(found)))
            return
        except TieredCkptError as error:  # what ranks here contribute does not fit
            with self._lock:
                if found.state == "open":
                    found.fail(describe_error(self._lose(found) if found.in_doubt else error))
            return
        with self._lock:
            self._learn(found, request, taken)

    def _learn(self, found: Handed, request: gm.HandOver, taken: gm.Taken) -> None:
        found.trouble = ""
        if request.give_up is not None:
            found.tells = TELLS_MAX
        if found.state != "open":
            return
        outcome = taken.outcome
        if outcome.state == "committed":
            found.commit(outcome.save_id)
        elif outcome.state == "failed":
            unsaid = not_applied(f"host {found.decider} reports a failure without a reason")
            found.fail(outcome.error or describe_error(unsaid))
        else:
            sent = {part.rank for part in request.parts}
            # What came while it was asked is wanted, too.
            found.wanted = (found.wanted - sent) | (set(taken.wanted) & found.parts.keys())
            found.missing = tuple(r for r in outcome.missing if r not in found.parts)

    def _lose(self, found: Handed) -> TieredCkptError:
        """The other side is lost."""
        what = f"step {found.step} of stream {found.key.stream!r}"
        text = f"host {found.decider}, which was to commit {what}, does not answer: {found.trouble}"
        if not found.in_doubt:
            return not_applied(text)
        return AgentError(f"{text}; whether it did is not known", outcome="unknown")


def _with_trouble(error: m.ErrorReply, found: Handed) -> m.ErrorReply:
    if not found.trouble:
        return error
    text = f"{error.message}; host {found.decider}, which commits, was not reached: {found.trouble}"
    return msgspec.structs.replace(error, message=text)
