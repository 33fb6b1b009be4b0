"""What is known of one other host, and what of all of them outlives the agent."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

import msgspec

from tieredckpt.format.manifest import check_host
from tieredckpt.transport import messages as m
from tieredckpt.transport.peer_client import PeerClient

SLOW_RAIL = 4.0
"""A rail that is so many times slower than the host's best one is not used."""

log = logging.getLogger(__name__)


class Noted(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What of it outlives the agent."""

    run: str = ""
    leader: str = ""
    members: tuple[str, ...] = ()
    hosts: tuple[m.HostEntry, ...] = ()
    seeds: tuple[str, ...] = ()
    dns: str = ""
    replicas: int = 0
    replication_bytes_per_s: int = 0
    coming: tuple[m.SetPeers, ...] = ()
    """Of runs that take over when they have saved."""


_decoder = msgspec.json.Decoder(Noted)


def is_host(name: str) -> bool:
    """Whether a host can be called ``name``."""
    try:
        check_host(name, "a host")
    except ValueError:
        return False
    return True


def read_noted(path: Path) -> Noted:
    """What was written down; nothing if there is no such file, or it cannot be used."""
    try:
        return _decoder.decode(path.read_bytes())
    except FileNotFoundError:
        return Noted()
    except (OSError, ValueError) as error:
        log.warning("%s: the hosts that were known are forgotten: %s", path, error)
        return Noted()


@dataclass(slots=True)
class KnownHost:
    """One other host. Guarded by the lock of :class:`.peers.Peers`."""

    entry: m.HostEntry
    reachable: bool | None = None
    error: str | None = None
    rtt_s: float | None = None
    rails: dict[str, float] | None = None
    """Bytes per second by address, as probed."""
    probed_s: float | None = None
    heard_s: float | None = None
    asked_s: float | None = None
    """When it was first asked in vain since it answered last."""
    lost: bool = False
    client: PeerClient | None = None

    def state(self, member: bool) -> m.PeerState:
        """For status and trainers."""
        rails = self.rails or {}
        return m.PeerState(
            host=self.entry,
            member=member,
            reachable=self.reachable,
            error=self.error,
            address=max(rails, key=rails.__getitem__) if rails else None,
            rtt_s=self.rtt_s,
            bytes_per_s=max(rails.values()) if rails else None,
        )

    def needs_probe(self, before_s: float) -> bool:
        """Whether it answers, and its rails were not measured, or one has failed since then, or
        some are left out for long.
        """
        if not self.reachable:
            return False
        if len(self.entry.addresses) > 1 and self.client is not None and self.client.doubts:
            return True
        complete = self.rails is not None and len(self.usable()) == len(self.entry.addresses)
        return not complete and (self.probed_s is None or self.probed_s < before_s)

    def usable(self) -> tuple[str, ...]:
        """Its addresses without the slow rails, the fastest first."""
        if not self.rails:
            return self.entry.addresses
        least = max(self.rails.values()) / SLOW_RAIL
        return tuple(
            sorted(
                (a for a, speed in self.rails.items() if speed > least),
                key=lambda address: -(self.rails or {})[address],
            )
        )
