"""The fuzzer of values finds nothing, and would find what used to be there."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

PARTS = 4
ROUNDS = 50_000
ROUNDS_NIGHTLY = 1_000_000
MISSED = {
    "former": ("took", "signal", "too much memory", "beyond", "neither", "Function"),
    "charge": ("took",),
    "content": ("a bool that is neither",),
    "order": ("is not",),
    "padding": ("is not",),
    # What ends the comparison, and not what Python's own unpickler made, is a finding.
    "dies": ("comparing ended with -9",),
    "raises": ("KeyError",),
}
"""What is found of each way to leave something out."""


def fuzz(folder: Path, rounds: int, seed: int, first: int = 0, weakened: str = "") -> str:
    """What it found; "" if nothing."""
    at = folder / f"at-{first}"
    options = {"rounds": rounds, "seed": seed, "first": first, "at": at, "weaken": weakened}
    command = [sys.executable, "-m", "tests.property.fuzz_values"]
    command += [f"--{name}={value}" for name, value in options.items()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=3000)
    if done.returncode < 0:
        number = int.from_bytes(at.read_bytes(), "little")
        return f"round {number} of seed {seed}: signal {-done.returncode}\n{done.stderr}"
    if done.returncode == 0:
        assert f"{rounds} rounds" in done.stdout
    return "" if done.returncode == 0 else done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_nothing_is_found(tmp_path: Path, part: int):
    rounds = ROUNDS // PARTS
    assert fuzz(tmp_path, rounds, seed=1, first=part * rounds) == ""


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
    found = fuzz(tmp_path, 5000, seed=1, weakened=weakened)
    assert any(text in found for text in MISSED[weakened]), found
