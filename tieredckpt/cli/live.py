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
from tieredckpt.config.units import parse_duration
from tieredckpt.errors import AgentError, NotFoundError, UsageError
from tieredckpt.live.control import SIZE_MAX, Request, Status, ask, supervisors

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
        print_json(jobs=[_answer(each) for each in found])
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


def _answer(found: Status) -> dict[str, Any]:
    ranks = [_row(number, rank) for number, rank in enumerate(found.ranks)]
    return {**msgspec.to_builtins(found), "ranks": ranks}


def _row(number: int, rank: Any) -> dict[str, Any]:
    return {"rank": number, "host": rank.host, "pid": rank.pid, "local_rank": rank.local_rank}


@group.command()
@click.argument("size", metavar="[RANKS]", type=click.IntRange(1, SIZE_MAX), required=False)
@click.option("--hosts", type=click.IntRange(1, 1024), help="Short for so many x --nproc-per-node.")
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
def resize(
    size: int | None, hosts: int | None, pid: int | None, timeout_s: float, as_json: bool
) -> None:
    """Have a job go on with RANKS ranks.

    All ranks save to memory at the same step, and load in the new world. The other ranks
    become standbys. Returns once the new world trains.

    \b
    Examples:
      tieredckpt live resize 6
      tieredckpt live resize --hosts 2
      tieredckpt live resize 8 --timeout 300
    """
    if (size is None) is (hosts is None):
        raise click.UsageError("give either RANKS or --hosts")
    path, now = _one(pid)
    wanted = size or (hosts or 0) * now.per_host
    _print(_ordered(path, Request(size=wanted), timeout_s), as_json)


def _seconds(_: click.Context, __: click.Parameter, value: str) -> float:
    try:
        return parse_duration(value)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


@group.command()
@click.argument("host", required=False)
@_pid_option
@click.option(
    "--deadline",
    "deadline_s",
    default="30s",
    show_default=True,
    callback=_seconds,
    metavar="DURATION",
    help="The host ends after this time, whatever it holds.",
)
@json_option
def leave(host: str | None, pid: int | None, deadline_s: float, as_json: bool) -> None:
    """Have HOST (default: this one) leave its job, which goes on without it.

    All ranks save to memory at the same step; standbys of other hosts get its ranks and load. Then
    it copies its newest checkpoint to a tier if there is one, and its `tieredckpt run` ends.
    SIGTERM to that does the same, with its --grace. Returns once the new world trains without it.

    \b
    Examples:
      tieredckpt live leave --deadline 90s
      tieredckpt live leave node-3
    """
    path, now = _one(pid)
    if not now.job:
        raise UsageError("this job has one host: end it by SIGTERM")
    request = Request(host=host or now.host, deadline_s=deadline_s)
    found = _ordered(path, request, deadline_s)
    if as_json:
        print_json(**_answer(found))
    else:
        click.echo(f"host {request.host} has left generation {found.generation}")


def _ordered(path: Path, request: Request, timeout_s: float) -> Status:
    """The status once the order is applied. Raises UsageError: it is not, in time."""
    until_s = time.monotonic() + timeout_s
    found = before = ask(path, Request(), ANSWER_S)
    is_adopted = False
    with contextlib.suppress(AgentError):  # or a size was adopted in the last moment
        found = ask(path, request, timeout_s)
        is_adopted = True
    while True:
        try:
            found = ask(path, Request(), ANSWER_S)
        except AgentError:  # it flushes, or has ended
            if is_adopted and request.host == before.host and _is_applied(request, found):
                return found
            raise
        if request.size not in (0, found.size) or (request.host and not is_adopted):
            raise UsageError(_refused(request, before, found))
        if found.trains and _is_applied(request, found):
            return found
        if time.monotonic() >= until_s:
            raise UsageError("the order is adopted, but the new world does not train yet")
        time.sleep(PAUSE_S)


def _is_applied(request: Request, found: Status) -> bool:
    """Whether the generation is one of the order."""
    is_away = not request.host or all(rank.host != request.host for rank in found.ranks)
    return is_away and len(found.ranks) == found.size and not found.ended


def _refused(request: Request, before: Status, found: Status) -> str:
    """Why an order was not adopted."""
    if request.host:
        return (
            f"host {request.host} stays: it is no host of the job, or others have too few standbys "
            "for its ranks, or no more than half of the first hosts would be left"
        )
    if found.size != before.size:
        return f"the job is to have {found.size} ranks: another command has ordered it since"
    have = len(found.ranks) + found.standbys
    return (
        f"{request.size} ranks need as many processes on more than half of the first hosts; this "
        f"host knows {have}, and {found.starting} start: `tieredckpt run` starts more by --standby"
    )


def _print(found: Status, as_json: bool) -> None:
    if as_json:
        print_json(**_answer(found))
    else:
        click.echo(f"generation {found.generation} trains with {count(len(found.ranks), 'rank')}")
