"""The other hosts of one namespace: who answers, how fast, and the lines to them.

Which there are is in the book (``agent/peer_book.py``).
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from tieredckpt.agent.hooks import Hooks
from tieredckpt.agent.known_host import SLOW_RAIL, Noted
from tieredckpt.agent.listen import Listeners
from tieredckpt.agent.peer_book import PeerBook
from tieredckpt.agent.seeds import Seeds
from tieredckpt.errors import NotFoundError, TieredCkptError, TierUnavailableError
from tieredckpt.transport import messages as m
from tieredckpt.transport.auth import Secret
from tieredckpt.transport.peer_client import PeerClient
from tieredckpt.transport.peer_messages import PeerRequest

PROBE_AGAIN_S = 60.0
LOST_AFTER_S = 30.0
"""A member that has not answered for so long is lost: others get copies of what it held."""

T = TypeVar("T")

log = logging.getLogger(__name__)


class PeerLines:
    """The lines to other hosts that end when the agent does: who waits on one gets an error then.

    Of one namespace. Thread-safe.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._made: weakref.WeakSet[PeerClient] = weakref.WeakSet()
        self._stopped = False

    def add(self, client: PeerClient) -> PeerClient:
        """``client``, which :meth:`stop` closes if it is in use then.

        Raises:
            TierUnavailableError: The agent stops; the client is closed.
        """
        with self._lock:
            if not self._stopped:
                self._made.add(client)
                return client
        client.close()
        raise TierUnavailableError("the agent stops", tier="peer", outcome="not_applied")

    def stop(self) -> None:
        """Close them all, for good. Idempotent."""
        with self._lock:
            self._stopped = True
            made = list(self._made)
        for client in made:
            client.close()


class Peers(PeerBook):
    """See the module. Thread-safe; its lock is held over tables only."""

    def __init__(
        self,
        namespace: str,
        host_id: str,
        listeners: Listeners,
        hooks: Hooks,
        path: Path,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(namespace, host_id, listeners, hooks, path, clock=clock)
        self.lines = PeerLines()

    # --- asking -----------------------------------------------------------------------------------

    def secret(self) -> Secret:
        """What hosts prove to each other. Raises NotFoundError: this one does not listen."""
        return self._listeners.served(self.namespace)[1]

    def client(self, host_id: str) -> PeerClient:
        """The line to a host; shared, do not close it.

        Raises:
            NotFoundError: It is not known, or this host has no secret.
            TierUnavailableError: The agent stops.
        """
        secret = self.secret()
        with self._lock:
            known = self._hosts.get(host_id)
            if known is None:
                raise NotFoundError(f"no host {host_id} is known", key=host_id, what="host")
            if known.client is None:
                entry = msgspec.structs.replace(known.entry, addresses=known.usable())
                known.client = self.lines.add(PeerClient(entry, self.namespace, secret))
            return known.client

    def ask(self, host_id: str, request: PeerRequest[T]) -> T:
        """Ask a host for what ``request`` stands for, noting whether it answered.

        Raises as :meth:`PeerClient.ask`, and NotFoundError as :meth:`client`.
        """
        client = self.client(host_id)
        try:
            answer = client.ask(request)
        except TierUnavailableError as error:
            self.failed(host_id, str(error))
            raise
        except TieredCkptError:
            self.heard(host_id)
            raise
        self.heard(host_id)
        return answer

    def heard(self, host_id: str) -> None:
        """A host has answered, or asked."""
        with self._lock:
            known = self._hosts.get(host_id)
            if known is None:
                return
            back = known.lost or known.reachable is not True
            known.reachable, known.error, known.lost = True, None, False
            known.heard_s, known.asked_s = self._clock(), None
        if back:
            for call in self._hooks.on_found:
                call(host_id)

    def failed(self, host_id: str, error: str) -> None:
        """A host has not answered; after :data:`LOST_AFTER_S` it is lost."""
        now_s = self._clock()
        with self._lock:
            known = self._hosts.get(host_id)
            if known is None:
                return
            if known.reachable is not False:
                log.warning("namespace %s: host %s: %s", self.namespace, host_id, error[:300])
            known.reachable, known.error = False, error[:1000]
            known.asked_s = now_s if known.asked_s is None else known.asked_s
            lost = host_id in self._members and now_s - known.asked_s >= LOST_AFTER_S
            lost, known.lost = lost and not known.lost, known.lost or lost
        if lost:
            log.warning(
                "namespace %s: host %s has not answered for %g s: it is lost",
                self.namespace, host_id, LOST_AFTER_S,
            )  # fmt: skip
            for call in self._hooks.on_lost:
                call(host_id)

    def probed(
        self, host_id: str, entry: m.HostEntry, rtt_s: float, rails: dict[str, float]
    ) -> None:
        """How fast a host's rails are; slow ones are left out from now on."""
        with self._lock:
            known = self._hosts.get(host_id)
            if known is None or known.entry != entry:
                return
            known.probed_s = self._clock()
            before = known.usable()
            known.rtt_s, known.rails = rtt_s, rails
            if known.client is not None:
                known.client.doubts = False
            slow = sorted(set(known.entry.addresses) - set(known.usable()))
            stale = known.client if known.usable() != before else None
            known.client = known.client if stale is None else None
        if stale is not None:
            stale.retire()
        if slow:
            log.warning(
                "namespace %s: host %s is not asked at %s: no answer there, or %g times slower than"
                " at its best address", self.namespace, host_id, ", ".join(slow), SLOW_RAIL,
            )  # fmt: skip

    def needs_probe(self, hosts: Sequence[str]) -> list[str]:
        """Of ``hosts``, those that answer and whose rails were not measured, or are left out for
        :data:`PROBE_AGAIN_S`: a rail may have been busy, or come back.
        """
        before_s = self._clock() - PROBE_AGAIN_S
        with self._lock:
            return [h for h in hosts if h in self._hosts and self._hosts[h].needs_probe(before_s)]

    # --- life -----------------------------------------------------------------------------------

    def tell_all(self) -> None:
        """This host is reached elsewhere than before: all others are to be asked, and so told."""
        with self._lock:
            for known in self._hosts.values():
                known.heard_s = None

    def reset_clients(self) -> None:
        """The secret or this host's address is another one: lines are made anew."""
        with self._lock:
            clients = [k.client for k in self._hosts.values() if k.client is not None]
            for known in self._hosts.values():
                known.client = None
        for client in clients:
            client.retire()

    def forget(self) -> None:
        """The namespace was purged."""
        self.reset_clients()
        with self._lock:
            self._hosts, self._members, self._noted = {}, frozenset(), Noted()
            self.seeds = Seeds()
        self._path.unlink(missing_ok=True)
