"""Threads that move bytes: a trainer's saves and loads are spread over them."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor


class CopyPool:
    """``threads - 1`` persistent threads; the one that calls :meth:`run` is the last.

    Args:
        threads: At least 1. Threads start when they are first needed.
    """

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._executor = ThreadPoolExecutor(threads - 1, "tieredckpt-copy") if threads > 1 else None

    def run(self, work: Callable[[int], None], count: int) -> None:
        """Call ``work(0)`` to ``work(count - 1)``, each once, spread over the threads.

        Returns when no thread is inside ``work`` any more. If one call raises, no further ones
        begin, and the first exception is raised here.
        """
        numbers = itertools.count()  # next() is one bytecode of C: each number is drawn once
        stopped = False

        def drain() -> None:
            nonlocal stopped
            try:
                while not stopped and (number := next(numbers)) < count:
                    work(number)
            except BaseException:
                stopped = True
                raise

        helpers: list[Future[None]] = []
        if self._executor is not None:
            # RuntimeError: the pool was closed, or the interpreter is ending. Scripts may end while
            # a save runs in the background; Python waits for it, and this thread can do it alone.
            with contextlib.suppress(RuntimeError):
                for _ in range(min(self.threads, count) - 1):
                    helpers.append(self._executor.submit(drain))  # noqa: PERF401
        try:
            drain()
        finally:
            # Not bounded by a deadline: a helper only copies memory, and to return while one is
            # still writing would hand a slot on that someone writes into.
            failures = [e for e in (each.exception() for each in helpers) if e is not None]
        if failures:
            raise failures[0]

    def close(self) -> None:
        """End the threads. Idempotent."""
        if self._executor is not None:
            self._executor.shutdown(wait=False)
