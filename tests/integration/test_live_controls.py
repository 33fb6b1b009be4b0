"""Negative controls: without one of its protections, live recovery is not bit-identical any more.

They prove that the comparison with an undisturbed run, in test_live.py, can fail.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.live import (
    STEPS,
    Fault,
    Outcome,
    Row,
    stopped_agent,
    supervised,
    train_script,
)
from tests.support.live_small import script_of

pytestmark = pytest.mark.nightly

RAISES = tuple(Fault(step, step % 4, "raise") for step in range(2, 6))
KILL = (Fault(7, 3, "kill"),)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Row]:
    folder = tmp_path_factory.mktemp("undisturbed")
    with stopped_agent(folder):
        found = supervised(folder, standby=0)
    assert found.code == 0, "\n".join(found.lines)
    return {row.step: row for row in found.rows}


@pytest.fixture
def folder(runtime_dir: Path) -> Iterator[Path]:
    with stopped_agent(runtime_dir):
        yield runtime_dir


# --- what is switched off, in each rank's process -------------------------------------------------


def nothing() -> None:
    """All protections are there."""


def no_scaler() -> None:
    """All protections are there, and no scaler: its ``unscale_`` raises in a mesh of old groups."""
    import torch

    torch.amp.GradScaler = functools.partial(  # type: ignore[misc,assignment]
        torch.amp.GradScaler, enabled=False
    )


def keep_caches() -> None:
    """DTensor's and dynamo's caches outlive the world."""
    from tieredckpt.live import torch_private

    no_scaler()
    torch_private.forget_last_world = lambda: None


def read_buffers_late() -> None:
    """Buffers are those of the moment at which the world is left."""
    from tieredckpt.live.survivor import SurvivorState

    read = SurvivorState.read

    def late(self: Any) -> dict[str, Any]:
        assert self._buffers
        self._buffers = []
        return read(self)

    SurvivorState.read = late  # type: ignore[method-assign]


def read_values_late() -> None:
    """Values and small objects are those of the moment at which the world is left."""
    from tieredckpt.live.survivor import SurvivorState

    read = SurvivorState.read

    def late(self: Any) -> dict[str, Any]:
        assert self._light
        self._light = {key: now(self._state[key]) for key in self._light}
        return read(self)

    def now(value: Any) -> Any:
        return value.state_dict() if hasattr(value, "state_dict") else value

    SurvivorState.read = late  # type: ignore[method-assign]


def drop_early() -> None:
    """What a survivor keeps is dropped when the new world begins to save it."""
    import torch.distributed.checkpoint as dcp

    from tieredckpt.live.world import World

    save_kept = World._save_kept

    def early(self: Any, engine: Any) -> None:
        save = dcp.save

        def dropping(*args: Any, **kwargs: Any) -> Any:
            self._kept = None
            return save(*args, **kwargs)

        dcp.save = dropping  # type: ignore[assignment]
        try:
            save_kept(self, engine)
        finally:
            dcp.save = save  # type: ignore[assignment]

    World._save_kept = early  # type: ignore[method-assign]


def spoiled(spoil: Callable[[], None], folder: str, steps: int, faults: list[Fault]) -> None:
    spoil()
    train_script(folder, steps, faults)


def trained(
    folder: Path, spoil: Callable[[], None], faults: Sequence[Fault], **options: Any
) -> Outcome:
    script = functools.partial(spoiled, spoil)
    found = supervised(folder, faults, script=script, **options)
    assert found.code == 0, "\n".join(found.lines)
    assert {row.step for row in found.rows} == set(range(1, STEPS + 1))
    return found


def differing(found: Outcome, reference: dict[int, Row]) -> set[str]:
    """Names of the columns in which a row differs."""
    return {
        name
        for row in found.rows
        for name, one, other in zip(row._fields, row, reference[row.step], strict=True)
        if one != other
    }


# --- the controls ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("faults", "options"),
    [
        (RAISES, {"rotated": True, "standby": 0}),
        (KILL, {}),
        ((*KILL, Fault(2, 2, "kill-save")), {}),
    ],
    ids=["rotated", "kill", "kill-save"],
)
def test_with_all_protections_nothing_differs(folder: Path, reference, faults, options):
    found = trained(folder, nothing, faults, **options)
    assert differing(found, reference) == set()
    assert len(found.rows) == STEPS


def test_with_the_caches_of_the_last_world(folder: Path):
    """Another rank's shards are saved and loaded, and nothing raises."""
    with stopped_agent(folder / "undisturbed"):
        undisturbed = trained(folder / "undisturbed", no_scaler, (), standby=0)
    reference = {row.step: row for row in undisturbed.rows}
    with stopped_agent(folder / "cleared"):
        found = trained(folder / "cleared", no_scaler, RAISES, rotated=True, standby=0)
    assert differing(found, reference) == set()
    found = trained(folder, keep_caches, RAISES, rotated=True, standby=0)
    assert "loss" in differing(found, reference)


def compiled(spoil: Callable[[], None], folder: str, steps: int, faults: list[Fault]) -> None:
    spoil()
    script_of("compiled")(folder, steps, faults)


def test_with_code_that_was_compiled_in_the_last_world(folder: Path):
    """A compiled function computes with the rank that its process had."""
    folders = [folder / name for name in ("undisturbed", "cleared", "kept")]
    with contextlib.ExitStack() as stack:
        for each in folders:
            stack.enter_context(stopped_agent(each))
        undisturbed, cleared, kept = (
            supervised(
                each, faults, size=4, standby=0, steps=8, rotated=rotated,
                script=functools.partial(compiled, spoil),
            )
            for each, faults, rotated, spoil in zip(
                folders, [(), RAISES, RAISES], [False, True, True],
                [nothing, nothing, keep_caches], strict=True,
            )
        )  # fmt: skip
    assert undisturbed.code == cleared.code == kept.code == 0, "\n".join(kept.lines)
    reference = {row.step: row for row in undisturbed.rows}
    assert {row.step: row for row in cleared.rows} == reference
    assert {row.step: row for row in kept.rows} != reference


def test_with_buffers_that_a_lost_step_has_moved(folder: Path, reference):
    """Losses do not show it, so tests compare buffers."""
    found = trained(folder, read_buffers_late, KILL)
    assert differing(found, reference) == {"buffers"}


def test_with_a_loader_that_a_lost_step_has_moved(folder: Path, reference):
    found = trained(folder, read_values_late, KILL)
    assert {"loss", "ids"} <= differing(found, reference)


def test_with_a_state_that_is_dropped_before_it_is_saved(folder: Path, reference):
    """A death in the new world's save: the survivors would save it again in the next one."""
    found = trained(folder, drop_early, (*KILL, Fault(2, 2, "kill-save")), standby=2)
    assert differing(found, reference) == set()
    assert len(found.rows) == STEPS + 2, "steps 5 and 6 are lost, and done again"
    assert found.said("resumed at step 4 from the newest checkpoint, 2 steps lost")
