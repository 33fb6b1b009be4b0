"""``tieredckpt config check``: the effective configuration, and the memory that it will need."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import click

from tieredckpt.agent.runtime import default_runtime_dir
from tieredckpt.cli.machine import Problem, nearest, problems
from tieredckpt.cli.place import json_option
from tieredckpt.cli.show import count, print_json, size
from tieredckpt.errors import CapacityError, ConfigError, TieredCkptError
from tieredckpt.policy.config import Config, load_config, resolve_namespace
from tieredckpt.policy.memory import MemoryNeed, memory_need
from tieredckpt.policy.units import parse_size

RANKS_MAX = 1024
"""Ranks of one host; more is a typing error."""


@click.group(name="config")
def group() -> None:
    """Check configuration files."""


def as_yaml(value: object, indent: str = "") -> Iterator[str]:
    """The lines of an effective configuration (dicts, lists of dicts, scalars) as YAML."""
    assert isinstance(value, dict)
    for key, item in value.items():
        if isinstance(item, dict):
            yield f"{indent}{key}:"
            yield from as_yaml(item, indent + "  ")
        elif isinstance(item, list) and item:
            yield f"{indent}{key}:"
            for each in item:
                first, *rest = as_yaml(each, indent + "    ")
                yield f"{indent}  - {first.lstrip()}"
                yield from rest
        elif isinstance(item, str) and item:
            plain = all(c.isalnum() or c in " ./_-:" for c in item) and ": " not in item
            yield f"{indent}{key}: {item if plain else json.dumps(item)}"
        else:
            yield f"{indent}{key}: {json.dumps(item)}"  # numbers, true, null, []


def tmpfs_of(runtime_dir: Path) -> tuple[Path, int, int]:
    """The folder that memory comes from, its file system's size, and what is free there."""
    folder = nearest(runtime_dir)
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
@json_option
def check(file: Path, state_size: str | None, ranks: int, as_json: bool) -> None:
    """Check FILE, print what it comes to, and how much memory a state of that size will take.

    Environment overrides (TIEREDCKPT_MEMORY__CAPACITY=8GiB) count as they would in training.
    The folders that FILE names are looked at on this machine, as this user; nothing is made.
    Exit code 2 if the file is wrong, 1 if it cannot work here or the state does not fit.

    \b
    Examples:
      tieredckpt config check tieredckpt.yaml
      tieredckpt config check tieredckpt.yaml --state-size 80GiB --ranks 8
    """
    config = load_config(file, os.environ)
    runtime_dir = Path(config.agent.runtime_dir or default_runtime_dir(os.environ)).absolute()
    found = problems(config, runtime_dir)
    folder, total_bytes, free_bytes = tmpfs_of(runtime_dir)
    limit = config.memory.capacity_bytes or total_bytes // 2
    need = None
    if state_size is not None:
        try:
            state_bytes = parse_size(state_size)
        except ValueError as error:
            raise ConfigError(f"--state-size: {error}", key="--state-size") from error
        need = memory_need(
            -(-state_bytes // ranks), ranks, config.memory.keep.last, len(config.tiers)
        )
        if need.total_bytes > total_bytes:
            message = (
                f"a state of {state_size} needs {size(need.total_bytes)}, and {folder} has "
                f"{size(total_bytes)} on this machine"
            )
            found.append(Problem(key="memory.capacity", message=message, fatal=False))
    try:
        namespace = resolve_namespace(config.namespace, os.environ)
    except ConfigError:
        namespace = None  # legal in a file that is made for Slurm; a job without one is refused
    if as_json:
        print_json(
            {
                "config": config.effective(),
                "namespace": namespace,
                "memory": None if need is None else dataclasses.asdict(need),
                "limit_bytes": limit,
                "tmpfs": {"path": str(folder), "bytes": total_bytes, "free_bytes": free_bytes},
                "fits": None if need is None else need.total_bytes <= limit,
                "problems": [dataclasses.asdict(each) for each in found],
            }
        )
    else:
        _print(config, namespace, need, ranks)
        click.echo(
            f"limit: {size(limit)} "
            + ("(memory.capacity)" if config.memory.capacity_bytes else f"(half of {folder})")
            + f"; {folder} has {size(free_bytes)} free of {size(total_bytes)}"
        )
    _end(found, need, limit, ranks, state_size)


def _end(
    found: list[Problem], need: MemoryNeed | None, limit: int, ranks: int, state_size: str | None
) -> None:
    """Print the problems. Raises CapacityError or TieredCkptError if any is fatal."""
    for each in found:
        label, colour = ("will fail", "red") if each.fatal else ("warning", "yellow")
        click.secho(f"{label}: {each.key}: {each.message}", fg=colour, err=True)
    if need is not None and need.total_bytes > limit:
        raise CapacityError(
            f"a state of {state_size} on {ranks} ranks needs {size(need.total_bytes)} of memory, "
            f"{size(need.total_bytes - limit)} more than the limit of {size(limit)}: raise "
            "memory.capacity, or keep fewer (memory.keep.last)",
            needed_bytes=need.total_bytes,
            available_bytes=limit,
            limit="memory.capacity",
        )
    if fatal := sum(each.fatal for each in found):
        raise TieredCkptError(
            f"this configuration cannot work on this machine: {count(fatal, 'problem')}, see above"
        )


def _print(config: Config, namespace: str | None, need: MemoryNeed | None, ranks: int) -> None:
    for line in as_yaml(config.effective()):
        click.echo(line)
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
