"""Scripts that misuse live recovery: they recover with the right state, or end with a reason."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.live import Fault, Outcome, Row, stopped_agent, supervised
from tests.support.live_small import script_of

STEPS = 8
KILL = (Fault(7, 1, "kill"),)
RAISE = (Fault(7, 1, "raise"),)
SURVIVORS = "resumed at step 6 from the state of the surviving ranks, no step lost"


@pytest.fixture
def folder(runtime_dir: Path) -> Iterator[Path]:
    with stopped_agent(runtime_dir):
        yield runtime_dir


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Row]:
    folder = tmp_path_factory.mktemp("undisturbed")
    with stopped_agent(folder):
        found = trained(folder, "plain", standby=0)
    assert found.code == 0, "\n".join(found.lines)
    assert [row.step for row in found.rows] == list(range(1, STEPS + 1))
    return {row.step: row for row in found.rows}


def trained(folder: Path, script: str, faults: Sequence[Fault] = (), **options: Any) -> Outcome:
    return supervised(folder, faults, size=2, steps=STEPS, script=script_of(script), **options)


def check(found: Outcome, reference: dict[int, Row], resumed: str = SURVIVORS) -> None:
    """All steps were trained; what a step came to is what it comes to undisturbed.

    The last row of a step counts: rows are written before the update, which decides.
    """
    text = "\n".join(found.lines)
    assert found.code == 0, text
    assert {row.step: row for row in found.rows} == reference, text
    assert found.said(resumed), text


def test_a_kill_while_the_script_swallows_base_exceptions(folder: Path, reference):
    """It may run through to its end before the death is known: then it keeps no state."""
    found = trained(folder, "swallows", KILL)
    check(found, reference, "resumed at step ")
    assert not found.said("does not leave")


@pytest.mark.full
def test_a_fault_that_the_script_swallows(folder: Path, reference):
    """One rank skips a step, so the ranks' updates differ, and none of them is done."""
    found = trained(folder, "swallows", RAISE, hang_s=1.0, unwind_s=1.0)
    check(found, reference)


def test_a_script_that_never_leaves_is_killed_after_unwind(folder: Path, reference):
    found = trained(folder, "never_leaves", KILL, unwind_s=1.0)
    check(found, reference, "resumed at step 4 from the newest checkpoint, 2 steps lost")
    assert found.said("rank 0 does not leave within 1 s")


def test_a_group_of_an_older_generation_is_refused_by_torch(folder: Path):
    found = trained(folder, "old_group", RAISE)
    assert found.code == 1
    assert found.said("is not initialized in the world group map")
    assert found.said("the script failed 3 times at the same step: exit 1")


@pytest.mark.parametrize("faults", [KILL, pytest.param(RAISE, marks=pytest.mark.full)])
def test_a_state_dict_that_communicates_is_no_survivors_state(
    folder: Path, reference, faults: Sequence[Fault]
):
    found = trained(folder, "communicating_state", faults)
    check(found, reference, "resumed at step 4 from the newest checkpoint, 2 steps lost")
    named = "keeps no state: state_dict() of 'model' failed"
    assert any(named in line for line in found.lines)
    assert not found.said("does not leave")


@pytest.mark.full
def test_a_superseded_run_ends_at_once(folder: Path):
    found = trained(folder, "superseded", RAISE)
    assert found.code == 1
    assert found.said("generation 1 ended: rank 1 raised tieredckpt.errors.StaleAttemptError")
    assert found.said("another generation would fail, too: exit 1")


@pytest.mark.full
def test_other_weights_in_an_evaluation_are_not_kept(folder: Path, reference):
    found = trained(folder, "other_weights", [Fault(2, 1, "raise-in-evaluation")])
    check(found, reference, "training begins, 2 steps lost")
    named = "keeps no state: 'model.weight' changed outside of world.update"
    assert any(named in line for line in found.lines)
