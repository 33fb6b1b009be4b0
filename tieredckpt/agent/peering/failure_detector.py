"""The background thread about other hosts: who answers, how fast, who is new, what was missed.

It exists once another host or a seed is known. Whatever waits for a host runs in the exchange's
threads, so one that hangs delays nobody. Time and randomness are passed in; :meth:`PeerWatch.step`
is the thread's turn without its waiting.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterable
from random import Random

from tieredckpt.agent.cluster.members import Peers, Seeds
from tieredckpt.agent.host.addresses import split_port, with_port
from tieredckpt.agent.peering.broadcast import INTERVAL_S, AntiEntropy, Exchange
from tieredckpt.errors import NotFoundError, TieredCkptError
from tieredckpt.format.manifest import Manifest
from tieredckpt.rpc.messages import agent as m
from tieredckpt.rpc.messages.peer import Identify
from tieredckpt.rpc.peer_client import PeerClient

STEP_S = 0.5
ASK_S = 5.0
"""A host that this one works with, and that has said nothing for so long, is asked."""
STRANGER_S = 60.0
"""The same for hosts outside of the job."""
SEEDS_S = 5.0
"""How often addresses and names are tried again."""
SEEDS_SOON_S = 0.25
ASKS_PER_S = 50
"""A leader of thousands asks them more seldom."""
FEW = 16
"""Up to so many members everybody asks everybody."""
STRANGERS_AT_ONCE = 4
PROBE_BYTES = 1 << 20

log = logging.getLogger(__name__)


class PeerWatch:
    """Of one namespace.

    Args:
        namespace: Its name.
        peers: Who is watched.
        exchange: Whose threads ask.
        anti_entropy: Compared with one member now and then.
        manifests: What is committed in memory: who works with whom.
        clock: Monotonic seconds.
        rng: Chooses whom to compare with, and when.
    """

    def __init__(
        self,
        namespace: str,
        peers: Peers,
        exchange: Exchange,
        anti_entropy: AntiEntropy,
        manifests: Callable[[], tuple[Manifest, ...]],
        *,
        clock: Callable[[], float] = time.monotonic,
        rng: Random | None = None,
    ) -> None:
        self._namespace = namespace
        self._peers = peers
        self._exchange = exchange
        self._anti_entropy = anti_entropy
        self._manifests = manifests
        self._clock = clock
        self._rng = rng or Random()
        self._next_sync_s = 0.0
        self._next_seeds_s = 0.0
        self._seeds_wait_s = SEEDS_SOON_S
        self._asking: set[str] = set()
        self._asked_s: dict[str, float] = {}
        """When hosts from which nothing was heard were asked last."""
        self._greet: list[str] = []
        """Members that may know this host by an address of before."""
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._stopping = False
        self._thread: threading.Thread | None = None

    # --- life -------------------------------------------------------------------------------------

    def start(self, *, moved: bool = False) -> None:
        """As :meth:`begin`, and do at once what is done now and then: the members are other ones.

        Args:
            moved: This host may be reached elsewhere than before: all members are to be told.
        """
        if moved:
            self._greet = list(self._peers.others())
        self.begin()
        self._next_sync_s = self._next_seeds_s = 0.0
        self._seeds_wait_s = SEEDS_SOON_S
        self._wake.set()

    def begin(self) -> None:
        """Start the thread, if there is anybody to watch. Idempotent."""
        if not (self._peers.active or self._peers.seeds):
            return
        with self._lock:
            if self._thread is None and not self._stopping:
                self._thread = threading.Thread(
                    target=self._run, name=f"tck-peers-{self._namespace}", daemon=True
                )
                self._thread.start()

    def stop(self) -> None:
        """End; does not wait. Idempotent."""
        self._stopping = True
        self._wake.set()

    def _run(self) -> None:
        while not self._stopping:
            try:
                self.step()
            except Exception:  # the top of a daemon thread: the next turn may succeed
                log.exception("peers of %s: unexpected", self._namespace)
            self._wake.wait(STEP_S)
            self._wake.clear()

    def step(self) -> None:
        """Start whatever is due."""
        now_s = self._clock()
        try:
            self._peers.secret()
        except NotFoundError:  # not served yet: nobody can be asked
            return
        if now_s >= self._next_seeds_s:
            self._ask_seeds()
            # Soon at first: a recovery may wait for one that has not answered.
            self._seeds_wait_s = min(SEEDS_S, 2 * self._seeds_wait_s)
            self._next_seeds_s = now_s + self._seeds_wait_s
        for host in self._due():
            self._once(_asks(host), lambda h=host: self._identify(h))  # type: ignore[misc]
        for host in self._peers.needs_probe(self.partners()):
            self._once(f"probe {host}", lambda h=host: self._probe(h))  # type: ignore[misc]
        if now_s >= self._next_sync_s and (others := self._peers.others()):
            self._next_sync_s = now_s + INTERVAL_S * self._rng.uniform(0.5, 1.5)
            answering = sorted(set(others) - self._peers.lost()) or others
            chosen = {self._rng.choice(answering)}
            unmet = self._peers.unmet()
            # Who has just started may have missed much, or not told what it had committed; and
            # retention waits for the leader to have met all.
            if self._peers.is_leader or len(unmet) >= len(answering):
                chosen.update(self._rng.sample(unmet, min(FEW, len(unmet))))
            elif self._rng.random() < ASKS_PER_S * INTERVAL_S / len(others):  # not all at once
                chosen.update({self._peers.leader}.intersection(unmet))
            for host in sorted(chosen):
                self._once(f"sync {host}", lambda h=host: self._anti_entropy.sync_with(h))  # type: ignore[misc]
        self._peers.note_changes()

    def _once(self, what: str, call: Callable[[], None]) -> None:
        """``call`` in the background, unless the last one of the kind is still under way."""
        with self._lock:
            if what in self._asking:
                return
            self._asking.add(what)

        def run() -> None:
            try:
                call()
            finally:
                with self._lock:
                    self._asking.discard(what)

        if not self._exchange.soon(run):
            with self._lock:
                self._asking.discard(what)

    # --- who answers ------------------------------------------------------------------------------

    def partners(self) -> list[str]:
        """Members that this host exchanges segments with, or must know to be alive."""
        others = self._peers.others()
        if len(others) <= FEW or self._peers.is_leader:
            return list(others)
        me = self._peers.host_id
        near = {self._peers.leader}
        for manifest in self._manifests():
            for each in manifest.replicas:
                if each.host == me:
                    near.update(each.holders)
                elif me in each.holders:
                    near.add(each.host)
        return sorted(near & set(others))

    def _due(self) -> list[str]:
        now_s, partners = self._clock(), self.partners()
        every_s = max(ASK_S, len(partners) / ASKS_PER_S)
        quiet = sorted(set(self._peers.unheard(every_s)).intersection(partners))
        strangers = sorted(set(self._peers.unheard(STRANGER_S)).difference(self._peers.others()))
        due = [h for h in quiet if now_s - self._asked_s.get(h, -every_s) >= every_s]
        far = [h for h in strangers if now_s - self._asked_s.get(h, -STRANGER_S) >= STRANGER_S]
        # Most are gone for good: they may not hold all the threads until their deadlines.
        free = STRANGERS_AT_ONCE - sum(_asks(host) in self._asking for host in strangers)
        due += self._rng.sample(far, max(0, min(free, len(far))))
        due += self._greet[:FEW]
        del self._greet[:FEW]
        known = {*quiet, *strangers}
        self._asked_s = {h: s for h, s in self._asked_s.items() if h in known}
        self._asked_s |= dict.fromkeys(due, now_s)
        return due

    def _identify(self, host: str) -> None:
        found = self._peers.ask(host, Identify(caller=self._peers.own()))
        self._peers.learn([found])
        self._peers.heard(host)
        if host not in self._peers.others():
            # A host of another side, perhaps: a fork must be known while the job can still end it.
            self._anti_entropy.sync_with(host)

    def _identify_at(self, address: str) -> None:
        own = self._peers.own()
        if own is not None and address in own.addresses:
            return
        nobody = m.HostEntry(host_id="", incarnation="0" * 32, addresses=(address,))
        client = PeerClient(nobody, self._namespace, self._peers.secret())
        with self._peers.lines.add(client):
            found = client.identify(own)
        self._peers.learn([found], member=True)
        self._peers.heard(found.host_id)

    def _ask_seeds(self) -> None:
        seeds = self._peers.seeds
        self._ask_at(seeds, seeds.addresses)
        if seeds.dns:
            self._once(f"dns {seeds.dns}", lambda: self._resolve(seeds))

    def _ask_at(self, seeds: Seeds, addresses: Iterable[str]) -> None:
        """Learn who is at these addresses, if no member is known to be there."""
        known = self._members_addresses()
        for address in addresses:
            if address in known:
                seeds.met(address)
            else:
                self._once(f"seed {address}", lambda a=address: self._ask_seed(seeds, a))  # type: ignore[misc]

    def _ask_seed(self, seeds: Seeds, address: str) -> None:
        try:
            self._identify_at(address)
        except TieredCkptError as error:
            seeds.failed(address, error.message)
            raise
        seeds.met(address)

    def _members_addresses(self) -> set[str]:
        entries = [self._peers.entry(host) for host in self._peers.members()]
        return {address for entry in entries if entry is not None for address in entry.addresses}

    def _resolve(self, seeds: Seeds) -> None:
        try:
            host, port = split_port(seeds.dns)
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, ValueError) as error:
            if seeds.failed(seeds.dns, f"the name cannot be resolved: {error}"):
                log.warning("namespace %s: discovery: %s: %s", self._namespace, seeds.dns, error)
            return
        addresses = [with_port(str(where[0]), int(where[1])) for *_, where in found]
        seeds.resolved(addresses)
        self._ask_at(seeds, addresses)

    # --- how fast ---------------------------------------------------------------------------------

    def _probe(self, host: str) -> None:
        entry = self._peers.entry(host)
        if entry is None:
            return
        secret, rails, fastest_s = self._peers.secret(), dict[str, float](), 0.0
        for address in entry.addresses:
            try:
                client = PeerClient(entry, self._namespace, secret, address=address)
                with self._peers.lines.add(client):
                    rtt_s, speed = client.probe(PROBE_BYTES)
            except TieredCkptError as error:
                log.info("namespace %s: host %s: %s", self._namespace, host, error)
                continue
            fastest_s = rtt_s if not rails else min(fastest_s, rtt_s)
            rails[address] = speed
        if rails:
            self._peers.probed(host, entry, fastest_s, rails)


def _asks(host: str) -> str:
    return f"host {host}"
