"""``tieredckpt recovery plan``: what a restart would load, and from where, without doing it."""

from __future__ import annotations

from pathlib import Path

import click
from rich.text import Text

from tieredckpt.cli.place import (
    Found,
    Place,
    find_holdings,
    json_option,
    namespace_option,
    place_options,
)
from tieredckpt.cli.show import age, count, print_json, print_table, short, size
from tieredckpt.errors import NoRecoverableCheckpointError
from tieredckpt.recovery.plan import Candidate, RecoveryPlan, SourceRef, plan_recovery


@click.group(name="recovery")
def group() -> None:
    """Look at what a restart would load."""


def _source(source: SourceRef) -> Text:
    if source.intact:
        return Text(source.tier, style="green")
    why = source.error or count(len(source.bad_blocks), "bad block")
    return Text(f"{source.tier} ({why})", style="yellow")


def _print_chosen(chosen: Candidate) -> None:
    manifest = chosen.manifest
    total = sum(ref.size for ref in manifest.segments)
    click.secho(f"a restart would load step {manifest.step}", bold=True, nl=False)
    segments = count(len(manifest.segments), "segment")
    click.echo(
        f"  (save id {short(manifest.save_id)}, attempt {manifest.attempt.number}, "
        f"saved {age(manifest.created_at_s)}, {size(total)} in {segments})"
    )
    rows: list[list[str | Text]] = [
        [str(ordinal), short(ref.id), size(ref.size), Text(", then ").join(map(_source, sources))]
        for ordinal, (ref, sources) in enumerate(
            zip(manifest.segments, chosen.sources, strict=True)
        )
    ]
    print_table(None, ("segment", "id", "size", "read from"), rows, right=("segment", "size"))


def _print_plan(found: Found, plan: RecoveryPlan) -> None:
    click.echo(f"namespace {found.namespace}, stream {plan.stream}")
    if plan.chosen is not None:
        _print_chosen(plan.chosen)
        older = [str(each.manifest.step) for each in plan.candidates if each is not plan.chosen]
        if older:
            click.echo(f"if that failed, an older step: {', '.join(older)}")
    else:
        click.secho("a restart would find nothing to load", fg="red", bold=True)
    for each in plan.refused:
        step = "?" if each.step is None else each.step
        click.secho(f"refused: step {step} ({short(each.save_id)}): {each.reason}", fg="yellow")
    for reason in plan.incomplete:
        click.secho(f"could not answer: {reason}", fg="red")


@group.command(name="plan")
@place_options
@namespace_option
@click.option("--stream", default="default", show_default=True, help="Which sequence.")
@click.option("--step", type=click.IntRange(min=0), help="This step instead of the newest.")
@click.option("--save-id", help="This checkpoint, on the time line or not.")
@json_option
def plan_command(
    config_file: Path | None,
    runtime_dir: Path | None,
    namespace: str | None,
    stream: str,
    step: int | None,
    save_id: str | None,
    as_json: bool,
) -> None:
    """Print which checkpoint a restart would load, and from which copies; changes nothing.

    Exit code 3 if there is none.

    \b
    Examples:
      tieredckpt recovery plan
      tieredckpt recovery plan --step 400
      tieredckpt recovery plan --json | jq .chosen.step
    """
    found = find_holdings(Place.find(config_file, runtime_dir), namespace)
    plan = plan_recovery([found.holdings], stream=stream, step=step, save_id=save_id)
    if as_json:
        print_json({"namespace": found.namespace, "source": found.source, **plan.to_json()})
    else:
        _print_plan(found, plan)
    if plan.chosen is None:
        raise NoRecoverableCheckpointError(
            f"namespace {found.namespace} has no recoverable checkpoint of stream {stream}",
            refused=[(each.save_id, each.step, each.reason) for each in plan.refused],
        )
