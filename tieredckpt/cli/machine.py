"""Whether a configuration works on this machine, for this user: looked at, and tried if wanted.

:func:`problems` only looks at folders, files and names; nothing is made or changed. That an agent
of another configuration runs, or that a port is taken, is for ``Engine.open`` to say.
:func:`try_tiers` opens each tier as the agent would, and tries it.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click
import msgspec
from rich.text import Text

from tieredckpt.agent.runtime import prepare_runtime_dir
from tieredckpt.agent.tier_place import TierPlace
from tieredckpt.cli.place import Place
from tieredckpt.cli.show import one_line, print_table
from tieredckpt.errors import AgentError, ConfigError, TieredCkptError, TierUnavailableError
from tieredckpt.policy.config import Config
from tieredckpt.policy.config_tiers import TierSpec
from tieredckpt.policy.token_source import read_token
from tieredckpt.recovery.folders import in_daemon
from tieredckpt.tiers.file import folder_of_url
from tieredckpt.tiers.object_check import complaints
from tieredckpt.tiers.object_errors import NO_ANSWER
from tieredckpt.tiers.probe import STEPS, Probed, probe

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
            # What a store needs here. The store itself is not asked: see --connect.
            found += [
                Problem(key=f"tiers[{number}].{each.key}", message=each.message, fatal=each.fatal)
                for each in complaints(tier.name, tier.url, tier.object)
            ]
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


def _of_runtime_dir(path: Path) -> Iterator[Problem]:
    key = "agent.runtime_dir"
    why = why_unusable(path)
    try:
        prepare_runtime_dir(path, make=False)  # as Engine.open would
    except AgentError as error:
        why = why or str(error)
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


# --- with --connect ---------------------------------------------------------------------------

RETRY_S = 10.0
"""A store that fails is asked for so long; the agent would go on for ``retry_for``."""
TIER_S = 120.0
"""A tier that takes longer is said not to answer: some clients know no deadline."""
OPEN = "open"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """What came of one tier."""

    tier: str
    url: str
    steps: Probed
    note: str | None = None

    @property
    def works(self) -> bool:
        """Whether nothing failed."""
        return not any(self.steps.values())

    @property
    def complaints(self) -> list[str]:
        """Each failure once, with the step that it stopped first."""
        said: dict[str, str] = {}
        for step, error in self.steps.items():
            if error is not None:
                said.setdefault(_said(error), step)
        return [f"{step}: {text}" for text, step in said.items()]

    def plain(self) -> dict[str, Any]:
        """For ``--json``."""
        return {
            "tier": self.tier,
            "url": self.url,
            "works": self.works,
            "steps": {
                step: None if step not in self.steps else self.steps[step] is None
                for step in (OPEN, *STEPS)
            },
            "errors": {step: _said(error) for step, error in self.steps.items() if error},
            "note": self.note,
        }


def _said(error: TieredCkptError) -> str:
    silent = isinstance(error, TierUnavailableError) and error.fields.get("status") == 0
    said = one_line(str(error))
    return f"{said}; {NO_ANSWER}" if silent and NO_ANSWER not in said else said


def try_tiers(config: Config, runtime_dir: Path, namespace: str) -> list[Tried]:
    """Open and probe all tiers at the same time, each within :data:`TIER_S`.

    Makes the folders of file tiers, as the agent would, and objects that it deletes again.
    """
    served = _served(config, runtime_dir, namespace)
    asked = [
        (tier, in_daemon(partial(_try, tier, namespace, served), f"tck-try-{tier.name}"))
        for tier in config.tiers
    ]
    found = []
    for tier, answer in asked:
        try:
            found.append(answer.result(TIER_S))
            continue
        except TimeoutError:
            error: TieredCkptError = TierUnavailableError(
                f"no answer within {TIER_S:g} s; {NO_ANSWER}", tier=tier.name, outcome="unknown"
            )
        except CancelledError:  # a bug, or of a library
            error = TieredCkptError("an unexpected failure, see the traceback")
        found.append(Tried(tier=tier.name, url=tier.url, steps={OPEN: error}))
    return found


def _served(config: Config, runtime_dir: Path, namespace: str) -> dict[str, str]:
    """Name and URL of the tiers that the agent here has open."""
    status = Place(config=config, runtime_dir=runtime_dir).status()
    spaces = status.namespaces if status is not None else ()
    return {t.name: t.url for each in spaces if each.name == namespace for t in each.tiers}


def _try(tier: TierSpec, namespace: str, served: dict[str, str]) -> Tried:
    spec, note = _quick(tier), None
    if tier.is_file and tier.scope == "host" and served.get(tier.name) == tier.url:
        # It has the lock. Scope shared takes none, and sweeps nothing of the agent's.
        spec = msgspec.structs.replace(spec, scope="shared")
        note = "the agent that runs here has it open"
    try:
        with closing(TierPlace(spec, namespace)) as place:
            steps: Probed = {OPEN: None, **probe(place.open())}
    except (TieredCkptError, OSError) as error:
        wrong = error if isinstance(error, TieredCkptError) else TieredCkptError(str(error))
        steps = {OPEN: wrong}
    return Tried(tier=tier.name, url=tier.url, steps=steps, note=note)


def _quick(spec: TierSpec) -> TierSpec:
    options = msgspec.structs.replace(
        spec.object,
        retry_for_s=min(RETRY_S, spec.object.retry_for_s),
        timeout_s=min(RETRY_S, spec.object.timeout_s),
    )
    return msgspec.structs.replace(spec, object=options)


def print_tried(found: Sequence[Tried]) -> None:
    """A table of what works, and below it what does not and why."""
    names = (OPEN, *STEPS)

    def cell(each: Tried, step: str) -> Text:
        if step not in each.steps:
            return Text("-")
        failed = each.steps[step] is not None
        return Text("failed", style="red") if failed else Text("ok", style="green")

    rows: list[list[str | Text]] = [
        [each.tier, *(cell(each, step) for step in names)] for each in found
    ]
    print_table("\ntiers, tried with objects that were deleted again", ("tier", *names), rows)
    for each in found:
        if each.note:
            click.secho(f"tier {each.tier}: {each.note}", dim=True)


def complain(found: Sequence[Tried]) -> list[str]:
    """Say on standard error what failed. Returns the tiers that cannot be used."""
    for each in found:
        for text in each.complaints:
            click.secho(f"tier {each.tier}: {text}", fg="red", err=True)
    return [each.tier for each in found if not each.works]
