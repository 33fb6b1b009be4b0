"""Elastic training: worlds of other sizes in the same processes, from memory."""

from __future__ import annotations

import functools
import itertools
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.support.live import Started, start, stopped_agent
from tests.support.live_elastic import BATCH, SAMPLES, STEPS, read, script
from tieredckpt.errors import AgentError
from tieredckpt.live.control import CONTROL, Request, Status, ask
from tieredckpt.policy.elastic import rows

DEADLINE_S = 120.0


class Training:
    """One that goes on up to the step that the test allows."""

    def __init__(
        self, folder: Path, *, steps: int = STEPS, device: str = "cpu", **options: Any
    ) -> None:
        self.folder, self.steps = folder, steps
        self.allow(0)
        target = functools.partial(script, device=device)
        self.run: Started = start(folder, script=target, steps=steps, **options)

    def allow(self, step: int) -> None:
        part = self.folder / "part"
        part.write_text(str(step))
        part.rename(self.folder / "limit")

    def rows(self) -> list[list[Any]]:
        return read(self.folder / "seen")

    def wait(self, until: Callable[[], bool]) -> None:
        limit_s = time.monotonic() + DEADLINE_S
        while not until():
            assert time.monotonic() < limit_s, "\n".join(self.run.lines())
            time.sleep(0.02)

    def train_to(self, step: int) -> None:
        self.allow(step)
        self.wait(lambda: bool(self.rows()) and self.rows()[-1][0] >= step)

    def resize(self, size: int, timeout_s: float = DEADLINE_S) -> Status:
        return ask(self.folder / CONTROL, Request(size=size), timeout_s)

    def check(self, reference: dict[int, list[Any]]) -> None:
        """Each row counts once, and the losses are those of four ranks."""
        found = list({row[0]: row for row in self.rows()}.values())
        assert [row[0] for row in found] == list(range(1, self.steps + 1)), self.run.lines()
        for step, loss, ids, size in found:
            assert ids == [row * 7 % SAMPLES for row in rows(step, BATCH)]
            assert loss == pytest.approx(reference[step][1], rel=1e-5)
            is_same = not (self.folder / "replicas").exists()  # other sums
            if is_same and all(row[3] == 4 for row in found[:step]):
                assert loss == reference[step][1], f"step {step} of {size} ranks"


@pytest.fixture(scope="module")
def device() -> str:
    return "cpu"


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory, device: str) -> dict[int, list[Any]]:
    folder = tmp_path_factory.mktemp("fixed")
    with stopped_agent(folder):
        training = Training(folder, standby=0, device=device)
        training.allow(STEPS + 1)
        assert training.run.outcome().code == 0
    return {row[0]: row for row in training.rows()}


@pytest.mark.parametrize(
    ("mode", "device"),
    [
        ("auto", "cpu"),
        pytest.param("manual", "cpu", marks=pytest.mark.full),
        pytest.param("auto", "cuda", marks=pytest.mark.gpu),
    ],
    scope="module",
)
def test_ranks_leave_and_come_back_at_a_users_order(
    runtime_dir: Path, reference, mode: str, device: str
):
    (runtime_dir / mode).touch()
    with stopped_agent(runtime_dir):
        training = Training(runtime_dir, standby=0, device=device)
        training.train_to(3)
        with pytest.raises(AgentError):
            training.resize(5, timeout_s=0.5)  # there are four processes
        assert training.resize(2).size == 2
        training.train_to(6)
        assert training.resize(4).size == 4
        training.train_to(9)
        training.resize(3)  # which the script cannot have: it is undone
        training.allow(STEPS + 1)
        found = training.run.outcome()
    assert found.code == 0, "\n".join(found.lines)
    training.check(reference)
    assert len(training.rows()) == STEPS
    assert [size for size, _ in itertools.groupby(row[3] for row in training.rows())] == [4, 2, 4]
    events = read(runtime_dir / "events")
    first, second = events[0][0], events[4][0]
    assert events[:6] == [[first, 4, 2, None]] * 4 + [[second, 2, 4, None]] * 2
    assert {(old, new) for _, old, new, _ in events[6:]} >= {(4, 3)}
    assert len(found.said("ended: resize from 4 to 2 ranks")) == 1
    assert len(found.said("ended: resize from 2 to 4 ranks")) == 1
    assert len(found.said("raised ValueError")) >= 3
    assert len(found.said("from the state of the surviving ranks, no step lost")) >= 3
    sources = [place for *_, source in read(runtime_dir / "restored") for place in source]
    assert sources
    assert all(place.startswith("memory") for place in sources)


@pytest.mark.parametrize(
    "place",
    ["save-1-3", *(pytest.param(p, marks=pytest.mark.full) for p in ("load-2-1", "raise-4-1"))],
)
def test_a_fault_amid_a_resize_loses_no_step(runtime_dir: Path, reference, place: str):
    """In the save of the old world, in the load of the new one, or before the ranks leave."""
    with stopped_agent(runtime_dir):
        if place.startswith("save"):
            (runtime_dir / "replicas").touch()  # of the shard of the rank that dies
        training = Training(runtime_dir, standby=1)
        training.train_to(3)
        (runtime_dir / f"fault-{place}").touch()
        training.resize(2)
        training.allow(STEPS + 1)
        found = training.run.outcome()
    assert found.code == 0, "\n".join(found.lines)
    training.check(reference)
    assert not (runtime_dir / f"fault-{place}").exists()
    assert len(training.rows()) == STEPS
    assert training.rows()[-1][3] == 2


@pytest.mark.nightly
def test_twenty_random_resizes_and_kills(runtime_dir: Path, tmp_path: Path):
    """No step is lost or done twice, and all is read from memory."""
    random, steps, begun = Random(32), 20 * 4 + 4, 1
    with stopped_agent(tmp_path):
        fixed = Training(tmp_path, steps=steps, standby=0)
        fixed.allow(steps + 1)
        assert fixed.run.outcome().code == 0
    with stopped_agent(runtime_dir):
        (runtime_dir / "replicas").touch()
        training = Training(runtime_dir, steps=steps, standby=1, max_restarts=100)
        for number in range(20):
            training.train_to(4 * number + 3)
            size = training.rows()[-1][3]
            if random.random() < 0.5:
                training.resize(6 - size)
            else:
                rank = random.randrange(size)
                os.kill(int((runtime_dir / f"pid-{rank}").read_text()), signal.SIGKILL)
            begun += 1
            training.allow(4 * number + 6)
            training.wait(lambda at=begun: len(read(runtime_dir / "restored")) >= at)  # type: ignore[misc]
        training.allow(steps + 1)
        found = training.run.outcome()
    assert found.code == 0, "\n".join(found.lines)
    training.check({row[0]: row for row in fixed.rows()})
    assert len(training.rows()) == steps
    sources = [place for *_, source in read(runtime_dir / "restored") for place in source]
    assert all(place.startswith("memory") for place in sources)
