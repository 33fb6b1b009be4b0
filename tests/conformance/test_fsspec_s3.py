"""The shipped suite on ``fsspec+s3://``: s3fs, against a real S3 server; and how s3fs fails."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import boto3
import pytest
from botocore.client import BaseClient

from tests.support.agent import wait_until
from tests.support.http_proxy import HttpProxy, Rule, expired
from tieredckpt.errors import IntegrityError, TierUnavailableError, UsageError
from tieredckpt.storage.base import Tier
from tieredckpt.storage.object.errors import ObjectSettings
from tieredckpt.storage.object.fsspec import FsspecTier
from tieredckpt.testing.s3_server import (
    ACCESS_KEY,
    BUCKET,
    REGION,
    SECRET_KEY,
    S3Server,
)
from tieredckpt.testing.tier_suite import SampleSource, TierSuite, _in_threads, sample_segment

KEY, OTHER = "manifests/default/" + "ab" * 16, "manifests/default/" + "cd" * 16
SEGMENT = "segments/" + "ef" * 16
PART_BYTES = 50 << 20
"""Of s3fs, unless its own configuration sets another size."""


@pytest.fixture(autouse=True)
def _credentials(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    reach(monkeypatch, s3_server.endpoint)
    monkeypatch.setenv("AWS_DEFAULT_REGION", REGION)


def reach(
    monkeypatch: pytest.MonkeyPatch,
    endpoint: str,
    key: str = ACCESS_KEY,
    secret: str = SECRET_KEY,
) -> None:
    """From here on s3fs finds this store, with these credentials."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", secret)


def s3fs_tier(place: str) -> FsspecTier:
    return FsspecTier("s3fs", f"fsspec+s3://{place}", ObjectSettings(retry_for_s=60.0))


@pytest.fixture
def proxy(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[HttpProxy]:
    with HttpProxy(s3_server.endpoint.partition("://")[2]) as proxy:
        reach(monkeypatch, proxy.endpoint)
        yield proxy


class TestS3fs(TierSuite):
    sizes = (1, PART_BYTES + 12345)

    @pytest.fixture(autouse=True)
    def _prefix(self, s3_prefix: str) -> None:
        self.prefix = s3_prefix

    def make_tier(self, folder: Path) -> Tier:
        return s3fs_tier(self.prefix)


# --- several writers ------------------------------------------------------------------------------


def test_one_of_several_hosts_wins(s3_prefix: str):
    """Each with a tier of its own, so that only the store can choose."""
    tiers = [s3fs_tier(s3_prefix) for _ in range(4)]
    for key in (KEY, OTHER, SEGMENT):
        failed = _in_threads(lambda n, key=key: tiers[n].put(key, b"%d" % n), len(tiers))
        assert [type(each) for each in failed] == [UsageError] * 3
        assert tiers[0].get(key, limit=1) in [b"%d" % n for n in range(4)]


def test_a_lost_answer_to_a_put_is_no_failure(proxy: HttpProxy, s3_prefix: str):
    tier = s3fs_tier(s3_prefix)
    tier.put(OTHER, b"first")  # it has tried the store
    proxy.rules.append(rule := Rule("lose_response", f"^PUT .*{KEY}"))
    tier.put(KEY, b"manifest")
    assert rule.met == 1
    assert tier.get(KEY, limit=8) == b"manifest"


def test_a_store_that_replaces_what_exists_is_refused_before_the_first_put(
    proxy: HttpProxy, s3_prefix: str, monkeypatch: pytest.MonkeyPatch
):
    tier = s3fs_tier(s3_prefix)
    pipe = tier._fs.pipe_file
    # As s3fs was before its release of 2024.12: an option that it does not know is ignored.
    monkeypatch.setattr(tier._fs, "pipe_file", lambda path, data, **_: pipe(path, data))
    for _ in range(2):
        with pytest.raises(TierUnavailableError, match="instead of refusing a second one"):
            tier.put(KEY, b"x")
    assert [each.key for each in tier.list("manifests/")] == []
    assert tier.sweep_unfinished(-1) == 0


# --- large objects --------------------------------------------------------------------------------


def unfinished(s3_server: S3Server, s3_prefix: str) -> list[str]:
    client: BaseClient = boto3.client("s3", endpoint_url=s3_server.endpoint)
    found = client.list_multipart_uploads(Bucket=BUCKET).get("Uploads", [])
    client.close()
    return [each["Key"] for each in found if each["Key"].startswith(s3_prefix.partition("/")[2])]


@pytest.mark.full
@pytest.mark.parametrize("fail_at", [0, PART_BYTES + 1])
def test_an_abandoned_upload_leaves_nothing(s3_server: S3Server, s3_prefix: str, fail_at: int):
    tier = s3fs_tier(s3_prefix)
    data = sample_segment("ef" * 16, PART_BYTES + (8 << 20))
    with pytest.raises(IntegrityError, match="the source is damaged"):
        tier.put_from(SEGMENT, SampleSource(data, fail_at=fail_at))
    gc.collect()  # whose finalizers finish files
    assert unfinished(s3_server, s3_prefix) == []
    assert [each.key for each in tier.list("segments/")] == []


@pytest.mark.full
@pytest.mark.parametrize("forgotten", [False, True])
def test_a_lost_answer_to_the_last_request_of_an_upload(
    proxy: HttpProxy, s3_prefix: str, forgotten: bool
):
    """Some stores know a completed upload for a while, others refuse the repeated request."""
    tier, data = s3fs_tier(s3_prefix), sample_segment("ef" * 16, 9000)
    proxy.rules.append(lost := Rule("lose_response", "^POST .*uploadId"))
    refused = b"<Error><Code>NoSuchUpload</Code><Message>No such upload.</Message></Error>"
    again = Rule("answer", "^POST .*uploadId", status=404, body=refused)
    if forgotten:
        proxy.rules.append(again)
    tier.put_from(SEGMENT, SampleSource(data))
    assert (lost.met, again.met) == (1, forgotten)
    assert tier.get(SEGMENT, limit=len(data)) == data


@pytest.mark.full
def test_a_read_that_is_cut_short_is_repeated(proxy: HttpProxy, s3_prefix: str):
    tier, data = s3fs_tier(s3_prefix), sample_segment("ef" * 16, 100_000)
    tier.put_from(SEGMENT, SampleSource(data))
    proxy.rules.append(rule := Rule("cut_response", f"^GET .*{SEGMENT}", after_bytes=5000))
    assert tier.get(SEGMENT, limit=len(data)) == data
    assert rule.met == 1


# --- what does not work ---------------------------------------------------------------------------

CALLS: dict[str, Callable[[FsspecTier], object]] = {
    "check": lambda tier: tier.check(),
    "list": lambda tier: list(tier.list("manifests/")),
    "info": lambda tier: tier.info(KEY),
    "get": lambda tier: tier.get(KEY, limit=1),
    "delete": lambda tier: tier.delete(KEY),
    "put": lambda tier: tier.put(OTHER, b"x"),
    "put_from": lambda tier: tier.put_from(SEGMENT, SampleSource(bytes(4096))),
    "sweep": lambda tier: tier.sweep_unfinished(3600),
}


def refused(tier: FsspecTier, *names: str) -> dict[str, str]:
    """The error of each call; none succeeds, and nothing is taken for missing."""
    found = {}
    for name in names:
        with pytest.raises(TierUnavailableError) as caught:
            CALLS[name](tier)
        found[name] = str(caught.value)
    return found


def test_a_missing_bucket_is_no_empty_one():
    """(SeaweedFS makes it for what writes.)"""
    tier = s3fs_tier("no-such-bucket-here/x")
    for name, text in refused(tier, "check", "list", "info", "get", "delete").items():
        assert "404 NoSuchBucket; there is no such bucket: create it" in text, name


def test_nothing_that_is_forbidden_looks_missing(proxy: HttpProxy, s3_prefix: str):
    tier = s3fs_tier(s3_prefix)
    tier.put(KEY, b"x")
    proxy.rules.append(Rule("answer", "", None, status=403))
    for name, text in refused(tier, *CALLS).items():
        assert "may not do that: allow it in the policy" in text, name


def test_what_may_have_been_carried_out_is_unknown(
    proxy: HttpProxy, s3_prefix: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    tier = s3fs_tier(s3_prefix)
    tier.put(KEY, b"x")
    proxy.rules.append(Rule("answer", "^(?!POST .*uploads)(PUT|POST|DELETE)", None, status=500))
    proxy.rules.append(looks := Rule("answer", "^(GET|HEAD)", None, status=403))
    calls = CALLS | {"replace": lambda tier: tier.replace(KEY, b"y")}
    for name in ("put", "replace", "delete", "put_from"):
        looks.skip = 2 if name == "put_from" else 0  # so many before it writes
        with pytest.raises(TierUnavailableError) as caught:
            calls[name](tier)
        assert caught.value.fields["outcome"] == "unknown", name


@pytest.mark.full
def test_credentials_that_have_expired_or_are_wrong(
    proxy: HttpProxy, s3_prefix: str, monkeypatch: pytest.MonkeyPatch
):
    proxy.rules.append(expired(ACCESS_KEY))
    with pytest.raises(TierUnavailableError, match="the credentials have expired: renew them"):
        s3fs_tier(s3_prefix).check()
    proxy.heal()
    reach(monkeypatch, proxy.endpoint, secret="other")
    with pytest.raises(TierUnavailableError, match="SignatureDoesNotMatch; the secret does not"):
        s3fs_tier(s3_prefix).check()


@pytest.mark.full
def test_a_store_that_is_not_there(monkeypatch: pytest.MonkeyPatch, s3_prefix: str):
    reach(monkeypatch, "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    with pytest.raises(TierUnavailableError, match=r"ConnectionRefused.*nothing answered"):
        s3fs_tier(s3_prefix).check()


def test_a_store_that_never_answers_is_reported_while_it_is_waited_for(
    proxy: HttpProxy, s3_prefix: str
):
    tier = FsspecTier("s3fs", f"fsspec+s3://{s3_prefix}", ObjectSettings(timeout_s=1.0))
    tier.check()
    proxy.rules.append(Rule("stall", "", None))
    waits = threading.Thread(target=tier.check)
    waits.start()
    wait_until(lambda: "s: list tmp" in (tier.retrying() or ""), deadline_s=60)
    proxy.heal()
    waits.join(60)
    assert not waits.is_alive()
    assert tier.retrying() is None
