"""The state of a benchmark, and whose shapes it has."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from tieredckpt.bench import state as states
from tieredckpt.bench.settings import Settings
from tieredckpt.errors import TieredCkptError, UsageError

TENSORS = {
    "a": torch.zeros(3, 5, dtype=torch.bfloat16),
    "b.c": torch.zeros((), dtype=torch.int64),
    "d": torch.zeros(4, dtype=torch.bool),
    "e": torch.zeros(2, 2, dtype=torch.uint16),
    "f": torch.zeros(2, dtype=torch.uint32),
    "g": torch.zeros(2, dtype=torch.uint64),
    "h": torch.zeros(2, dtype=torch.complex64),
    "i": torch.zeros(2, dtype=torch.float8_e8m0fnu),
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
    others = {n: tensor for n, tensor in TENSORS.items() if n != "a"}
    save_file(others, tmp_path / "2.safetensors")
    names = {"a": "1.safetensors", **dict.fromkeys(others, "2.safetensors")}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": names}))
    assert like(tmp_path) == like(index) == SPECS
    assert {spec.name for spec in like(tmp_path / "1.safetensors")} == {"a"}


def test_shapes_of_a_dcp_folder(tmp_path: Path):
    dcp.save({**TENSORS, "step": 3}, checkpoint_id=tmp_path / "x", no_dist=True)
    assert like(tmp_path / "x") == SPECS


def with_header(text: str) -> bytes:
    return len(text).to_bytes(8, "little") + text.encode()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("x", b""),
        ("x", b"\xff" * 20),
        ("x", b"\x05" + bytes(9)),
        ("x", b"PK\3\4" + bytes(20)),
        *(("x", with_header(text)) for text in ("[]", "5", "[" * 100_000, '{"a": 1}')),
        ("x", with_header('{"a": {"dtype": "X9", "shape": [2]}}')),
        *(
            ("x", with_header(f'{{"a": {{"dtype": "F32", "shape": {shape}}}}}'))
            for shape in ("[-1]", "[Infinity]", "3", '["2"]')
        ),
        *(("x.json", text) for text in (b"", b"[]", b"{}", b'{"weight_map": {"a": 3}}')),
        ("x.json", b'{"weight_map": {"a": "missing.safetensors"}}'),
    ],
)
def test_files_that_are_none(tmp_path: Path, name: str, content: bytes):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UsageError, match=f"{name} is no safetensors file") as raised:
        like(tmp_path / name)
    assert "\n" not in str(raised.value)


def test_a_pipe_is_not_waited_for(tmp_path: Path):
    os.mkfifo(tmp_path / "x")
    with pytest.raises(TieredCkptError, match="x is not a regular file"):
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
