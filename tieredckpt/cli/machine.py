"""What of a configuration cannot work on this machine, for this user; nothing is made or changed.

Only looks at folders, files and names. That an agent of another configuration runs, or that a port
is taken, is for ``Engine.open`` to say.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tieredckpt.agent.runtime import prepare_runtime_dir
from tieredckpt.errors import AgentError, ConfigError
from tieredckpt.policy.config import Config
from tieredckpt.policy.config_tiers import TierSpec
from tieredckpt.policy.token_source import read_token
from tieredckpt.tiers.file import folder_of_url
from tieredckpt.tiers.object_store import complaints

MOUNTS = Path("/proc/self/mountinfo")
MEMORY_FILE_SYSTEMS = ("tmpfs", "ramfs")
PSEUDO_FILE_SYSTEMS = frozenset({
    "binfmt_misc", "bpf", "cgroup", "cgroup2", "configfs", "debugfs", "devpts",
    "devtmpfs", "efivarfs", "fusectl", "hugetlbfs", "mqueue", "nfsd", "nsfs", "proc", "pstore",
    "resctrl", "rpc_pipefs", "securityfs", "selinuxfs", "smackfs", "sysfs", "tracefs",
})  # fmt: skip
"""Views of the kernel: what looks like a folder there keeps no files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Something that will not work here, or not well."""

    key: str
    """Of the configuration, dotted."""
    message: str
    fatal: bool
    """It certainly fails, as things are now; else it is only unwise."""
    where: str | None = None
    """The line of the file, or the variable, that says so."""


def problems(config: Config, runtime_dir: Path, environ: Mapping[str, str]) -> list[Problem]:
    """All that is wrong with what a configuration names: folders, files, network interfaces."""
    found = list(_of_runtime_dir(runtime_dir))
    for number, tier in enumerate(config.tiers):
        if not tier.is_file:
            found += _of_store(f"tiers[{number}]", tier)
            continue
        try:
            why = why_unusable(folder_of_url(tier.url))
        except ConfigError as error:
            why = str(error)
        if why is not None:
            found.append(Problem(key=f"tiers[{number}].url", message=why, fatal=True))
    found += _of_interfaces(config.network.interfaces)
    found += _of_security(config, environ)
    return found


def _of_store(key: str, tier: TierSpec) -> Iterator[Problem]:
    """What a store needs here. The store itself is not asked: see ``--connect``."""
    for each in complaints(tier.name, tier.url, tier.object):
        yield Problem(key=f"{key}.{each.key}", message=each.message, fatal=each.fatal)


def _of_runtime_dir(path: Path) -> Iterator[Problem]:
    key = "agent.runtime_dir"
    why = why_unusable(path) or _why_not_ours(path)
    if why is not None:
        yield Problem(key=key, message=why, fatal=True)
    elif (kind := file_system_of(nearest(path))) not in (None, *MEMORY_FILE_SYSTEMS):
        yield Problem(
            key=key,
            message=f"{path} is on {kind}, not on a tmpfs: saves go at the speed of that disk, and "
            "what is in memory there may not outlive anything; name a folder below /dev/shm",
            fatal=False,
        )


def _of_interfaces(names: tuple[str, ...]) -> Iterator[Problem]:
    there = [name for _, name in socket.if_nameindex()]
    for name in names:
        if name not in there:
            yield Problem(
                key="network.interface",
                message=f"there is no {name} on this machine; there are {', '.join(there)}",
                fatal=True,
            )


def _of_security(config: Config, environ: Mapping[str, str]) -> Iterator[Problem]:
    try:
        read_token(config.security, environ)
    except ConfigError as error:
        # The job's environment may well have a variable that this shell lacks.
        unset = config.security.token_env is not None and config.security.token_env not in environ
        message = str(error).removeprefix(f"{error.key}: ")
        yield Problem(key=str(error.key), message=message, fatal=not unset)
    tls = config.security.tls
    for name in ("cert", "key", "ca") if tls is not None else ():
        path = getattr(tls, name)
        if not os.path.isfile(path) or not os.access(path, os.R_OK):
            why = "cannot be read by this user" if os.path.isfile(path) else "is not a file here"
            yield Problem(key=f"security.tls.{name}", message=f"{path} {why}", fatal=True)


def _why_not_ours(path: Path) -> str | None:
    """What ``Engine.open`` would say of a runtime folder."""
    try:
        prepare_runtime_dir(path, make=False)
    except AgentError as error:
        return str(error)
    return None


def nearest(path: Path) -> Path:
    """``path``, or what exists of it: its nearest ancestor that does, be it a file or a folder."""
    # A link that leads nowhere counts as existing: no folder can be made in its place.
    while not os.path.lexists(path):
        path = path.parent
    return path


def why_unusable(path: Path) -> str | None:
    """Why this process cannot make or fill the folder ``path``; None if it can."""
    there = nearest(path)
    if not os.path.isdir(there):
        kind = "a file" if os.path.exists(there) else "a link to nothing"
        return f"{there} is {kind}" + ("" if there == path else f", so {path} cannot be made")
    if (view := file_system_of(there)) is not None and view in PSEUDO_FILE_SYSTEMS:
        return f"{there} is on {view}, a view of the kernel, which keeps no files"
    if not os.access(there, os.W_OK | os.X_OK):
        made = "" if there == path else f", where {path} would have to be made"
        return f"this user (id {os.geteuid()}) may not write to {there}{made}"
    return None


def file_system_of(path: Path) -> str | None:
    """The type of the file system that ``path`` is on, as in "ext4"; None if that is not known."""
    device = path.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        lines = MOUNTS.read_text("utf-8", "surrogateescape").splitlines()
    except OSError:
        return None
    for line in lines:
        before, _, after = line.partition(" - ")
        if before.split()[2] == number:
            return after.split()[0]
    # Btrfs and overlays report numbers of their own; memory file systems never do.
    return "another file system"
