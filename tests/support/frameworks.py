"""Ranks that run a training framework, forked from one process that has imported it.

Importing a framework takes seconds; each start of training in a test is new processes all the same.
"""

from __future__ import annotations

import importlib
import multiprocessing
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.support import ranks
from tests.support.preloaded import context, server_address, share_server

ROOT = Path(__file__).parent.parent.parent


class Workshop:
    """Starts ranks, as ``run_ranks`` does, from a process with modules imported."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def run(
        self, target: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 120.0
    ) -> list[Any]:
        """``target(rank, *args)`` on each rank; what they return. Raises RankFailed."""
        self._pipe.send((target, world_size, args, timeout_s))
        assert self._pipe.poll(timeout_s + 60), "the workshop does not answer"
        answer, error = self._pipe.recv()
        if error is not None:
            raise ranks.RankFailed(error)
        found: list[Any] = answer
        return found


@contextmanager
def workshop(*modules: str) -> Iterator[Workshop]:
    """A process that has imported ``modules`` and forks ranks from itself."""
    mine, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, server_address(), modules))
    process.start()
    theirs.close()
    try:
        yield Workshop(mine)
    finally:
        mine.close()  # it reads the end of the pipe, and ends
        process.join(10)
        if process.is_alive():
            process.kill()
            process.join()


def _serve(pipe: Connection, server: str, modules: tuple[str, ...]) -> None:
    share_server(server)  # for agents
    for module in modules:
        importlib.import_module(module)
    ranks.context = multiprocessing.get_context("fork")  # type: ignore[assignment]
    while True:
        try:
            target, world_size, args, timeout_s = pipe.recv()
        except EOFError:
            return
        try:
            answer = ranks.run_ranks(target, world_size, *args, timeout_s=timeout_s), None
        except BaseException:
            answer = None, traceback.format_exc()
        pipe.send(answer)


def place(folder: Path, runtime_dir: Path, namespace: str) -> str:
    """A job's folder, with the configuration that the documentation names."""
    folder.mkdir(exist_ok=True)
    (folder / "tieredckpt.yaml").write_text(
        f"namespace: {namespace}\n"
        f"agent: {{runtime_dir: {runtime_dir}, start_timeout: 60s}}\n"
        "memory: {capacity: 256MiB, keep: {last: 2}}\n"
        "recovery: {wait: 0s}\n"
    )
    return str(folder)


def snippet(heading: str, number: int = 0) -> str:
    """The Python code under ``heading`` of docs/use/frameworks.md: users copy what is run here."""
    text = (ROOT / "docs" / "use" / "frameworks.md").read_text()
    section = text.split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]
    return section.split("```python\n")[number + 1].split("```", 1)[0]
