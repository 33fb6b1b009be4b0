"""Saves without collectives of one namespace: those decided here, and those decided elsewhere."""

from __future__ import annotations

import threading
from collections.abc import Callable

from tieredckpt.agent.across import Across
from tieredckpt.agent.gathering import Commit, Gatherings, Parts
from tieredckpt.agent.gathering_elsewhere import PartsForOthers
from tieredckpt.agent.gathering_rules import not_applied
from tieredckpt.errors import RemoteProtocolError, TieredCkptError, UsageError
from tieredckpt.format.manifest import Manifest, SegmentRef
from tieredckpt.tiers.pool import SlotPool
from tieredckpt.transport import messages as m
from tieredckpt.transport.gathering_messages import Confirmed, ConfirmParts, HandOver, Taken
from tieredckpt.transport.replies import described_error

CONFIRM_S = 5.0
"""The most that a commit waits for hosts to stand by their parts; the caller may wait for it at
another host's line, which gives up after 10 s."""


class HostGatherings:
    """See the module. Thread-safe.

    Args:
        lock: The node's lock.
        host_id: This host.
        across: The other hosts.
        manifests: What is committed in memory.
        commit: :meth:`tieredckpt.agent.namespace.Namespace.commit`.
        check: Raises unless a segment is sealed here as the reference says.
        is_live: Whether a session's process still holds its lease.
        pool: The host's slots: what is sealed there now was sealed at an agent before this one.
    """

    def __init__(
        self,
        lock: threading.RLock,
        host_id: str,
        across: Across,
        manifests: Callable[[], tuple[Manifest, ...]],
        commit: Commit,
        check: Callable[[SegmentRef], None],
        is_live: Callable[[str], bool],
        pool: SlotPool,
    ) -> None:
        self._host_id = host_id
        self._across = across
        peers = across.peers
        labels = [slot.label for slot in pool.slots()]
        old = frozenset(label.segment_id for label in labels if label.state == "sealed")
        self._here = Gatherings(lock, host_id, manifests, commit, self._confirm_all, peers.lost)
        self._elsewhere = PartsForOthers(
            lock, host_id, manifests, is_live,
            lambda part: check(SegmentRef(part.segment_id, part.size, part.root, host_id)),
            peers.ask, across.exchange.at_once, peers.lost, old,
        )  # fmt: skip
        across.hooks.on_manifest.append(self._elsewhere.committed)
        across.hooks.on_lost.append(self._here.drop_host)

    # --- what ranks ask ---------------------------------------------------------------------------

    def contribute(self, request: m.Contribute, local_world_size: int) -> m.Gathered:
        """See :class:`tieredckpt.transport.messages.Contribute`."""
        if request.decider in ("", self._host_id):
            if not request.decider:
                self._across.check_gathering(request.world_size, local_world_size)
            return self._here.contribute(request)
        if request.decider not in self._across.peers.members():
            raise UsageError(
                f"host {request.decider} is to commit this save, which agent {self._host_id} was "
                "not told to be of this job: open the engines of all ranks together"
            )
        return self._elsewhere.contribute(request)

    def ask(self, request: m.AskGathering) -> m.Gathered:
        """See :class:`tieredckpt.transport.messages.AskGathering`."""
        if self._elsewhere.knows(request.key):
            return self._elsewhere.ask(request)
        return self._here.ask(request)

    # --- what other hosts ask ---------------------------------------------------------------------

    def take_over(self, request: HandOver) -> Taken:
        """See :class:`tieredckpt.transport.gathering_messages.HandOver`."""
        if request.host == self._host_id or request.host not in self._across.peers.members():
            raise UsageError(f"host {request.host[:128]!r} is no other host of this job")
        if any(part.decider != self._host_id for part in request.parts):
            raise RemoteProtocolError(f"host {self._host_id} is not to decide on these parts")
        return self._here.take_over(request)

    def confirm(self, request: ConfirmParts) -> Confirmed:
        """See :class:`tieredckpt.transport.gathering_messages.ConfirmParts`."""
        return self._elsewhere.confirm(request)

    def _confirm_all(self, key: m.GatheringKey, parts: Parts) -> frozenset[str]:
        answers: dict[str, Confirmed] = {}

        def ask(host: str) -> None:
            request = ConfirmParts(host=self._host_id, key=key, have=parts[host])
            answers[host] = self._across.peers.ask(host, request)

        answered = self._across.exchange.each(parts, ask, CONFIRM_S)
        found = {host: answers[host] for host in answered}
        for host in sorted(found):
            if found[host].state == "no":
                raise _refusal_of(found[host])
        return frozenset(h for h in parts if h not in found or found[h].state != "yes")

    # --- what the node asks -----------------------------------------------------------------------

    def segments(self) -> set[str]:
        """Segments that a save needs which is not decided. The caller holds the lock."""
        return self._here.segments() | self._elsewhere.segments()

    def drop_session(self, session_id: str) -> None:
        """A process ended: what it contributed to cannot become a checkpoint any more."""
        self._here.drop_session(session_id)
        self._elsewhere.drop_session(session_id)


def _refusal_of(answer: Confirmed) -> TieredCkptError:
    if answer.error is None:
        return not_applied("a host has left the save, and does not say why")
    return described_error(answer.error)
