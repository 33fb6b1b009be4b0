"""Results of benchmarks as tables, lines and plots."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import matplotlib
import msgspec
import pytest
from rich.console import Console
from rich.table import Table

from tieredckpt.bench import report
from tieredckpt.bench.settings import STAGES, Level, Mode, Recovery, Result, Settings, Way
from tieredckpt.bench.show import _scale, show
from tieredckpt.errors import UsageError

MACHINE = {"device": "cpu", "cpus": "2", "torch": "2.13", "tieredckpt": "0.1"}


def result(mode: Mode, **found: Any) -> Result:
    return Result(
        mode=mode, machine=MACHINE, ranks=2, state_bytes=4_000_000_000, rank_bytes=2_000_000_000,
        tensors=7, **found,
    )  # fmt: skip


def text(tables: list[Table]) -> str:
    console = Console(width=200, record=True, file=io.StringIO())
    for table in tables:
        console.print(table)
    return console.export_text()


SAVES = result(
    "save",
    stall_s={"async_save": [4.0, 0.5, 0.25, 1.0], "dcp.save": [2.0, 1.0]},
    levels=[
        Level(name="memory", seconds={1: 4.0, 2: 0.6, 3: 0.4, 4: 1.0}),
        Level(name="nvme", seconds={1: 5.0, 4: 3.0}),
        Level(name="s3", seconds={}),
    ],
)


def rows(printed: str) -> list[list[str]]:
    lines = [line for line in printed.splitlines() if line.startswith("│")]
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in lines]


def test_saves():
    found = rows(text(report.of_saves(SAVES)))
    assert found[0] == ["first save (memory is taken)", "4 s", "-"], "of all saves"
    assert found[1] == ["later saves", "3", "2"], "a median says of how many it is"
    assert found[2] == ["median", "500 ms", "1.5 s"]
    assert found[3] == ["throughput", "4 GB/s", "1.33 GB/s"]
    assert found[5] == ["longest", "1 s", "2 s"]
    assert found[6] == ["memory", "4 of 4", "800 ms", "4 s"]
    assert found[7] == ["nvme", "2 of 4", "4 s", "5 s"], "two were replaced before"
    assert found[8] == ["s3", "0 of 4", "-", "-"]


def recovery(source: str, scale: float) -> Recovery:
    stages = {name: scale * (number + 1) for number, name in enumerate(STAGES)}
    return Recovery(
        source=source, total_s=sum(stages.values()), stages=stages, bytes_by_tier={source: 1}
    )


RECOVERIES = result(
    "recover", recoveries=[recovery(s, n) for n in (1, 2, 9) for s in ("memory", "s3")]
)


def test_recoveries_have_the_median_and_shares():
    found = rows(text(report.of_recoveries(RECOVERIES)))
    assert found[0] == ["from SIGKILL to the first step", "42 s", "42 s"]
    assert found[1] == ["torchrun starts all ranks again", "2 s   5%", "2 s   5%"]
    assert found[6][1] == "12 s  29%"


def way(name: str, stall: float, done: float, load: float) -> Way:
    return Way(name=name, stall_s=[stall, 9, stall], done_s=[done, done, 9], load_s=[load] * 3)


COMPARED = result(
    "compare",
    ways=[
        way("tieredckpt async", 1, 4, 2),
        way("tieredckpt sync", 3, 3, 3),
        way("DCP async to /a", 2, 5, 1),
        way("DCP sync to /a", 6, 6, 4),
    ],
)


def test_a_comparison_names_the_faster_one_also_if_it_is_another():
    stall, complete, load, _ = report.comparisons(COMPARED)
    assert stall == "stall: tieredckpt async is 2.00 times as fast as DCP async to /a"
    assert complete == "complete: tieredckpt sync is 1.67 times as fast as DCP async to /a"
    assert load == "load: DCP async to /a is 2.00 times as fast as tieredckpt async"
    assert rows(text(report.of_ways(COMPARED)))[1] == ["tieredckpt sync", "3 s", "3 s", "3 s"]


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (SAVES, ["stall of async_save: median of the later saves 500 ms", "complete in nvme"]),
        (RECOVERIES, ["first update", "memory", "42 s", "seconds since SIGKILL, medians"]),
        (COMPARED, ["stall per save", "DCP async to /a", "6 s"]),
    ],
    ids=lambda each: each.mode if isinstance(each, Result) else "",
)
def test_a_plot_has_the_words_and_numbers_of_the_table(
    found: Result, words: list[str], tmp_path: Path
):
    plot = tmp_path / "x.svg"
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        show(found, Settings(mode=found.mode, plot=str(plot), as_json=True))
    drawn = plot.read_text()
    assert "4 GB in 7 tensors on 2 ranks" in drawn
    assert [each for each in words if each not in drawn] == []


def test_an_axis_is_linear_unless_small_values_would_vanish():
    assert _scale([0.0, 0.02, 1.9]) == "linear"
    assert _scale([0.02, 2.1]) == "log"
    assert _scale([]) == "linear"


@pytest.mark.parametrize("found", [SAVES, RECOVERIES, COMPARED], ids=lambda r: r.mode)
def test_plot_and_json(found: Result, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    plot = tmp_path / "x.png"
    show(found, Settings(mode=found.mode, plot=str(plot)))
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert "4 GB in 7 tensors on 2 ranks" in capsys.readouterr().out
    show(found, Settings(mode=found.mode, as_json=True))
    assert msgspec.json.decode(capsys.readouterr().out, type=Result) == found
    with pytest.raises(UsageError, match="cannot be written"):
        show(found, Settings(mode=found.mode, plot=str(tmp_path / "no" / "x.png")))
