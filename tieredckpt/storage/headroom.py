"""How much tmpfs may still be taken: by the file system, the memory cgroup that pays, the host.

A tmpfs may promise more pages than the memory cgroup (a container's limit, a Slurm job's) or the
host has; then the write that is one page too many ends in the OOM killer, not in ENOSPC. So the
smallest of the three limits counts, and it is asked before pages are allocated. Both versions of
cgroups are read, each from our own group up to the root of what is mounted, since any ancestor
may be the tight one.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tieredckpt.errors import CapacityError

RESERVE_BYTES = 64 << 20
"""Never planned with in a cgroup or on the host: what programs need between check and use."""

PROC = Path("/proc")
"""Where the kernel's process files are mounted; tests point it at a copy."""


@dataclass(frozen=True, slots=True)
class Headroom:
    """The tightest limit on what may still be taken."""

    available_bytes: int
    limit: str
    """Name of the limit: "file system", "memory cgroup" or "host memory"."""
    advice: str
    """What to do if it is too tight."""

    def check(self, wanted: int, what: str, *, tier: str = "memory") -> None:
        """Make sure that ``wanted`` bytes of ``tier`` may be taken, or raise CapacityError.

        ``what`` begins its text: what they are needed for.
        """
        if wanted > self.available_bytes:
            raise CapacityError(
                f"{what}; {self.limit} has room for {format_mib(self.available_bytes)}: "
                f"{self.advice}",
                tier=tier,
                needed_bytes=wanted,
                available_bytes=self.available_bytes,
                limit=self.limit,
            )


def headroom_of(folder: Path) -> Headroom:
    """What ``folder``'s file system, our memory cgroup (v1 or v2) and the host still allow.

    A limit that cannot be read (no cgroup mounted, no /proc) does not count.

    Raises:
        OSError: The folder's file system cannot be asked.
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
    """What our memory cgroup and all above it still allow; None if there is no limit to be read."""
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
    """Our memory cgroup in each mounted hierarchy that may hold one (v1 memory, v2), and all above.

    As its folder and the version of its hierarchy.
    """
    mounts: dict[int, tuple[str, Path]] = {}
    for line in _lines(PROC / "self" / "mountinfo"):
        # "36 35 98:0 /root /mount rw,... optional... - type source options"
        front, _, back = line.partition(" - ")
        fields, tail = front.split(" "), back.split(" ")
        if len(fields) < 6 or len(tail) < 3:
            continue
        if tail[0] == "cgroup2":
            mounts[2] = (_unescape(fields[3]), Path(_unescape(fields[4])))
        elif tail[0] == "cgroup" and "memory" in tail[2].split(","):
            mounts[1] = (_unescape(fields[3]), Path(_unescape(fields[4])))
    for line in _lines(PROC / "self" / "cgroup"):
        number, _, rest = line.partition(":")
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

    In a container without a cgroup namespace the path is the host's, the mount shows a part of it.
    """
    root = root.rstrip("/")
    if ".." in path.split("/") or not (path + "/").startswith(root + "/"):
        return ""
    return path[len(root) :].strip("/")


def _left_in(folder: Path, version: int) -> int | None:
    """Bytes that one cgroup still allows; None if it sets no limit."""
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
    # v1 says "no limit" as the largest multiple of a page that fits into 63 bits.
    if limit is None or used is None or limit >= 1 << 62:
        return None
    # Clean page cache is given back before anything is killed.
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


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(errors="replace").splitlines()
    except OSError:  # not mounted, or hidden from us: this limit does not count
        return []


def _number(path: Path) -> int | None:
    lines = _lines(path)
    return int(lines[0]) if lines and lines[0].isdecimal() else None  # "max": no limit


def _field(path: Path, name: str) -> int:
    for line in _lines(path):
        words = line.replace(":", " ").split()
        if len(words) >= 2 and words[0] == name and words[1].isdecimal():
            return int(words[1])
    return 0


def _unescape(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


def format_mib(size: int) -> str:
    """Mebibytes, or gibibytes of more than one, for people."""
    return f"{size / (1 << 20):.1f} MiB" if size < 1 << 30 else f"{size / (1 << 30):.2f} GiB"
