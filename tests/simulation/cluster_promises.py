"""What the cluster promises, checked against what is really in the hosts' memories.

Nothing here asks the functions that decide: a mistake in them must not hide itself.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from tieredckpt.format.manifest import Manifest

if TYPE_CHECKING:
    from tests.simulation.cluster import World
    from tests.simulation.cluster_host import Host


class Violation(AssertionError):
    """Something that was promised does not hold."""


def age(manifest: Manifest) -> tuple[int, int]:
    """Orders the checkpoints of one line."""
    return manifest.attempt.number, manifest.seq


class Promises:
    """What was said, and what follows from it."""

    def __init__(self, world: World) -> None:
        self.world = world
        streams = world.setting.streams
        self.newest: dict[str, Manifest] = {}
        """By stream, the newest that was said to be replicated, on the line of now."""
        self.losses: dict[str, set[str]] = {stream: set() for stream in streams}
        """By stream, the hosts that were lost since all copies were last known to be there."""
        self.unseen: set[str] = set()
        """Hosts lost since the last restart: the leader may count on them for a moment."""
        self.disaster = False
        """More hosts were lost than there are replicas: nothing is promised this time."""
        self.ordered: dict[str, Manifest] = {}
        self.open: dict[str, Manifest] = {}
        """Ordered for replication in this attempt, and not said to be replicated yet."""
        self.declared: dict[str, Manifest] = {}

    def healthy(self) -> bool:
        """The next loss would be the first one."""
        return not any(self.losses.values())

    def lost(self, *hosts: Host) -> None:
        for gone in self.losses.values():
            gone |= {host.id for host in hosts}
        self.unseen |= {host.id for host in hosts}

    def copies(self, manifest: Manifest) -> Counter[str]:
        """By segment, how many hosts have it in their memory."""
        found: Counter[str] = Counter()
        for host in self.world.hosts.values():
            if host.alive:
                found.update(host.segments_of(manifest.save_id))
        return found

    # --- told of what happens ------------------------------------------------------------------

    def order(self, manifest: Manifest, *, repairs: bool) -> None:
        self.ordered[manifest.save_id] = manifest
        if repairs or not self._on_the_line(manifest):
            return
        if self.open and self.healthy() and not self.world.lost():
            steps = [each.step for each in self.open.values()]
            raise Violation(f"step {manifest.step} is ordered while steps {steps} are replicated")
        self.open[manifest.save_id] = manifest

    def _on_the_line(self, manifest: Manifest) -> bool:
        """What a restart went back behind may be ordered until its first save, and then goes."""
        attempt = self.world.attempt
        if attempt is None or manifest.attempt.id == attempt.id:
            return True
        bases = (base for base in attempt.bases if base.stream == manifest.stream)
        return any(
            (each.id, True) == (manifest.attempt.id, manifest.seq <= each.last_seq)
            for base in bases for each in base.lineage
        )  # fmt: skip

    def pull(self, host: Host, manifest: Manifest) -> None:
        if manifest.save_id not in self.ordered:
            raise Violation(f"{host.id} pulls step {manifest.step}, which nobody has ordered")

    def declare(self, manifest: Manifest) -> None:
        """The leader says that it is replicated."""
        have = self.copies(manifest)
        wanted = {each.host: 1 + len(each.holders) for each in manifest.replicas}
        lost = len(self.unseen)
        for ref in manifest.segments:
            if have[ref.id] < max(wanted.get(ref.host, 2) - lost, 1):
                raise Violation(
                    f"step {manifest.step} is said to be replicated, and {have[ref.id]} hosts have "
                    f"the segment of {ref.host}; it wants {wanted.get(ref.host, 2)} and lost {lost}"
                )
        if all(have[ref.id] >= wanted.get(ref.host, 2) for ref in manifest.segments):
            self.losses[manifest.stream].clear()
        newest = self.newest.get(manifest.stream)
        if newest is None or age(newest) < age(manifest):
            self.newest[manifest.stream] = manifest
        self.open.pop(manifest.save_id, None)
        self.declared[manifest.save_id] = manifest

    def fail(self, manifest: Manifest) -> None:
        """The leader gives an order up."""
        named = {ref.host for ref in manifest.segments}
        members = {host.id for host in self.world.members}
        if self.healthy() and not self.world.lost() and named <= members:
            raise Violation(f"step {manifest.step} is given up, and nobody is lost")
        self.open.pop(manifest.save_id, None)

    def nowhere(self, manifest: Manifest) -> None:
        """A holder says that nobody has a segment of it: owners let go of what is not ordered."""
        self.open.pop(manifest.save_id, None)

    def mended(self, manifest: Manifest, copies: int) -> None:
        """The leader says that all lost copies of it were made again."""
        have = self.copies(manifest)
        for ref in manifest.segments:
            if have[ref.id] < copies:
                raise Violation(
                    f"step {manifest.step} is said to be mended, and {have[ref.id]} of {copies} "
                    f"hosts have the segment of {ref.host}"
                )
        newest = self.newest.get(manifest.stream)
        if newest is None or age(manifest) >= age(newest):
            self.losses[manifest.stream].clear()

    def recycle(self, host: Host, save_id: str) -> None:
        """A host lets go of all that it has of a checkpoint."""
        if not host.segments_of(save_id):
            return
        for what, kept in (
            ("newest replicated", self.newest.values()),
            ("open", self.open.values()),
        ):
            for manifest in kept:
                if manifest.save_id == save_id:
                    raise Violation(f"{host.id} lets go of step {manifest.step}, the {what} one")

    def restore(self, stream: str, chosen: Manifest | None) -> None:
        """A restart chose this checkpoint."""
        newest = self.newest.get(stream)
        if newest is not None and (chosen is None or age(chosen) < age(newest)):
            if not self.disaster:
                what = f"step {chosen.step}" if chosen is not None else "nothing"
                raise Violation(
                    f"step {newest.step} of {stream} was replicated, and {what} is restored after "
                    f"the loss of {sorted(self.losses[stream])}"
                )
            del self.newest[stream]
            if chosen is not None and chosen.save_id in self.declared:
                self.newest[stream] = chosen

    def restarted(self) -> None:
        """What was not restored is history."""
        self.open.clear()
        self.unseen.clear()
        self.disaster = False

    def end(self) -> None:
        """All faults are over, and there was time enough."""
        if not self.world.placed.possible:
            return
        last: dict[str, Manifest] = {}
        for manifest in self.world.committed.values():
            attempt = self.world.attempt
            if attempt is not None and manifest.attempt.number == attempt.number:
                last[manifest.stream] = manifest
        for stream, manifest in last.items():
            newest = self.newest.get(stream)
            if newest is not manifest:
                step = newest.step if newest is not None else None
                raise Violation(
                    f"step {manifest.step} of {stream} was never replicated; the newest is {step}"
                )
