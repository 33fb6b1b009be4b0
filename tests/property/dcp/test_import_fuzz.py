"""Damaged and forged sources of ``tieredckpt import``: each is read or refused by one of ours.

``python -m tests.property.dcp.test_import_fuzz SECONDS`` runs it for long, with a new seed.
"""

from __future__ import annotations

import io
import random
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from tests.format.samples import mutate
from tests.support.pieces import InPieces
from tieredckpt.dcp.state.items import LayoutCache, resolve_all
from tieredckpt.dcp.state.metadata import Places, to_plan
from tieredckpt.errors import TieredCkptError
from tieredckpt.export.imports import _Folder, _save, _torch_file
from tieredckpt.format.nested import nested_of

ROUNDS = 100
ROUNDS_NIGHTLY = 50_000
KINDS = (".metadata", "__0_0.distcp", "new.pt", "old.pt")
STATE = {
    "w": torch.arange(12.0).reshape(4, 3),
    "model": {"half": torch.ones(5).half().t(), "rows": [torch.ones(3), {"n": 1, "lr": 0.5}]},
    "note": "text",
}


class Planned(StorageWriter):
    """Does what the engine's writer does up to the slot, without an agent."""

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        specs, tensors, _ = resolve_all(planner, plan.items)
        assert all(tensor.untyped_storage() is not None for tensor in tensors)
        self.layout, _ = LayoutCache().lay_out(specs)
        future: Future[list[WriteResult]] = Future()
        future.set_result([])
        return future

    def finish(self, metadata: Metadata, results: Any) -> None:
        to_plan(metadata, Places.of_segments([self.layout.items]), [bytes(16)])

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


def sources() -> dict[str, bytes]:
    """A whole file of each kind."""
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(dict(STATE), checkpoint_id=folder, planner=InPieces(), no_dist=True)
        found = {name: (Path(folder) / name).read_bytes() for name in KINDS[:2]}
    for name in KINDS[2:]:
        stream = io.BytesIO()
        torch.save(STATE, stream, _use_new_zipfile_serialization=name == "new.pt")
        found[name] = stream.getvalue()
    return found


def read(folder: Path, kind: str) -> None:
    """As an import reads it."""
    planner: SavePlanner = DefaultSavePlanner()
    state: dict[str, Any] = {}
    if kind.endswith(".pt"):
        state = _torch_file(folder / kind)
    else:
        planner = _Folder(folder)
    nested_of(state)
    _save(cast(Any, Planned()), state, planner, folder)


def fuzz(folder: Path, seed: int, rounds: int) -> Iterator[str]:
    """Yields, of each round, the outcome: "read", an error of ours, or what escaped."""
    rng, whole = random.Random(seed), sources()
    others = list(whole.values())
    for number in range(rounds):
        kind = KINDS[number % len(KINDS)]
        for name, data in whole.items():
            (folder / name).write_bytes(data)
        if number >= len(KINDS):  # the first ones are whole
            (folder / kind).write_bytes(mutate(whole[kind], rng.choice(others), rng))
        try:
            read(folder, kind)
            yield "read"
        except TieredCkptError as error:
            yield type(error).__name__ if len(str(error)) < 5000 else f"round {number}: {error}"
        except Exception:
            data = (folder / kind).read_bytes()
            yield f"round {number} of seed {seed}: {kind}: {data!r}\n{traceback.format_exc()}"


def test_what_is_damaged_is_read_or_refused(tmp_path: Path):
    outcomes = list(fuzz(tmp_path, 1, ROUNDS))
    assert outcomes[: len(KINDS)] == ["read"] * len(KINDS)
    assert set(outcomes) == {"read", "UsageError", "IntegrityError"}


@pytest.mark.nightly
def test_what_is_damaged_is_read_or_refused_in_many_rounds(tmp_path: Path):
    seed = random.SystemRandom().randrange(1 << 31)
    assert set(fuzz(tmp_path, seed, ROUNDS_NIGHTLY)) == {"read", "UsageError", "IntegrityError"}


if __name__ == "__main__":
    until, counts = time.monotonic() + float(sys.argv[1]), dict[str, int]()
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as place:
        for outcome in fuzz(Path(place), random.SystemRandom().randrange(1 << 31), 1 << 40):
            counts[outcome] = counts.get(outcome, 0) + 1
            if outcome.startswith("round") and counts[outcome] == 1:
                print(outcome, flush=True)
            if time.monotonic() > until:
                break
    print({outcome[:60]: count for outcome, count in counts.items()})
