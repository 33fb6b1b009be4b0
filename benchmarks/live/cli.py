"""The command: ``python -m benchmarks.live``."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import click
import msgspec
from rich.console import Console

from benchmarks.cli import BUSY_LOAD, RESULTS, Display, own_folder
from benchmarks.live import report
from benchmarks.live.bench import FORMAT_VERSION, Result
from benchmarks.live.registry import SCENARIOS, run_all
from benchmarks.machine import describe, today
from benchmarks.processes import ROOT

NAMES = [scenario.name for scenario in SCENARIOS]


@click.command(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.option("--quick", is_flag=True, help="Few steps and faults: shows that all runs.")
@click.option(
    "--only",
    multiple=True,
    metavar="NAME",
    type=click.Choice(NAMES),
    help="Run only this scenario; may be given several times. Names: " + ", ".join(NAMES),
)
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON instead of tables.")
@click.option(
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder for <date>-<machine>-live.json, .md and .png "
    "[benchmarks/results; with --quick or --only: none].",
)
@click.option(
    "--disk",
    type=click.Path(file_okay=False, path_type=Path),
    default=ROOT / "out",
    help="Folder on the disk that stock DCP saves to [out/ in the checkout].",
)
@click.option(
    "--shm",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    default=Path("/dev/shm"),
    help="tmpfs for the memory tier and the journals [/dev/shm].",
)
@click.option(
    "--device",
    type=click.Choice(["cpu", "cuda"]),
    default="cpu",
    help="Of the models; ranks share one GPU, over gloo [cpu].",
)
def main(
    quick: bool,
    only: tuple[str, ...],
    as_json: bool,
    output: Path | None,
    disk: Path,
    shm: Path,
    device: str,
) -> None:
    """Measure live recovery against restarts by torchrun: the same script, the same kills.

    Four ranks (HSDP, gloo, one thread each) of a small model. Needs the machine for itself, about
    20 minutes. Exit code 1 if a scenario failed; a target that is missed is shown and is no
    failure.
    """
    # So that `kill` unwinds: trainings and agents must not stay behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    console = Console(stderr=as_json)
    chosen = [scenario for scenario in SCENARIOS if not only or scenario.name in only]
    disk.mkdir(parents=True, exist_ok=True)
    machine = describe(disk, shm)
    if machine.load_1min > BUSY_LOAD and not quick:
        console.print(
            f"[yellow]load average is {machine.load_1min}: other processes use this machine, "
            "and affect the figures"
        )
    with (
        own_folder(shm) as own_shm,
        own_folder(disk) as own_disk,
        Display(console, len(chosen)) as display,
    ):
        outcomes = run_all(
            chosen,
            own_shm,
            own_disk,
            quick=quick,
            device=device,
            on_start=lambda scenario: display.start(scenario.title),
            on_progress=display.progress,
            on_end=lambda each: display.end(each.title, each.seconds, failed=bool(each.error)),
        )
    result = Result(
        format_version=FORMAT_VERSION,
        date=today(),
        machine=machine,
        quick=quick,
        outcomes=outcomes,
    )
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(result), indent=2))
    else:
        for table in report.tables(result):
            console.print(table)
    if output is None and not quick and not only:
        output = RESULTS
    if output is not None:
        for path in _write(result, output):
            console.print(f"wrote {path}", soft_wrap=True)
    for outcome in result.failed:
        console.print(f"[bold red]{outcome.title} failed[/]")
        console.print(outcome.error, markup=False, highlight=False)
    sys.exit(1 if result.failed else 0)


def _write(result: Result, folder: Path) -> list[Path]:
    """Write the JSON, the page and the plot; a plot needs matplotlib (extra ``plot``)."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = f"{result.date}-{result.machine.slug}-live"
    data, page, plot = (folder / f"{stem}{suffix}" for suffix in (".json", ".md", ".png"))
    drawn = False
    try:
        report.draw(result, plot)
        drawn = plot.exists()
    except ModuleNotFoundError:
        pass
    data.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=2) + b"\n")
    page.write_text(report.markdown(result, plot.name if drawn else None))
    return [data, page, *([plot] if drawn else [])]
