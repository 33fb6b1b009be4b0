"""``tieredckpt ...`` in a fork: a tenth of what a new interpreter costs."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from tests.support.preloaded import context

DEADLINE_S = 120.0


def tieredckpt(
    *words: str, first: Callable[[], object] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command with this process's environment, and return what it printed.

    Args:
        words: After ``tieredckpt``.
        first: Called in the process first of all, as ``Host.first`` of tests/support/hosts.py.
    """
    with tempfile.TemporaryDirectory() as folder:
        told = [Path(folder) / name for name in ("out", "err")]
        environ = dict(os.environ)
        process = context.Process(target=_main, args=(words, environ, first, told), daemon=True)
        process.start()
        process.join(DEADLINE_S)
        if process.exitcode is None:
            process.kill()
            raise subprocess.TimeoutExpired(words, DEADLINE_S)
        return subprocess.CompletedProcess(words, process.exitcode, *(p.read_text() for p in told))


def _main(
    words: tuple[str, ...],
    environ: dict[str, str],
    first: Callable[[], object] | None,
    told: list[Path],
) -> None:
    for stream, path in zip((1, 2), told, strict=True):
        with path.open("wb") as file:
            os.dup2(file.fileno(), stream)
    os.environ.clear()
    os.environ.update(environ)
    if first is not None:
        first()
    from tieredckpt.cli.main import main

    sys.argv = ["tieredckpt", *words]
    main()
