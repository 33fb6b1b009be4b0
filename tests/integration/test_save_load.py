"""dcp.save and dcp.load through an engine and a real agent, one process."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import threading
import warnings
from collections import UserDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.utils.data import DataLoader

from tests.support.agent import AgentProcess
from tests.support.faults import death
from tests.support.states import (
    blank,
    config,
    flip,
    load,
    manifest_of,
    same,
    save,
    slot_of,
)
from tieredckpt.dcp import open as open_module
from tieredckpt.dcp.load.reader import not_recoverable
from tieredckpt.dcp.slots import slot_ring
from tieredckpt.dcp.state import items
from tieredckpt.dcp.state.per_rank import per_rank
from tieredckpt.dcp.state.planner import SafeLoadPlanner
from tieredckpt.engine import Engine
from tieredckpt.errors import (
    AgentError,
    ConfigError,
    IntegrityError,
    NamespaceInUseError,
    NoRecoverableCheckpointError,
    TieredCkptError,
    UsageError,
    WaitError,
)
from tieredckpt.format.segment import decode_trailer
from tieredckpt.recovery import other_hosts
from tieredckpt.recovery.plan import plan_recovery
from tieredckpt.storage.backends.file import FileTier
from tieredckpt.storage.holdings import Holdings, TierFacts

pytestmark = pytest.mark.usefixtures("served")


@pytest.fixture
def engine(runtime_dir: Path) -> Iterator[Engine]:
    with Engine.open(config(runtime_dir)) as opened:
        yield opened


def small(seed: int = 0) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "model": {"w": torch.randn(300, 70, generator=generator), "b": torch.randn(7)},
        "lr": 0.1 + seed,
    }


def failure_of(call: Any) -> BaseException:
    with pytest.raises(CheckpointException) as caught:
        call()
    return caught.value.failures[0][0]


# --- what a state may be --------------------------------------------------------------------------


class Counter:
    """A Stateful object."""

    def __init__(self, value: int) -> None:
        self.value = torch.tensor(value)
        self.loads = 0

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]
        self.loads += 1


def test_environment_overrides(runtime_dir: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TIEREDCKPT_RUNTIME_DIR", str(runtime_dir))
    monkeypatch.setenv("TIEREDCKPT_NAMESPACE", "by-environment")
    with Engine.open() as engine:
        assert engine.namespace == "by-environment"
        assert engine.status().runtime_dir == str(runtime_dir)
        assert engine.host_id == engine.status().health.host_id
    monkeypatch.delenv("TIEREDCKPT_NAMESPACE")
    with pytest.raises(ConfigError, match="namespace"):
        Engine.open()


def test_checkpoint_id_names_step_and_stream(engine: Engine):
    writer = engine.writer()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in (0, 10):
            dcp.save(small(step), checkpoint_id=f"out/actor/step-{step}", storage_writer=writer)
        back = blank(small())
        dcp.load(back, checkpoint_id="out/actor/step-10", storage_reader=engine.reader())
    assert same(back, small(10)) or back["lr"] == 10.1
    assert [info.step for info in engine.checkpoints("actor")] == [10, 0]
    assert engine.checkpoints() == []
    assert engine.latest("actor").step == 10  # type: ignore[union-attr]
    assert engine.load(blank(small()), stream="actor") == 10


def test_the_items_of_a_state_count_whatever_mapping_it_is(engine: Engine):
    """As for DCP: a mapping with a state_dict() of its own is read by its items."""

    class State(UserDict[str, Any]):
        def state_dict(self) -> dict[str, Any]:
            return {key: value.clone() for key, value in self.items()}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.update(state)

    save(engine, 1, {"w": torch.arange(5.0)})
    weight = torch.zeros(5)
    state: Any = State(w=weight)
    assert engine.load(state) == 1
    assert torch.equal(weight, torch.arange(5.0))


# --- using it wrongly -----------------------------------------------------------------------------


def test_wrong_use_of_writers(engine: Engine):
    state = small()
    assert "no step" in str(failure_of(lambda: save(engine, None, state)))  # type: ignore[arg-type]
    writer = engine.writer(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, storage_writer=writer)
        for options, text in (
            ({}, "has saved step 1 already"),
            ({"checkpoint_id": "step-2"}, "names step 2"),
            ({"checkpoint_id": "latest"}, "names no step"),
            ({"checkpoint_id": "my run/step-1"}, "stream"),
        ):
            error = failure_of(lambda o=options: dcp.save(state, storage_writer=writer, **o))
            assert isinstance(error, UsageError)
            assert text in str(error)
        error = failure_of(
            lambda: dcp.save(
                state, checkpoint_id="b/step-3", storage_writer=engine.writer(3, stream="a")
            )
        )
        assert "stream 'b'" in str(error)
    assert [info.step for info in engine.checkpoints()] == [1]


def test_a_stopped_agent_is_not_waited_for_beyond_the_deadline(engine: Engine):
    save(engine, 1, small())
    pid = engine.status().health.pid
    os.kill(pid, signal.SIGSTOP)
    try:
        with pytest.raises(AgentError, match=r"did not answer within 1\.\d+ s"):
            engine.wait(1, "memory", 0.5)
    finally:
        os.kill(pid, signal.SIGCONT)
    engine.wait(1, "memory", 60.0)


def test_first_save_without_a_load_is_refused(runtime_dir: Path):
    with Engine.open(config(runtime_dir)) as first:
        save(first, 1, small())
    with Engine.open(config(runtime_dir)) as second:
        error = failure_of(lambda: save(second, 2, small()))
        assert isinstance(error, UsageError)
        assert "call engine.load" in str(error)
        save(second, 1, small(), stream="other")  # that one is new
        state = blank(small())
        load(state, second.reader())  # counts as a load
        save(second, 2, small())
        assert [info.step for info in second.checkpoints()] == [2, 1]
        assert manifest_of(second, 2).parent == manifest_of(second, 1).save_id


def test_closed_and_forked_engines(runtime_dir: Path):
    engine = Engine.open(config(runtime_dir))
    writer, reader = engine.writer(1), engine.reader()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            engine.status()
        except UsageError as error:
            code = 0 if "fork" in str(error) else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    engine.close()
    engine.close()
    for call in (engine.status, lambda: engine.load({}), lambda: engine.writer(1)):
        with pytest.raises(UsageError, match="closed"):
            call()
    assert isinstance(failure_of(lambda: load(small(), reader)), UsageError)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        error = failure_of(lambda: dcp.save(small(), storage_writer=writer))
    assert isinstance(error, UsageError)
    with pytest.raises(TypeError):
        engine.__reduce__()


# --- planners -------------------------------------------------------------------------------------


class Casting(DefaultSavePlanner):
    def resolve_data(self, write_item: Any) -> Any:
        value = super().resolve_data(write_item)
        return value.to(torch.bfloat16) if isinstance(value, torch.Tensor) else value


class Reordering(DefaultSavePlanner):
    """Changes the plan after global planning, so the coordinator has not seen what is written."""

    def finish_plan(self, new_plan: Any) -> Any:
        plan = super().finish_plan(new_plan)
        plan.items.reverse()
        return plan


def test_a_cast_that_was_not_planned_is_refused(engine: Engine):
    error = failure_of(lambda: save(engine, 1, small(), planner=Casting()))
    assert isinstance(error, UsageError)
    assert "'model.w' was planned as float32 [300, 70], but is bfloat16 [300, 70]" in str(error)
    assert engine.checkpoints() == []
    save(engine, 1, small())  # the slot came back


def test_plans_changed_after_global_planning(engine: Engine):
    save(engine, 1, small(), planner=Reordering())
    back = blank(small())
    engine.load(back)
    assert back["lr"] == 0.1
    assert torch.equal(back["model"]["w"], small()["model"]["w"])


def test_plan_is_stored_once(engine: Engine):
    for step in range(3):
        save(engine, step, small(step))
    assert len({manifest_of(engine, step).plan for step in range(3)}) == 1
    assert engine._session.plans["default"].builds == 1
    save(engine, 3, {**small(), "more": torch.ones(1)})
    assert engine._session.plans["default"].builds == 2


def test_planner_data_that_is_not_plain_is_named(engine: Engine):
    class Odd(DefaultSavePlanner):
        def create_global_plan(self, all_plans: Any) -> Any:
            plans, metadata = super().create_global_plan(all_plans)
            vars(metadata)["mcore_data"] = {"a": object()}
            return plans, metadata

    error = failure_of(lambda: save(engine, 1, small(), planner=Odd()))
    assert isinstance(error, UsageError)
    assert "Metadata.mcore_data" in str(error)
    assert "builtins.object" in str(error)


def test_a_lost_plan_is_made_anew(engine: Engine, runtime_dir: Path):
    state = small(3)
    save(engine, 1, state)
    plan = manifest_of(engine, 1).plan
    for path in (runtime_dir / "ns").rglob(f"*{plan}*"):
        path.write_bytes(b"x" * path.stat().st_size)
    back = blank(state)
    load(back, engine.reader())
    assert same(back, state)


# --- strictness -----------------------------------------------------------------------------------


def test_strictness(engine: Engine):
    state = {**small(), "nothing": torch.zeros(0)}
    save(engine, 1, state)
    part = {"lr": None}
    with pytest.raises(UsageError, match=r"2 key\(s\).*'model.b'|2 key\(s\).*'model.w'"):
        engine.load(part)
    with pytest.warns(UserWarning, match=r"2 key\(s\) of the checkpoint that no rank asked for"):
        assert engine.load(part, strict=False) == 1
    assert part == {"lr": 0.1}
    more = {**blank(small()), "extra": torch.full((2,), 7.0)}
    with pytest.raises(CheckpointException, match="Missing key in checkpoint state_dict: extra"):
        engine.load(more)
    with pytest.warns(UserWarning, match="'extra'"):
        engine.load(more, strict=False)
    assert torch.equal(more["extra"], torch.full((2,), 7.0))
    assert more["lr"] == 0.1


WRAPPED: list[tuple[list[str], list[str], str]] = [
    (["_orig_mod.0.w", "_orig_mod.1.w"], ["0.w", "1.w"],
     "the checkpoint have the prefix '_orig_mod.', which those of the state do not have"),
    (["model.0.w", "model.1.w"], ["model.module._orig_mod.0.w", "model.module._orig_mod.1.w",
     "model.head"], "the state have the prefix 'module._orig_mod.', which those of the check"),
    (["a.inner.w", "b.inner.w"], ["a.w", "b.w"], "the checkpoint have the prefix 'inner.'"),
    (["a.w", "b.w"], ["c.w", "d.w"], ""),
]  # fmt: skip
"""Keys that were saved, keys that are asked for, and what the error says of them."""


def test_a_load_that_would_restore_no_tensor(engine: Engine):
    for number, (saved, asked, says) in enumerate(WRAPPED):
        stream = f"s{number}"
        save(engine, 1, {**{key: torch.ones(2) for key in saved}, "lr": 0.1}, stream=stream)
        state = {**{key: torch.zeros(2) for key in asked}, "lr": 0.2}
        with pytest.raises(UsageError, match=f"no tensor would be restored: .*{says}"):
            engine.load(state, stream=stream, strict=False)
        planner = SafeLoadPlanner(allow_partial_load=True)
        with pytest.raises(CheckpointException, match="no tensor would be restored"):
            load(state, engine.reader(stream=stream), planner=planner)
        with pytest.raises(CheckpointException) as strictly:
            engine.load(state, stream=stream)
        ((error, _),) = strictly.value.failures.values()
        assert says in error.__notes__[0].partition("strict=False")[0]
        assert ("prefix" in error.__notes__[0]) == bool(says)
        assert state["lr"] == 0.2
        assert not any(state[key].any() for key in asked)
        only = {"lr": 0.2}  # there is no tensor to restore
        with pytest.warns(UserWarning, match="no rank asked for"):
            assert engine.load(only, stream=stream, strict=False) == 1


def test_what_a_failed_checkpoint_left_is_not_taken_for_untouched(
    engine: Engine, runtime_dir: Path
):
    """Bytes are read into the tensors, and then verified: of step 2 "extra" is read, and stays."""
    save(engine, 1, {"w": torch.full((9000,), 1.0)})
    save(engine, 2, {"extra": torch.full((9000,), 2.0), "w": torch.full((9000,), 2.0)})
    flip(slot_of(runtime_dir, manifest_of(engine, 2).segments[0].id), 64)
    state = {"extra": torch.full((9000,), 7.0), "w": torch.zeros(9000)}
    with (
        pytest.warns(UserWarning, match="'extra'"),
        pytest.raises(NoRecoverableCheckpointError, match=r"'extra'.*undefined") as caught,
    ):
        engine.load(state, strict=False)
    assert [step for _, step, _ in caught.value.fields["refused"]] == [2]
    state = {"extra": torch.full((9000,), 7.0), "w": torch.zeros(9000)}
    with pytest.warns(UserWarning, match="'extra'"):
        assert engine.load(state, strict=False, step=1, abandon_newer=True) == 1
    assert (state["extra"] == 7).all()
    assert (state["w"] == 1).all()
    assert engine.load({"w": torch.zeros(9000)}) == 1


def test_users_errors_propagate_and_do_not_walk_back(engine: Engine):
    save(engine, 1, small())
    save(engine, 2, small())
    wrong = blank(small())
    wrong["model"]["w"] = torch.zeros(3, 3)
    with pytest.raises(CheckpointException, match="Size mismatch"):
        engine.load(wrong)
    counter = {"c": Counter(1)}
    save(engine, 3, counter)

    class Failing(Counter):
        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        engine.load({"c": Failing(0)})


def test_pickles_that_run_code_are_refused(runtime_dir: Path):
    with Engine.open(config(runtime_dir)) as engine:
        with pytest.warns(UserWarning, match=r"'v' contains pathlib.*Path"):
            save(engine, 1, {"v": Path})
        with pytest.raises(UsageError, match=r"pathlib(\._local)?\.Path"):
            engine.load({"v": None})
    with Engine.open(config(runtime_dir), unsafe_pickle=True) as engine:
        back = {"v": None}
        assert engine.load(back) == 1
        assert back["v"] is Path


# --- damage, walking back, rolling back -----------------------------------------------------------


def test_saving_what_will_not_load_by_default_warns_once(engine: Engine):
    state = {"w": torch.ones(3), "side": ("a", threading.Event)}
    with pytest.warns(UserWarning, match="'side' contains threading.Event.*allow="):
        save(engine, 1, state)
    save(engine, 2, state)  # a second warning would be an error here


def test_loading_another_stream_than_was_saved_warns(engine: Engine):
    state = {"w": torch.ones(3)}
    dcp.save(state, checkpoint_id="/runs/7/step-3", storage_writer=engine.writer())
    with pytest.warns(UserWarning, match="other streams do: '7'"):
        assert engine.load({"w": torch.zeros(3)}) is None
    assert engine.load(state, stream="7") == 3


def test_a_tier_that_hangs_while_it_lists_namespaces_holds_up_no_load(
    runtime_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """As a network file system may: what is looked for there is only a warning."""
    (tmp_path / "disk" / "tests" / "manifests").mkdir(parents=True)
    listing, answers = threading.Event(), threading.Event()

    def hangs(tier: FileTier) -> list[str]:
        listing.set()
        answers.wait()
        return ["tests"]

    monkeypatch.setattr(FileTier, "beside", hangs)
    monkeypatch.setattr(other_hosts, "LIST_WAIT_S", 0.1)
    disk = {"name": "disk", "url": f"file://{tmp_path / 'disk'}"}
    with Engine.open(config(runtime_dir, recovery={"wait": "20s"}) | {"tiers": [disk]}) as engine:
        try:
            assert engine.load({}) is None  # a warning would be an error here
            assert listing.is_set()
        finally:
            answers.set()
        with pytest.warns(UserWarning, match="similar name: 'tests'"):
            assert engine.load({}) is None


def test_explicit_step_never_walks_back(engine: Engine, runtime_dir: Path):
    for step in (1, 2):
        save(engine, step, small(step))
    flip(slot_of(runtime_dir, manifest_of(engine, 2).segments[0].id), 100)
    with pytest.raises(IntegrityError, match="undefined") as caught:
        engine.load(blank(small()), step=2)
    assert isinstance(caught.value.__cause__, CheckpointException)
    load(blank(small()), engine.reader(step=1))
    error = failure_of(lambda: load(blank(small()), engine.reader(step=2)))
    assert isinstance(error, IntegrityError | NoRecoverableCheckpointError)


def test_a_script_that_goes_back_is_started_again(runtime_dir: Path):
    """It would lose the line that had gone on from there, at each start."""
    settings = config(runtime_dir, memory={"keep": {"last": 9}})
    with Engine.open(settings) as engine:
        for step in (40, 50):
            save(engine, step, small(step))
    for start, saved in ((1, ()), (2, (45, 60))):  # the first one ended before its first save
        with Engine.open(settings) as engine:
            assert engine.load(blank(small()), step=40, abandon_newer=True) == 40, start
            for step in saved:
                save(engine, step, small(step))
    with Engine.open(settings) as engine:
        assert engine.load(blank(small())) == 60
        save(engine, 70, small(70))  # in an attempt of its own
    with Engine.open(settings) as engine:
        line = {info.step: info.save_id for info in engine.checkpoints()}
        assert list(line) == [70, 60, 45, 40]
        for named in ({"step": 40}, {"save_id": line[40]}):
            with pytest.raises(
                UsageError, match=r"step 40 before.* the 3 checkpoint.*again"
            ) as caught:
                engine.load(blank(small()), abandon_newer=True, **named)
            for step in (45, 60, 70):
                assert f"step {step} ({line[step]})" in str(caught.value)
        with pytest.raises(UsageError, match="abandon_newer"):
            engine.load(blank(small()), step=40, again=True)
        assert engine.load(blank(small()), step=60, abandon_newer=True) == 60, "not gone back to"
        assert engine.load(blank(small()), step=40, abandon_newer=True, again=True) == 40
        save(engine, 41, small(41))
        assert [info.step for info in engine.checkpoints()] == [41, 40]


@pytest.mark.parametrize("state", [None, [1], torch.nn.Linear(1, 1)])
def test_a_state_that_is_no_dict(engine: Engine, state: object):
    with pytest.raises(UsageError, match=r"needs a dict.*for example.* a (NoneType|list|Linear)"):
        engine.load(state)  # type: ignore[arg-type]


class Rows(DataLoader[int]):
    """A loader that resumes."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def test_a_load_warns_of_a_loader_without_a_generator_of_its_own(
    runtime_dir: Path, caplog: pytest.LogCaptureFixture
):
    own, other = Rows(range(4), generator=torch.Generator()), Rows(range(4))  # type: ignore[arg-type]
    with Engine.open(config(runtime_dir)) as engine:
        engine.load({"own": per_rank(own), "rows": per_rank(other), "alone": other})
    found = [each for each in caplog.messages if "no generator of its own" in each]
    assert [each.split()[2] for each in found] == ["'rows'", "'alone'"]


def test_roll_back_abandons_and_goes_on(runtime_dir: Path, caplog: pytest.LogCaptureFixture):
    with Engine.open(config(runtime_dir, memory={"keep": {"last": 5}})) as engine:
        for step in (1, 2, 3):
            save(engine, step, small(step))
        abandoned = manifest_of(engine, 3)
        back = blank(small())
        before = back["model"]["w"].clone()
        with pytest.raises(UsageError, match=r"abandon 2 newer .* steps 2 to 3.*abandon_newer"):
            engine.load(back, step=1)
        assert (back["lr"], same(back["model"]["w"], before)) == (blank(small())["lr"], True)
        assert [info.step for info in engine.checkpoints()] == [3, 2, 1], "nothing was lost"
        assert engine.load(back, step=1, abandon_newer=True) == 1
        assert "the next save abandons 2 newer checkpoint(s)" in caplog.text
        assert [info.step for info in engine.checkpoints()] == [3, 2, 1], "nor by the load"
        save(engine, 2, small(20))
        assert [info.step for info in engine.checkpoints()] == [2, 1]
        back = blank(small())
        assert engine.load(back) == 2
        assert back["lr"] == 20.1
        parent = manifest_of(engine, 2)
        assert parent.parent == manifest_of(engine, 1).save_id
        back = blank(small())
        load(back, engine.reader(save_id=abandoned.save_id))
        assert back["lr"] == 3.1


def test_looking_changes_nothing(runtime_dir: Path, tmp_path: Path):
    """A script that loads old weights beside a job: the job, its files and its restart stay."""
    settings = config(
        runtime_dir, memory={"keep": {"last": 4}},
        tiers=[{"name": "disk", "url": f"file://{tmp_path}/disk", "keep": {"last": 4}}],
    )  # fmt: skip
    with Engine.open(settings) as job:
        for step in (1, 2, 3):
            save(job, step, small(step))
            job.wait(step, "disk")

        def files() -> dict[str, bytes]:
            roots = (tmp_path, runtime_dir / "namespaces")
            found = [p for root in roots for p in root.rglob("*") if p.is_file()]
            return {str(path): path.read_bytes() for path in found}

        before = files()
        for step in (None, 1):
            with Engine.open(settings) as looker, warnings.catch_warnings():
                warnings.simplefilter("ignore")
                if step is None:
                    assert looker.load(blank(small())) == 3
                else:
                    load(blank(small()), looker.reader(step=step))
        assert files() == before
        save(job, 4, small(4))
    with Engine.open(settings) as again:
        assert again.load(blank(small())) == 4
        save(again, 5, small(5))


def test_a_load_that_is_the_first_request_to_a_new_agent(runtime_dir: Path, tmp_path: Path):
    """What the agent before it had noted was lost with it, and so were manifests in memory."""
    tier = {"name": "disk", "url": f"file://{tmp_path}/t"}
    manifests = runtime_dir / "ns/test/manifests/default"
    with contextlib.ExitStack() as agents:
        engine = agents.enter_context(Engine.open(config(runtime_dir, tiers=[tier])))
        for step, lost in ((2, "newest"), (4, "manifests"), (6, "namespace")):
            for each in (step - 1, step):
                save(engine, each, small(each))
                engine.wait(each, "disk", 30)
            newest = manifests / engine.checkpoints()[0].save_id
            with death(pid := engine.status().health.pid):
                os.kill(pid, signal.SIGKILL)
            shutil.rmtree(runtime_dir / "specs")
            if lost == "newest":
                newest.unlink()
            else:
                shutil.rmtree(manifests if lost == "manifests" else runtime_dir / "ns")
            agents.enter_context(AgentProcess(runtime_dir))
            back = blank(small())
            assert engine.load(back) == step, lost
            assert same(back["model"]["w"], small(step)["model"]["w"])


# --- tiers, waiting -------------------------------------------------------------------------------


def test_wait_and_schedule(runtime_dir: Path, tmp_path: Path):
    tier = {"name": "disk", "url": f"file://{tmp_path}/t", "every": "2 steps"}
    with Engine.open(config(runtime_dir, tiers=[tier])) as engine:
        for step in (0, 1, 2):
            save(engine, step, small(step))
            if step != 1:
                engine.wait(step, "disk", 30)
        engine.wait(1, "memory")
        assert manifest_of(engine, 1).tiers == ()
        assert manifest_of(engine, 2).tiers == ("disk",)
        for step, level, reason in (
            (1, "disk", "not_scheduled"),
            (9, "disk", "not_found"),
            (1, "tape", "not_found"),
        ):
            with pytest.raises(WaitError) as caught:
                engine.wait(step, level, 5)
            assert caught.value.reason == reason
        info = engine.latest()
        assert info is not None
        assert info.tiers == ("memory", "disk")


def test_checkpoints_with_blocks_of_other_sizes(runtime_dir: Path, monkeypatch: pytest.MonkeyPatch):
    """Of a release that knew one size only, or that chooses others; a slot that had others."""
    torch.manual_seed(4)
    with Engine.open(config(runtime_dir)) as engine:
        saved = []
        for step, block_bytes in enumerate((4 << 20, 128 << 10, 1 << 20, 12 << 10, 4 << 20)):
            monkeypatch.setattr(items, "choose_block_bytes", lambda _, size=block_bytes: size)
            state = {"w": torch.randn(1300, 1001), "s": torch.randn(step + 1), "n": "x" * step}
            save(engine, step, state)
            path = slot_of(runtime_dir, manifest_of(engine, step).segments[0].id)
            size = manifest_of(engine, step).segments[0].size
            assert decode_trailer(path.read_bytes()[size - 128 : size]).block_bytes == block_bytes
            saved.append(state)
        for step in (2, 3, 4):
            back = blank(saved[step])
            load(back, engine.reader(step))
            assert same(back, saved[step])


def test_a_tier_that_cannot_answer(runtime_dir: Path, tmp_path: Path):
    (tmp_path / "file").write_text("not a folder")
    tier = {"name": "disk", "url": f"file://{tmp_path}/file/below"}
    with Engine.open(config(runtime_dir, tiers=[tier], close={"flush": "0s"})) as engine:
        with pytest.raises(TieredCkptError, match="disk"):
            save_or_raise(engine)
        with pytest.raises(NoRecoverableCheckpointError, match="disk"):
            engine.load(blank(small()))
        assert engine.load(blank(small()), fresh_start=True) is None
        save(engine, 1, small())
        assert engine.load(blank(small())) == 1


def test_a_load_that_waits_says_what_for(
    runtime_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    blocked, said = tmp_path / "file", list[str]()
    blocked.write_text("not a folder")

    def repair(text: str, *values: object) -> None:
        said.append(text % values)
        blocked.unlink()

    monkeypatch.setattr(other_hosts.log, "warning", repair)
    tier = {"name": "disk", "url": f"file://{blocked}/below"}
    with Engine.open(config(runtime_dir, tiers=[tier], recovery={"wait": "60s"})) as engine:
        assert engine.load(blank(small())) is None
    assert len(said) == 1
    for text in ("waits for at most", "disk on", "Not a directory", "recovery.wait sets the time"):
        assert text in said[0]


@pytest.mark.parametrize(
    ("why", "advised"), [("Input/output error", True), ("Permission denied", False)]
)
def test_what_may_not_be_read_is_no_reason_to_begin_anew(why: str, advised: bool):
    error = f"cannot list /mnt/b: [Errno 13] {why}: '/mnt/b'"
    tier = TierFacts(tier="b", scope="host", kind="file", available=False, error=error)
    plan = plan_recovery([Holdings(host_id="a", namespace="run", attempts=(), tiers=(tier,))])
    text = str(not_recoverable(plan, None, None))
    assert error in text
    assert ("fresh_start" in text) == advised


def save_or_raise(engine: Engine) -> None:
    try:
        save(engine, 1, small())
    except CheckpointException as error:
        raise error.failures[0][0] from error


@pytest.mark.gpu
def test_cuda_tensors(engine: Engine):
    state = {
        "w": torch.randn(1000, 1000, device="cuda"),
        "t": torch.randn(30, 40, device="cuda").t(),
        "h": torch.randn(5000, device="cuda").to(torch.bfloat16),
    }
    save(engine, 1, state)
    back = blank(state)
    assert engine.load(back) == 1
    assert all(torch.equal(back[key], state[key]) for key in state)


def test_a_tensor_whose_storage_was_freed_is_refused(engine: Engine):
    state = {"w": torch.arange(1000.0), "strided": torch.arange(1000.0)[::2]}
    save(engine, 1, state)
    for name in state:
        freed = {key: value.clone() for key, value in state.items()}
        freed[name].untyped_storage().resize_(8)
        error = failure_of(lambda freed=freed: save(engine, 2, freed))
        assert isinstance(error, UsageError)
        assert name in str(error)
        with pytest.raises(UsageError, match=name):
            engine.load(freed)
    assert engine.load(blank(state)) == 1


@pytest.mark.parametrize("after", ["_lock_granted", "_reserve"])
def test_interrupted_saves_leak_no_slot(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, after: str
):
    state = small()
    for step in range(3):
        save(engine, step, state)
    slots = engine.status().namespaces[0].slots
    original = getattr(slot_ring.SlotRing, after)

    def interrupted(self: slot_ring.SlotRing, *args: Any) -> Any:
        original(self, *args)
        raise KeyboardInterrupt

    for step in range(3, 6):
        with monkeypatch.context() as patch:
            patch.setattr(slot_ring.SlotRing, after, interrupted)
            if after == "_reserve":
                patch.setattr(slot_ring.SlotRing, "_lock_granted", lambda *_: None)
            error = failure_of(lambda step=step: save(engine, step, state))
            assert isinstance(error, KeyboardInterrupt)
        save(engine, step, state)
    assert engine.status().namespaces[0].slots == slots


# --- two jobs of one namespace --------------------------------------------------------------------


def test_a_second_start_is_refused_beside_one_that_saves(
    runtime_dir: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    with Engine.open(config(runtime_dir)) as first:
        save(first, 1, small())
        Engine.open(config(runtime_dir)).close()  # Slurm's requeue has the same id
        monkeypatch.setenv("SLURM_JOB_ID", "2")
        with pytest.raises(NamespaceInUseError, match=f"process {os.getpid()} of host .* step 1"):
            Engine.open(config(runtime_dir))
        save(first, 2, small())
        monkeypatch.setenv("TIEREDCKPT_TAKE_OVER", "true")
        Engine.open(config(runtime_dir)).close()
    names = [{"TORCHELASTIC_RUN_ID": "none"}, {"TORCHELASTIC_RUN_ID": "x", "JOBSET_NAME": "y"}]
    assert [open_module._job(each) for each in names] == [
        f"pid {os.getpid()}", "JOBSET_NAME=y\nTORCHELASTIC_RUN_ID=x",
    ]  # fmt: skip
