"""Files of ``torch.save`` and DCP folders as ``tieredckpt import`` reads them."""

from __future__ import annotations

import io
import pickle
import struct
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorProperties

from tests.support.forged_values import archive, call, mapped, number, text
from tieredckpt.config.schema import Config
from tieredckpt.dcp.state import values
from tieredckpt.errors import IntegrityError, TieredCkptError, UsageError
from tieredckpt.export.imports import _Folder, _torch_file, import_checkpoint


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
    with pytest.raises(UsageError, match=r"new\.pt holds _io\.StringIO, which a load"):
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


@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_metadata_of_any_size_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Objects of a folder of 100,000 pieces take more than those of any large value."""
    dcp.save({str(n): torch.ones(2) for n in range(300)}, checkpoint_id=tmp_path, no_dist=True)
    monkeypatch.setattr(values, "OBJECT_BYTES", 0)
    assert len(_Folder(tmp_path).names) == 300


def test_parameters_keep_their_attributes(tmp_path: Path):
    tied = torch.nn.Parameter(torch.arange(6.0).reshape(2, 3).t(), requires_grad=False)
    vars(tied).update(share=0, about={"axis": (1, None)})
    torch.save({"w": tied, "again": tied}, tmp_path / "new.pt")
    found = _torch_file(tmp_path / "new.pt")
    made = found["w"]
    assert made is found["again"]
    assert type(made) is torch.nn.Parameter
    assert not made.requires_grad
    assert (made.stride(), vars(made)) == ((1, 3), vars(tied))
    assert torch.equal(made, tied)
    data = (tmp_path / "new.pt").read_bytes().replace(b"share", b"shape")
    assert "a parameter that no writer makes" in outcome(tmp_path / "new.pt", data)


def test_two_keys_of_one_flat_name_are_refused(tmp_path: Path):
    torch.save({"a.b": 1, "a": {"b": 2}}, tmp_path / "new.pt")
    with pytest.raises(IntegrityError, match=r"duplicated flatten key a\.b"):
        import_checkpoint(Config(), tmp_path / "new.pt", 1)


# --- forged -----------------------------------------------------------------------------------


def peak_of(read: Callable[[Path], Any], path: Path) -> int:
    """Most memory that it took to refuse ``path``, by one of our errors."""
    tracemalloc.start()
    try:
        with pytest.raises(TieredCkptError):
            read(path)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def twice(times: int) -> Any:
    """A tuple of a tuple twice, and so on: of 2 ** times parts, and short as a stream."""
    found: Any = ()
    for _ in range(times):
        found = (found, found)
    return found


OF_METADATA: dict[str, bytes] = {
    "place in the memo": b"\x80\x04Nr\xff\xff\xff\x7f.",
    "bytes": b"\x80\x04\x8e" + struct.pack("<Q", 1 << 40) + b".",
    "bytes to change": b"\x80\x05\x96" + struct.pack("<Q", 1 << 34) + b".",
    "frame": b"\x80\x04\x95" + struct.pack("<Q", 1 << 40) + b"N.",
    "number": b"\x80\x04\x8b" + struct.pack("<i", (1 << 31) - 1) + b".",
    "parts": pickle.dumps(Metadata({}, planner_data=twice(40), storage_data={})),
    "parts of a key": pickle.dumps(Metadata({}, storage_data={MetadataIndex("w"): 0})).replace(
        b"\x8c\x01w", pickle.dumps(twice(40))[11:-1]
    ),
}


@pytest.mark.parametrize("what", OF_METADATA)
def test_forged_metadata_takes_no_memory(tmp_path: Path, what: str):
    (tmp_path / ".metadata").write_bytes(OF_METADATA[what])
    assert peak_of(_Folder, tmp_path) < 1 << 20


def test_metadata_with_a_key_of_itself_is_refused(tmp_path: Path):
    whole = pickle.dumps(Metadata({}, storage_data={MetadataIndex("w"): 0}))
    (tmp_path / ".metadata").write_bytes(whole.replace(b"\x8c\x01w", b"h\x0c"))  # of the memo
    with pytest.raises(IntegrityError, match="a key that no writer makes"):
        _Folder(tmp_path)


def compressed() -> bytes:
    """The archive of a long text, deflated."""
    plain, small = io.BytesIO(), io.BytesIO()
    torch.save({"w": "x" * (4 << 20)}, plain)
    with (
        zipfile.ZipFile(plain) as whole,
        zipfile.ZipFile(small, "w", zipfile.ZIP_DEFLATED) as packed,
    ):
        for name in whole.namelist():
            packed.writestr(name, whole.read(name))
    return small.getvalue()


def of_old(program: bytes) -> bytes:
    """A file from before torch 1.6 whose state is ``program``."""
    data = old_file({"w": 1})
    at = data.index(b"\x80\x02}q\x00X\x01\x00\x00\x00w")
    return data[:at] + b"\x80\x02" + program + b"." + b"\x80\x02]."


HUGE = mapped(text("w"), call("builtins.bytearray", number(1 << 33)))
OF_TORCH: dict[str, Callable[[], bytes]] = {
    "compressed": compressed,
    "bytearray": lambda: archive(HUGE),
    "bytearray before torch 1.6": lambda: of_old(HUGE),
}


@pytest.mark.parametrize("what", OF_TORCH)
def test_a_forged_file_of_torch_takes_no_memory(tmp_path: Path, what: str):
    (tmp_path / "forged.pt").write_bytes(OF_TORCH[what]())
    assert peak_of(_torch_file, tmp_path / "forged.pt") < 1 << 20


@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_a_value_that_no_load_could_read_is_refused(tmp_path: Path):
    dcp.save({"note": "text of a value"}, checkpoint_id=tmp_path, no_dist=True)
    data = tmp_path / "__0_0.distcp"
    data.write_bytes(data.read_bytes().replace(b"X\x0f\x00", b"X\xff\x00"))
    folder = _Folder(tmp_path)
    with pytest.raises(IntegrityError, match=r"'note' in __0_0\.distcp is no value of"):
        folder.resolve_data(folder.create_local_plan().items[0])
