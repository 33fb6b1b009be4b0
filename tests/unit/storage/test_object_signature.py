"""Signatures of S3 travel in headers: request lines are logged by proxies and stores."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from datetime import UTC, datetime

import pytest
from botocore.credentials import ReadOnlyCredentials

from tests.support.http_proxy import HttpProxy, Rule
from tests.support.s3 import object_settings, open_object_tier, uploads_of
from tieredckpt.errors import TierUnavailableError
from tieredckpt.storage.object.credentials import SIGNED_BYTES_MAX, Credentials
from tieredckpt.storage.object.tier import ObjectTier
from tieredckpt.testing.s3_server import ACCESS_KEY, SECRET_KEY, S3Server
from tieredckpt.testing.tier_suite import SampleSource

KEY = "segments/" + "ab" * 16
DATA = bytes(range(256)) * (17 << 12)
"""Three parts of 8 MiB."""
USED = ReadOnlyCredentials("AKIDEXAMPLE", "the-secret", "the-token")
URL = "https://bucket.s3.eu-central-1.amazonaws.com/a/b%20c?partNumber=2&uploadId=u%2F1"
SECRETS = re.compile("X-Amz|Signature|Credential|Security-Token", re.IGNORECASE)


@pytest.fixture
def proxy(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[HttpProxy]:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
    monkeypatch.delenv("AWS_SESSION_TOKEN", raising=False)
    with HttpProxy(s3_server.address) as proxy:
        yield proxy


@pytest.fixture
def tier(proxy: HttpProxy, s3_prefix: str) -> Iterator[ObjectTier]:
    settings = object_settings(proxy.endpoint, retry_for_s=2.0)
    found = open_object_tier("s3", f"s3://{s3_prefix}", settings)
    assert isinstance(found, ObjectTier)
    yield found
    found.close()


def read(tier: ObjectTier) -> bytes:
    with tier.open(KEY) as opened, contextlib.closing(opened.stream(0, opened.size)) as stream:
        data = bytearray(opened.size)
        stream.read_into(memoryview(data))
        return bytes(data)


def test_no_request_line_holds_a_signature(tier: ObjectTier, proxy: HttpProxy):
    """Of all that a tier does: upload, resume, list, read, delete."""
    proxy.rules.append(Rule("answer", "partNumber=3", times=None))
    with pytest.raises(TierUnavailableError) as caught:
        tier.put_from(KEY, SampleSource(DATA))
    assert not SECRETS.search(f"{caught.value} {caught.value.fields} {caught.value.__cause__}")
    proxy.heal()
    # The store tells its clock in whole seconds: what was just begun may be from its future.
    assert len(uploads_of(tier).abandoned(-1.0)) == 1
    tier.put_from(KEY, SampleSource(DATA))
    assert read(tier) == DATA
    tier.now_s()
    tier.put("plans/" + "cd" * 16, b"plan")
    assert [each.key for each in tier.list("segments/")] == [KEY]
    tier.delete(KEY)
    lines = [str(each) for each in proxy.seen]
    for kind in ("PUT .*partNumber", "POST .*uploadId", "GET .*uploads", "HEAD", "GET .*segments"):
        assert any(re.search(kind, line) for line in lines), kind
    assert not [line for line in lines if SECRETS.search(line)]
    now = datetime.now(UTC)
    for each in proxy.seen:
        assert each.headers["authorization"].startswith("AWS4-HMAC-SHA256 Credential=")
        at = datetime.strptime(each.headers["x-amz-date"], "%Y%m%dT%H%M%S%z")
        assert abs((now - at).total_seconds()) < 600, "the store accepts it for 15 minutes"


def test_parts_are_not_digested_for_the_signature(tier: ObjectTier, proxy: HttpProxy):
    """SHA-256 of them costs three times what the upload does; what is small is signed, too."""
    tier.put_from(KEY, SampleSource(DATA))
    of = {
        kind: {e.headers["x-amz-content-sha256"] for e in proxy.seen if re.search(kind, str(e))}
        for kind in ("partNumber", "POST .*uploadId")
    }
    assert of["partNumber"] == {"UNSIGNED-PAYLOAD"}
    assert all(re.fullmatch("[0-9a-f]{64}", each) for each in of["POST .*uploadId"])


def signed(headers: dict[str, str], body: bytes = b"", used: object = USED) -> dict[str, str]:
    source = Credentials("s3", "eu-central-1", None)
    found = source.sign(used, "PUT", URL, headers, memoryview(body))
    return {name.lower(): value for name, value in found.items()}


def test_what_is_sent_is_signed():
    found = signed({"x-amz-checksum-crc32": "AAAAAA==", "range": "bytes=0-9"})
    assert found["x-amz-security-token"] == "the-token"
    assert (found["x-amz-checksum-crc32"], found["range"]) == ("AAAAAA==", "bytes=0-9")
    names = re.search("SignedHeaders=([^,]*),", found["authorization"])
    assert names is not None
    assert set(names[1].split(";")) == {
        "host", "range", "x-amz-checksum-crc32", "x-amz-content-sha256", "x-amz-date",
        "x-amz-security-token",
    }  # fmt: skip
    assert "the-secret" not in str(found)


def test_how_large_a_body_is_signed():
    small, large = signed({}, b"a" * SIGNED_BYTES_MAX), signed({}, b"a" * (SIGNED_BYTES_MAX + 1))
    assert re.fullmatch("[0-9a-f]{64}", small["x-amz-content-sha256"])
    assert large["x-amz-content-sha256"] == "UNSIGNED-PAYLOAD"


def test_nothing_is_signed_for_a_public_bucket():
    assert signed({"range": "bytes=0-9"}, used=None) == {"range": "bytes=0-9"}
