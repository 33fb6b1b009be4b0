"""``tieredckpt spill --now``: bring the newest checkpoints to a tier at once."""

from __future__ import annotations

import dataclasses
import sys

import click

from tieredckpt.cli.place import Place, look_options
from tieredckpt.cli.show import print_json, size
from tieredckpt.errors import ConfigError
from tieredckpt.policy.units import parse_duration
from tieredckpt.transport.flushing import FlushReport, flush_and_wait


@click.command()
@look_options
@click.option("--now", is_flag=True, required=True, help="Before everything that waits.")
@click.option("--tier", help="Which; else the one that can be reached.")
@click.option("--deadline", metavar="DURATION", help='How much time is left, as in "90 s".')
def spill(place: Place, now: bool, tier: str | None, deadline: str | None) -> None:
    """Bring the newest checkpoint of each stream to a tier now, on all hosts of the job.

    Without --tier it is the nearest one that outlives this host and can be reached before the
    deadline, by what is left to copy and the measured speed; else the one that takes the shortest.
    Exit code 1 if it was not all there in time; the agents go on.

    \b
    Examples:
      tieredckpt spill --now
      tieredckpt spill --now --tier s3 --deadline 90s --json
    """
    assert now
    try:
        left_s = parse_duration(deadline) if deadline is not None else None
    except ValueError as error:
        raise ConfigError(f"--deadline: {error}", key="deadline") from error
    name = place.namespace(place.status())
    shown: list[str] = []

    def told(report: FlushReport) -> None:
        line = _line(report)
        if not place.as_json and shown[-1:] != [line]:
            click.echo(line, err=True)
            shown.append(line)

    with place.agent() as client:
        report = flush_and_wait(client, tier, left_s, namespace=name, told=told)
    if place.as_json:
        print_json(dataclasses.asdict(report) | {"done": report.done})
    else:
        took = f"after {report.seconds:.1f} s"
        click.echo(f"{report.tier}: {'all there' if report.done else 'not all there'} {took}")
        for stream, why in report.errors.items():
            click.secho(f"stream {stream}: {why}", fg="red")
    if not report.done:
        sys.exit(1)


def _line(report: FlushReport) -> str:
    parts = [
        f"step {report.steps[stream]} of {stream}: {level}"
        for stream, level in report.levels.items()
    ]
    copied = f"{size(report.copied_bytes)} of {size(report.total_bytes)}"
    return f"{report.tier}: {', '.join(parts)}, copied {copied}"
