"""Which checkpoints are on the disks of all hosts, in a tier that each host has for itself.

Each host tells the leader's agent what it holds and will keep, and is told what is whole
(``policy/host_disks.py``). Nothing is written down: who leads anew knows nothing, and is told when
hosts ask next. Until then, and while the leader does not answer, they delete nothing that matters.
On one host nobody is asked.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from tieredckpt.errors import TieredCkptError
from tieredckpt.format.manifest import Manifest
from tieredckpt.policy.host_disks import UNKNOWN, Claim, Parts, Whole, newest_whole
from tieredckpt.transport.peer_messages import VOUCHED_MAX, Push, Vouch, WholeReply

if TYPE_CHECKING:
    from tieredckpt.agent.across import Across
    from tieredckpt.agent.keeping import Keeping

LINES_MAX = 1 << 12
"""Tiers times streams of which the leader remembers who holds what."""
LACKING_MAX = 1 << 12
"""Checkpoints remembered by the leader that a host has given up."""
OWN_LACKING_MAX = 64
"""Those of a tier that a host names each time: the leader may be another one."""
PARTS_MAX = 1 << 12
"""Checkpoints whose hosts are remembered."""
SILENT_S = 5.0
"""A leader that did not answer is asked again after so long: copies do not wait for it."""

log = logging.getLogger(__name__)


class Vouchers:
    """The leader's table: who holds what. Not thread-safe; does no I/O."""

    def __init__(self) -> None:
        self._claims: OrderedDict[tuple[str, str], dict[str, Claim]] = OrderedDict()
        self._lacking: OrderedDict[tuple[str, str], None] = OrderedDict()

    def take(
        self, vouch: Vouch, members: Collection[str], parts: Callable[[str], Parts | None]
    ) -> Whole:
        """What a host says; what it may count on."""
        line = (vouch.tier, vouch.stream)
        coming = frozenset(vouch.coming) if vouch.coming is not None else None
        claims = {h: c for h, c in self._claims.pop(line, {}).items() if h in members}
        claims[vouch.host] = Claim(frozenset(vouch.saves), coming, vouch.upto)
        self._claims[line] = claims
        while len(self._claims) > LINES_MAX:
            self._claims.popitem(last=False)
        # For good, also if somebody asks for it once more: others may have deleted theirs.
        for save_id in vouch.lacking:
            known = parts(save_id)
            if known is not None and vouch.host in known.hosts:
                self._lacking[vouch.tier, save_id] = None
        while len(self._lacking) > LACKING_MAX:
            self._lacking.popitem(last=False)
        return newest_whole(
            vouch.saves, claims, members, parts, lambda i: (vouch.tier, i) in self._lacking
        )


class HostDisks:
    """Of one namespace. Thread-safe.

    Args:
        across: The other hosts.
        keeping: Knows the tiers, and the checkpoints that are here.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        across: Across,
        keeping: Keeping,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._across = across
        self._workers = keeping.workers
        self._keeping = keeping
        self._clock = clock
        self._lock = threading.Lock()
        self._vouchers = Vouchers()
        self._parts: OrderedDict[str, Parts] = OrderedDict()
        self._told: dict[tuple[str, str], Whole] = {}
        self._last: dict[tuple[str, str], Vouch] = {}
        self._silent_until_s = -SILENT_S
        across.on_vouched = self.take

    # --- each host --------------------------------------------------------------------------------

    def ask(self, tier: str, line: Sequence[Manifest]) -> Whole:
        """What is known to be whole of what this host holds; may wait for the leader.

        Args:
            tier: Of each host.
            line: See :func:`tieredckpt.policy.host_disks.spared`. This host will keep the newest
                of them until it was told of a newer one that is whole.
        """
        alone = next((m.save_id for m in line if len(self._across.own(m)) == len(m.segments)), None)
        saves = [m.save_id for m in line]
        if alone is not None:
            saves = saves[: saves.index(alone)]
        if not saves:
            return Whole(alone)
        found = self._ask(self._vouch(tier, line[0].stream, saves))
        return replace(found, newest=found.newest or alone)

    def _vouch(self, tier: str, stream: str, saves: Sequence[str] | None, *more: str) -> Vouch:
        """``saves``: None for those of before; ``more`` is lacking, too."""
        worker = self._workers().get(tier)
        coming, newest = worker.coming(stream) if worker is not None else (None, (0, 0))
        with self._lock:
            last = self._last.get((tier, stream))
            if saves is None:  # what it held then says nothing of what it lacks now
                saves, coming = last.saves if last is not None else (), None
            made = Vouch(
                host=self._across.peers.host_id,
                tier=tier,
                stream=stream,
                saves=tuple(saves[:VOUCHED_MAX]),
                lacking=(*(last.lacking if last is not None else ()), *more)[-OWN_LACKING_MAX:],
                coming=coming if max(len(coming or ()), len(saves)) <= VOUCHED_MAX else None,
                upto=newest,
            )
            self._last[tier, stream] = made
        return made

    def _ask(self, vouch: Vouch) -> Whole:
        peers, key = self._across.peers, (vouch.tier, vouch.stream)
        if peers.is_leader:
            return self._take(vouch)
        with self._lock:
            # That one is whole stays true enough; what will not be is to be heard just now.
            known = Whole(self._told.get(key, UNKNOWN).newest)
            if self._clock() < self._silent_until_s:
                return known
        push = Push(vouched=(vouch,))
        try:
            answer = peers.ask(peers.leader, push)
        except TieredCkptError as error:
            log.debug("the leader does not say what is whole in tier %s: %s", vouch.tier, error)
            with self._lock:
                self._silent_until_s = self._clock() + SILENT_S
            return known
        found = UNKNOWN
        for each in answer.whole:
            found = Whole(each.newest or None, frozenset(each.never), frozenset(each.missing))
        with self._lock:
            self._told[key] = found
        return found

    def lack(self, tier: str, stream: str, save_id: str) -> None:
        """This host does not hold its part of a checkpoint, which it has given up. Never waits.

        Until that arrives others keep theirs, or until a newer one is whole.
        """
        peers, worker = self._across.peers, self._workers().get(tier)
        if not peers.active or worker is None or worker.spec.scope != "host":
            return
        vouch = self._vouch(tier, stream, None, save_id)
        if peers.is_leader:
            self._take(vouch)
        else:
            self._across.exchange.push(Push(vouched=(vouch,)), [peers.leader])

    # --- the leader -------------------------------------------------------------------------------

    def take(self, vouched: Iterable[Vouch]) -> tuple[WholeReply, ...]:
        """What hosts said that they hold; what each of them may count on."""
        peers, found = self._across.peers, []
        for each in vouched:
            known = each.host in peers.members() and each.tier in self._workers()
            whole = self._take(each) if known and peers.leads else UNKNOWN
            found.append(WholeReply(
                newest=whole.newest or "",
                never=tuple(sorted(whole.never)),
                missing=tuple(sorted(whole.missing)),
            ))  # fmt: skip
        return tuple(found)

    def _take(self, vouch: Vouch) -> Whole:
        members = {*self._across.peers.members(), self._across.peers.host_id}
        with self._lock:
            return self._vouchers.take(vouch, members, self._parts_of)

    def _parts_of(self, save_id: str) -> Parts | None:
        known = self._parts.get(save_id)
        if known is None:
            manifest = self._keeping.find(save_id)
            if manifest is None:
                return None
            hosts = frozenset(ref.host for ref in manifest.segments)
            known = self._parts[save_id] = Parts(hosts, (manifest.attempt.number, manifest.seq))
            while len(self._parts) > PARTS_MAX:
                self._parts.popitem(last=False)
        return known
