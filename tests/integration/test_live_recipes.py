"""The scripts of examples/live: with faults, every bit of every rank's state is as without."""

from __future__ import annotations

import contextlib
import itertools
import json
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.live import Fault, stopped_agent
from tests.support.live_recipes import Seen, train

STEPS = 8
FAULTS = (Fault(3, 1, "raise"), Fault(6, 0, "kill"))


@pytest.fixture
def folder(runtime_dir: Path) -> Iterator[Path]:
    with stopped_agent(runtime_dir / "undisturbed"), stopped_agent(runtime_dir / "faults"):
        yield runtime_dir


def both(name: str, folder: Path, *options: str) -> tuple[Seen, Seen]:
    """The script without faults and with one exception and one kill."""
    undisturbed = train(name, folder / "undisturbed", standby=0, options=options)
    faults = train(name, folder / "faults", FAULTS, options=options)
    for each in (undisturbed, faults):
        assert each.outcome.code == 0, "\n".join(each.outcome.lines)
    return undisturbed, faults


def check(undisturbed: Seen, faults: Seen) -> None:
    """No step is lost, and all of rank 0's rows and all digests are those without faults.

    A step may be done twice. A rank that left between the vote of an update and its body has no
    digest of it: it loads the update of the other rank.
    """
    text = "\n".join(faults.outcome.lines)
    assert len(faults.outcome.said("from the state of the surviving ranks, no step lost")) == 2
    rows = {row["step"]: row for row in undisturbed.journal}
    assert list(rows) == list(range(1, STEPS + 1))
    assert [row for row in faults.journal if row != rows[row["step"]]] == [], text
    assert {row["step"] for row in faults.journal} == set(rows), text
    digests = {(row["step"], row["rank"]): row for row in undisturbed.digests}
    assert len(digests) == len(undisturbed.digests) == 2 * STEPS
    different = [row for row in faults.digests if row != digests[row["step"], row["rank"]]]
    assert different == [], text
    assert {row["step"] for row in faults.digests} == set(rows), text


@pytest.mark.full  # test_live.py has one, too
def test_grad_scaler(folder: Path):
    undisturbed, faults = both("grad_scaler", folder)
    check(undisturbed, faults)
    scales = {row["scale"] for row in undisturbed.journal}
    assert len(scales) > 2, "the scale never changes"


@pytest.mark.nightly
def test_accumulation(folder: Path):
    check(*both("accumulation", folder))


@pytest.mark.nightly  # as test_live.py
def test_batch_norm(folder: Path):
    check(*both("batch_norm", folder))


def test_loader(folder: Path):
    """Three steps are an epoch."""
    pytest.importorskip("torchdata")
    undisturbed, faults = both("loader", folder)
    check(undisturbed, faults)
    ids = [row["ids"] for row in undisturbed.journal]
    epochs = [sorted(itertools.chain(*ids[start : start + 3])) for start in (0, 3)]
    assert epochs == [list(range(48))] * 2
    assert ids[:3] != ids[3:6], "epochs are not shuffled"


@pytest.mark.nightly
def test_compiled(folder: Path):
    check(*both("compiled", folder))


@pytest.mark.nightly
def test_logged(folder: Path):
    """Both replicas are killed, so two steps are done again: their rows are replaced."""
    name = "logged"
    kills = (Fault(7, 0, "kill-with-1"),)
    undisturbed = train(name, folder / "undisturbed", standby=0)
    faults = train(name, folder / "faults", kills, standby=2)
    text = "\n".join(faults.outcome.lines)
    assert undisturbed.outcome.code == faults.outcome.code == 0, text
    wanted, found = logged(folder / "undisturbed"), logged(folder / "faults")
    assert list(found) == list(wanted) == list(range(1, STEPS + 1))
    assert [row["loss"] for row in found.values()] == [row["loss"] for row in wanted.values()]
    assert faults.outcome.said("resumed at step 4 from the newest checkpoint, 2 steps lost"), text
    assert {step for step, row in found.items() if row["generation"] == 2} == {5, 6, 7, 8}


def logged(folder: Path) -> dict[int, dict[str, Any]]:
    with contextlib.closing(sqlite3.connect(folder / "journal")) as rows:
        found = rows.execute("SELECT step, row FROM rows ORDER BY step").fetchall()
    return {step: json.loads(row) for step, row in found}
