"""``tieredckpt pin`` and ``unpin``: what retention is to leave alone."""

from __future__ import annotations

import sys
from typing import Literal

import click
import msgspec

from tieredckpt.cli.listing import make_listing
from tieredckpt.cli.place import (
    AGENT_DEADLINE_S,
    Place,
    find_save,
    find_told,
    look_options,
)
from tieredckpt.cli.show import one_line, print_json, short
from tieredckpt.errors import ConfigError, NotFoundError
from tieredckpt.format.manifest import Manifest
from tieredckpt.policy.units import parse_duration
from tieredckpt.transport.messages import PIN_WAIT_S_MAX, AddRecord, Pinned

_STREAM = click.option("--stream", default="default", help="The sequence of checkpoints.")
_SAVE_ID = click.option(
    "--save-id", help="Instead of STEP: this one (its first digits), also if it was abandoned."
)
_TIMEOUT = click.option(
    "--timeout",
    default="30 s",
    show_default=True,
    metavar="DURATION",
    help="How long the tiers are waited for; those that have not noted it get it later.",
)


@click.command()
@click.argument("step", type=click.IntRange(0), required=False)
@click.option("--reason", required=True, help="Why; `ls` and `retention plan` show it.")
@_STREAM
@_SAVE_ID
@_TIMEOUT
@look_options
def pin(
    step: int | None,
    reason: str,
    stream: str,
    save_id: str | None,
    timeout: str,
    place: Place,
) -> None:
    """Keep the newest checkpoint of STEP in every tier that holds it, whatever the rules say.

    Needs a running agent. The pin is written into the tiers, so it outlives job and hosts. A tier
    that the checkpoint is on its way to gets it with it; one that is in memory only is brought to
    a tier. Exit code 0 if all tiers that hold it have noted it, 1 if one has not yet (the pin
    counts, and the tier gets it when it answers) or there is no such checkpoint, 2 for wrong usage
    or if no tier is configured, 4 if no agent runs.

    \b
    Examples:
      tieredckpt pin 12000 --reason "figures of the paper"
      tieredckpt pin 12000 --reason "figures of the paper" --timeout "5 min" --json
    """
    text = one_line(reason)[:4096]
    _say(place, "pin", (step, stream, save_id), text, timeout)


@click.command()
@click.argument("step", type=click.IntRange(0), required=False)
@_STREAM
@_SAVE_ID
@_TIMEOUT
@look_options
def unpin(step: int | None, stream: str, save_id: str | None, timeout: str, place: Place) -> None:
    """End all pins of the newest checkpoint of STEP: retention decides about it again.

    What another side of a fork saved, a branch, is held until somebody says this of it, with
    --save-id (`ls` lists it): then it goes when its stream has newer ones to keep.

    Exit codes as of `pin`; 1 also if it is not pinned.

    \b
    Examples:
      tieredckpt unpin 12000
      tieredckpt unpin --save-id a2a3fab8
    """
    _say(place, "unpin", (step, stream, save_id), "", timeout)


def _say(
    place: Place,
    kind: Literal["pin", "unpin"],
    which: tuple[int | None, str, str | None],
    text: str,
    timeout: str,
) -> None:
    try:
        wait_s = parse_duration(timeout, most_s=PIN_WAIT_S_MAX)
    except ValueError as error:
        raise ConfigError(f"--timeout: {error}", key="timeout") from error
    found = find_told(place, "pins are")
    step, stream, start = which
    if (step is None) == (start is None):
        raise click.UsageError("name either STEP or --save-id")
    if start is not None:
        manifest = find_save(found, start)
    else:
        line = [e.manifest for e in make_listing(found.holdings).checkpoints if e.candidate]
        here = [each for each in line if (each.stream, each.step) == (stream, step)]
        if not here:
            raise NotFoundError(f"this host knows no step {step} of stream {stream}", key=str(step))
        manifest = here[0]
    request = AddRecord(
        stream=manifest.stream, save_id=manifest.save_id, kind=kind, text=text, wait_s=wait_s
    )
    with place.agent(AGENT_DEADLINE_S) as client:
        pinned = client.pin(request, found.namespace)
    if place.as_json:
        told = msgspec.to_builtins(pinned)
        print_json(
            {"namespace": found.namespace, "save_id": manifest.save_id, "said": kind, **told}
        )
    else:
        _print(manifest, kind, pinned)
    if pinned.owed:
        sys.exit(1)


def _print(manifest: Manifest, kind: Literal["pin", "unpin"], pinned: Pinned) -> None:
    done = "is pinned" if kind == "pin" else "is pinned no more"
    where = f" in {', '.join(pinned.tiers)}" if pinned.tiers else ""
    click.echo(f"step {manifest.step} ({short(manifest.save_id)}) {done}{where}")
    if pinned.brought:
        click.echo(f"it was in memory only: it is brought to {pinned.brought}, and the pin with it")
    for tier in pinned.coming:
        if tier != pinned.brought:
            click.echo(f"{tier} gets it with the checkpoint")
    for tier, why in pinned.owed.items():
        click.secho(
            f"{tier} has not noted it and gets it as soon as it answers; until then only the "
            f"agents know of it: {one_line(why)}",
            fg="yellow",
            err=True,
        )
