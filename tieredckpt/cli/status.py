"""``tieredckpt status`` and ``peers``: the state of the node agent and of the other hosts."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from typing import Any

import click
import msgspec
from rich.text import Text

from tieredckpt.cli.output import one_line, print_json, print_table, short, size
from tieredckpt.cli.sources import Place, json_option, namespace_options, place_options
from tieredckpt.config.units import format_duration
from tieredckpt.errors import AgentError
from tieredckpt.rpc.messages.agent import (
    NamespaceStatus,
    PeerState,
    PeerTable,
    ReplicationStatus,
    Status,
    TierStatus,
)


def _lag(tier: TierStatus) -> str:
    """Return the lag in steps and, from a minute on, in time."""
    steps = "-" if tier.lag_steps is None else str(tier.lag_steps)
    if tier.lag_s is None or tier.lag_s < 60:
        return steps
    return f"{steps} ({format_duration(round(tier.lag_s))})"


def _speed(num_bytes: float, seconds: float) -> str:
    return f"{num_bytes / seconds / 1e9:.2f} GB/s" if seconds else "-"


def _tier_row(name: str, tier: TierStatus) -> dict[str, Any]:
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
    return {
        "namespace": name,
        "tier": tier.name,
        "checkpoints": tier.checkpoints,
        "stored": size(tier.stored_bytes),
        "newest step": tier.newest_step,
        "lag": _lag(tier),
        "queued": tier.queued,
        "speed": _speed(tier.spilled_bytes_total, tier.spill_seconds_total),
        "quarantined": tier.quarantined,
        "state": state,
    }


def _memory_row(namespace: NamespaceStatus) -> dict[str, Any]:
    return {
        "namespace": namespace.name,
        "slots' size": f"{size(namespace.slot_bytes)} of {size(namespace.capacity_bytes)}",
        "slots used": f"{namespace.slots - namespace.free_slots} of {namespace.slots}",
        "batches": size(namespace.data_bytes) if namespace.data_bytes else None,
        "sessions": namespace.sessions,
        "checkpoints": namespace.checkpoints,
        "newest step": namespace.newest_step,
        "attempt": namespace.attempt,
        "skipped": namespace.skipped_saves,
    }


def _replica_row(namespace: NamespaceStatus, found: ReplicationStatus) -> dict[str, Any]:
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
    return {
        "namespace": namespace.name,
        "replicas": Text(copies, style="red" if found.possible < found.replicas else ""),
        "newest replicated": found.newest_replicated_step,
        "lag": found.lag_steps,
        "state": state,
        "pulled": size(found.pulled_bytes_total),
        "speed": _speed(found.pulled_bytes_total, found.pull_seconds_total),
        "held": size(found.held_bytes),
        "hosts reachable": Text(hosts, style="red" if reachable < len(members) else ""),
    }


def _print_replicas(namespaces: Sequence[NamespaceStatus]) -> None:
    """Print the replicas of each namespace that has other hosts, or whose job wants replicas."""
    rows = [_replica_row(each, each.replication) for each in namespaces if each.replication]
    print_table("\nother hosts", rows)
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
    print_table("\nmemory", [_memory_row(each) for each in status.namespaces])
    rows = [_tier_row(each.name, tier) for each in status.namespaces for tier in each.tiers]
    print_table("\nother tiers", rows)
    for namespace in status.namespaces:
        for tier in namespace.tiers:
            if tier.alarm or tier.memory_full:
                full = "no free slot or space for the checkpoints that wait for it"
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
    rows = [
        {
            "namespace": namespace.name,
            "stream": each.stream,
            "step": each.step,
            "save_id": each.save_id,
            "tiers": Text(", ").join(
                [
                    *(Text(tier) for tier in each.tiers),
                    *(Text(f"{tier} (not recorded yet)", style="yellow") for tier in each.owed),
                ]
            ),
            "reason": each.reason,
        }
        for namespace in namespaces
        for each in namespace.pins
    ]
    print_table("\npins", rows)


def _answer(place: Place) -> Status:
    with place.agent() as client:
        return client.status()


def _show(place: Place, answer: Status) -> None:
    if place.as_json:
        print_json(**msgspec.to_builtins(answer))
    else:
        print_status(answer)


def _watch(place: Place, every_s: float) -> None:
    """Show the status anew, until Ctrl-C. An agent that does not answer is waited for."""
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            try:
                answer = _answer(place)
                click.clear()  # on a terminal only
                _show(place, answer)
            except AgentError as error:
                click.secho(one_line(str(error)), fg="red", err=True)
            time.sleep(every_s)


@click.command()
@place_options
@json_option
@click.option(
    "--watch", type=click.FloatRange(0.1, 3600), is_flag=False, flag_value=2.0,
    metavar="[SECONDS]", help="Show it again every 2 or so many seconds, until Ctrl-C.",
)  # fmt: skip
def status(place: Place, watch: float | None) -> None:
    """Show the state of this host's node agent: memory, tiers, pins. Exit code 4 if none runs.

    For a job on several hosts it shows the replicas, too. "1/2": the configuration wants two copies
    on other hosts, and one is possible. "newest replicated": the newest step whose copies are all
    complete; "lag": how many steps it is behind the newest one. "held": the bytes of other hosts'
    copies in this memory. "pins": the checkpoints that retention keeps, and the tiers that have
    recorded the pin.

    \b
    Examples:
      tieredckpt status
      tieredckpt status --watch
      tieredckpt status --runtime-dir /dev/shm/my-run --json
    """
    if watch is not None:
        _watch(place, watch)
    else:
        _show(place, _answer(place))


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


def _peer_row(peer: PeerState, leader: str) -> dict[str, Any]:
    host = peer.host
    role = "member" if peer.member else "left"
    addresses = dict.fromkeys(filter(None, (peer.address, *host.addresses)))
    if peer.reachable is None:
        answers = Text("not asked yet", style="dim")
    elif peer.reachable:
        answers = Text("yes", style="green")
    else:
        answers = Text(f"no: {one_line(peer.error or 'no answer')}", style="red")
    return {
        "host": host.host_id,
        "role": "leader" if host.host_id == leader else role,
        "addresses": ", ".join(addresses) or None,
        "memory": short(host.incarnation),
        "labels": ", ".join(f"{name}={value}" for name, value in host.labels.items()) or None,
        "rtt": None if peer.rtt_s is None else f"{peer.rtt_s * 1e3:.2f} ms",
        "speed": None if peer.bytes_per_s is None else _speed(peer.bytes_per_s, 1),
        "reachable": answers,
    }


def print_peers(namespace: str, table: PeerTable) -> None:
    """Print the hosts, this one first."""
    rows = [
        _peer_row(peer, table.leader)
        for peer in sorted(table.peers, key=lambda each: (not each.member, each.host.host_id))
    ]
    if table.host is None:
        click.echo(f"this host does not listen for others in namespace {namespace}")
    else:
        # This host counts as a member until another job informs it that it is not.
        own = _peer_row(PeerState(host=table.host, member=True, reachable=True), table.leader)
        rows.insert(0, own | {"reachable": Text("this host", style="green")})
    print_table(f"hosts of {namespace}", rows)
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
        print_json(**peers_json(name, table))
    else:
        print_peers(name, table)
