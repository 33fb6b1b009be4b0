"""All that a run of the tests leaves behind goes with it, however it ends.

A run's temporary files lie below two folders that carry the process id of the run: one where the
machine has temporary files, one in tmpfs. Its processes carry a mark in their environment. So a run
that is interrupted needs no fixture to clean up. What a killed run left is removed by the next one.

Folders of failed tests (``tmp_path``) are kept where pytest always keeps them.
"""

from __future__ import annotations

import contextlib
import errno
import multiprocessing.util
import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Collection
from pathlib import Path

from tests.support.processor import remove_groups
from tieredckpt.testing import netns

_SHM = "TCK_TEST_SHM"
_RUN = f"tck-run-{os.getpid()}"

MARK = "TCK_TEST_RUN"
"""The variable by which the processes of a run are found, however they were started."""


def shm() -> Path:
    """Where runtime folders of tests are made: in a tmpfs, since slots are measured against one."""
    return Path(os.environ.get(_SHM) or os.environ.get("TIEREDCKPT_TEST_SHM", "/dev/shm"))


def begin() -> list[Path]:
    """Make the folders of a run, for this process and all that it starts. Returns them."""
    home = Path(tempfile.gettempdir())
    for parent in (home, shm()):
        for left in parent.glob("tck-run-*"):
            pid = left.name.rpartition("-")[2]
            if left.name == _RUN or (pid.isdigit() and not Path("/proc", pid).exists()):
                end_processes(left.name)
                _remove(left)
    netns.sweep()
    folders = [home / _RUN, shm() / _RUN]
    for folder in folders:
        folder.mkdir(mode=0o755)  # the S3 server runs as nobody
    # A run inside of a test belongs to both runs.
    os.environ[MARK] = f"{os.environ.get(MARK, '')}/{_RUN}/"
    os.environ[_SHM] = str(folders[1])
    # Failed tests' folders stay where people look for them.
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(home))
    os.environ["TMPDIR"] = str(folders[0])
    tempfile.tempdir = None
    return folders


def end(folders: list[Path]) -> None:
    """End all processes of this run, then remove its folders and network namespaces."""
    end_processes()
    # It has a folder of its own in ours, and would fail to remove it when the interpreter exits.
    multiprocessing.util._exit_function()
    for folder in folders:
        _remove(folder)
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass  # one that nobody has waited for counts as alive
    netns.sweep()
    _remove_sockets()
    remove_groups()


def _remove_sockets() -> None:
    """Those of S3 servers that have ended: their place is a constant of the server."""
    for path in Path("/tmp").glob("seaweedfs-*.sock"):
        with socket.socket(socket.AF_UNIX) as probe, contextlib.suppress(FileNotFoundError):
            if probe.connect_ex(str(path)) == errno.ECONNREFUSED:
                path.unlink()


def end_processes(run: str = _RUN) -> None:
    """Kill what the tests of a run started and left: no fixture of theirs will."""
    mark = f"/{run}/".encode()
    known: set[str] = set()
    while True:  # a process that forks meanwhile has a child that is not in this listing
        entries = [each for each in Path("/proc").iterdir() if each.name.isdigit()]
        killed = {entry.name for entry in entries if _kill(entry, mark)}
        if killed <= known:  # one that the kernel holds stays there for a while
            return
        known |= killed


def _kill(entry: Path, mark: bytes) -> bool:
    """Kill a process of this run. Returns whether it is one."""
    if int(entry.name) == os.getpid():
        return False
    try:
        fd = os.pidfd_open(int(entry.name))
    except OSError:  # it ended
        return False
    try:
        if mark not in (entry / "environ").read_bytes():  # a zombie's is empty
            return False
        signal.pidfd_send_signal(fd, signal.SIGKILL)
    except OSError:  # it ended, or is another user's
        return False
    finally:
        os.close(fd)
    return True


def keep_only_failed(base: Path, failed: Collection[str]) -> None:
    """Of pytest's folder ``base``, remove those of tests that were cut short.

    Args:
        base: The folder of the whole run.
        failed: Node ids.
    """
    kept = {_folder_of(each) for each in failed}
    for home in list(base.glob("popen-gw*")) or [base]:
        for folder in home.iterdir():
            if folder.name.rstrip("0123456789") not in kept:
                _remove(folder)
    if not failed:
        _remove(base)


def _folder_of(node_id: str) -> str:
    """What pytest's ``tmp_path`` of a test is called, without the digits at its end."""
    head, bracket, parameters = node_id.partition("[")
    name = f"{head.rpartition('::')[2]}{bracket}{parameters}"
    return re.sub(r"\W", "_", name)[:30].rstrip("0123456789")


def _remove(folder: Path) -> None:
    """Unmount what is mounted below, and delete."""
    mounts = [line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()]
    for mount in reversed(mounts):
        if Path(mount).is_relative_to(folder):
            subprocess.run(["umount", "-l", mount], check=False, timeout=60)
    if folder.is_symlink():
        folder.unlink(missing_ok=True)
    else:
        shutil.rmtree(folder, ignore_errors=True)
