"""Process groups that save and load by themselves: one job, several streams, one time line each."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from tests.support.ranks import RankFailed, run_ranks
from tests.support.states import config, load, manifest_of, save
from tieredckpt.engine import Engine
from tieredckpt.errors import UsageError
from tieredckpt.format.manifest import Manifest

pytestmark = pytest.mark.usefixtures("served")


def opened(runtime_dir: str, **more: Any) -> Engine:
    return Engine.open(config(Path(runtime_dir), **more))


def failures_of(call: Any) -> dict[int, BaseException]:
    with pytest.raises(CheckpointException) as caught:
        call()
    return {rank: failure[0] for rank, failure in caught.value.failures.items()}


def content(seed: int) -> torch.Tensor:
    return torch.arange(seed, seed + 24, dtype=torch.float64).reshape(6, 4)


def sharded(group: dist.ProcessGroup, seed: int | None) -> dict[str, Any]:
    """A tensor over the group's ranks, and what each of them has alike."""
    mesh = DeviceMesh.from_group(group, "cpu")
    whole = content(seed) if seed is not None else torch.zeros(6, 4, dtype=torch.float64)
    return {
        "w": distribute_tensor(whole, mesh, [Shard(0)]),
        "meta": {"seed": seed if seed is not None else -1},
    }


def assert_is(state: dict[str, Any], seed: int) -> None:
    assert torch.equal(state["w"].full_tensor(), content(seed))
    assert state["meta"] == {"seed": seed}


def split(sizes: tuple[int, ...]) -> tuple[dist.ProcessGroup, str]:
    """This rank's group among consecutive ones, and its stream."""
    first, mine = 0, None
    for number, size in enumerate(sizes):
        ranks = list(range(first, first + size))
        group = dist.new_group(ranks)
        if dist.get_rank() in ranks:
            mine = group, f"part{number}"
        first += size
    assert mine is not None
    return mine


# --- two groups at once ---------------------------------------------------------------------------


def both(rank: int, runtime_dir: str, sizes: tuple[int, ...], before: int | None) -> int | None:
    """Each group loads its stream and saves five times, at its own pace."""
    with opened(runtime_dir) as engine:
        group, stream = split(sizes)
        state = sharded(group, None)
        step = engine.load(state, stream=stream, process_group=group)
        assert step == before
        if step is not None:
            assert_is(state, step)
        first = 0 if step is None else step + 1
        for now in range(first, first + 5):
            save(engine, now, sharded(group, now), stream=stream, process_group=group)
        state = sharded(group, None)
        load(state, engine.reader(stream=stream), process_group=group)
        assert_is(state, first + 4)
        dist.barrier()
        for each in range(len(sizes)):
            steps = [found.step for found in engine.checkpoints(f"part{each}")]
            assert steps == [first + 4, first + 3, first + 2]
        manifest = manifest_of(engine, first + 4, stream)
        assert manifest.world_size == dist.get_world_size(group)
        assert len(manifest.segments) == manifest.world_size
        return first + 4


def test_two_groups_save_at_the_same_time_over_restarts(runtime_dir: Path):
    before = None
    for sizes in ((2, 1), (1, 2)):
        found = run_ranks(both, sum(sizes), str(runtime_dir), sizes, before)
        before = found[0]
    assert before == 9


# --- one attempt after another, in one run --------------------------------------------------------


def lineages(engine: Engine, stream: str) -> list[Manifest]:
    return [
        candidate.manifest for candidate in engine._session.history.recovery_plan(stream).candidates
    ]


def rolls_back(rank: int, runtime_dir: str) -> None:
    with opened(runtime_dir) as engine:
        group, stream = split((1, 1))
        for step in (1, 2):
            save(engine, step, sharded(group, step), stream=stream, process_group=group)
        dist.barrier()
        for turn in range(3):
            if rank == 0:  # only this one rolls back: a new attempt, again and again
                state = sharded(group, None)
                found = engine.load(
                    state, step=1, stream=stream, process_group=group, abandon_newer=True,
                    again=turn == 2,
                )  # fmt: skip
                assert found == 1
                assert_is(state, 1)
                if turn:
                    save(engine, 2, sharded(group, 10 + turn), stream=stream, process_group=group)
            dist.barrier()
            if rank == 1:
                save(engine, 3 + turn, sharded(group, turn), stream=stream, process_group=group)
            dist.barrier()
        assert [m.step for m in lineages(engine, "part0")] == [2, 1]
        assert [m.step for m in lineages(engine, "part1")] == [5, 4, 3]
        newest = lineages(engine, "part1")
        assert [m.parent for m in newest[:2]] == [m.save_id for m in newest[1:]]
        assert newest[0].attempt.number > newest[1].attempt.number > newest[2].attempt.number
        state = sharded(group, None)
        load(state, engine.reader(stream=stream), process_group=group)
        assert_is(state, (12, 2)[rank])


def test_a_roll_back_of_one_group_leaves_the_other_alone(runtime_dir: Path):
    run_ranks(rolls_back, 2, str(runtime_dir))


def from_all_to_parts(rank: int, runtime_dir: str) -> None:
    """A load on all ranks, saves in sub-groups, and the reverse."""
    with opened(runtime_dir) as engine:
        everyone = dist.new_group(list(range(4)))
        assert engine.load(sharded(everyone, None)) is None
        group, stream = split((2, 2))
        save(engine, 1, sharded(everyone, 1))
        save(engine, 2, sharded(group, 2), stream=stream, process_group=group)
        state = sharded(everyone, None)
        assert engine.load(state) == 1
        assert_is(state, 1)
        # The load on all ranks was of the stream "default" alone: the others go on.
        save(engine, 3, sharded(group, 3), stream=stream, process_group=group)
        save(engine, 4, sharded(everyone, 4))
        # What a sub-group saved is loaded by all, resharded; then a sub-group's rank 2 goes on.
        state = sharded(everyone, None)
        assert engine.load(state, stream="part0") == 3
        assert_is(state, 3)
        if rank >= 2:
            save(engine, 5, sharded(group, 5), stream="part0", process_group=group)
            assert manifest_of(engine, 5, "part0").parent == manifest_of(engine, 3, "part0").save_id
        dist.barrier()
        assert [found.step for found in engine.checkpoints("part0")] == [5, 3, 2]
        if rank < 2:  # without a load this group would go on from a checkpoint that it never had
            other = sharded(group, 6)
            found = failures_of(lambda: save(engine, 6, other, stream="part0", process_group=group))
            assert isinstance(found[0], UsageError)
            assert "engine.load" in str(found[0])
        dist.barrier()
        assert [found.step for found in engine.checkpoints("part0")] == [5, 3, 2]
        assert [found.step for found in engine.checkpoints()] == [4, 1]


@pytest.mark.full
def test_load_on_all_ranks_save_in_sub_groups_and_the_reverse(runtime_dir: Path):
    run_ranks(from_all_to_parts, 4, str(runtime_dir))


# --- what is refused ------------------------------------------------------------------------------


def was_refused(engine: Engine, step: int, state: dict[str, Any]) -> bool:
    """Whether this rank may not save alone; anything but our error is raised."""
    try:
        save(engine, step, state, no_dist=True)
    except CheckpointException as error:
        cause = error.failures[0][0]
        if not isinstance(cause, UsageError):
            raise
        return True
    return False


def no_dist_everywhere(rank: int, runtime_dir: str, loads: bool) -> bool:
    with opened(runtime_dir) as engine:
        if loads:
            engine.load({})
        dist.barrier()
        refused = was_refused(engine, 1, {"rank": torch.full((3,), rank)})
        dist.barrier()
        assert len(engine.checkpoints()) == 1
        dist.barrier()
        if not refused:  # whoever began goes on
            save(engine, 2, {"rank": torch.full((3,), rank)}, no_dist=True)
            assert len(engine.checkpoints()) == 2
        return refused


@pytest.mark.parametrize("loads", [True, pytest.param(False, marks=pytest.mark.full)])
def test_no_dist_on_several_ranks_is_refused(runtime_dir: Path, loads: bool):
    found = run_ranks(no_dist_everywhere, 3, str(runtime_dir), loads)
    assert sorted(found) == [False, True, True]


def no_dist_alone(rank: int, runtime_dir: str) -> None:
    """One rank, not rank 0, saves alone; it is the one that goes on, over an agent's restart."""
    with opened(runtime_dir) as engine:
        engine.load({})
        if rank == 1:
            for step in (1, 2):
                save(engine, step, {"a": torch.full((2,), step)}, no_dist=True)
            os.kill(engine.status().health.pid, 9)
            save(engine, 3, {"a": torch.full((2,), 3)}, no_dist=True)
        dist.barrier()
        if rank == 0:  # the agent has forgotten nothing that matters
            os.kill(engine.status().health.pid, 9)
            found = failures_of(lambda: save(engine, 4, {"a": torch.zeros(2)}, no_dist=True))
            assert isinstance(found[0], UsageError)
        dist.barrier()
        state = {"a": torch.zeros(2)}
        assert engine.load(state) == 3
        assert torch.equal(state["a"], torch.full((2,), 3.0))


@pytest.mark.full
def test_no_dist_on_one_rank(runtime_dir: Path):
    run_ranks(no_dist_alone, 2, str(runtime_dir))


def wrong_groups(rank: int, runtime_dir: str) -> None:
    pair = dist.new_group([0, 1])
    with opened(runtime_dir) as engine:
        if rank == 2:
            with pytest.raises(UsageError, match="not in the given process group"):
                engine.load({}, process_group=pair)
        else:
            assert engine.load({}, process_group=pair) is None
            found = failures_of(lambda: save(engine, rank, {}, process_group=pair))
            assert isinstance(found[0], UsageError)  # they name different steps
    if rank < 2:
        with pytest.raises(UsageError, match="all ranks"):
            Engine.open(config(Path(runtime_dir)), process_group=pair)


def test_wrong_groups(runtime_dir: Path):
    run_ranks(wrong_groups, 3, str(runtime_dir))


# --- a group that dies ----------------------------------------------------------------------------


def dies(rank: int, runtime_dir: str, marker: str) -> None:
    with opened(runtime_dir) as engine:
        group, stream = split((2, 2))
        for step in range(3):
            save(engine, step, sharded(group, step), stream=stream, process_group=group)
        dist.barrier()
        if rank < 2:

            class Dies:
                """Rank 1 is gone in the middle of the save, its coordinator a moment later."""

                def state_dict(self) -> dict[str, Any]:
                    if rank == 1:
                        os._exit(1)
                    return {}

                def load_state_dict(self, state: dict[str, Any]) -> None:
                    raise AssertionError

            state = {**sharded(group, 3), "dies": Dies()}
            with pytest.raises((RuntimeError, CheckpointException)):
                save(engine, 3, state, stream=stream, process_group=group)
            os._exit(1)
        for step in range(3, 8):  # the others do not notice
            save(engine, step, sharded(group, step), stream=stream, process_group=group)
        steps = [found.step for found in engine.checkpoints(stream)]
        assert steps == [7, 6, 5], steps
        Path(marker + secrets.token_hex(4)).touch()
        os._exit(0)


def after_death(rank: int, runtime_dir: str) -> None:
    with opened(runtime_dir) as engine:
        group, stream = split((1, 2))
        state = sharded(group, None)
        expected = {"part0": 2, "part1": 7}[stream]
        assert engine.load(state, stream=stream, process_group=group) == expected
        assert_is(state, expected)


@pytest.mark.full
def test_a_group_that_dies_in_a_save(runtime_dir: Path, tmp_path: Path):
    with pytest.raises(RankFailed, match="died without an answer"):
        run_ranks(dies, 4, str(runtime_dir), str(tmp_path / "survived-"))
    assert len(list(tmp_path.glob("survived-*"))) == 2
    run_ranks(after_death, 3, str(runtime_dir))
