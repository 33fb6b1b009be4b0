"""Asking many hosts what they hold, all at the same time, each with a deadline."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field

from tieredckpt.errors import (
    AgentError,
    RemoteProtocolError,
    TieredCkptError,
    TierUnavailableError,
)
from tieredckpt.recovery.evidence import known_manifests
from tieredckpt.tiers.facts import Holdings, decode_holdings
from tieredckpt.transport.peer_client import PeerClient
from tieredckpt.transport.peer_messages import RECORDS_MAX, AskHoldings

CONNECT_S = 2.0
ANSWER_S = 10.0
ASKED_AT_ONCE = 32
"""Hosts, each by a thread that mostly waits."""

FIRST_ASKED = 2
FIRST_WAIT_S = 1.0
"""So many are asked before all others, for so long: what they tell, the others need not repeat. A
thousand hosts would else send the same manifests, of a thousand hosts each, at the same time."""

ASKING_MAX_S = 60.0
"""For all hosts together; a job's members answer within a fraction of a second."""

PROGRESS_S = 0.2


def ask_hosts(
    namespace: str,
    hosts: Sequence[tuple[str, PeerClient]],
    have: Collection[str],
    *,
    limit_s: float = ASKING_MAX_S,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[tuple[Holdings, ...], dict[str, str]]:
    """What these hosts hold, in their order, and by host why the others did not say so.

    Args:
        namespace: Of which.
        hosts: Host ids and how each is reached; those that may be away come best at the end.
        have: Digests of the manifests that need not be sent.
        limit_s: For all together.
        progress: Called now and then with how many have answered, and of how many.
    """
    asking = _Asking(namespace, set(have), progress)
    asking.run(hosts, limit_s)
    with asking.lock:  # a thread that is late must not add to what is returned
        found = tuple(asking.found[host] for host, _ in hosts if host in asking.found)
        silent = {h: why for h, why in asking.silent.items() if h not in asking.found}
        return found, silent


@dataclass(slots=True)
class _Asking:
    """One round of questions to many hosts."""

    namespace: str
    have: set[str]
    """Digests of the manifests that need not be sent."""
    progress: Callable[[int, int], None]
    found: dict[str, Holdings] = field(default_factory=dict)
    silent: dict[str, str] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def run(self, hosts: Sequence[tuple[str, PeerClient]], limit_s: float) -> None:
        """Ask all; returns when each has answered or its time is over."""
        if not hosts:
            return
        until_s = time.monotonic() + limit_s
        pool = ThreadPoolExecutor(min(ASKED_AT_ONCE, len(hosts)), "tieredckpt-ask")
        try:
            first = self._submit(pool, hosts[:FIRST_ASKED])
            if len(hosts) > FIRST_ASKED:
                wait(first, FIRST_WAIT_S, FIRST_COMPLETED)
            asked = first + self._submit(pool, hosts[FIRST_ASKED:])
            left = set(asked)
            while left and (left_s := until_s - time.monotonic()) > 0:
                _, left = wait(left, min(left_s, PROGRESS_S))
                self.progress(len(asked) - len(left), len(asked))
        finally:
            # A thread that is left ends with the deadline of its own request.
            pool.shutdown(wait=False, cancel_futures=True)
        with self.lock:
            for host, _ in hosts:
                if host not in self.found:
                    self.silent.setdefault(host, f"did not answer within {limit_s:g} s")

    def _submit(
        self, pool: ThreadPoolExecutor, hosts: Iterable[tuple[str, PeerClient]]
    ) -> list[Future[None]]:
        return [pool.submit(self._ask, host, client) for host, client in hosts]

    def _ask(self, host: str, client: PeerClient) -> None:
        try:
            held = _twice(lambda: self._read(host, client))
        except (TieredCkptError, OSError) as error:
            with self.lock:
                self.silent[host] = str(error)[:500]
            return
        with self.lock:
            self.found[host] = held
            self.have.update(known_manifests([held]))

    def _read(self, host: str, client: PeerClient) -> Holdings:
        with self.lock:
            have = sorted(self.have)[:RECORDS_MAX]
        held = decode_holdings(client.ask(AskHoldings(manifests=tuple(have))))
        if held.host_id != host or held.namespace != self.namespace:
            raise RemoteProtocolError(f"it says that it is {held.host_id} ({held.namespace})")
        return held


def _twice(call: Callable[[], Holdings]) -> Holdings:
    """One failed request must not decide what is restored; a refusal is none."""
    begun_s = time.monotonic()
    try:
        return call()
    except AgentError:
        raise
    except (TierUnavailableError, OSError):
        if time.monotonic() - begun_s > CONNECT_S:
            raise  # it had its time
        return call()
