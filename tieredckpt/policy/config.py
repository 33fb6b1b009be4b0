"""The configuration: YAML, a dict and environment variables in, frozen dataclasses out.

The page for users, with every key, is docs/configuration.md. Nothing here looks at the machine:
that a folder exists or that memory suffices is checked by whoever uses it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, cast

from tieredckpt.errors import ConfigError
from tieredckpt.policy.config_memory import MemoryConfig, read_memory
from tieredckpt.policy.config_network import (
    DiscoveryConfig,
    NetworkConfig,
    SecurityConfig,
    TlsConfig,
    read_hosts,
)
from tieredckpt.policy.config_object import ObjectOptions
from tieredckpt.policy.config_sections import (
    Section,
    duration,
    fail,
    whole_number,
)
from tieredckpt.policy.config_source import Source, Tree, apply_environment, read_source
from tieredckpt.policy.config_tiers import TierConfig, effective_tier, read_tiers
from tieredckpt.policy.names import parse_folder, parse_name, resolve_namespace
from tieredckpt.policy.retention import Best, Keep
from tieredckpt.policy.units import Every, format_duration

__all__ = [
    "AgentConfig", "Best", "Config", "DiscoveryConfig", "Every", "Keep", "MemoryConfig",
    "NetworkConfig", "ObjectOptions", "RecoveryConfig", "SaveConfig", "SecurityConfig",
    "TierConfig", "TlsConfig", "load_config", "resolve_namespace",
]  # fmt: skip

TOP_KEYS = (
    "namespace", "memory", "tiers", "agent", "recovery", "save", "discovery", "network",
    "security", "labels",
)  # fmt: skip
ELSEWHERE = {
    "ack": '"save: {ack: replicated}"',
    "replicas": '"memory: {replicas: 1}"',
    "peers": '"discovery: {static: [host-a:7411, host-b:7411]}"',
    "placement": '"labels: {zone: b, rack: r7}", which placement follows',
    "token": '"security: {token_file: /run/secrets/tieredckpt}", with the token in that file',
    "tls": '"security: {tls: {cert: /tls/tls.crt, key: /tls/tls.key, ca: /tls/ca.crt}}"',
    "listen": '"network: {interface: eth0, port: 7411}"',
    "interface": '"network: {interface: eth0}"',
    "cidr": '"network: {cidr: 10.0.0.0/8}"',
}
"""What people look for at the top or below ``agent``, with where it is."""
MAX_SKIPPED_MAX = 1_000_000
LOG_LEVELS = ("debug", "info", "warning", "error")


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentConfig:
    """How the node agent is found and started."""

    runtime_dir: str | None = None
    """Absolute path; None: ``TIEREDCKPT_RUNTIME_DIR``, else ``/dev/shm/tieredckpt-<uid>``."""
    start: Literal["auto", "never"] = "auto"
    start_timeout_s: float = 60.0
    idle_timeout_s: float | None = None
    """Of an agent that we start: it ends after so long without a session; None: never."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryConfig:
    """How a checkpoint is chosen at a restart."""

    wait_s: float = 30.0
    """How long a tier that does not answer is waited for before an older step is considered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveConfig:
    """What a save may cost and what its failure means."""

    on_error: Literal["raise", "skip"] = "skip"
    """Of a failure of ours; the first save of a stream in a process always raises."""
    max_skipped: int = 3
    """So many saves of a stream in a row may be skipped; the next failure raises."""
    timeout_s: float = 300.0
    """Deadline of everything a save waits for besides ``memory.wait``."""
    ack: Literal["memory", "replicated"] = "memory"
    """Which level a save waits for before it returns."""
    wait_timeout_s: float = 60.0
    """How long a save, a load or the end waits for an earlier save in the background."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """A whole, valid configuration. Made by :func:`load_config`."""

    namespace: str | None = None
    """As configured; :func:`resolve_namespace` decides."""
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    tiers: tuple[TierConfig, ...] = ()
    agent: AgentConfig = AgentConfig()
    recovery: RecoveryConfig = RecoveryConfig()
    save: SaveConfig = SaveConfig()
    discovery: DiscoveryConfig = field(default_factory=DiscoveryConfig)
    network: NetworkConfig = field(default_factory=NetworkConfig)
    security: SecurityConfig = field(default_factory=SecurityConfig)
    labels: tuple[tuple[str, str], ...] = ()
    """Failure domains of this host, the widest first: ("zone", "b"), ("rack", "7")."""

    def wanted_replicas(self, num_hosts: int) -> int:
        """Copies on other hosts that a job on so many hosts is to have, possible or not.

        By default 1 on several hosts, and none on one unless another key asks for copies.
        """
        if self.memory.replicas is not None:
            return self.memory.replicas
        asked = self.memory.require_replicas or self.save.ack == "replicated"
        return 1 if num_hosts > 1 or asked else 0

    def effective(self) -> dict[str, object]:
        """Every key with its value, as plain data for printing as YAML or JSON.

        ``load_config(config.effective(), {})`` equals the configuration.
        """
        idle_s = self.agent.idle_timeout_s
        return {
            "namespace": self.namespace,
            "memory": self.memory.effective(),
            "tiers": [effective_tier(tier) for tier in self.tiers],
            "agent": {
                "runtime_dir": self.agent.runtime_dir,
                "start": self.agent.start,
                "start_timeout": format_duration(self.agent.start_timeout_s),
                "idle_timeout": None if idle_s is None else format_duration(idle_s),
                "log_level": self.agent.log_level,
            },
            "recovery": {"wait": format_duration(self.recovery.wait_s)},
            "save": {
                "on_error": self.save.on_error,
                "max_skipped": self.save.max_skipped,
                "timeout": format_duration(self.save.timeout_s),
                "ack": self.save.ack,
                "wait_timeout": format_duration(self.save.wait_timeout_s),
            },
            "discovery": self.discovery.effective(),
            "network": self.network.effective(),
            "security": self.security.effective(),
            "labels": dict(self.labels),
        }


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
    """:func:`load_config`, and where each value was written."""
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
    section = Section(
        tree,
        "",
        TOP_KEYS,
        later={"require_survives": "demanding what the memory tier survives is"},
        elsewhere=ELSEWHERE
        | {
            "on_save_error": '"save: {on_error: raise}"',
            "max_skipped": '"save: {max_skipped: 3}"',
        },
    )
    memory = read_memory(section.raw("memory"))
    save = _save(section.raw("save"))
    if save.ack == "replicated" and memory.replicas == 0:
        fail("save.ack", '"replicated" waits for copies, and "memory: {replicas: 0}" makes none')
    hosts = read_hosts(section)
    return Config(
        namespace=section.read("namespace", parse_name, None),
        memory=memory,
        tiers=read_tiers(section.raw("tiers")),
        agent=_agent(section.raw("agent")),
        recovery=_recovery(section.raw("recovery")),
        save=save,
        discovery=hosts.discovery,
        network=hosts.network,
        security=hosts.security,
        labels=hosts.labels,
    )


def _agent(value: Tree) -> AgentConfig:
    section = Section(
        value,
        "agent",
        ("runtime_dir", "start", "start_timeout", "idle_timeout", "log_level"),
        later={"require_survives": "demanding what the memory tier survives is"},
        elsewhere=ELSEWHERE,
    )
    default = AgentConfig()
    start = section.choice("start", ("auto", "never"), default.start)
    log_level = section.choice("log_level", LOG_LEVELS, default.log_level)
    return AgentConfig(
        runtime_dir=section.read("runtime_dir", parse_folder, None),
        start=cast(Literal["auto", "never"], start),
        start_timeout_s=section.read("start_timeout", duration(1, 600), default.start_timeout_s),
        idle_timeout_s=section.read("idle_timeout", duration(1, 366 * 86400), None),
        log_level=cast(Literal["debug", "info", "warning", "error"], log_level),
    )


def _recovery(value: Tree) -> RecoveryConfig:
    section = Section(value, "recovery", ("wait",))
    return RecoveryConfig(wait_s=section.read("wait", duration(0, 86400), RecoveryConfig().wait_s))


def _save(value: Tree) -> SaveConfig:
    section = Section(value, "save", ("on_error", "max_skipped", "timeout", "ack", "wait_timeout"))
    default = SaveConfig()
    ack = section.choice("ack", ("memory", "replicated"), default.ack)
    on_error = section.choice("on_error", ("raise", "skip"), default.on_error)
    return SaveConfig(
        on_error=cast(Literal["raise", "skip"], on_error),
        max_skipped=section.read(
            "max_skipped", whole_number(0, MAX_SKIPPED_MAX, "saves"), default.max_skipped
        ),
        timeout_s=section.read("timeout", duration(1, 86400), default.timeout_s),
        ack=cast(Literal["memory", "replicated"], ack),
        wait_timeout_s=section.read("wait_timeout", duration(0, 86400), default.wait_timeout_s),
    )
