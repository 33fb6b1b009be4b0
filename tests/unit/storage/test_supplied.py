"""When the credentials of a training script are used, asked for again, and given up."""

from __future__ import annotations

import threading
from datetime import UTC, datetime, timedelta
from typing import Any, cast

import botocore.credentials
import pytest

from tests.support.agent import wait_until
from tieredckpt.dcp.job.credentials import CredentialsFeed
from tieredckpt.rpc.agent_client import AgentClient
from tieredckpt.rpc.messages.tiers import HandCredentials
from tieredckpt.storage.object.supplied import (
    RENEW_S,
    RENEW_S_MIN,
    Handed,
    Keys,
    NotSuppliedError,
    Supplied,
)


class Clock:
    def __init__(self) -> None:
        self.now_s = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now_s


class Source:
    """Numbered credentials that live for a time."""

    def __init__(self, clock: Clock, life_s: float | None) -> None:
        self.clock, self.life_s, self.calls = clock, life_s, 0
        self.fails = self.same = False
        self.last: dict[str, Any] = {}
        self.goes_on = threading.Event()
        self.goes_on.set()

    def __call__(self) -> dict[str, Any]:
        self.calls += 1
        self.goes_on.wait(60.0)
        if self.fails:
            raise RuntimeError("refused")
        if self.same:
            return self.last
        self.last = found = {"AccessKeyId": f"key-{self.calls}", "SecretAccessKey": "secret"}
        if self.life_s is None:
            return found
        until = datetime.fromtimestamp(self.clock.now_s + self.life_s, UTC)
        self.last |= {"SessionToken": "token", "Expiration": until}
        return self.last


def of(source: Source) -> Supplied:
    return Supplied(source, source.clock, source.clock)


def key_of(supplied: Supplied) -> str:
    return supplied.get_frozen_credentials().access_key


def becomes(supplied: Supplied, key: str) -> None:
    wait_until(lambda: key_of(supplied) == key, deadline_s=60.0)


@pytest.mark.parametrize(("life_s", "every_s"), [(None, RENEW_S), (3600.0, RENEW_S), (60.0, 30.0)])
def test_they_are_asked_for_again_long_before_they_expire(life_s: float | None, every_s: float):
    source = Source(Clock(), life_s)
    supplied = of(source)
    for calls in range(1, 4):
        becomes(supplied, f"key-{calls}")
        source.clock.now_s += every_s - 0.1
        assert key_of(supplied) == f"key-{calls}"
        source.clock.now_s += 0.2
    assert source.calls == 3


def test_those_that_live_for_seconds_are_asked_for_when_they_expired():
    source = Source(Clock(), 4.0)
    supplied = of(source)
    assert key_of(supplied) == "key-1"
    source.clock.now_s += 4.1
    assert key_of(supplied) == "key-2"


def test_a_source_that_fails_is_asked_again_and_the_old_ones_are_used_until_they_expire():
    source = Source(Clock(), 60.0)
    supplied = of(source)
    assert key_of(supplied) == "key-1"
    source.fails = True
    source.clock.now_s += 31.0
    assert key_of(supplied) == "key-1"
    wait_until(lambda: source.calls == 2, deadline_s=60.0)
    assert key_of(supplied) == "key-1"
    source.clock.now_s += 30.0
    with pytest.raises(NotSuppliedError, match="RuntimeError: refused"):
        supplied.get_frozen_credentials()
    source.fails = False
    source.clock.now_s += RENEW_S_MIN
    assert key_of(supplied).startswith("key-")


def test_a_source_that_hangs_holds_nobody_up_who_has_valid_ones():
    source = Source(Clock(), 60.0)
    supplied = of(source)
    assert key_of(supplied) == "key-1"
    source.goes_on.clear()
    try:
        source.clock.now_s += 31.0
        for _ in range(3):
            assert key_of(supplied) == "key-1"
        source.clock.now_s += 30.0
        with pytest.raises(NotSuppliedError, match="has not returned"):
            supplied.get_frozen_credentials(wait_s=0.01)
    finally:
        source.goes_on.set()
    becomes(supplied, "key-2")
    assert source.calls == 2, "one at a time"


def test_after_a_refusal_they_are_asked_for_at_most_every_few_seconds():
    source = Source(Clock(), 3600.0)
    supplied = of(source)
    used = supplied.get_frozen_credentials()
    assert not supplied.find_anew(), "they were asked for just now"
    source.clock.now_s += RENEW_S_MIN
    assert supplied.find_anew(wait_s=60.0)
    assert supplied.differs_from(used)
    assert source.calls == 2
    source.same = True
    calls = 0
    for _ in range(60):  # in ten minutes in which it returns what was refused
        source.clock.now_s += 10.0
        calls -= source.calls
        assert not supplied.find_anew(wait_s=60.0)
        calls += source.calls
    assert 3 <= calls <= 7


def test_a_source_is_asked_although_the_clock_was_set_back():
    source = Source(Clock(), None)
    timer = Clock()
    supplied = Supplied(source, source.clock, timer)
    assert key_of(supplied) == "key-1"
    source.clock.now_s -= 6 * 3600.0
    timer.now_s += RENEW_S + 1
    becomes(supplied, "key-2")


def test_an_agent_uses_those_that_live():
    clock = Clock()
    handed = Handed(lambda: None, clock)
    with pytest.raises(NotSuppliedError, match="sent none"):
        handed.get_frozen_credentials()
    old = Keys("old", "secret", None, clock.now_s + 10)
    new = Keys("new", "secret", None, clock.now_s + 100)
    assert handed.are_wanted()
    assert handed.give("a", old)
    assert not handed.are_wanted()
    handed.find_anew()
    assert handed.are_wanted(), "the store refused them"
    assert not handed.give("a", old)
    assert handed.are_wanted(), "the same ones"
    assert handed.give("a", new)
    clock.now_s += 50
    assert not handed.give("a", old), "of a script that slept"
    assert handed.get_frozen_credentials() == new
    clock.now_s += 50
    assert handed.are_wanted()
    with pytest.raises(NotSuppliedError, match=r"expired at 2027-01-15 08:01:40 UTC"):
        handed.get_frozen_credentials()
    handed.give("a", forever := Keys("forever", "secret"))
    assert handed.get_frozen_credentials() == forever


def test_an_agent_uses_those_of_the_run_that_rules_while_that_is_here():
    clock, ruler = Clock(), ["a"]
    handed = Handed(lambda: ruler[0] if ruler else None, clock)
    for run in "abcdefg":
        handed.give(run, Keys(run, "secret"))
        assert handed.get_frozen_credentials().access_key == "a"
    ruler[0] = "b"
    assert handed.get_frozen_credentials().access_key == "g", "only a few are kept"
    ruler[0] = "f"
    assert handed.get_frozen_credentials().access_key == "f"
    handed.give("f", Keys("f", "secret", None, clock.now_s + 5))
    clock.now_s += 10
    with pytest.raises(NotSuppliedError, match="expired"):  # no other run's
        handed.get_frozen_credentials()
    ruler.clear()
    handed.give("g", Keys("g", "secret"))
    assert handed.get_frozen_credentials().access_key == "g", "its sessions have ended"


def test_credentials_of_botocore_with_their_time():
    until = datetime.now(UTC) + timedelta(minutes=30)

    def refresh() -> dict[str, Any]:
        return {
            "access_key": "a", "secret_key": "s", "token": "t", "expiry_time": until.isoformat(),
        }  # fmt: skip

    found = botocore.credentials.RefreshableCredentials.create_from_metadata(
        refresh(), refresh, "test"
    )
    keys = Supplied(lambda: found).get_frozen_credentials()
    assert keys == Keys("a", "s", "t", until.timestamp())
    assert "'s'" not in repr(keys)


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        {"AccessKeyId": "a"},
        {"AccessKeyId": "a", "SecretAccessKey": ""},
        {"AccessKeyId": "a", "SecretAccessKey": b"s"},
        {"AccessKeyId": "a", "SecretAccessKey": "s", "SessionToken": 7},
        {"AccessKeyId": "a", "SecretAccessKey": "s", "SessionToken": "t\nX-Amz-Acl: public-read"},
        {"AccessKeyId": "a", "SecretAccessKey": "s", "Expiration": "soon"},
        {"AccessKeyId": "a", "SecretAccessKey": "s", "Expiration": "2099-01-01T00:00:00"},
        {"AccessKeyId": "a", "SecretAccessKey": "s", "Expiration": "2001-01-01T00:00:00Z"},
        7,
        None,
    ],
)  # fmt: skip
def test_what_is_no_credentials(wrong: object):
    with pytest.raises(NotSuppliedError):
        Supplied(lambda: wrong).get_frozen_credentials()


class Agent:
    """Records what it is sent."""

    session_id = "0" * 32

    def __init__(self) -> None:
        self.sent: list[HandCredentials] = []

    def call(self, request: HandCredentials, **_: object) -> None:
        self.sent.append(request)


def test_an_agent_is_sent_others_before_it_wants_them_and_the_same_only_if_it_does():
    source, agent = Source(Clock(), 60.0), Agent()
    supplied = of(source)
    feed = CredentialsFeed(cast("AgentClient", agent), supplied)
    feed.begin()
    feed.go_on(wanted=False)
    assert [each.access_key for each in agent.sent] == ["key-1"]
    source.clock.now_s += 31.0  # half of their life
    feed.go_on(wanted=False)
    becomes(supplied, "key-2")
    feed.go_on(wanted=False)
    assert [each.access_key for each in agent.sent] == ["key-1", "key-2"]
    feed.go_on(wanted=True)  # a new agent
    assert [each.access_key for each in agent.sent] == ["key-1", "key-2", "key-2"]
    source.fails = True
    source.clock.now_s += 61.0
    feed.go_on(wanted=True)
    wait_until(lambda: source.calls == 3, deadline_s=60.0)
    assert len(agent.sent) == 3, "none that have expired"
    assert "secret" not in repr(agent.sent)
