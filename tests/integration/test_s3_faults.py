"""A training whose bucket fails: saves go on, the other tiers have them, and the bucket catches up.

Each case ends with :meth:`Bench.caught_up` (what the bucket holds is byte for byte what the disk
holds) or with a restore by another host.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.checkpoint.api import CheckpointException

from tests.support.agent import wait_until
from tests.support.http_proxy import Rule, expired, slow_down
from tests.support.s3_bench import (
    DEADLINE_S,
    Bench,
    HandedOut,
    credentials,
    fresh_runtime,
    log_of,
    settings,
    start_agent,
    zeros,
)
from tieredckpt.engine import Engine
from tieredckpt.errors import TierUnavailableError
from tieredckpt.rpc.agent_client import AgentClient
from tieredckpt.testing.s3_server import ACCESS_KEY, NEXT_KEY, NEXT_SECRET, SECRET_KEY, S3Server

LOGGER = "tieredckpt.dcp.troubles"
STAGES = (
    "agent.shared.after_pending", "agent.shared.after_part", "agent.shared.before_manifest",
    "agent.shared.after_manifest",
)  # fmt: skip
SMALL = 1000
"""Numbers of a state that is one part and one range."""
full = pytest.mark.full


@pytest.fixture(scope="module", autouse=True)
def _credentials() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in credentials().items():
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="module")
def running(s3_server: S3Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with Bench(s3_server, tmp_path_factory.mktemp("bench")) as found:
        yield found


@pytest.fixture
def bench(running: Bench) -> Iterator[Bench]:
    """One training for all cases, since an agent has to live through them all anyway."""
    running.proxy.heal()
    yield running
    running.proxy.heal()


PASSING = [
    Rule("flip_request", "PUT .*partNumber=2", after_bytes=1 << 20),
    Rule("lose_response", "POST .*uploadId="),
    Rule("lose_response", "PUT .*manifests/"),
    Rule("lose_response", r"POST .*\?delete"),
]
PASSING_FULL = [
    Rule("cut_request", "PUT .*partNumber=2", after_bytes=1 << 20),
    Rule("cut_request", "PUT .*partNumber=3", after_bytes=1000),
    Rule("cut_request", "PUT .*manifests/"),
    Rule("cut_request", "POST .*uploads="),
    Rule("cut_request", "POST .*uploadId="),
    Rule("lose_response", "PUT .*partNumber=2"),
    Rule("lose_response", "POST .*uploads="),
    Rule("lose_response", "PUT .*pending/"),
]


@pytest.mark.parametrize(
    "rule",
    PASSING + [pytest.param(rule, marks=full) for rule in PASSING_FULL],
    ids=lambda rule: f"{rule.fault} {rule.pattern}",
)
def test_one_request_that_fails(bench: Bench, rule: Rule):
    """Cut in each part, damaged on the way, or done and the answer lost."""
    bench.proxy.rules.append(rule)
    bench.save()
    bench.caught_up()
    bench.struck((rule,))  # what comes after the commit may be under way yet
    assert rule.met == 1


@pytest.mark.parametrize(
    "rule",
    [
        slow_down("", times=None),
        pytest.param(slow_down("PUT .*segments", times=None, status=507), marks=full),
        pytest.param(Rule("cut_response", "", times=None), marks=full),
        pytest.param(Rule("stall", "PUT .*partNumber", times=2), marks=full),
        Rule("lose_response", "PUT .*manifests/", times=None),
    ],
    ids=["503", "full", "mute", "stalled", "manifest unanswered"],
)
def test_saves_go_on_while_it_lasts(bench: Bench, rule: Rule):
    with bench.failing(rule):
        assert bench.tier("disk").available


def test_why_requests_are_repeated_is_known_everywhere(
    s3_server: S3Server, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    """Ten minutes before they fail: in status and metrics, and in the logs of agent and trainer."""
    with Bench(s3_server, tmp_path, numbers=SMALL, retry_for="10 min") as bench:
        bench.proxy.rules.append(slow_down("PUT .*segments", times=None))
        bench.save()
        bench.says("503")

        def logged() -> str:
            return "".join(e.getMessage() for e in caplog.records if e.name == LOGGER)

        with AgentClient(bench.runtime) as client:
            wait_until(lambda: b"tieredckpt_tier_error_info{" in client.metrics())
            wait_until(lambda: "tier s3: its requests fail" in logged(), deadline_s=DEADLINE_S)
            assert "503" in log_of(bench.runtime)
            saved = bench.engine.last_save
            assert saved is not None
            assert saved.save_id is not None
            assert "503" in client.progress(saved.save_id, namespace="run").errors["s3"]
            bench.proxy.heal()
            bench.caught_up()
            wait_until(lambda: bench.tier().error is None, deadline_s=DEADLINE_S)
            assert b"tier_error_info" not in client.metrics()


def test_a_bucket_that_crawls(bench: Bench):
    """Nothing fails, it only takes long: half a minute for one checkpoint."""
    bench.proxy.bytes_per_s = 500e3
    before = bench.proxy.count("PUT .*partNumber")
    bench.save()
    wait_until(lambda: bench.proxy.count("PUT .*partNumber") > before, deadline_s=DEADLINE_S)
    bench.train_on()
    assert bench.step not in bench.bucket.manifests()
    bench.proxy.heal()
    bench.caught_up()


def test_what_came_through_all_that_is_what_another_host_restores(bench: Bench):
    bench.save()
    newest = bench.caught_up()
    # (Of those that were superseded half-way it stays until the sweep.)
    assert f"pending/default/{newest.save_id}" not in bench.bucket.keys("pending/")
    bench.restores()


@pytest.mark.parametrize(
    "places", [STAGES[1:2], pytest.param(STAGES, marks=full)], ids=["some", "all"]
)
def test_an_agent_killed_in_each_step_of_a_commit(
    s3_server: S3Server, tmp_path: Path, places: tuple[str, ...]
):
    """The next one finishes what is in memory; what was sent is not sent again."""
    with Bench(s3_server, tmp_path) as bench:
        for place in places:
            bench.restart_agent(f"{place}=kill")
            bench.save()
            assert bench.agent.process.join(DEADLINE_S) is None
            assert bench.agent.process.exitcode == -9, place
            before = bench.proxy.count("PUT .*partNumber")
            bench.restart_agent()
            bench.save()
            bench.caught_up()
            again = bench.proxy.count("PUT .*partNumber") - before
            assert again <= 6, "two checkpoints of three parts"
        bench.restores()


def test_wrong_credentials_are_mended_in_their_file(s3_server: S3Server, tmp_path: Path):
    """A file of credentials is read again when it changes: neither job nor agent starts anew."""
    file = tmp_path / "credentials"
    give(file, "expired-and-gone")
    known = {"AWS_SHARED_CREDENTIALS_FILE": str(file), "AWS_CONFIG_FILE": "/dev/null"}
    known["AWS_EC2_METADATA_DISABLED"] = "true"
    with Bench(s3_server, tmp_path, numbers=SMALL, environ=known, first=False, wait="2 s") as bench:
        with pytest.raises(CheckpointException, match="secret does not belong"):
            bench.save()  # there may be checkpoints in the bucket
        assert bench.engine.load(zeros(), fresh_start=True) is None
        bench.train_on()
        bench.says("secret does not belong to the access key")
        give(file, SECRET_KEY)
        bench.train_on(1)
        bench.caught_up()
        # Renewed by whoever renews them, while all is well.
        give(file, "expired-and-gone")
        bench.save()
        wait_until(lambda: not bench.tier().available, deadline_s=DEADLINE_S)
        bench.train_on()
        give(file, SECRET_KEY)
        bench.caught_up()


def test_a_token_that_expires_in_the_middle_of_the_run(s3_server: S3Server, tmp_path: Path):
    """Before its time, with nothing new at hand at first: no restart of anything is needed."""
    handed = HandedOut(tmp_path)
    handed.give(ACCESS_KEY, SECRET_KEY)
    with Bench(s3_server, tmp_path, numbers=SMALL, environ=handed.environ) as bench:
        bench.proxy.rules.append(rule := expired(ACCESS_KEY))
        rule.skip = 1  # in the middle of a checkpoint
        bench.save()
        bench.says("the credentials have expired")
        bench.train_on(2)
        assert bench.step not in bench.bucket.manifests()
        handed.give(NEXT_KEY, NEXT_SECRET)
        bench.caught_up()
        assert rule in bench.proxy.rules
        bench.restores()
        assert handed.asked < 10, "a process for each request that is refused"


@pytest.fixture(scope="module")
def saved(s3_server: S3Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """Two checkpoints that lie whole in the bucket."""
    with Bench(s3_server, tmp_path_factory.mktemp("saved"), numbers=SMALL) as found:
        found.save()
        found.caught_up()
        yield found


@contextlib.contextmanager
def other_host(saved: Bench, wait: str, **more: Any) -> Iterator[Engine]:
    """A host that has nothing but the bucket, and reaches it through the proxy."""
    saved.proxy.heal()
    with fresh_runtime() as runtime:
        agent = start_agent(runtime)
        try:
            config = settings(runtime, saved.proxy.endpoint, saved.prefix)
            with Engine.open({**config, "recovery": {"wait": wait}, **more}) as engine:
                yield engine
        finally:
            saved.proxy.heal()
            agent.kill()


READS = "GET .*/segments/"
DATED = {"Last-Modified": "Wed, 01 Jan 2025 00:00:00 GMT", "ETag": '"0"'}


@pytest.mark.parametrize(
    "rule",
    [
        slow_down(READS, status=500, times=4),
        pytest.param(Rule("cut_response", READS), marks=full),
        pytest.param(Rule("answer", READS, status=206, body=b"short"), marks=full),
        Rule("answer", "GET .*/manifests/", status=200, body=b"short", headers=DATED),
    ],
    ids=["500", "cut", "short", "short manifest"],
)
def test_a_read_that_fails_is_repeated_and_moves_no_load(saved: Bench, rule: Rule):
    """The newest step is whole: an answer that did not come, or not whole, is no damage."""
    with other_host(saved, "20 s") as engine:
        saved.proxy.rules.append(rule)
        assert engine.load(zeros(SMALL)) == saved.step
        assert rule.times == 0
        assert engine.last_restore is not None
        assert not engine.last_restore.refused
        assert engine.status().namespaces[0].tiers[0].quarantined == 0


def test_a_step_that_cannot_be_read_is_not_passed_over(saved: Bench):
    """Nothing says that it is damaged: the load waits, raises, and names what does not answer."""
    with other_host(saved, "1 s") as engine:
        newest = saved.bucket.manifests()[saved.step].segments[0].id
        saved.proxy.rules.append(slow_down(f"GET .*{newest}", status=500, times=None))
        with pytest.raises(TierUnavailableError, match=rf"(?s)step {saved.step} .* s3: .*500"):
            engine.load(zeros(SMALL))
        # Unless it is said that older is fine.
        assert engine.load(zeros(SMALL), abandon_newer=True) == saved.step - 1
        saved.proxy.heal()
        assert engine.load(zeros(SMALL)) == saved.step


def give(file: Path, secret: str) -> None:
    text = f"[default]\naws_access_key_id = {ACCESS_KEY}\naws_secret_access_key = {secret}\n"
    (new := file.with_suffix(".new")).write_text(text)
    new.replace(file)
