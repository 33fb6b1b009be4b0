"""This process's lines to other hosts' agents: what they hold, and bytes of their segments.

The own agent knows where they are and with which secret they are asked. Nothing here is done, and
no connection made, in a process whose agent knows of no other host.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from tieredckpt.errors import NotFoundError, TierUnavailableError
from tieredckpt.recovery.asking import ANSWER_S, ASKING_MAX_S, CONNECT_S, ask_hosts
from tieredckpt.recovery.evidence import SourceRef, known_manifests
from tieredckpt.recovery.hosts import nearest_first
from tieredckpt.recovery.plan import RecoveryPlan
from tieredckpt.recovery.remote import Peer, Stream
from tieredckpt.tiers.facts import Holdings
from tieredckpt.transport.auth import Secret
from tieredckpt.transport.client import AgentClient
from tieredckpt.transport.messages import HostEntry, PeerTable
from tieredckpt.transport.peer_client import PeerClient

log = logging.getLogger(__name__)

AWAY_S = 30.0
"""A host that did not answer is asked last for so long, for bytes that another one has too."""


@dataclass(frozen=True, slots=True)
class Held:
    """What is held where, as far as it was possible to learn."""

    holdings: tuple[Holdings, ...]
    """The own host's first."""
    silent: Mapping[str, str] | None = None
    """By host, why it did not answer; None: there are no other hosts."""

    @property
    def own(self) -> Holdings:
        """What the own agent holds."""
        return self.holdings[0]

    def settles(self, plans: Sequence[RecoveryPlan]) -> bool:
        """Whether these plans, made from this, pass over something that may be had later.

        A tier of this host that does not answer may hold anything. Other hosts are not waited for
        if the newest checkpoint that anyone knows of can be restored without them: its manifest
        reached them all, and a lost one will never answer.
        """
        if any(not tier.available for tier in self.own.tiers):
            return True
        return any(plan.incomplete and plan.passes_over for plan in plans)


class OtherHosts:
    """The other hosts of one namespace. Thread-safe, invalid after fork.

    Args:
        client: Of the own agent, which is asked for the table when it is needed anew.
        table: As it was when the engine was opened, or None.
    """

    def __init__(self, client: AgentClient, table: PeerTable | None) -> None:
        self._client = client
        self._learn(table)
        self._lock = threading.Lock()
        self._lines: dict[str, _Line] = {}
        self._silent: frozenset[str] = frozenset()

    def close(self) -> None:
        """Close all connections, and forget who did not answer; the next use makes new ones."""
        with self._lock:
            lines, self._lines = list(self._lines.values()), {}
            self._silent = frozenset()
        for line in lines:
            line.client.close()

    def refresh(self) -> PeerTable | None:
        """Ask the own agent who there is. Raises AgentError."""
        try:
            table = self._client.peers()
        except NotFoundError:
            table = None  # it has not heard of the namespace
        with self._lock:
            self._learn(table)
        return table

    def _learn(self, table: PeerTable | None) -> None:
        self._table = table
        states = table.peers if table is not None else ()
        self._entries = {state.host.host_id: state.host for state in states}

    # --- bytes ------------------------------------------------------------------------------------

    def find_peer(self, source: SourceRef) -> Peer:
        """The host that has this copy.

        Raises:
            TierUnavailableError: Nobody knows where it is.
        """
        return self._line(source.host)

    def client(self, host_id: str) -> PeerClient:
        """For requests. Raises as :meth:`find_peer`."""
        return self._line(host_id).client

    def in_order(self, sources: Sequence[SourceRef], host_id: str) -> tuple[SourceRef, ...]:
        """The copies as ``host_id`` is to try them: nearest first, on silent hosts last."""
        now_s = time.monotonic()
        with self._lock:
            away = {name for name, line in self._lines.items() if line.away_until_s > now_s}
        told = [
            msgspec.structs.replace(source, intact=False, error="its host did not answer just now")
            if source.host in away
            else source
            for source in sources
        ]
        return nearest_first(told, host_id)

    def _line(self, host_id: str) -> _Line:
        line = self._known(host_id)
        if line is None:
            self.refresh()
            line = self._known(host_id)
        if line is None:
            raise TierUnavailableError(f"nobody knows where host {host_id} is", tier="peer")
        return line

    def _known(self, host_id: str) -> _Line | None:
        with self._lock:
            table = self._table
            entry = self._entries.get(host_id)
            if table is None or entry is None:
                return None
            line = self._lines.get(host_id)
            secret = Secret(table.token, table.tls)
            now = (entry, secret)  # both are other ones after a restart
            if line is None or line.reached != now:
                if line is not None:
                    line.client.retire()
                line = _Line(
                    now,
                    PeerClient(
                        entry, self._client.namespace, secret, connect_s=CONNECT_S, stall_s=ANSWER_S
                    ),
                )
                self._lines[host_id] = line
            return line

    def silent(self) -> tuple[str, ...]:
        """Hosts that did not say what they hold when they were asked last, before :meth:`close`."""
        with self._lock:
            return tuple(sorted(self._silent))

    # --- holdings ---------------------------------------------------------------------------------

    def ask_all(
        self,
        own: Holdings,
        before: Held | None = None,
        *,
        limit_s: float = ASKING_MAX_S,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> Held:
        """What all hosts hold.

        Args:
            own: What the own agent holds.
            before: An earlier answer: only hosts that were silent then, or had a tier that was,
                are asked again.
            limit_s, progress: As for :func:`ask_hosts`.
        """
        table = self.refresh()
        answered = {
            each.host_id: each
            for each in (before.holdings[1:] if before is not None else ())
            if all(tier.available for tier in each.tiers)
        }
        states = [
            state
            for state in (table.peers if table is not None else ())
            if state.host.host_id != own.host_id and state.host.host_id not in answered
        ]
        # Those that the agent could not reach lately are left to the end.
        states.sort(key=lambda state: state.reachable is False)
        hosts = [state.host.host_id for state in states]
        found, silent = ask_hosts(
            own.namespace,
            [(host, self._line(host).client) for host in hosts],
            known_manifests([own, *answered.values()]),
            limit_s=limit_s,
            progress=progress,
        )
        for host, why in silent.items():
            log.info("host %s does not say what it holds: %s", host, why)
        with self._lock:
            self._silent = frozenset(silent)  # who was not asked now has answered before
        # Who is there is not known: it may be who holds the only copy.
        unmet = table.unmet if table is not None else {}
        return Held((own, *answered.values(), *found), {**silent, **unmet})


@dataclass(slots=True)
class _Line:
    """One host, and whether it has answered lately: a :class:`~tieredckpt.recovery.remote.Peer`."""

    reached: tuple[HostEntry, Secret]
    """Who and where, and with what."""
    client: PeerClient
    away_until_s: float = 0.0

    def open_range(self, segment_id: str, tier: str, start: int, stop: int) -> Stream:
        try:
            return _Noted(self, self.client.open_range(segment_id, tier, start, stop))
        except TierUnavailableError:
            self.is_away()
            raise

    def is_away(self) -> None:
        """It did not answer."""
        self.away_until_s = time.monotonic() + AWAY_S


@dataclass(slots=True)
class _Noted:
    """A stream whose breaking off is noted."""

    line: _Line
    stream: Stream

    def read_into(self, into: memoryview) -> None:
        try:
            self.stream.read_into(into)
        except TierUnavailableError:
            self.line.is_away()
            raise

    def abort(self) -> None:
        self.stream.abort()

    def close(self) -> None:
        self.stream.close()
