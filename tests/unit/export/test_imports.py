"""Files of ``torch.save`` and DCP folders as ``tieredckpt import`` reads them."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorProperties

from tieredckpt.errors import UsageError
from tieredckpt.export.imports import _Folder, _torch_file


def old_file(state: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(state, stream, _use_new_zipfile_serialization=False)
    return stream.getvalue()


STATE = {"w": torch.arange(12.0).reshape(3, 4), "rows": [torch.ones(3), {"n": 1, 2: "text"}]}


def outcome(path: Path, content: bytes) -> str:
    """Why it is refused; "" if it is read."""
    path.write_bytes(content)
    try:
        assert isinstance(_torch_file(path), dict)
    except UsageError as error:
        return str(error)
    return ""


def test_an_old_file_that_is_damaged_is_read_or_refused(tmp_path: Path):
    """Whatever a byte becomes, no other error comes."""
    path, data = tmp_path / "old.pt", old_file(STATE)
    assert not outcome(path, data)
    for at in range(1, len(data), 7):
        assert outcome(path, data[:at]), at
        why = outcome(path, data[:at] + bytes((data[at] ^ 1 << at % 8,)) + data[at + 1 :])
        assert "\n" not in why


def test_an_old_file_has_no_tensors_beyond_its_data(tmp_path: Path):
    path = tmp_path / "old.pt"
    data = old_file({"w": torch.arange(300)})
    before, storage, shape = data.split(b"M,\x01")
    shape, _, keys = shape.partition(b".\x80\x02]")
    no_keys = b".\x80\x02]." + bytes(4000)
    assert keys
    why = outcome(path, before + b"J\xff\xff\xff\x7f" + storage + b"M,\x01" + shape + no_keys)
    assert "its tensors are larger than the file" in why
    why = outcome(path, before + b"M,\x01" + storage + b"M,\x02" + shape + no_keys)
    assert "a tensor is larger than its data" in why
    path.write_bytes(before + b"M,\x01" + storage + b"M,\x01" + shape + no_keys)
    assert not _torch_file(path)["w"].any(), "memory of this process"


def test_the_type_that_is_refused_is_named(tmp_path: Path):
    path = tmp_path / "new.pt"
    torch.save({"about": io.StringIO}, path)
    with pytest.raises(UsageError, match=r"new\.pt holds _io\.StringIO, which torch\.load"):
        _torch_file(path)


@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_a_dcp_folder_of_torch_2_15(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """It pickles six values of a tensor's properties, the last of which are its strides."""
    of_today: Any = TensorProperties.__getstate__

    def six(properties: Any) -> Any:
        return (*of_today(properties)[:5], (1, 4))

    monkeypatch.setattr(TensorProperties, "__getstate__", six)
    dcp.save({"w": torch.ones(4, 3).half()}, checkpoint_id=tmp_path, no_dist=True)
    _, found = _Folder(tmp_path).create_global_plan([])
    stored: Any = found.state_dict_metadata["w"]
    properties = stored.properties
    assert properties == TensorProperties(torch.float16)
    assert type(properties) is TensorProperties
