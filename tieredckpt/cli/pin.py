"""``tieredckpt pin``, ``unpin``, ``undelete`` and ``mark``: what is said of a checkpoint.

A pin is what retention is to leave alone; what it has deleted from a tier that hosts share can be
taken back for a while, and is pinned then. What is marked as bad, restarts are to pass over.
"""

from __future__ import annotations

import os
import re
import secrets
import sys
import time
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Literal

import click
import msgspec

from tieredckpt.agent.host.runtime import host_id
from tieredckpt.cli.ls import make_listing
from tieredckpt.cli.output import (
    age,
    count,
    one_line,
    print_json,
    print_table,
    record_text,
    short,
    size,
)
from tieredckpt.cli.sources import (
    Found,
    Place,
    ask_others,
    find_holdings,
    find_save,
    find_told,
    look_options,
)
from tieredckpt.config.schema import TierSpec
from tieredckpt.config.sections import parsed
from tieredckpt.config.units import parse_duration
from tieredckpt.errors import ConfigError, NotFoundError, UsageError
from tieredckpt.format.manifest import Manifest
from tieredckpt.format.records import Cause, SaveRecord, encode_save_record
from tieredckpt.policy.retention import size_of, standing_marks
from tieredckpt.recovery.evidence import known_manifests, read_records
from tieredckpt.recovery.folders import open_tier
from tieredckpt.rpc.messages.agent import PIN_WAIT_S_MAX, AddRecord, Pinned
from tieredckpt.storage.shared.catalog import SharedCatalog, take_back

TIMEOUT_S = 15.0
"""Other hosts that take longer to answer are left out."""
MARKS_MAX = 1 << 10
"""Taken back at once."""

_ID_START = re.compile(r"[0-9a-f]{4,32}")
_NO_MEMORY = "0" * 32
"""In place of an incarnation: a pin does not depend on what any memory holds."""

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
    with place.agent() as client:
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
    _print_owed(pinned)


def _print_owed(noted: Pinned) -> None:
    for tier, why in noted.owed.items():
        click.secho(
            f"{tier} has not noted it and gets it as soon as it answers; until then only the "
            f"agents know of it: {one_line(why)}",
            fg="yellow",
            err=True,
        )


# --- undelete -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Deleted:
    """A checkpoint that was deleted."""

    manifest: Manifest
    age_s: float
    """By the store's clock."""


@click.command()
@click.argument("which", metavar="[STEP|SAVE_ID]", required=False)
@click.option("--tier", "tier_name", help="Which one; else the only one that hosts share.")
@click.option("--stream", default="default", show_default=True, help="Of STEP.")
@click.option("--reason", default="taken back", show_default=True, help="Of the pin.")
@look_options
def undelete(
    which: str | None, tier_name: str | None, stream: str, reason: str, place: Place
) -> None:
    """Take back a checkpoint that retention deleted from a tier that hosts share, and pin it.

    Possible until its segments are deleted: for delete_delay, then until the leader's agent has
    pruned again. Without STEP or SAVE_ID (its first digits) it lists what can be taken back.
    Needs no agent: it goes to the tier itself, with the credentials of this shell. The pin keeps
    retention from deleting it again; `tieredckpt unpin` ends it.

    \b
    Examples:
      tieredckpt undelete --tier s3
      tieredckpt undelete 12000 --tier s3
      tieredckpt undelete a2a3fab8 --reason "the rules were wrong" --json
    """
    tier = _tier_of(place, tier_name)
    name = place.namespace(place.status())
    with closing(open_tier(tier, name)) as opened:
        catalog = SharedCatalog(opened)
        catalog.refresh_commits()
        if which is None:
            _print_deleted(place, name, tier.name, _deleted(catalog, "retention"))
            return
        manifest = _choose(catalog, which, stream)
    pin = SaveRecord(
        namespace=manifest.namespace, stream=manifest.stream, save_id=manifest.save_id, kind="pin",
        id=secrets.token_hex(16), host=host_id(os.environ), incarnation=_NO_MEMORY,
        text=record_text(reason),
    )  # fmt: skip
    with closing(open_tier(tier, name, read_only=False)) as opened:
        catalog = SharedCatalog(opened)
        catalog.load()
        take_back(catalog, (manifest.stream, manifest.save_id), encode_save_record(pin))
    if place.as_json:
        print_json({"namespace": name, "tier": tier.name, **_plain(manifest), "pin": pin.id})
        return
    click.echo(
        f"step {manifest.step} ({short(manifest.save_id)}) is in {tier.name} again, and pinned: "
        f"{pin.text}"
    )


def _tier_of(place: Place, name: str | None) -> TierSpec:
    shared = [each for each in (place.config.tiers if place.config else ()) if each.scope != "host"]
    names = ", ".join(each.name for each in shared) or "none"
    fits = [each for each in shared if name in (None, each.name)]
    if len(fits) != 1:
        what = "name one with --tier" if name is None else f"{name} is none of them"
        raise ConfigError(
            f"only a tier that hosts share can give back what was deleted; the configuration has "
            f"{names}: {what}",
            key="tiers",
        )
    return fits[0]


def _deleted(catalog: SharedCatalog, cause: Cause) -> list[Deleted]:
    """retention: what can be taken back; emptied: what no more. The last deleted first."""
    now_s = catalog.tier.now_s()
    found = []
    for save, (head, tombstone) in catalog.commits.tombstones().items():
        if tombstone.cause != cause:
            continue
        manifest = catalog.commits.buried(*save, head)
        if manifest is not None:
            found.append(Deleted(manifest, now_s - (head.info.modified_s or now_s)))
    return sorted(found, key=lambda each: each.age_s)


def _choose(catalog: SharedCatalog, which: str, stream: str) -> Manifest:
    tier = catalog.tier.name
    if fits := _fitting(_deleted(catalog, "retention"), which, stream):
        if len({each.step for each in fits}) > 1:
            raise click.UsageError(f"{count(len(fits), 'save id')} begin with {which}: say more")
        return fits[0]
    for late in _fitting(_deleted(catalog, "emptied"), which, stream):
        raise NotFoundError(
            f"it is too late: step {late.step} ({short(late.save_id)}) was deleted from tier "
            f"{tier}, and its segments too",
            key=which,
        )
    here = [Deleted(each, 0.0) for each in catalog.manifests()]
    for there in _fitting(here, which, stream):
        raise UsageError(
            f"step {there.step} ({short(there.save_id)}) is in tier {tier}: there is nothing to "
            "take back; to keep it, `tieredckpt pin` it"
        )
    raise NotFoundError(f"nothing called {which} was deleted from tier {tier} lately", key=which)


def _fitting(found: list[Deleted], which: str, stream: str) -> list[Manifest]:
    """Those of a step, the newest first; if there are none, those whose save id begins so."""
    all_of_them = [each.manifest for each in found]
    step = int(which) if which.isdecimal() and len(which) < 19 else -1
    fits = [each for each in all_of_them if (each.step, each.stream) == (step, stream)]
    if not fits and _ID_START.fullmatch(which):
        fits = [each for each in all_of_them if each.save_id.startswith(which)]
    return sorted(fits, key=lambda each: (each.attempt.number, each.seq), reverse=True)


def _print_deleted(place: Place, namespace: str, tier: str, found: list[Deleted]) -> None:
    if place.as_json:
        deleted = [_plain(each.manifest) | {"deleted_for_s": each.age_s} for each in found]
        print_json({"namespace": namespace, "tier": tier, "deleted": deleted})
        return
    rows = [
        (
            each.manifest.stream, str(each.manifest.step), short(each.manifest.save_id),
            size(size_of(each.manifest)), age(time.time() - each.age_s),
        )
        for each in found
    ]  # fmt: skip
    if rows:
        columns = ("stream", "step", "save id", "size", "deleted")
        print_table(None, columns, rows, right=("step", "size"))
    else:
        click.echo(f"nothing can be taken back in {tier}")


def _plain(manifest: Manifest) -> dict[str, object]:
    return {
        "stream": manifest.stream, "step": manifest.step, "save_id": manifest.save_id,
        "size": size_of(manifest),
    }  # fmt: skip


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

    Needs a running agent. The mark is written into the tiers that hold the checkpoint, so it
    outlives job and hosts; exit code 1 if one has not noted it yet. It is about this checkpoint
    alone. Nothing is deleted: it still loads by its save id, `engine.reader(save_id=...)`. `mark
    good` takes it back.

    \b
    Examples:
      tieredckpt mark bad a2a3fab8 --reason "the loss is NaN from here on"
    """
    found = find_told(place, "a mark is")
    manifest = find_save(found, save_id)
    request = AddRecord(
        stream=manifest.stream, save_id=manifest.save_id, kind="bad", text=record_text(reason)
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
        noted = client.pin(request, found.namespace)
    if place.as_json:
        told = {"tiers": noted.tiers, "owed": noted.owed}
        print_json({"namespace": found.namespace, "save_id": request.save_id, **plain, **told})
    else:
        click.echo(f"{short(request.save_id)} {said}")
        _print_owed(noted)
    if noted.owed:
        sys.exit(1)


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
