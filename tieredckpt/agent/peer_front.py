"""What other hosts' requests mean here: implements :class:`.transport.peer_server.PeerApi`.

Whoever gets so far has proven that he knows the namespace's secret; what he sends is validated all
the same, since a host may be damaged or of another release.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from tieredckpt.agent.listen import Listeners
from tieredckpt.agent.memory_retention import MEMORY
from tieredckpt.agent.namespace import Namespace
from tieredckpt.agent.registry import check_ids
from tieredckpt.agent.reports import holdings_of
from tieredckpt.errors import RemoteProtocolError, TierUnavailableError
from tieredckpt.format.manifest import check_host
from tieredckpt.tiers.base import OpenObject
from tieredckpt.transport import messages as m
from tieredckpt.transport.auth import Secret
from tieredckpt.transport.gathering_messages import Confirmed, ConfirmParts, HandOver, Taken
from tieredckpt.transport.peer_messages import (
    ForwardAttempt,
    Have,
    Identify,
    Push,
    Pushed,
    Sync,
    SyncReply,
)

ReadSegment = Callable[[str, str, str | None], tuple[str, OpenObject]]


class PeerFront:
    """See the module. Thread-safe.

    Args:
        listeners: Secrets, and how this host is reached.
        find: A namespace by name; raises NotFoundError.
        read: :meth:`tieredckpt.agent.node.Node.read_segment`.
    """

    def __init__(
        self,
        listeners: Callable[[], Listeners],
        find: Callable[[str], Namespace],
        read: ReadSegment,
    ) -> None:
        self._listeners = listeners
        self._find = find
        self._read = read

    def peer_served(self, namespace: str) -> tuple[m.HostEntry, Secret]:
        """Who this is, and what a caller must prove to know. Raises NotFoundError: not served."""
        return self._listeners().served(namespace)

    def peer_identify(self, namespace: str, request: Identify) -> m.HostEntry:
        """Who this is; the caller is noted."""
        found = self._find(namespace)
        caller = request.caller
        if caller is not None:
            try:
                check_host(caller.host_id, "the caller")
            except ValueError as error:
                raise RemoteProtocolError(str(error)) from error
            found.peers.learn([caller])
            found.across.watch.start()
        return self.peer_served(namespace)[0]

    def peer_holdings(self, namespace: str, request: Have) -> bytes:
        """See :class:`tieredckpt.transport.peer_messages.Have`."""
        return holdings_of(self._find(namespace), frozenset(request.manifests))

    def peer_plan(self, namespace: str, tier: str, plan_id: str) -> bytes:
        """An encoded plan as one tier holds it."""
        check_ids(plan_id)
        return self._find(namespace).catalog_of(tier or MEMORY).read_plan(plan_id)

    def peer_push(self, namespace: str, request: Push) -> Pushed:
        """See :class:`tieredckpt.transport.peer_messages.Push`."""
        return self._find(namespace).across.take(request)

    def peer_sync(self, namespace: str, request: Sync) -> SyncReply:
        """See :class:`tieredckpt.transport.peer_messages.Sync`."""
        return self._find(namespace).across.anti_entropy.answer(request)

    def peer_attempt(self, namespace: str, request: ForwardAttempt) -> bytes:
        """See :class:`tieredckpt.transport.peer_messages.ForwardAttempt`."""
        found = self._find(namespace)
        check_ids(request.request.attempt_id, request.request.run)
        if not found.peers.is_leader:  # and not forwarded again: two might name each other
            raise TierUnavailableError(
                f"host {found.host_id} is not the leader of namespace {namespace}: the hosts of "
                "the job do not agree who is, restart it",
                outcome="not_applied",
            )
        return found.open_attempt(request.request)

    def peer_gather(self, namespace: str, request: HandOver) -> Taken:
        """See :class:`tieredckpt.transport.gathering_messages.HandOver`."""
        return self._find(namespace).gatherings.take_over(request)

    def peer_confirm(self, namespace: str, request: ConfirmParts) -> Confirmed:
        """See :class:`tieredckpt.transport.gathering_messages.ConfirmParts`."""
        return self._find(namespace).gatherings.confirm(request)

    def peer_damage(self, namespace: str, request: m.Damage) -> None:
        """A reader on another host found bad blocks in what this one sent."""
        check_ids(request.segment_id)
        found = self._find(namespace)
        found.catalog_of(request.tier)
        found.quarantine(request.tier, request.segment_id, request.blocks, request.reason[:500])

    def read_segment(
        self, namespace: str, segment_id: str, tier: str | None
    ) -> tuple[str, OpenObject]:
        """Open a segment. Raises NotFoundError."""
        return self._read(namespace, segment_id, tier)


def forward_damage(namespace: Namespace, request: m.Damage) -> None:
    """Tell the host whose copy is bad. Raises TierUnavailableError or NotFoundError."""
    request = msgspec.structs.replace(request, reason=request.reason[:500])
    namespace.peers.ask(
        request.host,
        lambda client: client.report_damage(
            request.tier, request.segment_id, request.blocks, request.reason
        ),
    )
