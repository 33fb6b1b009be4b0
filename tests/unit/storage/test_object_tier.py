"""The object tier when its store, or what lies between, fails: a real server behind a proxy."""

from __future__ import annotations

import queue
import random
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import trustme

from tests.support.agent import wait_until
from tests.support.http_proxy import HttpProxy, Rule, slow_down
from tests.support.s3 import object_settings, open_object_tier, parts_sent, uploads_of
from tieredckpt.errors import (
    CapacityError,
    ConfigError,
    IntegrityError,
    NotFoundError,
    TierUnavailableError,
    UsageError,
)
from tieredckpt.storage.object.errors import (
    NO_ANSWER,
    ObjectSettings,
    error_of,
    parse_object_url,
    refusal_of,
)
from tieredckpt.storage.object.s3_http import Answer, Pace, endpoint_of
from tieredckpt.storage.object.s3_upload import PartBuffers, part_size, parts_in
from tieredckpt.storage.object.tier import ObjectTier
from tieredckpt.testing.s3_server import (
    ACCESS_KEY,
    READER_KEY,
    READER_SECRET,
    SECRET_KEY,
    S3Server,
)
from tieredckpt.testing.tier_suite import SampleSource

PART = 8 << 20
KEY = "segments/" + "ab" * 16
PLAN = "plans/" + "cd" * 16
DATA = random.Random(5).randbytes(3 * PART + 4096)

Open = Callable[..., ObjectTier]


@pytest.fixture(autouse=True)
def _credentials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    for name in ("AWS_PROFILE", "AWS_REGION", "AWS_DEFAULT_REGION", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def opened(s3_prefix: str) -> Iterator[Open]:
    """Opens tiers of the test's prefix; they are closed at its end."""
    tiers: list[ObjectTier] = []

    def open_one(endpoint: str, **settings: object) -> ObjectTier:
        tier = open_object_tier("s3", f"s3://{s3_prefix}", object_settings(endpoint, **settings))
        assert isinstance(tier, ObjectTier)
        tiers.append(tier)
        return tier

    yield open_one
    for each in tiers:
        each.close()


@pytest.fixture
def proxy(s3_server: S3Server) -> Iterator[HttpProxy]:
    with HttpProxy(s3_server.address) as proxy:
        yield proxy


def read(tier: ObjectTier, key: str = KEY) -> bytes:
    with tier.open(key) as opened:
        data = bytearray(opened.size)
        opened.read_into(0, memoryview(data))
        return bytes(data)


# --- writing ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "rule",
    [
        Rule("cut_request", "PUT .*partNumber=2", after_bytes=3 << 20),
        Rule("flip_request", "PUT .*partNumber=1", after_bytes=5 << 20),
        Rule("lose_response", "POST .*uploadId="),
        slow_down("PUT .*partNumber", times=3, status=500),
        *(
            pytest.param(each, marks=pytest.mark.full)
            for each in (
                Rule("cut_request", "POST .*uploads="),
                Rule("lose_response", "PUT .*partNumber=2"),
                Rule("lose_response", "POST .*uploads="),
            )
        ),
    ],
    ids=lambda rule: f"{rule.fault} {rule.pattern}",
)
def test_upload_survives(proxy: HttpProxy, opened: Open, rule: Rule):
    """A connection cut in a part or before an answer, a damaged part, storms: all end well."""
    wanted = rule.met + (rule.times or 0)
    tier = opened(proxy.endpoint)
    proxy.rules.append(rule)
    tier.put_from(KEY, SampleSource(DATA))
    assert rule.met == wanted
    assert read(tier) == DATA


def test_lost_answer_to_a_small_put(proxy: HttpProxy, opened: Open):
    """The store has it, the client was told 412 when it asked again: that was its own."""
    tier = opened(proxy.endpoint)
    proxy.rules.append(Rule("lose_response", "PUT .*plans"))
    tier.put(PLAN, b"mine")
    proxy.rules.append(Rule("lose_response", "PUT .*plans"))
    with pytest.raises(UsageError):
        tier.put(PLAN, b"another")
    assert tier.get(PLAN, limit=10) == b"mine"
    proxy.rules.append(Rule("lose_response", "PUT .*plans"))
    tier.replace(PLAN, b"third")
    assert tier.get(PLAN, limit=10) == b"third"


def test_a_store_that_stays_away(proxy: HttpProxy, opened: Open):
    """After ``retry_for`` it is an error, which says what is known."""
    tier = opened(proxy.endpoint, retry_for_s=0.1)
    proxy.rules.append(slow_down("", times=None))
    for act in (
        lambda: tier.put(PLAN, b"x"),
        lambda: tier.replace(PLAN, b"x"),
        lambda: tier.put_from(KEY, SampleSource(DATA)),
        lambda: tier.get(PLAN, limit=1),
        lambda: list(tier.list("plans/")),
        lambda: tier.delete(PLAN),
        lambda: tier.now_s(),
        lambda: tier.check(),
    ):
        with pytest.raises(TierUnavailableError, match="503") as caught:
            act()
        assert caught.value.tier == "s3"
    proxy.heal()
    with pytest.raises(NotFoundError):
        tier.info(KEY)


def test_a_full_store(proxy: HttpProxy, opened: Open):
    tier = opened(proxy.endpoint, retry_for_s=0.3)
    proxy.rules.append(slow_down("PUT", times=None, status=507))
    with pytest.raises(CapacityError, match="keep fewer"):
        tier.put(PLAN, b"x")
    with pytest.raises(CapacityError, match="keep fewer"):
        tier.put_from(KEY, SampleSource(DATA))


def test_no_more_parts_than_agreed_are_in_memory(proxy: HttpProxy, opened: Open):
    """While the store is slow, the source is not read ahead."""
    tier = opened(proxy.endpoint, concurrency=2)
    proxy.rules.append(Rule("stall", "PUT .*partNumber", times=2))
    source = SampleSource(DATA)
    uploading = threading.Thread(target=tier.put_from, args=(KEY, source))
    uploading.start()
    limit_s = time.monotonic() + 60
    while proxy.count("PUT .*partNumber") < 2:
        assert time.monotonic() < limit_s
        time.sleep(0.01)
    assert source.reached == 2 * PART
    proxy.heal()
    uploading.join(60)
    assert not uploading.is_alive()
    assert read(tier) == DATA


def test_resumed_after_the_agent_died(proxy: HttpProxy, opened: Open):
    """Another process, knowing nothing, sends only what is missing."""
    proxy.rules.append(slow_down("PUT .*partNumber=3", times=None))
    first = opened(proxy.endpoint, retry_for_s=1.0, concurrency=1)
    with pytest.raises(TierUnavailableError):
        first.put_from(KEY, SampleSource(DATA))
    first.close()
    proxy.heal()
    second = opened(proxy.endpoint)
    sent = parts_sent(second)
    second.put_from(KEY, SampleSource(DATA))
    assert sum(sent) == len(DATA) - 2 * PART
    assert read(second) == DATA
    assert uploads_of(second).abandoned(-1) == ()


def test_other_bytes_are_not_taken_for_ours(proxy: HttpProxy, opened: Open):
    """What an earlier upload left is compared with the source, part by part."""
    proxy.rules.append(slow_down("PUT .*partNumber=3", times=None))
    first = opened(proxy.endpoint, retry_for_s=1.0, concurrency=1)
    other = DATA[:PART] + bytes(PART) + DATA[2 * PART :]
    with pytest.raises(TierUnavailableError):
        first.put_from(KEY, SampleSource(other))
    proxy.heal()
    second = opened(proxy.endpoint)
    sent = parts_sent(second)
    second.put_from(KEY, SampleSource(DATA))
    assert sum(sent) == len(DATA) - PART
    assert read(second) == DATA


def test_bad_source_leaves_no_upload(s3_server: S3Server, opened: Open):
    tier = opened(s3_server.endpoint)
    with pytest.raises(IntegrityError, match="the source is damaged"):
        tier.put_from(KEY, SampleSource(DATA, fail_at=2 * PART))
    assert uploads_of(tier).abandoned(-1) == ()


def test_abandoned_uploads_are_found_by_the_stores_clock(proxy: HttpProxy, opened: Open):
    proxy.rules.append(slow_down("PUT .*partNumber=3", times=None))
    tier = opened(proxy.endpoint, retry_for_s=1.0)
    with pytest.raises(TierUnavailableError):
        tier.put_from(KEY, SampleSource(DATA))
    proxy.heal()
    assert uploads_of(tier).abandoned(3600) == ()
    (found,) = uploads_of(tier).abandoned(-1)
    assert found.key == KEY
    assert abs(tier.now_s() - found.initiated.timestamp()) < 600
    assert tier.sweep_unfinished(3600) == 0
    assert tier.sweep_unfinished(-1) == 1
    assert uploads_of(tier).abandoned(-1) == ()
    assert not tier.sweep_unfinished(-1)


@pytest.mark.full
def test_racing_uploads_of_one_segment(s3_server: S3Server, opened: Open):
    """An owner that was thought dead, and who took over for it."""
    tiers = [opened(s3_server.endpoint, concurrency=2) for _ in range(3)]
    failed: list[BaseException] = []

    def put(tier: ObjectTier) -> None:
        try:
            tier.put_from(KEY, SampleSource(DATA))
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=put, args=(tier,)) for tier in tiers]
    for each in threads:
        each.start()
    for each in threads:
        each.join(120)
    assert failed == []
    assert read(tiers[0]) == DATA


# --- reading ------------------------------------------------------------------------------------


def test_answers_that_are_cut_are_continued(proxy: HttpProxy, opened: Open):
    """What has arrived is not asked for again."""
    tier = opened(proxy.endpoint, concurrency=1)
    tier.put_from(KEY, SampleSource(DATA))
    rules = [Rule("cut_response", "GET .*segments", after_bytes=3 << 20) for _ in range(4)]
    proxy.rules += rules
    assert read(tier) == DATA
    assert [each.met for each in rules] == [1] * 4
    starts = [
        int(each.headers["range"].removeprefix("bytes=").partition("-")[0])
        for each in proxy.seen
        if each.method == "GET" and "range" in each.headers
    ]
    assert len(set(starts)) == len(starts)


def test_objects_that_changed(s3_server: S3Server, s3_prefix: str, opened: Open):
    """Truncated, emptied, replaced or deleted after they were opened: errors, never other bytes."""
    tier = opened(s3_server.endpoint)
    tier.put(PLAN, b"0123456789" * 1000)
    into = memoryview(bytearray(10_000))
    for bad in (b"", b"0123456789", b"x" * 10_000, b"x" * 20_000):
        with tier.open(PLAN) as opened_before:
            tier.replace(PLAN, bad)
            with pytest.raises(IntegrityError):
                opened_before.read_into(0, into)
            tier.replace(PLAN, b"0123456789" * 1000)
    with tier.open(PLAN) as opened_before:
        s3_server.request("DELETE", f"/{s3_prefix}/{PLAN}")
        with pytest.raises(NotFoundError):
            opened_before.read_into(0, into)


def test_strange_keys_in_the_bucket_are_not_listed(
    s3_server: S3Server, s3_prefix: str, opened: Open
):
    tier = opened(s3_server.endpoint)
    tier.put(PLAN, b"x")
    for name in ("plans/.hidden", "plans/a b", "plans/a/b/c/d/e"):
        assert s3_server.request("PUT", f"/{s3_prefix}/{name}", body=b"x").status == 200
    assert [each.key for each in tier.list("plans/")] == [PLAN]


@pytest.mark.full
def test_long_lists(s3_server: S3Server, s3_prefix: str, opened: Open):
    """More than one page, and as many deleted at once."""
    tier = opened(s3_server.endpoint)
    keys = [f"plans/{number:032x}" for number in range(1100)]
    lines: list[threading.Thread] = []
    for part in range(4):
        lines.append(
            threading.Thread(
                target=lambda mine=keys[part::4]: [tier.put(key, b"x") for key in mine]
            )
        )
        lines[-1].start()
    for each in lines:
        each.join(120)
    assert sorted(each.key for each in tier.list("plans/")) == keys
    tier.delete_many(keys)
    assert list(tier.list("plans/")) == []


# --- credentials and permissions ----------------------------------------------------------------


def test_wrong_secret(s3_server: S3Server, opened: Open, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    tier = opened(s3_server.endpoint)
    for act in (
        lambda: tier.put(PLAN, b"x"),
        lambda: tier.get(PLAN, limit=1),
        lambda: list(tier.list("plans/")),
        lambda: tier.now_s(),
        lambda: tier.put_from(KEY, SampleSource(DATA)),
    ):
        with pytest.raises(TierUnavailableError, match=r"403|credentials") as caught:
            act()
        assert caught.value.outcome == "not_applied"


def test_reader_may_not_write(s3_server: S3Server, opened: Open, monkeypatch: pytest.MonkeyPatch):
    opened(s3_server.endpoint).put(PLAN, b"x")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", READER_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", READER_SECRET)
    tier = opened(s3_server.endpoint)
    assert tier.get(PLAN, limit=10) == b"x"
    with pytest.raises(TierUnavailableError, match="policy of the bucket") as caught:
        tier.put(OTHER := "plans/" + "00" * 16, b"x")
    assert caught.value.outcome == "not_applied"
    with pytest.raises(NotFoundError):
        tier.info(OTHER)


def test_profile(
    s3_server: S3Server, opened: Open, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    (tmp_path / "credentials").write_text(
        f"[run]\naws_access_key_id = {ACCESS_KEY}\naws_secret_access_key = {SECRET_KEY}\n"
    )
    opened(s3_server.endpoint, profile="run").put(PLAN, b"x")
    with pytest.raises(ConfigError, match="profile"):
        opened(s3_server.endpoint, profile="walk")
    with pytest.raises(TierUnavailableError, match="finds no credentials"):
        opened(s3_server.endpoint)
    with pytest.raises(TierUnavailableError, match="403"):
        opened(s3_server.endpoint, anonymous=True).put(PLAN, b"x")


@pytest.mark.full
def test_settings_reach_the_store(proxy: HttpProxy, opened: Open):
    """Storage class and encryption, with small and with large objects."""
    proxy.rules.append(Rule("answer", "(PUT|POST).*(plans|segments)", times=None, status=400))
    tier = opened(proxy.endpoint, storage_class="ONEZONE_IA", sse_type="kms", sse_key="k1")
    with pytest.raises(TierUnavailableError):
        tier.put(PLAN, b"x")
    with pytest.raises(TierUnavailableError):
        tier.put_from(KEY, SampleSource(DATA))
    with pytest.raises(TierUnavailableError):
        tier.put_from(KEY, SampleSource(DATA[:4096]))
    sent = [each.headers for each in proxy.seen if each.method in ("PUT", "POST")]
    assert len(sent) == 3
    for headers in sent:
        assert headers["x-amz-storage-class"] == "ONEZONE_IA"
        assert headers["x-amz-server-side-encryption"] == "aws:kms"
        assert headers["x-amz-server-side-encryption-aws-kms-key-id"] == "k1"


def test_tls(s3_server: S3Server, opened: Open, tmp_path: Path):
    """The certificate of an authority that is named is good; that of another one is not."""
    authority, stranger = trustme.CA(), trustme.CA()
    for name, each in (("ours", authority), ("other", stranger)):
        each.cert_pem.write_to_path(str(tmp_path / f"{name}.pem"))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    with HttpProxy(s3_server.address, tls=context) as proxy:
        wanted = {"allow_http": False, "retry_for_s": 0.3}
        tier = opened(proxy.endpoint, ca=str(tmp_path / "ours.pem"), **wanted)
        tier.put(PLAN, b"x")
        tier.put_from(KEY, SampleSource(DATA))
        assert read(tier) == DATA
        for ca in (str(tmp_path / "other.pem"), None):
            tier = opened(proxy.endpoint, ca=ca, **wanted)
            with pytest.raises(TierUnavailableError, match=r"not accepted \(UnknownIssuer\)"):
                tier.get(PLAN, limit=1)
            with pytest.raises(TierUnavailableError, match="certificate"):
                tier.now_s()
        with pytest.raises(ConfigError, match=r"ca: .* cannot be read"):
            opened(proxy.endpoint, ca=str(tmp_path / "none.pem"), **wanted)


def test_nobody_answers(s3_server: S3Server, opened: Open):
    """What the system said, and what to do about it."""
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        tier = opened(endpoint, retry_for_s=0.1)
        with pytest.raises(TierUnavailableError, match=f"Connection refused; {NO_ANSWER}") as gone:
            tier.get(PLAN, limit=1)
        # The label of a metric and the log have it: not another text at each try.
        with pytest.raises(TierUnavailableError) as again:
            tier.get(PLAN, limit=1)
        assert str(again.value) == str(gone.value)
    tier = opened(s3_server.endpoint.replace("http:", "https:"), retry_for_s=0.1)
    with pytest.raises(TierUnavailableError, match=f"does not speak https; {NO_ANSWER}"):
        tier.get(PLAN, limit=1)


def test_why_a_request_is_repeated_is_known_long_before_it_fails(s3_server: S3Server, opened: Open):
    """Through either client; and a tier that is closed meanwhile lets go of the request."""
    authority = trustme.CA()
    with socket.socket() as nobody, HttpProxy(s3_server.address) as away:
        nobody.bind(("127.0.0.1", 0))
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        authority.issue_cert("127.0.0.1").configure_cert(context)
        with HttpProxy(s3_server.address, tls=context) as other:
            away.rules.append(slow_down("", times=None))
            asked = []
            for endpoint, more, text in (
                (f"http://127.0.0.1:{nobody.getsockname()[1]}", {}, "refused"),
                (other.endpoint, {"allow_http": False}, "certificate"),
                (away.endpoint, {}, "503"),
            ):
                for act in (lambda tier: tier.get(PLAN, limit=1), lambda tier: tier.now_s()):
                    tier = opened(endpoint, retry_for_s=3600.0, **more)
                    asking = threading.Thread(target=fails, args=(act, tier))
                    asking.start()
                    asked.append((tier, text, asking))
            for tier, text, asking in asked:
                wait_until(lambda tier=tier, text=text: text in (tier.retrying() or ""))
                tier.close()
                asking.join(60)
                assert not asking.is_alive()
                assert tier.retrying() is None


def fails(act: Callable[[ObjectTier], object], tier: ObjectTier) -> None:
    with pytest.raises(TierUnavailableError):
        act(tier)


# --- without a store ----------------------------------------------------------------------------


def test_part_size():
    assert part_size(0, 1) == 8 << 20  # at least 5 MiB, and whole blocks
    assert part_size(1 << 30, 16 << 20) == 16 << 20
    size = part_size(5 << 40, 16 << 20)
    assert -(-(5 << 40) // size) <= 10_000
    assert size % (4 << 20) == 0


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({}, ("https://b.s3.eu-west-1.amazonaws.com", "")),
        ({"path_style": True}, ("https://s3.eu-west-1.amazonaws.com", "/b")),
        ({"endpoint": "https://s3.example.com"}, ("https://b.s3.example.com", "")),
        (
            {"endpoint": "https://s3.example.com", "path_style": True},
            ("https://s3.example.com", "/b"),
        ),
        ({"endpoint": "http://10.0.0.1:9000"}, ("http://10.0.0.1:9000", "/b")),
        ({"endpoint": "http://[::1]:9000"}, ("http://[::1]:9000", "/b")),
    ],
)
def test_endpoint(settings: dict, wanted: tuple[str, str]):
    assert (
        endpoint_of(parse_object_url("s3://b/x"), ObjectSettings(**settings), "eu-west-1") == wanted
    )


@pytest.mark.parametrize("url", ["s3:/b", "s3://", "b", "s3://b/../c", "s3://b?x", "s3://a b/c"])
def test_urls_that_are_none(url: str):
    with pytest.raises(ConfigError):
        parse_object_url(url)


@pytest.mark.parametrize(
    ("status", "code", "error", "outcome"),
    [
        (403, "ExpiredToken", TierUnavailableError, "not_applied"),
        (500, "InternalError", TierUnavailableError, "unknown"),
        (404, "NoSuchBucket", TierUnavailableError, "not_applied"),
        (404, "NoSuchKey", NotFoundError, None),
        (507, "", CapacityError, None),
        (403, "QuotaExceeded", CapacityError, None),
    ],
)
def test_errors(status: int, code: str, error: type[Exception], outcome: str | None):
    refusal = refusal_of(f"<Error><Code>{code}</Code><Message>m</Message></Error>", status)
    found = error_of(refusal, tier="t", doing="try", outcome="unknown", missing_key="k")
    assert type(found) is error
    assert outcome is None or found.outcome == outcome


@pytest.mark.parametrize(
    "body",
    [
        b"", b"<", b"{}", b"<a><Part><PartNumber>x</PartNumber></Part></a>",
        b"<a><Part><PartNumber>1</PartNumber><Size>-1</Size></Part></a>",
        b"<a><Part><PartNumber>1.0</PartNumber><Size>1</Size></Part></a>",
        b"<a><Part><PartNumber>1</PartNumber><Size>9999999999999999999</Size></Part></a>",
        b"<a><Part><Size>1</Size></Part></a>",
        b'<!DOCTYPE x [<!ENTITY a "aa">]><x>&a;</x>',
    ],
)  # fmt: skip
def test_answers_that_s3_does_not_give(body: bytes):
    with pytest.raises(TierUnavailableError):
        parts_in(Answer(200, {}, body))


@pytest.mark.full
def test_pace():
    """It may be slower than it is told to, on a busy machine; never faster."""
    never = threading.Event()
    pace = Pace(1_000_000)
    begun_s = time.monotonic()
    for _ in range(4):
        pace.send(100_000, never)
    assert time.monotonic() - begun_s >= 0.3
    until_s = time.monotonic() + 30
    told = {
        "since_s": time.monotonic(), "until_s": until_s, "why": TierUnavailableError("no answer"),
        "throttled": True, "retry_after_s": 0.2, "stopped": never,
    }  # fmt: skip
    begun_s = time.monotonic()
    assert pace.back_off(1, **told)
    assert time.monotonic() - begun_s >= 0.2
    assert pace.retrying is None
    assert pace.back_off(1, **told | {"since_s": begun_s - 60})
    assert pace.retrying == "no answer"
    pace.ended()
    assert pace.retrying is None
    assert not pace.back_off(1, **told | {"until_s": time.monotonic()})
    stopped = threading.Event()
    stopped.set()
    with pytest.raises(TierUnavailableError):
        pace.begin(stopped)


def test_no_buffer_is_lost_when_two_uploads_begin_and_end_at_once():
    """Or uploads would wait for ever."""

    class Raced(queue.SimpleQueue):
        """Somebody takes the last one in between."""

        def get_nowait(self):
            if self.qsize() == 1:
                raise queue.Empty
            return super().get_nowait()

    buffers = PartBuffers(3)
    buffers._free = Raced()
    for _ in range(3):
        buffers._free.put(None)
    held = [buffers.acquire(4096)]
    buffers.trim()
    held.append(buffers.acquire(4096))
    for each in held:
        buffers.release(each)
    assert buffers._free.qsize() == 3


@pytest.mark.full
def test_a_store_that_refuses_is_told_at_once(monkeypatch: pytest.MonkeyPatch):
    """Where a transfer goes on trying for five minutes, whoever attaches hears of it in seconds."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
    settings = object_settings("http://127.0.0.1:1", retry_for_s=100_000.0)
    tier = open_object_tier("s3", "s3://bucket/x", settings)
    with pytest.raises(TierUnavailableError, match=r"127\.0\.0\.1:1"):
        tier.check()
    tier.close()
