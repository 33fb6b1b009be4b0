"""The configuration: YAML, a dict and environment variables in, frozen structs out.

The page for users, with every key, is docs/reference/configuration.md. Nothing here examines the
machine: the component that uses a folder or memory checks that it exists and suffices.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

import msgspec

from tieredckpt.config.names import parse_folder, parse_name, resolve_namespace
from tieredckpt.config.network import (
    DiscoveryConfig,
    NetworkConfig,
    SecurityConfig,
    TlsConfig,
    parse_labels,
    read_discovery,
)
from tieredckpt.config.reader import Source, Tree, apply_environment, read_source
from tieredckpt.config.sections import (
    Options,
    Written,
    duration,
    entries,
    fail,
    integer,
    keys_of,
    rate,
    read,
    size,
)
from tieredckpt.config.tiers import (
    MEMORY_KEEP,
    Best,
    Keep,
    ObjectOptions,
    TierSpec,
    parse_memory_keep,
    parse_tiers,
)
from tieredckpt.config.units import Every
from tieredckpt.errors import ConfigError

__all__ = [
    "AgentConfig", "Best", "CloseConfig", "Config", "DataConfig", "DiscoveryConfig", "Every",
    "Keep",
    "MemoryConfig", "NetworkConfig", "ObjectOptions", "RecoveryConfig", "SaveConfig",
    "SecurityConfig", "TierSpec", "TlsConfig", "load_config", "resolve_namespace",
]  # fmt: skip

HINTS = {
    "ack": '"save: {ack: replicated}"',
    "replicas": '"memory: {replicas: 1}"',
    "peers": '"discovery: {static: [host-a:7411, host-b:7411]}"',
    "placement": '"labels: {zone: b, rack: r7}", which placement follows',
    "token": '"security: {token_file: /run/secrets/tieredckpt}", with the token in that file',
    "tls": '"security: {tls: {cert: /tls/tls.crt, key: /tls/tls.key, ca: /tls/ca.crt}}"',
    "listen": '"network: {interface: eth0, port: 7411}"',
    "interface": '"network: {interface: eth0}"',
    "cidr": '"network: {cidr: 10.0.0.0/8}"',
    "on_save_error": '"save: {on_error: raise}"',
    "max_skipped": '"save: {max_skipped: 3}"',
    "require_survives": "delete it: the survival of memory cannot be demanded in this release",
}
"""Wrong keys that people write at the top, below ``memory`` or ``agent``, with the right ones."""
MAX_SKIPPED_MAX = 1_000_000
DATA_STEPS_MAX = 1_000_000
MEMORY_CAPACITY_BYTES_MIN = 2 << 20
"""The smallest slot is 1 MiB and a page."""
REPLICAS_MAX = 64
REPLICATION_BYTES_PER_S_MIN = 1 << 20
"""At a lower rate no checkpoint of any size would ever be replicated."""


class MemoryConfig(Options, frozen=True):
    """The memory tier: its slots on this host, and the copies on others."""

    hints: ClassVar = HINTS | {"bandwidth": '"replication_bandwidth: 2GiB/s"'}

    capacity_bytes: Annotated[int | None, size("capacity", MEMORY_CAPACITY_BYTES_MIN)] = None
    """Limit of this namespace's slots on one host; None: the engine takes its default."""
    keep: Annotated[Keep, Written(parse_memory_keep, lambda keep: {"last": keep.last})] = (
        MEMORY_KEEP
    )
    wait_s: Annotated[float, duration(0, 3600)] = 1.0
    """How long a save waits for a free slot before it fails."""
    replicas: Annotated[int | None, Written(integer(0, REPLICAS_MAX, "replicas"))] = None
    """Copies on other hosts; None: 1 if the job has several hosts, else 0."""
    require_replicas: bool = False
    """Refuse to open with fewer hosts than the replicas need, instead of warning once."""
    replication_bytes_per_s: Annotated[
        int | None, rate("replication_bandwidth", REPLICATION_BYTES_PER_S_MIN)
    ] = None
    """Limit of this host's pulls from other hosts; None: no limit."""
    copies: Literal["sealed", "local"] = "sealed"
    """local: each host also writes mirrors of the segments that its ranks hold equal data of."""


class AgentConfig(Options, frozen=True):
    """How the node agent is found and started."""

    hints: ClassVar = HINTS

    runtime_dir: Annotated[str | None, Written(parse_folder)] = None
    """Absolute path; None: ``TIEREDCKPT_RUNTIME_DIR``, else ``/dev/shm/tieredckpt-<uid>``."""
    start: Literal["auto", "never"] = "auto"
    start_timeout_s: Annotated[float, duration(1, 600)] = 60.0
    idle_timeout_s: Annotated[float | None, duration(1, 366 * 86400)] = None
    """An agent started here ends after so long without a session; None: never."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"


class RecoveryConfig(Options, frozen=True):
    """How a restart chooses a checkpoint."""

    wait_s: Annotated[float, duration(0, 86400)] = 30.0
    """How long a restart waits for an unreachable tier before it considers an older step."""


class SaveConfig(Options, frozen=True):
    """Deadlines of a save, and the effect of its failure."""

    on_error: Literal["raise", "skip"] = "skip"
    """For TieredCkptError; the first save of a stream in a process always raises."""
    max_skipped: Annotated[int, Written(integer(0, MAX_SKIPPED_MAX, "saves"))] = 3
    """So many saves of a stream in a row may be skipped; the next failure raises."""
    timeout_s: Annotated[float, duration(1, 86400)] = 300.0
    """Deadline of all waits of a save except for ``memory.wait``."""
    ack: Literal["memory", "replicated"] = "memory"
    """The level that a checkpoint reaches before its save returns."""
    wait_timeout_s: Annotated[float, duration(0, 86400)] = 60.0
    """How long a save, a load or ``close`` waits for an earlier save in the background."""


class CloseConfig(Options, frozen=True):
    """What the end of an engine waits for."""

    flush_s: Annotated[float, duration(0, 86400)] = 60.0
    """Longest wait until the newest checkpoint is in the tiers; 0: it is not copied there."""


class DataConfig(Options, frozen=True):
    """The data cache of ``tieredckpt.data`` on one host."""

    capacity_bytes: Annotated[int | None, size("capacity")] = None
    """Limit of all entries on one host; None: an eighth of the file system."""
    ahead: Annotated[int, Written(integer(1, DATA_STEPS_MAX, "steps"))] = 4
    """So many steps are loaded before they are needed."""
    behind: Annotated[int, Written(integer(1, DATA_STEPS_MAX, "steps"))] = 16
    """So many steps are kept after they were used, to be repeated."""


def _effective_tiers(tiers: tuple[TierSpec, ...]) -> list[object]:
    return [tier.effective() for tier in tiers]


class Config(Options, frozen=True):
    """A complete, valid configuration. Made by :func:`load_config`.

    ``load_config(config.effective(), {})`` equals the configuration.
    """

    hints: ClassVar = HINTS

    namespace: Annotated[str | None, Written(parse_name)] = None
    """As configured; :func:`resolve_namespace` decides."""
    take_over: bool = False
    """Go on from a job of another name that saves on this host, which ends it."""
    memory: MemoryConfig = MemoryConfig()
    tiers: Annotated[tuple[TierSpec, ...], Written(parse_tiers, _effective_tiers)] = ()
    agent: AgentConfig = AgentConfig()
    recovery: RecoveryConfig = RecoveryConfig()
    save: SaveConfig = SaveConfig()
    close: CloseConfig = CloseConfig()
    data: DataConfig = DataConfig()
    discovery: DiscoveryConfig = DiscoveryConfig()
    network: NetworkConfig = NetworkConfig()
    security: SecurityConfig = SecurityConfig()
    labels: Annotated[tuple[tuple[str, str], ...], Written(parse_labels, dict)] = ()
    """Failure domains of this host, such as ("zone", "b"), ("rack", "7"). Their order here has no
    meaning: placement sorts them by name (region, zone, row, rack, host, then alphabetically)."""

    def wanted_replicas(self, num_hosts: int) -> int:
        """Number of copies on other hosts for a job on ``num_hosts`` hosts, possible or not.

        By default 1 on several hosts, and 0 on one host unless another key requires copies.
        """
        if self.memory.replicas is not None:
            return self.memory.replicas
        asked = self.memory.require_replicas or self.save.ack == "replicated"
        return 1 if num_hosts > 1 or asked else 0


TOP_KEYS = keys_of(Config)


def load_config(
    source: str | os.PathLike[str] | Mapping[str, object] | None, environ: Mapping[str, str]
) -> Config:
    """The configuration in a YAML file or dict (None: all defaults), overridden by ``environ``.

    Raises:
        ConfigError: The file cannot be read, or a key or value is wrong; the message begins with
            the dotted key, which is the field ``key`` too, and ends with the file's line or the
            environment variable. Field ``allowed`` lists the allowed values, if they are few.
    """
    return load_with_source(source, environ)[0]


def load_with_source(
    source: str | os.PathLike[str] | Mapping[str, object] | None, environ: Mapping[str, str]
) -> tuple[Config, Source]:
    """As :func:`load_config`; also returns the origin of each value."""
    found = read_source(source)
    apply_environment(found, environ, top_keys=TOP_KEYS)
    try:
        return _config(found.tree), found
    except ConfigError as error:
        origin = found.origin(error.key)
        if origin is None:
            raise
        raise ConfigError(f"{error.message} ({origin})", **error.fields) from None


def _config(tree: Tree) -> Config:
    values = entries(tree, Config)
    config = read(Config, values, discovery=DiscoveryConfig())
    if config.save.ack == "replicated" and config.memory.replicas == 0:
        fail("save.ack", '"replicated" waits for copies, and "memory: {replicas: 0}" makes none')
    discovery, network = read_discovery(values, config.network, config.security)
    return msgspec.structs.replace(config, discovery=discovery, network=network)
