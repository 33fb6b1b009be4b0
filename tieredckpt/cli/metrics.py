"""``tieredckpt agent metrics``: the agent's metrics, printed, in a file, or served by HTTP."""

from __future__ import annotations

import os
import secrets
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING
from wsgiref.simple_server import WSGIRequestHandler, make_server

import click

from tieredckpt.cli.sources import Place, place_options
from tieredckpt.errors import AgentError, UsageError
from tieredckpt.rpc.metrics import TEXT_TYPE, exposition

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIEnvironment

REQUEST_S = 10.0
"""Longest that a scrape waits for its client each time; the next scrape waits for it."""


class _Handler(WSGIRequestHandler):
    timeout = REQUEST_S

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: scrapes are many."""


@click.command()
@place_options
@click.option(
    "--output",
    metavar="FILE",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Replace this file in one step, as node_exporter's textfile collector wants it.",
)
@click.option(
    "--listen",
    metavar="HOST:PORT",
    help="Serve them at http://HOST:PORT/metrics until SIGTERM, to anyone who can connect.",
)
def metrics(place: Place, output: Path | None, listen: str | None) -> None:
    """Print the agent's metrics in Prometheus's text format. Exit code 4 if no agent runs.

    Without an agent the output is tieredckpt_up 0 alone, which replaces an older --output file too.

    \b
    Examples:
      tieredckpt agent metrics
      tieredckpt agent metrics --output /var/lib/node_exporter/textfile/tieredckpt.prom
      tieredckpt agent metrics --listen 0.0.0.0:9411
    """
    if listen is not None:
        if output is not None:
            raise UsageError("--listen serves the metrics, --output writes them: choose one")
        _read(place)  # another user's agent is an error now, not at each scrape
        _serve(_address(listen), lambda: _read(place)[0])
        return
    text, missing = _read(place)
    if output is None:
        click.echo(text, nl=False)
    else:
        _replace(output, text)
    if missing is not None:
        raise missing


def _read(place: Place) -> tuple[bytes, AgentError | None]:
    """The metrics now; without an agent that there is none, and why.

    Raises AgentError: The agent is another user's, so that nothing is known of it.
    """
    with place.agent() as client:
        try:
            return client.metrics(), None
        except AgentError as error:
            if error.fields.get("foreign"):
                raise
            return exposition(None), error


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) >= 1 << 16:
        raise UsageError(f"--listen {text}: not HOST:PORT, such as 127.0.0.1:9411")
    return host, int(port)


def _serve(address: tuple[str, int], read: Callable[[], bytes]) -> None:
    def answer(environ: WSGIEnvironment, start: StartResponse) -> list[bytes]:
        if environ["PATH_INFO"] != "/metrics":
            start("404 Not Found", [])
            return [b"only /metrics is here\n"]
        start("200 OK", [("Content-Type", TEXT_TYPE)])
        return [read()]

    try:
        server = make_server(*address, answer, handler_class=_Handler)
    except OSError as error:
        raise UsageError(f"cannot listen on {':'.join(map(str, address))}: {error}") from error
    # Without a handler the first process of a container ignores it. A handler that raises would be
    # lost in a request, and only another thread may end the loop.
    signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=server.shutdown).start())
    with server:
        click.echo(f"metrics at http://{address[0]}:{server.server_port}/metrics", err=True)
        server.serve_forever()


def _replace(path: Path, data: bytes) -> None:
    """Write ``path`` in one step, with the umask's permissions: another user may read it."""
    # The collector reads *.prom alone, so it never meets the name of an unfinished file.
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    try:
        with part.open("xb") as file:
            file.write(data)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
