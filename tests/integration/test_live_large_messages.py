"""Ranks that fail at random moments between and in the middle of messages of 16 MB.

gloo does not wake a rank whose message was cut in its middle. So the other ranks must leave by
other means, or they are killed after ``--unwind``, with their shards. By hand, with figures:

    pytest -s -m nightly tests/integration/test_live_large_messages.py
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.agent import wait_until
from tests.support.live import Fault, Outcome, Script, start, stopped_agent, supervised
from tests.support.live_small import script_of

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1500)]

SIZE = 3
GATHERS = 4
SEED = int(os.environ.get("LIVE_SEED", "30"))


class Begun(NamedTuple):
    """The newest step of a rank."""

    generation: int
    rank: int
    pid: int
    step: int


def newest(folder: Path) -> dict[int, Begun]:
    """Of each rank of the newest generation."""
    path = folder / "now"
    if not path.exists():
        return {}
    lines = [line for line in path.read_text().splitlines(True) if line.endswith("\n")]
    found = [Begun(*map(int, line.split())) for line in lines]
    last = max((each.generation for each in found), default=0)
    return {each.rank: each for each in found if each.generation == last}


def script(folder: str, steps: int, faults: list[Fault]) -> None:
    script_of("large_messages", GATHERS, "cpu")(folder, steps, faults)


def cuda_script(folder: str, steps: int, faults: list[Fault]) -> None:
    script_of("large_messages", GATHERS, "cuda")(folder, steps, faults)


def unsliced(folder: str, steps: int, faults: list[Fault]) -> None:
    """Without the waits that look at the end of the generation."""
    from tieredckpt.live.torch_private import SlicedWaits

    SlicedWaits.__enter__ = lambda _: None  # type: ignore[method-assign]
    SlicedWaits.__exit__ = lambda *_: None  # type: ignore[method-assign]
    script(folder, steps, faults)


def disturbed(
    folder: Path,
    faults: int,
    number: signal.Signals,
    script: Script = script,
    unwind_s: float = 10.0,
) -> Outcome:
    """Send ``number`` to a random rank at a random moment of each generation, ``faults`` times."""
    draw = random.Random(SEED)
    training = start(
        folder, size=SIZE, standby=2, max_restarts=4 * faults, unwind_s=unwind_s, steps=10_000,
        script=script,
    )  # fmt: skip
    generation = 0
    for _ in range(faults):
        first: dict[int, Begun] = {}

        def goes_on(above: int = generation, first: dict[int, Begun] = first) -> bool:
            """A newer generation has made an update."""
            now = newest(folder)
            if len(now) < SIZE or now[0].generation <= above:
                return False
            first.setdefault(0, now[0])
            return now[0].step > first[0].step and now[0].generation == first[0].generation

        try:
            wait_until(goes_on, deadline_s=60)
        except AssertionError:
            print("\n".join(training.lines()[-60:]))
            raise
        now = newest(folder)
        generation = now[0].generation
        time.sleep(draw.uniform(0.0, 0.25))  # the random moment
        with contextlib.suppress(ProcessLookupError):
            os.kill(now[draw.randrange(SIZE)].pid, number)
    (folder / "enough").touch()
    return training.outcome(120)


@pytest.mark.parametrize(
    ("faults", "number", "script"),
    [
        (100, signal.SIGUSR2, script),
        (50, signal.SIGKILL, script),
        pytest.param(10, signal.SIGKILL, cuda_script, marks=pytest.mark.gpu),
    ],
    ids=["raise", "kill", "kill-cuda"],
)
def test_at_most_one_rank_in_a_hundred_is_left_to_unwind(
    runtime_dir: Path, faults: int, number: signal.Signals, script: Script
):
    with stopped_agent(runtime_dir):
        found = disturbed(runtime_dir, faults, number, script)
    text = "\n".join(found.lines)
    assert found.code == 0, text
    left = found.said("does not leave within")
    ended = [line for line in found.said("ended: ") if re.search(r"generation \d+ ended", line)]
    sources = Counter(
        "survivors" if "surviving" in line else "checkpoint" for line in found.said("resumed at")
    )
    seconds = sorted(float(line.split()[-2]) for line in found.said("first update after the fault"))
    print(
        f"\n{number.name}: {len(ended)} of {faults} faults ended a generation, {len(left)} ranks "
        f"of {len(ended) * (SIZE - 1)} were left to unwind; resumed from {dict(sources)}; seconds "
        f"to the first update: median {seconds[len(seconds) // 2]}, worst {seconds[-1]}"
    )
    assert len(ended) >= 0.9 * faults, text
    assert 100 * len(left) <= len(ended) * (SIZE - 1), "\n".join(left)
    last = max(row.step for row in found.rows)
    with stopped_agent(runtime_dir / "undisturbed"):
        undisturbed = supervised(
            runtime_dir / "undisturbed", size=SIZE, standby=0, steps=last,
            script=script_of("plain"),
        )  # fmt: skip
    wanted = {row.step: row for row in undisturbed.rows}
    assert [row for row in found.rows if row != wanted[row.step]] == []
    assert {row.step for row in found.rows} == set(wanted)


def test_without_sliced_waits_ranks_are_left(runtime_dir: Path):
    """The negative control of the test above: messages are cut in their middle."""
    with stopped_agent(runtime_dir):
        found = disturbed(runtime_dir, 20, signal.SIGKILL, unsliced, unwind_s=2.0)
    assert found.code == 0, "\n".join(found.lines)
    left = found.said("does not leave within")
    print(f"\nwithout sliced waits: {len(left)} ranks of {20 * (SIZE - 1)} were left to unwind")
    assert left
