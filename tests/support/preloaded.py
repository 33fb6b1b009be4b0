"""What processes of tests are forked with: modules that cost more to import than most tests take.

There is one fork server per test process, and what was said to it last before it started counts: so
all use this one.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext, ForkServerProcess
from multiprocessing.process import BaseProcess
from types import SimpleNamespace
from typing import Any

from tieredckpt.testing.dcp.crews import PRELOAD

MODULES = [
    *PRELOAD,
    "tieredckpt.engine",
    "tieredckpt.agent.daemon",
    "tieredckpt.cli.main",
    "tests.support.agent",
    "tests.support.faulty_os",
    "tests.support.faults",
    "tests.support.states",
    "tests.support.frozen",
]


class _Preloaded(ForkServerContext):
    """Names our modules anew for each process, since any other code may have named its own."""

    def Process(self, *args: Any, **options: Any) -> ForkServerProcess:  # type: ignore[override]
        self.set_forkserver_preload(MODULES)
        return ForkServerProcess(*args, **options)


context = _Preloaded()
"""Forks from a server that has the modules imported: twenty times faster than a new process."""


def start_server() -> None:
    """Start the fork server now, before other code tells it to have less imported."""
    context.set_forkserver_preload(MODULES)
    forkserver._forkserver.ensure_running()


def show_stacks(process: BaseProcess) -> None:
    """Have a fork that does not answer print where it stands; tests/support/frozen.py."""
    if process.is_alive() and process.pid is not None:
        os.kill(process.pid, signal.SIGRTMIN)
        process.join(0.5)


def server_address() -> str:
    """Where the fork server listens, for :func:`share_server`."""
    start_server()
    return str(forkserver._forkserver._forkserver_address)


def share_server(address: str) -> None:
    """In a process that was forked: it can have processes forked, too, by the same server."""
    server: Any = forkserver._forkserver
    server._forkserver_address = address
    server.ensure_running = lambda: None  # it is not our child, so it could not say


def fork_for_dcp() -> None:
    """DCP's process executor gets a fork, not a new interpreter that imports torch for seconds.

    For who shares a server.
    """
    from torch.distributed.checkpoint import _async_process_executor

    _async_process_executor.mp = SimpleNamespace(get_context=lambda _method: _AsNew())


class _AsNew(ForkServerContext):
    """Processes that have what a new one would have of ours: the environment, and failpoints."""

    def Process(self, *, target: Any, args: Any, daemon: bool) -> Any:  # type: ignore[override]
        return context.Process(target=_as_new, args=(dict(os.environ), target, args), daemon=daemon)


def _as_new(environ: dict[str, str], target: Callable[..., Any], args: tuple[Any, ...]) -> None:
    from tieredckpt import failpoints

    os.environ.clear()
    os.environ.update(environ)
    failpoints.arm(environ.get("TIEREDCKPT_FAILPOINTS", ""))
    target(*args)
