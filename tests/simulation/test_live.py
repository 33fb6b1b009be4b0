"""Live recovery on several hosts: deaths, splits, sleeping hosts, late and lost answers.

``live_case.py`` has the cases and what must not happen, ``live_host.py`` the simulated hosts, which
run the product's supervisors, ``live_ranks.py`` their processes. One seed alone, with its trace:
``python -m tests.simulation.live_case 17``.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.simulation.live_case import THEMES, run_case
from tests.simulation.live_mutations import MUTATIONS, first_found
from tests.support import counts

SEEDS = 2_000
CHUNKS = 8
NIGHTLY_SEEDS = 10_000
FOUND_WITHIN = 60
"""Seeds that are tried until one finds a rule that is broken on purpose."""


def run(seeds: range) -> None:
    found: Counter[str] = Counter()
    try:
        for seed in seeds:
            run_case(seed, found)
    finally:
        table = counts.of("live")
        for what, count in found.items():
            table[what, "times"] += count


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_no_two_worlds_train_and_every_job_ends(chunk: int):
    run(range(chunk * SEEDS // CHUNKS, (chunk + 1) * SEEDS // CHUNKS))


@pytest.mark.nightly
@pytest.mark.parametrize("chunk", range(10))
def test_many_seeds(chunk: int):
    size = NIGHTLY_SEEDS // 10
    run(range(SEEDS + chunk * size, SEEDS + (chunk + 1) * size))


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_broken_rule_is_found(name: str):
    first = MUTATIONS[name][-1]
    assert first_found(name, range(first, first + FOUND_WITHIN)) is not None


@pytest.mark.parametrize("theme", THEMES)
def test_each_theme_has_its_faults(theme: str):
    found: Counter[str] = Counter()
    for seed in range(4):
        run_case(seed, found, theme)
    assert found["updates"] > 50
    assert found["restores"] > 3
    assert any(found[kind] for kind in THEMES[theme])


def test_a_seed_does_the_same_every_time():
    """In another process, too, where sets of names have another order."""
    code = (
        "from tests.simulation.live_case import run_case\n"
        "for seed in (1, 4, 7, 10, 13):\n"
        "    print(run_case(seed).trace)"
    )
    printed = [
        subprocess.run(
            [sys.executable, "-c", code], cwd=Path(__file__).parents[2], check=True, timeout=100,
            capture_output=True, env={**os.environ, "PYTHONHASHSEED": str(number)},
        ).stdout
        for number in (1, 2)
    ]  # fmt: skip
    assert printed[0] == printed[1]
    assert printed[0].strip()
