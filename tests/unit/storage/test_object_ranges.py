"""Long ranges of objects in a real store, taken piece by piece."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Iterator

import pytest

from tests.support.s3 import object_settings, open_object_tier
from tieredckpt.errors import IntegrityError, NotFoundError, TierUnavailableError
from tieredckpt.storage.base import OpenObject, Tier
from tieredckpt.testing.s3_server import ACCESS_KEY, SECRET_KEY, S3Server

KEY = "segments/" + "a" * 32
DATA = random.Random(7).randbytes(9 << 20)


class Source:
    size = len(DATA)

    def read_into(self, offset: int, into: memoryview) -> None:
        into[:] = DATA[offset : offset + len(into)]


@pytest.fixture(params=["s3", "memory"])
def tier(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Tier]:
    """One whose answers are received where they are wanted, and one that is read in pieces."""
    if request.param == "s3":
        server: S3Server = request.getfixturevalue("s3_server")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
        at = f"s3://{request.getfixturevalue('s3_prefix')}"
        found = open_object_tier("s3", at, object_settings(server.endpoint, retry_for_s=2.0))
    else:
        found = open_object_tier("memory", "memory://b/x", object_settings("http://127.0.0.1:1"))
    found.put_from(KEY, Source())
    yield found
    found.close()


def read(opened: OpenObject, start: int, stop: int) -> bytes:
    with contextlib.closing(opened.stream(start, stop)) as stream:
        into = bytearray(stop - start)
        stream.read_into(memoryview(into))
        return bytes(into)


def test_pieces_of_any_size_come_in_order(tier: Tier):
    chance = random.Random(1)
    with tier.open(KEY) as opened:
        for start, stop in (
            (0, len(DATA)),
            (5, 6),
            (len(DATA) - 4096, len(DATA)),
            (1 << 20, 7 << 20),
        ):
            stream = opened.stream(start, stop)
            at = start
            while at < stop:
                size = min(chance.choice((1, 4096, 512 << 10, 3 << 20)), stop - at)
                into = bytearray(size)
                stream.read_into(memoryview(into))
                assert into == DATA[at : at + size]
                at += size
            stream.close()


def test_many_at_once_and_one_that_is_left_unread(tier: Tier):
    with tier.open(KEY) as opened:
        left = opened.stream(0, len(DATA))
        left.read_into(memoryview(bytearray(10)))
        left.close()
        found: dict[int, bytes] = {}

        def fetch(number: int) -> None:
            found[number] = read(opened, number << 20, (number + 1) << 20)

        threads = [threading.Thread(target=fetch, args=(number,)) for number in range(9)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert b"".join(found[number] for number in range(9)) == DATA


def test_one_that_is_aborted_fails_and_others_go_on(tier: Tier):
    with tier.open(KEY) as opened:
        stream = opened.stream(0, len(DATA))
        stream.read_into(memoryview(bytearray(1 << 10)))
        stream.abort()
        with pytest.raises(TierUnavailableError):
            stream.read_into(memoryview(bytearray(len(DATA) - (1 << 10))))
        stream.close()
        assert read(opened, 100, 200) == DATA[100:200]


def test_an_object_that_was_deleted_or_changed_gives_nothing_else(tier: Tier):
    with tier.open(KEY) as opened:
        tier.replace(KEY, b"other")
        with pytest.raises(IntegrityError):
            read(opened, 0, 100)
        tier.delete(KEY)
        with pytest.raises(NotFoundError):
            read(opened, 0, 100)
