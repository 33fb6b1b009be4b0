"""Credentials that only the training script has: its agent is given them, and nothing else."""

from __future__ import annotations

import itertools
import os
import stat
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import boto3
import pytest

from tests.support.agent import wait_until
from tests.support.http_proxy import HttpProxy, Rule
from tests.support.s3_bench import fresh_runtime, settings, start_agent, state_of, zeros
from tests.support.states import same, save
from tieredckpt.engine import Engine
from tieredckpt.errors import UsageError
from tieredckpt.rpc.messages.agent import TierStatus
from tieredckpt.testing.s3_server import (
    ACCESS_KEY,
    NEXT_KEY,
    NEXT_SECRET,
    READER_KEY,
    READER_SECRET,
    SECRET_KEY,
    S3Server,
)

NUMBERS = 1000
SECRETS = {ACCESS_KEY: SECRET_KEY, NEXT_KEY: NEXT_SECRET, READER_KEY: READER_SECRET}
WAIT_S = 120.0
NOTHING = {
    "AWS_EC2_METADATA_DISABLED": "true", "AWS_CONFIG_FILE": "/dev/null",
    "AWS_SHARED_CREDENTIALS_FILE": "/dev/null", "AWS_PROFILE": "of-a-laptop",
}  # fmt: skip
"""An environment in which nobody finds credentials, not even the profile."""


@pytest.fixture(autouse=True)
def _no_other_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [each for each in os.environ if each.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name, value in NOTHING.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def runtime() -> Iterator[Path]:
    with fresh_runtime() as folder:
        yield folder


@pytest.fixture
def agent(runtime: Path) -> Iterator[Any]:
    found = start_agent(runtime, NOTHING)
    yield found
    found.kill()


def role(life: timedelta = timedelta(hours=1), key: str = ACCESS_KEY) -> dict[str, Any]:
    """As STS answers."""
    return {
        "AccessKeyId": key,
        "SecretAccessKey": SECRETS[key],
        "SessionToken": None,
        "Expiration": datetime.now(UTC) + life,
    }


def tier_of(engine: Engine) -> TierStatus:
    return engine.status().namespaces[0].tiers[0]


def files_with(text: str, folder: Path) -> list[Path]:
    return [
        each
        for each in folder.rglob("*")
        if stat.S_ISREG(each.stat().st_mode) and text.encode() in each.read_bytes()
    ]


@pytest.mark.usefixtures("agent")
def test_an_agent_without_credentials_uploads_and_a_new_host_loads_with_the_scripts(
    s3_server: S3Server, s3_prefix: str, runtime: Path
):
    config = settings(runtime, s3_server.endpoint, s3_prefix)
    calls = itertools.count()

    def source() -> dict[str, Any]:
        next(calls)
        return role()

    with Engine.open(config, credentials=source) as engine:
        save(engine, 0, state_of(0, NUMBERS))
        engine.wait(0, "s3", WAIT_S)
        assert next(calls) == 1, "not once for each request"
        assert not files_with(SECRET_KEY, runtime), "never on a disk"
        other = zeros(NUMBERS)
        with Engine.open(config, credentials=source, read_only=True) as reading:
            assert reading.load(other) == 0
        assert same(other, state_of(0, NUMBERS))
    with fresh_runtime() as elsewhere:
        new_agent = start_agent(elsewhere, NOTHING)
        try:
            config = settings(elsewhere, s3_server.endpoint, s3_prefix)
            with Engine.open(config, credentials=source) as engine:
                loaded = zeros(NUMBERS)
                assert engine.load(loaded) == 0
                assert same(loaded, state_of(0, NUMBERS))
        finally:
            new_agent.kill()


def test_a_new_agent_is_given_them_again(
    s3_server: S3Server, s3_prefix: str, runtime: Path, agent: Any
):
    config = settings(runtime, s3_server.endpoint, s3_prefix)
    with Engine.open(config, credentials=role) as engine:
        save(engine, 0, state_of(0, NUMBERS))
        engine.wait(0, "s3", WAIT_S)
        agent.kill()
        again = start_agent(runtime, NOTHING)
        try:
            save(engine, 1, state_of(1, NUMBERS))
            engine.wait(1, "s3", WAIT_S)
        finally:
            again.kill()


@pytest.mark.usefixtures("agent")
def test_a_tier_waits_when_the_script_is_gone_and_they_expire(
    s3_server: S3Server, s3_prefix: str, runtime: Path
):
    with HttpProxy(s3_server.address) as proxy:
        config = settings(runtime, proxy.endpoint, s3_prefix) | {"close": {"flush": "0s"}}
        with Engine.open(config, credentials=lambda: role(timedelta(seconds=4))) as engine:
            engine.load({})
            proxy.rules.append(Rule("answer", "^PUT ", None, status=503))
            save(engine, 0, state_of(0, NUMBERS))
        with Engine.open(config, credentials=role, read_only=True) as watching:
            wait_until(lambda: "expired at" in str(tier_of(watching).error), deadline_s=WAIT_S)
            assert "start the script again" in str(tier_of(watching).error)
            proxy.heal()
            assert tier_of(watching).checkpoints == 0
        with Engine.open(config, credentials=lambda: role(key=NEXT_KEY)) as engine:
            engine.wait(0, "s3", WAIT_S)
            wait_until(lambda: tier_of(engine).error is None, deadline_s=WAIT_S)


@pytest.mark.usefixtures("agent")
def test_a_run_that_only_reads_does_not_change_those_of_the_run_that_saves(
    s3_server: S3Server, s3_prefix: str, runtime: Path
):
    config = settings(runtime, s3_server.endpoint, s3_prefix)
    with Engine.open(config, credentials=role) as engine:
        save(engine, 0, state_of(0, NUMBERS))
        engine.wait(0, "s3", WAIT_S)
        with Engine.open(config, credentials=lambda: role(key=READER_KEY)) as reading:
            assert reading.load(zeros(NUMBERS)) == 0
        save(engine, 1, state_of(1, NUMBERS))
        engine.wait(1, "s3", WAIT_S)


@pytest.mark.full
@pytest.mark.usefixtures("agent")
def test_a_session_of_boto3(
    s3_server: S3Server, s3_prefix: str, runtime: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("AWS_PROFILE")
    session = boto3.Session(ACCESS_KEY, SECRET_KEY, region_name="eu-south-2")
    config = settings(runtime, s3_server.endpoint, s3_prefix)
    with Engine.open(config, credentials=session) as engine:
        save(engine, 0, state_of(0, NUMBERS))
        engine.wait(0, "s3", WAIT_S)
        spec = next(runtime.glob("specs/*.json")).read_bytes()
        assert b"eu-south-2" in spec
        assert SECRET_KEY.encode() not in spec


@pytest.mark.usefixtures("agent")
def test_what_cannot_work_is_refused(s3_server: S3Server, s3_prefix: str, runtime: Path):
    config = settings(runtime, s3_server.endpoint, s3_prefix)

    def broken() -> object:
        raise RuntimeError("no such role")

    with pytest.raises(UsageError, match=r"supplies none: RuntimeError: no such role"):
        Engine.open(config, credentials=broken)
    with pytest.raises(UsageError, match=r"want a boto3\.Session or a mapping with AccessKeyId"):
        Engine.open(config, credentials=lambda: "secret")
    config = settings(runtime, s3_server.endpoint, s3_prefix, profile="other")
    with pytest.raises(UsageError, match="no tier of the configuration uses it"):
        Engine.open(config, credentials=role)
