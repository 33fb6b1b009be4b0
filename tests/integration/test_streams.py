"""Several streams of one job: restored together at the newest step that all of them have."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.ranks import run_ranks
from tests.support.states import config, flip, manifest_of, save, slot_of
from tieredckpt.engine import Engine
from tieredckpt.errors import NoRecoverableCheckpointError, NotFoundError, UsageError

pytestmark = pytest.mark.usefixtures("served")

BOTH = ("actor", "critic")


def part(name: str, step: int | None) -> dict[str, Any]:
    number = -1 if step is None else step
    return {"w": torch.full((2000,), number), "name": name if step is not None else "", "n": number}


def blank(*names: str) -> dict[str, Any]:
    return {name: part(name, None) for name in names}


def assert_are(state: dict[str, Any], step: int) -> None:
    for name, content in state.items():
        assert torch.equal(content["w"], torch.full((2000,), step)), name
        assert (content["name"], content["n"]) == (name, step)


def damage(engine: Engine, runtime_dir: Path, step: int, stream: str) -> None:
    flip(slot_of(runtime_dir, manifest_of(engine, step, stream).segments[0].id), 64)


def save_parts(engine: Engine, **steps: tuple[int, ...]) -> None:
    for step in sorted({step for each in steps.values() for step in each}):
        for name, wanted in steps.items():
            if step in wanted:
                save(engine, step, part(name, step), stream=name)


@pytest.fixture
def engine(runtime_dir: Path) -> Iterator[Engine]:
    with Engine.open(config(runtime_dir)) as found:
        yield found


def again(runtime_dir: Path) -> Engine:
    return Engine.open(config(runtime_dir))


# --- the newest common step -----------------------------------------------------------------------


def test_the_newest_step_of_both(engine: Engine, runtime_dir: Path):
    assert engine.load(blank(*BOTH), stream=BOTH) is None
    save_parts(engine, actor=(1, 2, 3), critic=(1, 2))
    with again(runtime_dir) as restarted:
        state = blank(*BOTH)
        assert restarted.load(state, stream=BOTH) == 2
        assert_are(state, 2)
        report = restarted.last_restore
        assert report is not None
        assert report.save_ids == {name: manifest_of(restarted, 2, name).save_id for name in BOTH}
        assert [found.step for found in restarted.checkpoints("actor")] == [3, 2, 1]
        # Both go on from there, in one attempt: the actor's step 3 is abandoned.
        save_parts(restarted, actor=(3, 4), critic=(3,))
        made = [manifest_of(restarted, 3, name) for name in BOTH]
        assert made[0].attempt == made[1].attempt
        assert [found.step for found in restarted.checkpoints("actor")] == [4, 3, 2]
        state = blank(*BOTH)
        assert restarted.load(state, stream=("critic", "actor")) == 3
        assert_are(state, 3)


def test_streams_that_the_keys_name(engine: Engine, runtime_dir: Path):
    assert engine.load(blank(*BOTH)) is None  # "default" begins anew, and so do they
    save_parts(engine, actor=(1, 2), critic=(1,))
    with again(runtime_dir) as restarted:
        state = blank(*BOTH)
        assert restarted.load(state) == 1
        assert_are(state, 1)
        # A key that names no stream: then the stream "default" is meant, which holds nothing.
        with pytest.warns(UserWarning, match="other streams do: 'actor', 'critic'"):
            assert restarted.load({**blank(*BOTH), "lr": 1.0}) is None
    with again(runtime_dir) as restarted:
        save(restarted, 7, blank(*BOTH))  # now "default" holds something: it is meant
        state = blank(*BOTH)
        assert restarted.load(state) == 7
        assert state["actor"]["n"] == -1


class Module:
    """A Stateful for each stream, as a script may hold it."""

    def __init__(self, name: str) -> None:
        self.content = part(name, None)
        self.calls = 0

    def state_dict(self) -> dict[str, Any]:
        return dict(self.content)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.content = state
        self.calls += 1


def test_stateful_parts(engine: Engine, runtime_dir: Path):
    save_parts(engine, actor=(1, 2), critic=(1, 2))
    damage(engine, runtime_dir, 2, "critic")
    with again(runtime_dir) as restarted:
        state = {name: Module(name) for name in BOTH}
        assert restarted.load(state) == 1
        assert_are({name: module.content for name, module in state.items()}, 1)
        assert [module.calls for module in state.values()] == [1, 1]


@pytest.mark.parametrize("bad", ["critic", pytest.param("actor", marks=pytest.mark.full)])
def test_they_walk_back_together(engine: Engine, runtime_dir: Path, bad: str):
    save_parts(engine, actor=(1, 2, 3), critic=(1, 2, 3))
    damage(engine, runtime_dir, 3, bad)
    with again(runtime_dir) as restarted:
        state = blank(*BOTH)
        assert restarted.load(state, stream=BOTH) == 2
        assert_are(state, 2)
        assert restarted.last_restore is not None
        assert [step for _, step, _ in restarted.last_restore.refused] == [3]
        other = BOTH[1 - BOTH.index(bad)]
        assert [found.step for found in restarted.checkpoints(other)] == [3, 2, 1]
        for step in (1, 2):
            damage(restarted, runtime_dir, step, bad)
        with pytest.raises(NoRecoverableCheckpointError) as caught:
            restarted.load(blank(*BOTH), stream=BOTH)
        assert f"stream {other!r} has step 3, 2, 1" in str(caught.value)
        assert "undefined" in str(caught.value)
        assert "fresh_start" not in str(caught.value)
        with pytest.raises(NoRecoverableCheckpointError):  # it is there, and may be repaired
            restarted.load(blank(*BOTH), stream=BOTH, fresh_start=True)


def test_no_step_in_common(engine: Engine, runtime_dir: Path):
    save_parts(engine, actor=(1, 3), critic=(2, 4))
    with again(runtime_dir) as restarted:
        state = blank(*BOTH)
        with pytest.raises(NoRecoverableCheckpointError) as caught:
            restarted.load(state, stream=BOTH)
        for text in ("'actor' has step 3, 1", "'critic' has step 4, 2", "fresh_start=True"):
            assert text in str(caught.value)
        with pytest.raises(NotFoundError, match="'critic' has no checkpoint"):
            restarted.load(state, stream=BOTH, step=3)
        # A stream that was added later has nothing.
        with pytest.raises(NoRecoverableCheckpointError, match="'reward' has no checkpoint"):
            restarted.load(blank("actor", "reward"), stream=("actor", "reward"))
        assert state["actor"]["n"] == -1
        assert restarted.load(state, stream=BOTH, fresh_start=True) is None
        assert [found.step for found in restarted.checkpoints("actor")] == [3, 1]
        save_parts(restarted, actor=(0,), critic=(0,))
        assert [found.step for found in restarted.checkpoints("actor")] == [0]
        assert restarted.load(state, stream=BOTH) == 0


def test_a_step_of_both(engine: Engine, runtime_dir: Path):
    save_parts(engine, actor=(1, 2, 3), critic=(1, 2, 3))
    with again(runtime_dir) as restarted:
        state = blank(*BOTH)
        with pytest.raises(UsageError, match="would abandon 2 newer"):
            restarted.load(state, stream=BOTH, step=1)
        assert [found.step for found in restarted.checkpoints("critic")] == [3, 2, 1]
        assert restarted.load(state, stream=BOTH, step=1, abandon_newer=True) == 1
        assert_are(state, 1)
        save_parts(restarted, actor=(2,))
        assert [found.step for found in restarted.checkpoints("critic")] == [1]


def test_what_is_no_valid_request(engine: Engine):
    save_parts(engine, actor=(1,), critic=(1,))
    for streams in ((), ("actor", "actor"), ("actor", "no/name")):
        with pytest.raises(UsageError):
            engine.load({}, stream=streams)
    with pytest.raises(UsageError, match="'crtic', which is none of the streams"):
        engine.load(blank("actor", "crtic"), stream=BOTH)
    with pytest.raises(UsageError, match="is a Tensor"):
        engine.load({"actor": torch.zeros(2)}, stream=BOTH)
    with pytest.raises(UsageError, match="leave out"):  # nobody asks for the critic's keys
        engine.load(blank("actor"), stream=BOTH)


# --- over ranks -----------------------------------------------------------------------------------


def trains(rank: int, runtime_dir: str, expected: int | None, actors: int) -> None:
    """The actor on the first ranks, the critic on the others; each is saved by its own group."""
    world = dist.get_world_size()
    actor = dist.new_group(list(range(actors)))
    critic = dist.new_group(list(range(actors, world)))
    name, group = ("actor", actor) if rank < actors else ("critic", critic)
    with Engine.open(config(Path(runtime_dir), memory={"keep": {"last": 10}})) as engine:
        state = blank(name)
        assert engine.load(state, stream=BOTH) == expected
        if expected is not None:
            assert_are(state, expected)
        first = 0 if expected is None else expected + 1
        for step in range(first, first + (4 if name == "actor" else 2)):
            save(engine, step, part(name, step), stream=name, process_group=group)
        dist.barrier()
        steps = {each: [c.step for c in engine.checkpoints(each)] for each in BOTH}
        assert steps["actor"][:4] == [first + 3, first + 2, first + 1, first]
        assert steps["critic"][:2] == [first + 1, first]


def test_actor_and_critic_on_different_ranks(runtime_dir: Path):
    for actors, world, expected in ((1, 2, None), (2, 3, 1)):
        run_ranks(trains, world, str(runtime_dir), expected, actors)


def differ(rank: int, runtime_dir: str) -> None:
    with Engine.open(config(Path(runtime_dir))) as engine:
        with pytest.raises(UsageError, match="different checkpoints"):
            engine.load({}, stream=BOTH if rank else "actor")
        with pytest.raises(UsageError, match="different checkpoints"):
            engine.load({}, stream=BOTH if rank else BOTH[::-1])
        with pytest.raises(UsageError, match="none of the streams"):
            engine.load({"x": {}} if rank else {}, stream=BOTH)


@pytest.mark.full
def test_ranks_that_name_different_streams(runtime_dir: Path):
    run_ranks(differ, 2, str(runtime_dir))
