"""Loader workers outlive a notice of preemption to the whole process group, but not their trainer.

Each test reads from a pipe of which workers hold the other end, too: it ends when all are gone.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from tests.support.agent import wait_until
from tests.support.preloaded import context
from tests.support.states import config
from tieredckpt import data
from tieredckpt.engine import Engine

pytestmark = [
    pytest.mark.usefixtures("served"),
    pytest.mark.filterwarnings("ignore:.set_vital. is deprecated:UserWarning"),  # of torchdata
]

LONG_S = 60.0
ROWS = list(range(1000))
PAST_PREFETCHED = 8
"""Batches, one row each: more than the two that one worker has loaded ahead, or the cache has."""

_kept: list[Any] = []
"""What a script's global variables hold until its process ends."""


def settings(runtime_dir: Path) -> dict[str, Any]:
    return config(runtime_dir, data={"capacity": "16MiB", "ahead": 2, "behind": 2})


def _loaders(method: str) -> Iterator[tuple[type[Any], dict[str, Any]]]:
    options = {"num_workers": 1, "multiprocessing_context": method}
    options["worker_init_fn"] = data.ignore_preemption
    for kind in (DataLoader, StatefulDataLoader):
        yield kind, {**options, "generator": torch.Generator()}


def _reads_on(pipe: Any, settings: dict[str, Any], method: str) -> None:
    os.setsid()
    torch.set_num_threads(1)
    engine = Engine.open(settings)
    leaving = engine.leave_on(signal.SIGTERM)
    _kept.extend(iter(kind(ROWS, **options)) for kind, options in _loaders(method))
    kind, options = list(_loaders(method))[-1]
    _kept.append(data.cached(kind(ROWS, **options), engine))
    for each in _kept:
        next(each)
    pipe.send("reads")
    wait_until(lambda: leaving.asked, deadline_s=LONG_S)
    for each in _kept:
        for _ in range(PAST_PREFETCHED):
            next(each)
    engine.close()
    pipe.send("read on")


def _is_killed(pipe: Any, _: dict[str, Any], method: str) -> None:
    """A worker that loads ahead waits in a thread, as batches of arrays go through a pipe."""
    os.setsid()
    _, options = next(_loaders(method))
    _kept.append(iter(DataLoader([np.zeros(1 << 17)] * 100, collate_fn=list, **options)))
    next(_kept[0])
    pipe.send("reads")
    os.kill(os.getpid(), signal.SIGKILL)


@contextlib.contextmanager
def trainer(target: Callable[..., None], *args: Any) -> Iterator[tuple[Any, Any]]:
    """A process and the pipe, of which it has said that it reads batches."""
    mine, theirs = context.Pipe(duplex=False)
    process = context.Process(target=target, args=(theirs, *args))
    process.start()
    theirs.close()
    assert process.pid is not None
    try:
        assert mine.poll(LONG_S)
        assert mine.recv() == "reads"
        yield process, mine
    except BaseException:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        raise
    finally:
        process.join(LONG_S)


def all_end(pipe: Any) -> bool:
    """Whether the process and its workers are gone in time."""
    with contextlib.suppress(EOFError):
        return pipe.poll(LONG_S) and not pipe.recv()
    return True


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.full)])
def test_workers_read_on_after_a_notice_to_all_and_end_with_their_trainer(
    runtime_dir: Path, method: str
):
    with trainer(_reads_on, settings(runtime_dir), method) as (process, pipe):
        os.killpg(process.pid, signal.SIGTERM)
        assert pipe.poll(LONG_S)
        assert pipe.recv() == "read on"
        process.join(LONG_S)
        assert process.exitcode == 0
        assert all_end(pipe)


def test_no_worker_stays_when_its_trainer_is_killed(runtime_dir: Path):
    with trainer(_is_killed, settings(runtime_dir), "fork") as (process, pipe):
        assert all_end(pipe)
        process.join(LONG_S)
        assert process.exitcode == -signal.SIGKILL
