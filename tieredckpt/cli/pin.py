"""``tieredckpt pin``, ``unpin`` and ``mark``: what retention and restarts are told of a checkpoint.

A pin is what retention is to leave alone; what is marked as bad, restarts are to pass over.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Literal

import click
import msgspec

from tieredckpt.cli.listing import make_listing
from tieredckpt.cli.place import (
    AGENT_DEADLINE_S,
    Found,
    Place,
    ask_others,
    find_holdings,
    find_save,
    find_told,
    look_options,
)
from tieredckpt.cli.show import one_line, print_json, print_table, record_text, short
from tieredckpt.errors import NotFoundError
from tieredckpt.format.manifest import Manifest
from tieredckpt.policy.config_sections import parsed
from tieredckpt.policy.marks import standing_marks
from tieredckpt.policy.units import parse_duration
from tieredckpt.recovery.evidence import known_manifests, read_records
from tieredckpt.transport.messages import PIN_WAIT_S_MAX, AddRecord, Pinned

TIMEOUT_S = 15.0
"""Other hosts that take longer to answer are left out."""
MARKS_MAX = 1 << 10
"""Taken back at once."""

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
    _say(place, "pin", (step, stream, save_id), record_text(reason), timeout)


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
    wait_s = parsed("--timeout", timeout, partial(parse_duration, most_s=PIN_WAIT_S_MAX))
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


# --- marks --------------------------------------------------------------------------------------


@click.group(name="mark")
def group() -> None:
    """Mark checkpoints as bad, so that restarts pass them over, and take that back."""


@group.command(name="bad")
@click.argument("save_id")
@click.option("--reason", required=True, help="Why; restarts and `recovery plan` show it.")
@look_options
def bad(save_id: str, reason: str, place: Place) -> None:
    """Mark SAVE_ID (its first digits are enough) as bad, on all hosts of the job.

    Needs a running agent that has the checkpoint in memory. Nothing is deleted: it still loads by
    its save id, `engine.reader(save_id=...)`. `mark good` takes it back.

    \b
    Examples:
      tieredckpt mark bad a2a3fab8 --reason "the loss is NaN from here on"
    """
    found = find_told(place, "a mark is")
    manifest = find_save(found, save_id)
    request = AddRecord(
        stream=manifest.stream,
        save_id=manifest.save_id,
        kind="bad",
        text=record_text(reason),
    )
    said = "is marked as bad: restarts pass it over"
    _tell(place, found, request, {"marked": "bad"}, said)


@group.command(name="good")
@click.argument("save_id")
@click.option("--reason", default="", help="Why; it is kept with the mark.")
@look_options
def good(save_id: str, reason: str, place: Place) -> None:
    """Take back the marks of SAVE_ID (its first digits are enough), on all hosts of the job.

    Those that this host or another one knows that answers. Whoever marks it at the same time is
    not overruled: `mark list` shows what stands.

    \b
    Examples:
      tieredckpt mark good a2a3fab8 --reason "it was the data, not the weights"
    """
    found = find_told(place, "a mark is")
    manifest = find_save(found, save_id)
    everyone = ask_others(place, found, TIMEOUT_S)
    records, _ = read_records(everyone.holdings)
    marks = [mark for mark in standing_marks(records) if mark.save_id == manifest.save_id]
    if not marks:
        name = manifest.save_id
        raise NotFoundError(f"checkpoint {name} is not marked as bad", key=name)
    request = AddRecord(
        stream=manifest.stream,
        save_id=manifest.save_id,
        kind="good",
        segments=tuple(mark.id for mark in marks[:MARKS_MAX]),
        text=record_text(reason),
    )
    said = "is not marked as bad any more: restarts may load it"
    _tell(place, found, request, {"taken_back": len(request.segments)}, said)


def _tell(
    place: Place, found: Found, request: AddRecord, plain: dict[str, object], said: str
) -> None:
    with place.agent() as client:
        client.call(request, found.namespace)
    if place.as_json:
        print_json({"namespace": found.namespace, "save_id": request.save_id, **plain})
    else:
        click.echo(f"{short(request.save_id)} {said}")


@group.command(name="list")
@look_options
def list_marks(place: Place) -> None:
    """List the marks that stand, of those that this host or another one knows that answers.

    \b
    Examples:
      tieredckpt mark list
      tieredckpt mark list --json | jq '.marks[].step'
    """
    found = find_holdings(place)
    everyone = ask_others(place, found, TIMEOUT_S)
    steps = {m.save_id: m.step for m in known_manifests(everyone.holdings).values()}
    marks = list(standing_marks(read_records(everyone.holdings)[0]))
    marks.sort(key=lambda record: (record.stream, steps.get(record.save_id, -1), record.save_id))
    if place.as_json:
        print_json(
            {
                "namespace": found.namespace,
                "marks": [
                    {
                        "save_id": each.save_id, "stream": each.stream,
                        "step": steps.get(each.save_id), "mark": each.kind,
                        "host": each.host, "reason": each.text,
                    }
                    for each in marks
                ],
            }
        )  # fmt: skip
        return
    print_table(
        f"namespace {found.namespace}",
        ("stream", "step", "save id", "mark", "by", "reason"),
        [
            [
                each.stream, str(steps.get(each.save_id, "?")), short(each.save_id), each.kind,
                each.host, one_line(each.text),
            ]
            for each in marks
        ],
        right=("step",),
    )  # fmt: skip
