"""The state of a benchmark, and whose shapes it has."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from tieredckpt.bench import state as states
from tieredckpt.bench.settings import Settings
from tieredckpt.errors import UsageError

TENSORS = {
    "a": torch.zeros(3, 5, dtype=torch.bfloat16),
    "b.c": torch.zeros((), dtype=torch.int64),
    "d": torch.zeros(4, dtype=torch.bool),
}
SPECS = {states.Spec(n, t.dtype, tuple(t.shape)) for n, t in TENSORS.items()}


def like(path: object) -> set[states.Spec]:
    return set(states.specs(Settings(mode="save", like=str(path))))


def test_sizes():
    found = states.specs(Settings(mode="save", size_bytes=10 << 20, tensors=5))
    assert len({spec.name for spec in found}) == 5
    assert states.total_bytes(found) == 10 << 20


def test_shapes_of_a_safetensors_file_folder_or_index(tmp_path: Path):
    save_file({"a": TENSORS["a"]}, tmp_path / "1.safetensors", {"format": "pt"})
    save_file({n: TENSORS[n] for n in ("b.c", "d")}, tmp_path / "2.safetensors")
    names = {"a": "1.safetensors", "b.c": "2.safetensors", "d": "2.safetensors"}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": names}))
    assert like(tmp_path) == like(index) == SPECS
    assert {spec.name for spec in like(tmp_path / "1.safetensors")} == {"a"}


def test_shapes_of_a_dcp_folder(tmp_path: Path):
    dcp.save({**TENSORS, "step": 3}, checkpoint_id=tmp_path / "x", no_dist=True)
    assert like(tmp_path / "x") == SPECS


@pytest.mark.parametrize(
    "content", [b"", b"\xff" * 20, b"\x02" + bytes(7) + b"[]", b"\x05" + bytes(9)]
)
def test_files_that_are_none(tmp_path: Path, content: bytes):
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(UsageError, match="x is no safetensors file"):
        like(tmp_path / "x")


def test_what_has_no_tensors(tmp_path: Path):
    with pytest.raises(UsageError, match="has no tensors"):
        like(tmp_path)
    with pytest.raises(UsageError, match="neither a path that exists, nor a step"):
        like(tmp_path / "missing")


def test_no_two_saves_have_the_same_bytes():
    specs = list(SPECS)
    state = states.make(specs, torch.device("cpu"), None)
    states.fill(state)
    assert states.num_bytes(state) == states.total_bytes(specs)
    seen = set()
    for step in range(20):
        states.change(state, step)
        seen.add(states.content(state))
    assert len(seen) == 20
    assert not state["d"].any(), "a bool of other bits is none"
