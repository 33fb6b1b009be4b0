"""The memory tier's keys: its slots on this host, and the copies on others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tieredckpt.policy.config_keep import read_memory_keep
from tieredckpt.policy.config_sections import Section, duration, whole_number
from tieredckpt.policy.config_source import Tree
from tieredckpt.policy.retention import Keep
from tieredckpt.policy.units import (
    format_duration,
    format_rate,
    format_size,
    parse_rate,
    parse_size,
)

MEMORY_KEEP_LAST_MAX = 100
MEMORY_CAPACITY_BYTES_MIN = 2 << 20
"""The smallest slot is 1 MiB and a page."""
REPLICAS_MAX = 64
REPLICATION_BYTES_PER_S_MIN = 1 << 20
"""Slower than that, no checkpoint of any size would ever be replicated."""

MEMORY_KEEP = Keep(last=2)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryConfig:
    """The memory tier."""

    capacity_bytes: int | None = None
    """Limit of this namespace's slots on one host; None: the engine takes its default."""
    keep: Keep = MEMORY_KEEP
    wait_s: float = 1.0
    """How long a save waits for a free slot before it fails."""
    replicas: int | None = None
    """Copies on other hosts; None: 1 if the job has several hosts, else 0."""
    require_replicas: bool = False
    """Refuse to open with fewer hosts than the replicas need, instead of warning once."""
    replication_bytes_per_s: int | None = None
    """Limit of what this host pulls; None: no limit."""
    copies: Literal["sealed", "local"] = "sealed"
    """local: each host seals what its own ranks need, once, also what others write."""

    def effective(self) -> dict[str, object]:
        """As it is written in the configuration."""
        rate, capacity = self.replication_bytes_per_s, self.capacity_bytes
        return {
            "capacity": None if capacity is None else format_size(capacity),
            "keep": {"last": self.keep.last},
            "wait": format_duration(self.wait_s),
            "replicas": self.replicas,
            "require_replicas": self.require_replicas,
            "replication_bandwidth": None if rate is None else format_rate(rate),
            "copies": self.copies,
        }


def read_memory(value: Tree) -> MemoryConfig:
    """The section ``memory``. Raises ConfigError."""
    section = Section(
        value,
        "memory",
        (
            "capacity", "keep", "wait", "replicas", "require_replicas", "replication_bandwidth",
            "copies",
        ),
        later={"require_survives": "demanding what the memory tier survives is"},
        elsewhere={
            "placement": '"labels: {zone: b, rack: r7}", which placement follows',
            "ack": '"save: {ack: replicated}"',
            "bandwidth": '"replication_bandwidth: 2GiB/s"',
        },
    )  # fmt: skip
    default = MemoryConfig()
    copies = section.choice("copies", ("sealed", "local"), default.copies)
    return MemoryConfig(
        capacity_bytes=section.read("capacity", _parse_capacity, None),
        keep=read_memory_keep(section, default.keep, MEMORY_KEEP_LAST_MAX),
        wait_s=section.read("wait", duration(0, 3600), default.wait_s),
        replicas=section.read("replicas", whole_number(0, REPLICAS_MAX, "replicas"), None),
        require_replicas=section.flag("require_replicas", default.require_replicas),
        replication_bytes_per_s=section.read("replication_bandwidth", _parse_bandwidth, None),
        copies="local" if copies == "local" else "sealed",
    )


def _parse_capacity(value: object) -> int:
    return parse_size(value, least_bytes=MEMORY_CAPACITY_BYTES_MIN)


def _parse_bandwidth(value: object) -> int:
    return parse_rate(value, least_bytes_per_s=REPLICATION_BYTES_PER_S_MIN)
