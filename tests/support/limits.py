"""A run of the tests ends, and names the test that held it up.

Three limits, from the inside out:

1. pytest-timeout fails a test after ``timeout`` seconds, by a signal (``timeout_method``).
2. A test that is still running ``timeout_grace`` seconds later is stuck where no signal reaches
   it, such as in C. Its process prints all stacks and exits. faulthandler's own thread does that;
   it is written in C and needs no GIL.
3. A run that takes longer than ``run_timeout`` seconds prints what is running and stops.

SIGINT and SIGTERM stop a run within 15 s, also one that was started in the background, where a
shell has SIGINT ignored. Whatever ends a run, its processes end and its temporary files go
(``leftovers.py``).

A worker of pytest-xdist that dies, for that or any other reason, ends the run at once with the
name of its test. pytest-xdist alone would replace the worker (``--max-worker-restart=0`` forbids
that, since ``--dist loadfile`` has stood still after it), and then let the others finish.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any

import pytest

from tests.support import leftovers

_STDERR = pytest.StashKey[int]()
_EXITS_AT_S = pytest.StashKey[float]()
_STOPPING_S = 10.0
"""How long a run that is stopped may take to print its summary."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addini(
        "timeout_grace", "Seconds after a test's timeout at which its process exits", default="60"
    )
    parser.addini("run_timeout", "Seconds after which the whole run stops (0: never)", default="0")


def pytest_configure(config: pytest.Config) -> None:
    # Not captured yet: what a dying process prints must not end in a file that dies with it.
    config.stash[_STDERR] = os.dup(2)
    if hasattr(config, "workerinput"):
        os.environ.pop("PYTEST_DEBUG_TEMPROOT", None)
    else:
        config.pluginmanager.register(_Run(config), "run-limits")


def pytest_unconfigure(config: pytest.Config) -> None:
    os.close(config.stash[_STDERR])


@pytest.hookimpl(wrapper=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> Iterator[None]:
    """pytest-timeout arms its timer: arm the one that no test can hold up."""
    grace_s = float(item.config.getini("timeout_grace"))
    item.stash[_EXITS_AT_S] = time.monotonic() + settings.timeout + grace_s
    _arm(item)
    return (yield)


@pytest.hookimpl(trylast=True)
def pytest_exception_interact(node: pytest.Item | pytest.Collector) -> None:
    """A test failed, and pytest's own plugin disarmed the timer: its teardown may hang as well."""
    if _EXITS_AT_S in node.stash:
        _arm(node)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


def _arm(node: pytest.Item | pytest.Collector) -> None:
    left_s = max(node.stash[_EXITS_AT_S] - time.monotonic(), 0.001)
    faulthandler.dump_traceback_later(left_s, exit=True, file=node.config.stash[_STDERR])


class _Run:
    """The limits of the whole run, in the process that started it."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._limit_s = float(config.getini("run_timeout"))
        self._running: dict[str, float] = {}
        self._cut_short = False
        self._failed: set[str] = set()
        self._stopping = threading.Event()
        self._ended = threading.Event()
        self._folders = leftovers.begin()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._stop)
        threading.Thread(target=self._watch, name="run-limit", daemon=True).start()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._running[nodeid] = time.monotonic()

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._running.pop(nodeid, None)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._failed.add(report.nodeid)

    @pytest.hookimpl(optionalhook=True)
    def pytest_handlecrashitem(self, crashitem: str, report: pytest.TestReport) -> None:
        """A worker died: its failure is reported, then nothing else is waited for."""
        self._cut_short = True
        self._config.hook.pytest_runtest_logreport(report=report)
        leftovers.end_processes()  # pytest-xdist gives the other workers 10 s
        pytest.exit(str(report.longrepr), returncode=1)

    @pytest.hookimpl(trylast=True)
    def pytest_unconfigure(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)  # soon over: nothing is to be left
        self._clean()
        self._ended.set()

    def _clean(self) -> None:
        leftovers.end(self._folders)
        if self._cut_short:
            # pytest has no public way to ask where the folders of its tests are.
            leftovers.keep_only_failed(self._config._tmp_path_factory.getbasetemp(), self._failed)

    def _stop(self, number: int, _frame: FrameType | None) -> None:
        """By a signal, or since it took too long: pytest prints its summary, then it cleans up."""
        if not self._cut_short:
            self._cut_short = True
            text = f"\nstopped by {signal.Signals(number).name}\n"
            os.write(self._config.stash[_STDERR], text.encode())
        if not self._stopping.is_set():
            self._stopping.set()
            leftovers.end_processes()
            raise KeyboardInterrupt

    def _watch(self) -> None:
        """End the process itself where its main thread does not."""
        limit_s = self._limit_s if self._limit_s > 0 else None
        if not self._stopping.wait(limit_s):
            if self._ended.is_set():
                return
            self._cut_short = True
            now_s = time.monotonic()
            running = [f"  {name} ({now_s - at_s:.0f} s)\n" for name, at_s in self._running.items()]
            text = f"\nthe run took {self._limit_s:.0f} s, its limit; running:\n{''.join(running)}"
            os.write(self._config.stash[_STDERR], text.encode())
            os.kill(os.getpid(), signal.SIGINT)
        if not self._ended.wait(_STOPPING_S):
            try:
                self._clean()
            finally:
                os._exit(1)
