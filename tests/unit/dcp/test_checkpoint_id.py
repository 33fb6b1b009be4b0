"""What a checkpoint_id names."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tieredckpt.dcp.state.checkpoint_id import Target, checked_step, checked_stream, parse
from tieredckpt.errors import UsageError


@pytest.mark.parametrize(
    ("text", "step", "stream"),
    [
        ("step-100", 100, None),
        ("step_7", 7, None),
        ("step=0", 0, None),
        ("42", 42, None),
        ("outputs/checkpoint/step-10", 10, "checkpoint"),
        ("/actor/step-10/", 10, "actor"),
        ("/step-10", 10, None),
        ("./step-1", 1, None),
        ("../3", 3, None),
        ("a/step-0012", 12, "a"),
    ],
)
def test_parse(text: str, step: int, stream: str | None):
    assert parse(text) == Target(step, stream)
    assert parse(Path(text)) == Target(step, stream)


@pytest.mark.parametrize(
    "text",
    ["", "/", "step", "step-", "step-1x", "final", "a/latest", "step--1", "-1", "1.5",
     "step-\uff11",
     "step-99999999999999999999", "my run/step-1", "é/step-1", "step-9999999999999999999"],
)  # fmt: skip
def test_refused(text: str):
    with pytest.raises(UsageError, match=r"checkpoint_id|step"):
        parse(text)


def test_conflicts_name_both():
    assert Target(None, None).merged(Target(5, "a")) == Target(5, "a")
    assert Target(5, "a").merged(Target(5, None)) == Target(5, "a")
    with pytest.raises(UsageError, match=r"step 6.*step 5"):
        Target(5, None).merged(Target(6, None))
    with pytest.raises(UsageError, match=r"stream 'b'.*stream 'a'"):
        Target(None, "a").merged(Target(6, "b"))


def test_steps_and_streams():
    assert checked_step(0) == 0
    assert checked_step(np.int64(7)) == 7  # type: ignore[arg-type]
    assert checked_stream("default") is None
    assert checked_stream("actor") == "actor"
    for bad in (-1, True, 1.0, "1", 1 << 63):
        with pytest.raises(UsageError, match="integer"):
            checked_step(bad)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="stream"):
        checked_stream("a/b")
