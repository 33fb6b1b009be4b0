"""Loader workers that outlive the signal of a preemption, but not their trainer.

A launcher signals the whole process group, and the ranks need batches until they leave. So workers
ignore the signal. multiprocessing, however, ends a process by a SIGTERM to each daemonic child and
a wait for it, which has no limit: the trainer itself ends those that ignore SIGTERM.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import signal
import threading
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from pathlib import Path


def ignore_preemption(worker_id: int) -> None:
    """Have a loader worker ignore SIGTERM, SIGINT, SIGUSR1 and SIGUSR2, and end with its trainer.

    Pass it as ``worker_init_fn`` of a DataLoader, or call it in yours. The trainer must open an
    engine, which lets it end.

    Args:
        worker_id: Not used.
    """
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_end_with, args=(parent,), daemon=True).start()


def _end_with(parent: BaseProcess) -> None:
    """End this process with its parent, even if it waits for its batches to be read."""
    parent.join()
    os._exit(0)


@functools.cache
def end_workers_at_exit(pid: int) -> None:
    """Have this process, ``pid``, kill daemonic children that ignore SIGTERM when it ends."""
    Finalize(None, _end_workers, exitpriority=0)  # before multiprocessing waits for them


def _end_workers() -> None:
    # torch's handler raises if a worker is killed.
    with contextlib.suppress(ValueError):  # not the main thread
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for child in multiprocessing.active_children():
        if child.daemon:
            child.terminate()  # first: a worker that does not ignore it yet never will
            with contextlib.suppress(OSError, IndexError):  # it is gone
                status = Path(f"/proc/{child.pid}/status").read_text()
                if int(status.partition("SigIgn:")[2].split()[0], 16) >> (signal.SIGTERM - 1) & 1:
                    child.kill()
