"""Blocks from other hosts: real servers on loopback, some of them broken, slow or lying."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.donors import Donor, Donors, donors_of, once
from tests.unit.recovery.test_fetch import (
    BLOCK,
    DATA,
    NUM_BLOCKS,
    REF,
    SEGMENT,
    SIZES,
    make_segment,
)
from tieredckpt.errors import IntegrityError, TieredCkptError, TierUnavailableError
from tieredckpt.recovery import fetch, runs
from tieredckpt.recovery.blocks import Range
from tieredckpt.recovery.evidence import nearest_first

ALL = len(DATA)


@pytest.fixture(autouse=True)
def short_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small segment has many runs, and a retry costs no second."""
    monkeypatch.setattr(runs, "RUN_BYTES_LEAST", 4 * BLOCK)
    monkeypatch.setattr(runs, "STEAL_TASKS_LEAST", 2)
    monkeypatch.setattr("tieredckpt.recovery.blocks.UNIT_BYTES", 2 * BLOCK)
    # A busy machine is no slow donor: which one gives what is compared.
    monkeypatch.setattr(runs, "SLOW_LEAST_S", 600.0)
    monkeypatch.setattr(fetch, "RETRY_PAUSES_S", (0.01,))


@pytest.fixture
def world() -> Iterator[Donors]:
    with donors_of(REF, SEGMENT) as found:
        yield found


def fetch_all(world: Donors) -> dict[str, int]:
    """Everything comes, bit-exact; returns the bytes by place."""
    with world.fetcher() as fetcher:
        into = bytearray(ALL)
        fetcher.fetch([Range(0, ALL, memoryview(into))])
        assert into == DATA
        assert sum(fetcher.report.bytes_by_place.values()) == ALL
        assert sum(fetcher.report.bytes_by_tier.values()) == ALL
        return fetcher.report.bytes_by_place


def fails(world: Donors) -> TieredCkptError:
    with world.fetcher() as fetcher, pytest.raises(TieredCkptError) as caught:
        fetcher.fetch([Range(0, ALL, memoryview(bytearray(ALL)))])
    return caught.value


def size_of(*blocks: int) -> int:
    return sum(min(BLOCK, ALL - block * BLOCK) for block in blocks)


# --- intact copies --------------------------------------------------------------------------------


def test_all_of_it_from_one_host(world: Donors):
    world.add("b")
    assert fetch_all(world) == {"memory on b": ALL}
    assert world.damage == []


@pytest.mark.parametrize("seed", range(6))
def test_random_ranges(world: Donors, seed: int):
    """Overlapping, tiny, empty, ending anywhere, many in one block."""
    rng = random.Random(seed)
    for host in "bc"[: rng.choice([1, 2])]:
        world.add(host)
    ranges: list[Range] = []
    for _ in range(rng.choice([1, 3, 40])):
        start = rng.randrange(ALL + 1)
        stop = min(ALL, start + rng.choice([0, 1, 63, 5000, BLOCK, 300_000, ALL]))
        ranges.append(Range(start, stop, memoryview(bytearray(stop - start))))
    with world.fetcher() as fetcher:
        fetcher.fetch(ranges)
        for each in ranges:
            assert bytes(each.dest) == DATA[each.start : each.stop]
        touched = {
            block for r in ranges if r.stop > r.start
            for block in range(r.start // BLOCK, (r.stop - 1) // BLOCK + 1)
        }  # fmt: skip
        assert sum(fetcher.report.bytes_by_place.values()) == size_of(*touched)


def test_two_donors_share_the_load(world: Donors):
    """Neither goes on before both were asked for data."""
    both = threading.Barrier(2)
    for host in "bc":
        donor = world.add(host, stall_s=30)
        first = threading.Event()

        def hook(offset: int, into: memoryview, first: threading.Event = first) -> None:
            if offset < ALL - 2 * BLOCK and not first.is_set():  # no footer
                first.set()
                both.wait(20)

        donor.hook = hook
    with world.fetcher() as fetcher:
        fetcher.footer()
    by_place = fetch_all(world)
    assert by_place.keys() == {"memory on b", "memory on c"}


def test_more_donors_than_connections(world: Donors):
    for number in range(11):
        world.add(f"h{number}")
    assert sum(fetch_all(world).values()) == ALL


def test_nearest_first_and_the_own_host_without_a_connection(world: Donors):
    world.add_here("memory")
    donor = world.add("b")
    assert fetch_all(world) == {"memory on here": ALL}
    assert donor.asked == 0


# --- damage ---------------------------------------------------------------------------------------


def test_a_bad_block_costs_that_block(world: Donors):
    world.add("b").flip(REF.id, 5 * BLOCK + 7)
    world.add("c").flip(REF.id, 9 * BLOCK)
    fetch_all(world)
    # Who was not asked for its bad block has not shown it.
    assert {(name, blocks) for name, blocks, _ in world.damage} <= {
        ("memory on b", (5,)), ("memory on c", (9,)),
    }  # fmt: skip
    assert all("digest is" in reason for _, _, reason in world.damage)


def test_only_bad_blocks_come_from_the_disk_of_another_host(world: Donors):
    world.add("b").flip(REF.id, 5 * BLOCK + 7, 6 * BLOCK, 20 * BLOCK)
    world.add("c", tier="nvme")
    lost = size_of(5, 6, 20)
    assert fetch_all(world) == {"memory on b": ALL - lost, "nvme on c": lost}
    assert [(name, blocks) for name, blocks, _ in world.damage] == [("memory on b", (5, 6, 20))]


def test_local_and_remote_are_mixed_per_block(world: Donors):
    """Own memory, then another host's memory, then own disk, then another host's disk."""
    data = bytearray(SEGMENT)
    for block in (1, 2, 3):
        data[block * BLOCK] ^= 1
    world.add_here("memory", bytes(data))
    world.add("b").flip(REF.id, 2 * BLOCK, 3 * BLOCK)
    data[2 * BLOCK] ^= 1
    world.add_here("nvme", bytes(data))
    world.add("c", tier="nvme")
    assert fetch_all(world) == {
        "memory on here": ALL - size_of(1, 2, 3),
        "memory on b": size_of(1),
        "nvme on here": size_of(2),
        "nvme on c": size_of(3),
    }
    assert {(name, blocks) for name, blocks, _ in world.damage} == {
        ("memory on here", (1, 2, 3)),
        ("memory on b", (2, 3)),
        ("nvme on here", (3,)),
    }


def test_other_bytes_under_this_name(world: Donors):
    other = make_segment(BLOCK, [*SIZES[:-1], SIZES[-1] - 1])
    assert len(other) == len(SEGMENT)
    world.add("b", other)
    world.add("c")
    assert sum(fetch_all(world).values()) == ALL
    assert any("the manifest has root" in reason for _, _, reason in world.damage)


def test_bytes_that_change_on_the_way(world: Donors):
    def spoil(offset: int, into: memoryview) -> None:
        if offset < ALL:
            into[0] ^= 1

    world.add("b").hook = spoil
    world.add("c")
    assert fetch_all(world)["memory on c"] > 0
    assert all(name == "memory on b" for name, _, _ in world.damage)


@pytest.mark.parametrize("size", [0, 1, BLOCK, 7 * BLOCK + 5000, ALL - 1, ALL])
@pytest.mark.parametrize("known", [True, False])
def test_a_truncated_copy_gives_what_it_has(world: Donors, size: int, known: bool):
    world.add("b", SEGMENT[:size], known_size=size if known else len(SEGMENT))
    world.add("c", tier="nvme")
    whole = size // BLOCK * BLOCK if size < ALL else ALL
    assert fetch_all(world).get("memory on b", 0) == whole
    assert ("memory on b", ()) in {(name, blocks) for name, blocks, _ in world.damage}


def test_a_copy_that_is_truncated_while_it_is_sent(world: Donors):
    donor = world.add("b")
    once(donor, 9 * BLOCK, lambda: os.truncate(donor.path(REF.id), 10 * BLOCK))
    world.add("c", tier="nvme")
    by_place = fetch_all(world)
    assert by_place["nvme on c"] > 0


def test_no_good_copy_of_a_block_names_every_failure(world: Donors):
    for host in "bc":
        world.add(host).flip(REF.id, 7 * BLOCK + 1)
    world.add("d")
    world.unknown.add("d")
    error = fails(world)
    assert isinstance(error, TierUnavailableError), "d may have it"
    assert error.blocks == (7,)
    text = str(error)
    assert "memory on b: digest is" in text
    assert "memory on c: digest is" in text
    assert "memory on d: the address of host d is not known" in text


def test_a_quarantined_block_is_asked_for_last_and_used_if_it_is_good(world: Donors):
    world.add_here("nvme", bad_blocks=(3,))
    world.add("b", tier="nvme").flip(REF.id, 3 * BLOCK, tier="nvme")
    with world.fetcher() as fetcher:
        into = bytearray(ALL)
        fetcher.fetch([Range(0, ALL, memoryview(into))])
        assert into == DATA
    assert ("nvme on b", (3,)) in {(name, blocks) for name, blocks, _ in world.damage}


# --- donors that break ----------------------------------------------------------------------------


def stop(donor: Donor) -> threading.Thread:
    """End the donor's server, from another thread: it waits for the one that sends."""
    thread = threading.Thread(target=donor.server.stop)
    thread.start()
    return thread


def test_a_donor_that_dies_in_the_middle_of_a_run(world: Donors):
    donor = world.add("b")
    threads: list[threading.Thread] = []
    once(donor, 6 * BLOCK, lambda: threads.append(stop(donor)))
    world.add("c")
    by_place = fetch_all(world)
    assert by_place["memory on c"] > 0
    assert world.damage == []
    for each in threads:
        each.join(30)


def test_the_only_donor_dies(world: Donors):
    donor = world.add("b")
    threads: list[threading.Thread] = []
    once(donor, 6 * BLOCK, lambda: threads.append(stop(donor)))
    error = fails(world)
    assert isinstance(error, TierUnavailableError)
    assert "memory on b" in str(error)
    assert world.damage == []
    for each in threads:
        each.join(30)


def test_connections_that_break_again_and_again_cost_no_block(world: Donors):
    """The copy is the only one: what came before each break counts."""
    donor = world.add("b")
    lock = threading.Lock()
    broken: set[int] = set()  # each place once: three in a row that bring nothing end the donor

    def hook(offset: int, into: memoryview) -> None:
        with lock:
            breaks = offset % (8 * BLOCK) == 0 and 0 < offset < ALL and offset not in broken
            broken.update([offset] if breaks else ())
        if breaks:
            raise IntegrityError("the medium hiccups")  # after the head: the connection is cut

    donor.hook = hook
    assert fetch_all(world) == {"memory on b": ALL}
    assert len(broken) >= 2


@pytest.mark.parametrize("breaks", [runs.STRIKES_MAX - 1, runs.STRIKES_MAX])
def test_a_donor_that_only_breaks_is_left_after_so_many_times(
    world: Donors, monkeypatch: pytest.MonkeyPatch, breaks: int
):
    """Each connection ends before its first block; one less than the limit, and all comes."""
    monkeypatch.setattr(fetch, "RETRY_PAUSES_S", ())  # it is asked in one round
    world.streams = 1
    donor = world.add("b")
    broken = 0

    def hook(offset: int, into: memoryview) -> None:
        nonlocal broken
        if broken < breaks and offset < ALL - 2 * BLOCK:  # no footer
            broken += 1
            raise IntegrityError("the medium hiccups")  # after the head: the connection is cut

    donor.hook = hook
    with world.fetcher() as fetcher:
        fetcher.footer()
        donor.asked = 0
        into = bytearray(ALL)
        wanted = [Range(0, ALL, memoryview(into))]
        if breaks < runs.STRIKES_MAX:
            fetcher.fetch(wanted)
            assert into == DATA
            assert donor.asked > breaks
        else:
            with pytest.raises(TierUnavailableError, match="memory on b"):
                fetcher.fetch(wanted)
            assert donor.asked == runs.STRIKES_MAX
    assert broken == breaks
    assert world.damage == []


def test_a_donor_that_stalls_is_left_behind(world: Donors, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(runs, "SLOW_LEAST_S", 0.3)
    stalled = world.add("b", stall_s=60)
    release = threading.Event()

    def hook(offset: int, into: memoryview) -> None:
        if 2 * BLOCK <= offset < ALL - 2 * BLOCK:  # no footer
            release.wait(60)

    stalled.hook = hook
    world.add("c")
    begun_s = time.monotonic()
    by_place = fetch_all(world)
    release.set()
    assert by_place["memory on c"] > ALL // 2
    assert time.monotonic() - begun_s < 40, "the other one's deadline was waited for"
    assert world.damage == []


def test_the_only_donor_stalls(world: Donors):
    stalled = world.add("b", stall_s=0.3)
    release = threading.Event()

    def hook(offset: int, into: memoryview) -> None:
        if 2 * BLOCK <= offset < ALL - 2 * BLOCK:  # no footer
            release.wait(60)

    stalled.hook = hook
    error = fails(world)
    release.set()
    assert isinstance(error, TierUnavailableError)
    assert "stalled" in str(error)


def test_a_host_that_nobody_can_find(world: Donors):
    world.add("b")
    world.unknown.add("b")
    error = fails(world)
    assert isinstance(error, TierUnavailableError)
    assert "memory on b: the address of host b is not known" in str(error)
    world.add("c")
    assert fetch_all(world) == {"memory on c": ALL}


def test_a_host_that_is_back_before_the_load_gives_up(
    world: Donors, monkeypatch: pytest.MonkeyPatch
):
    donor = world.add("b")
    with world.fetcher() as fetcher:
        fetcher.footer()
        world.unknown.add("b")
        pauses: list[float] = []

        def sleep(seconds: float) -> None:
            pauses.append(seconds)
            world.unknown.discard("b")

        monkeypatch.setattr(fetch.time, "sleep", sleep)
        into = bytearray(ALL)
        fetcher.fetch([Range(0, ALL, memoryview(into))])
        assert into == DATA
    assert pauses == [0.01]
    assert donor.asked > 1


# --- the law --------------------------------------------------------------------------------------

damage = st.frozensets(st.integers(0, NUM_BLOCKS - 1), max_size=NUM_BLOCKS)
few = st.one_of(damage, st.frozensets(st.integers(0, 3), max_size=4))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(bad=st.tuples(few, few, few), known=st.booleans())
def test_it_comes_bit_exact_if_and_only_if_each_block_has_a_good_copy(
    world: Donors, bad: tuple[frozenset[int], ...], known: bool
):
    """Three copies, one of them here: any blocks of any of them may be damaged, known or not."""
    world.sources.clear()
    world.damage.clear()
    for place, blocks in zip(("here", "b", "c"), bad, strict=True):
        data = bytearray(SEGMENT)
        for block in blocks:
            data[block * BLOCK + 1] ^= 0x10
        told = tuple(sorted(blocks)) if known else ()
        if place == "here":
            world.add_here("memory", bytes(data), bad_blocks=told)
        else:
            world.add(place, bytes(data), bad_blocks=told)
    lost = frozenset.intersection(*bad)
    if not lost:
        assert sum(fetch_all(world).values()) == ALL
        return
    error = fails(world)
    assert isinstance(error, IntegrityError)
    assert set(error.blocks) == lost


# --- object stores --------------------------------------------------------------------------------


def test_a_store_is_asked_after_all_hosts_and_for_as_many_streams_as_it_wants(
    world: Donors, monkeypatch: pytest.MonkeyPatch
):
    """Who is asked, and how often at once, of a server that stands for the store."""
    monkeypatch.setattr(runs, "RUN_BYTES_LEAST", 2 * BLOCK)  # more runs than streams
    store = world.add("s", tier="store")
    world.streams = 10
    busy, most, lock = 0, 0, threading.Lock()
    full = threading.Event()

    def hook(offset: int, into: memoryview) -> None:
        nonlocal busy, most
        if offset >= ALL - 2 * BLOCK:
            return  # the footer
        with lock:
            busy += 1
            most = max(most, busy)
            if busy == 10:
                full.set()
        full.wait(20)
        with lock:
            busy -= 1

    store.hook = hook
    assert fetch_all(world) == {"store": ALL}
    assert most == 10
    store.hook = None
    world.add("b", tier="nvme")
    world.sources[:] = nearest_first(world.sources, world.here)
    store.asked = 0
    assert fetch_all(world) == {"nvme on b": ALL}
    assert store.asked == 0
