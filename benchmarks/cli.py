"""The command: ``python -m benchmarks``."""

from __future__ import annotations

import contextlib
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import click
import msgspec
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column

from benchmarks import report, runner
from benchmarks.machine import describe, today
from benchmarks.processes import ROOT
from benchmarks.registry import SCENARIOS
from benchmarks.shapes import FULL, GIB, QUICK

RESULTS = ROOT / "benchmarks" / "results"
BUSY_LOAD = 0.3


@click.command(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.option("--quick", is_flag=True, help="A small state: shows that all runs, not how fast.")
@click.option(
    "--only",
    multiple=True,
    metavar="NAME",
    type=click.Choice([scenario.name for scenario in SCENARIOS]),
    help="Run only this scenario; may be given several times. Names: "
    + ", ".join(scenario.name for scenario in SCENARIOS),
)
@click.option(
    "--repeat",
    type=click.IntRange(2, 10_000),
    help="Rounds of fast measurements [40; quick: 3]; slow ones take a tenth of it, at least 2.",
)
@click.option(
    "--json", "as_json", is_flag=True, help="Print the result as JSON instead of a table."
)
@click.option(
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder for <date>-<machine>.json, .md and .png "
    "[benchmarks/results; with --quick or --only: none].",
)
@click.option(
    "--disk",
    type=click.Path(file_okay=False, path_type=Path),
    default=ROOT / "out",
    help="Folder on the disk to measure [out/ in the checkout].",
)
@click.option(
    "--shm",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    default=Path("/dev/shm"),
    help="tmpfs for the memory tier [/dev/shm].",
)
def main(
    quick: bool,
    only: tuple[str, ...],
    repeat: int | None,
    as_json: bool,
    output: Path | None,
    disk: Path,
    shm: Path,
) -> None:
    """Measure tieredckpt as ratios to what this machine can do, taken in the same run.

    Needs the machine for itself. Exit code 1 if a scenario failed; a target that is missed is
    shown and is no failure.
    """
    # So that `kill` unwinds: gigabytes of tmpfs and an agent must not stay behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    console = Console(stderr=as_json)
    chosen = [scenario for scenario in SCENARIOS if not only or scenario.name in only]
    shape = QUICK if quick else FULL
    rounds = repeat or (3 if quick else 40)
    disk.mkdir(parents=True, exist_ok=True)
    machine = describe(disk, shm)
    if machine.load_1min > BUSY_LOAD and not quick:
        console.print(
            f"[yellow]load average is {machine.load_1min}: other processes use this machine, "
            "and affect the figures"
        )
    plan = runner.Plan(
        shape=shape,
        repeat=rounds,
        repeat_slow=1 if quick else max(2, rounds // 10),
        shm="",
        disk="",
        forked=quick,
    )
    with (
        own_folder(shm) as own_shm,
        own_folder(disk) as own_disk,
        Display(console, len(chosen)) as display,
    ):
        outcomes = runner.run_all(
            chosen,
            msgspec.structs.replace(plan, shm=str(own_shm), disk=str(own_disk)),
            on_start=lambda scenario: display.start(scenario.title),
            on_progress=display.progress,
            on_end=lambda each: display.end(
                each.title,
                each.seconds,
                f", peak memory {each.peak_bytes / GIB:.1f} GiB",
                failed=each.error is not None,
            ),
        )
    result = runner.Result(
        format_version=runner.FORMAT_VERSION,
        date=today(),
        machine=machine,
        state_bytes=shape.size_bytes,
        state_tensors=len(shape.tensors()),
        quick=quick,
        repeat=rounds,
        outcomes=outcomes,
    )
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(result), indent=2))
    else:
        console.print(report.table(result))
    if output is None and not quick and not only:
        output = RESULTS
    if output is not None:
        for path in _write(result, output):
            console.print(f"wrote {path}", soft_wrap=True)
    for outcome in result.failed:
        console.print(f"[bold red]{outcome.title} failed[/]")
        console.print(outcome.error, markup=False, highlight=False)
    sys.exit(1 if result.failed else 0)


class Display:
    """The progress bar: scenarios done, and how far the present one is."""

    def __init__(self, console: Console, scenarios: int) -> None:
        self._bars = Progress(
            TextColumn("{task.description}", table_column=Column(min_width=34)),
            BarColumn(),
            TextColumn("{task.completed:.0f}/{task.total:.0f}"),
            TimeElapsedColumn(),
            console=console,
        )
        self._all = self._bars.add_task("scenarios", total=scenarios)
        self._one = self._bars.add_task("", total=1, visible=False)

    def __enter__(self) -> Display:
        self._bars.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._bars.stop()

    def start(self, title: str) -> None:
        """A scenario begins."""
        self._bars.reset(self._one, description=title, total=1, visible=True)

    def progress(self, what: str, done: int, total: int) -> None:
        """A measured process of the present scenario has come this far."""
        self._bars.update(self._one, description=f"  {what}", completed=done, total=total)

    def end(self, title: str, seconds: float, more: str = "", *, failed: bool) -> None:
        """A scenario has ended, well or not."""
        self._bars.advance(self._all)
        self._bars.update(self._one, visible=False)
        state = "[red]failed[/]" if failed else "done"
        self._bars.console.print(f"{title}: {state} in {seconds:.1f} s{more}")


@contextlib.contextmanager
def own_folder(parent: Path) -> Iterator[Path]:
    """A folder of this run's own, removed at its end."""
    folder = Path(tempfile.mkdtemp(prefix="tck-bench-", dir=parent)).resolve()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _write(result: runner.Result, folder: Path) -> list[Path]:
    """Write the JSON, the page and the plot; a plot needs matplotlib (extra ``plot``)."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = f"{result.date}-{result.machine.slug}"
    paths = [folder / f"{stem}{suffix}" for suffix in (".json", ".md", ".png")]
    try:
        report.draw(result, paths[2])
    except ModuleNotFoundError:
        paths.pop()
    plot = paths[2].name if len(paths) == 3 and paths[2].exists() else None
    paths[0].write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=2) + b"\n")
    paths[1].write_text(report.markdown(result, plot))
    return [path for path in paths if path.exists()]
