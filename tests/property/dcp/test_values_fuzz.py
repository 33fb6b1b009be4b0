"""The fuzzer of values finds nothing, and would find what used to be there."""

from __future__ import annotations

import os
import random
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.property.dcp import fuzz_values
from tests.support.preloaded import context

ROUNDS = 1_500
ROUNDS_FULL = 6_000
ROUNDS_NIGHTLY = 1_000_000
SEARCHED = 2_000
MISSED = {
    "former": (470, "took", "signal", "too much memory", "beyond", "neither", "Function"),
    "charge": (838, "took"),
    "content": (470, "a bool that is neither"),
    "order": (88, "is not"),
    "padding": (648, "is not"),
    # What ends the comparison, and not what Python's own unpickler made, is a finding.
    "dies": (0, "comparing ended with -9"),
    "raises": (0, "KeyError"),
}
"""Of each way to leave something out, a round that finds it, and what is said of it."""


def fuzz(folder: Path, rounds: int, seed: int, first: int = 0, weakened: str = "") -> str:
    """What it found; "" if nothing."""
    at, output = folder / f"at-{first}", folder / f"output-{first}"
    options = {"rounds": rounds, "seed": seed, "first": first, "at": at, "weaken": weakened}
    arguments = [f"--{name}={value}" for name, value in options.items()]
    process = context.Process(target=in_fork, args=(output, arguments))
    process.start()
    process.join(3000)
    assert process.exitcode is not None, "it hangs"
    if process.exitcode < 0:
        number = int.from_bytes(at.read_bytes(), "little")
        return f"round {number} of seed {seed}: signal {-process.exitcode}\n{output.read_text()}"
    if process.exitcode == 0:
        assert f"{rounds} rounds" in output.read_text()
    return "" if process.exitcode == 0 else output.read_text()


def in_fork(output: Path, arguments: list[str]) -> None:
    """The command, with what it prints in a file."""
    with output.open("wb") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    sys.exit(fuzz_values.main(arguments))


def test_nothing_is_found(tmp_path: Path):
    assert fuzz(tmp_path, ROUNDS, seed=1) == ""


@pytest.mark.full
def test_nothing_is_found_in_more_rounds(tmp_path: Path):
    assert fuzz(tmp_path, ROUNDS_FULL - ROUNDS, seed=1, first=ROUNDS) == ""


@pytest.mark.nightly
def test_nothing_is_found_in_many_rounds(tmp_path: Path):
    seed = random.SystemRandom().randrange(1 << 31)
    rounds = 25_000
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        firsts = range(0, ROUNDS_NIGHTLY, rounds)
        found = list(pool.map(lambda first: fuzz(tmp_path, rounds, seed, first), firsts))
    assert not any(found), "\n".join(filter(None, found))


@pytest.mark.parametrize("weakened", list(MISSED))
def test_it_would_find_something(tmp_path: Path, weakened: str):
    known, *texts = MISSED[weakened]
    found = fuzz(tmp_path, 1, seed=1, first=known, weakened=weakened)
    if not any(text in found for text in texts):
        others = fuzz(tmp_path, SEARCHED, seed=1, weakened=weakened)
        pytest.fail(f"not found by round {known}: write one of these in its place: {others}")
