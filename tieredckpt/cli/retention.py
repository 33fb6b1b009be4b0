"""``tieredckpt retention plan``: what would be deleted and why, now or in a simulated run."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import click
from click.core import ParameterSource

from tieredckpt.cli.listing import Listed, make_listing
from tieredckpt.cli.place import (
    Found,
    Place,
    find_holdings,
    json_option,
    namespace_option,
    place_options,
)
from tieredckpt.cli.plot import draw_forecast
from tieredckpt.cli.show import count, one_line, print_json, print_table, short, size
from tieredckpt.errors import ConfigError, UsageError
from tieredckpt.format.manifest import Manifest
from tieredckpt.format.record import SaveRecord
from tieredckpt.policy.config import Config, Keep
from tieredckpt.policy.config_tiers import Price, TierConfig, parse_price
from tieredckpt.policy.forecast import SimulatedRun, TierForecast, forecast
from tieredckpt.policy.pins import pin_reason
from tieredckpt.policy.retention import RetentionPlan, protections, retain, size_of
from tieredckpt.policy.schedule import destinations
from tieredckpt.policy.units import parse_duration, parse_size
from tieredckpt.recovery.evidence import read_records
from tieredckpt.transport.messages import RetentionNeeds

MEMORY = "memory"
STEPS_SHOWN = 12


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
@click.option("--simulate", type=click.IntRange(1), metavar="STEPS", help="A run of so many steps.")
@click.option(
    "--save-bytes", default="1GiB", show_default=True, help="Simulated: one checkpoint, all ranks."
)
@click.option(
    "--step-time", default="1 s", show_default=True, help="Simulated: how long a step takes."
)
@click.option(
    "--save-every",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Simulated: steps per save.",
)
@click.option(
    "--ranks",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Simulated: segments per save.",
)
@click.option("--price-gib-month", type=float, help="For all tiers, instead of their `price`.")
@click.option("--price-put-1000", type=float, help="For all tiers, instead of their `price`.")
@click.option("--plot", type=click.Path(path_type=Path), help="Simulated: draw it (matplotlib).")
@place_options
@namespace_option
@json_option
def plan(
    simulate: int | None,
    save_bytes: str,
    step_time: str,
    save_every: int,
    ranks: int,
    price_gib_month: float | None,
    price_put_1000: float | None,
    plot: Path | None,
    config_file: Path | None,
    runtime_dir: Path | None,
    namespace: str | None,
    as_json: bool,
) -> None:
    """Print what retention would delete from each tier, in which order, and why the rest stays.

    Nothing is deleted. The rules are those of the configuration; the facts come from the agent, or
    from the folders where none runs. What the agent needs at this moment stays, too: what is being
    copied or waits for it, what other hosts need, and what was read through it within ten minutes.
    Without an agent nobody tells of readers, and none copies.
    With --simulate no run is needed: it says how a run of STEPS steps would end, and what it
    assumed where an option is missing.

    \b
    Examples:
      tieredckpt retention plan
      tieredckpt retention plan --simulate 100000 --save-bytes 80GiB --step-time "2 s" \\
        --save-every 100 --ranks 64 --price-gib-month 0.023 --price-put-1000 0.005 --plot cost.png
    """
    place = Place.find(config_file, runtime_dir)
    if place.config is None:
        raise ConfigError("the rules stand in a configuration: name one with --config", key="tiers")
    if simulate is None:
        if plot is not None:
            raise UsageError("--plot draws a simulated run: write --simulate STEPS")
        found = find_holdings(place, namespace)
        needs = _needs(place, found)
        _print_decided(found, decide(found, place.config, time.time(), needs), as_json)
        return
    run = _run(simulate, save_bytes, step_time, save_every, ranks)
    tiers = _priced(place.config.tiers, price_gib_month, price_put_1000)
    try:
        result = forecast(place.config.memory.keep, tiers, run)
    except ValueError as error:
        raise UsageError(str(error)) from None
    _print_forecast(run, result, _assumed(), as_json)
    if plot is not None:
        draw_forecast(result, plot)


# --- of a run that exists -------------------------------------------------------------------------


def _needs(place: Place, found: Found) -> RetentionNeeds | None:
    """What the agent needs at this moment; None: there is none."""
    if found.source != "agent":
        return None
    with place.agent() as client:
        return client.needs(found.namespace)


def decide(
    found: Found, config: Config, now_s: float, needs: RetentionNeeds | None = None
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
    records = read_records([found.holdings])[0]
    about: dict[str, list[SaveRecord]] = {each.manifest.save_id: [] for each in listed}
    for record in records:
        about.setdefault(record.save_id, []).append(record)
    pins = {save_id: why for save_id in about if (why := pin_reason(about[save_id])) is not None}
    decided: list[Decided] = []
    for tier, keep in [(MEMORY, config.memory.keep), *((t.name, t.keep) for t in config.tiers)]:
        wanted = {
            each.manifest.save_id: [
                other.name
                for other in config.tiers
                if other.source == tier
                and other.name in destinations(each.manifest, about[each.manifest.save_id])
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
    found: RetentionPlan = retain(
        [each.manifest for each in here if each.candidate],
        [each.manifest for each in here if not each.candidate],
        keep,
        protected,
        unrecoverable={e.manifest.save_id for e in here if e.tiers[tier] != "whole"},
        now_s=now_s,
    )
    return [
        Decided(
            tier=tier,
            manifest=by_id[save_id],
            stays=save_id in found.keep,
            reason=found.reasons[save_id],
        )
        for save_id in (*found.keep, *found.delete)
    ]


def _print_decided(found: Found, decided: Sequence[Decided], as_json: bool) -> None:
    if as_json:
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


# --- of a run that does not -----------------------------------------------------------------------


def _run(steps: int, save_bytes: str, step_time: str, save_every: int, ranks: int) -> SimulatedRun:
    try:
        return SimulatedRun(
            steps=steps,
            save_every=save_every,
            step_s=parse_duration(step_time, least_s=0.001),
            save_bytes=parse_size(save_bytes),
            ranks=ranks,
        )
    except ValueError as error:
        raise UsageError(str(error)) from None


def _priced(
    tiers: Sequence[TierConfig], gib_month: float | None, put_1000: float | None
) -> tuple[TierConfig, ...]:
    if gib_month is None and put_1000 is None:
        return tuple(tiers)
    try:
        price = Price(
            gib_month=parse_price(gib_month or 0.0), put_1000=parse_price(put_1000 or 0.0)
        )
    except ValueError as error:
        raise UsageError(str(error)) from None
    return tuple(tier.with_price(price) for tier in tiers)


def _assumed() -> dict[str, object]:
    """The options of a simulated run that were not given, with what they were taken to be."""
    context = click.get_current_context()
    return {
        name: context.params[name]
        for name in ("save_bytes", "step_time", "save_every", "ranks")
        if context.get_parameter_source(name) is ParameterSource.DEFAULT
    }


def _print_forecast(
    run: SimulatedRun, result: Sequence[TierForecast], assumed: dict[str, object], as_json: bool
) -> None:
    if as_json:
        print_json(
            {
                "assumed": assumed,
                "save_bytes": run.save_bytes,
                "step_seconds": run.step_s,
                "save_every": run.save_every,
                "ranks": run.ranks,
                "steps": run.steps,
                "seconds": run.steps * run.step_s,
                "tiers": [
                    {
                        "tier": each.tier,
                        "kept": [
                            {"step": step, "reason": why}
                            for step, why in zip(each.kept, each.reasons, strict=True)
                        ],
                        "bytes": each.curve[-1].stored_bytes if each.curve else 0,
                        "peak_bytes": each.peak_bytes,
                        "saves": each.saves,
                        "objects": each.objects,
                        "puts": each.puts,
                        "cost_month": each.cost_month,
                        "curve": [
                            {
                                "step": point.step,
                                "seconds": point.at_s,
                                "checkpoints": point.checkpoints,
                                "bytes": point.stored_bytes,
                            }
                            for point in each.curve
                        ],
                    }
                    for each in result
                ],
            }
        )
        return
    print_table(
        f"after {run.steps} steps, a save of {size(run.save_bytes)} every {run.save_every}",
        ("tier", "saves", "kept", "bytes", "peak", "objects", "puts", "per month", "steps"),
        [
            [
                each.tier,
                str(each.saves),
                str(len(each.kept)),
                size(each.curve[-1].stored_bytes if each.curve else 0),
                size(each.peak_bytes),
                str(each.objects),
                str(each.puts),
                "-" if each.cost_month is None else f"{each.cost_month:,.2f}",
                _steps(each.kept),
            ]
            for each in result
        ],
        right=("saves", "kept", "bytes", "peak", "objects", "puts", "per month"),
    )
    if assumed:
        options = [f"--{name.replace('_', '-')} {value}" for name, value in assumed.items()]
        click.echo(f"assumed, as it was not given: {', '.join(options)}")


def _steps(kept: Sequence[int]) -> str:
    shown = ", ".join(str(step) for step in kept[:STEPS_SHOWN])
    return shown + (f", and {len(kept) - STEPS_SHOWN} more" if len(kept) > STEPS_SHOWN else "")
