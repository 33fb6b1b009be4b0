"""Where a copy is pulled from: other hosts' memory, then what tiers of hosts still have of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from tieredckpt.errors import TieredCkptError
from tieredckpt.format.manifest import Manifest
from tieredckpt.policy.replication import Pull
from tieredckpt.tiers.base import OpenObject
from tieredckpt.tiers.pool import TIER
from tieredckpt.transport.messages import NamespaceSpec


class Stream(Protocol):
    """One range on its way; see :class:`tieredckpt.transport.peer_client.PeerClient`."""

    def read_into(self, into: memoryview) -> None:
        """Fill ``into``, or raise TierUnavailableError."""

    def close(self) -> None:
        """Idempotent."""


class RangeClient(Protocol):
    """What a pull needs of a peer's client. Thread-safe."""

    def open_range(self, segment_id: str, tier: str, start: int, stop: int) -> Stream:
        """One ranged GET.

        Raises:
            TierUnavailableError: The host does not answer.
            NotFoundError: It does not hold the segment.
            IntegrityError: Its copy is shorter than that.
        """

    def report_damage(self, tier: str, segment_id: str, blocks: Sequence[int], reason: str) -> None:
        """Tell the host that its copy is bad."""


@dataclass(frozen=True, slots=True)
class Donor:
    """A place that may hold the segment."""

    host_id: str
    client: RangeClient
    tier: str = TIER

    @property
    def name(self) -> str:
        """For messages; no two donors of a pull have the same."""
        return self.host_id if self.tier == TIER else f"{self.host_id} ({self.tier})"


class TiersHere(Protocol):
    """What a pull needs of this host's own tiers. Thread-safe."""

    def open_in(self, tier: str, segment_id: str) -> OpenObject:
        """Raises NotFoundError: there is no such tier, it does not answer, or it lacks that."""

    def quarantine(self, tier: str, segment_id: str, blocks: Sequence[int], reason: str) -> None:
        """Note that a copy is bad."""


class OwnTiers:
    """This host's own tiers as a donor: implements :class:`RangeClient` without a network."""

    def __init__(self, here: TiersHere) -> None:
        self._here = here

    def open_range(self, segment_id: str, tier: str, start: int, stop: int) -> Stream:
        """See :class:`RangeClient`."""
        return _OwnRange(self._here.open_in(tier, segment_id), start)

    def report_damage(self, tier: str, segment_id: str, blocks: Sequence[int], reason: str) -> None:
        """See :class:`RangeClient`."""
        self._here.quarantine(tier, segment_id, blocks, reason)


class _OwnRange:
    """Bytes of a tier of this host, in order."""

    def __init__(self, opened: OpenObject, start: int) -> None:
        self._opened = opened
        self._at = start

    def read_into(self, into: memoryview) -> None:
        self._opened.read_into(self._at, into)
        self._at += len(into)

    def close(self) -> None:
        self._opened.close()


@dataclass(frozen=True, slots=True)
class TierNames:
    """Tiers that may have a segment, the cheapest first."""

    host: tuple[str, ...] = ()
    """Of scope host: each has what its host wrote."""
    shared: tuple[str, ...] = ()
    """Of scope shared: this host can read them, too."""


def tiers_for(spec: NamespaceSpec | None, manifest: Manifest) -> TierNames:
    """Those that a checkpoint is destined for."""
    wanted = [t for t in (spec.tiers if spec is not None else ()) if t.name in manifest.tiers]
    return TierNames(
        host=tuple(each.name for each in wanted if each.scope == "host"),
        shared=tuple(each.name for each in wanted if each.scope != "host"),
    )


def donors_of(
    pull: Pull, tiers: TierNames, client: Callable[[str], RangeClient], own: tuple[str, RangeClient]
) -> list[Donor]:
    """In the order to try: memory of other hosts, tiers of this one, disks of the others.

    Args:
        pull: What is wanted.
        tiers: Those that the checkpoint is destined for.
        client: The line to a host; a host of which it raises one of our errors is left out.
        own: This host.
    """
    lines: list[tuple[str, RangeClient]] = []
    for host in pull.sources:
        try:
            lines.append((host, client(host)))
        except TieredCkptError:  # nobody can name an address of it
            continue
    found = [Donor(host, line) for host, line in lines]
    found += [Donor(*own, tier) for tier in (*(tiers.host if pull.own else ()), *tiers.shared)]
    return found + [Donor(host, line, tier) for host, line in lines for tier in tiers.host]
