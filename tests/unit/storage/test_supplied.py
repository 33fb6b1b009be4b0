"""When the credentials of a training script are used, asked for again, and given up."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import botocore.credentials
import pytest

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
        self.clock, self.life_s, self.calls, self.fails = clock, life_s, 0, False

    def __call__(self) -> dict[str, Any]:
        self.calls += 1
        if self.fails:
            raise RuntimeError("refused")
        found = {"AccessKeyId": f"key-{self.calls}", "SecretAccessKey": "secret"}
        if self.life_s is None:
            return found
        until = datetime.fromtimestamp(self.clock.now_s + self.life_s, UTC)
        return {**found, "SessionToken": "token", "Expiration": until}


@pytest.mark.parametrize(
    ("life_s", "every_s"),
    [(None, RENEW_S), (3600.0, RENEW_S), (60.0, 30.0), (4.0, RENEW_S_MIN)],
)
def test_they_are_asked_for_again_long_before_they_expire(life_s: float | None, every_s: float):
    clock = Clock()
    source = Source(clock, life_s)
    supplied = Supplied(source, clock)
    for calls in range(1, 4):
        assert supplied.get_frozen_credentials().access_key == f"key-{calls}"
        clock.now_s += min(every_s, life_s or every_s) - 0.1
        assert supplied.get_frozen_credentials().access_key == f"key-{calls}"
        clock.now_s += max(0.0, every_s - (life_s or every_s)) + 0.2
    assert source.calls == 3


def test_a_source_that_fails_is_asked_again_and_the_old_ones_are_used_until_they_expire():
    clock = Clock()
    source = Source(clock, 60.0)
    supplied = Supplied(source, clock)
    first = supplied.get_frozen_credentials()
    source.fails = True
    clock.now_s += 31.0
    assert supplied.get_frozen_credentials() == first
    assert supplied.get_frozen_credentials() == first
    assert source.calls == 2, "not at each use"
    clock.now_s += 30.0
    with pytest.raises(NotSuppliedError, match="RuntimeError: refused"):
        supplied.get_frozen_credentials()
    source.fails = False
    clock.now_s += RENEW_S_MIN
    assert supplied.get_frozen_credentials() != first


def test_after_a_refusal_they_are_asked_for_at_most_every_few_seconds():
    clock = Clock()
    source = Source(clock, 3600.0)
    supplied = Supplied(source, clock)
    used = supplied.get_frozen_credentials()
    assert not supplied.find_anew(), "they were asked for just now"
    clock.now_s += RENEW_S_MIN
    assert supplied.find_anew()
    assert supplied.differs_from(used)
    assert source.calls == 2


def test_an_agent_uses_those_that_live():
    clock = Clock()
    handed = Handed(clock)
    with pytest.raises(NotSuppliedError, match="sent none"):
        handed.get_frozen_credentials()
    old = Keys("old", "secret", None, clock.now_s + 10)
    new = Keys("new", "secret", None, clock.now_s + 100)
    assert handed.are_wanted()
    handed.give(old)
    assert not handed.are_wanted()
    handed.find_anew()
    assert handed.are_wanted(), "the store refused them"
    handed.give(new)
    clock.now_s += 50
    handed.give(old)  # of a script that slept
    assert handed.get_frozen_credentials() == new
    clock.now_s += 50
    assert handed.are_wanted()
    with pytest.raises(NotSuppliedError, match=r"expired at 2027-01-15 08:01:40 UTC"):
        handed.get_frozen_credentials()
    handed.give(forever := Keys("forever", "secret"))
    assert handed.get_frozen_credentials() == forever


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
