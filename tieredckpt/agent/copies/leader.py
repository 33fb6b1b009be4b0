"""What the leader decides about replication: what is copied next, what is complete, who makes up
for copies that were lost. Every decision is made by ``policy/replication.py`` and said in a record.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from tieredckpt.agent.cluster.members import Peers
from tieredckpt.agent.copies.state import KnownSaves
from tieredckpt.agent.peering.broadcast import Exchange, read_manifests
from tieredckpt.errors import CapacityError, TierUnavailableError
from tieredckpt.format.manifest import Manifest
from tieredckpt.format.records import SaveRecord
from tieredckpt.policy.placement import PlacementHost
from tieredckpt.policy.replication import (
    given_up,
    is_ordered,
    newest_replicated,
    next_of_streams,
    ordered_and_open,
    progress,
    repair,
    said_anew,
    vouchers,
)
from tieredckpt.rpc.messages.peer import Push
from tieredckpt.storage.catalog import Catalog

REPAIR_PAUSE_S = 5.0
"""After the members changed: a restart sets its hosts one after another, and then loads."""

log = logging.getLogger(__name__)


class Orders:
    """Of one namespace; does nothing on any host but the leader. Thread-safe.

    Args:
        saves: What is known.
        peers: Who lives, and who leads.
        exchange: Tells others.
        catalog: Of the memory tier.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        saves: KnownSaves,
        peers: Peers,
        exchange: Exchange,
        catalog: Catalog,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._saves = saves
        self._peers = peers
        self._exchange = exchange
        self._catalog = catalog
        self._clock = clock
        self._deciding = threading.Lock()
        self._last_stream: str | None = None
        self._repair_at_s = 0.0
        self.error: str | None = None
        """Why copies that were lost are not re-made yet."""

    def repair_in(self, pause_s: float) -> None:
        """Copies may be missing: from then on they are ordered anew."""
        self._repair_at_s = self._clock() + pause_s

    def order(self) -> None:
        """A checkpoint is about to be told: if nothing is being copied, its manifest carries the
        order. Who dies before it knows of that would give up what it has of a copy.

        What cannot be noted is ordered later: the checkpoint exists, and nobody may hear otherwise.
        """
        if self._leads():
            with self._deciding:
                try:
                    self._tell(self._order())
                except (CapacityError, TierUnavailableError) as error:
                    self.error = str(error)

    def step(self) -> float | None:
        """Decide what can be decided now; the seconds until it is to be called again."""
        if not self._leads():
            return None
        with self._deciding:
            said = [*self._finish(), *self._order()]
            wait_s = self._repair_at_s - self._clock()
            self._tell([*said, *(self._repair() if wait_s <= 0 else ())])
        return wait_s if wait_s > 0 else None

    def _leads(self) -> bool:
        return self._peers.leads and bool(self._peers.others()) and self._peers.replicas > 0

    def _tell(self, said: Sequence[bytes]) -> None:
        if said:
            self._exchange.publish(Push(records=tuple(said)))

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

    def _order(self) -> list[bytes]:
        """Order the newest checkpoint, if nothing is being copied."""
        lines = self._saves.lines()
        records = self._saves.about(*(each for line in lines.values() for each in line))
        save_id = next_of_streams(lines, records, self._last_stream, self._saves.live())
        manifest = self._saves.find(save_id) if save_id is not None else None
        if manifest is None:
            return []
        data = self._saves.say(manifest, "order")
        self._last_stream = manifest.stream
        return [data] if data is not None else []

    # --- repair -----------------------------------------------------------------------------------

    def _repair(self) -> list[bytes]:
        """Order holders for what live members have acknowledged too few copies of."""
        live = self._saves.live()
        members = self._saves.placed(sorted(live))
        self.error = None
        said: list[bytes] = []
        for manifest in self._targets():
            try:
                data = self._order_repair(manifest, members, live)
            except (CapacityError, TierUnavailableError) as error:
                self.error = str(error)
                continue
            if data is not None:
                said.append(data)
        return said

    def _targets(self) -> list[Manifest]:
        """The newest replicated of each stream, and the loaded and the ordered ones after it."""
        found: dict[str, Manifest] = {}
        for line in self._saves.lines().values():
            about = self._saves.about(*line)
            newest = newest_replicated(line, about)
            restored = {record.save_id for record in about if record.kind == "restored"}
            newer = line[: line.index(newest)] if newest is not None else line
            loaded = next((each for each in newer if each.save_id in restored), None)
            for each in (newest, loaded, *ordered_and_open(line, about)):
                if each is not None:
                    found[each.save_id] = each
        return list(found.values())

    def _order_repair(
        self, manifest: Manifest, members: Sequence[PlacementHost], live: Mapping[str, str]
    ) -> bytes | None:
        about = self._saves.about(manifest)
        if not is_ordered(manifest, about):
            # It was loaded. Who has it acknowledges it then, and more holders are told.
            has_owners = all(ref.host in live for ref in manifest.segments)
            return self._saves.say(manifest, "order") if has_owners else None
        added = repair(manifest, about, members, self._peers.replicas, live)
        if not added:
            return None
        data = self._saves.say(manifest, "order", placement=added)
        log.info(
            "namespace %s: step %d of stream %s: missing copies are assigned: %s",
            self._saves.namespace, manifest.step, manifest.stream,
            "; ".join(f"{each.host} -> {', '.join(each.holders)}" for each in added),
        )  # fmt: skip
        # Who joined just now may lack the checkpoint, or have refused it before it was ordered.
        self._exchange.push(
            Push(
                manifests=tuple(read_manifests(self._catalog, (manifest.save_id,))),
                records=self._saves.sent_along(manifest),
            ),
            {holder for each in added for holder in each.holders} - {self._peers.host_id},
        )
        return data
