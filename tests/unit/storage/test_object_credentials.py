"""Where credentials for S3 come from: the services of clouds, as their clients ask them.

The services are answers of this file's own, as AWS documents them (no cloud is at hand); who asks
is botocore, and the store that the keys are for is a real server.
"""

from __future__ import annotations

import contextlib
import json
import random
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from botocore.utils import ContainerMetadataFetcher

from tests.support.faults import eventually
from tests.support.s3 import object_settings, open_object_tier
from tieredckpt.errors import TierUnavailableError
from tieredckpt.storage.base import Tier
from tieredckpt.testing.s3_server import (
    ACCESS_KEY,
    READER_KEY,
    READER_SECRET,
    SECRET_KEY,
    S3Server,
)
from tieredckpt.testing.tier_suite import SampleSource

PLAN, OTHER = "plans/" + "cd" * 16, "plans/" + "00" * 16
SEGMENT, OTHER_SEGMENT = "segments/" + "ab" * 16, "segments/" + "cd" * 16
DATA = random.Random(1).randbytes(70_000)
READER, WRITER = (READER_KEY, READER_SECRET), (ACCESS_KEY, SECRET_KEY)
LONG_S = 6 * 3600.0


class Service:
    """An HTTP service on loopback that gives keys for a while, or refuses."""

    def __init__(self) -> None:
        self.keys, self.life_s, self.down = WRITER, LONG_S, False
        self.given = 0
        self.asked: list[str] = []
        service = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _answer(self) -> None:
                length = int(self.headers.get("content-length", "0"))
                body = self.rfile.read(length).decode()
                status, text = service.answer(self.command, self.path, dict(self.headers), body)
                self.send_response(status)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text.encode())

            do_GET = do_PUT = do_POST = _answer

            def log_message(self, *args: object) -> None:
                """Not to the test's output."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def answer(self, method: str, path: str, headers: dict[str, str], body: str) -> tuple[int, str]:
        self.asked.append(f"{method} {path}")
        if self.down:
            return 503, "down"
        if (method, path) == ("PUT", "/latest/api/token"):
            return 200, "a-token"
        if path == "/latest/meta-data/iam/security-credentials/":
            return (200, "role") if headers.get("x-aws-ec2-metadata-token") else (401, "")
        if path == "/latest/meta-data/iam/security-credentials/role":
            return 200, json.dumps({"Code": "Success", **self._document()})
        if path == "/pod":
            return (200, json.dumps(self._document())) if headers["Authorization"] else (401, "")
        assert (method, path) == ("POST", "/")  # STS
        assert "Action=AssumeRoleWithWebIdentity" in body
        assert "WebIdentityToken=who-i-am" in body
        found = self._document()
        return 200, (
            '<AssumeRoleWithWebIdentityResponse xmlns="https://sts.amazonaws.com/doc/2011-06-15/">'
            "<AssumeRoleWithWebIdentityResult><Credentials>"
            f"<AccessKeyId>{found['AccessKeyId']}</AccessKeyId>"
            f"<SecretAccessKey>{found['SecretAccessKey']}</SecretAccessKey>"
            f"<SessionToken></SessionToken><Expiration>{found['Expiration']}</Expiration>"
            "</Credentials></AssumeRoleWithWebIdentityResult>"
            "</AssumeRoleWithWebIdentityResponse>"
        )

    def _document(self) -> dict[str, str]:
        self.given += 1
        ends = datetime.now(UTC) + timedelta(seconds=self.life_s)
        key, secret = self.keys
        # No session token: the server under test would look for who issued it.
        return {
            "AccessKeyId": key, "SecretAccessKey": secret, "Token": "",
            "Expiration": ends.strftime("%Y-%m-%dT%H:%M:%SZ"),
        }  # fmt: skip


@pytest.fixture
def service() -> Iterator[Service]:
    service = Service()
    yield service
    service.close()


@pytest.fixture(params=["machine", "container", "web identity"])
def told(
    request: pytest.FixtureRequest,
    service: Service,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> Service:
    """The environment says where the service is, as the cloud's own would."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("AWS_EC2_METADATA_DISABLED", raising=False)
    values = {
        "AWS_CONFIG_FILE": "/dev/null", "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
        "AWS_METADATA_SERVICE_TIMEOUT": "10", "AWS_METADATA_SERVICE_NUM_ATTEMPTS": "1",
        "AWS_MAX_ATTEMPTS": "1",
    }  # fmt: skip
    if request.param == "machine":
        values["AWS_EC2_METADATA_SERVICE_ENDPOINT"] = service.url
    elif request.param == "container":
        values["AWS_CONTAINER_CREDENTIALS_FULL_URI"] = f"{service.url}/pod"
        values["AWS_CONTAINER_AUTHORIZATION_TOKEN"] = "of-the-pod"
        monkeypatch.setattr(ContainerMetadataFetcher, "SLEEP_TIME", 0)
    else:
        (tmp_path / "token").write_text("who-i-am")
        values["AWS_WEB_IDENTITY_TOKEN_FILE"] = str(tmp_path / "token")
        values["AWS_ROLE_ARN"] = "arn:aws:iam::123456789012:role/trainer"
        values["AWS_ENDPOINT_URL_STS"] = service.url
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    return service


@pytest.fixture
def opened(s3_server: S3Server, s3_prefix: str) -> Iterator[Callable[[], Tier]]:
    tiers: list[Tier] = []

    def open_one() -> Tier:
        at = f"s3://{s3_prefix}"
        tiers.append(open_object_tier("s3", at, object_settings(s3_server.endpoint, retry_for_s=1)))
        return tiers[-1]

    yield open_one
    for each in tiers:
        each.close()


def test_keys_of_a_role(told: Service, opened: Callable[[], Tier]):
    tier = opened()
    tier.put(PLAN, b"x")
    assert tier.get(PLAN, limit=1) == b"x"
    assert told.given == 1, "keys that last are asked for once"


WHERE_KEYS_END = pytest.mark.parametrize("told", ["container", "web identity"], indirect=True)
"""Those of a machine botocore itself uses longer, on purpose, if no new ones are to be had."""


@WHERE_KEYS_END
def test_keys_that_expire_are_renewed(told: Service, opened: Callable[[], Tier]):
    """The same open tier: first it may only read, then the role is given more."""
    told.keys, told.life_s = READER, 60.0  # botocore renews what ends within minutes
    tier = opened()
    with pytest.raises(TierUnavailableError, match="403"):
        tier.put(PLAN, b"x")
    told.keys = WRITER

    def may_write() -> bool:
        with contextlib.suppress(TierUnavailableError):
            tier.put(PLAN, b"x")
            return True
        return False

    eventually(may_write)  # obstore keeps what it was told for a tenth of a second
    assert tier.get(PLAN, limit=1) == b"x"


@WHERE_KEYS_END
def test_a_service_that_fails_later(told: Service, opened: Callable[[], Tier]):
    """Keys that are over, and no new ones: a tier that is away, in our words; then it is back."""
    told.life_s = 5.0
    tier = opened()
    tier.put(PLAN, b"x")
    tier.put_from(SEGMENT, SampleSource(DATA))
    told.down = True

    said: list[str] = []

    def refused(act: Callable[[], object]) -> bool:
        try:
            act()
        except TierUnavailableError as error:
            said.append(str(error))
            return True
        return False

    eventually(lambda: refused(lambda: tier.get(PLAN, limit=1)))  # until then they are valid
    assert refused(lambda: tier.put(OTHER, b"y"))
    assert refused(lambda: list(tier.list("plans/")))
    assert refused(lambda: tier.put_from(OTHER_SEGMENT, SampleSource(DATA)))
    assert all("credentials" in each for each in said), said
    told.down, told.life_s = False, LONG_S
    eventually(lambda: not refused(lambda: tier.get(PLAN, limit=1)))
    assert tier.put_from(OTHER_SEGMENT, SampleSource(DATA)) is None


def test_no_service_at_all(told: Service, opened: Callable[[], Tier]):
    told.down = True
    with pytest.raises(TierUnavailableError, match="credentials"):
        opened()
