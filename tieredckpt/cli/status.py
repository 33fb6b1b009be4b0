"""``tieredckpt status``: what the node agent holds and does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import msgspec
from rich.text import Text

from tieredckpt.cli.place import Place, json_option, place_options
from tieredckpt.cli.show import one_line, print_json, print_table, size
from tieredckpt.transport.messages import NamespaceStatus, Status, TierStatus


def status_json(status: Status) -> dict[str, Any]:
    """The agent's answer as plain values."""
    plain: dict[str, Any] = msgspec.to_builtins(status)
    return plain


def _step(step: int | None) -> str:
    return "-" if step is None else str(step)


def _tier_row(name: str, tier: TierStatus) -> list[str | Text]:
    speed = (
        f"{tier.spilled_bytes_total / tier.spill_seconds_total / 1e9:.2f} GB/s"
        if tier.spill_seconds_total
        else "-"
    )
    if not tier.available:
        state = Text("unavailable", style="red")
    elif tier.active_save_id or tier.queued:
        state = Text("spilling", style="cyan")
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
        _step(tier.lag_steps),
        str(tier.queued),
        speed,
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


def print_status(status: Status) -> None:
    """Print the agent, its namespaces, and their tiers."""
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
    print_table(
        "\nmemory",
        (
            "namespace",
            "slots' size",
            "slots used",
            "sessions",
            "checkpoints",
            "newest step",
            "attempt",
            "skipped",
        ),
        [_memory_row(each) for each in status.namespaces],
        right=(
            "slots' size",
            "slots used",
            "sessions",
            "checkpoints",
            "newest step",
            "attempt",
            "skipped",
        ),
    )
    rows = [_tier_row(each.name, tier) for each in status.namespaces for tier in each.tiers]
    if rows:
        numbers = ("checkpoints", "stored", "newest step", "lag", "queued", "speed", "quarantined")
        print_table("\nother tiers", ("namespace", "tier", *numbers, "state"), rows, right=numbers)
    for namespace in status.namespaces:
        for tier in namespace.tiers:
            if tier.error:
                click.secho(
                    f"tier {tier.name} of {namespace.name}: {one_line(tier.error)}", fg="red"
                )


@click.command()
@place_options
@json_option
def status(config_file: Path | None, runtime_dir: Path | None, as_json: bool) -> None:
    """Show what the node agent of this host holds and does. Exit code 4 if none runs.

    \b
    Examples:
      tieredckpt status
      tieredckpt status --runtime-dir /dev/shm/my-run --json
    """
    with Place.find(config_file, runtime_dir).agent() as client:
        answer = client.status()
    if as_json:
        print_json(status_json(answer))
    else:
        print_status(answer)
