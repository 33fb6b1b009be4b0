"""Who may rule, win, vouch and free: the real agents under partitions, restarts and old hosts.

``authority_world.py`` has the cases, ``authority_oracle.py`` what must not happen,
``authority_adapter.py`` all calls of the product. One seed alone, with its trace:
``python -m tests.simulation.authority_world 17``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

import pytest

from tests.simulation import authority_seam, authority_seeds
from tests.simulation.authority_adapter import simulated
from tests.simulation.authority_oracle import Violation
from tests.simulation.authority_world import CALM, CROWDED, THEMES, run_case
from tests.simulation.repeated import printed_by_each_process
from tests.support import counts

SEEDS = range(80)
CROWDED_SEEDS = range(CROWDED, CROWDED + 20)
FULL_SEEDS = 200
NIGHTLY_SEEDS = 100_000
CALM_SEEDS = 20
ONCE_BROKEN = (
    335, 765, 3450, 3468, 4001, 4535, 5231, 8976, 10993, 18795, 20992, 21301, 31439, 33302, 51776,
    53010, 57645, 64340, 68525, 75732, 88786, 1050210, 1051101, 1051647, 1052473, 1052668, 7534,
    9577, 10225, 19179, 24311, 26660, 37760, 66646, 93805, 100440, 91110, 96002,
    52968,
)  # fmt: skip
"""Seeds that this simulation has found something with."""


@pytest.fixture(autouse=True)
def _on_simulated_hosts() -> Iterator[None]:
    with simulated():
        yield


def run(seeds: Iterable[int]) -> Counter[str]:
    found: Counter[str] = Counter()
    try:
        for seed in seeds:
            run_case(seed, found)
    finally:
        note(found)
    return found


def note(found: Counter[str]) -> None:
    table = counts.of("authority")
    for what, count in found.items():
        table[what, "times"] += count


def test_every_promise_is_kept():
    """While much happens: else nothing that is not found would mean anything."""
    found: Counter[str] = Counter()
    themes = {run_case(seed, found).theme for seed in SEEDS}
    note(found)
    assert themes == set(THEMES)
    wanted = {
        "main saved", "main loaded", "side loaded", "looker loaded", "purge",
        "cut_off", "cut_host", "die", "forward", "revive", "kill_agent", "bucket_slow",
    }  # fmt: skip
    assert wanted <= found.keys(), wanted - found.keys()
    # A job that always stops with an error would keep every promise.
    assert found["main loaded"] > 2 * found["main stopped"]
    assert found["main saved"] > found["save"] / 2


def test_every_promise_is_kept_where_hosts_have_more_ranks():
    """Some of which outlive their job for a while; the ranks tell of hosts of earlier jobs."""
    run(CROWDED_SEEDS)


def test_promises_that_were_broken():
    assert run(ONCE_BROKEN)["side saved"] > 5


@pytest.mark.full
def test_more_seeds():
    run(range(SEEDS.stop, FULL_SEEDS))
    run(range(CROWDED_SEEDS.stop, CROWDED + 40))


@pytest.mark.nightly
@pytest.mark.timeout(4 * 3600)
def test_many_more_seeds():
    """On all cores."""
    bad: dict[int, Violation] = {}
    crowded = range(CROWDED + 40, CROWDED + NIGHTLY_SEEDS // 10)
    for seeds in (range(FULL_SEEDS, NIGHTLY_SEEDS), crowded):
        for happened, violated in authority_seeds.search(seeds):
            note(happened)
            bad |= dict(violated)
    if bad:
        first = bad[min(bad)]
        first.add_note(f"the first of {len(bad)} seeds: {sorted(bad)[:100]}")
        raise first


def test_nothing_is_found_where_nothing_happens():
    """One job that saves and restarts, on links that work: each save is told as saved, and the
    oracle has nothing to say.
    """
    found: Counter[str] = Counter()
    for seed in range(CALM_SEEDS):
        run_case(seed, found, theme=CALM)
    assert found["main saved"] >= 10 * CALM_SEEDS
    assert found["main loaded"] >= 3 * CALM_SEEDS
    wrong = {"main refused", "main stopped", "save failed", "not written"}
    assert not wrong & found.keys(), found


@pytest.mark.full
def test_a_seed_does_the_same_every_time():
    code = (
        "from tests.simulation.authority_world import *\n"
        "with simulated():\n"
        "    for seed in range(24):\n"
        "        try:\n"
        "            print(*run_case(seed).trace, sep='\\n')\n"
        "        except Violation as found:\n"
        "            print(*found.trace, found, sep='\\n')\n"
    )
    assert printed_by_each_process(code).count("a case of the theme") == 24


@pytest.mark.full
def test_all_that_is_replaced_is_put_back():
    from tieredckpt.agent import namespace
    from tieredckpt.agent.cluster import members
    from tieredckpt.agent.peering import peering

    assert namespace.TierWorker is authority_seam.Worker
    with simulated():
        assert members.PeerClient is authority_seam.Client
    assert peering.Exchange is authority_seam.SimExchange
