"""The lines to other hosts that end when the agent does: who waits on one gets an error then."""

from __future__ import annotations

import threading
import weakref

from tieredckpt.errors import TierUnavailableError
from tieredckpt.transport.peer_client import PeerClient


class PeerLines:
    """Of one namespace. Thread-safe."""

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
