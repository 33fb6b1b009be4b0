"""``bench compare``: against stock DCP, in turns, on the same state and the same folders."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter

from tieredckpt.bench import state as states
from tieredckpt.bench.rank import Rank
from tieredckpt.bench.settings import Result, Way
from tieredckpt.engine import Engine
from tieredckpt.errors import IntegrityError

WAIT_S = 3600.0


class Method(NamedTuple):
    """How one way saves and loads: ``begin`` returns what waits until all is there.

    What ``prepare`` does is not measured.
    """

    prepare: Callable[[], object]
    begin: Callable[[int], Callable[[], object]]
    load: Callable[[int], object]


def compare(rank: Rank) -> Result:
    """``count`` rounds, in each of which every way saves and loads once. Collective.

    The first round is not counted, as it takes tieredckpt's memory. Stock DCP writes new files in
    each, as a job does.
    """
    settings = rank.settings
    group = dist.new_group(backend="gloo")
    with Engine.open(settings.config or None) as engine:
        methods = ours(rank, engine)
        for name, folder in settings.folders.items():
            methods |= stock(rank, group, name, Path(folder))
        ways = {name: Way(name=name, stall_s=[], done_s=[], load_s=[]) for name in methods}
        names, step = list(methods), 0
        for number in rank.track(range(settings.count + 1), "comparing"):
            for name in names[number % len(names) :] + names[: number % len(names)]:
                step += 1
                found = once(rank, methods[name], step)
                if number:
                    way = ways[name]
                    for values, value in zip(
                        (way.stall_s, way.done_s, way.load_s), found, strict=True
                    ):
                        values.append(value)
    result = rank.result(ways=list(ways.values()))
    rank.clean()
    return result


def once(rank: Rank, method: Method, step: int) -> tuple[float, float, float]:
    """Seconds of stall, until done, and of a load, which brings back what was saved.

    Raises IntegrityError: it did not.
    """
    states.change(rank.state, step)
    expected = states.content(rank.state)
    method.prepare()
    began_s = time.perf_counter()
    with rank.timed() as stall:
        wait = method.begin(step)
    wait()
    done_s = rank.worst(time.perf_counter() - began_s)
    states.forget(rank.state)
    with rank.timed() as load:
        method.load(step)
    if states.content(rank.state) != expected:
        raise IntegrityError("a load did not bring back what was saved")
    return stall[0], done_s, load[0]


def ours(rank: Rank, engine: Engine) -> dict[str, Method]:
    """Saves of tieredckpt, complete once they are committed in host memory."""

    def background(step: int) -> Callable[[], object]:
        future = engine.async_save(dict(rank.state), step)
        return lambda: future.result(WAIT_S)

    def foreground(step: int) -> Callable[[], object]:
        state_dict_saver.save(dict(rank.state), storage_writer=engine.writer(step))
        return lambda: None

    def load(step: int) -> None:
        state_dict_loader.load(dict(rank.state), storage_reader=engine.reader(step))

    return {
        "tieredckpt async": Method(int, background, load),
        "tieredckpt sync": Method(int, foreground, load),
    }


def stock(rank: Rank, group: Any, name: str, folder: Path) -> dict[str, Method]:
    """DCP with its own writer and its defaults: one thread, and fsync."""

    def empty() -> None:
        if rank.number == 0:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
        rank.gather(None)

    def background(step: int) -> Callable[[], object]:
        future = state_dict_saver.async_save(
            dict(rank.state), storage_writer=FileSystemWriter(folder / str(step)),
            process_group=group,
        )  # fmt: skip
        return lambda: cast("Future[object]", future).result(WAIT_S)

    def foreground(step: int) -> Callable[[], object]:
        writer = FileSystemWriter(folder / str(step))
        state_dict_saver.save(dict(rank.state), storage_writer=writer)
        return lambda: None

    def load(step: int) -> None:
        reader = FileSystemReader(folder / str(step))
        state_dict_loader.load(dict(rank.state), storage_reader=reader)

    return {
        f"DCP async to {name}": Method(empty, background, load),
        f"DCP sync to {name}": Method(empty, foreground, load),
    }
