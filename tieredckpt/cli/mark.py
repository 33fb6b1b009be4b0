"""``tieredckpt mark``: say of a checkpoint that restarts are to pass it over."""

from __future__ import annotations

import click

from tieredckpt.cli.place import (
    Found,
    Place,
    ask_others,
    find_holdings,
    find_save,
    find_told,
    look_options,
)
from tieredckpt.cli.show import one_line, print_json, print_table, short
from tieredckpt.errors import NotFoundError
from tieredckpt.policy.pins import standing_marks
from tieredckpt.recovery.evidence import known_manifests, read_records
from tieredckpt.transport.messages import AddRecord

TIMEOUT_S = 15.0
TEXT_MAX = 4096
MARKS_MAX = 1 << 10
"""Taken back at once."""


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
        text=one_line(reason)[:TEXT_MAX],
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
        text=one_line(reason)[:TEXT_MAX],
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
