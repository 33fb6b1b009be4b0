"""Credentials that a real store refuses in the middle of a run: a process hands out others."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from tests.support.http_proxy import HttpProxy, expired
from tests.support.s3 import object_settings, open_object_tier, parts_sent
from tests.support.s3_bench import HandedOut
from tieredckpt.errors import TierUnavailableError
from tieredckpt.storage.base import OpenObject
from tieredckpt.storage.object.credentials import Chain, Credentials
from tieredckpt.storage.object.tier import ObjectTier
from tieredckpt.testing.s3_server import ACCESS_KEY, NEXT_KEY, NEXT_SECRET, SECRET_KEY, S3Server
from tieredckpt.testing.tier_suite import SampleSource

PLAN = "plans/" + "cd" * 16
KEY = "segments/" + "ab" * 16
DATA = bytes(range(256)) * (17 << 12)
"""Three parts of 8 MiB."""


@pytest.fixture
def proxy(s3_server: S3Server) -> Iterator[HttpProxy]:
    with HttpProxy(s3_server.address) as proxy:
        yield proxy


@pytest.fixture
def handed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HandedOut:
    """What a process hands out, which the profile names."""
    found = HandedOut(tmp_path)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in found.environ.items():
        monkeypatch.setenv(name, value)
    return found


@pytest.fixture
def tier(proxy: HttpProxy, s3_prefix: str, handed: HandedOut) -> Iterator[ObjectTier]:
    handed.give(ACCESS_KEY, SECRET_KEY)
    settings = object_settings(proxy.endpoint, retry_for_s=2.0)
    found = open_object_tier("s3", f"s3://{s3_prefix}", settings)
    assert isinstance(found, ObjectTier)
    found.put(PLAN, b"before")
    yield found
    found.close()


def first_bytes(opened: OpenObject) -> None:
    opened.stream(0, 10).close()


def read(tier: ObjectTier) -> bytes:
    with tier.open(KEY) as opened, contextlib.closing(opened.stream(0, opened.size)) as stream:
        data = bytearray(opened.size)
        stream.read_into(memoryview(data))
        return bytes(data)


@pytest.mark.parametrize("first", ["put", "get", "list", "upload", "now"])
def test_the_store_refuses_before_they_were_to_expire(
    tier: ObjectTier, proxy: HttpProxy, handed: HandedOut, first: str
):
    """Of what comes first, the same call succeeds; all that comes later uses the new ones."""
    handed.give(NEXT_KEY, NEXT_SECRET)
    proxy.rules.append(rule := expired(ACCESS_KEY))
    calls = {
        "put": lambda: tier.put("plans/" + "00" * 16, b"x"),
        "get": lambda: tier.get(PLAN, limit=10),
        "list": lambda: list(tier.list("plans/")),
        "upload": lambda: tier.put_from(KEY, SampleSource(DATA)),
        "now": lambda: tier.now_s(),
    }
    calls.pop(first)()
    assert rule.met >= 1
    for call in calls.values():
        call()
    met = rule.met
    tier.put_from(KEY, SampleSource(DATA))
    assert read(tier) == DATA
    assert rule.met == met, "what is refused is used no more"


def test_a_reader_goes_on_with_new_ones(tier: ObjectTier, proxy: HttpProxy, handed: HandedOut):
    """They end between two ranges of an object that is open."""
    tier.put_from(KEY, SampleSource(DATA))
    with tier.open(KEY) as opened:
        half, data = len(DATA) // 2, bytearray(len(DATA))
        with contextlib.closing(opened.stream(0, half)) as stream:
            stream.read_into(memoryview(data)[:half])
        handed.give(NEXT_KEY, NEXT_SECRET)
        proxy.rules.append(expired(ACCESS_KEY))
        with contextlib.closing(opened.stream(half, len(DATA))) as stream:
            stream.read_into(memoryview(data)[half:])
    assert data == DATA


def test_an_upload_that_is_refused_is_resumed(
    tier: ObjectTier, proxy: HttpProxy, handed: HandedOut
):
    """Nothing new is handed out yet: the parts that are there stay."""
    rule = expired(ACCESS_KEY)
    rule.pattern = "partNumber=3|uploadId=.*uploadId|POST .*uploadId"
    proxy.rules.append(rule)
    sent = parts_sent(tier)
    with pytest.raises(TierUnavailableError, match="expired") as caught:
        tier.put_from(KEY, SampleSource(DATA))
    assert caught.value.outcome == "not_applied"
    assert sum(sent) == 2 * (8 << 20)
    handed.give(NEXT_KEY, NEXT_SECRET)
    proxy.heal()
    tier.put_from(KEY, SampleSource(DATA))
    assert sum(sent) == len(DATA), "two parts were there already"
    assert read(tier) == DATA


def test_the_process_fails_when_it_is_time(tier: ObjectTier, handed: HandedOut):
    """An error of ours with its reason, wherever credentials are wanted; then it works again."""
    tier.put_from(KEY, SampleSource(DATA))
    handed.give(ACCESS_KEY, SECRET_KEY, lives=timedelta(minutes=1))
    assert isinstance(tier._credentials, Credentials)
    assert tier._credentials.source is not None
    opened = tier.open(KEY)
    tier._credentials.source.find_anew()  # botocore renews from ten minutes before the end on
    handed.fail("the service is down")
    calls = {
        "put": lambda: tier.put("plans/" + "00" * 16, b"x"),
        "get": lambda: tier.get(PLAN, limit=10),
        "list": lambda: list(tier.list("plans/")),
        "upload": lambda: tier.put_from("segments/" + "00" * 16, SampleSource(DATA)),
        "now": lambda: tier.now_s(),
        "open": lambda: tier.open(KEY),
        "stream": lambda: first_bytes(opened),
    }
    for call in calls.values():
        with pytest.raises(TierUnavailableError, match="the service is down") as caught:
            call()
        assert caught.value.outcome == "not_applied"
    handed.give(NEXT_KEY, NEXT_SECRET)
    for call in calls.values():
        call()


def test_the_chain_is_asked_once_in_a_while() -> None:
    """A store that refuses for another reason does not start a process for each request."""
    now_s, asked = 0.0, []

    class Fixed:
        def __init__(self, key: str) -> None:
            self.key = key

        def get_frozen_credentials(self) -> str:
            return self.key

    def find() -> Fixed:
        asked.append(now_s)
        return Fixed("b" if now_s >= 20 else "a")

    chain = Chain(Fixed("a"), (), find, clock=lambda: now_s)
    assert [chain.find_anew() for _ in range(5)] == [False] * 5
    assert len(asked) == 1
    now_s = 20.0
    assert [chain.find_anew() for _ in range(5)] == [True, False, False, False, False]
    assert (chain.get_frozen_credentials(), asked) == ("b", [0.0, 20.0])
