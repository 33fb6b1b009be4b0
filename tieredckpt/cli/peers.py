"""``tieredckpt peers``: the other hosts of a job, as this host's agent finds them."""

from __future__ import annotations

from typing import Any

import click
import msgspec
from rich.text import Text

from tieredckpt.cli.place import Place, look_options
from tieredckpt.cli.show import one_line, print_json, print_table, short
from tieredckpt.transport.messages import HostEntry, PeerState, PeerTable


def peers_json(namespace: str, table: PeerTable) -> dict[str, Any]:
    """The agent's answer as plain values, without the token."""
    return {
        "namespace": namespace,
        "host": msgspec.to_builtins(table.host),
        "leader": table.leader,
        "replicas": table.replicas,
        "tls": table.tls is not None,
        "peers": msgspec.to_builtins(table.peers),
        "unmet": table.unmet,
    }


def reached(peer: PeerState) -> Text:
    """Whether a host answers, or why not, in one line."""
    if peer.reachable is None:
        return Text("not asked yet", style="dim")
    if peer.reachable:
        return Text("yes", style="green")
    return Text(f"no: {one_line(peer.error or 'no answer')}", style="red")


def _role(host_id: str, leader: str, *, member: bool) -> str:
    if host_id == leader:
        return "leader"
    return "member" if member else "left"


def _row(
    host: HostEntry, role: str, address: str | None, rtt: str, speed: str, answers: Text
) -> list[str | Text]:
    others = [each for each in host.addresses if each != address]
    shown = ", ".join(filter(None, (address, *others)))
    labels = ", ".join(f"{name}={value}" for name, value in host.labels.items())
    return [host.host_id, role, shown or "-", short(host.incarnation), labels or "-", rtt, speed,
            answers]  # fmt: skip


def print_peers(namespace: str, table: PeerTable) -> None:
    """Print the hosts, this one first."""
    if table.host is None:
        click.echo(f"this host does not listen for others in namespace {namespace}")
    rows = []
    if table.host is not None:
        # It belongs to the job: who leaves it is told so only by the next one.
        role = _role(table.host.host_id, table.leader, member=True)
        rows.append(_row(table.host, role, None, "-", "-", Text("this host", style="green")))
    for peer in sorted(table.peers, key=lambda each: (not each.member, each.host.host_id)):
        rtt = "-" if peer.rtt_s is None else f"{peer.rtt_s * 1e3:.2f} ms"
        speed = "-" if peer.bytes_per_s is None else f"{peer.bytes_per_s / 1e9:.2f} GB/s"
        role = _role(peer.host.host_id, table.leader, member=peer.member)
        rows.append(_row(peer.host, role, peer.address, rtt, speed, reached(peer)))
    if rows:
        names = ("host", "role", "addresses", "memory", "labels", "rtt", "speed", "reachable")
        print_table(f"hosts of {namespace}", names, rows, right=("rtt", "speed"))
    for place, why in sorted(table.unmet.items()):
        click.echo(f"{place} of discovery has not answered yet: {one_line(why)}")


@click.command()
@look_options
def peers(place: Place) -> None:
    """Show the other hosts of a job as this host's agent finds them. Exit code 4 if none runs.

    "role": the leader is the host of rank 0; "left" are hosts of earlier starts, which are asked at
    a recovery. "memory" is the host's incarnation: another one after a reboot. The address in use
    comes first; rtt and speed are of a short probe.

    \b
    Examples:
      tieredckpt peers
      tieredckpt peers --namespace gpt-run-7 --json
    """
    with place.agent() as client:
        name = place.namespace(client.status())
        table = client.peers(name)
    if place.as_json:
        print_json(peers_json(name, table))
    else:
        print_peers(name, table)
