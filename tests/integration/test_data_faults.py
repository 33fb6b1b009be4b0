"""The data cache with loaders that fail, hang, use their memory again, or only go forward."""

from __future__ import annotations

import itertools
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    RandomSampler,
)
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

from tests.integration.test_data_cache import (
    Numbers,
    entries,
    held,
    ids,
    loader,
    options,
    plain,
    undisturbed,
    wait_for_ahead,
)
from tests.support.agent import wait_until
from tests.support.preloaded import context
from tieredckpt import data
from tieredckpt.data import batches as batches_module
from tieredckpt.data import entries as entries_module
from tieredckpt.engine import Engine
from tieredckpt.errors import UsageError, WaitError

pytestmark = [
    pytest.mark.usefixtures("served", "patient"),
    pytest.mark.filterwarnings("ignore:.set_vital. is deprecated:UserWarning"),  # of torchdata
]


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entries_module, "RESERVE_S", 60.0)


@pytest.fixture
def engine(runtime_dir: Path) -> Iterator[Engine]:
    with Engine.open(options(runtime_dir)) as engine:
        yield engine


def forward(count: int) -> list[list[int]]:
    """What ``plain()`` gives."""
    return ([list(range(n, n + 4)) for n in range(0, 20, 4)] * (count // 5 + 1))[:count]


# --- nothing wrong is delivered -------------------------------------------------------------------


class SameMemory:
    """A loader that gives the same tensor each time, with another content."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        batch = torch.zeros(4)
        for number in range(1000):
            yield batch.fill_(number)


def test_a_loader_may_use_its_memory_again(engine: Engine, runtime_dir: Path):
    batches = data.cached(SameMemory(), engine)
    first = next(batches)
    wait_for_ahead(runtime_dir, 4)
    found = [first, *itertools.islice(batches, 5)]
    assert [each.tolist() for each in found] == [[float(n)] * 4 for n in range(6)]
    batches.close()


class FailsOnce(Numbers):
    """Raises at row 9, once."""

    def __init__(self) -> None:
        super().__init__()
        self.fails = True

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == 9 and self.fails:
            self.fails = False
            raise OSError("for once")
        return super().__getitem__(index)


@pytest.mark.parametrize("ahead", [1, pytest.param(3, marks=pytest.mark.full)])
def test_a_loader_with_a_state_goes_on_where_it_failed(runtime_dir: Path, ahead: int):
    with Engine.open(options(runtime_dir, ahead=ahead)) as engine:
        batches = data.cached(loader(FailsOnce()), engine)
        found: list[list[int]] = []
        failures = 0
        while len(found) < 8:
            try:
                found += ids(batches, 1)
            except OSError:
                failures += 1
        assert failures == (ahead == 1) or failures <= 1
        assert found == undisturbed(8)
        batches.close()


def test_a_loader_without_a_state_fails_for_good(engine: Engine):
    own = DataLoader(FailsOnce(), batch_size=4, generator=torch.Generator())
    batches = data.cached(own, engine)
    assert ids(batches, 2) == forward(2)
    for _ in range(2):
        with pytest.raises(OSError, match="for once"):
            next(batches)
    batches.close()
    again = data.cached(plain(), engine, name="a loader made anew")
    again.load_state_dict(batches.state_dict())
    assert ids(again, 3) == forward(5)[2:]
    again.close()


def test_no_way_back_to_the_beginning_is_no_silent_one(engine: Engine, runtime_dir: Path):
    first = data.cached(loader(), engine)
    begin = first.state_dict()
    ids(first, 1)
    wait_for_ahead(runtime_dir, 4)
    first.close()
    again = data.cached(loader(), engine)
    again.load_state_dict(first.state_dict())
    assert ids(again, 9) == undisturbed(10)[1:]
    again.load_state_dict(begin)
    with pytest.raises(UsageError, match="cannot go back to its beginning: make a new one"):
        next(again)
    again.close()


def test_one_stream_is_open_once_in_a_process(engine: Engine):
    first = data.cached(loader(), engine)
    ids(first, 1)
    second = data.cached(loader(), engine)
    with pytest.raises(UsageError, match=r"another cached\(\) .* different names"):
        next(first)
    assert ids(second, 2) == undisturbed(2)
    second.close()
    with pytest.raises(UsageError, match="closed"):
        next(second)


def test_samplers_that_cannot_be_resumed_are_refused(engine: Engine):
    """Else a restart would go on with other rows."""
    sampler = RandomSampler(range(20), generator=torch.Generator())
    own: Any = StatefulDataLoader(Numbers(), sampler=sampler, generator=torch.Generator())
    with pytest.raises(UsageError, match=r"cannot resume a RandomSampler .* give shuffle=True"):
        data.cached(own, engine)
    own = DataLoader(Numbers(), sampler=RandomSampler(range(20)), generator=torch.Generator())
    with pytest.raises(UsageError, match="give the RandomSampler a generator of its own"):
        data.cached(own, engine)


def test_a_loader_that_was_used_is_refused(engine: Engine):
    for kind, message in ((StatefulDataLoader, "was used"), (DataLoader, "another cached")):
        own = kind(Numbers(), batch_size=4, generator=torch.Generator())
        first = data.cached(own, engine, name=kind.__name__)
        ids(first, 1)
        first.close()
        with pytest.raises(UsageError, match=f"{message}.*make a new one"):
            data.cached(own, engine, name=kind.__name__)
    resumed = loader()
    resumed.load_state_dict(loader().state_dict())
    with pytest.raises(UsageError, match="has a state: make a new one"):
        data.cached(resumed, engine)


class Restless(IterableDataset[int]):
    """Its iterator has no state; torchdata skips by a number that it doubles at each resume."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(400))


def test_a_loader_that_does_not_return_to_its_state_raises(engine: Engine, runtime_dir: Path):
    own = StatefulDataLoader(Restless(), batch_size=4, generator=torch.Generator())
    batches = data.cached(own, engine)
    expected = [list(range(n, n + 4)) for n in range(0, 400, 4)]
    states = [batches.state_dict()]
    for number in range(8):
        assert next(batches).tolist() == expected[number]
        states.append(batches.state_dict())
    for number in (1, 2, 1):  # the beginning, which it finds
        batches.load_state_dict(states[number])
        assert next(batches).tolist() == expected[number]
    batches.close()
    shutil.rmtree(runtime_dir / "data")
    own = StatefulDataLoader(Restless(), batch_size=4, generator=torch.Generator())
    batches = data.cached(own, engine)
    batches.load_state_dict(states[3])
    for _ in range(2):
        with pytest.raises(UsageError, match="implements load_state_dict wrongly"):
            next(batches)
    batches.close()


def distributed() -> tuple[StatefulDataLoader[Any], Callable[[int], None]]:
    """A loader that shows its state once it is asked for a batch."""
    dataset = Numbers()
    sampler = StatefulDistributedSampler(dataset, num_replicas=1, rank=0)
    own: Any = StatefulDataLoader(
        dataset, batch_size=4, sampler=sampler, generator=torch.Generator().manual_seed(1)
    )
    return own, sampler.set_epoch


def test_a_state_lets_another_host_check_a_loader_that_shows_its_state_late(
    engine: Engine, runtime_dir: Path
):
    own, on_epoch = distributed()
    batches = data.cached(own, engine, on_epoch=on_epoch)
    found, states = [], []
    for _ in range(9):
        found += ids(batches, 1)
        states.append(batches.state_dict())
    batches.load_state_dict(states[2])
    assert ids(batches, 6) == found[3:], "on this host"
    batches.close()
    shutil.rmtree(runtime_dir / "data")
    own, on_epoch = distributed()
    again = data.cached(own, engine, on_epoch=on_epoch)
    again.load_state_dict(states[3])
    assert ids(again, 5) == found[4:]
    again.close()


class BeginsAtTheSecondTry(StatefulDataLoader[Any]):
    """As if no process could be forked at first."""

    tries = 0

    def __iter__(self) -> Any:
        found = super().__iter__()
        self.tries += 1
        if self.tries == 1:
            raise OSError("for once")
        return found


def test_a_loader_that_cannot_begin_begins_with_the_same_batch(engine: Engine):
    generator = torch.Generator().manual_seed(1)
    own = BeginsAtTheSecondTry(Numbers(), batch_size=4, shuffle=True, generator=generator)
    batches = data.cached(own, engine)
    with pytest.raises(OSError, match="for once"):
        next(batches)
    assert ids(batches, 7) == undisturbed(7)
    batches.close()


def test_a_closed_one_stores_nothing(engine: Engine, runtime_dir: Path):
    begun, due = threading.Event(), threading.Event()

    def wait(index: int) -> None:
        if index == 8:
            begun.set()
            due.wait(60)

    own = DataLoader(Slow(wait), batch_size=4, generator=torch.Generator())
    batches = data.cached(own, engine)
    ids(batches, 2)
    assert begun.wait(60)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batches_module, "CLOSE_S", 0.1)
        batches.close()
        with pytest.raises(WaitError, match=r"another cached.* still loads"):
            data.cached(DataLoader(Slow(wait), batch_size=4, generator=torch.Generator()), engine)
    due.set()
    batches._thread.join(60)
    assert 3 not in entries(runtime_dir)


def test_an_error_of_before_a_roll_back_is_forgotten(engine: Engine, runtime_dir: Path):
    batches = data.cached(loader(FailsOnce()), engine)
    state = batches.state_dict()
    ids(batches, 1)
    wait_until(lambda: batches._failed or 4 in entries(runtime_dir))
    batches.load_state_dict(state)
    assert ids(batches, 8) == undisturbed(8)
    batches.close()


def test_what_cannot_be_read_now_is_not_deleted(
    engine: Engine, runtime_dir: Path, monkeypatch: pytest.MonkeyPatch
):
    first = data.cached(loader(), engine)
    ids(first, 1)
    wait_for_ahead(runtime_dir, 4)
    first.close()
    found = {step: path.stat().st_ino for step, path in entries(runtime_dir).items()}

    def refuse(*_: object) -> None:
        raise OSError(24, "too many open files")

    with held(first._store.folder), monkeypatch.context() as patch:
        again = data.cached(loader(), engine)
        again.load_state_dict(first.state_dict())
        patch.setattr(entries_module, "open_regular", refuse)
        assert ids(again, 1) == undisturbed(2)[1:]
        assert set(found) <= set(entries(runtime_dir))
        again.close()


# --- loaders that only go forward -----------------------------------------------------------------


def test_damage_costs_a_loader_that_only_goes_forward_time_only(engine: Engine, runtime_dir: Path):
    first = data.cached(plain(), engine)
    ids(first, 1)
    wait_for_ahead(runtime_dir, 4)
    first.close()
    again = data.cached(plain(), engine)
    again.load_state_dict(first.state_dict())
    assert ids(again, 1) == forward(2)[1:]
    wait_for_ahead(runtime_dir, 5)  # the loader has passed what is damaged now
    entries(runtime_dir)[3].unlink()
    os.truncate(entries(runtime_dir)[4], 100)
    assert ids(again, 8) == forward(10)[2:]
    again.close()


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(20))


def test_loaders_of_unknown_length(engine: Engine):
    for kind in (DataLoader, StatefulDataLoader):
        own = kind(Stream(), batch_size=4, generator=torch.Generator())
        batches = data.cached(own, engine, name=kind.__name__)
        assert [next(batches).tolist() for _ in range(7)] == forward(7)
        batches.close()


# --- entries that are in the way ------------------------------------------------------------------


def test_a_rank_that_finds_damage_waits_for_nobody(
    engine: Engine, runtime_dir: Path, monkeypatch: pytest.MonkeyPatch
):
    """The process that loads is past that step."""
    monkeypatch.setattr(batches_module, "WAIT_S", 1e6)
    first = data.cached(loader(), engine)
    ids(first, 1)
    wait_for_ahead(runtime_dir, 4)
    first.close()
    folder = first._store.folder
    with held(folder):
        again = data.cached(loader(), engine)
        again.load_state_dict(first.state_dict())
        os.truncate(entries(runtime_dir)[2], 100)
        assert ids(again, 3) == undisturbed(4)[1:]
        again.close()
    wait_until(lambda: 2 in entries(runtime_dir))


def test_one_late_batch_is_not_the_end_of_sharing(
    engine: Engine, runtime_dir: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(batches_module, "WAIT_S", 0.5)
    first = data.cached(loader(), engine)
    ids(first, 1)
    wait_for_ahead(runtime_dir, 4)
    first.close()
    again = data.cached(loader(), engine)
    again.load_state_dict(first.state_dict())
    with held(first._store.folder):
        assert ids(again, 6) == undisturbed(7)[1:]
        assert 9 not in entries(runtime_dir), "it loads no step but the next one"
    ids(again, 1)
    wait_for_ahead(runtime_dir, 11)
    again.close()


def test_a_purged_folder_is_made_again(engine: Engine, runtime_dir: Path):
    batches = data.cached(loader(), engine)
    expected = undisturbed(7)
    assert ids(batches, 2) == expected[:2]
    wait_for_ahead(runtime_dir, 5)
    shutil.rmtree(runtime_dir / "data" / "test")
    assert ids(batches, 5) == expected[2:]
    wait_for_ahead(runtime_dir, 10)
    assert (batches._store.folder / "lock").exists()
    batches.close()


def test_the_capacity_is_for_all_namespaces(runtime_dir: Path):
    with Engine.open(options(runtime_dir)) as engine:
        batches = data.cached(loader(), engine)
        ids(batches, 4)
        wait_for_ahead(runtime_dir, 7)
        batches.close()
    size = entries(runtime_dir)[1].stat().st_size
    other = {**options(runtime_dir, capacity=5 * size), "namespace": "other"}
    with Engine.open(other) as engine:
        batches = data.cached(loader(), engine)
        for expected in undisturbed(9):
            assert ids(batches, 1) == [expected]
        wait_until(lambda: not list(runtime_dir.glob("data/test/*/[0-9]*")))
        batches.close()


def test_steps_far_ahead_make_room_after_a_roll_back(runtime_dir: Path):
    with Engine.open(options(runtime_dir, behind=1000)) as engine:
        batches = data.cached(loader(), engine)
        early = batches.state_dict()
        expected = ids(batches, 12)
        wait_for_ahead(runtime_dir, 15)
        size = entries(runtime_dir)[1].stat().st_size
        batches.close()
    with Engine.open(options(runtime_dir, behind=1000, capacity=6 * size)) as engine:
        for step in range(1, 9):
            entries(runtime_dir)[step].unlink()
        batches = data.cached(loader(), engine)
        batches.load_state_dict(early)
        assert ids(batches, 4) == expected[:4]
        wait_until(lambda: set(entries(runtime_dir)) >= {4, 5, 6, 7})
        batches.close()


# --- loaders that hang ----------------------------------------------------------------------------


class Slow(Numbers):
    """A row waits for its event; its batch has the others."""

    def __init__(self, is_due: Callable[[int], object]) -> None:
        super().__init__()
        self._is_due = is_due

    def __getitem__(self, index: int) -> dict[str, Any]:
        self._is_due(index)
        return super().__getitem__(index)


def test_a_loader_that_hangs_raises_and_progress_is_no_hanging(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(batches_module, "LOAD_S", 2.0)
    monkeypatch.setattr(batches_module, "CLOSE_S", 0.1)
    done = threading.Event()
    own = DataLoader(
        Slow(lambda index: done.wait(60) if index == 19 else time.sleep(0.1)),
        batch_size=4,
        generator=torch.Generator(),
    )
    batches = data.cached(own, engine)
    skipped = {"step": 3, "mark": b"x", "state": (0, 3, None, None), "parts": 1}
    batches.load_state_dict(skipped)
    assert ids(batches, 1) == forward(4)[3:], "16 rows took longer than the limit of one batch"
    with pytest.raises(WaitError, match="step 5 was not loaded"):
        next(batches)
    done.set()
    assert ids(batches, 1) == forward(5)[4:]
    batches.close()


def begins_to_hang(runtime_dir: str) -> None:
    batches_module.CLOSE_S = 0.2
    engine = Engine.open(options(Path(runtime_dir)))
    own = ({"n": n} if n < 2 else time.sleep(600) for n in range(3))
    batches = data.cached(own, engine, name="x")
    assert [next(batches), next(batches)] == [{"n": 0}, {"n": 1}]


def test_a_loader_that_hangs_does_not_keep_the_process(runtime_dir: Path):
    script = context.Process(target=begins_to_hang, args=(str(runtime_dir),))
    script.start()
    script.join(100)
    assert script.exitcode == 0
