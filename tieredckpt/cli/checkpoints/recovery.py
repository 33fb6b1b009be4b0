"""``tieredckpt recovery plan``: the checkpoint and the copies that a restart would load."""

from __future__ import annotations

from collections.abc import Sequence

import click
from rich.text import Text

from tieredckpt.cli.output import age, count, one_line, print_json, print_table, short, size
from tieredckpt.cli.sources import (
    Found,
    Place,
    ask_others,
    find_holdings,
    full_save_id,
    namespace_options,
)
from tieredckpt.errors import NoRecoverableCheckpointError
from tieredckpt.recovery.plan import Candidate, RecoveryPlan, SourceRef, fork_error, plan_recovery
from tieredckpt.storage.holdings import Holdings


@click.group(name="recovery")
def group() -> None:
    """Show what a restart would load."""


def _source(source: SourceRef, here: str) -> Text:
    place = source.tier if source.host == here else f"{source.tier} on {source.host}"
    if source.intact:
        return Text(place, style="green")
    why = source.error or count(len(source.bad_blocks), "bad block")
    return Text(f"{place} ({why})", style="yellow")


def _print_chosen(chosen: Candidate, here: str) -> None:
    manifest = chosen.manifest
    total = sum(ref.size for ref in manifest.segments)
    click.secho(f"a restart would load step {manifest.step}", bold=True, nl=False)
    segments = count(len(manifest.segments), "segment")
    click.echo(
        f"  (save id {short(manifest.save_id)}, attempt {manifest.attempt.number}, "
        f"saved {age(manifest.created_at_s)}, {size(total)} in {segments})"
    )
    rows = [
        {
            "segment": ordinal,
            "id": short(ref.id),
            "bytes": ref.size,
            "read from": Text(", then ").join(_source(source, here) for source in sources),
        }
        for ordinal, (ref, sources) in enumerate(
            zip(manifest.segments, chosen.sources, strict=True)
        )
    ]
    print_table(None, rows)


def _print_plan(found: Found, plan: RecoveryPlan, wanted: str) -> None:
    click.echo(f"namespace {found.namespace}, stream {plan.stream}")
    if plan.chosen is not None:
        _print_chosen(plan.chosen, found.holdings.host_id)
        older = [str(each.manifest.step) for each in plan.candidates if each is not plan.chosen]
        if older:
            click.echo(f"if that failed, an older step: {', '.join(older)}")
    else:
        what = f"{wanted} cannot be loaded" if wanted else "a restart would find nothing to load"
        if plan.sides:
            what = f"a restart would stop: there are {len(plan.sides)} sides to choose from"
        click.secho(what, fg="red", bold=True)
    for each in plan.refused:
        step = "?" if each.step is None else each.step
        why = one_line(each.reason)
        click.secho(f"refused: step {step} ({short(each.save_id)}): {why}", fg="yellow")
    for warning in plan.warnings:
        click.secho(f"warning: {one_line(warning)}", fg="yellow")
    for reason in plan.incomplete:
        click.secho(f"could not answer: {one_line(reason)}", fg="red")


def _hint(
    holdings: Sequence[Holdings], plan: RecoveryPlan, step: int | None, save_id: str | None
) -> str:
    """Return where the checkpoint may be instead: off the timeline, or in another stream."""
    off = [each for each in plan.abandoned if each.step == step or each.save_id == save_id]
    if off:
        ids = ", ".join(short(each.save_id) for each in off)
        return f"; a roll-back has abandoned {ids}, which --save-id can still load"
    known = {m.stream for each in holdings for tier in each.tiers for m in tier.manifests}
    streams = sorted(known - {plan.stream})
    return f"; streams that have checkpoints: {', '.join(streams)} (--stream)" if streams else ""


@group.command(name="plan")
@namespace_options
@click.option("--stream", default="default", show_default=True, help="The sequence of checkpoints.")
@click.option("--step", type=click.IntRange(min=0), help="This step instead of the newest.")
@click.option(
    "--save-id", help="This checkpoint, on the timeline or not; its first digits are enough."
)
@click.option(
    "--timeout",
    type=click.FloatRange(min=0),
    default=15.0,
    show_default=True,
    help="Seconds to wait for other hosts.",
)
def plan_command(
    place: Place,
    stream: str,
    step: int | None,
    save_id: str | None,
    timeout: float,
) -> None:
    """Print the checkpoint that a restart would load, and its copies. Changes nothing.

    It also asks the other hosts that this host's agent knows, for at most --timeout. Without an
    agent it reads this host's folders and tiers alone.

    Exit code 3 if there is no such checkpoint; --json prints the plan nevertheless.

    \b
    Examples:
      tieredckpt recovery plan
      tieredckpt recovery plan --step 400
      tieredckpt recovery plan --json | jq .chosen.step
    """
    found = find_holdings(place)
    everyone = ask_others(place, found, timeout)
    if save_id is not None:
        save_id = full_save_id(everyone.holdings, save_id)
    plan = plan_recovery(
        everyone.holdings,
        stream=stream,
        step=step,
        save_id=save_id,
        unreachable=everyone.unreachable,
    )
    asked = [f"save {save_id}"] * (save_id is not None) + [f"step {step}"] * (step is not None)
    wanted = " and ".join(asked)
    if place.as_json:
        hosts = {
            "asked": [each.host_id for each in everyone.holdings],
            "silent": dict(everyone.unreachable or {}),
        }
        print_json(namespace=found.namespace, source=found.source, hosts=hosts, **plan.to_json())
    else:
        _print_plan(found, plan, wanted)
    if plan.chosen is None and plan.sides:
        raise fork_error(plan)
    if plan.chosen is None:
        raise NoRecoverableCheckpointError(
            f"namespace {found.namespace} has no recoverable checkpoint of stream {stream}"
            + (f" that is {wanted}" if wanted else "")
            + _hint(everyone.holdings, plan, step, save_id),
            refused=[(each.save_id, each.step, each.reason) for each in plan.refused],
        )
