"""Describes the machine: a figure without it means nothing."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import threading
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Self

import msgspec

from benchmarks.processes import ROOT
from benchmarks.shapes import GIB


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """What the figures depend on."""

    cpu: str
    cores: int
    memory_gib: float
    kernel: str
    disk: str
    """File system, its device and options, of the folder that spills go to."""
    shm: str
    huge_pages: str
    python: str
    packages: dict[str, str]
    commit: str
    load_1min: float
    """Load average before the run: above ~0.3 somebody else was using the machine."""
    device: str = ""
    """The CUDA device and its driver, if there is one."""

    @property
    def slug(self) -> str:
        """Short name for files: that of the device, or of the processor."""
        device, _, _ = self.device.partition(" 80GB")
        name = device or f"{self.cpu}-{self.cores}c"
        return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def describe(disk: Path, shm: Path) -> Machine:
    """Look at the machine; ``disk`` and ``shm`` are the folders that will be used."""
    return Machine(
        cpu=_cpu(),
        cores=len(os.sched_getaffinity(0)),
        memory_gib=round(_meminfo("MemTotal") / GIB, 1),
        kernel=f"{platform.system()} {platform.release()} {platform.machine()}",
        disk=_file_system(disk),
        shm=_file_system(shm),
        huge_pages=", ".join(
            f"{name}={_chosen(Path('/sys/kernel/mm/transparent_hugepage') / name)}"
            for name in ("enabled", "shmem_enabled")
        ),
        python=platform.python_version(),
        packages={
            name: importlib.metadata.version(name)
            for name in ("torch", "numpy", "xxhash", "msgspec", "zstandard", "aiohttp")
        },
        commit=_commit(),
        load_1min=round(os.getloadavg()[0], 2),
        device=_device(),
    )


class Watch(ABC):
    """Looks at something, in a thread, while the context lasts."""

    PERIOD_S = 0.05

    def __init__(self) -> None:
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    @abstractmethod
    def look(self) -> None:
        """One sample."""

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(self.PERIOD_S):
            self.look()


class MemoryWatch(Watch):
    """Samples how much memory the machine lacks compared with the start, in a thread.

    Shared memory, private memory and slots all count; page cache does not. Other users of the
    machine count too, which is why the run should be alone on it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.start_bytes = available_bytes()
        self.least_bytes = self.start_bytes

    @property
    def peak_bytes(self) -> int:
        """The most that was in use at once since the start."""
        return self.start_bytes - self.least_bytes

    def look(self) -> None:
        """One sample."""
        self.least_bytes = min(self.least_bytes, available_bytes())


def available_bytes() -> int:
    """Memory that can be had without swapping."""
    return _meminfo("MemAvailable")


def free_bytes(folder: Path) -> int:
    """Space left on the file system of ``folder``."""
    stat = os.statvfs(folder)
    return stat.f_bavail * stat.f_frsize


def resident_bytes(pid: int) -> int:
    """Private resident memory of a process: slots that it maps are not its own."""
    status = Path(f"/proc/{pid}/status").read_text()
    fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    kib = int(fields["VmRSS"].split()[0]) - int(fields["RssShmem"].split()[0])
    return kib * 1024


def today() -> str:
    """The date, for the name of the results."""
    return time.strftime("%Y-%m-%d")


def _meminfo(name: str) -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        key, _, value = line.partition(":")
        if key == name:
            return int(value.split()[0]) * 1024
    raise KeyError(name)


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return platform.processor() or platform.machine()


def _device() -> str:
    """By the driver's tool: a process that only starts others needs no context on the device."""
    if shutil.which("nvidia-smi") is None:
        return ""
    done = subprocess.run(
        ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    return done.stdout.strip().splitlines()[0] if done.returncode == 0 else ""


def _chosen(path: Path) -> str:
    try:
        found = re.search(r"\[(.+?)\]", path.read_text())
    except OSError:
        return "unknown"
    return found[1] if found else "unknown"


def _file_system(folder: Path) -> str:
    """The mount that ``folder`` lies on: the longest mount point that is a parent of it."""
    folder = folder.resolve()
    best = ("", "unknown")
    for line in Path("/proc/self/mounts").read_text().splitlines():
        device, point, kind, options = line.split()[:4]
        if folder.is_relative_to(point) and len(point) >= len(best[0]):
            best = (point, f"{kind} on {device} at {point} ({options})")
    return best[1]


def _commit() -> str:
    """Commit of the checkout, with what it differs by."""

    def git(*command: str) -> str:
        done = subprocess.run(
            ["git", "-C", str(ROOT), *command], capture_output=True, text=True, check=False
        )
        return done.stdout.strip() if done.returncode == 0 else ""

    commit = git("rev-parse", "--short=12", "HEAD")
    changed = [line for line in git("status", "--porcelain").splitlines() if "results/" not in line]
    if not commit:
        return "no commit"
    return f"{commit} with {len(changed)} changed files" if changed else commit
