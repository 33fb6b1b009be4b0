"""``tieredckpt status`` and ``peers``: the state of the node agent and of the other hosts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click
import msgspec
from rich.text import Text

from tieredckpt.cli.output import one_line, print_json, print_table, short, size
from tieredckpt.cli.sources import Place, json_option, namespace_options, place_options
from tieredckpt.config.units import format_duration
from tieredckpt.rpc.messages.agent import (
    HostEntry,
    NamespaceStatus,
    PeerState,
    PeerTable,
    ReplicationStatus,
    Status,
    TierStatus,
)


def _step(step: int | None) -> str:
    return "-" if step is None else str(step)


def _lag(tier: TierStatus) -> str:
    """Return the lag in steps and, from a minute on, in time."""
    if tier.lag_s is None or tier.lag_s < 60:
        return _step(tier.lag_steps)
    return f"{_step(tier.lag_steps)} ({format_duration(round(tier.lag_s))})"


def _speed(num_bytes: int, seconds: float) -> str:
    return f"{num_bytes / seconds / 1e9:.2f} GB/s" if seconds else "-"


def _tier_row(name: str, tier: TierStatus) -> list[str | Text]:
    if tier.available and tier.alarm:
        state = Text("far behind", style="red")
    elif not tier.available:
        state = Text("unavailable", style="red")
    elif tier.active_save_id or tier.queued:
        state = Text("spilling", style="cyan")
    elif tier.awaited:
        state = Text("waits for hosts", style="cyan")
    elif tier.retaining:
        state = Text("deleting", style="cyan")
    else:
        state = Text("idle", style="green")
    return [
        name,
        tier.name,
        str(tier.checkpoints),
        size(tier.stored_bytes),
        _step(tier.newest_step),
        _lag(tier),
        str(tier.queued),
        _speed(tier.spilled_bytes_total, tier.spill_seconds_total),
        str(tier.quarantined),
        state,
    ]


def _memory_row(namespace: NamespaceStatus) -> list[str | Text]:
    return [
        namespace.name,
        f"{size(namespace.slot_bytes)} of {size(namespace.capacity_bytes)}",
        f"{namespace.slots - namespace.free_slots} of {namespace.slots}",
        str(namespace.sessions),
        str(namespace.checkpoints),
        _step(namespace.newest_step),
        str(namespace.attempt),
        str(namespace.skipped_saves),
    ]


_REPLICA_COLUMNS = (
    "replicas", "newest replicated", "lag", "state", "pulled", "speed", "held", "hosts reachable",
)  # fmt: skip


def _replica_row(namespace: NamespaceStatus, found: ReplicationStatus) -> list[str | Text]:
    members = [each for each in namespace.peers if each.member]
    reachable = sum(each.reachable is True for each in members)
    hosts = f"{reachable} of {len(members)}"
    copies = f"{found.possible}/{found.replicas}"
    if found.error:
        state = Text("failing", style="red")
    elif found.active_save_id:
        state = Text("replicating", style="cyan")
    else:
        state = Text("idle", style="green")
    return [
        namespace.name,
        Text(copies, style="red" if found.possible < found.replicas else ""),
        _step(found.newest_replicated_step),
        _step(found.lag_steps),
        state,
        size(found.pulled_bytes_total),
        _speed(found.pulled_bytes_total, found.pull_seconds_total),
        size(found.held_bytes),
        Text(hosts, style="red" if reachable < len(members) else ""),
    ]


def _print_replicas(namespaces: Sequence[NamespaceStatus]) -> None:
    """Print the replicas of each namespace that has other hosts, or whose job wants replicas."""
    rows = [_replica_row(each, each.replication) for each in namespaces if each.replication]
    if rows:
        numbers = tuple(name for name in _REPLICA_COLUMNS if name != "state")
        print_table("\nother hosts", ("namespace", *_REPLICA_COLUMNS), rows, right=numbers)
    for namespace in namespaces:
        if namespace.replication is not None and namespace.replication.error:
            error = one_line(namespace.replication.error)
            click.secho(f"replicas of {namespace.name}: {error}", fg="red")
        for peer in namespace.peers:
            if peer.member and peer.reachable is False:
                error = one_line(peer.error or "no answer")
                click.secho(f"host {peer.host.host_id} of {namespace.name}: {error}", fg="red")


def print_status(status: Status) -> None:
    """Print the agent, its namespaces, their tiers, pins and replicas."""
    health = status.health
    click.echo(
        f"agent {health.pid} in {status.runtime_dir}: tieredckpt {health.version}, "
        f"up {health.uptime_s:.0f} s, {size(status.rss_bytes)} resident; memory outlives: "
        f"{status.survives}; tmpfs {size(status.shm_free_bytes)} free of "
        f"{size(status.shm_total_bytes)}"
    )
    if not status.namespaces:
        click.echo("no namespace is open")
        return
    numbers = (
        "slots' size", "slots used", "sessions", "checkpoints", "newest step", "attempt", "skipped",
    )  # fmt: skip
    memory = [_memory_row(each) for each in status.namespaces]
    print_table("\nmemory", ("namespace", *numbers), memory, right=numbers)
    rows = [_tier_row(each.name, tier) for each in status.namespaces for tier in each.tiers]
    if rows:
        numbers = ("checkpoints", "stored", "newest step", "lag", "queued", "speed", "quarantined")
        print_table("\nother tiers", ("namespace", "tier", *numbers, "state"), rows, right=numbers)
    for namespace in status.namespaces:
        for tier in namespace.tiers:
            if tier.alarm or tier.memory_full:
                full = "no free space for the checkpoints that wait for it"
                why = ["lag_alarm is reached"] * tier.alarm + [full] * tier.memory_full
                shed = f"; shed so far: {tier.dropped_total}" if tier.dropped_total else ""
                click.secho(
                    f"tier {tier.name} of {namespace.name} is behind: {', '.join(why)}, "
                    f"{size(tier.lag_bytes)} to copy{shed}",
                    fg="red",
                )
            if tier.error:
                click.secho(
                    f"tier {tier.name} of {namespace.name}: {one_line(tier.error)}", fg="red"
                )
    _print_pins(status.namespaces)
    _print_replicas(status.namespaces)


def _print_pins(namespaces: Sequence[NamespaceStatus]) -> None:
    rows: list[list[str | Text]] = [
        [
            namespace.name,
            each.stream,
            str(each.step),
            short(each.save_id),
            Text(", ").join(
                [
                    *(Text(tier) for tier in each.tiers),
                    *(Text(f"{tier} (not recorded yet)", style="yellow") for tier in each.owed),
                ]
            ),
            one_line(each.reason),
        ]
        for namespace in namespaces
        for each in namespace.pins
    ]
    if rows:
        columns = ("namespace", "stream", "step", "save id", "tiers", "reason")
        print_table("\npins", columns, rows, right=("step",))


@click.command()
@place_options
@json_option
def status(place: Place) -> None:
    """Show the state of this host's node agent: memory, tiers, pins. Exit code 4 if none runs.

    For a job on several hosts it shows the replicas, too. "1/2": the configuration wants two copies
    on other hosts, and one is possible. "newest replicated": the newest step whose copies are all
    complete; "lag": how many steps it is behind the newest one. "held": the bytes of other hosts'
    copies in this memory. "pins": the checkpoints that retention keeps, and the tiers that have
    recorded the pin.

    \b
    Examples:
      tieredckpt status
      tieredckpt status --runtime-dir /dev/shm/my-run --json
    """
    with place.agent() as client:
        answer = client.status()
    if place.as_json:
        print_json(msgspec.to_builtins(answer))
    else:
        print_status(answer)


def peers_json(namespace: str, table: PeerTable) -> dict[str, Any]:
    """Return the agent's answer as plain values, without the token."""
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
    """Return whether a host answers, or why not, in one line."""
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
        # This host counts as a member until another job informs it that it is not.
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
@namespace_options
def peers(place: Place) -> None:
    """Show the hosts of a job as this host's agent sees them. Exit code 4 if no agent runs.

    "role": the leader is the host of rank 0; hosts that have "left" belong to earlier starts, and a
    recovery asks them, too. "memory": the host's incarnation, which changes with a reboot.
    "addresses": the one in use comes first. "rtt" and "speed" come from a short probe.

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
