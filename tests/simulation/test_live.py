"""Live recovery on several hosts: deaths, splits, sleeping hosts, late and lost answers.

``live_case.py`` has the cases and what must not happen, ``live_host.py`` the simulated hosts, which
run the product's supervisors, ``live_ranks.py`` their processes. One seed alone, with its trace:
``python -m tests.simulation.live_case 17``.
"""

from __future__ import annotations

from collections import Counter

import pytest

from tests.simulation.known_seeds import check_known_seed
from tests.simulation.live_case import THEMES, run_case
from tests.simulation.live_mutations import MUTATIONS, first_found
from tests.simulation.repeated import printed_by_each_process
from tests.support import counts

SEEDS = 200
FULL_SEEDS = 2_000
NIGHTLY_SEEDS = 10_000
LONG = ["voters change at once"]
"""Mutations whose seed takes ten seconds: it waits in vain for the end of a job."""


def run(seeds: range) -> None:
    found: Counter[str] = Counter()
    try:
        for seed in seeds:
            run_case(seed, found)
    finally:
        table = counts.of("live")
        for what, count in found.items():
            table[what, "times"] += count


def test_no_two_worlds_train_and_every_job_ends():
    run(range(SEEDS))


@pytest.mark.full
@pytest.mark.parametrize("chunk", range(4))
def test_more_seeds(chunk: int):
    run(range(SEEDS, FULL_SEEDS)[chunk::4])


@pytest.mark.nightly
@pytest.mark.parametrize("chunk", range(10))
def test_many_seeds(chunk: int):
    run(range(FULL_SEEDS, FULL_SEEDS + NIGHTLY_SEEDS)[chunk::10])


@pytest.mark.parametrize(
    "name",
    [each for each in MUTATIONS if each not in LONG]
    + [pytest.param(each, marks=pytest.mark.full) for each in LONG],
)
def test_a_broken_rule_is_found(name: str):
    check_known_seed(MUTATIONS[name][-1], lambda seeds: first_found(name, seeds), "MUTATIONS")


@pytest.mark.full
@pytest.mark.parametrize("theme", THEMES)
def test_each_theme_has_its_faults(theme: str):
    found: Counter[str] = Counter()
    for seed in range(4):
        run_case(seed, found, theme)
    assert found["updates"] > 50
    assert found["restores"] > 3
    assert any(found[kind] for kind in THEMES[theme])


@pytest.mark.full
def test_a_seed_does_the_same_every_time():
    code = (
        "from tests.simulation.live_case import run_case\n"
        "for seed in (1, 4, 7, 10, 13):\n"
        "    print(run_case(seed).trace)"
    )
    assert printed_by_each_process(code).strip()
