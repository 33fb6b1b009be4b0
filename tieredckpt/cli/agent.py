"""``tieredckpt agent``: run, stop, look at and empty the node agent."""

from __future__ import annotations

import os
import secrets
import select
import sys
import time
from pathlib import Path

import click

from tieredckpt.agent import daemon
from tieredckpt.cli.place import Place, json_option, place_options
from tieredckpt.cli.show import print_json
from tieredckpt.cli.status import status
from tieredckpt.errors import AgentError, ConfigError
from tieredckpt.policy.units import parse_duration
from tieredckpt.transport.metrics import exposition

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
    configured = place.config.agent if place.config else None
    idle_s = configured.idle_timeout_s if configured else None
    if idle_timeout is not None:
        try:
            idle_s = parse_duration(idle_timeout)
        except ValueError as error:
            raise ConfigError(f"--idle-timeout: {error}", key="agent.idle_timeout") from error
    options = daemon.AgentOptions(
        runtime_dir=place.runtime_dir,
        detached=detached,
        idle_timeout_s=idle_s,
        log_level=log_level or (configured.log_level if configured else "info"),
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
            f"agent {health.pid} was asked to stop and still runs after {STOP_DEADLINE_S:g} s; its "
            "log says what it is doing",
            outcome="unknown",
        )
    if place.as_json:
        print_json({"stopped": True, "pid": health.pid})
    else:
        click.echo(f"agent {health.pid} has stopped; committed checkpoints stay in memory")


@group.command()
@place_options
@click.option("--namespace", "names", multiple=True, help="Which to empty; may be repeated.")
@click.option("--all", "everything", is_flag=True, help="All namespaces of this agent.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@json_option
def purge(place: Place, names: tuple[str, ...], everything: bool, yes: bool) -> None:
    """Delete namespaces from memory; what lies in other tiers stays.

    The only command that deletes a committed checkpoint. Refused while a trainer has it open.

    \b
    Examples:
      tieredckpt agent purge --namespace gpt-run-7
      tieredckpt agent purge --all --yes
    """
    if bool(names) == everything:
        raise click.UsageError("say which: --namespace NAME, or --all")
    with place.agent() as client:
        held = {each.name: each for each in client.status().namespaces}
        chosen = list(names) if names else sorted(held)
        if not yes:
            for name in chosen:
                in_memory = held[name].checkpoints if name in held else "unknown"
                click.echo(f"namespace {name}: checkpoints in memory: {in_memory}", err=True)
            click.confirm("Delete them from memory?", abort=True, err=True)
        began_s = time.monotonic()
        for name in chosen:
            client.purge(name)
    if place.as_json:
        print_json({"purged": chosen, "seconds": time.monotonic() - began_s})
    else:
        click.echo(f"deleted from memory: {', '.join(chosen) or 'nothing'}")


@group.command()
@place_options
@click.option(
    "--output",
    metavar="FILE",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Replace this file in one step, as node_exporter's textfile collector wants it.",
)
def metrics(place: Place, output: Path | None) -> None:
    """Print the agent's metrics in Prometheus's text format. Exit code 4 if none runs.

    Also then they are printed, or written: tieredckpt_up is 0, and nothing old stays in the file.

    \b
    Examples:
      tieredckpt agent metrics
      tieredckpt agent metrics --output /var/lib/node_exporter/textfile/tieredckpt.prom
    """
    missing: AgentError | None = None
    with place.agent() as client:
        try:
            text = client.metrics()
        except AgentError as error:
            missing, text = error, exposition(None)
    if output is None:
        click.echo(text, nl=False)
    else:
        _replace(output, text)
    if missing is not None:
        raise missing


def _replace(path: Path, data: bytes) -> None:
    """All of the file or the one before it; readable as the umask says, for another user."""
    # The collector reads *.prom alone, so it never meets the name of an unfinished file.
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    try:
        with part.open("xb") as file:
            file.write(data)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


group.add_command(status)
