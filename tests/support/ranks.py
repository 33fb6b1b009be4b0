"""Several ranks as real processes with a gloo group, for tests of saving and loading."""

from __future__ import annotations

import os
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from tests.support.agent import fork_agents
from tests.support.preloaded import context, server_address, share_server, show_stacks


class RankFailed(AssertionError):
    """A rank raised, died or did not end in time; the text has every rank's traceback."""


def run_ranks(
    target: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 90.0
) -> list[Any]:
    """``target(rank, *args)`` on each rank, with a gloo group; what they return, in rank order."""
    server = server_address()
    with tempfile.TemporaryDirectory(prefix="tck-ranks-") as folder:
        ranks = []
        for rank in range(world_size):
            mine, theirs = context.Pipe(duplex=False)
            process = context.Process(
                target=_rank_main,
                args=(theirs, target, rank, world_size, server, str(Path(folder) / "store"), args),
            )
            process.start()
            theirs.close()
            ranks.append((process, mine))
        try:
            answers = _collect([pipe for _, pipe in ranks], timeout_s)
            for process, _ in ranks:
                process.join(5)
                show_stacks(process)
        finally:
            for process, _ in ranks:
                if process.is_alive():
                    process.kill()
                    process.join()
    bad = [f"--- rank {rank} ---\n{text}" for rank, (ok, text) in enumerate(answers) if not ok]
    if bad:
        raise RankFailed("\n".join(bad))
    return [value for _, value in answers]


def _collect(pipes: list[Connection], timeout_s: float) -> list[tuple[bool, Any]]:
    until_s = time.monotonic() + timeout_s
    answers: dict[Any, tuple[bool, Any]] = {}
    while len(answers) < len(pipes):
        left_s = until_s - time.monotonic()
        ready = wait([pipe for pipe in pipes if pipe not in answers], max(0.0, left_s))
        if not ready:
            break
        for pipe in ready:
            assert isinstance(pipe, Connection)
            try:
                answers[pipe] = pipe.recv()
            except EOFError:
                answers[pipe] = (False, "died without an answer")
    return [answers.get(pipe, (False, f"no answer within {timeout_s} s")) for pipe in pipes]


def _rank_main(
    pipe: Any,
    target: Callable[..., Any],
    rank: int,
    world_size: int,
    server: str,
    store: str,
    args: Any,
) -> None:
    import torch
    import torch.distributed as dist

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    share_server(server)
    fork_agents()
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
    )
    try:
        dist.init_process_group(
            "gloo", store=dist.FileStore(store, world_size), rank=rank, world_size=world_size
        )
        dist.barrier()  # a target may destroy the group while other ranks are still connecting
        try:
            answer = (True, target(rank, *args))
            if dist.is_initialized():  # a test may have ended it
                dist.barrier()
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
    except BaseException:
        answer = (False, traceback.format_exc())
    pipe.send(answer)
