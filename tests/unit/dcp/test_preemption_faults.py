"""Leaving on notice where things go wrong: forks, several engines, an agent that is gone."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.agent import wait_until
from tests.support.faults import ForkedAgent
from tests.support.states import config, save
from tieredckpt.dcp import preemption
from tieredckpt.engine import Engine
from tieredckpt.errors import AgentError, UsageError

LONG_S = 60.0
USR1 = signal.SIGUSR1


def settings(runtime_dir: Path, folder: Path, **more: Any) -> dict[str, Any]:
    disk = {"name": "disk", "url": f"file://{folder / 'disk'}", "every": "1000 steps"}
    return config(runtime_dir, tiers=[disk], **more)


def state(step: int) -> dict[str, Any]:
    return {"w": torch.full((1000,), step), "step": step}


@pytest.fixture
def agent(runtime_dir: Path) -> Iterator[ForkedAgent]:
    found = ForkedAgent(runtime_dir)
    try:
        yield found
    finally:
        found.kill()


@pytest.fixture
def seen() -> Iterator[list[int]]:
    """What a handler that was there before gets."""
    found: list[int] = []
    before = signal.signal(USR1, lambda number, frame: found.append(number))
    yield found
    signal.signal(USR1, before)


@pytest.fixture
def engine(agent: ForkedAgent, runtime_dir: Path, tmp_path: Path) -> Iterator[Engine]:
    with Engine.open(settings(runtime_dir, tmp_path)) as found:
        found.load(state(0))
        save(found, 1, state(1))
        yield found


def test_a_forked_worker_does_not_hold_up_the_close(
    engine: Engine, seen: list[int], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(preemption, "CLOSE_WAIT_S", LONG_S)
    leaving = engine.leave_on(USR1)
    thread = leaving._thread
    assert thread is not None
    release, hold = os.pipe()
    worker = os.fork()
    if not worker:  # a data loader's worker, which lives as long as the training script
        os.close(hold)
        os.read(release, 1)
        os._exit(0)
    os.close(release)
    try:
        began_s = time.monotonic()
        engine.close()
        assert time.monotonic() - began_s < LONG_S
        assert not thread.is_alive()
    finally:
        os.close(hold)
        os.waitpid(worker, 0)


def test_a_forked_worker_cannot_give_notice(engine: Engine, seen: list[int]):
    leaving = engine.leave_on(USR1)
    worker = os.fork()
    if not worker:
        try:
            leaving.ask(1.0)
        except UsageError:
            os._exit(7)
        os._exit(0)
    _, status = os.waitpid(worker, 0)
    assert os.waitstatus_to_exitcode(status) == 7
    engine.close()  # whatever the agent was to hear of, it has heard
    assert (leaving.asked, leaving.flushed, leaving.error) == (False, None, None)


@pytest.mark.parametrize("deadline_s", [-1.0, float("nan"), float("inf"), 1e300])
def test_a_notice_with_an_impossible_deadline_is_refused(engine: Engine, deadline_s: float):
    leaving = engine.leave_on()
    with pytest.raises(UsageError, match="deadline_s is"):
        leaving.ask(deadline_s)
    with pytest.raises(UsageError, match="deadline_s is"):
        engine.flush(deadline_s=deadline_s)  # nan would be none at all
    assert not engine.should_leave()


def test_leave_on_takes_all_signals_or_none(engine: Engine, seen: list[int]):
    before = signal.getsignal(USR1)
    for wrong in (signal.SIGKILL, 4711):
        with pytest.raises(UsageError):
            engine.leave_on(USR1, wrong)
        assert signal.getsignal(USR1) is before
    assert not engine.leave_on(USR1).asked


def test_two_engines_in_any_order(
    engine: Engine, runtime_dir: Path, tmp_path: Path, seen: list[int]
):
    before = signal.getsignal(USR1)
    with Engine.open(settings(runtime_dir, tmp_path) | {"namespace": "other"}) as other:
        first, second = engine.leave_on(USR1), other.leave_on(USR1)
        signal.raise_signal(USR1)
        assert (first.asked, second.asked, seen) == (True, True, [USR1])
        engine.close()  # the one whose handler lies below
        signal.raise_signal(USR1)
        assert seen == [USR1, USR1]
    assert signal.getsignal(USR1) is before


def test_an_engine_that_was_closed_does_not_end_the_process_at_the_first_notice(
    engine: Engine, runtime_dir: Path, tmp_path: Path
):
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with Engine.open(settings(runtime_dir, tmp_path) | {"namespace": "other"}) as other:
            engine.leave_on(signal.SIGINT)
            leaving = other.leave_on(signal.SIGINT)
            engine.close()
            signal.raise_signal(signal.SIGINT)  # KeyboardInterrupt would be the second one's
            assert leaving.asked
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_the_agent_hears_of_it_while_the_main_thread_hangs(engine: Engine, seen: list[int]):
    leaving = engine.leave_on(USR1, deadline_s=300)
    libc = ctypes.CDLL(None)
    mutex, condition = ctypes.create_string_buffer(256), ctypes.create_string_buffer(256)
    found = []

    def peer() -> None:
        libc.pthread_mutex_lock(mutex)  # free as soon as the main thread waits
        os.kill(os.getpid(), USR1)
        try:
            wait_until(lambda: leaving.flushed, deadline_s=LONG_S)
            found.append((leaving.asked, list(seen)))
        finally:
            libc.pthread_cond_signal(condition)
            libc.pthread_mutex_unlock(mutex)

    libc.pthread_mutex_lock(mutex)
    thread = threading.Thread(target=peer)
    thread.start()
    # As in a collective whose peer is gone: a signal does not end it, and Python does not run.
    libc.pthread_cond_wait(condition, mutex)
    libc.pthread_mutex_unlock(mutex)
    thread.join()
    assert found == [(False, [])]  # no handler had run
    assert (leaving.asked, seen) == (True, [USR1])
    first = leaving.flushed
    engine.close()
    assert leaving.flushed is first  # the handler was no second notice


def test_the_wakeup_descriptor_of_somebody_else_stays(engine: Engine, seen: list[int]):
    theirs, other = socket.socketpair()
    theirs.setblocking(False)
    before = signal.set_wakeup_fd(theirs.fileno())
    try:
        leaving = engine.leave_on(USR1)
        signal.raise_signal(USR1)
        wait_until(lambda: leaving.flushed, deadline_s=LONG_S)
        assert other.recv(10) == bytes((USR1,))
        engine.close()
        assert signal.set_wakeup_fd(-1) == theirs.fileno()
    finally:
        signal.set_wakeup_fd(before)
        theirs.close()
        other.close()


def test_the_wakeup_descriptor_is_given_back(engine: Engine, seen: list[int]):
    leaving = engine.leave_on(USR1)
    found = signal.set_wakeup_fd(-1)
    assert found != -1
    signal.set_wakeup_fd(found)
    worker = os.fork()
    if not worker:
        os._exit(0 if signal.set_wakeup_fd(-1) == -1 else 1)
    _, status = os.waitpid(worker, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    closer = threading.Thread(target=engine.close)
    closer.start()
    closer.join()
    # That thread cannot take it away, so what it names must not become another file.
    assert signal.set_wakeup_fd(-1) == found
    assert leaving._wake is not None
    assert leaving._wake.fileno() == found
    signal.raise_signal(USR1)
    assert (seen, leaving.asked) == ([USR1], False)
    for each in preemption._written_to.pop():
        each.close()


def test_an_agent_that_died_of_the_same_signal_is_started_and_flushes(
    agent: ForkedAgent, engine: Engine, seen: list[int]
):
    leaving = engine.leave_on(USR1, deadline_s=LONG_S)
    save(engine, 2, state(2))
    agent.kill()
    signal.raise_signal(USR1)
    wait_until(lambda: leaving.flushed or leaving.error, deadline_s=LONG_S)
    assert leaving.error is None
    assert leaving.flushed is not None
    assert leaving.flushed.tiers == ("disk",)
    engine.wait(2, "disk", LONG_S)


def test_a_stopped_agent_costs_no_more_time_than_there_is(agent: ForkedAgent, engine: Engine):
    # The client's own deadline is save.timeout, 60 s.
    pid = agent.process.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    try:
        began_s = time.monotonic()
        with pytest.raises(AgentError, match="did not answer within"):
            engine.flush(deadline_s=0.5)
        assert time.monotonic() - began_s < 30
    finally:
        os.kill(pid, signal.SIGCONT)
