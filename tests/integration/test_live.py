"""Live recovery with real processes: every loss is, bit for bit, that of an undisturbed run."""

from __future__ import annotations

import os
import socket
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.agent import wait_until
from tests.support.live import (
    Fault,
    Outcome,
    Row,
    background_script,
    config_of,
    late_script,
    own_script,
    stopped_agent,
    supervised,
)
from tests.support.preloaded import context
from tieredckpt import live
from tieredckpt.live import messages as m
from tieredckpt.live import rank as rank_module
from tieredckpt.live.rank import EXIT_NO_SUPERVISOR

STEPS = 10


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[int, Row]]:
    folder = tmp_path_factory.mktemp("undisturbed")
    with stopped_agent(folder):
        found = supervised(folder, standby=0, steps=STEPS)
    assert found.code == 0, "\n".join(found.lines)
    rows = {row.step: row for row in found.rows}
    assert sorted(rows) == list(range(1, STEPS + 1))
    return rows


@pytest.fixture
def folder(runtime_dir: Path) -> Iterator[Path]:
    with stopped_agent(runtime_dir):
        yield runtime_dir


def check(found: Outcome, reference: dict[int, Row], *, twice: int | None = 0) -> None:
    """All steps were trained, ``twice`` of them once more, and all rows are the reference's."""
    text = "\n".join(found.lines)
    assert found.code == 0, text
    assert [row for row in found.rows if row != reference[row.step]] == [], text
    counts = Counter(row.step for row in found.rows)
    assert sorted(counts) == sorted(reference), text
    assert twice is None or sum(counts.values()) - len(counts) == twice, text


def test_ranks_that_raise_die_or_hang_are_replaced_and_no_step_is_lost(folder: Path, reference):
    """The last two hold the same shard: with both, only a checkpoint has the state."""
    faults = [
        Fault(2, 0, "kill"),  # before the first save
        Fault(3, 1, "raise"),
        Fault(7, 2, "hang"),  # noticed once a world has made three updates
        Fault(10, 0, "kill-with-2"),
    ]
    found = supervised(folder, faults, standby=2, steps=STEPS, hang_s=5.0, unwind_s=2.0)
    check(found, reference, twice=1)
    for step in (1, 2, 6):
        assert found.said(f"resumed at step {step} from the state of the surviving ranks, no step")
    assert found.said("ended: no rank made progress")
    assert found.said("rank 2 does not leave within 2 s")
    assert any("signal.pause" in line or "in meet" in line for line in found.lines), "no stack"
    assert found.said("resumed at step 8 from the newest checkpoint, 1 steps lost")


def test_deaths_while_a_new_world_is_made_lose_nothing(folder: Path, reference):
    faults = [
        Fault(3, 3, "kill"),
        Fault(2, 3, "kill-init"),
        Fault(3, 2, "kill-save"),
        Fault(6, 1, "kill"),
        Fault(5, 0, "kill-load"),
    ]
    found = supervised(folder, faults, standby=2, steps=STEPS)
    check(found, reference)
    assert len(found.said("is gone: SIGKILL")) == 5
    assert not found.said("does not leave")


def test_ranks_that_change_at_every_generation(folder: Path, reference):
    """DTensor's and dynamo's caches know the rank that a process had before.

    Saves in the background end with their world, and nothing waits for them.
    """
    faults = [Fault(step, step % 4, "raise") for step in (2, 3, 4)]
    found = supervised(
        folder, faults, standby=0, rotated=True, steps=STEPS, script=background_script
    )
    check(found, reference)
    assert len(found.said("no step lost")) == len(faults)
    assert not found.said("does not leave")


def test_without_a_standby_the_survivors_save_before_they_wait(folder: Path, reference):
    """And once no restart is left, for a restart of the host."""
    faults = [Fault(3, 3, "kill"), Fault(6, 0, "kill")]
    options = {"standby": 0, "steps": STEPS, "script": late_script}
    found = supervised(folder, faults, max_restarts=1, **options)
    assert len(found.said("the surviving ranks have saved what they kept")) == 2
    assert len(found.said("from the state of the surviving ranks, no step lost")) == 1
    assert found.code == 3
    assert found.said("3 of 4 processes are left, and no restarts: exit 3")
    again = supervised(folder, **options)  # the host is started again
    check(again, reference)


def test_a_value_that_only_the_lost_rank_had_is_named_and_a_checkpoint_is_loaded(
    folder: Path, reference
):
    found = supervised(folder, [Fault(6, 1, "kill")], steps=STEPS, script=own_script)
    check(found, reference, twice=1)
    text = "no rank is left that has all of update 5: own.per_rank:rank:1"
    assert any(text in line for line in found.lines)
    assert found.said("resumed at step 4 from the newest checkpoint, 1 steps lost")


def waiting(sock: socket.socket, folder: str) -> None:
    """A process whose ``train`` waits for a rank that never comes."""
    os.environ[m.SOCKET_VARIABLE] = str(sock.detach())
    live.run(lambda world: world.init_process_group("gloo"), config_of(folder))


def test_a_generation_that_ended_before_a_rank_entered_it(folder: Path):
    """Both messages are there at once: the rank must not wait for the others for ever."""
    sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    process = context.Process(target=waiting, args=(theirs, str(folder)))
    with theirs:
        process.start()
    sock.settimeout(120)
    with sock:
        assert m.decode_from_process(sock.recv(1 << 16)) == m.Ready()
        for generation in range(1, 4):
            order = m.Train(generation=generation, rank=0, size=2, store=f"{folder}/{generation}")
            sock.sendall(m.encode(order))
            sock.sendall(m.encode(m.Stop(generation=generation)))
            assert m.decode_from_process(sock.recv(1 << 16)) == m.Ready(generation=generation)
    process.join(120)
    assert process.exitcode == EXIT_NO_SUPERVISOR, "a process outlives its supervisor"


def raising(sock: socket.socket, folder: str) -> None:
    """A process whose ``train`` raises, as a collective with a lost rank does, or otherwise."""
    os.environ[m.SOCKET_VARIABLE] = str(sock.detach())

    def train(world: live.World) -> None:
        rank_module.EXPLAIN_S = 0.0 if world.generation == 2 else 120.0
        open(f"{folder}/raises-{world.generation}", "w").close()
        raise (ValueError if world.generation == 3 else RuntimeError)(f"of {world.generation}")

    with open(f"{folder}/stderr", "w", buffering=1) as sys.stderr:
        live.run(train, config_of(folder))


def test_an_error_that_the_death_of_another_rank_explains_is_not_printed(folder: Path):
    sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    process = context.Process(target=raising, args=(theirs, str(folder)))
    with theirs:
        process.start()
    sock.settimeout(120)
    with sock:
        assert m.decode_from_process(sock.recv(1 << 16)) == m.Ready()
        for generation in range(1, 4):
            sock.sendall(m.encode(m.Train(generation=generation, rank=0, size=2)))
            if generation == 1:
                wait_until((folder / "raises-1").exists)
            else:  # nothing explains the second one in time, and the third is of no collective
                assert isinstance(m.decode_from_process(sock.recv(1 << 16)), m.Fault)
            sock.sendall(m.encode(m.Stop(generation=generation)))
            assert m.decode_from_process(sock.recv(1 << 16)) == m.Ready(generation=generation)
    process.join(120)
    printed = (folder / "stderr").read_text().splitlines()
    errors = [line for line in printed if "Error: of" in line]
    assert errors == ["RuntimeError: of 2", "ValueError: of 3"]


def alone(folder: str) -> None:
    """As ``python train.py``."""
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    from tieredckpt import UsageError

    def train(world: live.World) -> str:
        assert (world.rank, world.size, world.generation, world.reason) == (0, 1, 1, "")
        with pytest.raises(UsageError, match=r"call world\.init_process_group"):
            dist.init_process_group("gloo")
        with pytest.raises(UsageError, match="first"):
            _ = world.engine
        world.init_process_group("gloo")
        state = {"x": torch.zeros(3), "step": 0}
        begun = world.load(state)
        for step in world.steps(begun + 2):
            with world.update(step):
                state["x"] += 1
                state["step"] = step
        dcp.save(state, storage_writer=world.engine.writer(begun + 2))
        with pytest.raises(UsageError, match=r"leave out executor"):
            world.engine.async_save(state, begun + 3, executor="process")
        assert world.restored is not None
        return f"{world.restored.step} {state['x'].tolist()}"

    hooks: list[live.State] = []
    assert live.run(train, config_of(folder), finalize=hooks.append) == "0 [2.0, 2.0, 2.0]"
    assert live.run(train, config_of(folder)) == "2 [4.0, 4.0, 4.0]"
    assert [(each.rank, each.iteration, each.fn_exception) for each in hooks] == [(0, 0, None)]


def test_without_a_supervisor_it_is_one_generation(folder: Path):
    process = context.Process(target=alone, args=(str(folder),))
    process.start()
    process.join(120)
    assert process.exitcode == 0
