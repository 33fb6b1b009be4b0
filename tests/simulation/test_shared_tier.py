"""The protocol of a tier that several hosts share, over a simulated store. See shared_world.py.

One seed alone, with its requests: ``python -m tests.simulation.shared_world 17``.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from tests.simulation.shared_mutations import (
    MUTATIONS,
    NOT_VISIBLE,
    scenes_until_found,
    seeds_until_found,
)
from tests.simulation.shared_scenes import cases
from tests.simulation.shared_world import Broken, run_case

SEEDS = 60
FULL_SEEDS = 200
NIGHTLY_SEEDS = 100_000
NIGHTLY_MUTATION_SEEDS = 3000
EVERY = 64
"""One of so many pairs of places of each race."""

FOUND_IN = {
    "a pruner does not look again after its notice": "pinned while a pruner sleeps",
    "a pruner looks before its notice": "pinned while a pruner sleeps",
    "a refused manifest counts as committed": "given up while it comes",
    "the manifest is put without If-None-Match": "given up while it comes",
    "the pending manifest comes after the segments": "given up while it comes",
    "what was decided is left alone": "a zombie prunes",
    "who attaches finishes what others left": "a zombie attaches",
    "who claims stops no deletion": "a zombie prunes",
    "who pins asks for no verdict": "pinned while a pruner sleeps",
    "who pins stops no deletion": "pinned while a pruner sleeps",
    "who takes back replaces what is there": "taken back while a pruner empties",
}
"""Which scene finds a mutation, where all scenes before it would take a second or more."""


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def test_what_is_visible_is_restorable_and_stays():
    for seed in range(SEEDS):
        run_case(seed)


@pytest.mark.full
def test_more_seeds():
    for seed in range(SEEDS, FULL_SEEDS):
        run_case(seed)


def test_narrow_windows():
    for name, play in cases(every=EVERY):
        try:
            play()
        except Broken as error:
            raise AssertionError(f"{name}: {error}") from error


@pytest.mark.parametrize("name", sorted(set(MUTATIONS) - NOT_VISIBLE))
def test_what_is_broken_on_purpose_is_found(name: str):
    found, how = scenes_until_found(name, every=EVERY, only=FOUND_IN.get(name, ""))
    if not found and name in FOUND_IN:
        found, how = scenes_until_found(name, every=EVERY)
        pytest.fail(f"not found by the scene of FOUND_IN: write another one there: {how}")
    assert found, how


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_all_narrow_windows():
    for name, play in cases():
        try:
            play()
        except Broken as error:
            raise AssertionError(f"{name}: {error}") from error


@pytest.mark.nightly
@pytest.mark.timeout(2 * 3600)
def test_many_more_seeds():
    for seed in range(FULL_SEEDS, NIGHTLY_SEEDS):
        run_case(seed)


@pytest.mark.nightly
@pytest.mark.timeout(2 * 3600)
@pytest.mark.parametrize("name", sorted(NOT_VISIBLE))
def test_what_cannot_be_seen_is_not_seen(name: str):
    found, how = seeds_until_found(name, NIGHTLY_MUTATION_SEEDS)
    assert found is None, f"docs/understand/testing.md says why it does no harm, and it does: {how}"
