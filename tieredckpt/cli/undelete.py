"""``tieredckpt undelete``: take back what was deleted from a tier that hosts share."""

from __future__ import annotations

import os
import re
import secrets
import time
from contextlib import closing
from dataclasses import dataclass

import click

from tieredckpt.agent.runtime import host_id
from tieredckpt.cli.place import Place, look_options
from tieredckpt.cli.show import age, count, print_json, print_table, record_text, short, size
from tieredckpt.errors import ConfigError, NotFoundError, UsageError
from tieredckpt.format.manifest import Manifest
from tieredckpt.format.record import Cause, SaveRecord, encode_save_record
from tieredckpt.policy.config import TierSpec
from tieredckpt.policy.retention import size_of
from tieredckpt.recovery.folders import open_tier
from tieredckpt.tiers.shared_catalog import SharedCatalog, take_back

_SAVE_ID = re.compile(r"[0-9a-f]{4,32}")
_NO_MEMORY = "0" * 32
"""In place of an incarnation: a pin does not depend on what any memory holds."""


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
    which: str | None,
    tier_name: str | None,
    stream: str,
    reason: str,
    place: Place,
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
            _print(place, name, tier.name, _deleted(catalog, "retention"))
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
    if not fits and _SAVE_ID.fullmatch(which):
        fits = [each for each in all_of_them if each.save_id.startswith(which)]
    return sorted(fits, key=lambda each: (each.attempt.number, each.seq), reverse=True)


def _print(place: Place, namespace: str, tier: str, found: list[Deleted]) -> None:
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
