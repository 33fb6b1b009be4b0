"""A checkpoint that exists, but was not replicated in time."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from tieredckpt.config.schema import SaveConfig
from tieredckpt.dcp.save.failures import SaveFailures, portable
from tieredckpt.errors import WaitError


def late(failures: SaveFailures) -> str:
    return failures.unreplicated("default", WaitError("step 1 has not", reason="timeout"))


def test_the_first_unreplicated_save_raises():
    failures = SaveFailures(SaveConfig(ack="replicated"))
    failures.succeeded("default")
    with pytest.raises(WaitError, match="committed in memory") as caught:
        late(failures)
    assert caught.value.reason == "timeout"


def test_on_error_raise_raises_always():
    failures = SaveFailures(SaveConfig(ack="replicated", on_error="raise"))
    failures.replicated("default")
    with pytest.raises(WaitError, match=r"save\.on_error is raise"):
        late(failures)


def test_unreplicated_saves_are_not_skipped_ones(caplog: pytest.LogCaptureFixture):
    failures = SaveFailures(SaveConfig(ack="replicated", max_skipped=2))
    failures.replicated("default")
    for number in (1, 2):
        with caplog.at_level(logging.WARNING):
            assert late(failures) == "step 1 has not"
        assert f"({number} in a row)" in caplog.text
    assert failures.skipped == 0
    assert failures.must_raise("default") is not None  # no save of the stream was counted either
    with pytest.raises(WaitError, match="max_skipped is 2"):
        late(failures)
    failures.replicated("default")
    assert late(failures)


class Unpicklable:
    def __reduce__(self) -> Any:
        raise RuntimeError("not across processes")


def test_an_error_that_cannot_be_pickled_travels_as_its_text():
    """Else it would end the coordinator's gather, and the other ranks would wait."""
    sent = portable(ValueError("bad", Unpicklable()))
    assert type(sent) is RuntimeError
    assert str(sent).startswith("ValueError: ('bad'")
    kept = ValueError("bad")
    assert portable(kept) is kept
