"""The configuration: YAML, a dict and environment variables in, frozen dataclasses out.

The page for users, with every key, is docs/configuration.md. Nothing here looks at the machine:
that a folder exists or that memory suffices is checked by whoever uses it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, cast

from tieredckpt.errors import ConfigError
from tieredckpt.policy.config_sections import Section, fail, not_in_this_release, whole_number
from tieredckpt.policy.config_source import Tree, apply_environment, child, read_source
from tieredckpt.policy.names import (
    FILE_URL_EXAMPLE,
    parse_folder,
    parse_name,
    parse_url,
    resolve_namespace,
)
from tieredckpt.policy.retention import Keep
from tieredckpt.policy.units import (
    Every,
    format_duration,
    format_size,
    parse_duration,
    parse_every,
    parse_size,
    show,
)

__all__ = [
    "AgentConfig", "Config", "Every", "Keep", "MemoryConfig", "RecoveryConfig", "SaveConfig",
    "TierConfig", "check_hosts", "load_config", "resolve_namespace",
]  # fmt: skip

TOP_KEYS = ("namespace", "memory", "tiers", "agent", "recovery", "save")
TIERS_MAX = 8
"""Most tiers below memory: each may pin a slot of memory while it spills."""
KEEP_LAST_MAX = 1_000_000
MEMORY_KEEP_LAST_MAX = 100
MEMORY_CAPACITY_BYTES_MIN = 2 << 20
"""The smallest slot is 1 MiB and a page."""
MAX_SKIPPED_MAX = 1_000_000
RESERVED_TIER_NAMES = ("memory", "replicated")
"""Levels that `wait` and `status` name beside the tiers."""
LOG_LEVELS = ("debug", "info", "warning", "error")


EVERY_SAVE = Every()
MEMORY_KEEP = Keep(last=2)
TIER_KEEP = Keep(last=3)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryConfig:
    """The memory tier."""

    capacity_bytes: int | None = None
    """Limit of this namespace's slots on one host; None: the engine takes its default."""
    keep: Keep = MEMORY_KEEP
    wait_s: float = 1.0
    """How long a save waits for a free slot before it fails."""
    replicas: int = 0
    """Copies on other hosts; only 0 in this release."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TierConfig:
    """One tier below memory."""

    name: str
    url: str
    """``file://`` and an absolute, normalised path; taken literally, without %-escapes."""
    scope: Literal["host", "shared"] = "host"
    every: Every = EVERY_SAVE
    keep: Keep = TIER_KEEP

    @property
    def path(self) -> str:
        """The folder of a file tier."""
        return self.url.removeprefix("file://")


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentConfig:
    """How the node agent is found and started."""

    runtime_dir: str | None = None
    """Absolute path; None: ``TIEREDCKPT_RUNTIME_DIR``, else ``/dev/shm/tieredckpt-<uid>``."""
    start: Literal["auto", "never"] = "auto"
    start_timeout_s: float = 10.0
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
    wait_timeout_s: float = 60.0
    """How long a save, a load or the end waits for an earlier save in the background."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """A whole, valid configuration. Made by :func:`load_config`."""

    namespace: str | None = None
    """As configured; :func:`resolve_namespace` decides."""
    memory: MemoryConfig = MemoryConfig()
    tiers: tuple[TierConfig, ...] = ()
    agent: AgentConfig = AgentConfig()
    recovery: RecoveryConfig = RecoveryConfig()
    save: SaveConfig = SaveConfig()

    def effective(self) -> dict[str, object]:
        """Every key with its value, as plain data for printing as YAML or JSON.

        ``load_config(config.effective(), {})`` equals the configuration.
        """
        idle_s = self.agent.idle_timeout_s
        return {
            "namespace": self.namespace,
            "memory": {
                "capacity": None
                if self.memory.capacity_bytes is None
                else format_size(self.memory.capacity_bytes),
                "keep": {"last": self.memory.keep.last},
                "wait": format_duration(self.memory.wait_s),
                "replicas": self.memory.replicas,
            },
            "tiers": [
                {
                    "name": tier.name,
                    "url": tier.url,
                    "scope": tier.scope,
                    "every": str(tier.every),
                    "keep": {"last": tier.keep.last},
                }
                for tier in self.tiers
            ],
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
                "wait_timeout": format_duration(self.save.wait_timeout_s),
            },
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
    found = read_source(source)
    apply_environment(found, environ, top_keys=TOP_KEYS)
    try:
        return _config(found.tree)
    except ConfigError as error:
        origin = found.origin(error.key)
        if origin is None:
            raise
        raise ConfigError(f"{error.message} ({origin})", **error.fields) from None


def check_hosts(config: Config, num_hosts: int) -> None:
    """Refuse what one host can do and several cannot, in this release.

    Raises:
        ConfigError: A tier has scope "shared" and there is more than one host.
    """
    for number, tier in enumerate(config.tiers):
        if tier.scope == "shared" and num_hosts > 1:
            not_in_this_release(
                child(child("tiers", number), "scope"),
                f'"shared" with {num_hosts} hosts: a tier that several hosts write to is',
            )


def _config(tree: Tree) -> Config:
    section = Section(
        tree,
        "",
        TOP_KEYS,
        later={
            "discovery": "finding other hosts is",
            "peers": "talking to other hosts is",
            "placement": "placing replicas on other hosts is",
            "require_survives": "demanding what the memory tier survives is",
        },
        elsewhere={
            "on_save_error": '"save: {on_error: raise}"',
            "max_skipped": '"save: {max_skipped: 3}"',
        },
    )
    return Config(
        namespace=section.read("namespace", parse_name, None),
        memory=_memory(section.raw("memory")),
        tiers=_tiers(section.raw("tiers")),
        agent=_agent(section.raw("agent")),
        recovery=_recovery(section.raw("recovery")),
        save=_save(section.raw("save")),
    )


def _memory(value: Tree) -> MemoryConfig:
    section = Section(
        value,
        "memory",
        ("capacity", "keep", "wait", "replicas"),
        later={
            "require_survives": "demanding what the memory tier survives is",
            "placement": "placing replicas on other hosts is",
        },
    )
    replicas = section.read("replicas", whole_number(0, 64, "replicas"), 0)
    if replicas:
        not_in_this_release(
            section.key("replicas"), f"{replicas}: replicas on other hosts are", instead="write 0"
        )
    default = MemoryConfig()
    return MemoryConfig(
        capacity_bytes=section.read("capacity", _parse_capacity, None),
        keep=_keep(section, default.keep, MEMORY_KEEP_LAST_MAX),
        wait_s=section.read("wait", _duration(0, 3600), default.wait_s),
    )


def _keep(around: Section, default: Keep, most: int) -> Keep:
    value, path = around.raw("keep"), around.key("keep")
    if isinstance(value, int) and not isinstance(value, bool):
        fail(path, f"{value} of what? Write {{last: {value}}}")
    section = Section(
        value,
        path,
        ("last",),
        later={
            "every": "keeping some older checkpoints is",
            "max_age": "retention by age is",
            "min_age": "retention by age is",
            "tags": "retention by tag is",
        },
    )
    return Keep(last=section.read("last", whole_number(1, most, "checkpoints"), default.last))


def _tiers(value: Tree) -> tuple[TierConfig, ...]:
    if value is None:
        return ()
    if not isinstance(value, list):
        fail("tiers", f'{show(value)} is not a list; write "- name: nvme" and so on below it')
    if len(value) > TIERS_MAX:
        fail("tiers", f"{len(value)} tiers; allowed are 0 to {TIERS_MAX}")
    tiers: list[TierConfig] = []
    for number, item in enumerate(value):
        path = child("tiers", number)
        tier = _tier(item, path)
        for earlier, other in enumerate(tiers):
            if tier.name == other.name:
                fail(f"{path}.name", f'"{tier.name}" is the name of tiers[{earlier}] too')
            if tier.url == other.url:
                fail(f"{path}.url", f'"{tier.url}" is the url of tiers[{earlier}] too')
        tiers.append(tier)
    return tuple(tiers)


def _tier(value: Tree, path: str) -> TierConfig:
    section = Section(value, path, ("name", "url", "scope", "every", "keep"))
    name = section.require("name", parse_name, "name: nvme")
    if name in RESERVED_TIER_NAMES:
        fail(section.key("name"), f'"{name}" has a meaning of its own; choose another name')
    scope = section.choice("scope", ("host", "shared"), "host")
    return TierConfig(
        name=name,
        url=section.require("url", parse_url, f"url: {FILE_URL_EXAMPLE}"),
        scope=cast(Literal["host", "shared"], scope),
        every=section.read("every", parse_every, EVERY_SAVE),
        keep=_keep(section, TIER_KEEP, KEEP_LAST_MAX),
    )


def _agent(value: Tree) -> AgentConfig:
    section = Section(
        value,
        "agent",
        ("runtime_dir", "start", "start_timeout", "idle_timeout", "log_level"),
        later={
            "listen": "listening on the network is",
            "token": "listening on the network, and so a token, is",
            "tls": "listening on the network, and so TLS, is",
            "require_survives": "demanding what the memory tier survives is",
        },
    )
    default = AgentConfig()
    start = section.choice("start", ("auto", "never"), default.start)
    log_level = section.choice("log_level", LOG_LEVELS, default.log_level)
    return AgentConfig(
        runtime_dir=section.read("runtime_dir", parse_folder, None),
        start=cast(Literal["auto", "never"], start),
        start_timeout_s=section.read("start_timeout", _duration(1, 600), default.start_timeout_s),
        idle_timeout_s=section.read("idle_timeout", _duration(1, 366 * 86400), None),
        log_level=cast(Literal["debug", "info", "warning", "error"], log_level),
    )


def _recovery(value: Tree) -> RecoveryConfig:
    section = Section(value, "recovery", ("wait",))
    return RecoveryConfig(wait_s=section.read("wait", _duration(0, 86400), RecoveryConfig().wait_s))


def _save(value: Tree) -> SaveConfig:
    section = Section(value, "save", ("on_error", "max_skipped", "timeout", "wait_timeout"))
    default = SaveConfig()
    on_error = section.choice("on_error", ("raise", "skip"), default.on_error)
    return SaveConfig(
        on_error=cast(Literal["raise", "skip"], on_error),
        max_skipped=section.read(
            "max_skipped", whole_number(0, MAX_SKIPPED_MAX, "saves"), default.max_skipped
        ),
        timeout_s=section.read("timeout", _duration(1, 86400), default.timeout_s),
        wait_timeout_s=section.read("wait_timeout", _duration(0, 86400), default.wait_timeout_s),
    )


def _duration(least_s: float, most_s: float) -> Callable[[object], float]:
    return lambda value: parse_duration(value, least_s=least_s, most_s=most_s)


def _parse_capacity(value: object) -> int:
    return parse_size(value, least_bytes=MEMORY_CAPACITY_BYTES_MIN)
