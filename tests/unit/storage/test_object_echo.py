"""A store whose failures repeat the request: what proves requests appears in no message."""

from __future__ import annotations

import json
import re
import threading
import traceback
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.support.s3 import object_settings, open_object_tier
from tieredckpt.errors import TierUnavailableError
from tieredckpt.storage.base import Tier, manifest_key, segment_key
from tieredckpt.storage.object.errors import Refusal, error_of, refusal_of
from tieredckpt.storage.object.fsspec import fsspec_call
from tieredckpt.testing.tier_suite import SampleSource

TOKEN = "session/token+of-this-test="
SEGMENT = "0" * 32


class Store(ThreadingHTTPServer):
    """Answers each request with 500, and the request in the body."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Echo)
        self.kind = ""
        self.proofs: set[str] = set()


class Echo(BaseHTTPRequestHandler):
    """One request."""

    protocol_version = "HTTP/1.1"
    server: Store

    def log_message(self, *_: object) -> None:
        return

    def _answer(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        proof = self.headers.get("Authorization", "")
        assert TOKEN in self.headers.values()
        self.server.proofs.add(proof.rpartition("Signature=")[2])
        text = str(self.headers)
        body = {
            "text": f"cannot do this:\n{self.requestline}\n{text}",
            "json": json.dumps({"headers": self.headers.items()}),
            "message": f"<Error><Code>InternalError</Code><Message>{text[-390:]}</Message></Error>",
            "proof": f"<Error><Message>not {proof[-100:]}</Message></Error>",
            "line": "",
        }[self.server.kind].encode()
        if self.server.kind == "line":
            self.wfile.write(f"X-Amz-Security-Token: {TOKEN} {proof}\r\n\r\n".encode())
            self.close_connection = True
            return
        self.send_response(500)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _answer


@pytest.fixture
def store() -> Iterator[Store]:
    with Store() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def tier(store: Store, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Tier]:
    for name, value in (("ACCESS_KEY_ID", "AKIATEST"), ("SECRET_ACCESS_KEY", "s"),
                        ("SESSION_TOKEN", TOKEN), ("CONFIG_FILE", str(tmp_path)),
                        ("SHARED_CREDENTIALS_FILE", str(tmp_path))):  # fmt: skip
        monkeypatch.setenv(f"AWS_{name}", value)
    settings = object_settings(f"http://127.0.0.1:{store.server_port}", retry_for_s=0.1)
    tier = open_object_tier("s3", "s3://bucket/run", settings)
    yield tier
    tier.close()


def _read(tier: Tier) -> None:
    with tier.open(segment_key(SEGMENT)) as opened:
        opened.read_into(0, memoryview(bytearray(10)))


ACTS: dict[str, Callable[[Tier], object]] = {
    "put": lambda tier: tier.put(manifest_key("s", SEGMENT), b"x"),
    "put_from": lambda tier: tier.put_from(segment_key(SEGMENT), SampleSource(bytes(9 << 20))),
    "get": lambda tier: tier.get(manifest_key("s", SEGMENT), limit=10),
    "open": _read,
    "list": lambda tier: list(tier.list("manifests/")),
    "delete": lambda tier: tier.delete(manifest_key("s", SEGMENT)),
    "check": lambda tier: tier.check(),
}


@pytest.mark.parametrize("kind", ["text", "json", "message", "proof", "line"])
def test_what_proves_a_request_is_in_no_message(
    store: Store, tier: Tier, caplog: pytest.LogCaptureFixture, kind: str
):
    store.kind = kind
    shown = []
    for name, act in ACTS.items():
        with pytest.raises(TierUnavailableError) as raised:
            act(tier)
        shown.append((name, "".join(traceback.format_exception(raised.value))))
        assert kind == "line" or "500" in raised.value.message
    assert len(store.proofs) >= 2
    for name, text in [*shown, ("log", caplog.text)]:
        # Also in part: a message is cut somewhere.
        found = [each for each in (TOKEN, *store.proofs) if each[:12] in text]
        assert not found, (name, text)
        assert not re.search("AWS4|Security-Token", text, re.IGNORECASE), (name, text)


class _Response(Exception):
    """As botocore's, which s3fs passes on."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.response = {"Error": {"Message": text}, "ResponseMetadata": {"HTTPStatusCode": 500}}


@pytest.mark.parametrize("kind", [_Response, RuntimeError])
def test_nor_in_one_of_a_library(kind: Callable[[str], Exception]):
    for text, is_shown in ((f"headers: authorization: x, token: {TOKEN}", False), ("full", True)):
        with pytest.raises(TierUnavailableError) as raised, fsspec_call("t", "try"):
            raise kind(text)
        found = "".join(traceback.format_exception(raised.value))
        assert (TOKEN in found, "(full)" in found or ": full" in found) == (False, is_shown)


def test_the_message_of_a_store_is_still_shown():
    bucket = "http://127.0.0.1:1/a-bucket-with-as-long-a-name-as-a-bucket-may-have/run-7/manifests"
    assert bucket in error_of(Refusal(0, "", bucket), tier="t", doing="try").message
    body = "<Error><Code>InternalError</Code><Message>disk 3 is broken</Message></Error>"
    assert "500 InternalError (disk 3 is broken)" in str(
        error_of(refusal_of(body, 500), tier="t", doing="try")
    )
