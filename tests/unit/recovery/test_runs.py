"""Who sends which blocks: the shared queue, without sockets, on a clock of its own."""

from __future__ import annotations

import random
import threading

import pytest

from tieredckpt.recovery.blocks import BlockTask
from tieredckpt.recovery.copies import CopyError
from tieredckpt.recovery.runs import (
    SLOW_LEAST_S,
    Run,
    Runs,
)

MIB = 1 << 20
BAD = CopyError("digest", damaged=True)
GONE = CopyError("no answer", damaged=False)


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def tasks_of(*blocks: int, size: int = 4 * MIB, together: int = 1) -> list[BlockTask]:
    """Tasks of up to ``together`` blocks that follow each other."""
    found: list[BlockTask] = []
    for block in blocks:
        last = found[-1] if found else None
        if last is not None and last.stop == block * size and last.count < together:
            found.pop()
            found.append(BlockTask(last.block, last.start, (block + 1) * size, (), size))
        else:
            found.append(BlockTask(block, block * size, (block + 1) * size, (), size))
    return found


def queue(
    tasks: list[BlockTask],
    donors: int = 1,
    refused: dict[int, set[int]] | None = None,
    clock: Clock | None = None,
) -> Runs:
    def not_there(task: BlockTask) -> frozenset[int]:
        return frozenset((refused or {}).get(task.block, ()))

    return Runs(tasks, donors, not_there, 2 * donors, clock or Clock())


def blocks_of(run: Run) -> list[int]:
    return [task.block for task in run.tasks]


def drain(runs: Runs, run: Run, count: int = 1 << 30) -> list[int]:
    """Claim and land up to ``count`` blocks."""
    found = []
    while len(found) < count and (task := runs.next_task(run)) is not None:
        runs.landed(run)
        found.append(task.block)
    return found


def test_a_donor_is_not_asked_for_what_it_does_not_have():
    runs = queue(tasks_of(*range(6)), donors=2, refused={2: {0}, 3: {0, 1}})
    first = runs.next_run(0)
    assert first is not None
    assert blocks_of(first) == [0, 1]
    second = runs.next_run(1)
    assert second is not None
    assert blocks_of(second) == [2]
    for run in (first, second):
        drain(runs, run)
        runs.done(run)
    third = runs.next_run(0)
    assert third is not None
    assert blocks_of(third) == [4, 5]
    drain(runs, third)
    runs.done(third)
    assert runs.next_run(0) is None
    assert runs.next_run(1) is None
    assert [task.block for task in runs.left()] == [3]


def test_a_bad_block_goes_to_the_other_donor_and_to_nobody_twice():
    runs = queue(tasks_of(0, 1), donors=2)
    run = runs.next_run(0)
    assert run is not None
    task = runs.next_task(run)
    assert task is not None
    runs.bad(run, [(task, BAD)])
    assert drain(runs, run) == [1]
    runs.done(run)
    assert runs.next_run(0) is None
    again = runs.next_run(1)
    assert again is not None
    task = runs.next_task(again)
    assert task is not None
    runs.bad(again, [(task, BAD)])
    runs.done(again)
    assert runs.next_run(1) is None
    assert [task.block for task in runs.left()] == [0]
    assert runs.failures == {0: {0: BAD, 1: BAD}}


def test_an_idle_donor_takes_half_of_what_another_has_not_begun():
    runs = queue(tasks_of(*range(16), size=1 * MIB), donors=2)
    one, two = runs.next_run(0), runs.next_run(0)
    assert one is not None
    assert two is not None
    assert drain(runs, one, 1) == [0]
    stolen = runs.next_run(1)
    assert stolen is not None
    everything = [0, *blocks_of(one), *blocks_of(two), *blocks_of(stolen)]
    assert sorted(everything) == list(range(16)), "no block twice, and none lost"
    assert len(blocks_of(stolen)) >= 3


def test_a_donor_that_has_stopped_moving_is_cut():
    clock = Clock()
    runs = queue(tasks_of(*range(2)), donors=2, clock=clock)
    slow = runs.next_run(0)
    assert slow is not None
    cut = threading.Event()
    runs.connected(slow, cut.set)
    assert runs.next_task(slow) is not None
    found: list[Run | None] = []
    idle = threading.Thread(target=lambda: found.append(runs.next_run(1)))
    idle.start()
    assert not cut.wait(0.3), "it has its time"
    clock.now_s += SLOW_LEAST_S + 0.1
    assert cut.wait(30)
    assert not found, "the block is still being written by its owner"
    assert runs.next_task(slow) is None
    runs.failed(slow, GONE, final=False)
    idle.join(30)
    assert found[0] is not None
    assert blocks_of(found[0]) == [0, 1]


def test_nobody_is_cut_for_a_donor_that_cannot_help():
    clock = Clock()
    runs = queue(tasks_of(0), donors=2, refused={0: {1}}, clock=clock)
    slow = runs.next_run(0)
    assert slow is not None
    cut = threading.Event()
    runs.connected(slow, cut.set)
    runs.next_task(slow)
    clock.now_s += 1000
    idle = threading.Thread(target=runs.next_run, args=(1,))
    idle.start()
    assert not cut.wait(0.3)
    runs.landed(slow)
    runs.done(slow)
    idle.join(30)
    assert not idle.is_alive()


@pytest.mark.parametrize("seed", range(20))
def test_each_block_lands_once_whatever_fails(seed: int):
    """Threads that draw what happens: blocks are bad here and there, connections break."""
    rng = random.Random(seed)
    donors = rng.choice([1, 2, 3])
    blocks = sorted(rng.sample(range(300), rng.choice([1, 40, 200])))
    bad = {d: {b for b in blocks if rng.random() < 0.1} for d in range(donors)}
    tasks = tasks_of(*blocks, size=rng.choice([64 << 10, 1 * MIB]), together=rng.choice([1, 16]))
    runs = queue(tasks, donors=donors)
    landed: list[int] = []
    lock = threading.Lock()

    def work(donor: int, seed: int) -> None:
        mine = random.Random(seed)
        while (run := runs.next_run(donor)) is not None:
            runs.connected(run, lambda: None)
            broken = False
            while not broken and (task := runs.next_task(run)) is not None:
                broken = mine.random() < 0.03
                if broken:
                    runs.failed(run, GONE, final=False)
                    continue
                with lock:
                    landed.extend(b for b in task.blocks if b not in bad[donor])
                lost = [each for each in task.split() if each.block in bad[donor]]
                if lost:
                    runs.bad(run, [(each, BAD) for each in lost])
                else:
                    runs.landed(run)
            if not broken:
                runs.done(run)

    threads = [
        threading.Thread(target=work, args=(n % donors, 1000 * seed + n)) for n in range(2 * donors)
    ]
    for each in threads:
        each.start()
    for each in threads:
        each.join(60)
        assert not each.is_alive()
    left = [block for task in runs.left() for block in task.blocks]
    assert sorted([*landed, *left]) == blocks
    if not runs.out:
        assert set(left) == set.intersection(*bad.values())
