"""``tieredckpt retention plan``: what would be deleted, and why."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import click

from tieredckpt.cli.listing import Listed, make_listing
from tieredckpt.cli.place import Found, Place, find_holdings, look_options
from tieredckpt.cli.show import count, one_line, print_json, print_table, short, size
from tieredckpt.errors import ConfigError
from tieredckpt.format.manifest import Manifest
from tieredckpt.policy.config import Config, Keep
from tieredckpt.policy.retention import RetentionPlan, given_up, protections, retain, size_of
from tieredckpt.policy.schedule import destinations
from tieredckpt.transport.messages import RetentionNeeds

MEMORY = "memory"
ON_A_BRANCH = "on a branch, until it is unpinned or max_age takes it"


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
            needs = client.needs(found.namespace)
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
