"""Scripts of users in forks with torch imported: as ``python SCRIPT`` or torchrun starts them."""

from __future__ import annotations

import os
import runpy
import socket
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.support.ports import hold_port
from tests.support.ranks import RankFailed, run_ranks


def run_script(
    script: Path,
    *words: object,
    folder: Path,
    environ: Mapping[str, str],
    ranks: int = 1,
    start: Callable[..., list[Any]] = run_ranks,
) -> tuple[bool, str]:
    """Whether all ranks ended well, and what they printed. ``start``: of a workshop, or ours."""
    environ = dict(environ)
    with socket.socket() as held, tempfile.NamedTemporaryFile() as output:
        if ranks > 1:
            environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(hold_port(held))}
        args = str(script), [str(each) for each in words], str(folder), environ, output.name
        try:
            start(_as_main, ranks, *args, timeout_s=240.0)
        except RankFailed as error:
            return False, f"{Path(output.name).read_text()}\n{error}"
        return True, Path(output.name).read_text()


def _as_main(
    _: int, script: str, words: list[str], folder: str, environ: dict[str, str], output: str
) -> None:
    import torch.distributed as dist

    from tieredckpt import failpoints

    dist.destroy_process_group()
    with open(output, "ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    if "MASTER_ADDR" not in environ:
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
            del os.environ[name]
    os.environ.update(environ)
    failpoints.arm(environ.get("TIEREDCKPT_FAILPOINTS", ""))
    os.chdir(folder)
    sys.argv = [script, *words]
    sys.path.insert(0, str(Path(script).parent))
    try:
        runpy.run_path(script, run_name="__main__")
    finally:
        sys.stdout.flush()
