"""Trying a tier: what works is said step by step, and nothing stays behind."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.http_proxy import HttpProxy, Rule
from tests.support.s3 import object_settings, open_object_tier
from tieredckpt.errors import ConfigError, TierUnavailableError
from tieredckpt.storage.backends.file import FileTier
from tieredckpt.storage.backends.probe import STEPS, Probed, probe
from tieredckpt.storage.base import ObjectInfo, Scope, Tier, segment_key
from tieredckpt.storage.object.errors import ObjectSettings
from tieredckpt.storage.object.fsspec import FsspecTier
from tieredckpt.testing.s3_server import ACCESS_KEY, SECRET_KEY, S3Server


class Listing(FileTier):
    """Remembers what was listed."""

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        self.listed = [*getattr(self, "listed", ()), prefix]
        return super().list(prefix)


def test_only_what_the_probe_put_is_listed(tmp_path: Path):
    """A namespace may have a million segments."""
    tier = Listing("f", tmp_path, "ns", scope=Scope.SHARED)
    tier.put(segment_key("ab" * 16), bytes(4096))
    assert failed(probe(tier)) == []
    assert {each.count("/") for each in tier.listed if each != "manifests/"} == {2}
    assert [each.key for each in tier.list("segments/")] == [segment_key("ab" * 16)]
    tier.close()


def failed(found: Probed) -> list[str]:
    return [step for step, error in found.items() if error is not None]


@pytest.mark.parametrize("kind", ["host", "shared", "fsspec"])
def test_a_folder_that_works(tmp_path: Path, kind: str):
    tier: Tier
    if kind == "fsspec":
        tier = FsspecTier("f", f"file://{tmp_path}/ns", ObjectSettings())
    else:
        tier = FileTier("f", tmp_path, "ns", scope=Scope(kind))
    try:
        found = probe(tier)
        assert failed(found) == []
        assert set(STEPS) - set(found) == ({"clock", "uploads"} if kind == "host" else set())
        assert not [*tier.list("segments/"), *tier.list("records/")]
    finally:
        tier.close()


class Overwriting(FileTier):
    """As a store that does not know ``If-None-Match``."""

    def put(self, key: str, data: bytes) -> None:
        self.replace(key, data)


def test_a_store_that_replaces_what_exists_is_found(tmp_path: Path):
    tier = Overwriting("f", tmp_path, "ns", scope=Scope.SHARED)
    found = probe(tier)
    assert failed(found) == ["condition"]
    assert isinstance(found["condition"], ConfigError)
    assert "cannot be used as a shared tier" in str(found["condition"])
    assert not [*tier.list("segments/"), *tier.list("records/")], "it deletes also after a failure"


def s3(server: S3Server, prefix: str, endpoint: str | None = None, **more: object) -> Tier:
    wanted = {"retry_for_s": 1.0, "timeout_s": 10.0} | more
    return open_object_tier(
        "s3", f"s3://{prefix}", object_settings(endpoint or server.endpoint, **wanted)
    )


@pytest.fixture
def _keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)


@pytest.mark.usefixtures("_keys")
def test_a_real_store(s3_server: S3Server, s3_prefix: str):
    tier = s3(s3_server, s3_prefix)
    found = probe(tier)
    assert failed(found) == []
    assert tuple(found) == STEPS
    assert not [*tier.list("segments/"), *tier.list("records/")]
    tier.close()


@pytest.mark.usefixtures("_keys")
def test_what_a_store_does_not_let_us_do(s3_server: S3Server, s3_prefix: str):
    denied = Rule("answer", "^(PUT|DELETE|POST)", None, status=403)
    with HttpProxy(s3_server.endpoint.partition("://")[2], denied) as proxy:
        tier = s3(s3_server, s3_prefix, proxy.endpoint)
        found = probe(tier)
        assert failed(found) == ["create", "segment", "delete"]
        assert "may not do that" in str(found["create"])
        assert "read" not in found, "there is nothing to read"
        # one that does not implement the condition answers so
        denied.status = 501
        found = probe(tier)
        assert isinstance(found["condition"], ConfigError)
        tier.close()


@pytest.mark.usefixtures("_keys")
def test_nobody_waits_for_each_step_of_a_store_that_is_not_there():
    settings = object_settings("http://127.0.0.1:9", retry_for_s=0.1)
    tier = open_object_tier("s3", "s3://bucket/x", settings)
    found = probe(tier)
    assert list(found) == ["list"]
    assert isinstance(found["list"], TierUnavailableError)
    tier.close()
