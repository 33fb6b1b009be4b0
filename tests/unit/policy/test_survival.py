"""The probabilities in docs/operate/placement.md: formulas against counting, and against trying."""

from __future__ import annotations

import itertools
import math
import re
from pathlib import Path
from random import Random

import pytest

from benchmarks.survival import (
    groups_of,
    ring_of,
    survival,
    survived_by_groups,
    survived_by_ring,
    table,
    tried,
)

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize("hosts", range(4, 12))
def test_formulas_count_what_is_survived(hosts: int, replicas: int):
    for lost in range(hosts + 1):
        for sets, formula in ((groups_of, survived_by_groups), (ring_of, survived_by_ring)):
            of = sets(hosts, replicas)
            survived = sum(
                not any(each <= set(gone) for each in of)
                for gone in itertools.combinations(range(hosts), lost)
            )
            if lost or sets is groups_of:
                assert formula(hosts, replicas, lost) == survived, (sets, lost)


@pytest.mark.parametrize("hosts", [8, 64, 1000])
@pytest.mark.parametrize("replicas", [1, 2])
def test_drawn_losses_agree(hosts: int, replicas: int):
    random, trials = Random(hosts + replicas), 4000
    for lost in (2, 3, 4):
        exact = survival(hosts, replicas, lost)
        for sets, expected in zip((groups_of, ring_of), exact, strict=True):
            share = tried(sets(hosts, replicas), hosts, lost, trials, random)
            deviation = math.sqrt(expected * (1 - expected) / trials)
            assert abs(share - expected) <= 5 * deviation + 1e-12


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_groups_are_never_worse_than_a_ring(replicas: int):
    for hosts in range(replicas + 1, 60):
        for lost in range(1, min(hosts, 6)):
            ours, ring = survival(hosts, replicas, lost)
            assert ours >= ring - 1e-12, (hosts, lost)


def test_the_page_has_the_table():
    page = (ROOT / "docs" / "operate" / "placement.md").read_text("utf-8")
    rows = [
        re.split(r"\s*\|\s*", line)[1:7]
        for line in page.splitlines()
        if line[:3] == "| 1" or line[:3] in ("| 8", "| 6", "| 2")
    ]
    expected = [re.split(r"\s*\|\s*", line)[1:7] for line in table()[2:]]
    assert rows == expected
