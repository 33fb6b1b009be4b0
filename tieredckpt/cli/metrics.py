"""``tieredckpt agent metrics``: what the node agent says of itself, for Prometheus."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

import click

from tieredckpt.cli.place import Place, place_options
from tieredckpt.errors import AgentError
from tieredckpt.transport.metrics import exposition


@click.command()
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
