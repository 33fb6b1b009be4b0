"""``tieredckpt config check``: the effective configuration, and the memory that it will need."""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import click

from tieredckpt.agent.runtime import default_runtime_dir
from tieredckpt.cli import machine
from tieredckpt.cli.place import json_option
from tieredckpt.cli.show import count, print_json, size
from tieredckpt.errors import CapacityError, ConfigError, TieredCkptError
from tieredckpt.policy.config import Config, load_with_source, resolve_namespace
from tieredckpt.policy.config_sections import parsed
from tieredckpt.policy.config_source import Source, to_yaml
from tieredckpt.policy.config_tiers import ALL
from tieredckpt.policy.memory import MemoryNeed, memory_need
from tieredckpt.policy.units import parse_size

RANKS_MAX = 1024
"""Ranks of one host; more is a typing error."""
HOSTS_MAX = 1 << 16


@click.group(name="config")
def group() -> None:
    """Check configuration files."""


def tmpfs_of(runtime_dir: Path) -> tuple[Path, int, int]:
    """The folder that memory comes from, its file system's size, and what is free there."""
    folder = machine.nearest(runtime_dir)
    while not os.path.isdir(folder):
        folder = folder.parent
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
    help="Of the job, which decides how many replicas there are.  [default: as many as a static "
    "discovery lists, else 1]",
)
@click.option(
    "--connect", "connecting", is_flag=True,
    help="Open each tier, and try it with objects that are deleted again.",
)  # fmt: skip
@json_option
def check(
    file: Path,
    state_size: str | None,
    ranks: int,
    hosts: int | None,
    connecting: bool,
    as_json: bool,
) -> None:
    """Check FILE, print what it comes to, and how much memory a state of that size will take.

    Environment overrides (TIEREDCKPT_MEMORY__CAPACITY=8GiB) count as they would in training.
    The folders that FILE names are looked at on this machine, as this user; nothing is made, and
    no store is asked, but with --connect: that needs a namespace, makes the folders of file tiers
    as the agent would, and takes this shell's credentials.
    Exit code 2 if the file is wrong, 1 if it cannot work here, the state does not fit, or a tier
    did not do what it was tried with.

    \b
    Examples:
      tieredckpt config check tieredckpt.yaml
      tieredckpt config check tieredckpt.yaml --connect
      tieredckpt config check tieredckpt.yaml --state-size 80GiB --ranks 8 --hosts 16
    """
    config, source = load_with_source(file, os.environ)
    hosts = hosts or len(config.discovery.addresses) or None
    runtime_dir = Path(config.agent.runtime_dir or default_runtime_dir(os.environ)).absolute()
    found = [*_of_file(file, config, source), *machine.problems(config, runtime_dir, os.environ)]
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
        found.append(machine.Problem(key="memory.capacity", message=message, fatal=False))
    found = [
        dataclasses.replace(each, where=source.origin(each.key) if each.key else None)
        for each in found
    ]
    try:
        namespace = resolve_namespace(config.namespace, os.environ)
    except ConfigError:
        if connecting:
            raise
        namespace = None  # legal in a file that is made for Slurm; a job without one is refused
    tried = machine.try_tiers(config, runtime_dir, namespace) if connecting and namespace else None
    if as_json:
        print_json(
            {
                "config": config.effective(),
                "namespace": namespace,
                "replicas": replicas,
                "memory": None if need is None else dataclasses.asdict(need),
                "limit_bytes": limit,
                "tmpfs": {"path": str(folder), "bytes": total_bytes, "free_bytes": free_bytes},
                "fits": None if need is None else need.total_bytes <= limit,
                "problems": [dataclasses.asdict(each) for each in found],
                "connect": None if tried is None else [each.plain() for each in tried],
            }
        )
    else:
        _print(config, namespace, need, ranks)
        click.echo(
            f"limit: {size(limit)} "
            + ("(memory.capacity)" if config.memory.capacity_bytes else f"(half of {folder})")
            + f"; {folder} has {size(free_bytes)} free of {size(total_bytes)}"
        )
        if tried:
            machine.print_tried(tried)
    _end(found, need, limit, ranks, state_size, tried or ())


def _need(config: Config, state_size: str, ranks: int, replicas: int) -> MemoryNeed:
    per_rank_bytes = -(-parsed("--state-size", state_size, parse_size) // ranks)
    sources = sum(tier.filled_from is None for tier in config.tiers)
    return memory_need(per_rank_bytes, ranks, config.memory.keep.last, sources, replicas)


def _of_file(file: Path, config: Config, source: Source) -> Iterator[machine.Problem]:
    if not source.tree:
        message = f"{file} sets nothing: all defaults apply"
        yield machine.Problem(key="", message=message, fatal=False)
    tiers = source.tree.get("tiers")
    for number, tier in enumerate(config.tiers):
        written = tiers[number] if isinstance(tiers, list) else None
        said = written.get("keep") if isinstance(written, dict) else None
        if tier.scope == "shared" and tier.keep.everything and said != ALL:
            yield machine.Problem(
                key=f"tiers[{number}].keep",
                message=f"tier {tier.name} has no rules of its own and hosts share it: nothing is "
                "ever deleted there; write keep: {last: 5} or the like, or keep: all if that is "
                "meant",
                fatal=False,
            )


def _of_replicas(config: Config, replicas: int, hosts: int) -> Iterator[machine.Problem]:
    possible = min(replicas, hosts - 1)
    if replicas > possible:
        yield machine.Problem(
            key="memory.replicas",
            message=f"{possible}/{replicas}: with {count(hosts, 'host')} there is room for "
            f"{possible} on others",
            fatal=config.memory.require_replicas,
        )


def _end(
    found: list[machine.Problem],
    need: MemoryNeed | None,
    limit: int,
    ranks: int,
    state_size: str | None,
    tried: Sequence[machine.Tried],
) -> None:
    """Print the problems. Raises CapacityError or TieredCkptError if any is fatal."""
    for each in found:
        label, colour = ("will fail", "red") if each.fatal else ("warning", "yellow")
        key = f"{each.key}: " if each.key else ""
        where = f" ({each.where})" if each.where else ""
        click.secho(f"{label}: {key}{each.message}{where}", fg=colour, err=True)
    broken = machine.complain(tried)
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
    if fatal := sum(each.fatal for each in found):
        raise TieredCkptError(
            f"this configuration cannot work on this machine: {count(fatal, 'problem')}, see above"
        )
    if broken:
        raise TieredCkptError(
            f"{count(len(broken), 'tier')} of {len(tried)} cannot be used as configured "
            f"({', '.join(broken)}), see above"
        )


def _print(config: Config, namespace: str | None, need: MemoryNeed | None, ranks: int) -> None:
    click.echo(to_yaml(config.effective()), nl=False)
    if namespace is None:
        click.secho(
            "namespace: none here; set it, or start under Slurm, a JobSet or torchrun --rdzv-id",
            fg="yellow",
        )
    elif config.namespace is None:
        click.echo(f"namespace, from the environment: {namespace}")
    if need is not None:
        click.secho(f"\nmemory for {ranks} ranks of this host", bold=True)
        for line in need.lines:
            click.echo(f"  {line}")
