"""The tightest of three limits, from both versions of memory cgroups."""

from __future__ import annotations

from pathlib import Path

import pytest

from tieredckpt.storage import headroom
from tieredckpt.storage.headroom import RESERVE_BYTES, cgroup_available, headroom_of

GIB = 1 << 30
NO_LIMIT_V1 = str((1 << 63) - 4096)


class FakeKernel:
    """Copies of /proc and of the cgroup mounts, below a folder."""

    def __init__(self, root: Path) -> None:
        self.proc = root / "proc"
        self.mount = root / "cgroup mount"
        (self.proc / "self").mkdir(parents=True)
        self.mount.mkdir()
        (self.proc / "meminfo").write_text("MemTotal: 64 kB\nMemAvailable:   104857600 kB\n")

    def mounts(self, kind: str, *, root: str = "/", options: str = "rw") -> None:
        path = str(self.mount).replace(" ", "\\040")
        line = f"36 35 98:0 {root} {path} rw,nosuid shared:1 master:2 - {kind} src {options}\n"
        (self.proc / "self" / "mountinfo").write_text("1 2 0:1 / / rw - ext4 /dev/vda rw\n" + line)

    def belongs(self, line: str) -> None:
        (self.proc / "self" / "cgroup").write_text("11:cpu,cpuacct:/x\n" + line + "\n")

    def group(self, path: str, files: dict[str, str]) -> None:
        folder = self.mount / path
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / name).write_text(text + "\n")


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeKernel:
    kernel = FakeKernel(tmp_path)
    monkeypatch.setattr(headroom, "PROC", kernel.proc)
    return kernel


def v1(limit: object, used: int, inactive: int = 0) -> dict[str, str]:
    stat = f"cache 1\ntotal_inactive_file {inactive}\n"
    return {
        "memory.limit_in_bytes": str(limit),
        "memory.usage_in_bytes": str(used),
        "memory.stat": stat,
    }


def v2(limit: object, used: int, *, high: object = "max", inactive: int = 0) -> dict[str, str]:
    return {
        "memory.max": str(limit),
        "memory.high": str(high),
        "memory.current": str(used),
        "memory.stat": f"anon 1\ninactive_file {inactive}",
    }


def test_v1(kernel: FakeKernel):
    kernel.mounts("cgroup", options="rw,memory")
    kernel.belongs("4:memory:/job/step")
    kernel.group("job/step", v1(4 * GIB, GIB, inactive=GIB // 2))
    kernel.group("job", v1(100 * GIB, GIB))
    kernel.group("", v1(NO_LIMIT_V1, 5 * GIB))
    found = cgroup_available()
    assert found.available_bytes == 3 * GIB + GIB // 2 - RESERVE_BYTES
    assert found.limit == "memory cgroup"
    assert "job/step" in found.advice


def test_v1_parent_is_tighter(kernel: FakeKernel):
    kernel.mounts("cgroup", options="rw,memory")
    kernel.belongs("4:memory:/job/step")
    kernel.group("job/step", v1(4 * GIB, GIB))
    kernel.group("job", v1(4 * GIB, 3 * GIB))
    assert cgroup_available().available_bytes == GIB - RESERVE_BYTES


def test_v1_in_a_container_that_sees_its_part_only(kernel: FakeKernel):
    kernel.mounts("cgroup", root="/docker/abc", options="rw,memory")
    kernel.belongs("4:memory:/docker/abc")
    kernel.group("", v1(2 * GIB, GIB))
    assert cgroup_available().available_bytes == GIB - RESERVE_BYTES


def test_v2(kernel: FakeKernel):
    kernel.mounts("cgroup2")
    kernel.belongs("0::/kubepods/pod1")
    kernel.group("kubepods/pod1", v2(8 * GIB, 2 * GIB, inactive=GIB))
    kernel.group("kubepods", v2("max", 90 * GIB))
    assert cgroup_available().available_bytes == 7 * GIB - RESERVE_BYTES


def test_v2_high_counts_too(kernel: FakeKernel):
    kernel.mounts("cgroup2")
    kernel.belongs("0::/a")
    kernel.group("a", v2(8 * GIB, 2 * GIB, high=3 * GIB))
    assert cgroup_available().available_bytes == GIB - RESERVE_BYTES


def test_v2_path_outside_of_the_mount(kernel: FakeKernel):
    """Seen from a cgroup namespace that we were moved out of."""
    kernel.mounts("cgroup2")
    kernel.belongs("0::/../other")
    kernel.group("", v2(2 * GIB, 2 * GIB))
    assert cgroup_available().available_bytes == 0


def test_no_limit_and_nothing_mounted(kernel: FakeKernel):
    assert cgroup_available() is None
    kernel.mounts("cgroup2")
    kernel.belongs("0::/a")
    assert cgroup_available() is None
    kernel.group("a", v2("max", GIB))
    assert cgroup_available() is None
    kernel.group("a", {"memory.max": "garbage", "memory.stat": "\x00"})
    assert cgroup_available() is None


def test_the_tightest_limit_is_named(kernel: FakeKernel, tmp_path: Path):
    kernel.mounts("cgroup2")
    kernel.belongs("0::/a")
    kernel.group("a", v2(RESERVE_BYTES + 4096, 0))
    assert headroom_of(tmp_path).limit == "memory cgroup"
    assert headroom_of(tmp_path).available_bytes == 4096
    (kernel.proc / "meminfo").write_text("MemAvailable: 1 kB\n")
    assert headroom_of(tmp_path).limit == "host memory"
    assert headroom_of(tmp_path).available_bytes == 0
    kernel.group("a", v2("max", 0))
    (kernel.proc / "meminfo").write_text("")
    assert headroom_of(tmp_path).limit == "file system"


def test_this_machine(runtime_dir: Path):
    found = headroom_of(runtime_dir)
    assert found.available_bytes > 0
    assert found.advice
    with pytest.raises(OSError):
        headroom_of(runtime_dir / "missing")
