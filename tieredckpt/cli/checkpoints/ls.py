"""``tieredckpt ls`` and ``retention plan``: where checkpoints are, and which are kept."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import click
from rich.text import Text

from tieredckpt.cli.output import count, one_line, print_json, print_table, short, size
from tieredckpt.cli.sources import Place, find_holdings, namespace_options
from tieredckpt.config.schema import Config, Keep
from tieredckpt.errors import ConfigError
from tieredckpt.format.manifest import Manifest
from tieredckpt.format.records import SaveRecord
from tieredckpt.policy.history import abandoned, candidates
from tieredckpt.policy.history import age as timeline_age
from tieredckpt.policy.retention import (
    given_up,
    let_go,
    pin_reason,
    protections,
    retain,
    size_of,
)
from tieredckpt.policy.schedule import destinations, next_save
from tieredckpt.recovery.evidence import decode_manifests, manifest_of, read_attempts, read_records
from tieredckpt.storage.holdings import Holdings, TierFacts, decode_holdings

MEMORY = "memory"
Status = Literal["candidate", "abandoned", "branch"]
LS_COLUMNS = (
    "stream", "step", "save_id", "attempt", "line", "bytes", "segments", "created_at_s", "tags",
    "tiers",
)  # fmt: skip
OFF_TIMELINE = "on a branch, until it is unpinned or max_age takes it"


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """One checkpoint as ``ls`` shows it."""

    manifest: Manifest
    status: Status
    """On the timeline; abandoned by a roll-back or by unpinning; or off the timeline otherwise."""
    tiers: dict[str, str]
    """Per tier that has its manifest: "whole" if it is complete, else the problems there."""
    records: tuple[SaveRecord, ...] = ()

    @property
    def pinned(self) -> str | None:
        """The reason of its pin; None: it is not pinned."""
        return pin_reason(self.records)

    @property
    def candidate(self) -> bool:
        """Whether it is on the timeline, so that a restart may choose it."""
        return self.status == "candidate"


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """The contents of ``ls``."""

    checkpoints: tuple[Listed, ...]
    """Per stream, candidates first, then the others; each newest first."""
    unreadable: list[dict[str, str]]
    """The manifests and records that cannot be read: tier, save_id and error."""
    unavailable: dict[str, str]
    """By tier that cannot be read, the error."""


def state_in(tier: TierFacts, manifest: Manifest) -> str:
    """Return "whole" if ``tier`` has all segments of a checkpoint, by headers and quarantine marks.

    Otherwise the problems.
    """
    segments = {fact.id: fact for fact in tier.segments}
    problems = []
    for ordinal, ref in enumerate(manifest.segments):
        fact = segments.get(ref.id)
        if fact is None:
            problems.append(f"segment {ordinal} is missing")
        elif fact.error:
            problems.append(f"segment {ordinal}: {fact.error}")
        elif fact.root != ref.root and not fact.listed:
            problems.append(f"segment {ordinal} is another one")
        elif fact.listed and fact.size != ref.size:
            problems.append(f"segment {ordinal} has {fact.size} of {ref.size} bytes")
        elif fact.bad_blocks:
            problems.append(f"segment {ordinal}: {count(len(fact.bad_blocks), 'bad block')}")
    if manifest.plan not in tier.plans:
        problems.append("its plan is missing")
    return "; ".join(problems) or "whole"


def make_listing(holdings: Holdings) -> Listing:
    """Classify all checkpoints of ``holdings``, and list what cannot be read."""
    manifests: dict[str, Manifest] = {}
    where: dict[str, dict[str, str]] = {}
    unreadable: list[tuple[str, str, str]] = []
    decoded = decode_manifests(fact for tier in holdings.tiers for fact in tier.manifests)
    for tier in holdings.tiers:
        for fact in tier.manifests:
            manifest = manifest_of(fact, {holdings.namespace}, decoded)
            if isinstance(manifest, str):
                unreadable.append((tier.tier, fact.save_id, manifest))
                continue
            manifests[manifest.save_id] = manifest
            where.setdefault(manifest.save_id, {})[tier.tier] = state_in(tier, manifest)
    attempts, warnings = read_attempts([holdings])
    unreadable += [("-", "-", warning) for warning in warnings]
    records = read_records([holdings])[0]
    about: dict[str, list[SaveRecord]] = {}
    for record in records:
        about.setdefault(record.save_id, []).append(record)
    listed = []
    known = tuple(manifests.values())
    for stream in sorted({each.stream for each in known}):
        timeline = candidates(known, attempts, stream)
        off = abandoned(known, attempts, stream, let_go(records))
        status: dict[str, Status] = dict.fromkeys((each.save_id for each in off), "abandoned")
        status |= dict.fromkeys((each.save_id for each in timeline), "candidate")
        candidate_ids = {each.save_id for each in timeline}
        rest = [
            each for each in known if each.stream == stream and each.save_id not in candidate_ids
        ]
        rest.sort(key=timeline_age, reverse=True)
        listed += [
            Listed(
                manifest=each,
                status=status.get(each.save_id, "branch"),
                tiers=where[each.save_id],
                records=tuple(about.get(each.save_id, ())),
            )
            for each in (*timeline, *rest)
        ]
    return Listing(
        checkpoints=tuple(listed),
        unreadable=[
            {"tier": tier, "save_id": save_id, "error": error}
            for tier, save_id, error in unreadable
        ],
        unavailable={t.tier: t.error or "?" for t in holdings.tiers if not t.available},
    )


def in_memory(holdings: bytes) -> str:
    """The number of checkpoints in memory, and the steps that no other tier of the host has whole.

    ``holdings``: as the agent sends them. Raises RemoteProtocolError.
    """
    listed = make_listing(decode_holdings(holdings)).checkpoints
    here = [each for each in listed if MEMORY in each.tiers]
    alone = [e for e in here if "whole" not in (e.tiers | {MEMORY: ""}).values()]
    steps = ", ".join(f"{each.manifest.stream} {each.manifest.step}" for each in alone)
    return f"checkpoints in memory: {len(here)}; steps in no other tier: {steps or 'none'}"


def _plain(each: Listed) -> dict[str, Any]:
    """Return a checkpoint as ``ls --json`` prints it."""
    manifest = each.manifest
    return {
        "stream": manifest.stream,
        "step": manifest.step,
        "save_id": manifest.save_id,
        "parent": manifest.parent,
        "attempt": manifest.attempt.number,
        "candidate": each.candidate,
        "line": each.status,
        "created_at_s": manifest.created_at_s,
        "world_size": manifest.world_size,
        "bytes": size_of(manifest),
        "segments": [
            {"id": ref.id, "bytes": ref.size, "root": ref.root, "host": ref.host}
            for ref in manifest.segments
        ],
        "tags": dict(manifest.tags),
        "tiers": each.tiers,
        "pinned": each.pinned,
    }


def _where(each: Listed) -> Text:
    tiers = Text(", ").join(
        Text(tier, style="green")
        if state == "whole"
        else Text(f"{tier} ({one_line(state)})", style="yellow")
        for tier, state in each.tiers.items()
    )
    return tiers + Text(f", pinned: {one_line(each.pinned)}") if each.pinned else tiers


@click.command()
@namespace_options
def ls(place: Place) -> None:
    """List the checkpoints of a namespace, newest first, and the tiers that hold them.

    A tier's problems follow its name. They are found by headers, root digests and quarantine marks
    alone, and --json calls a tier without problems "whole"; `tieredckpt verify` reads every byte.

    \b
    Examples:
      tieredckpt ls
      tieredckpt ls --namespace gpt-run-7 --json
    """
    found = find_holdings(place)
    listing = make_listing(found.holdings)
    checkpoints = [_plain(each) for each in listing.checkpoints]
    if place.as_json:
        print_json(
            namespace=found.namespace,
            source=found.source,
            host=found.holdings.host_id,
            checkpoints=checkpoints,
            unreadable=listing.unreadable,
            unavailable=listing.unavailable,
        )
        return
    if checkpoints:
        rows = [
            plain | {"segments": len(plain["segments"]), "tiers": _where(each)}
            for plain, each in zip(checkpoints, listing.checkpoints, strict=True)
        ]
        print_table(f"namespace {found.namespace}", rows, _shown(LS_COLUMNS, rows))
    else:
        click.echo(f"namespace {found.namespace}: no checkpoints")
    print_unread(listing.unreadable, listing.unavailable)


def _shown(columns: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The columns; without that of tags if no checkpoint has any."""
    return [each for each in columns if each != "tags" or any(row["tags"] for row in rows)]


def print_unread(unreadable: Sequence[Mapping[str, str]], unavailable: Mapping[str, str]) -> None:
    """Print what could not be read, so that the listing does not pass for complete."""
    for each in unreadable:
        where, why = f"{each['tier']}: {short(each['save_id'])}", one_line(each["error"])
        click.secho(f"unreadable in {where}: {why}", fg="yellow")
    for tier, error in unavailable.items():
        click.secho(f"tier {tier} is not available: {one_line(error)}", fg="red")


# --- retention plan -----------------------------------------------------------------------------


@click.group(name="retention")
def group() -> None:
    """Show which checkpoints are kept in which tier, and why."""


@group.command(name="plan")
@click.option(
    "--after", "saves", type=click.IntRange(0, 1000), default=0, metavar="N",
    help="Also what goes after each of the next N saves.",
)  # fmt: skip
@namespace_options
def plan(place: Place, saves: int) -> None:
    """Print what retention would delete from each tier, in which order, and why it keeps the rest.

    Deletes nothing. The rules come from the configuration, the holdings from the agent, or from the
    folders if no agent runs. The agent also keeps what it needs at this moment: checkpoints that
    are being copied or wait for it, that other hosts need, or that were read through the agent
    within ten minutes. Without an agent these are unknown.

    With --after, each of the next saves is assumed to be as large as the newest, as many steps and
    seconds later as saves of its stream usually are, copied at once, and without tags.

    \b
    Examples:
      tieredckpt retention plan
      tieredckpt retention plan --after 10
      tieredckpt retention plan --config run.yaml --json
    """
    if place.config is None:
        raise ConfigError("no configuration has the rules: name one with --config", key="tiers")
    found = find_holdings(place)
    in_use = None
    if found.source == "agent":
        with place.agent() as client:
            in_use = client.protections(found.namespace).tiers
    listed = make_listing(found.holdings).checkpoints
    decided = decide(listed, place.config, time.time(), in_use)
    foresee(decided, listed, place.config, saves)
    if place.as_json:
        print_json(namespace=found.namespace, source=found.source, checkpoints=decided)
        return
    rows = []
    for each in decided:
        stays = "keep" if each["goes_after"] is None else f"until {each['goes_after']}"
        rows.append(each | {"": stays if each["stays"] else "delete", "why": each["reason"]})
    columns = ("tier", "stream", "step", "save_id", "bytes", "tags", "", "why")
    print_table(f"namespace {found.namespace}", rows, _shown(columns, rows))
    freed = [each["bytes"] for each in decided if not each["stays"]]
    click.echo(f"{count(len(freed), 'deletion')} of {size(sum(freed))} in all")


def foresee(
    decided: list[dict[str, Any]], listed: Sequence[Listed], config: Config, saves: int
) -> None:
    """Add to each row of :func:`decide` after the save of which step it goes; None: it stays."""
    rows = {(row["tier"], row["save_id"]): row for row in decided}
    known = [replace(each, tiers=dict(each.tiers)) for each in listed]
    by_id = {each.manifest.save_id: each for each in known}
    for row in decided:
        row["goes_after"] = None
        if not row["stays"]:
            del by_id[row["save_id"]].tiers[row["tier"]]
    for _ in range(saves):
        steps: dict[str, int] = {}
        for stream in sorted({each.manifest.stream for each in known}):
            line = [e.manifest for e in known if e.candidate and e.manifest.stream == stream]
            if (made := next_save(config.tiers, line)) is not None:
                tiers = dict.fromkeys((MEMORY, *made.tiers), "whole")
                by_id[made.save_id] = Listed(manifest=made, status="candidate", tiers=tiers)
                known.insert(0, by_id[made.save_id])
                steps[stream] = made.step
        # What the agent needs at this moment it will not need then.
        for each in decide(known, config, math.inf, {}):
            if not each["stays"] and each["stream"] in steps:
                del by_id[each["save_id"]].tiers[each["tier"]]
                row = rows.get((each["tier"], each["save_id"]), {})
                row["goes_after"] = steps[each["stream"]]


def decide(
    listed: Sequence[Listed], config: Config, now_s: float, in_use: dict[str, dict[str, str]] | None
) -> list[dict[str, Any]]:
    """Decide about all checkpoints, per tier and stream.

    Args:
        listed: Of all tiers.
        config: The rules.
        now_s: Seconds since 1970.
        in_use: By tier and save id, why the agent needs a checkpoint; None: no agent runs, and the
            checkpoints that are missing in a tier are protected in its source.

    Returns:
        What ``--json`` prints: per tier and stream, the kept checkpoints newest first, then the
        others in the order in which they would be deleted.
    """
    pins = {each.manifest.save_id: why for each in listed if (why := each.pinned) is not None}
    decided: list[dict[str, Any]] = []
    for tier, keep in [(MEMORY, config.memory.keep), *((t.name, t.keep) for t in config.tiers)]:
        wanted = {
            each.manifest.save_id: [
                other.name
                for other in config.tiers
                if other.source == tier
                and other.name in destinations(each.manifest, each.records)
                and other.name not in each.tiers
                and not _overtaken(each, other.name, listed)
            ]
            for each in listed
        }
        # Memory has few slots: a pin protects there only until the checkpoint is in a tier.
        pinned = pins if tier != MEMORY else {}
        protected = protections(
            pinned=pinned,
            wanted_by=wanted if in_use is None else None,
            in_use=(in_use or {}).get(tier, {}),
        )
        for stream in sorted({each.manifest.stream for each in listed}):
            here = [e for e in listed if tier in e.tiers and e.manifest.stream == stream]
            decided += _of_stream(tier, here, keep, protected, now_s)
    return decided


def _overtaken(each: Listed, tier: str, listed: Sequence[Listed]) -> bool:
    """Whether ``tier`` has a newer checkpoint of the stream, so that it does not wait for this."""
    mine = each.manifest
    age = (mine.attempt.number, mine.seq)
    return any(
        tier in other.tiers
        and other.manifest.stream == mine.stream
        and (other.manifest.attempt.number, other.manifest.seq) > age
        for other in listed
    )


def _of_stream(
    tier: str, here: Sequence[Listed], keep: Keep, protected: dict[str, str], now_s: float
) -> list[dict[str, Any]]:
    by_id = {each.manifest.save_id: each.manifest for each in here}
    timeline = [each.manifest for each in here if each.candidate]
    # By age alone: unpinned checkpoints are listed as abandoned already.
    expired = given_up(by_id.values(), (), keep, next(iter(timeline), None), now_s)
    branch = {e.manifest.save_id for e in here if e.status == "branch"} - expired
    found = retain(
        timeline,
        [e.manifest for e in here if not e.candidate and e.manifest.save_id not in branch],
        keep,
        protected,
        unrecoverable={e.manifest.save_id for e in here if e.tiers[tier] != "whole"},
        now_s=now_s,
    )
    kept = [*(save_id for save_id in by_id if save_id in branch), *found.keep]
    off = {i: "; ".join(filter(None, (OFF_TIMELINE, protected.get(i)))) for i in branch}
    reasons = {**found.reasons, **off}
    return [
        {
            "tier": tier,
            "stream": by_id[save_id].stream,
            "step": by_id[save_id].step,
            "save_id": save_id,
            "bytes": size_of(by_id[save_id]),
            "tags": dict(by_id[save_id].tags),
            "stays": save_id in kept,
            "reason": reasons[save_id],
        }
        for save_id in (*kept, *found.delete)
    ]
