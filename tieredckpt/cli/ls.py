"""``tieredckpt ls`` and ``retention plan``: which checkpoints are where, and which stay."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import click
from rich.text import Text

from tieredckpt.cli.output import age, count, one_line, print_json, print_table, short, size
from tieredckpt.cli.sources import Found, Place, find_holdings, look_options
from tieredckpt.config.schema import Config, Keep
from tieredckpt.errors import ConfigError
from tieredckpt.format.manifest import Manifest
from tieredckpt.format.records import SaveRecord
from tieredckpt.policy.history import abandoned, candidates
from tieredckpt.policy.history import age as timeline_age
from tieredckpt.policy.retention import (
    RetentionPlan,
    given_up,
    let_go,
    pin_reason,
    protections,
    retain,
    size_of,
)
from tieredckpt.policy.schedule import destinations
from tieredckpt.recovery.evidence import decode_manifests, manifest_of, read_attempts, read_records
from tieredckpt.rpc.messages.agent import RetentionNeeds
from tieredckpt.storage.holdings import Holdings, TierFacts

MEMORY = "memory"
ON_A_BRANCH = "on a branch, until it is unpinned or max_age takes it"


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """One checkpoint as ``ls`` shows it."""

    manifest: Manifest
    line: Literal["candidate", "abandoned", "branch"]
    """On the newest attempt's line; abandoned by a roll-back, or given up; or of another side."""
    tiers: dict[str, str]
    """Per tier that has its manifest: "whole", or what is wrong there."""
    records: tuple[SaveRecord, ...] = ()
    """What was said of it."""

    @property
    def pinned(self) -> str | None:
        """Why retention leaves it alone; None: it is not pinned."""
        return pin_reason(self.records)

    @property
    def candidate(self) -> bool:
        """Whether a restart may go on from it."""
        return self.line == "candidate"


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """Everything that ``ls`` shows."""

    checkpoints: tuple[Listed, ...]
    """Per stream, candidates newest first, then the others, likewise."""
    unreadable: tuple[tuple[str, str, str], ...]
    """(tier, save id, error) of manifests that cannot be read."""
    unavailable: tuple[tuple[str, str], ...]
    """(tier, error) of tiers that cannot be read."""


def state_in(tier: TierFacts, manifest: Manifest) -> str:
    """Whether ``tier`` holds all of a checkpoint, as far as headers and marks tell."""
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
    """Facts in, what to show out."""
    manifests: dict[str, Manifest] = {}
    where: dict[str, dict[str, str]] = {}
    unreadable = []
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
        line = candidates(known, attempts, stream)
        on_line = {each.save_id for each in line}
        off = {each.save_id for each in abandoned(known, attempts, stream, let_go(records))}
        rest = [each for each in known if each.stream == stream and each.save_id not in on_line]
        rest.sort(key=timeline_age, reverse=True)
        listed += [
            Listed(
                manifest=each,
                line="candidate"
                if each.save_id in on_line
                else "abandoned"
                if each.save_id in off
                else "branch",
                tiers=where[each.save_id],
                records=tuple(about.get(each.save_id, ())),
            )
            for each in (*line, *rest)
        ]
    return Listing(
        checkpoints=tuple(listed),
        unreadable=tuple(unreadable),
        unavailable=tuple((t.tier, t.error or "?") for t in holdings.tiers if not t.available),
    )


def listing_json(found: Found, listing: Listing) -> dict[str, Any]:
    """The form of ``ls --json``."""
    return {
        "namespace": found.namespace,
        "source": found.source,
        "host": found.holdings.host_id,
        "checkpoints": [
            {
                "stream": each.manifest.stream,
                "step": each.manifest.step,
                "save_id": each.manifest.save_id,
                "parent": each.manifest.parent,
                "attempt": each.manifest.attempt.number,
                "candidate": each.candidate,
                "line": each.line,
                "created_at_s": each.manifest.created_at_s,
                "world_size": each.manifest.world_size,
                "bytes": size_of(each.manifest),
                "segments": [
                    {"id": ref.id, "bytes": ref.size, "root": ref.root, "host": ref.host}
                    for ref in each.manifest.segments
                ],
                "tags": dict(each.manifest.tags),
                "tiers": each.tiers,
                "pinned": each.pinned,
            }
            for each in listing.checkpoints
        ],
        "unreadable": [
            {"tier": tier, "save_id": save_id, "error": error}
            for tier, save_id, error in listing.unreadable
        ],
        "unavailable": dict(listing.unavailable),
    }


def _row(each: Listed) -> list[str | Text]:
    manifest = each.manifest
    tiers = Text(", ").join(
        Text(tier, style="green")
        if state == "whole"
        else Text(f"{tier} ({one_line(state)})", style="yellow")
        for tier, state in each.tiers.items()
    )
    return [
        manifest.stream,
        str(manifest.step),
        short(manifest.save_id),
        str(manifest.attempt.number),
        each.line,
        size(size_of(manifest)),
        str(len(manifest.segments)),
        age(manifest.created_at_s),
        tiers + Text(f", pinned: {one_line(each.pinned)}") if each.pinned else tiers,
    ]


@click.command()
@look_options
def ls(place: Place) -> None:
    """List the checkpoints of a namespace, newest first, and the tiers that hold them.

    Whole means that headers, root digests and the marks of earlier readers say so; `tieredckpt
    verify` reads every byte.

    \b
    Examples:
      tieredckpt ls
      tieredckpt ls --namespace gpt-run-7 --json
    """
    found = find_holdings(place)
    listing = make_listing(found.holdings)
    if place.as_json:
        print_json(listing_json(found, listing))
        return
    columns = ("stream", "step", "save id", "attempt", "line", "size", "segments", "age", "tiers")
    if listing.checkpoints:
        print_table(
            f"namespace {found.namespace}",
            columns,
            [_row(each) for each in listing.checkpoints],
            right=("step", "attempt", "size", "segments"),
        )
    else:
        click.echo(f"namespace {found.namespace}: no checkpoints")
    print_unread(listing.unreadable, listing.unavailable)


def print_unread(
    unreadable: Iterable[tuple[str, str, str]], unavailable: Iterable[tuple[str, str]]
) -> None:
    """What could not be looked at, so that nobody takes the rest for all."""
    for tier, save_id, error in unreadable:
        click.secho(f"unreadable in {tier}: {short(save_id)}: {one_line(error)}", fg="yellow")
    for tier, error in unavailable:
        click.secho(f"tier {tier} is not available: {one_line(error)}", fg="red")


# --- retention plan -----------------------------------------------------------------------------


@click.group(name="retention")
def group() -> None:
    """See which checkpoints stay in which tier, and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decided:
    """What would happen to one checkpoint in one tier."""

    tier: str
    manifest: Manifest
    stays: bool
    reason: str


@group.command(name="plan")
@look_options
def plan(place: Place) -> None:
    """Print what retention would delete from each tier, in which order, and why the rest stays.

    Nothing is deleted. The rules are those of the configuration; the facts come from the agent, or
    from the folders where none runs. What the agent needs at this moment stays, too: what is being
    copied or waits for it, what other hosts need, and what was read through it within ten minutes.
    Without an agent nobody tells of readers, and none copies.

    \b
    Examples:
      tieredckpt retention plan
      tieredckpt retention plan --config run.yaml --json
    """
    if place.config is None:
        raise ConfigError("the rules stand in a configuration: name one with --config", key="tiers")
    found = find_holdings(place)
    needs = None
    if found.source == "agent":
        with place.agent() as client:
            needs = client.protections(found.namespace)
    _print_decided(place, found, decide(found, place.config, time.time(), needs))


def decide(
    found: Found, config: Config, now_s: float, needs: RetentionNeeds | None
) -> list[Decided]:
    """Per tier and stream, all checkpoints: those that stay newest first, then the others in the
    order in which they would go.

    Args:
        found: What lies where.
        config: Has the rules.
        now_s: Seconds since 1970.
        needs: What the agent needs; None: what tiers lack is all that is known.
    """
    listed = make_listing(found.holdings).checkpoints
    pins = {each.manifest.save_id: why for each in listed if (why := each.pinned) is not None}
    decided: list[Decided] = []
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
        # A pin holds what is in a tier; of memory's few slots, only until it is in one.
        held = {s: w for s, w in pins.items() if tier != MEMORY}
        protected = protections(pinned=held, wanted_by=wanted if needs is None else None)
        for save_id, why in (needs.tiers.get(tier, {}) if needs is not None else {}).items():
            protected.setdefault(save_id, why)
        for stream in sorted({each.manifest.stream for each in listed}):
            here = [e for e in listed if tier in e.tiers and e.manifest.stream == stream]
            decided += _of_stream(tier, here, keep, protected, now_s)
    return decided


def _overtaken(each: Listed, tier: str, listed: Sequence[Listed]) -> bool:
    """Whether ``tier`` has a newer one of the stream: then this one is not waited for."""
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
) -> list[Decided]:
    by_id = {each.manifest.save_id: each.manifest for each in here}
    line = [each.manifest for each in here if each.candidate]
    # By its age: of those that were unpinned the listing says that they are abandoned.
    gone = given_up(by_id.values(), (), keep, next(iter(line), None), now_s)
    others = [each for each in here if not each.candidate]
    held = {e.manifest.save_id for e in others if e.line == "branch"} - gone
    branch = [e.manifest for e in others if e.manifest.save_id in held]
    found: RetentionPlan = retain(
        line,
        [each.manifest for each in others if each.manifest.save_id not in held],
        keep,
        protected,
        unrecoverable={e.manifest.save_id for e in here if e.tiers[tier] != "whole"},
        now_s=now_s,
    )
    return [
        *(Decided(tier=tier, manifest=m, stays=True, reason=ON_A_BRANCH) for m in branch),
        *(
            Decided(
                tier=tier,
                manifest=by_id[save_id],
                stays=save_id in found.keep,
                reason=found.reasons[save_id],
            )
            for save_id in (*found.keep, *found.delete)
        ),
    ]


def _print_decided(place: Place, found: Found, decided: Sequence[Decided]) -> None:
    if place.as_json:
        print_json(
            {
                "namespace": found.namespace,
                "source": found.source,
                "checkpoints": [
                    {
                        "tier": each.tier,
                        "stream": each.manifest.stream,
                        "step": each.manifest.step,
                        "save_id": each.manifest.save_id,
                        "bytes": size_of(each.manifest),
                        "stays": each.stays,
                        "reason": each.reason,
                    }
                    for each in decided
                ],
            }
        )
        return
    rows = [
        [
            each.tier,
            each.manifest.stream,
            str(each.manifest.step),
            short(each.manifest.save_id),
            size(size_of(each.manifest)),
            "stays" if each.stays else "goes",
            one_line(each.reason),
        ]
        for each in decided
    ]
    columns = ("tier", "stream", "step", "save id", "size", "", "why")
    print_table(f"namespace {found.namespace}", columns, rows, right=("step", "size"))
    going = [each for each in decided if not each.stays]
    freed = sum(size_of(each.manifest) for each in going)
    click.echo(f"{count(len(going), 'deletion')} of {size(freed)} in all")
