"""What other hosts hold, for a command: asked with the secret that the local agent has."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass

import click

from tieredckpt.cli.place import Found, Place
from tieredckpt.errors import AgentError, NotFoundError
from tieredckpt.recovery.asking import ask_hosts
from tieredckpt.recovery.evidence import known_manifests
from tieredckpt.tiers.facts import Holdings
from tieredckpt.transport.auth import Secret
from tieredckpt.transport.messages import PeerTable
from tieredckpt.transport.peer_client import PeerClient


@dataclass(frozen=True, slots=True)
class Everyone:
    """What all hosts hold that answered, this one first; see ``plan_recovery``."""

    holdings: tuple[Holdings, ...]
    silent: Mapping[str, str] | None
    """None: no other host is known."""


def ask_others(place: Place, found: Found, limit_s: float) -> Everyone:
    """Ask every host that the local agent knows. Shows progress on a terminal's standard error."""
    table = _table(place, found)
    own = found.holdings
    states = [s for s in (table.peers if table else ()) if s.host.host_id != own.host_id]
    if table is None or not (states or table.unmet):
        return Everyone((own,), None)
    states.sort(key=lambda state: state.reachable is False)
    secret = Secret(table.token, table.tls)
    shown = sys.stderr.isatty()

    def progress(done: int, total: int) -> None:
        if shown:
            click.echo(f"\r{done} of {total} other hosts have answered ", nl=False, err=True)

    with ExitStack() as stack:
        hosts = [
            (
                state.host.host_id,
                stack.enter_context(PeerClient(state.host, found.namespace, secret)),
            )
            for state in states
        ]
        others, silent = ask_hosts(
            found.namespace, hosts, known_manifests([own]), limit_s=limit_s, progress=progress
        )
    if shown:
        click.echo(err=True)
    return Everyone((own, *others), {**silent, **table.unmet})


def _table(place: Place, found: Found) -> PeerTable | None:
    if found.source != "agent":
        return None
    try:
        with place.agent() as client:
            return client.peers(found.namespace)
    except (AgentError, NotFoundError):
        return None
