"""``tieredckpt pin``, ``unpin``, ``undelete``, ``purge`` and ``mark``: decisions of a person.

Retention keeps a pinned checkpoint. For a while, ``undelete`` restores a checkpoint that retention
deleted from a shared tier, and pins it. ``purge`` deletes from tiers what is not pinned. Restarts
skip a checkpoint that is marked as bad.
"""

from __future__ import annotations

import operator
import os
import re
import secrets
import sys
from collections.abc import Collection, Sequence
from contextlib import ExitStack, closing, suppress
from functools import partial
from typing import Any, Literal

import click
import msgspec

from tieredckpt.agent.host.runtime import host_id
from tieredckpt.cli.checkpoints.ls import Listed, Listing, make_listing
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
    find_by_agent,
    find_holdings,
    find_save,
    namespace_options,
)
from tieredckpt.config.schema import TierSpec
from tieredckpt.config.sections import parsed
from tieredckpt.config.units import parse_duration
from tieredckpt.errors import ConfigError, NotFoundError, TierUnavailableError, UsageError
from tieredckpt.format.manifest import Manifest
from tieredckpt.format.records import Cause, SaveRecord, encode_save_record
from tieredckpt.policy.retention import size_of, standing_marks
from tieredckpt.recovery.evidence import known_manifests, read_records
from tieredckpt.recovery.folders import Folders, namespaces, open_tier
from tieredckpt.rpc.messages.agent import PIN_WAIT_S_MAX, AddRecord
from tieredckpt.storage.backends.file import LOCK, FileTier
from tieredckpt.storage.base import Scope, Tier
from tieredckpt.storage.catalog import Catalog
from tieredckpt.storage.shared.catalog import SharedCatalog, take_back

TIMEOUT_S = 15.0
"""Hosts that take longer to answer are ignored."""
MARKS_MAX = 1 << 10
"""Marks that one `mark good` removes."""

KINDS = ("manifests/", "pending/", "segments/", "plans/", "records/", "notices/", "verdicts/",
         "claims/", "attempts/")  # fmt: skip
"""All that a tier holds. A checkpoint exists while its manifest does, so manifests go first."""

_ID_START = re.compile(r"[0-9a-f]{4,32}")
_NO_MEMORY = "0" * 32
"""Instead of an incarnation: a pin does not depend on any memory."""

_STREAM = click.option("--stream", default="default", help="The sequence of checkpoints.")
_SAVE_ID = click.option(
    "--save-id", help="Instead of STEP: this checkpoint (its first digits), abandoned or not."
)
_TIMEOUT = click.option(
    "--timeout",
    default="30 s",
    show_default=True,
    metavar="DURATION",
    help="How long to wait for the tiers; a tier that answers later gets the record then.",
)


@click.command()
@click.argument("step", type=click.IntRange(0), required=False)
@click.option("--reason", required=True, help="Why; `ls` and `retention plan` show it.")
@_STREAM
@_SAVE_ID
@_TIMEOUT
@namespace_options
def pin(reason: str, **which: Any) -> None:
    """Keep the newest checkpoint of STEP in every tier that holds it, regardless of the rules.

    Needs a running agent. The pin is written into the tiers, so it outlives job and hosts. A tier
    that the checkpoint is being copied to receives the pin with it. A checkpoint that is in memory
    only is copied to a tier. Exit code 0 if all tiers that hold the checkpoint have recorded the
    pin; 1 if one has not yet (the pin is valid, and the tier records it once it answers) or there
    is no such checkpoint; 2 for wrong usage or if no tier is configured; 4 if no agent runs.

    \b
    Examples:
      tieredckpt pin 12000 --reason "figures of the paper"
      tieredckpt pin 12000 --reason "figures of the paper" --timeout "5 min" --json
    """
    _pin("pin", record_text(reason), **which)


@click.command()
@click.argument("step", type=click.IntRange(0), required=False)
@_STREAM
@_SAVE_ID
@_TIMEOUT
@namespace_options
def unpin(**which: Any) -> None:
    """End all pins of the newest checkpoint of STEP: retention decides about it again.

    A branch, a checkpoint of another side of a fork, is kept until it is unpinned with --save-id
    (`ls` lists it). Retention then deletes it once its stream has newer ones to keep.

    Exit codes as of `pin`; 1 also if it is not pinned.

    \b
    Examples:
      tieredckpt unpin 12000
      tieredckpt unpin --save-id a2a3fab8
    """
    _pin("unpin", "", **which)


def _pin(
    kind: Literal["pin", "unpin"],
    text: str,
    *,
    place: Place,
    step: int | None,
    stream: str,
    save_id: str | None,
    timeout: str,
) -> None:
    wait_s = parsed("--timeout", timeout, partial(parse_duration, most_s=PIN_WAIT_S_MAX))
    found = find_by_agent(place, "pins are")
    if (step is None) == (save_id is None):
        raise click.UsageError("name either STEP or --save-id")
    if save_id is not None:
        manifest = find_save(found, save_id)
    else:
        timeline = [e.manifest for e in make_listing(found.holdings).checkpoints if e.candidate]
        here = [each for each in timeline if (each.stream, each.step) == (stream, step)]
        if not here:
            raise NotFoundError(f"this host knows no step {step} of stream {stream}", key=str(step))
        manifest = here[0]
    request = AddRecord(
        stream=manifest.stream, save_id=manifest.save_id, kind=kind, text=text, wait_s=wait_s
    )
    with place.agent() as client:
        pinned = client.pin(request, found.namespace)
    done = "is pinned" if kind == "pin" else "is pinned no more"
    where = f" in {', '.join(pinned.tiers)}" if pinned.tiers else ""
    texts = [f"step {manifest.step} ({short(manifest.save_id)}) {done}{where}"]
    if pinned.brought:
        texts.append(f"it was in memory only: it is copied to {pinned.brought}, with the pin")
    texts += [
        f"{tier} receives it with the checkpoint"
        for tier in pinned.coming
        if tier != pinned.brought
    ]
    _end(place, found, request, {"said": kind, **msgspec.to_builtins(pinned)}, texts)


def _end(
    place: Place, found: Found, request: AddRecord, answer: dict[str, Any], texts: Sequence[str]
) -> None:
    """Print the agent's answer. Exits with code 1 if a tier has not stored the record yet."""
    if place.as_json:
        print_json(namespace=found.namespace, save_id=request.save_id, **answer)
    else:
        for text in texts:
            click.echo(text)
        for tier, why in answer["owed"].items():
            click.secho(
                f"{tier} has not recorded it yet, and does so once it answers; until then only the "
                f"agents know of it: {one_line(why)}",
                fg="yellow",
                err=True,
            )
    if answer["owed"]:
        sys.exit(1)


# --- undelete -----------------------------------------------------------------------------------


@click.command()
@click.argument("which", metavar="[STEP|SAVE_ID]", required=False)
@click.option("--tier", "tier_name", help="The shared tier; needed if there are several.")
@click.option("--stream", default="default", show_default=True, help="Of STEP.")
@click.option("--reason", default="taken back", show_default=True, help="Of the pin.")
@namespace_options
def undelete(
    which: str | None, tier_name: str | None, stream: str, reason: str, place: Place
) -> None:
    """Restore a checkpoint that retention deleted from a shared tier, and pin it.

    Possible until its segments are deleted: for delete_delay, and until the leader's agent prunes
    the tier after that. Without STEP or SAVE_ID (its first digits) it lists the deleted checkpoints
    that can be restored. Needs no agent: it writes to the tier with the credentials of this shell.
    The pin keeps retention from deleting the checkpoint again; `tieredckpt unpin` ends it.

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
            deleted = [
                _plain(each) | {"deleted_for_s": age_s}
                for each, age_s in _deleted(catalog, "retention")
            ]
            if place.as_json:
                print_json(namespace=name, tier=tier.name, deleted=deleted)
            elif deleted:
                columns = ("stream", "step", "save_id", "size", "deleted_for_s")
                print_table(None, deleted, columns)
            else:
                click.echo(f"tier {tier.name} has no deleted checkpoint that can be restored")
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
        print_json(namespace=name, tier=tier.name, **_plain(manifest), pin=pin.id)
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
            f"a deletion can be undone in a shared tier only; shared tiers of the configuration: "
            f"{names}; {what}",
            key="tiers",
        )
    return fits[0]


def _deleted(catalog: SharedCatalog, cause: Cause) -> list[tuple[Manifest, float]]:
    """Return checkpoints and the ages of their deletion, by the store's clock, youngest first.

    Deletions by "retention" can be undone; of those that are "emptied" the segments are deleted.
    """
    now_s = catalog.tier.now_s()
    found = []
    for save, (entry, tombstone) in catalog.commits.tombstones().items():
        if tombstone.cause != cause:
            continue
        manifest = catalog.commits.buried(*save, entry)
        if manifest is not None:
            found.append((manifest, now_s - (entry.info.modified_s or now_s)))
    return sorted(found, key=operator.itemgetter(1))


def _choose(catalog: SharedCatalog, which: str, stream: str) -> Manifest:
    tier = catalog.tier.name
    if fits := _fitting([m for m, _ in _deleted(catalog, "retention")], which, stream):
        if len({each.step for each in fits}) > 1:
            raise click.UsageError(f"{count(len(fits), 'save id')} begin with {which}: add digits")
        return fits[0]
    for late in _fitting([m for m, _ in _deleted(catalog, "emptied")], which, stream):
        raise NotFoundError(
            f"step {late.step} ({short(late.save_id)}) cannot be restored: its segments were "
            f"deleted from tier {tier}, too",
            key=which,
        )
    for there in _fitting(catalog.manifests(), which, stream):
        raise UsageError(
            f"step {there.step} ({short(there.save_id)}) is in tier {tier}: it was not deleted; "
            "`tieredckpt pin` keeps it"
        )
    raise NotFoundError(f"tier {tier} has no deleted checkpoint {which}", key=which)


def _fitting(found: Collection[Manifest], which: str, stream: str) -> list[Manifest]:
    """Return the checkpoints of a step, newest first; if none, those whose save id begins so."""
    step = int(which) if which.isdecimal() and len(which) < 19 else -1
    fits = [each for each in found if (each.step, each.stream) == (step, stream)]
    if not fits and _ID_START.fullmatch(which):
        fits = [each for each in found if each.save_id.startswith(which)]
    return sorted(fits, key=lambda each: (each.attempt.number, each.seq), reverse=True)


def _plain(manifest: Manifest) -> dict[str, object]:
    return {
        "stream": manifest.stream, "step": manifest.step, "save_id": manifest.save_id,
        "size": size_of(manifest),
    }  # fmt: skip


# --- purge --------------------------------------------------------------------------------------


@click.command()
@click.argument("which", metavar="[STEP|SAVE_ID]", required=False)
@click.option("--tier", "tier_name", required=True, metavar="NAME|all", help="Where to delete.")
@click.option("--stream", default="default", show_default=True, help="Of STEP.")
@click.option("--yes", is_flag=True, help="Ask for the namespace's name alone.")
@namespace_options
def purge(which: str | None, tier_name: str, stream: str, yes: bool, place: Place) -> None:
    """Delete a namespace, or one checkpoint of it, from tiers. This cannot be undone.

    It asks twice: whether to delete what it lists, and for the namespace's name. Pinned checkpoints
    stay, and with them the namespace. Refused while this host's memory has the namespace (see
    `tieredckpt agent purge`), and if something was copied to a shared tier within takeover_after
    (1 min). Memory and disks of other hosts are not changed.

    \b
    Examples:
      tieredckpt purge --tier all --namespace gpt-run-7
      tieredckpt purge a2a3fab8 --tier s3
      echo gpt-run-7 | tieredckpt purge --tier s3 --yes --namespace gpt-run-7
    """
    configured = place.config.tiers if place.config is not None else ()
    tiers = [each for each in configured if tier_name in (each.name, "all")]
    if not tiers:
        raise ConfigError(f"the configuration has no tier {tier_name}", key="tiers")
    name = place.namespace(place.status())
    if name in namespaces(place.runtime_dir):
        raise UsageError(
            f"this host's memory has namespace {name}, and would be copied there again: end its "
            f"job, and run `tieredckpt agent purge --namespace {name}` before"
        )
    with closing(place.folders(name)) as folders:
        listing = _listed(folders, configured)
        tiers = [each for each in tiers if _has_any(folders.catalog(each.name))]
        for spec in tiers:
            _check_quiet(folders.catalog(spec.name).tier, spec.takeover_after_s)
    names = {each.name for each in tiers}
    if not names:
        raise NotFoundError(f"nothing of namespace {name} is there (--tier {tier_name})", key=name)
    chosen = listed = [each for each in listing.checkpoints if names & each.tiers.keys()]
    if which is not None:
        fits = _fitting([each.manifest for each in listed], which, stream)
        if len(fits) != 1:
            found = ", ".join([count(len(fits), "checkpoint"), *(each.save_id for each in fits)])
            raise NotFoundError(f"{which} fits {found}", key=which)
        chosen = [each for each in listed if each.manifest == fits[0]]
    going = [each.manifest for each in chosen if each.pinned is None]
    pinned = [each.manifest for each in chosen if each.pinned is not None]
    whole = which is None and not pinned
    for spec in tiers:
        here = [e.manifest for e in chosen if e.pinned is None and spec.name in e.tiers]
        what = f"{count(len(here), 'checkpoint')}, {size(sum(map(size_of, here)))}"
        # A job that saves rarely is not noticed otherwise.
        last = f", the newest saved {age(max(m.created_at_s for m in here))}" if here else ""
        click.echo(f"tier {spec.name}, {spec.url}: {what}{last}", err=True)
    _warn(chosen, names, listing.unreadable if whole else [])
    if not yes:
        click.confirm(f"Delete this of namespace {name}?", abort=True, err=True)
    if click.prompt("The name of the namespace", err=True) != name:
        raise UsageError("this is another name: nothing is deleted")
    with closing(place.folders(name)) as folders:  # the answers may have taken hours
        if _listed(folders, configured).checkpoints != listing.checkpoints:
            raise UsageError("something has changed since this was listed: nothing is deleted")
    others = {ref.id for e in listed if e.manifest not in going for ref in e.manifest.segments}
    ids = {each.save_id for each in going} | {ref.id for m in going for ref in m.segments} - others
    with ExitStack() as stack:
        opened = [
            stack.enter_context(closing(open_tier(each, name, read_only=False))) for each in tiers
        ]
        for spec, tier in zip(tiers, opened, strict=True):  # a job may have begun since
            _check_quiet(tier, spec.takeover_after_s)
        for tier in opened:
            _delete(tier, None if whole else ids)
    if place.as_json:
        print_json(namespace=name, deleted=[*map(_plain, going)], pinned=[*map(_plain, pinned)])
    else:
        click.echo(f"deleted: {count(len(going), 'checkpoint')}")


def _listed(folders: Folders, tiers: Sequence[TierSpec]) -> Listing:
    """All checkpoints, with the pins of all tiers. Raises TierUnavailableError."""
    holdings = folders.holdings()
    for away, why in make_listing(holdings).unavailable.items():
        raise TierUnavailableError(f"nothing is deleted: {one_line(why)}", tier=away)
    records: list[bytes] = []
    for each in tiers:  # holdings leave out the records of a tier that fails meanwhile
        catalog = folders.catalog(each.name)
        catalog.read_records()
        records += catalog.encoded_records(catalog.record_ids())
    return make_listing(msgspec.structs.replace(holdings, records=tuple(records)))


def _has_any(catalog: Catalog) -> bool:
    """Whether there is anything of ours: a folder of this name may be another program's."""
    listed = any(True for _ in catalog.listed_segments())
    return listed or bool(catalog.attempts() or catalog.manifests() or catalog.unreadable())


def _warn(chosen: Sequence[Listed], names: set[str], unread: Sequence[dict[str, str]]) -> None:
    """Name what goes for ever, what stays, and what cannot be read and goes, too."""
    for each in chosen:
        what = f"{each.manifest.stream} step {each.manifest.step} ({short(each.manifest.save_id)})"
        if each.pinned is not None:
            click.echo(f"{what} is pinned, and stays", err=True)
        elif "whole" not in (each.tiers | dict.fromkeys(names, "")).values():
            click.echo(f"{what} goes, and no other tier has it whole", err=True)
    for bad in unread:
        if bad["tier"] in names:
            text = f"unreadable in {bad['tier']}, and goes: {short(bad['save_id'])}"
            click.secho(text, fg="yellow", err=True)


def _check_quiet(tier: Tier, within_s: float) -> None:
    """Raise UsageError if a job copies to a shared tier. Agents have locks on the others."""
    kinds = ("pending/", "segments/") if tier.scope is Scope.SHARED else ()
    times = [info.modified_s or 0.0 for kind in kinds for info in tier.list(kind)]
    if times and (ago_s := tier.now_s() - max(times)) < within_s:
        text = f"a job copied to tier {tier.name} {ago_s:.0f} s ago"
        raise UsageError(f"{text}: stop it, and try again after {within_s:.0f} s")


def _delete(tier: Tier, ids: set[str] | None) -> None:
    """Delete what is named by one of ``ids``; None: everything."""
    for kind in KINDS:
        keys = [info.key for info in tier.list(kind)]
        tier.delete_many([k for k in keys if ids is None or ids.intersection(re.split("[/.]", k))])
    if ids is None and isinstance(tier, FileTier):
        tier.sweep()
        (tier.root / LOCK).unlink(missing_ok=True)
        for folder, _, _ in os.walk(tier.root, topdown=False):
            with suppress(OSError):  # files that are not ours stay
                os.rmdir(folder)


# --- marks --------------------------------------------------------------------------------------


@click.group(name="mark")
def group() -> None:
    """Mark checkpoints as bad, so that restarts skip them, and remove such marks."""


@group.command(name="bad")
@click.argument("save_id")
@click.option("--reason", required=True, help="Why; restarts and `recovery plan` show it.")
@namespace_options
def bad(save_id: str, reason: str, place: Place) -> None:
    """Mark SAVE_ID (its first digits are enough) as bad, on all hosts of the job.

    Needs a running agent. The mark is written into the tiers that hold the checkpoint, so it
    outlives job and hosts; exit code 1 if a tier has not recorded it yet. It affects this
    checkpoint alone, and deletes nothing: the checkpoint still loads by its save id,
    `engine.reader(save_id=...)`. `mark good` removes the mark.

    \b
    Examples:
      tieredckpt mark bad a2a3fab8 --reason "the loss is NaN from here on"
    """
    found = find_by_agent(place, "a mark is")
    manifest = find_save(found, save_id)
    request = AddRecord(
        stream=manifest.stream, save_id=manifest.save_id, kind="bad", text=record_text(reason)
    )
    text = "is marked as bad: restarts skip it"
    _mark(place, found, request, {"marked": "bad"}, text)


@group.command(name="good")
@click.argument("save_id")
@click.option("--reason", default="", help="Why; it is kept with the mark.")
@namespace_options
def good(save_id: str, reason: str, place: Place) -> None:
    """Remove the marks of SAVE_ID (its first digits are enough), on all hosts of the job.

    It removes the marks that this host, or another host that answers, knows. A mark that is added
    at the same time remains: `mark list` shows the remaining marks.

    \b
    Examples:
      tieredckpt mark good a2a3fab8 --reason "it was the data, not the weights"
    """
    found = find_by_agent(place, "a mark is")
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
    text = "is not marked as bad any more: restarts may load it"
    _mark(place, found, request, {"taken_back": len(request.segments)}, text)


def _mark(
    place: Place, found: Found, request: AddRecord, plain: dict[str, object], text: str
) -> None:
    with place.agent() as client:
        stored = client.pin(request, found.namespace)
    answer = {**plain, "tiers": stored.tiers, "owed": stored.owed}
    _end(place, found, request, answer, [f"{short(request.save_id)} {text}"])


@group.command(name="list")
@namespace_options
def list_marks(place: Place) -> None:
    """List the marks that this host, or another host that answers, knows.

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
    rows = [
        {
            "save_id": each.save_id, "stream": each.stream, "step": steps.get(each.save_id),
            "mark": each.kind, "host": each.host, "reason": each.text,
        }
        for each in marks
    ]  # fmt: skip
    if place.as_json:
        print_json(namespace=found.namespace, marks=rows)
        return
    columns = ("stream", "step", "save_id", "mark", "host", "reason")
    print_table(f"namespace {found.namespace}", rows, columns)
