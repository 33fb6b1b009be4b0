"""``tieredckpt mark``: say of a checkpoint that restarts are to pass it over."""

from __future__ import annotations

import click

from tieredckpt.cli.other_hosts import ask_others
from tieredckpt.cli.place import (
    Found,
    Place,
    find_holdings,
    find_told,
    json_option,
    namespace_option,
    place_options,
)
from tieredckpt.cli.recovery import full_save_id
from tieredckpt.cli.show import one_line, print_json, print_table, short
from tieredckpt.errors import NotFoundError
from tieredckpt.policy.marks import standing_marks
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
@place_options
@namespace_option
@json_option
def bad(
    save_id: str,
    reason: str,
    place: Place,
    namespace: str | None,
    as_json: bool,
) -> None:
    """Mark SAVE_ID (its first digits are enough) as bad, on all hosts of the job.

    Needs a running agent that has the checkpoint in memory. Nothing is deleted: it still loads by
    its save id, `engine.reader(save_id=...)`. `mark good` takes it back.

    \b
    Examples:
      tieredckpt mark bad a2a3fab8 --reason "the loss is NaN from here on"
    """
    found, save_id, stream = _find(place, namespace, save_id)
    request = AddRecord(
        stream=stream, save_id=save_id, kind="bad", text=one_line(reason)[:TEXT_MAX]
    )
    with place.agent() as client:
        client.call(request, found.namespace)
    if as_json:
        print_json({"namespace": found.namespace, "save_id": save_id, "marked": "bad"})
    else:
        click.echo(f"{short(save_id)} is marked as bad: restarts pass it over")


@group.command(name="good")
@click.argument("save_id")
@click.option("--reason", default="", help="Why; it is kept with the mark.")
@place_options
@namespace_option
@json_option
def good(
    save_id: str,
    reason: str,
    place: Place,
    namespace: str | None,
    as_json: bool,
) -> None:
    """Take back the marks of SAVE_ID (its first digits are enough), on all hosts of the job.

    Those that this host or another one knows that answers. Whoever marks it at the same time is
    not overruled: `mark list` shows what stands.

    \b
    Examples:
      tieredckpt mark good a2a3fab8 --reason "it was the data, not the weights"
    """
    found, save_id, stream = _find(place, namespace, save_id)
    everyone = ask_others(place, found, TIMEOUT_S)
    records, _ = read_records(everyone.holdings)
    marks = [mark for mark in standing_marks(records) if mark.save_id == save_id]
    if not marks:
        raise NotFoundError(f"checkpoint {save_id} is not marked as bad", key=save_id)
    request = AddRecord(
        stream=stream,
        save_id=save_id,
        kind="good",
        segments=tuple(mark.id for mark in marks[:MARKS_MAX]),
        text=one_line(reason)[:TEXT_MAX],
    )
    with place.agent() as client:
        client.call(request, found.namespace)
    if as_json:
        print_json(
            {"namespace": found.namespace, "save_id": save_id, "taken_back": len(request.segments)}
        )
    else:
        click.echo(f"{short(save_id)} is not marked as bad any more: restarts may load it")


def _find(place: Place, namespace: str | None, save_id: str) -> tuple[Found, str, str]:
    """What is known there, the whole save id and its stream."""
    found = find_told(place, namespace, "a mark is")
    save_id = full_save_id([found.holdings], save_id)
    streams = {m.save_id: m.stream for m in known_manifests([found.holdings]).values()}
    if save_id not in streams:
        raise NotFoundError(f"this host knows no checkpoint {save_id}", key=save_id)
    return found, save_id, streams[save_id]


@group.command(name="list")
@place_options
@namespace_option
@json_option
def list_marks(place: Place, namespace: str | None, as_json: bool) -> None:
    """List the marks that stand, of those that this host or another one knows that answers.

    \b
    Examples:
      tieredckpt mark list
      tieredckpt mark list --json | jq '.marks[].step'
    """
    found = find_holdings(place, namespace)
    everyone = ask_others(place, found, TIMEOUT_S)
    steps = {m.save_id: m.step for m in known_manifests(everyone.holdings).values()}
    marks = list(standing_marks(read_records(everyone.holdings)[0]))
    marks.sort(key=lambda record: (record.stream, steps.get(record.save_id, -1), record.save_id))
    if as_json:
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
