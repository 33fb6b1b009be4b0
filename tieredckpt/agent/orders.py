"""What the leader decides about replication: what is copied next, what is complete, who makes up
for copies that were lost. Every decision is made by ``policy/replication.py`` and said in a record.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence, Set

from tieredckpt.agent.exchange import Exchange
from tieredckpt.agent.holdings_of_hosts import Held, ask_holdings
from tieredckpt.agent.known_saves import KnownSaves
from tieredckpt.agent.peers import Peers
from tieredckpt.errors import CapacityError, TierUnavailableError
from tieredckpt.format.manifest import Manifest
from tieredckpt.format.record import SaveRecord
from tieredckpt.policy.replication import (
    given_up,
    newest_replicated,
    next_of_streams,
    ordered_and_open,
    placement_of,
    progress,
    repair,
    said_anew,
    vouchers,
)
from tieredckpt.tiers.catalog import Catalog
from tieredckpt.transport.peer_messages import Push

REPAIR_PAUSE_S = 5.0
"""After the members changed: a restart sets its hosts one after another, and then loads."""
SENT_ALONG_S = 0.1
"""A commit at this host sends the order with its manifest; else it is sent alone, so much later."""
ASK_AGAIN_S = 3.0
"""A member that does not answer answers soon, or is lost."""

log = logging.getLogger(__name__)


class Orders:
    """Of one namespace; does nothing on any host but the leader. Thread-safe.

    Args:
        saves: What is known.
        peers: Who lives, and who leads.
        exchange: Tells others.
        catalog: Of the memory tier.
        held_here: Ids of the segments of this namespace that are whole in this host's memory.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        saves: KnownSaves,
        peers: Peers,
        exchange: Exchange,
        catalog: Catalog,
        held_here: Callable[[], Set[str]],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._saves = saves
        self._peers = peers
        self._exchange = exchange
        self._catalog = catalog
        self._held_here = held_here
        self._clock = clock
        # A commit decides in the caller's thread, so that its push carries the order.
        self._deciding = threading.Lock()
        self._last_stream: str | None = None
        self._unsent: dict[str, tuple[float, bytes]] = {}
        """Orders by save id that a commit's own push may still carry, and since when."""
        self._repair_at_s: float | None = None
        self.error: str | None = None
        """Why copies that were lost are not re-made yet."""

    # --- what happened ----------------------------------------------------------------------------

    def committed(self) -> None:
        """A checkpoint exists: if nothing is being copied, it is ordered before others hear."""
        if self._leads():
            with self._deciding:
                for save_id, data in self._order():
                    self._unsent[save_id] = (self._clock(), data)

    def sent_along(self, manifest: Manifest) -> None:
        """The order of this checkpoint goes to all members with its manifest."""
        with self._deciding:
            self._unsent.pop(manifest.save_id, None)

    def repair_in(self, pause_s: float) -> None:
        """Copies may be missing: look at what the members hold, after this pause."""
        with self._deciding:
            at_s = self._clock() + pause_s
            if self._repair_at_s is None or at_s < self._repair_at_s or pause_s:
                self._repair_at_s = at_s

    # --- deciding ---------------------------------------------------------------------------------

    def _leads(self) -> bool:
        return self._peers.leads and bool(self._peers.others()) and self._peers.replicas > 0

    def step(self) -> float | None:
        """Decide what can be decided now; the seconds until it is to be called again."""
        if not self._leads():
            return None
        with self._deciding:
            said = [*self._finish(), *(data for _, data in self._order())]
            late_s = self._clock() - SENT_ALONG_S
            for save_id, (since_s, data) in list(self._unsent.items()):
                if since_s <= late_s:  # it was committed at another host
                    said.append(data)
                    del self._unsent[save_id]
            waits = [SENT_ALONG_S] if self._unsent else []
            repair_at_s = self._repair_at_s
        if said:
            self._exchange.publish(Push(records=tuple(said)))
        if repair_at_s is not None:
            wait_s = repair_at_s - self._clock()
            if wait_s <= 0:
                return self._repair()
            waits.append(wait_s)
        return min(waits, default=None)

    def _finish(self) -> list[bytes]:
        """Say what is complete, and what never will be."""
        said: list[bytes | None] = []
        live = self._saves.live()
        for line in self._saves.lines().values():
            about = self._saves.about(*line)
            hopeless = given_up(line, about, live)
            if (mended := said_anew(line, about, live)) is not None:
                said.append(self._say_replicated(mended, about, live))
            for manifest in ordered_and_open(line, about):
                data = None
                if progress(manifest, about, live).complete:
                    data = self._say_replicated(manifest, about, live)
                elif manifest in hopeless:
                    gone = sorted({ref.host for ref in manifest.segments} - live.keys())
                    text = f"hosts that are needed for its copies are lost: {', '.join(gone)}"
                    data = self._saves.say(manifest, "failed", text=text)
                    log.warning(
                        "namespace %s: step %d of stream %s is not replicated: %s",
                        self._saves.namespace, manifest.step, manifest.stream, text,
                    )  # fmt: skip
                if data is not None:
                    said.append(data)
                    break  # what is older is overtaken; the rest is looked at with the new record
        return [data for data in said if data is not None]

    def _say_replicated(
        self, manifest: Manifest, about: Sequence[SaveRecord], live: Mapping[str, str]
    ) -> bytes | None:
        memories = vouchers(manifest, about, live)
        data = self._saves.say(manifest, "replicated", segments=memories)
        log.info(
            "namespace %s: step %d of stream %s (%s) is replicated, in the memory of %d hosts",
            self._saves.namespace, manifest.step, manifest.stream, manifest.save_id, len(memories),
        )  # fmt: skip
        return data

    def _order(self) -> list[tuple[str, bytes]]:
        """Order the newest checkpoint, if nothing is being copied; its save id, and the record."""
        lines = self._saves.lines()
        records = self._saves.about(*(each for line in lines.values() for each in line))
        save_id = next_of_streams(lines, records, self._last_stream, self._saves.live())
        manifest = self._saves.find(save_id) if save_id is not None else None
        if manifest is None:
            return []
        data = self._saves.say(manifest, "order")
        self._last_stream = manifest.stream
        return [(manifest.save_id, data)] if data is not None else []

    # --- repair -----------------------------------------------------------------------------------

    def _repair(self) -> float | None:
        """Order holders for what live members hold too few copies of."""
        targets = self._targets()
        live = self._saves.live()
        saves = frozenset(manifest.save_id for manifest in targets)
        held = {self._peers.host_id: Held(frozenset(self._held_here()), saves)}
        silent: list[str] = []
        if targets:
            found, silent = ask_holdings(self._peers, self._exchange, self._catalog, targets)
            held |= found
        if silent:
            self.error = f"waiting for {', '.join(silent)} to say what they hold"
            with self._deciding:
                self._repair_at_s = self._clock() + ASK_AGAIN_S
            return ASK_AGAIN_S
        with self._deciding:
            self._repair_at_s = None
            self.error = None
            said = []
            for manifest in targets:
                data = self._order_repair(manifest, held, live)
                if data is not None:
                    said.append(data)
        if said:
            self._exchange.publish(Push(records=tuple(said)))
        return 0.0 if said else None

    def _targets(self) -> list[Manifest]:
        """The newest replicated, the loaded and the ordered checkpoints of each stream."""
        found: dict[str, Manifest] = {}
        for line in self._saves.lines().values():
            about = self._saves.about(*line)
            newest = newest_replicated(line, about)
            restored = {record.save_id for record in about if record.kind == "restored"}
            loaded = next((each for each in line if each.save_id in restored), None)
            for each in (newest, loaded, *ordered_and_open(line, about)):
                if each is not None:
                    found[each.save_id] = each
        return list(found.values())

    def _order_repair(
        self, manifest: Manifest, held: Mapping[str, Held], live: Mapping[str, str]
    ) -> bytes | None:
        about = self._saves.about(manifest)
        # Who did not take the manifest over cannot keep copies for it.
        members = self._saves.placed(
            host for host in sorted(live) if host in held and manifest.save_id in held[host].saves
        )
        segments = {host: each.segments for host, each in held.items()}
        added = repair(
            manifest, segments, members, self._peers.replicas, placement_of(manifest, about)
        )
        if not added:
            return None
        try:
            data = self._saves.say(manifest, "order", placement=added)
        except (CapacityError, TierUnavailableError) as error:
            self.error = str(error)
            return None
        log.info(
            "namespace %s: step %d of stream %s: copies that are missing are ordered: %s",
            self._saves.namespace, manifest.step, manifest.stream,
            "; ".join(f"{each.host} -> {', '.join(each.holders)}" for each in added),
        )  # fmt: skip
        return data
