"""Small real file systems to fill up, where this machine lets us mount one."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


def _run(*command: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except FileNotFoundError:
        pytest.skip(f"{command[0]} is not installed here")
    if done.returncode:
        pytest.skip(f"cannot mount here: {' '.join(command)}: {done.stderr.strip()}")


def _mounted(folder: Path, *command: str) -> Iterator[Path]:
    folder.mkdir()
    _run(*command, str(folder))
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], timeout=60, check=True)


@pytest.fixture
def small_tmpfs(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of 8 MiB."""
    yield from _mounted(
        tmp_path / "tmpfs", "mount", "-t", "tmpfs", "-o", "size=8m,mode=0700", "tmpfs"
    )


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """An ext4 of 32 MiB, on a loop device."""
    image = tmp_path / "image"
    with image.open("wb") as file:
        file.truncate(32 << 20)
    _run("mkfs.ext4", "-q", "-m", "0", str(image))
    yield from _mounted(tmp_path / "disk", "mount", "-o", "loop", str(image))
