"""A save that fails: on all ranks the same, nothing of it is left, and the one before is intact."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from tests.support.faults import MIB, small_tmpfs
from tests.support.ranks import run_ranks
from tests.support.states import config, flip, load, save
from tieredckpt import failpoints
from tieredckpt.engine import Engine
from tieredckpt.errors import (
    AgentError,
    CapacityError,
    IntegrityError,
    TieredCkptError,
    TierUnavailableError,
)

pytestmark = pytest.mark.usefixtures("served")


def state_of(step: int, rows: int = 300) -> dict[str, Any]:
    """A sharded tensor, one that all ranks have, one of this rank's own, and bytes."""
    own = f"own{dist.get_rank()}"
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = (torch.arange(rows * 50) * 31 + step).reshape(rows, 50)
    return {
        "sharded": distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None),
        "everywhere": torch.full((77,), step),
        own: torch.full((99,), step * 7 + dist.get_rank()),
        f"{own}.note": f"step {step}",
    }


def assert_step(engine: Engine, step: int) -> None:
    """The newest checkpoint is that of ``step``, bit for bit, on every rank."""
    found, wanted = state_of(-1), state_of(step)
    load(found, engine.reader())
    assert torch.equal(found["sharded"].to_local(), wanted["sharded"].to_local())
    del found["sharded"], wanted["sharded"]
    assert all(
        torch.equal(found[key], value) if isinstance(value, torch.Tensor) else found[key] == value
        for key, value in wanted.items()
    )


def opened(runtime_dir: str, *, keep: int = 2, timeout: str = "60s", **save_keys: Any) -> Engine:
    keys = {"on_error": "skip", "timeout": timeout, **save_keys}
    return Engine.open(config(Path(runtime_dir), save=keys, memory={"keep": {"last": keep}}))


def steps(engine: Engine) -> list[int]:
    return [each.step for each in engine.checkpoints()]


def failure_of(engine: Engine, step: int, **options: Any) -> TieredCkptError:
    """What a save raises, on this rank."""
    with pytest.raises(CheckpointException) as caught:
        save(engine, step, state_of(step), **options)
    (found,) = [each for each, _ in caught.value.failures.values()]
    assert isinstance(found, TieredCkptError), caught.value
    return found


@contextmanager
def eio_on(rank: int, spec: str = "save.copy=eio") -> Iterator[None]:
    failpoints.arm(spec if dist.get_rank() == rank else "")
    try:
        yield
    finally:
        failpoints.arm("")


class Warnings(logging.Handler):
    """The warnings about skipped saves."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []
        logging.getLogger("tieredckpt.dcp.save.failures").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


# --- one rank cannot write ------------------------------------------------------------------------


def skipping(rank: int, runtime_dir: str) -> None:
    heard = Warnings()
    with opened(runtime_dir, max_skipped=2) as engine:
        engine.load({})
        with eio_on(1):  # the first save of a process: something is wrong with the set-up
            found = failure_of(engine, 0)
        assert type(found) is TierUnavailableError
        assert "Input/output error" in str(found)
        assert "no save of stream 'default' has worked" in str(found)
        assert engine.skipped_saves == (1 if rank == 1 else 0)
        save(engine, 1, state_of(1))
        for step in (2, 3):
            with eio_on(1):
                save(engine, step, state_of(step))
            assert engine.last_save is not None
            assert (engine.last_save.save_id, engine.last_save.step) == (None, step)
            reason = engine.last_save.skipped
            assert reason is None if rank == 2 else "rank 1: TierUnavailableError" in str(reason)
            assert steps(engine) == [1]
            assert_step(engine, 1)
        if rank == 0:
            assert engine.skipped_saves == 2
            assert engine.status().namespaces[0].skipped_saves == 2
            assert [text[:9] for text in heard.texts] == ["step 2 of", "step 3 of"]
        else:
            assert heard.texts == []
        with eio_on(1):
            found = failure_of(engine, 4)
        assert "save.max_skipped is 2" in str(found)
        assert steps(engine) == [1]
        with eio_on(1):  # it stays so until a save works
            assert "save.max_skipped is 2" in str(failure_of(engine, 4))
        save(engine, 5, state_of(5))
        assert engine.last_save is not None
        assert engine.last_save.skipped is None
        assert (engine.last_save.save_id is not None) == (rank == 0)
        assert_step(engine, 5)
        with eio_on(2):
            save(engine, 6, state_of(6))
        assert steps(engine) == [5, 1]
        with eio_on(2):  # another stream has not worked yet
            assert "no save of stream 'other'" in str(failure_of(engine, 1, stream="other"))
    with opened(runtime_dir, on_error="raise") as engine:
        assert engine.load(state_of(-1)) == 5
        with eio_on(0):
            assert "save.on_error is raise" in str(failure_of(engine, 7))
        assert engine.skipped_saves == 0
        assert_step(engine, 5)
        save(engine, 7, state_of(7))
        assert_step(engine, 7)


def test_a_rank_with_a_bad_slot_skips_the_save_on_all(runtime_dir: Path):
    run_ranks(skipping, 3, str(runtime_dir))


def twenty(rank: int, runtime_dir: str) -> None:
    logging.getLogger("tieredckpt").setLevel(logging.ERROR)
    with opened(runtime_dir, max_skipped=100) as engine:
        engine.load({})
        for step in range(3):
            save(engine, step, state_of(step))
        dist.barrier()
        before = engine.status().namespaces[0]
        for step in range(3, 23):
            with eio_on(step % 2):
                save(engine, step, state_of(step))
        dist.barrier()
        after = engine.status().namespaces[0]
        # One more may be free than before: nobody has the grant for the next save.
        assert after.slots == before.slots
        assert after.free_slots >= before.free_slots
        assert after.skipped_saves == 20
        assert_step(engine, 2)
        save(engine, 23, state_of(23))
        assert_step(engine, 23)
        assert steps(engine) == [23, 2]


def test_skipped_saves_leave_no_slot_behind(runtime_dir: Path):
    run_ranks(twenty, 2, str(runtime_dir))


def full(rank: int, shm: str, runtime_dir: str) -> None:
    with opened(runtime_dir) as engine:
        engine.load({})
        save(engine, 1, state_of(1))
        save(engine, 2, state_of(2))
        big = {f"big{rank}": torch.zeros(4 << 20, dtype=torch.uint8)} if rank == 1 else {}
        if rank == 0:
            left = os.statvfs(shm).f_bavail * os.statvfs(shm).f_frsize
            with Path(shm, "ballast").open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, left - MIB)
        dist.barrier()
        save(engine, 3, {**state_of(3), **big})
        assert engine.last_save is not None
        if rank < 2:
            assert "rank 1: CapacityError" in str(engine.last_save.skipped)
        assert_step(engine, 2)
        dist.barrier()
        if rank == 0:
            Path(shm, "ballast").unlink()
        dist.barrier()
        save(engine, 4, {**state_of(4), **big})
        assert_step(engine, 4)


def test_a_full_tmpfs_on_one_rank(tmp_path: Path):
    try:
        with small_tmpfs(tmp_path / "shm", 64 * MIB) as shm:
            (runtime_dir := shm / "run").mkdir(mode=0o700)
            run_ranks(full, 3, str(shm), str(runtime_dir))
    except PermissionError as error:
        pytest.skip(f"cannot mount a tmpfs here: {error}")


def too_large(rank: int, runtime_dir: str) -> None:
    with opened(runtime_dir) as engine:
        engine.load({})
        big = {f"big{rank}": torch.zeros(80 << 20, dtype=torch.uint8)} if rank else {}
        with pytest.raises(CheckpointException) as caught:
            save(engine, 1, {**state_of(1), **big})
        assert isinstance(next(iter(caught.value.failures.values()))[0], CapacityError)


def test_a_first_save_that_does_not_fit_raises_what_to_do(runtime_dir: Path):
    run_ranks(too_large, 2, str(runtime_dir))


def damaged(rank: int, runtime_dir: str) -> None:
    with opened(runtime_dir) as engine:
        engine.load({})
        save(engine, 1, state_of(1))
        save(engine, 2, state_of(2))
        ring = engine._session.ring
        seal = ring.seal

        def damage(slot: Any, size: int, root: bytes) -> None:
            flip(Path(runtime_dir, "slots", slot.slot_id), size - 100, 100)  # its trailer
            seal(slot, size, root)

        if rank == 1:
            ring.seal = damage  # type: ignore[method-assign]
        save(engine, 3, state_of(3))
        ring.seal = seal  # type: ignore[method-assign]
        assert engine.last_save is not None
        assert "rank 1: IntegrityError" in str(engine.last_save.skipped)
        assert_step(engine, 2)
        save(engine, 4, state_of(4))
        assert_step(engine, 4)


def test_a_slot_that_is_damaged_while_it_is_written(runtime_dir: Path):
    run_ranks(damaged, 2, str(runtime_dir))


# --- the agent ------------------------------------------------------------------------------------


class Meanwhile(DefaultSavePlanner):
    """Sends the agent a signal in the middle of a save, on rank 1."""

    def __init__(self, pid: int, number: int) -> None:
        super().__init__()
        self.pid, self.number = pid, number

    def resolve_data(self, write_item: Any) -> Any:
        if dist.get_rank() == 1 and self.number:
            os.kill(self.pid, self.number)
            self.number = 0
        return super().resolve_data(write_item)


def commit_hangs(rank: int, runtime_dir: str) -> None:
    """The outcome is not known: the save counts as skipped, and the next one finds it there."""
    os.environ["TIEREDCKPT_FAILPOINTS"] = "agent.commit.before_manifest=stop@2"
    with opened(runtime_dir, timeout="4s") as engine:
        engine.load({})
        save(engine, 1, state_of(1))
        dist.barrier()
        pid = engine.status().health.pid
        dist.barrier()
        save(engine, 2, state_of(2))
        assert engine.last_save is not None
        assert (engine.last_save.skipped is None) == (rank == 1)
        # It still hangs: the coordinator cannot even find out about the last one.
        save(engine, 3, state_of(3))
        assert "AgentError" in str(engine.last_save.skipped)
        if rank == 0:
            assert engine.skipped_saves == 2
            os.kill(pid, signal.SIGCONT)
        dist.barrier()
        save(engine, 4, state_of(4))
        assert engine.last_save.skipped is None
        assert_step(engine, 4)
        assert steps(engine) == [4, 2]  # whole, on the time line, and retention saw it
        if rank == 0:
            manifest = engine._session.history.recovery_plan("default").candidates[0].manifest
            assert manifest.parent == engine.checkpoints()[1].save_id


@pytest.mark.usefixtures("starts_agent")  # with a failpoint
def test_a_commit_of_unknown_outcome(runtime_dir: Path):
    run_ranks(commit_hangs, 2, str(runtime_dir))


def agent_is_killed(rank: int, runtime_dir: str) -> None:
    with opened(runtime_dir) as engine:
        engine.load({})
        save(engine, 1, state_of(1))
        dist.barrier()
        pid = engine.status().health.pid
        save(engine, 2, state_of(2), planner=Meanwhile(pid, signal.SIGKILL))
        newest = steps(engine)[0]
        if rank == 0:
            assert engine.last_save is not None
            assert newest == (2 if engine.last_save.skipped is None else 1)
        assert_step(engine, newest)
        save(engine, 3, state_of(3))
        assert_step(engine, 3)
        # And if none can be started:
        dist.barrier()
        pid = engine.status().health.pid
        dist.barrier()

        def gone() -> None:
            raise AgentError("no agent may be started here", outcome="not_applied")

        revive, engine._session.client._revive = engine._session.client._revive, gone
        save(engine, 4, state_of(4), planner=Meanwhile(pid, signal.SIGKILL))
        assert engine.last_save is not None
        assert "AgentError" in str(engine.last_save.skipped)
        engine._session.client._revive = revive
        dist.barrier()
        assert_step(engine, 3)
        save(engine, 5, state_of(5))
        assert_step(engine, 5)


def test_an_agent_that_is_killed_in_a_save(runtime_dir: Path):
    run_ranks(agent_is_killed, 2, str(runtime_dir))


# --- what is never skipped ------------------------------------------------------------------------


class Broken(DefaultSavePlanner):
    def resolve_data(self, write_item: Any) -> Any:
        if dist.get_rank() == 1:
            raise OSError("the planner's own trouble")
        return super().resolve_data(write_item)


def never(rank: int, runtime_dir: str) -> None:
    with opened(runtime_dir) as engine:
        engine.load({})
        save(engine, 1, state_of(1))
        with pytest.raises(CheckpointException, match="own trouble"):
            save(engine, 2, state_of(2), planner=Broken())
        with pytest.raises(CheckpointException, match="name different checkpoints"):
            save(engine, 2 + rank, state_of(2))
        with opened(runtime_dir) as newer:
            assert newer.load(state_of(-1)) == 1
            save(newer, 2, state_of(2))
            with pytest.raises(CheckpointException, match="superseded"):
                save(engine, 3, state_of(3))
            assert engine.skipped_saves == 0
            assert steps(newer) == [2, 1]


def test_errors_that_are_never_skipped(runtime_dir: Path):
    run_ranks(never, 2, str(runtime_dir))


def test_one_process_alone(runtime_dir: Path):
    keys = {"on_error": "skip", "max_skipped": 1}
    state = {"a": torch.arange(10)}
    with Engine.open(config(runtime_dir, save=keys)) as engine:
        engine.load({})
        save(engine, 1, state)
        failpoints.arm("save.seal.before=enospc")
        save(engine, 2, state)
        assert engine.last_save is not None
        assert "No space left" in str(engine.last_save.skipped)
        failpoints.arm("save.commit.before=eio")
        with pytest.raises(CheckpointException, match="max_skipped is 1") as caught:
            save(engine, 3, state)
        assert not isinstance(caught.value.failures[0][0], IntegrityError)
        failpoints.arm("")
        save(engine, 4, state)
        assert steps(engine) == [4, 1]
