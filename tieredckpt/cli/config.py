"""``tieredckpt config check``: the effective configuration, its memory, and whether it works here.

:func:`problems` checks folders, files and names, as this user, and changes nothing. ``tieredckpt
doctor`` also tries the tiers. ``Engine.open`` alone reports an agent of another configuration.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click

from tieredckpt.agent.host.addresses import choose_addresses
from tieredckpt.agent.host.runtime import (
    default_runtime_dir,
    file_system_of,
    prepare_runtime_dir,
    why_slow,
)
from tieredckpt.cli.output import count, print_json, size
from tieredckpt.cli.sources import json_option
from tieredckpt.config.network import NetworkConfig, TlsConfig
from tieredckpt.config.reader import Source, to_yaml
from tieredckpt.config.schema import Config, load_with_source, resolve_namespace
from tieredckpt.config.secrets import read_token
from tieredckpt.config.sections import parsed
from tieredckpt.config.tiers import ALL
from tieredckpt.config.units import parse_size
from tieredckpt.errors import (
    AgentError,
    CapacityError,
    ConfigError,
    TieredCkptError,
)
from tieredckpt.policy.capacity import MemoryNeed, memory_need
from tieredckpt.rpc.auth import check_certificate
from tieredckpt.rpc.messages.agent import TlsSpec
from tieredckpt.storage.backends.file import folder_of_url
from tieredckpt.storage.object.client import Complaint, complaints

RANKS_MAX = 1024
"""Ranks of one host; more is a typing error."""
HOSTS_MAX = 1 << 16
PSEUDO_FILE_SYSTEMS = frozenset({
    "binfmt_misc", "bpf", "cgroup", "cgroup2", "configfs", "debugfs", "devpts",
    "devtmpfs", "efivarfs", "fusectl", "hugetlbfs", "mqueue", "nfsd", "nsfs", "proc", "pstore",
    "resctrl", "rpc_pipefs", "securityfs", "selinuxfs", "smackfs", "sysfs", "tracefs",
})  # fmt: skip
"""Views of the kernel: a folder there keeps no files."""


@click.group(name="config")
def group() -> None:
    """Check configuration files."""


def tmpfs_of(runtime_dir: Path) -> tuple[Path, int, int]:
    """Return the folder of the memory tier, and its file system's size and free bytes."""
    # Not Path.is_dir(), which raises for a folder that this user may not search.
    folder = next(p for p in (runtime_dir, *runtime_dir.parents) if os.path.isdir(p))
    usage = shutil.disk_usage(folder)
    return folder, usage.total, usage.free


@group.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--state-size", metavar="SIZE", help='All ranks of one host together, as in "80GiB".')
@click.option(
    "--ranks", type=click.IntRange(1, RANKS_MAX), default=1, show_default=True, help="Per host."
)
@click.option(
    "--hosts",
    type=click.IntRange(1, HOSTS_MAX),
    help="Hosts of the job, for the number of replicas.  [default: as many as a static discovery "
    "lists, else 1]",
)
@json_option
def check(
    file: Path,
    state_size: str | None,
    ranks: int,
    hosts: int | None,
    as_json: bool,
) -> None:
    """Check FILE, and print the effective configuration and the memory that a state needs.

    Environment overrides (TIEREDCKPT_MEMORY__CAPACITY=8GiB) apply as in training.
    The folders that FILE names are checked on this machine, as this user, and nothing is changed.
    `tieredckpt doctor` tries each tier, too.
    Exit code 2 if the file is wrong, 1 if it cannot work here, or the state does not fit.

    \b
    Examples:
      tieredckpt config check tieredckpt.yaml
      tieredckpt config check tieredckpt.yaml --state-size 80GiB --ranks 8 --hosts 16
    """
    config, source = load_with_source(file, os.environ)
    hosts = hosts or len(config.discovery.addresses) or None
    runtime_dir = Path(config.agent.runtime_dir or default_runtime_dir(os.environ)).absolute()
    found = [*_of_file(file, config, source), *problems(config, runtime_dir, os.environ)]
    replicas = config.wanted_replicas(hosts or 1)
    if hosts is not None:
        found += _of_replicas(config, replicas, hosts)
        replicas = min(replicas, hosts - 1)
    folder, total_bytes, free_bytes = tmpfs_of(runtime_dir)
    limit = config.memory.capacity_bytes or total_bytes // 2
    need = None if state_size is None else _need(config, state_size, ranks, replicas)
    if need is not None and need.total_bytes > total_bytes:
        message = (
            f"a state of {state_size} needs {size(need.total_bytes)}, and {folder} has "
            f"{size(total_bytes)} on this machine"
        )
        found.append(Complaint(key="memory.capacity", message=message, fatal=False))
    listed = [
        dataclasses.asdict(each) | {"where": source.origin(each.key) if each.key else None}
        for each in found
    ]
    try:
        namespace = resolve_namespace(config.namespace, os.environ)
    except ConfigError:
        namespace = None  # legal in a file that is made for Slurm; a job without one is refused
    if as_json:
        print_json(
            config=config.effective(),
            namespace=namespace,
            replicas=replicas,
            memory=None if need is None else dataclasses.asdict(need),
            limit_bytes=limit,
            tmpfs={"path": str(folder), "bytes": total_bytes, "free_bytes": free_bytes},
            fits=None if need is None else need.total_bytes <= limit,
            problems=listed,
        )
    else:
        _print(config, namespace, need, ranks)
        if need is None:
            click.echo("memory: --state-size and --ranks compute what a state needs")
        click.echo(
            f"limit: {size(limit)} "
            + ("(memory.capacity)" if config.memory.capacity_bytes else f"(half of {folder})")
            + f"; {folder} has {size(free_bytes)} free of {size(total_bytes)}"
        )
    _end(listed, need, limit, ranks, state_size)


def _need(config: Config, state_size: str, ranks: int, replicas: int) -> MemoryNeed:
    per_rank_bytes = -(-parsed("--state-size", state_size, parse_size) // ranks)
    sources = sum(tier.filled_from is None for tier in config.tiers)
    return memory_need(per_rank_bytes, ranks, config.memory.keep.last, sources, replicas)


def _of_file(file: Path, config: Config, source: Source) -> Iterator[Complaint]:
    if not source.tree:
        message = f"{file} sets nothing: all defaults apply"
        yield Complaint(key="", message=message, fatal=False)
    tiers = source.tree.get("tiers")
    for number, tier in enumerate(config.tiers):
        written = tiers[number] if isinstance(tiers, list) else None
        keep = written.get("keep") if isinstance(written, dict) else None
        if tier.scope == "shared" and tier.keep.everything and keep != ALL:
            yield Complaint(
                key=f"tiers[{number}].keep",
                message=f"tier {tier.name} is shared by hosts and has no keep of its own: nothing "
                "is ever deleted there; set for example keep: {last: 5}, or keep: all if that is "
                "intended",
                fatal=False,
            )


def _of_replicas(config: Config, replicas: int, hosts: int) -> Iterator[Complaint]:
    possible = min(replicas, hosts - 1)
    if replicas > possible:
        yield Complaint(
            key="memory.replicas",
            message=f"{possible}/{replicas}: with {count(hosts, 'host')}, {possible} on other "
            "hosts are possible",
            fatal=config.memory.require_replicas,
        )


def _end(
    found: list[dict[str, Any]],
    need: MemoryNeed | None,
    limit: int,
    ranks: int,
    state_size: str | None,
) -> None:
    """Print the problems. Raises CapacityError or TieredCkptError if any is fatal."""
    for each in found:
        label, colour = ("will fail", "red") if each["fatal"] else ("warning", "yellow")
        key = f"{each['key']}: " if each["key"] else ""
        where = f" ({each['where']})" if each["where"] else ""
        click.secho(f"{label}: {key}{each['message']}{where}", fg=colour, err=True)
    if need is not None and need.total_bytes > limit:
        raise CapacityError(
            f"a state of {state_size} on {ranks} ranks needs {size(need.total_bytes)} of memory, "
            f"{size(need.total_bytes - limit)} more than the limit of {size(limit)}: raise "
            "memory.capacity, or keep fewer (memory.keep.last"
            + (", memory.replicas)" if need.replica_bytes else ")"),
            needed_bytes=need.total_bytes,
            available_bytes=limit,
            limit="memory.capacity",
        )
    if fatal := sum(each["fatal"] for each in found):
        raise TieredCkptError(
            f"this configuration cannot work on this machine: {count(fatal, 'problem')}, see above"
        )


def _print(config: Config, namespace: str | None, need: MemoryNeed | None, ranks: int) -> None:
    click.echo(to_yaml(config.effective()), nl=False)
    if namespace is None:
        click.secho(
            "namespace: not set; set it, or start under Slurm, a JobSet or torchrun --rdzv-id",
            fg="yellow",
        )
    elif config.namespace is None:
        click.echo(f"namespace, from the environment: {namespace}")
    if need is not None:
        click.secho(f"\nmemory for {ranks} ranks of this host", bold=True)
        for line in need.lines:
            click.echo(f"  {line}")


# --- problems on this machine --------------------------------------------------------------------


def problems(config: Config, runtime_dir: Path, environ: Mapping[str, str]) -> list[Complaint]:
    """Return the problems with the folders, files and interfaces that a configuration names."""
    found = list(_of_runtime_dir(runtime_dir))
    for number, tier in enumerate(config.tiers):
        if not tier.is_file:
            # Checks this machine alone; `tieredckpt doctor` asks the store.
            found += [
                dataclasses.replace(each, key=f"tiers[{number}].{each.key}")
                for each in complaints(tier.name, tier.url, tier.object)
            ]
            continue
        try:
            why = why_unusable(folder_of_url(tier.url))
        except ConfigError as error:
            why = str(error)
        if why is not None:
            found.append(Complaint(key=f"tiers[{number}].url", message=why))
    found += _of_interfaces(config.network.interfaces)
    found += _of_security(config, environ)
    return found


def _of_runtime_dir(path: Path) -> Iterator[Complaint]:
    key = "agent.runtime_dir"
    why = why_unusable(path)
    try:
        prepare_runtime_dir(path, make=False)  # as Engine.open would
    except AgentError as error:
        why = why or str(error)
    if why is not None:
        yield Complaint(key=key, message=why)
    elif (why := why_slow(path, file_system_of(nearest(path)))) is not None:
        yield Complaint(key=key, message=why, fatal=False)


def _of_interfaces(names: tuple[str, ...]) -> Iterator[Complaint]:
    known = [name for _, name in socket.if_nameindex()]
    for name in names:
        if name not in known:
            yield Complaint(
                key="network.interface",
                message=f"this machine has no interface {name}; it has {', '.join(known)}",
            )


def _of_security(config: Config, environ: Mapping[str, str]) -> Iterator[Complaint]:
    try:
        read_token(config.security, environ)
    except ConfigError as error:
        # The job's environment may have a variable that this shell does not have.
        unset = config.security.token_env is not None and config.security.token_env not in environ
        message = str(error).removeprefix(f"{error.key}: ")
        yield Complaint(key=str(error.key), message=message, fatal=not unset)
    if (tls := config.security.tls) is not None:
        yield from _of_tls(tls, config.network)


def _of_tls(tls: TlsConfig, network: NetworkConfig) -> Iterator[Complaint]:
    files = {"cert": tls.cert, "key": tls.key, "ca": tls.ca}
    unread = [n for n, p in files.items() if not (os.path.isfile(p) and os.access(p, os.R_OK))]
    for name in unread:
        why = "cannot be read by this user" if os.path.isfile(files[name]) else "is not a file here"
        yield Complaint(key=f"security.tls.{name}", message=f"{files[name]} {why}")
    try:
        for name in choose_addresses(network.interfaces, network.cidrs) if not unread else ():
            check_certificate(TlsSpec(**files), name)
    except (AgentError, ConfigError) as error:
        yield Complaint(key=error.fields.get("key", "security.tls"), message=str(error))


def nearest(path: Path) -> Path:
    """Return ``path`` or its nearest ancestor that exists, which may be a file or a folder."""
    # A dangling link exists: no folder can be made in its place.
    while not os.path.lexists(path):
        path = path.parent
    return path


def why_unusable(path: Path) -> str | None:
    """Return why this process cannot make or fill the folder ``path``; None if it can."""
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
