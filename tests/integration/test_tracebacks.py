"""What a user reads at the end of a traceback: our message, with the next step."""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import tieredckpt
from tests.support.states import config
from tieredckpt.engine import Engine

pytestmark = pytest.mark.usefixtures("served")


def full(engine: Engine) -> None:
    dcp.save({"w": torch.ones(8 << 20)}, storage_writer=engine.writer(2))


def full_in_background(engine: Engine) -> None:
    engine.async_save({"w": torch.ones(8 << 20)}, 2).result(60)


def no_such_step(engine: Engine) -> None:
    dcp.load({"w": torch.ones(10)}, storage_reader=engine.reader(7))


def too_many_keys(engine: Engine) -> None:
    engine.load({"w": torch.ones(10), "v": torch.ones(10)})


@pytest.mark.parametrize(
    ("fails", "cause", "last"),
    [
        (full, tieredckpt.CapacityError, "raise it, or lower memory.keep.last"),
        (full_in_background, tieredckpt.CapacityError, "raise it, or lower memory.keep.last"),
        (no_such_step, tieredckpt.NotFoundError, "no checkpoint for step 7 of stream 'default': "
         "`tieredckpt ls` lists"),
        (too_many_keys, RuntimeError, "strict=False"),
    ],
)  # fmt: skip
def test_dcp_ends_with_what_we_say(
    runtime_dir: Path, fails: Callable[[Engine], None], cause: type[Exception], last: str
):
    settings = config(runtime_dir, memory={"capacity": "16MiB"}, save={"on_error": "raise"})
    with Engine.open(settings) as engine, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is")
        dcp.save({"w": torch.ones(10)}, storage_writer=engine.writer(1))
        with pytest.raises(CheckpointException) as raised:
            fails(engine)
    # As docs/use/dcp.md says how to find it.
    rank, (found, _) = min(raised.value.failures.items())
    assert rank == 0
    assert isinstance(found, cause)
    text = "".join(traceback.format_exception(raised.value)).rstrip()
    assert last in text.splitlines()[-1]


def test_engine_load_raises_ours_directly(runtime_dir: Path):
    with (
        Engine.open(config(runtime_dir)) as engine,
        pytest.raises(tieredckpt.NotFoundError, match="`tieredckpt ls` lists"),
    ):
        engine.load({"w": torch.ones(10)}, step=7)
