"""Leaving on notice, in one process: handlers, and signals at bad moments."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import WriteItem

from tests.support.agent import wait_until
from tests.support.preloaded import context
from tests.support.states import config, save
from tieredckpt.dcp import preemption
from tieredckpt.engine import Engine
from tieredckpt.errors import NotFoundError, UsageError

pytestmark = pytest.mark.usefixtures("served")

LONG_S = 60.0
USR1 = signal.SIGUSR1


def settings(runtime_dir: Path, folder: Path) -> dict[str, Any]:
    """With a tier in which no save of these tests is due."""
    disk = {"name": "disk", "url": f"file://{folder / 'disk'}", "every": "1000 steps"}
    return config(runtime_dir, tiers=[disk])


def state(step: int) -> dict[str, Any]:
    return {"w": torch.full((1000,), step), "step": step}


@pytest.fixture
def seen() -> Iterator[list[int]]:
    """What a handler that was there before gets."""
    found: list[int] = []
    before = signal.signal(USR1, lambda number, frame: found.append(number))
    yield found
    signal.signal(USR1, before)


@pytest.fixture
def engine(runtime_dir: Path, tmp_path: Path, seen: list[int]) -> Iterator[Engine]:
    with Engine.open(settings(runtime_dir, tmp_path)) as found:
        found.load(state(0))
        yield found


def test_the_agent_flushes_and_the_handler_before_is_called(engine: Engine, seen: list[int]):
    save(engine, 1, state(1))  # every tier gets the first one
    save(engine, 2, state(2))
    before = signal.getsignal(USR1)
    leaving = engine.leave_on(USR1, deadline_s=300)
    assert not engine.should_leave()
    assert (leaving.asked, leaving.left_s, leaving.flushed) == (False, None, None)
    signal.raise_signal(USR1)
    assert (leaving.asked, engine.should_leave(), seen) == (True, True, [USR1])
    assert leaving.left_s is not None
    assert 0 < leaving.left_s <= 300
    wait_until(lambda: leaving.flushed is not None, deadline_s=LONG_S)
    assert leaving.flushed is not None
    assert leaving.flushed.tiers == ("disk",)
    assert [each.step for each in leaving.flushed.saves] == [2]
    engine.wait(2, "disk", LONG_S)
    signal.raise_signal(USR1)  # the second one goes to the handler before, and to it alone
    assert seen == [USR1, USR1]
    engine.close()
    assert signal.getsignal(USR1) is before


def test_a_handler_installed_later_stays_and_ours_only_chains(engine: Engine, seen: list[int]):
    leaving = engine.leave_on(USR1)
    ours = signal.getsignal(USR1)
    assert callable(ours)
    signal.signal(USR1, lambda number, frame: ours(number, frame))
    later = signal.getsignal(USR1)
    engine.close()
    assert signal.getsignal(USR1) is later
    signal.raise_signal(USR1)
    assert (seen, leaving.asked) == ([USR1], False)


def test_the_first_interrupt_is_noted_and_the_second_raises(engine: Engine):
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        leaving = engine.leave_on(signal.SIGINT, USR1)
        signal.raise_signal(signal.SIGINT)
        assert leaving.asked
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        engine.close()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_an_ignored_signal_is_noted_and_ignored_again(engine: Engine):
    signal.signal(USR1, signal.SIG_IGN)
    leaving = engine.leave_on(USR1)
    signal.raise_signal(USR1)
    signal.raise_signal(USR1)
    assert leaving.asked


class Signalled(DefaultSavePlanner):
    """A signal comes while the data is being written."""

    def resolve_data(self, write_item: WriteItem) -> Any:
        os.kill(os.getpid(), USR1)
        return super().resolve_data(write_item)


def test_a_signal_during_a_save(engine: Engine, seen: list[int]):
    save(engine, 1, state(1))
    engine.leave_on(USR1, deadline_s=300)
    save(engine, 2, state(2), planner=Signalled())
    assert engine.should_leave()
    assert seen  # at least one; a second one during the same save is no trouble either
    report = engine.flush(deadline_s=LONG_S)
    assert (report.done, report.steps) == (True, {"default": 2})
    loaded = state(0)
    assert engine.load(loaded) == 2
    assert torch.equal(loaded["w"], state(2)["w"])


def test_a_signal_while_the_locks_of_a_save_are_held(engine: Engine):
    save(engine, 1, state(1))
    leaving = engine.leave_on(USR1)
    client, session = engine._session.client, engine._session
    with client._session_lock, client._lock, session.saving:
        signal.raise_signal(USR1)  # would never return if the handler wanted one of them
        assert leaving.asked
        assert leaving.flushed is None  # the thread waits for them instead
    wait_until(lambda: leaving.flushed is not None, deadline_s=LONG_S)


def test_a_notice_that_is_no_signal_from_any_thread(engine: Engine):
    leaving = engine.leave_on()
    thread = threading.Thread(target=leaving.ask, args=(120.0,))
    thread.start()
    thread.join()
    assert engine.should_leave()
    # There is no checkpoint yet, which is no reason to stay.
    wait_until(lambda: leaving.error is not None, deadline_s=LONG_S)
    assert isinstance(leaving.error, NotFoundError)
    leaving.ask(60.0)
    leaving.ask(None)
    assert leaving.left_s is not None
    assert leaving.left_s <= 60  # the earliest end counts


def test_closing_at_once_lets_the_agent_hear_of_it(engine: Engine):
    save(engine, 1, state(1))
    leaving = engine.leave_on(USR1)
    signal.raise_signal(USR1)
    engine.close()
    assert leaving.flushed is not None


def test_what_cannot_be_done_is_refused(engine: Engine):
    engine.leave_on(USR1)
    with pytest.raises(UsageError, match="SIGUSR1 already"):
        engine.leave_on(USR1)
    with pytest.raises(UsageError, match="SIGKILL cannot be handled"):
        engine.leave_on(signal.SIGKILL)
    with pytest.raises(UsageError, match="no signal"):
        engine.leave_on(4711)
    with pytest.raises(UsageError, match="deadline_s is -1"):
        engine.leave_on(signal.SIGUSR2, deadline_s=-1)
    errors: list[Exception] = []

    def elsewhere() -> None:
        try:
            engine.leave_on(signal.SIGUSR2)
        except UsageError as error:
            errors.append(error)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert "main thread" in str(errors)
    assert signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL


def _told_twice(pipe: Any, settings: dict[str, Any]) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.environ["TORCHELASTIC_RUN_ID"] = "job"  # as under tieredckpt run, and torchrun
    engine = Engine.open(settings)
    leaving = engine.leave_on(signal.SIGTERM, signal.SIGINT)
    del os.environ["TORCHELASTIC_RUN_ID"]  # the generation of live recovery has ended
    preemption.SAME_NOTICE_S = LONG_S
    signal.raise_signal(signal.SIGTERM)
    signal.raise_signal(signal.SIGTERM)
    pipe.send(leaving.asked)
    signal.raise_signal(signal.SIGINT)
    try:
        signal.raise_signal(signal.SIGINT)
    except KeyboardInterrupt:
        pipe.send("interrupted")
    worker = os.fork()
    if not worker:
        signal.raise_signal(signal.SIGTERM)
        os._exit(0)
    pipe.send(os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1]))
    engine.close()
    signal.raise_signal(signal.SIGTERM)
    pipe.send("closed")
    preemption.SAME_NOTICE_S = 0.0
    signal.raise_signal(signal.SIGTERM)
    pipe.send("still here")


def test_a_launchers_copy_of_the_notice_is_no_second_one(runtime_dir: Path, tmp_path: Path):
    mine, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_told_twice, args=(theirs, settings(runtime_dir, tmp_path)))
    process.start()
    theirs.close()
    try:
        for expected in (True, "interrupted", -signal.SIGTERM, "closed"):
            assert mine.poll(LONG_S)
            assert mine.recv() == expected
        with pytest.raises(EOFError):
            mine.recv()
        process.join(LONG_S)
        assert process.exitcode == -signal.SIGTERM
    finally:
        process.kill()
        process.join()


def _trainer(pipe: Any, settings: dict[str, Any]) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    engine = Engine.open(settings)
    leaving = engine.leave_on(signal.SIGTERM)
    begun, begins = os.pipe()
    worker = os.fork()
    if not worker:
        # Only now: Python forgets what comes to a child before it has put itself in order.
        os.write(begins, b"!")
        while True:  # not pause(): a signal that comes just before it would be waited for for ever
            time.sleep(0.05)
    os.read(begun, 1)
    os.kill(worker, signal.SIGTERM)
    _, status = os.waitpid(worker, 0)
    pipe.send((os.waitstatus_to_exitcode(status), leaving.asked))
    signal.raise_signal(signal.SIGTERM)
    pipe.send((leaving.asked, engine.should_leave()))
    signal.raise_signal(signal.SIGTERM)
    pipe.send("still here")


def test_the_second_sigterm_ends_the_process_and_the_first_one_a_forked_worker(
    runtime_dir: Path, tmp_path: Path
):
    mine, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_trainer, args=(theirs, settings(runtime_dir, tmp_path)))
    process.start()
    theirs.close()
    try:
        assert mine.poll(LONG_S)
        assert mine.recv() == (-signal.SIGTERM, False)
        assert mine.poll(LONG_S)
        assert mine.recv() == (True, True)
        with pytest.raises(EOFError):
            mine.recv()
        process.join(LONG_S)
        assert process.exitcode == -signal.SIGTERM
    finally:
        process.kill()
        process.join()
