"""``dcp.async_save`` and ``engine.async_save``: what is restored is the state of the call."""

from __future__ import annotations

import collections
import contextlib
import copy
import threading
import warnings
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.staging import (
    AsyncStager,
    BlockingAsyncStager,
    DefaultStager,
    StagingOptions,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tests.support.plan_hooks import hook
from tests.support.preloaded import context
from tests.support.ranks import run_ranks
from tests.support.states import blank, config, load, manifest_of, same, save
from tieredckpt import failpoints
from tieredckpt.dcp.slots.background_saves import BackgroundSave
from tieredckpt.engine import Engine
from tieredckpt.errors import BackgroundSaveError, UsageError, WaitError

WAIT_S = 60.0

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is"),
    pytest.mark.usefixtures("served"),
]


@pytest.fixture
def engine(runtime_dir: Path) -> Iterator[Engine]:
    with Engine.open(config(runtime_dir)) as opened:
        opened.load({})
        yield opened


def mixed(seed: int = 0) -> dict[str, Any]:
    """All kinds of values that a rank without a mesh has."""
    torch.manual_seed(seed)
    return {
        "model": collections.OrderedDict(
            (f"layer{number}", torch.randn(40, number + 1)) for number in range(20)
        ),
        "large": torch.randn(700_001),
        "turned": torch.randn(30, 50).t(),
        "param": torch.nn.Parameter(torch.randn(17)),
        "scalar": torch.tensor(2.5 + seed),
        "empty": torch.zeros(0, 3),
        "half": torch.randn(333).bfloat16(),
        "list": [torch.arange(5) + seed, {"deep": torch.ones(2, dtype=torch.bool)}],
        "step": seed,
        "notes": {"seen": [1, 2, seed]},
    }


def tensors_of(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        local = value.to_local() if hasattr(value, "to_local") else value
        return [local.detach()]
    if isinstance(value, dict):
        return [each for item in value.values() for each in tensors_of(item)]
    return [each for item in value for each in tensors_of(item)] if type(value) is list else []


def scribble(state: dict[str, Any], until: Future[Any]) -> None:
    """Change every tensor in place, over and over, as long as the save works."""
    while True:
        for tensor in tensors_of(state):
            tensor.fill_(1)
        if isinstance(state.get("notes"), dict):
            state["notes"]["seen"].append("changed")
        if until.done():
            return


def async_save(engine: Engine, step: int, state: dict[str, Any], **options: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return dcp.async_save(state, storage_writer=engine.writer(step), **options)


def plain(state: Any) -> Any:
    """What a load of it gives: containers and parameters as DCP hands them over."""
    if isinstance(state, torch.Tensor):
        return state.detach().clone()
    if isinstance(state, dict):
        return {key: plain(value) for key, value in state.items()}
    return [plain(each) for each in state] if isinstance(state, list) else copy.deepcopy(state)


def check(engine: Engine, step: int, wanted: dict[str, Any]) -> None:
    got = blank(wanted)
    load(got, engine.reader(step))
    assert same(got, wanted), step


# --- one rank -----------------------------------------------------------------------------------


def test_the_restored_state_is_that_of_the_call(engine: Engine):
    for step in range(4):
        state = mixed(step)
        wanted = plain(state)
        future = async_save(engine, step, state)
        scribble(state, future)
        future.result(WAIT_S)
        check(engine, step, wanted)
    report = engine.last_save
    assert report is not None
    assert report.step == 3
    assert report.save_id == manifest_of(engine, 3).save_id


def test_rows_that_hooks_of_dcp_put_in_another_order(engine: Engine):
    wanted = torch.rand(5, 3)
    for step in range(3):  # the last ones are staged at their places in the segment
        rows = torch.cat([wanted[2:], wanted[:2]])
        hook(rows, [(2, rows[:3]), (0, rows[3:])], wanted.shape)
        future = engine.async_save({"rows": rows}, step)
        rows.fill_(1)
        future.result(WAIT_S)
        got = {"rows": torch.zeros(5, 3)}
        load(got, engine.reader(step))
        assert torch.equal(got["rows"], wanted)


class Own(AsyncStager):
    """A caller's stager."""

    _synchronize_after_execute = False

    @property
    def should_synchronize_after_execute(self) -> bool:
        return self._synchronize_after_execute

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        return copy.deepcopy(state_dict)

    def synchronize_staging(self) -> None:
        pass

    def close(self) -> None:
        pass


def stagers() -> dict[str, AsyncStager | None]:
    return {
        "ours": None,
        "default": DefaultStager(StagingOptions(False, False, False, False)),
        "default, in a thread": DefaultStager(StagingOptions(False, False, True, False)),
        "default, shared memory": DefaultStager(StagingOptions(False, True, False, False)),
        "blocking": BlockingAsyncStager(),
        "own": Own(),
    }


def test_all_stagers(engine: Engine):
    step = 1
    for stager in stagers().values():
        for _ in range(2):
            state = mixed(step)
            wanted = plain(state)
            answer = async_save(engine, step, state, async_stager=stager)
            if not isinstance(answer, Future):
                answer.staging_completion.result(WAIT_S)
                answer = answer.upload_completion
            scribble(state, answer)
            answer.result(WAIT_S)
            check(engine, step, wanted)
            step += 1
        if stager is not None:
            stager.close()


def test_a_structure_that_changes(engine: Engine):
    changes: list[dict[str, Any]] = [
        {"a": torch.randn(50), "b": torch.randn(9)},
        {"a": torch.randn(50), "b": torch.randn(9)},
        {"0": torch.randn(7), "a": torch.randn(50), "b": torch.randn(9)},
        {"0": torch.randn(7), "b": torch.randn(9)},
        {"0": torch.randn(8), "b": torch.randn(9).double()},
        {"0": torch.randn(900_000), "b": torch.randn(9), "c": "text"},
        {"0": torch.randn(900_000), "b": torch.randn(9), "c": "text" * 1_000_000},
        {"0": torch.randn(900_000), "b": torch.randn(9), "c": "text"},
    ]
    for step, state in enumerate(changes):
        wanted = plain(state)
        future = async_save(engine, step, state)
        scribble(state, future)
        future.result(WAIT_S)
        check(engine, step, wanted)


class Reversed(DefaultSavePlanner):
    """Writes the same tensors in another order, every second time."""

    turned = False

    def create_local_plan(self) -> Any:
        plan = super().create_local_plan()
        if self.turned:
            plan.items.reverse()
        return plan


def test_items_that_move_do_not_overwrite_each_other(engine: Engine):
    """What was staged for one order is written in another one, through the same slot."""
    for step in range(5):
        planner = Reversed()
        planner.turned = step % 2 == 1
        state = {f"t{number}": torch.randn(100_000 + number) for number in range(6)}
        wanted = plain(state)
        future = async_save(engine, step, state, planner=planner)
        scribble(state, future)
        future.result(WAIT_S)
        check(engine, step, wanted)
    assert len(engine.checkpoints()) == 3


# --- one in flight ------------------------------------------------------------------------------


class Held(DefaultSavePlanner):
    """Plans when it is told to."""

    def __init__(self, where: str = "local", **options: Any) -> None:
        super().__init__(**options)
        self.where = where
        self.begun = threading.Event()
        self.go = threading.Event()

    def _hold(self, where: str) -> None:
        if where == self.where:
            self.begun.set()
            assert self.go.wait(WAIT_S)

    def create_local_plan(self) -> Any:
        self._hold("local")
        return super().create_local_plan()

    def create_global_plan(self, all_plans: Any) -> Any:
        self._hold("global")
        return super().create_global_plan(all_plans)


def cause_of(error: CheckpointException) -> BaseException:
    return error.failures[0][0]


def test_a_flush_waits_for_it_and_brings_its_step(
    runtime_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
):
    disk = {"name": "disk", "url": f"file://{tmp_path / 'disk'}", "every": "1000 steps"}
    with Engine.open(config(runtime_dir, tiers=[disk])) as engine:
        engine.load({})
        save(engine, 1, mixed(1))
        held = Held()
        future = async_save(engine, 2, mixed(2), planner=held)
        assert held.begun.wait(WAIT_S)
        real, waits = BackgroundSave.wait, 0

        def wait(self: BackgroundSave, until_s: float) -> bool:
            nonlocal waits
            waits += 1
            if waits == 1:  # half of the time is over, and the save is not
                return False
            held.go.set()
            return real(self, until_s)

        monkeypatch.setattr(BackgroundSave, "wait", wait)
        assert engine.flush(deadline_s=WAIT_S).steps == {"default": 1}
        assert "the flush goes without step 2" in caplog.text
        report = engine.flush(deadline_s=WAIT_S)
        assert (report.steps, report.done) == ({"default": 2}, True)
        future.result(WAIT_S)


def test_a_second_save_waits_no_longer_than_told(runtime_dir: Path):
    with Engine.open(config(runtime_dir, save={"wait_timeout": "100ms"})) as engine:
        engine.load({})
        held = Held()
        state = mixed(1)
        first = async_save(engine, 1, state, planner=held)
        assert held.begun.wait(WAIT_S)
        with pytest.raises(CheckpointException, match="step 1 of stream 'default'") as caught:
            save(engine, 2, state)
        assert isinstance(cause_of(caught.value), WaitError)
        with pytest.raises(WaitError, match="wait_timeout"):
            engine.load(blank(plain(state)))
        with pytest.raises(WaitError, match="wait_timeout"):
            engine.async_save(state, 3)
        second = async_save(engine, 4, state)  # this thread is not held up
        assert not second.done()  # the ranks cannot be told before the first is through
        held.go.set()
        first.result(WAIT_S)
        with pytest.raises(CheckpointException, match="step 1 of stream 'default'"):
            second.result(WAIT_S)
        with pytest.raises(CheckpointException) as caught:
            save(engine, 5, state)  # tells of step 4, and is committed
        assert isinstance(cause_of(caught.value), BackgroundSaveError)
        assert [info.step for info in engine.checkpoints()] == [5, 1]
        async_save(engine, 6, state).result(WAIT_S)
        check(engine, 6, plain(state))


@pytest.mark.parametrize("where", ["global", pytest.param("local", marks=pytest.mark.full)])
def test_two_engines_plan_at_the_same_time_with_cached_plans(runtime_dir: Path, where: str):
    """DCP keeps cached plans for the process, under the name of the planner's class."""
    with (
        Engine.open(config(runtime_dir, namespace="one")) as one,
        Engine.open(config(runtime_dir, namespace="two")) as two,
    ):
        one.load({})
        two.load({})
        for step in range(1, 4):
            states = {"one": mixed(step), "two": {"other": torch.full((9,), float(step))}}
            held = Held(where if step > 1 else "nowhere", enable_plan_caching=True)
            future = async_save(one, step, states["one"], planner=held)
            if step == 1:
                future.result(WAIT_S)  # now there are cached plans
            else:
                assert held.begun.wait(WAIT_S)
            save(two, step, states["two"], planner=Held("nowhere", enable_plan_caching=True))
            held.go.set()
            future.result(WAIT_S)
            check(one, step, plain(states["one"]))
            check(two, step, states["two"])


def test_closing_waits_for_the_save(runtime_dir: Path):
    held = Held()
    with Engine.open(config(runtime_dir)) as engine:
        engine.load({})
        future = async_save(engine, 1, mixed(1), planner=held)
        assert held.begun.wait(WAIT_S)
        timer = threading.Timer(0.05, held.go.set)
        timer.start()
    assert future.done()
    future.result(0)
    timer.join()
    with Engine.open(config(runtime_dir)) as engine:
        state = blank(plain(mixed(1)))
        assert engine.load(state) == 1
        assert same(state, plain(mixed(1)))


def ends_at_once(runtime_dir: str) -> None:
    engine = Engine.open(config(Path(runtime_dir)))
    engine.load({})
    engine.async_save({"large": torch.arange(2 << 20)}, 1)


def test_a_script_that_ends_while_its_save_runs(runtime_dir: Path):
    """As with DCP's own storage: Python waits for the executor's thread, and it gets through."""
    script = context.Process(target=ends_at_once, args=(str(runtime_dir),))
    script.start()
    script.join(120)
    assert script.exitcode == 0
    state = {"large": torch.zeros(2 << 20, dtype=torch.int64)}
    with Engine.open(config(runtime_dir)) as engine:
        assert engine.load(state) == 1
    assert torch.equal(state["large"], torch.arange(2 << 20))


def test_waiting_for_a_step_that_is_under_way(engine: Engine):
    held = Held()
    engine.async_save(mixed(1), 1, planner=held)
    threading.Timer(0.05, held.go.set).start()
    engine.wait(1, "memory", WAIT_S)
    with pytest.raises(WaitError, match="no step 2"):
        engine.wait(2, "memory", 0)


def test_a_staged_state_that_nobody_saved(engine: Engine):
    state = mixed()
    async_save(engine, 1, state).result(WAIT_S)
    forgotten = engine.writer(2)
    staged = forgotten.stage(state)  # nobody takes it up, so nobody waits for it
    async_save(engine, 3, state).result(WAIT_S)
    with pytest.raises(CheckpointException, match="another one began"):
        save_with(forgotten, staged)  # its memory is not its own any more
    check(engine, 3, plain(state))


def save_with(writer: Any, staged: dict[str, Any]) -> None:
    dcp.save(staged, storage_writer=writer)


# --- failures -----------------------------------------------------------------------------------


class Broken(DefaultSavePlanner):
    """A planner with a mistake."""

    def create_local_plan(self) -> Any:
        raise RuntimeError("the planner is broken")


def test_a_failure_is_told_at_the_future_and_by_the_next_save(engine: Engine):
    state = mixed()
    save(engine, 1, state)
    for step in (10, 20):
        future = async_save(engine, step, state, planner=Broken())
        with pytest.raises(CheckpointException, match="broken"):
            future.result(WAIT_S)

        def again(step: int = step) -> None:
            if step == 10:
                save(engine, step + 1, state)
            else:
                async_save(engine, step + 1, state).result(WAIT_S)

        with pytest.raises(CheckpointException, match=f"step {step} of stream") as caught:
            again()
        assert isinstance(cause_of(caught.value), BackgroundSaveError)
        assert engine.checkpoints()[0].step == step + 1  # it was committed all the same
        async_save(engine, step + 2, state).result(WAIT_S)  # told once
    check(engine, 22, plain(state))


def test_a_tensor_without_storage_is_not_staged(engine: Engine):
    """As FSDP1 and ZeRO leave parameters: what is read of them is foreign memory."""
    freed = torch.ones(1000)
    freed.untyped_storage().resize_(0)
    future = async_save(engine, 1, {"t": freed})
    with pytest.raises(CheckpointException, match="freed") as caught:
        future.result(WAIT_S)
    assert isinstance(cause_of(caught.value), UsageError)


def test_the_engine_tells_what_nobody_looked_at(runtime_dir: Path):
    state = mixed()
    engine = Engine.open(config(runtime_dir))
    engine.load({})
    engine.async_save(state, 1)
    engine.async_save(state, 2, planner=Broken())
    with pytest.raises(CheckpointException, match="broken"):
        engine.async_save(state, 3)
    engine.async_save(state, 4).result(WAIT_S)  # told once
    with pytest.raises(CheckpointException, match="broken"):
        engine.async_save(state, 5, planner=Broken()).result(WAIT_S)
    engine.async_save(state, 6).result(WAIT_S)  # it was looked at
    with pytest.raises(UsageError, match="executor"):
        engine.async_save(state, 7, executor="fork")  # type: ignore[arg-type]
    engine.async_save(state, 8, planner=Broken())
    with pytest.raises(CheckpointException, match="broken"):
        engine.close()
    engine.close()
    with Engine.open(config(runtime_dir)) as again:
        got = blank(plain(state))
        assert again.load(got) == 6
        assert same(got, plain(state))


def test_a_slot_that_was_staged_in_vain_is_given_back(engine: Engine):
    """Six saves that fail after staging, in a ring of five slots."""
    state = mixed()
    async_save(engine, 0, state).result(WAIT_S)
    for step in range(1, 7):
        with pytest.raises(CheckpointException, match="broken"):
            async_save(engine, step, state, planner=Broken()).result(WAIT_S)
    engine.writer(50).stage(state)  # and one that nobody saves
    with pytest.raises(CheckpointException, match="failed, and was not"):
        save(engine, 99, state)
    async_save(engine, 100, state).result(WAIT_S)
    check(engine, 100, plain(state))


@pytest.mark.full
def test_a_slot_that_was_staged_in_vain_is_not_missed_by_a_plain_save(runtime_dir: Path):
    state = {"w": torch.ones(2_500_000)}
    memory = {"capacity": "40MiB", "keep": {"last": 2}}  # the ring, and not a slot more
    with Engine.open(config(runtime_dir, memory=memory)) as engine:
        engine.load({})
        for step in range(3):
            async_save(engine, step, state).result(WAIT_S)
        with pytest.raises(CheckpointException, match="broken"):
            async_save(engine, 3, state, planner=Broken()).result(WAIT_S)
        engine._session.background_saves.wait_idle(WAIT_S)
        with pytest.raises(CheckpointException, match="step 3 of stream"):
            save(engine, 4, state)
        save(engine, 5, state)
        engine.writer(6).stage(state)
        save(engine, 7, state)
        assert [each.step for each in engine.checkpoints()] == [7, 5]


def test_staging_waits_for_another_thread_that_writes(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
):
    """Else both would write into one slot, and what was staged would be saved overwritten."""
    large, small = {"w": torch.arange(3_000_000.0)}, {"w": torch.full((1_500_000,), -1.0)}
    for step in range(3):
        async_save(engine, step, large).result(WAIT_S)
    writes, go_on, reach = threading.Event(), threading.Event(), failpoints.reach

    def slow(name: str) -> None:
        if name == "save.copy" and not writes.is_set():
            writes.set()
            go_on.wait(WAIT_S)
        reach(name)

    def beside() -> None:
        # What it has sealed may be taken back by the other save; then it fails, and says so.
        with contextlib.suppress(CheckpointException):
            save(engine, 3, small, stream="other")

    monkeypatch.setattr(failpoints, "reach", slow)
    thread = threading.Thread(target=beside)
    thread.start()
    assert writes.wait(WAIT_S)
    timer = threading.Timer(0.5, go_on.set)
    timer.start()
    async_save(engine, 3, large).result(WAIT_S)
    thread.join(WAIT_S)
    timer.join()
    check(engine, 3, large)


# --- several ranks ------------------------------------------------------------------------------


def sharded(step: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(step)
    whole = {name: torch.randn(11, 40) for name in ("a", "b", "c")}
    return {
        "rows": distribute_tensor(whole["a"], mesh, [Shard(0)]),
        "columns": distribute_tensor(whole["b"], mesh, [Shard(1)]),
        "replicated": distribute_tensor(whole["c"], mesh, [Replicate()]),
        "large": distribute_tensor(torch.randn(500_000), mesh, [Shard(0)]),
        "plain": torch.randn(100_000),
        "other": torch.randn(100_000),
        "nested": {"step": step, "list": [torch.randn(3)]},
    }


def opened(runtime_dir: str, **more: Any) -> Engine:
    engine = Engine.open(config(Path(runtime_dir), **more))
    engine.load({})
    return engine


def equal(one: Any, other: Any) -> bool:
    pairs = zip(tensors_of(one), tensors_of(other), strict=True)
    return all(torch.equal(ours, theirs) for ours, theirs in pairs)


def check_ranks(engine: Engine, step: int, wanted: dict[str, Any]) -> None:
    got = blank(wanted)
    load(got, engine.reader(step))
    assert equal(got, wanted), step


def beside_training(rank: int, runtime_dir: str) -> list[int]:
    """Collectives of the trainer in the default group while saves plan in theirs."""
    with opened(runtime_dir) as engine:
        staged = []
        for step in range(3):
            state = sharded(step)
            wanted = plain(state)
            future = engine.async_save(state, step)
            staged.append(engine._session.stager.last_bytes)
            rounds = torch.tensor(float(step))
            for _ in range(50):
                reduced = torch.ones(3) * rounds
                dist.all_reduce(reduced)
                assert reduced.tolist() == [step * dist.get_world_size()] * 3
            scribble(state, future)
            future.result(WAIT_S)
            check_ranks(engine, step, wanted)
        return staged


def test_replicated_tensors_are_staged_by_one_rank(runtime_dir: Path):
    answers = run_ranks(beside_training, 2, str(runtime_dir))
    shards = (11 * 40 * 2 + 500_000) * 4
    copies = (11 * 40 + 100_000 + 100_000 + 3) * 4
    for number, together in enumerate(map(sum, zip(*answers, strict=True))):
        assert together == shards + copies * (1 if number else 2)


def one_rank_changes(rank: int, runtime_dir: str) -> None:
    """A plan that gives a replicated tensor to another rank than the last one did."""
    with opened(runtime_dir, save={"on_error": "raise"}) as engine:
        state: dict[str, Any] = {f"t{number}": torch.randn(1000) for number in range(4)}
        for step in (1, 2):
            engine.async_save(state, step).result(WAIT_S)
        if rank == 1:  # now rank 0 must write what was rank 1's, and knows nothing of it
            state = {"mine": torch.randn(3)}
        with pytest.raises(CheckpointException, match="stages everything"):
            engine.async_save(state, 3).result(WAIT_S)
        for step in (4, 5):
            engine.async_save(state, step).result(WAIT_S)
            check_ranks(engine, step, plain(state))
        assert engine.checkpoints()[0].step == 5


def test_a_plan_that_wants_what_was_left_to_another_rank(runtime_dir: Path):
    run_ranks(one_rank_changes, 2, str(runtime_dir))


def whole_values(rank: int, runtime_dir: str) -> None:
    """Without flattening a nested state is one value, whose tensors are nobody else's to write."""
    with opened(runtime_dir) as engine:
        for step in (1, 2, 3):
            state: dict[str, Any] = {
                "nested": {"t": torch.randn(1000), "step": step},
                "top": torch.full((1000,), float(step)),
            }
            dist.broadcast(state["nested"]["t"], 0)
            wanted = plain(state)
            future = engine.async_save(
                state, step, planner=DefaultSavePlanner(flatten_state_dict=False)
            )
            scribble(state, future)
            future.result(WAIT_S)
            got = {"nested": None, "top": torch.zeros(1000)}
            planner = DefaultLoadPlanner(False, False)  # neither states nor sharded tensors
            load(got, engine.reader(step), planner=planner)
            assert same(got, wanted)


@pytest.mark.full
def test_states_that_are_not_flattened(runtime_dir: Path):
    run_ranks(whole_values, 2, str(runtime_dir))


class TwoWordsError(Exception):
    """One that cannot be unpickled, as many of frameworks' are."""

    def __init__(self, one: str, other: str) -> None:
        super().__init__(f"{one} {other}")


class Picky:
    """Its ``state_dict()`` raises on rank 1."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def state_dict(self) -> dict[str, Any]:
        if dist.get_rank() == 1:
            raise self.error
        return {"a": torch.ones(3)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError("nothing is loaded into it")


def raises_in_state_dict(rank: int, runtime_dir: str) -> None:
    with opened(runtime_dir) as engine:
        state = {"x": torch.arange(9), "y": sharded(1)}
        for step, error in enumerate((ZeroDivisionError("no"), TwoWordsError("not", "now"))):
            future = engine.async_save({**state, "picky": Picky(error)}, 2 * step)
            with pytest.raises(CheckpointException, match=type(error).__name__) as caught:
                future.result(WAIT_S)
            assert list(caught.value.failures) == [1]
            assert "in state_dict" in str(caught.value)
            save(engine, 2 * step + 1, state)
        # Nor may what is wrong with one rank's arguments leave the others waiting.
        with pytest.raises(UsageError, match="a step is an integer"):
            engine.async_save(state, -rank)
        with pytest.raises(UsageError, match="tags are strings"):
            engine.async_save(state, 4, tags={"rank": rank} if rank else None)  # type: ignore[dict-item]
        engine.async_save(state, 5).result(WAIT_S)
        assert [each.step for each in engine.checkpoints()] == [5, 3, 1]
        check_ranks(engine, 5, plain(state))


def test_a_state_dict_that_raises_on_one_rank(runtime_dir: Path):
    run_ranks(raises_in_state_dict, 2, str(runtime_dir), timeout_s=30)


def waits_too_long(rank: int, runtime_dir: str) -> None:
    with opened(runtime_dir, save={"wait_timeout": "100ms"}) as engine:
        state = sharded(1)
        held = Held()
        group = engine.background_group()
        first = async_save(engine, 1, state, planner=held, process_group=group)
        assert held.begun.wait(WAIT_S)
        if rank == 0:
            held.go.set()  # the other rank is still busy, so this one's save is, too
        with pytest.raises(CheckpointException, match="wait_timeout"):
            save(engine, 2, state)
        second = async_save(engine, 3, state, process_group=group)
        held.go.set()
        first.result(WAIT_S)
        with pytest.raises(CheckpointException, match="wait_timeout"):
            second.result(WAIT_S)
        with pytest.raises(CheckpointException, match="step 3 of stream"):
            save(engine, 4, state)
        engine.async_save(state, 5).result(WAIT_S)
        check_ranks(engine, 5, plain(state))


@pytest.mark.full
def test_a_second_save_raises_on_all_ranks(runtime_dir: Path):
    run_ranks(waits_too_long, 2, str(runtime_dir))
