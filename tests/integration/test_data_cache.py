"""The data cache: batches outlive their process, are shared, verified, bounded, never wrong."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import random
import shutil
import signal
import warnings
from collections import namedtuple
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

from benchmarks.engines import agents
from tests.conftest import stop_processes_of
from tests.support import live_small
from tests.support.agent import fork_agents, wait_until
from tests.support.live import Fault, Faults, stopped_agent, supervised
from tests.support.preloaded import context
from tests.support.ranks import run_ranks
from tests.support.states import config, save
from tieredckpt import data, per_rank
from tieredckpt.data import batches as batches_module
from tieredckpt.data import entries as entries_module
from tieredckpt.engine import Engine
from tieredckpt.errors import UsageError
from tieredckpt.rpc.agent_client import AgentClient

pytestmark = [
    pytest.mark.usefixtures("served", "patient"),
    pytest.mark.filterwarnings("ignore:.set_vital. is deprecated:UserWarning"),  # of torchdata
]
ROWS = 20
"""Five batches of four are an epoch."""


class Numbers(Dataset[dict[str, Any]]):
    """Rows that are functions of their number; ``fetched`` has what this process computed."""

    def __init__(self, rows: int = ROWS, scale: float = 1.0) -> None:
        self.rows, self.scale = rows, scale
        self._fetched: list[int] = []

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> dict[str, Any]:
        self._fetched.append(index)
        row = torch.full((300, 2), index * self.scale)
        return {"id": index, "name": f"row {index}", "row": row}


def loader(dataset: Numbers | None = None, **options: Any) -> StatefulDataLoader:
    generator = torch.Generator().manual_seed(options.pop("seed", 1))
    return StatefulDataLoader(
        Numbers() if dataset is None else dataset, batch_size=4, shuffle=True, generator=generator,
        **options,
    )  # fmt: skip


def ids(batches: Iterator[Any], count: int) -> list[list[int]]:
    """The rows of the next batches, which are right in all their parts."""
    found = []
    for _ in range(count):
        batch = next(batches)
        numbers = batch["id"].tolist()
        assert batch["name"] == [f"row {n}" for n in numbers]
        assert torch.equal(batch["row"], batch["id"][:, None, None].expand(-1, 300, 2).float())
        found.append(numbers)
    return found


def undisturbed(count: int, **options: Any) -> list[list[int]]:
    """What the loader gives without a cache, epoch after epoch."""
    plain, found = loader(**options), []
    while len(found) < count:
        found += [batch["id"].tolist() for batch in plain]
    return found[:count]


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent may take long on a busy machine; without it nothing is loaded ahead."""
    monkeypatch.setattr(entries_module, "RESERVE_S", 60.0)


@pytest.fixture
def engine(runtime_dir: Path) -> Iterator[Engine]:
    with Engine.open(options(runtime_dir)) as engine:
        yield engine


def options(runtime_dir: Path, **limits: Any) -> dict[str, Any]:
    return {**config(runtime_dir), "data": {"ahead": 3, "behind": 4, **limits}}


def entries(runtime_dir: Path) -> dict[int, Path]:
    return {int(p.name): p for p in runtime_dir.glob("data/*/*/*") if p.name.isdigit()}


def wait_for_ahead(runtime_dir: Path, last: int) -> None:
    wait_until(lambda: last in entries(runtime_dir))


# --- order ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.full)])
def test_a_restarted_process_has_the_same_batches(engine: Engine, runtime_dir: Path, workers: int):
    expected = undisturbed(16, num_workers=workers)
    first = data.cached(loader(num_workers=workers), engine)
    assert ids(first, 4) == expected[:4]
    state = first.state_dict()
    wait_for_ahead(runtime_dir, 7)
    first.close()
    again = data.cached(loader(num_workers=workers), engine)
    again.load_state_dict(state)
    assert ids(again, 12) == expected[4:]
    again.close()


def test_batches_that_exist_need_no_loader_and_its_error_reaches_the_loop(
    engine: Engine, runtime_dir: Path
):
    batches = data.cached(loader(), engine, name="x")
    expected = ids(batches, 4)
    wait_for_ahead(runtime_dir, 7)
    batches.close()
    dataset = Numbers()
    dataset.__class__ = Failing
    state = batches.state_dict()
    again = data.cached(loader(dataset), engine, name="x")
    # Another class would be another stream.
    again._store = batches._store
    again.load_state_dict(state)
    assert ids(again, 3) == undisturbed(7)[4:]
    for _ in range(2):
        with pytest.raises(OSError, match="no row"):
            next(again)
    dataset.__class__ = Numbers
    assert ids(again, 2) == undisturbed(9)[7:]
    assert expected == undisturbed(4)
    again.close()


class Failing(Numbers):
    def __getitem__(self, index: int) -> dict[str, Any]:
        raise OSError(f"no row {index}")


def test_steps_are_repeated_after_a_roll_back(engine: Engine):
    batches = data.cached(loader(), engine)
    early = batches.state_dict()
    expected = ids(batches, 3)
    state = batches.state_dict()
    expected += ids(batches, 9)
    batches.load_state_dict(state)
    assert ids(batches, 4) == expected[3:7], "from the loader: too old for the cache"
    batches.load_state_dict(early)
    assert ids(batches, 12) == expected
    batches.close()


def test_a_batch_may_be_changed(engine: Engine):
    batches = data.cached(loader(), engine)
    state = batches.state_dict()
    expected = undisturbed(2)
    next(batches)["row"].zero_()
    batches.load_state_dict(state)
    assert ids(batches, 2) == expected
    batches.close()


def test_epochs_are_announced(engine: Engine):
    begun: list[int] = []
    batches = data.cached(loader(), engine, on_epoch=begun.append)
    ids(batches, 11)
    state = batches.state_dict()
    batches.close()
    assert begun[:3] == [0, 1, 2]
    again = data.cached(loader(), engine, on_epoch=begun.append)
    del begun[:]
    again.load_state_dict(state)
    ids(again, 6)
    again.close()
    assert begun[0] in (2, 3)


def test_a_checkpoint_has_the_position(engine: Engine):
    batches = data.cached(loader(), engine)
    state = {"data": per_rank(batches)}
    expected = undisturbed(6)
    assert ids(batches, 3) == expected[:3]
    save(engine, 3, state)
    ids(batches, 2)
    engine.load(state)
    assert ids(batches, 3) == expected[3:]
    batches.close()


# --- loaders without a state, and rows ------------------------------------------------------------


def plain() -> DataLoader[Any]:
    return DataLoader(Numbers(), batch_size=4, generator=torch.Generator().manual_seed(1))


def test_a_loader_without_a_state_goes_forward(engine: Engine):
    expected = [list(range(n, n + 4)) for n in range(0, ROWS, 4)] * 3
    batches = data.cached(plain(), engine)
    assert ids(batches, 12) == expected[:12]
    batches.load_state_dict({**batches.state_dict(), "step": 12})
    state = batches.state_dict()
    assert ids(batches, 1) == expected[12:13]
    batches.close()
    again = data.cached(plain(), engine)
    again.load_state_dict(state)
    assert ids(again, 3) == expected[12:15], "skips what came before"
    again.close()


def test_a_loader_without_a_state_repeats_what_is_kept_and_nothing_else(
    engine: Engine, runtime_dir: Path
):
    batches = data.cached(plain(), engine)
    states = [batches.state_dict()]
    for _ in range(9):
        ids(batches, 1)
        states.append(batches.state_dict())
    expected = [list(range(n, n + 4)) for n in range(0, ROWS, 4)] * 2
    batches.load_state_dict(states[7])
    assert ids(batches, 2) == expected[7:9]
    batches.load_state_dict(states[1])
    with pytest.raises(UsageError, match=r"step 2 is not in the data cache .* raise data.behind"):
        next(batches)
    batches.close()


def test_the_end_of_an_iterator_ends_the_loop(engine: Engine):
    own = ({"n": n} for n in range(7))
    with pytest.raises(UsageError, match=r"cannot distinguish this .* give a name"):
        data.cached(own, engine)
    batches = data.cached(own, engine, name="numbers")
    assert [batch["n"] for batch in batches] == list(range(7))
    batches.close()


def rows_of(step: int, start: int, stop: int) -> dict[str, Any]:
    return {"ids": torch.arange(start, stop) + 12 * (step - 1)}


def test_rows_are_split_anew_for_another_world(engine: Engine):
    def part(index: int, size: int, **more: Any) -> data.Cached:
        place = ("dp", index, size)
        return data.cached(None, engine, rows=rows_of, global_batch=12, coordinate=place, **more)

    first = [part(0, 2), part(1, 2)]
    found = [next(each)["ids"].tolist() for each in first]
    assert found == [list(range(6)), list(range(6, 12))]
    state = first[0].state_dict()
    assert state == first[1].state_dict(), "any rank has the state of a lost one"
    second = [part(index, 3) for index in range(3)]
    for each in second:
        each.load_state_dict(state)
    assert [next(each)["ids"].tolist() for each in second] == [
        list(range(12 + start, 16 + start)) for start in (0, 4, 8)
    ]
    for each in (*first, *second):
        each.close()


def test_a_loader_is_not_split_anew(engine: Engine):
    one = data.cached(loader(), engine, coordinate=("dp", 0, 2))
    other = data.cached(loader(), engine, coordinate=("dp", 0, 3))
    ids(one, 1)
    with pytest.raises(UsageError, match=r"split for 2 coordinates, .* 3: .* give rows="):
        other.load_state_dict(one.state_dict())
    one.close()


# --- what is refused ------------------------------------------------------------------------------

Pair = namedtuple("Pair", "a b")


def test_types_that_cannot_be_stored(engine: Engine):
    cases: list[tuple[Any, str]] = [
        ({"x": [Pair(1, 2)]}, r"\['batch'\]\['x'\]\[0\] is a .*Pair"),
        (Path("x"), r"\['batch'\] is a pathlib"),
        (torch.zeros(2, requires_grad=True), r"\['batch'\] is a torch.Tensor"),
        (torch.zeros(2).to_sparse(), r"tensor 'of a batch' is nested or not dense"),
        (torch.nn.Parameter(torch.zeros(2)), r"\['batch'\] is a torch.nn.parameter.Parameter"),
    ]
    for number, (batch, text) in enumerate(cases):
        batches = data.cached([batch], engine, name=f"x{number}")
        with pytest.raises(UsageError, match=text):
            next(batches)
        batches.close()


def test_all_types_that_can_be_stored_are_the_same_again(engine: Engine):
    strided = torch.arange(24).view(2, 3, 4)
    batch = {
        "tensors": (strided.transpose(0, 2), strided[:, ::2], torch.tensor(3.5), torch.empty(0, 3)),
        "types": [torch.ones(3, dtype=kind) for kind in (torch.bool, torch.bfloat16, torch.int8)],
        "complex": torch.ones(2, dtype=torch.complex64).conj(),
        "float8": torch.ones(4).to(torch.float8_e4m3fn).view(torch.uint8),
        "plain": [None, True, -(1 << 80), 1.5, 2j, "text", b"bytes", (1, (2,)), {3: {4}}, []],
        7: frozenset([1]),
    }
    batches = data.cached([batch], engine)
    stored = next(batches)
    batches.close()
    again = data.cached([batch], engine)
    for found in (stored, next(again)):
        assert list(found) == list(batch)
        for name in ("tensors", "types"):
            assert type(found[name]) is type(batch[name])
            for mine, its in zip(found[name], batch[name], strict=True):
                assert mine.dtype == its.dtype
                assert torch.equal(mine, its)
        assert torch.equal(found["complex"], batch["complex"])
        assert torch.equal(found["float8"], batch["float8"])
        assert found["plain"] == batch["plain"]
        assert found[7] == batch[7]
    again.close()


def test_what_cannot_be_wrapped(engine: Engine):
    for arguments in ({"loader": None}, {"loader": [1], "rows": rows_of}):
        with pytest.raises(UsageError, match="either a loader or rows"):
            data.cached(arguments.pop("loader"), engine, **arguments)
    with pytest.raises(UsageError, match="generator of its own"):
        data.cached(DataLoader(Numbers()), engine)
    engine.close()
    with pytest.raises(UsageError, match="closed"):
        data.cached([1], engine)


# --- damage, space, other data --------------------------------------------------------------------


def test_damage_costs_time_only(engine: Engine, runtime_dir: Path):
    first = data.cached(loader(), engine)
    assert ids(first, 1) == undisturbed(1)
    wait_for_ahead(runtime_dir, 4)
    first.close()
    for damage in ("flip", "cut", "empty", "other", "link"):
        found = entries(runtime_dir)
        content = bytearray(found[3].read_bytes())
        found[3].unlink()
        if damage == "flip":
            content[100] ^= 1
        if damage == "link":
            found[3].symlink_to(found[2])
        else:
            cut = {"cut": content[:-4096], "empty": b"", "other": found[2].read_bytes()}
            found[3].write_bytes(cut.get(damage, content))
        again = data.cached(loader(), engine)
        again.load_state_dict(first.state_dict())
        assert ids(again, 3) == undisturbed(4)[1:]
        again.close()


def test_an_entry_of_another_history_is_not_delivered(engine: Engine, runtime_dir: Path):
    """The number of a step does not suffice: an entry must follow the loader's state before it."""
    other = data.cached(loader(seed=2), engine)
    ids(other, 2)
    first = data.cached(loader(seed=1), engine)
    ids(first, 2)
    state = first.state_dict()
    wait_for_ahead(runtime_dir, 5)
    first.close()
    other.close()
    other._store, other._is_closed = first._store, False
    assert ids(other, 4) == undisturbed(6, seed=2)[2:]
    other.close()
    again = data.cached(loader(seed=1), engine)
    again.load_state_dict(state)
    assert ids(again, 4) == undisturbed(6)[2:]
    again.close()


def test_the_agent_keeps_the_limits_and_purges(engine: Engine, runtime_dir: Path):
    batches = data.cached(loader(), engine)
    for step in range(1, 20):
        ids(batches, 1)
        wait_for_ahead(runtime_dir, step + 3)
        kept = set(entries(runtime_dir))  # written before this step was used, or after
        assert set(range(max(1, step - 3), step + 4)) <= kept <= set(range(step - 4, step + 4))
    found = entries(runtime_dir)
    expected = sum(path.stat().st_size for path in found.values())
    client = AgentClient(runtime_dir)
    (namespace,) = client.status().namespaces
    assert namespace.data_bytes == expected
    batches.close()
    engine.close()
    assert entries(runtime_dir) == found, "for the next process"
    client.purge("test")
    client.close()
    assert not entries(runtime_dir)
    assert not list((runtime_dir / "data").iterdir())


@pytest.mark.parametrize("count", [0, 1, pytest.param(3, marks=pytest.mark.full)])
def test_a_full_cache_costs_time_only(runtime_dir: Path, count: int):
    with Engine.open(options(runtime_dir)) as engine:
        batches = data.cached(loader(), engine)
        ids(batches, 1)
        size = entries(runtime_dir)[1].stat().st_size
        batches.close()
    limit = count * size + size // 2
    shutil.rmtree(runtime_dir / "data")
    with Engine.open(options(runtime_dir, capacity=limit)) as engine:
        batches = data.cached(loader(), engine)
        for expected in undisturbed(15):
            assert ids(batches, 1) == [expected]
            assert sum(each.stat().st_size for each in entries(runtime_dir).values()) <= limit
        batches.close()


def test_an_agent_that_is_gone_costs_time_only(runtime_dir: Path, served):
    with Engine.open({**options(runtime_dir), "agent": never(runtime_dir)}) as engine:
        batches = data.cached(loader(), engine)
        expected = undisturbed(9)
        assert ids(batches, 3) == expected[:3]
        stop_processes_of(runtime_dir)
        assert ids(batches, 6) == expected[3:]
        batches.close()


def never(runtime_dir: Path) -> dict[str, Any]:
    return {"runtime_dir": str(runtime_dir), "start": "never"}


# --- several processes ----------------------------------------------------------------------------


def share(rank: int, runtime_dir: str, steps: int) -> tuple[list[list[int]], int]:
    warnings.simplefilter("ignore")
    dataset = Numbers()
    with Engine.open(options(Path(runtime_dir))) as engine:
        batches = data.cached(loader(dataset), engine, coordinate=("dp", 0, 1))
        found = []
        for _ in range(steps):
            found += ids(batches, 1)
            dist.barrier()  # as training does
        batches.close()
    return found, len(dataset._fetched)


def test_ranks_share_one_copy_that_one_of_them_loads(runtime_dir: Path):
    found = run_ranks(share, 2, str(runtime_dir), 12)
    assert [rows for rows, _ in found] == [undisturbed(12)] * 2
    fetched = sorted(count for _, count in found)
    assert fetched[0] == 0
    assert fetched[1] >= 12 * 4


@pytest.mark.full
def test_a_process_that_loads_and_hangs_is_not_waited_for_twice(
    engine: Engine, runtime_dir: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(batches_module, "WAIT_S", 1.0)
    first = data.cached(loader(), engine)
    ids(first, 1)
    wait_for_ahead(runtime_dir, 4)
    first.close()
    with held(first._store.folder):
        again = data.cached(loader(), engine)
        assert ids(again, 4) == undisturbed(4)
        assert ids(again, 1) == undisturbed(5)[4:], "after a wait"
        monkeypatch.setattr(batches_module, "WAIT_S", 1e6)
        assert ids(again, 10) == undisturbed(15)[5:]
        again.close()


@contextlib.contextmanager
def held(folder: Path) -> Iterator[None]:
    """Another process holds the lock of a stream, and loads nothing."""
    begun, done = context.Event(), context.Event()
    holder = context.Process(target=hold, args=(str(folder), begun, done))
    holder.start()
    try:
        assert begun.wait(60)
        yield
    finally:
        done.set()
        holder.join(60)


def hold(folder: str, begun: Any, done: Any) -> None:
    with open(f"{folder}/lock", "wb") as file:
        fcntl.lockf(file, fcntl.LOCK_EX)
        begun.set()
        done.wait(120)


def live_train(world: Any, folder: str, steps: int, faults: Faults) -> None:
    """The model of live_small, with the rows of each rank in the log."""
    job = live_small.Job(world, folder, faults)
    place = ("dp", world.rank, world.size)
    found = data.cached(None, world.engine, rows=rows_of, global_batch=12, coordinate=place)
    with contextlib.closing(found) as batches:
        job.state["data"] = batches
        world.load(job.state)
        for step in world.steps(steps):
            mine = next(batches)["ids"]
            every = [torch.empty_like(mine) for _ in range(world.size)]
            dist.all_gather(every, mine)
            loss = job.gradients(step)
            if world.rank == 0:
                row = [step, float(loss).hex(), torch.cat(every).tolist(), 1.0, ""]
                with open(f"{folder}/rows", "a") as file:
                    file.write(json.dumps(row) + "\n")
            job.update(step)


def test_live_recovery_goes_on_with_the_rows_of_the_step(runtime_dir: Path):
    faults = (Fault(6, 1, "kill"), Fault(9, 0, "raise"))
    with stopped_agent(runtime_dir):
        script = partial(live_small.script, live_train)
        found = supervised(runtime_dir, faults, size=2, steps=10, script=script)
    assert found.code == 0, "\n".join(found.lines)
    assert {row.step: row.ids for row in found.rows} == {
        step: list(range(12 * (step - 1), 12 * step)) for step in range(1, 11)
    }


def train(folder: str, number: int, workers: int) -> None:
    """A trainer that goes on from its last checkpoint; a row for each step."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    fork_agents()
    own = Path(folder, f"checkpoint-{number}")
    with Engine.open(options(Path(folder, "rt"), capacity="100KiB")) as engine:
        batches = data.cached(loader(num_workers=workers), engine, coordinate=("dp", 0, 1))
        if own.exists():
            batches.load_state_dict(torch.load(own))
        while True:
            numbers = ids(batches, 1)[0]
            step = batches.state_dict()["step"]
            with open(f"{folder}/rows", "a") as file:
                file.write(json.dumps([number, step, numbers]) + "\n")
            if step % 3 == 0:
                torch.save(batches.state_dict(), f"{own}.tmp")
                os.rename(f"{own}.tmp", own)
            if os.path.exists(f"{folder}/enough") and step % 3 == 0:
                batches.close()
                break


@pytest.mark.parametrize(
    ("kills", "workers"),
    [
        (4, 0),
        pytest.param(100, 0, marks=[pytest.mark.nightly, pytest.mark.timeout(900)]),
        pytest.param(100, 2, marks=[pytest.mark.nightly, pytest.mark.timeout(900)]),
    ],
)
def test_whoever_is_killed_nothing_wrong_is_delivered(runtime_dir: Path, kills: int, workers: int):
    """The process that loads, the other one, the agent, in a random order at random steps."""
    folder, rng = runtime_dir, random.Random(kills)
    (folder / "rt").mkdir(mode=0o700)
    trainers: dict[int, Any] = {}

    def start(number: int) -> None:
        trainers[number] = context.Process(target=train, args=(str(folder), number, workers))
        trainers[number].start()

    def rows() -> list[str]:
        path = folder / "rows"
        return (
            [x for x in path.read_text().splitlines(True) if x.endswith("\n")]
            if path.exists()
            else []
        )

    def wait_for_rows(count: int) -> None:
        def arrived() -> bool:
            stored = sum(size_of(path) for path in folder.glob("rt/data/*/*/*"))
            assert stored <= 100 << 10, "over data.capacity"
            assert all(each.exitcode in (None, -9) for each in trainers.values())
            return len(rows()) >= count

        wait_until(arrived)

    try:
        for number in (0, 1):
            start(number)
        for _ in range(kills):
            wait_for_rows(len(rows()) + rng.randrange(1, 12))
            victim = rng.randrange(3)
            if victim == 2:
                for pid in agents(folder / "rt"):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            else:
                trainers[victim].kill()
                trainers[victim].join()
                start(victim)
        wait_for_rows(len(rows()) + 20)
        (folder / "enough").touch()
        for each in trainers.values():
            each.join(60)
            assert each.exitcode == 0
    finally:
        for each in trainers.values():
            each.kill()
    found = [json.loads(row) for row in rows()]
    last = max(step for _, step, _ in found)
    expected = undisturbed(last, num_workers=workers)
    for number in (0, 1):
        steps = {step: numbers for each, step, numbers in found if each == number}
        assert sorted(steps) == list(range(1, max(steps) + 1)), "a step is missing"
    assert not [row for row in found if row[2] != expected[row[1] - 1]]


def size_of(path: Path) -> int:
    with contextlib.suppress(FileNotFoundError):
        return path.stat().st_size
    return 0
