"""Saves without collectives that another host decides on: what this host's ranks contribute.

The parts of this host's ranks are gathered here and handed over together. Until this host has said
that it stands by them (:meth:`PartsForOthers.confirm`) a failure here is final at once, and nothing
can be committed without being asked; from then on only the host that decides knows the outcome. Of
segments that were sealed at an agent before this one, that one may have said so.
What is committed is heard of with the manifest, as any checkpoint; else by asking again, while
ranks wait: no thread and no timer is here.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection

import msgspec

from tieredckpt import failpoints
from tieredckpt.agent.gathering import KEPT_MAX, OPEN_MAX, PLANS_BYTES_MAX
from tieredckpt.agent.gathering_handed import ASK_S_MAX, TELLS_MAX, Handed
from tieredckpt.agent.gathering_rules import (
    Key,
    committed_with,
    key_of,
    member,
    not_applied,
    process_ended,
    superseded,
    too_many_plans,
    two_processes,
    why_not,
)
from tieredckpt.errors import (
    AgentError,
    NotFoundError,
    RemoteProtocolError,
    TieredCkptError,
    TierUnavailableError,
    UsageError,
)
from tieredckpt.format.manifest import Manifest
from tieredckpt.transport import messages as m
from tieredckpt.transport.gathering_messages import (
    Confirmed,
    ConfirmParts,
    HandOver,
    Taken,
)
from tieredckpt.transport.replies import describe_error

HAND_OVER_BYTES_MAX = 64 << 20
"""Plans in one message; the rest follows."""


class PartsForOthers:
    """Those of one namespace. Thread-safe.

    Args:
        lock: The node's lock; never held while another host is asked.
        host_id: This host.
        manifests: What is committed in memory.
        is_live: Whether a session's process still holds its lease; may call :meth:`drop_session`.
        check: Raises unless a part's segment is sealed here as the part says.
        ask: Hands over to a host; raises as a line to it does.
        at_once: Runs something in another thread, soon.
        lost: Hosts that do not answer any more.
        old: Segments that were sealed at an agent before this one.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        lock: threading.RLock,
        host_id: str,
        manifests: Callable[[], tuple[Manifest, ...]],
        is_live: Callable[[str], bool],
        check: Callable[[m.SealedPart], None],
        ask: Callable[[str, HandOver], Taken],
        at_once: Callable[[Callable[[], None]], bool],
        lost: Callable[[], Collection[str]],
        old: frozenset[str],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._lock = lock
        self._host_id = host_id
        self._manifests = manifests
        self._is_live = is_live
        self._check = check
        self._ask = ask
        self._at_once = at_once
        self._lost = lost
        self._old = old
        self._clock = clock
        self._known: dict[Key, Handed] = {}

    # --- what ranks ask ---------------------------------------------------------------------------

    def knows(self, key: m.GatheringKey) -> bool:
        """Whether a rank here has contributed to it."""
        with self._lock:
            return key_of(key) in self._known

    def contribute(self, request: m.Contribute) -> m.Gathered:
        """See :class:`tieredckpt.transport.messages.Contribute`."""
        if request.draft is not None or not 0 < request.rank < request.world_size:
            raise RemoteProtocolError(
                f"rank {request.rank} of {request.world_size}: rank 0 contributes on the host that "
                "decides, and no other rank brings a draft"
            )
        with self._lock:
            done = committed_with(self._manifests(), request)
            if done is not None:
                return m.Gathered(state="committed", save_id=done)
            found = self._find(request)
            if found.state == "committed" and found.members.get(request.rank) != member(request):
                raise two_processes(request.rank, request.key.stream)
            if found.state == "open":
                self._take(found, request)
            self._press(found)
            return found.outcome()

    def ask(self, request: m.AskGathering) -> m.Gathered:
        """See :class:`tieredckpt.transport.messages.AskGathering`."""
        with self._lock:
            found = self._known.get(key_of(request.key))
            if found is None:
                return m.Gathered(state="unknown")
            lost = request.rank is not None and request.rank not in found.parts
            if lost and found.state == "open" and request.give_up is None:
                return m.Gathered(state="unknown")
            if request.give_up is not None:
                found.end(_with_trouble(request.give_up, found))
            self._press(found)
            return found.outcome()

    # --- what the host that decides asks ----------------------------------------------------------

    def confirm(self, request: ConfirmParts) -> Confirmed:
        """See :class:`tieredckpt.transport.gathering_messages.ConfirmParts`."""
        with self._lock:
            found = self._known.get(key_of(request.key))
            if found is None or found.decider != request.host:
                return Confirmed(state="unknown")
            if found.state == "committed":
                return Confirmed(state="yes")
            if found.state == "open" and found.have != request.have:
                return Confirmed(state="unknown")
            for part in list(found.parts.values()):
                # Whose process has ended: drop_session is called, and notes why it fails.
                if self._is_live(part.session_id) and part.part is not None:
                    self._check_sealed(found, part.part)
            if found.leaving is not None:
                # If it was promised before, only an answer of the other side makes that undone:
                # this request may be an old one.
                return Confirmed(state="no", error=found.leaving)
            if found.state == "failed":
                return Confirmed(state="no", error=found.error)
            failpoints.reach("agent.gather.before_promise")
            found.promised = True
            return Confirmed(state="yes")

    def _check_sealed(self, found: Handed, part: m.SealedPart) -> None:
        try:
            self._check(part)
        except TieredCkptError as error:
            found.end(describe_error(error))

    # --- what the node asks -----------------------------------------------------------------------

    def segments(self) -> set[str]:
        """Segments whose save is not decided. The caller holds the lock."""
        return {
            each.part.segment_id
            for found in self._known.values()
            for each in found.parts.values()
            if each.part is not None
        }

    def drop_session(self, session_id: str) -> None:
        """A process ended: see :meth:`tieredckpt.agent.gathering.Gatherings.drop_session`."""
        with self._lock:
            for found in self._known.values():
                ended = [r for r, each in found.parts.items() if each.session_id == session_id]
                if ended:
                    why = describe_error(process_ended(ended[0], found.step, found.key.stream))
                    found.end(why)
                    found.gone.update(ended)
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

    def _find(self, request: m.Contribute) -> Handed:
        found = self._known.get(key_of(request.key))
        if found is not None:
            return found
        if sum(each.state == "open" for each in self._known.values()) >= OPEN_MAX:
            raise UsageError(
                f"{OPEN_MAX} saves without collectives are waiting for ranks already: call "
                "dcp.save on all ranks of the group"
            )
        for key in [key for key, each in self._known.items() if each.state != "open"]:
            if len(self._known) < KEPT_MAX:
                break
            del self._known[key]
        found = self._known[key_of(request.key)] = Handed(
            request.key, request.step, request.world_size, request.members, request.decider,
            request.here,
        )  # fmt: skip
        return found

    def _take(self, found: Handed, request: m.Contribute) -> None:
        stream, rank = request.key.stream, request.rank
        before = found.parts.get(rank)
        wrong = why_not(found, request)
        if wrong is None and before is not None and before.session_id != request.session_id:
            wrong = describe_error(two_processes(rank, stream))
        if wrong is None and found.decider != request.decider:
            wrong = describe_error(
                UsageError(
                    f"hosts {found.decider} and {request.decider} are both said to decide on step "
                    f"{found.step} of stream {stream!r}: give both ranks the same process group"
                )
            )
        if wrong is not None:
            found.end(wrong)
            return
        # A rank that saves anew has left its earlier saves.
        for other in self._known.values():
            same = (other.key.stream, other.key.epoch) == (stream, request.key.epoch)
            if same and other is not found and rank in other.parts:
                why = superseded(other.step, stream, f"rank {rank} has gone on")
                other.end(describe_error(why))
        held = sum(len(p.plan) for each in self._known.values() for p in each.parts.values())
        if held + len(request.plan) > PLANS_BYTES_MAX:
            found.end(describe_error(too_many_plans(held + len(request.plan), PLANS_BYTES_MAX)))
            return
        if before is None or member(before) != member(request):
            found.fresh.add(rank)
            found.wanted.add(rank)
        found.parts[rank], found.members[rank] = request, member(request)
        found.promised |= request.part is not None and request.part.segment_id in self._old

    # --- asking the other side --------------------------------------------------------------------

    def _press(self, found: Handed) -> None:
        """Have the other side asked, if that is due and nobody does. The caller holds the lock."""
        if not found.asking and found.is_due(self._clock()):
            found.asking = self._at_once(lambda: self._relay(found))

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

    def _next(self, found: Handed) -> HandOver | None:
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
            return HandOver(
                host=self._host_id, key=found.key, step=found.step, world_size=found.world_size,
                members=found.group, have=found.have, parts=tuple(parts), give_up=found.leaving,
            )  # fmt: skip

    def _hand_over(self, found: Handed, request: HandOver) -> None:
        try:
            failpoints.reach("agent.gather.before_hand")
            taken = self._ask(found.decider, request)
            failpoints.reach("agent.gather.after_hand")
        except (TierUnavailableError, NotFoundError) as error:
            with self._lock:
                found.trouble = error.message
                if found.state == "open" and found.decider in self._lost():
                    found.fail(describe_error(self._lose(found)))
            return
        except TieredCkptError as error:  # what ranks here contribute does not fit
            with self._lock:
                if found.state == "open":
                    found.fail(describe_error(self._lose(found) if found.in_doubt else error))
            return
        with self._lock:
            self._learn(found, request, taken)

    def _learn(self, found: Handed, request: HandOver, taken: Taken) -> None:
        found.trouble = ""
        if request.give_up is not None:
            found.tells = TELLS_MAX
        if found.state != "open":
            return
        outcome = taken.outcome
        if outcome.state == "committed":
            found.commit(outcome.save_id)
        elif outcome.state == "failed":
            assert outcome.error is not None
            found.fail(outcome.error)
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
    text = f"{error.message}; host {found.decider}, which decides, was not reached: {found.trouble}"
    return msgspec.structs.replace(error, message=text)
