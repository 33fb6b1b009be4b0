"""``tieredckpt live``: the jobs under ``tieredckpt run`` on this host, and their size."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Any

import click
import msgspec

from tieredckpt.cli.output import count, print_json, print_table
from tieredckpt.cli.sources import json_option
from tieredckpt.errors import AgentError, NotFoundError, UsageError
from tieredckpt.live.control import Request, Status, ask, supervisors

ANSWER_S = 5.0
PAUSE_S = 0.2

_pid_option = click.option("--pid", type=int, help="Of the `tieredckpt run`, if there are several.")


@click.group("live")
def group() -> None:
    """Look at training under `tieredckpt run` on this host, and change its size."""


def _running() -> list[tuple[Path, Status]]:
    found = []
    for path in supervisors():
        with contextlib.suppress(AgentError):
            found.append((path, ask(path, Request(), ANSWER_S)))
    return found


def _one(pid: int | None) -> tuple[Path, Status]:
    """The supervisor that a command is for. Raises NotFoundError, UsageError."""
    found = [each for each in _running() if pid in (None, each[1].pid)]
    if not found:
        raise NotFoundError("no `tieredckpt run` of this user is found on this host")
    if len(found) > 1:
        pids = ", ".join(str(each.pid) for _, each in found)
        raise UsageError(f"several `tieredckpt run` are on this host, choose one by --pid: {pids}")
    return found[0]


@group.command()
@json_option
def status(as_json: bool) -> None:
    """Show the jobs of this host: their world, its ranks and its newest step.

    \b
    Examples:
      tieredckpt live status
      tieredckpt live status --json
    """
    found = [each for _, each in _running()]
    if as_json:
        print_json(jobs=msgspec.to_builtins(found))
        return
    if not found:
        click.echo("no `tieredckpt run` of this user is on this host")
    for each in found:
        name = f"job {each.job}, host {each.host}: " if each.job else ""
        wanted = f", to have {each.size}" if each.ranks and each.size != len(each.ranks) else ""
        click.echo(
            f"{name}pid {each.pid}, generation {each.generation}, step {each.step}, "
            f"{count(len(each.ranks), 'rank')}{wanted}, {count(each.standbys, 'standby process')}"
        )
        print_table(None, [_row(number, rank) for number, rank in enumerate(each.ranks)])


def _row(number: int, rank: Any) -> dict[str, Any]:
    return {"rank": number, "host": rank.host, "pid": rank.pid, "local rank": rank.local_rank}


@group.command()
@click.argument("size", metavar="RANKS", type=click.IntRange(1))
@_pid_option
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(0.1),
    default=60.0,
    show_default=True,
    help="Seconds to wait for the new world; an order that is not adopted until then is void.",
)
@json_option
def resize(size: int, pid: int | None, timeout_s: float, as_json: bool) -> None:
    """Have a job go on with RANKS ranks.

    All ranks save to memory at the same step, and load in the new world. The other ranks
    become standbys. Returns once the new world trains.

    \b
    Examples:
      tieredckpt live resize 6
      tieredckpt live resize 8 --timeout 300
    """
    path, _ = _one(pid)
    until_s = time.monotonic() + timeout_s
    try:
        found = ask(path, Request(size=size), timeout_s)
    except AgentError as error:
        now = ask(path, Request(), ANSWER_S)
        have = len(now.ranks) + now.standbys
        if have < size and not now.job:
            raise UsageError(
                f"{size} ranks need as many processes, and there are {have} and {now.starting} "
                "that start: give `tieredckpt run` more with --standby"
            ) from error
        raise
    while len(found.ranks) != size or found.ended or not found.trains:
        if time.monotonic() >= until_s:
            raise AgentError(f"the world of {size} ranks does not train yet", outcome="unknown")
        time.sleep(PAUSE_S)
        found = ask(path, Request(), ANSWER_S)
    if as_json:
        print_json(**msgspec.to_builtins(found))
    else:
        click.echo(f"generation {found.generation} trains with {count(size, 'rank')}")
