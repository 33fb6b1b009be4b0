"""``tieredckpt agent``: run, stop, inspect and empty the node agent; ``spill``: copy now."""

from __future__ import annotations

import dataclasses
import os
import select
import sys
import time
from pathlib import Path

import click

from tieredckpt.agent import daemon
from tieredckpt.agent.host.launch import find_or_start
from tieredckpt.agent.host.runtime import RuntimeDir, is_agent_running
from tieredckpt.cli.checkpoints.ls import in_memory
from tieredckpt.cli.metrics import metrics
from tieredckpt.cli.output import print_json, size
from tieredckpt.cli.sources import Place, json_option, moved_tiers, namespace_options, place_options
from tieredckpt.cli.status import status
from tieredckpt.config.schema import AgentConfig
from tieredckpt.config.sections import parsed
from tieredckpt.config.units import parse_duration
from tieredckpt.errors import AgentError, UsageError
from tieredckpt.recovery.flush import FlushReport, flush_and_wait

PURGE_S = 60.0
"""For the agent to list all tiers, and until one ends whose purge was not confirmed."""
STOP_DEADLINE_S = 30.0
"""A stopping agent finishes the block that it is writing, and syncs."""


@click.group(name="agent")
def group() -> None:
    """Run and operate the node agent: the process that keeps checkpoints in memory.

    Training scripts start one by themselves; run it here for a service manager or a container.
    """


@group.command()
@place_options
@click.option("--detached", is_flag=True, help="Leave the terminal and log to a file.")
@click.option(
    "--idle-timeout",
    metavar="DURATION",
    help='Stop after this long without sessions, requests and spills, as in "10 min".',
)
@click.option(
    "--log-level", type=click.Choice(daemon.LOG_LEVELS), help="Else the configuration's, else info."
)
@click.option("--log-file", type=click.Path(path_type=Path), help="Else standard error.")
def run(
    place: Place,
    detached: bool,
    idle_timeout: str | None,
    log_level: str | None,
    log_file: Path | None,
) -> None:
    """Run the agent in the foreground until SIGTERM or `agent stop`; checkpoints stay in memory.

    \b
    Examples:
      tieredckpt agent run
      tieredckpt agent run --runtime-dir /dev/shm/my-run --idle-timeout "1 h" --detached
    """
    configured = place.config.agent if place.config else AgentConfig()
    idle_s = configured.idle_timeout_s
    if idle_timeout is not None:
        idle_s = parsed("--idle-timeout", idle_timeout, parse_duration)
    options = daemon.AgentOptions(
        runtime_dir=place.runtime_dir,
        detached=detached,
        idle_timeout_s=idle_s,
        log_level=log_level or configured.log_level,
        log_file=log_file.absolute() if log_file else None,
    )
    sys.exit(daemon.run(options))


@group.command()
@place_options
@json_option
def stop(place: Place) -> None:
    """Stop the agent cleanly and wait until it has ended. Checkpoints stay in memory.

    \b
    Example:
      tieredckpt agent stop
    """
    with place.agent() as client:
        health = client.health()
        # Opened before the request, so that it can only mean the agent, never a later process.
        handle = os.pidfd_open(health.pid)
        try:
            client.shutdown()
            ended, _, _ = select.select([handle], [], [], STOP_DEADLINE_S)
        finally:
            os.close(handle)
    if not ended:
        raise AgentError(
            f"agent {health.pid} was asked to stop and still runs after {STOP_DEADLINE_S:g} s: "
            "see its log",
            outcome="unknown",
        )
    if place.as_json:
        print_json(stopped=True, pid=health.pid)
    else:
        click.echo(f"agent {health.pid} has stopped; committed checkpoints stay in memory")


@group.command()
@place_options
@click.option(
    "--namespace", "names", multiple=True, help="The namespace to delete; may be repeated."
)
@click.option("--all", "everything", is_flag=True, help="All namespaces of this agent.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@json_option
def purge(place: Place, names: tuple[str, ...], everything: bool, yes: bool) -> None:
    """Delete namespaces from memory. Other tiers keep their checkpoints.

    It names the steps that no other tier of this host has whole, by a new look. Fails while a
    trainer has a namespace open. If no agent runs, one is started, and stopped at the end.
    `tieredckpt purge` deletes from tiers.

    \b
    Examples:
      tieredckpt agent purge --namespace gpt-run-7
      tieredckpt agent purge --all --yes
    """
    if bool(names) == everything:
        raise click.UsageError("name what to delete: --namespace NAME, or --all")
    runtime = RuntimeDir(place.runtime_dir)
    if left := runtime.slots.is_dir() and not is_agent_running(runtime):  # without an agent
        find_or_start(runtime.path, idle_timeout_s=PURGE_S)
    with place.agent(PURGE_S) as client:
        chosen = list(names) or sorted(each.name for each in client.status().namespaces)
        for name in chosen:
            click.echo(f"namespace {name}: {in_memory(client.holdings(name))}", err=True)
        if not yes:
            click.confirm("Delete them from memory?", abort=True, err=True)
        began_s = time.monotonic()
        for name in chosen:
            client.purge(name)
        if left:
            client.shutdown()
    if place.as_json:
        print_json(purged=chosen, seconds=time.monotonic() - began_s)
    else:
        click.echo(f"deleted from memory: {', '.join(chosen) or 'nothing'}")


group.add_command(metrics)
group.add_command(status)


@click.command()
@namespace_options
@click.option("--now", is_flag=True, required=True, help="Before all queued checkpoints.")
@click.option("--tier", help="The only tier to copy to; else they are chosen as described above.")
@click.option("--deadline", metavar="DURATION", help='How much time is left, as in "90 s".')
def spill(place: Place, now: bool, tier: str | None, deadline: str | None) -> None:
    """Copy the newest checkpoint of each stream to tiers now, on all hosts of the job.

    By default to all tiers, but for those in which it is not due and that the remaining bytes do
    not reach before the deadline at the measured speed. Exit code 1 if a checkpoint is not complete
    in one of them in time; the agents continue to copy it.

    \b
    Examples:
      tieredckpt spill --now
      tieredckpt spill --now --tier s3 --deadline 90s --json
    """
    assert now
    left_s = parsed("--deadline", deadline, parse_duration) if deadline is not None else None
    found = place.status()
    name = place.namespace(found)
    moved = moved_tiers(place, found, name)
    if moved and tier in (None, *moved):
        raise UsageError("; ".join(moved.values()))
    shown = ""

    def show(report: FlushReport) -> None:
        nonlocal shown
        text = _progress(report)
        if not place.as_json and text != shown:
            click.echo(text, err=True)
            shown = text

    with place.agent() as client:
        report = flush_and_wait(client, tier, left_s, namespace=name, on_report=show)
    if place.as_json:
        print_json(**dataclasses.asdict(report), done=report.done)
    else:
        for each in report.tiers:
            why = report.errors.get(each)
            what = "complete" if why is None else "not complete"
            click.echo(f"{each}: {what} after {report.seconds:.1f} s" + (f": {why}" if why else ""))
    if not report.done:
        sys.exit(1)


def _progress(report: FlushReport) -> str:
    parts = [
        f"step {report.steps[stream]} of {stream}: {level}"
        for stream, level in report.levels.items()
    ]
    copied = f"{size(report.copied_bytes)} of {size(report.total_bytes)}"
    return f"{report.tier}: {', '.join(parts)}, copied {copied}"
