"""What other hosts hold, for a command: asked with the secret that the local agent has."""

from __future__ import annotations

import sys

import click

from tieredckpt.cli.place import Found, Place
from tieredckpt.recovery.other_hosts import Held, OtherHosts
from tieredckpt.recovery.read_only import ReadOnlyClient


def ask_others(place: Place, found: Found, limit_s: float) -> Held:
    """Ask every host that the local agent knows. Shows progress on a terminal's standard error."""
    own = found.holdings
    shown = sys.stderr.isatty()

    def progress(done: int, total: int) -> None:
        if shown:
            click.echo(f"\r{done} of {total} other hosts have answered ", nl=False, err=True)

    with ReadOnlyClient(place.runtime_dir, place.folders(found.namespace)) as client:
        others = OtherHosts(client, None)
        table = others.refresh() if found.source == "agent" else None
        if table is None or not (table.peers or table.unmet):
            return Held((own,))
        try:
            held = others.ask_all(own, limit_s=limit_s, progress=progress)
        finally:
            others.close()
    if shown:
        click.echo(err=True)
    return held
