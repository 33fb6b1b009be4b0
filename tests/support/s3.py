"""The S3 server of the tests: one in each test process, started when the first test wants it."""

from __future__ import annotations

import itertools
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.faults import small_tmpfs
from tieredckpt.storage.backends.open import open_store
from tieredckpt.storage.base import Tier
from tieredckpt.storage.object.errors import ObjectSettings
from tieredckpt.storage.object.s3_http import Answer
from tieredckpt.storage.object.s3_upload import Uploader
from tieredckpt.storage.object.tier import ObjectTier
from tieredckpt.testing.s3_server import BUCKET, S3Server, missing

_PREFIX = "tck-s3-"
_numbers = itertools.count()


def _sweep() -> None:
    """Delete what a test process left that was killed; its server died with it."""
    for each in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*-*"):
        pid = each.name.removeprefix(_PREFIX).partition("-")[0]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists():
            shutil.rmtree(each, ignore_errors=True)


@contextmanager
def _folder() -> Iterator[Path]:
    if why := missing():
        pytest.skip(why)
    _sweep()
    folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-"))
    folder.chmod(0o755)  # the server runs as nobody
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _server(folder: Path, more: Mapping[str, list[Any]] | None = None) -> Iterator[S3Server]:
    server = S3Server(folder, more)
    try:
        yield server.start()
    finally:
        server.kill()


def running(more: Mapping[str, list[Any]] | None = None) -> Iterator[S3Server]:
    """What a fixture yields from that wants a server of its own; ``more``: as of S3Server."""
    with _folder() as folder, _server(folder, more) as server:
        yield server


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    """The server that all tests of this process share: none may stop it, each has its prefix."""
    yield from running()


@pytest.fixture
def s3_server_alone() -> Iterator[S3Server]:
    """A server for one test (3 s more), which may kill, stop and start it."""
    yield from running()


class SmallServer:
    """A server on a volume of its own, which something else may fill."""

    def __init__(self, server: S3Server, volume: Path) -> None:
        self.server, self._volume = server, volume

    @property
    def room(self) -> int:
        """Free bytes."""
        found = os.statvfs(self._volume)
        return found.f_bavail * found.f_frsize

    def fill(self, *, leave: int) -> None:
        """Take all room but ``leave`` bytes."""
        with (self._volume / "others").open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, self.room - leave)

    def make_room(self) -> None:
        """Give it back."""
        (self._volume / "others").unlink()


@pytest.fixture
def s3_server_small() -> Iterator[SmallServer]:
    """A server for one test, whose volume of 192 MiB can be full."""
    with _folder() as folder, ExitStack() as stack:
        try:
            volume = stack.enter_context(small_tmpfs(folder, 192 << 20))
        except PermissionError as error:
            pytest.skip(f"cannot mount a small tmpfs here: {error}")
        volume.chmod(0o755)
        yield SmallServer(stack.enter_context(_server(volume / "server")), volume)


@pytest.fixture
def s3_prefix() -> str:
    """``bucket/prefix`` that no other test uses."""
    return f"{BUCKET}/test-{os.getpid()}-{next(_numbers)}"


def object_settings(endpoint: str, **more: Any) -> ObjectSettings:
    """Settings for the server (or a proxy before it) at ``endpoint``: small parts, short waits."""
    wanted: dict[str, Any] = {
        "endpoint": endpoint,
        "allow_http": True,
        "part_bytes": 8 << 20,
        "concurrency": 4,
        "timeout_s": 20.0,
        "retry_for_s": 60.0,
    }
    return ObjectSettings(**wanted | more)


def open_object_tier(name: str, url: str, settings: ObjectSettings) -> Tier:
    """The tier at ``url``, which ends in the namespace."""
    store, _, namespace = url.rpartition("/")
    return open_store(name, store, namespace, settings)


def uploads_of(tier: ObjectTier) -> Uploader:
    """What puts large objects, and finds what was begun and not completed."""
    assert tier._uploader is not None
    return tier._uploader


def parts_sent(tier: ObjectTier) -> list[int]:
    """Bytes of each part that ``tier`` sends from now on, and that is there then."""
    assert tier._wire is not None
    wire, ask = tier._wire, tier._wire.ask
    sent: list[int] = []

    def counting(method: str, key: str | None, **more: Any) -> Answer:
        answer = ask(method, key, **more)
        if "partNumber" in (more.get("query") or {}) and answer.status == 200:
            sent.append(len(more["body"]))
        return answer

    wire.ask = counting  # type: ignore[method-assign]
    return sent
