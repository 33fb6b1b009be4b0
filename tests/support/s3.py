"""The S3 server of the tests: one in each test process, started when the first test wants it."""

from __future__ import annotations

import itertools
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tieredckpt.storage.backends.open import open_store
from tieredckpt.storage.base import Tier
from tieredckpt.storage.object.errors import ObjectSettings
from tieredckpt.storage.object.s3_http import Answer
from tieredckpt.storage.object.s3_upload import Uploader
from tieredckpt.storage.object.tier import ObjectTier
from tieredckpt.testing.s3_server import BUCKET, S3Server, missing

_numbers = itertools.count()


@contextmanager
def _folder() -> Iterator[Path]:
    if why := missing():
        pytest.skip(why)
    folder = Path(tempfile.mkdtemp(prefix="tck-s3-"))
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
