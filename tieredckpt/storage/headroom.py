"""Free memory for tmpfs, by three limits: the file system, our memory cgroup, the host.

A tmpfs may be larger than the limit of the memory cgroup (a container's or Slurm job's) or than the
host's memory; then writing one page too many ends in the OOM killer, not in ENOSPC. So the smallest
of the three limits applies, and it is read before pages are allocated. Both versions of cgroups are
read, each from our own group up to the mounted root, since any ancestor may be the tightest.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tieredckpt.errors import CapacityError

RESERVE_BYTES = 64 << 20
"""Left free in a cgroup and on the host, for other programs between the check and the use."""

PROC = Path("/proc")
"""Where the kernel's process files are mounted; tests point it at a copy."""


@dataclass(frozen=True, slots=True)
class Headroom:
    """The tightest limit on memory, and the bytes that are free within it."""

    available_bytes: int
    limit: str
    """Name of the limit: "file system", "memory cgroup" or "host memory"."""
    advice: str
    """What to do if it is too tight."""

    def check(self, wanted: int, what: str, *, tier: str = "memory") -> None:
        """Check that ``wanted`` bytes are free for ``tier``, or raise CapacityError.

        ``what`` begins the error's text: the use of these bytes.
        """
        if wanted > self.available_bytes:
            raise CapacityError(
                f"{what}; {self.limit} has {format_mib(self.available_bytes)} free: {self.advice}",
                tier=tier,
                needed_bytes=wanted,
                available_bytes=self.available_bytes,
                limit=self.limit,
            )


def headroom_of(folder: Path) -> Headroom:
    """The tightest limit of ``folder``'s file system, our memory cgroup (v1 or v2) and the host.

    A limit that cannot be read (no cgroup mounted, no /proc) is ignored.

    Raises:
        OSError: The folder's file system cannot be read.
    """
    stat = os.statvfs(folder)
    found = [
        Headroom(
            stat.f_bavail * stat.f_frsize,
            "file system",
            f"the file system of {folder} has {format_mib(stat.f_blocks * stat.f_frsize)}: enlarge "
            "it (docker run --shm-size=..., a larger emptyDir with medium Memory, mount -o "
            "remount,size=...), or keep less (memory.capacity, memory.keep)",
        )
    ]
    if (group := cgroup_available()) is not None:
        found.append(group)
    if (host := _host_available()) is not None:
        found.append(host)
    return min(found, key=lambda each: each.available_bytes)


def cgroup_available() -> Headroom | None:
    """The tightest limit of our memory cgroup and its ancestors; None: no limit can be read."""
    found = []
    for folder, version in _our_groups():
        if (left := _left_in(folder, version)) is not None:
            found.append(
                Headroom(
                    max(0, left - RESERVE_BYTES),
                    "memory cgroup",
                    f"the memory cgroup {folder} would be over its limit and its processes "
                    "killed: raise the limit (docker run --memory=..., the pod's "
                    "resources.limits.memory, sbatch --mem=...), or keep less "
                    "(memory.capacity, memory.keep)",
                )
            )
    return min(found, key=lambda each: each.available_bytes, default=None)


def _our_groups() -> Iterator[tuple[Path, int]]:
    """Folder and version of our memory cgroup and its ancestors, in each hierarchy (v1, v2)."""
    mounts: dict[int, tuple[str, Path]] = {}
    for row in _rows(PROC / "self" / "mountinfo"):
        # "36 35 98:0 /root /mount rw,... optional... - type source options"
        front, _, back = row.partition(" - ")
        fields, tail = front.split(" "), back.split(" ")
        if len(fields) < 6 or len(tail) < 3:
            continue
        version = 2 if tail[0] == "cgroup2" else 1
        if version == 2 or (tail[0] == "cgroup" and "memory" in tail[2].split(",")):
            mounts[version] = (_unescape(fields[3]), Path(_unescape(fields[4])))
    for row in _rows(PROC / "self" / "cgroup"):
        number, _, rest = row.partition(":")
        controllers, _, path = rest.partition(":")
        version = 2 if number == "0" and not controllers else 1
        if version in mounts and (version == 2 or "memory" in controllers.split(",")):
            root, mount = mounts[version]
            folder = mount / _below(path, root)
            for each in (folder, *folder.parents):
                yield each, version
                if each == mount:
                    break


def _below(path: str, root: str) -> str:
    """``path`` as seen from a mount that shows ``root``; the mount itself if it is not below.

    In a container without a cgroup namespace the path is the host's, and the mount is a part of it.
    """
    root = root.rstrip("/")
    if ".." in path.split("/") or not (path + "/").startswith(root + "/"):
        return ""
    return path[len(root) :].strip("/")


def _left_in(folder: Path, version: int) -> int | None:
    """Free bytes within the limit of one cgroup; None: it has no limit."""
    if version == 2:
        # Beyond memory.high the kernel throttles the allocating process to a crawl.
        limits = [_number(folder / name) for name in ("memory.max", "memory.high")]
        used = _number(folder / "memory.current")
        cache_key = "inactive_file"
    else:
        limits = [_number(folder / "memory.limit_in_bytes")]
        used = _number(folder / "memory.usage_in_bytes")
        cache_key = "total_inactive_file"
    limit = min((each for each in limits if each is not None), default=None)
    # v1 encodes "no limit" as the largest multiple of a page that fits into 63 bits.
    if limit is None or used is None or limit >= 1 << 62:
        return None
    # The kernel drops clean page cache before it kills a process.
    return limit - used + _field(folder / "memory.stat", cache_key)


def _host_available() -> Headroom | None:
    available = _field(PROC / "meminfo", "MemAvailable") * 1024
    if not available:
        return None
    return Headroom(
        max(0, available - RESERVE_BYTES),
        "host memory",
        "the host itself has no more free memory: keep less (memory.capacity, memory.keep), or "
        "run fewer ranks on it",
    )


def _rows(path: Path) -> list[str]:
    try:
        return path.read_text(errors="replace").splitlines()
    except OSError:  # not mounted, or hidden: this limit is ignored
        return []


def _number(path: Path) -> int | None:
    rows = _rows(path)
    return int(rows[0]) if rows and rows[0].isdecimal() else None  # "max": no limit


def _field(path: Path, name: str) -> int:
    for row in _rows(path):
        cells = row.replace(":", " ").split()
        if len(cells) >= 2 and cells[0] == name and cells[1].isdecimal():
            return int(cells[1])
    return 0


def _unescape(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


def format_mib(size: int) -> str:
    """A size for people, in MiB, or in GiB from 1 GiB on."""
    return f"{size / (1 << 20):.1f} MiB" if size < 1 << 30 else f"{size / (1 << 30):.2f} GiB"
