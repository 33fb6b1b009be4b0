"""Lays out what torch itself reads: a ``torch.save`` file, and a folder of stock DCP.

Torch writes both, from tensors in memory that nobody ever touched and without their data
(``skip_data``); then the data is read into its place. ``skip_data`` leaves out the data of every
tensor, also of those inside other values: these are copied in afterwards, or written as bytes.
"""

from __future__ import annotations

import functools
import io
import math
import mmap
import pickle
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.utils._pytree import tree_leaves

from tieredckpt.dcp.state.planner import safe_loads
from tieredckpt.dcp.state.value_archive import entries
from tieredckpt.errors import IntegrityError, UsageError
from tieredckpt.export.files import Files, nowhere, tensor_in
from tieredckpt.export.selection import RealPath, Selection
from tieredckpt.format.segment import round_up

ALIGN_BYTES = 64
DATA = "__0_0.distcp"
_GAPS_MAX = 1 << 18


def loadable(name: str, data: bytes) -> Any:
    """A value that ``torch.load(weights_only=True)`` accepts, from DCP's stream of it.

    Raises:
        UsageError: It does not accept it, or a tensor hides in it.
    """
    value = safe_loads(name, io.BytesIO(data), device="cpu")
    try:
        torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")
    except (pickle.UnpicklingError, RuntimeError) as error:
        raise UsageError("torch.load(weights_only=True) refuses it") from error
    tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    storages = {each.untyped_storage()._cdata for each in tensors}
    if len(storages) != sum(each.startswith("data/") for each in entries(memoryview(data))):
        raise UsageError("it has tensors that are not in plain containers")
    return value


def make_torch(
    files: Files, name: str, selection: Selection, values: Mapping[str, Any]
) -> dict[str, torch.Tensor]:
    """Make a ``torch.save`` file of the nested state, without the data.

    Args:
        files: Where to.
        name: Of the file.
        selection: What to export.
        values: By key of the checkpoint, those of its values that are exported.

    Returns:
        By key of the checkpoint, the tensor in the mapped file that is to be filled.

    Raises:
        OSError: The disk is full.
    """
    path = files.folder / name
    kept = [each for each in selection.values if each.stored in values]
    memory = nowhere(sum(round_up(each.size_bytes, ALIGN_BYTES) for each in selection.tensors))
    root = Node()
    for bare in selection.empty:
        root.put(bare, Node())
    at = 0
    for each in selection.tensors:
        root.put(each.path, tensor_in(memory, at, each))
        at += round_up(each.size_bytes, ALIGN_BYTES)
    for key in kept:
        root.put(key.path, values[key.stored])
    with torch.serialization.skip_data():
        torch.save(root.built(), path)
    files.reserve(path)
    with torch.serialization.set_default_mmap_options(mmap.MAP_SHARED):
        state = torch.load(path, mmap=True, weights_only=True)
    for key in kept:
        stored, wanted = (tree_leaves(v) for v in (_at(state, key.path), values[key.stored]))
        for into, value in zip(stored, wanted, strict=True):
            if isinstance(value, torch.Tensor):
                into.detach().copy_(value.detach())
    found: dict[str, torch.Tensor] = {}
    for each in selection.tensors:
        tensor = _at(state, each.path)
        assert isinstance(tensor, torch.Tensor)
        found[each.stored] = tensor
    return found


class Node(dict[Any, Any]):
    """A dict or list that is not built yet: values and nodes, by their parts of paths."""

    def put(self, path: RealPath, value: Any) -> None:
        into = self
        for at in path[:-1]:
            into = into.setdefault(at, Node())
        into[path[-1]] = value

    def built(self, gaps_left: list[int] | None = None) -> Any:
        """The dict or list, with all that is in it.

        Args:
            gaps_left: One number: how many empty places its lists may have.

        Raises:
            IntegrityError: It has paths that no state has.
        """
        gaps_left = gaps_left or [_GAPS_MAX]
        found = {
            at: each.built(gaps_left) if isinstance(each, Node) else each
            for at, each in self.items()
        }
        if places := [at for at in found if isinstance(at, int)]:
            gaps_left[0] -= max(places) + 1 - len(places)
            if len(places) < len(found) or min(places) < 0 or gaps_left[0] < 0:
                raise IntegrityError("the plan's paths of values do not fit each other")
            return [found.get(number) for number in range(max(places) + 1)]
        return {getattr(at, "key", at): each for at, each in found.items()}


def _at(state: Any, path: RealPath) -> Any:
    return functools.reduce(lambda inner, at: inner[getattr(at, "key", at)], path, state)


def make_dcp(
    files: Files, selection: Selection, values: Mapping[str, bytes]
) -> dict[str, torch.Tensor]:
    """Make a folder of DCP's ``FileSystemReader``, without the data; each tensor is one piece.

    Args:
        files: Where to.
        selection: What to export.
        values: By key of the checkpoint, each of its values as DCP's stream.

    Returns:
        By key of the checkpoint, the tensor in the mapped file that is to be filled.

    Raises:
        OSError: The disk is full.
    """
    memory = nowhere(max((each.size_bytes for each in selection.tensors), default=0))
    stored: dict[str, STORAGE_TYPES] = {}
    places: dict[MetadataIndex, _StorageInfo] = {}
    with (files.folder / DATA).open("wb") as file:

        def place(index: MetadataIndex, begin: int) -> None:
            places[index] = _StorageInfo(DATA, begin, file.tell() - begin)

        for each in selection.tensors:
            begin = file.seek(round_up(file.tell(), ALIGN_BYTES))
            with torch.serialization.skip_data():
                torch.save(tensor_in(memory, 0, each), file)
            start, size = torch.Size([0] * len(each.shape)), torch.Size(each.shape)
            piece = ChunkStorageMetadata(start, size)
            stored[each.name] = TensorStorageMetadata(TensorProperties(each.dtype), size, [piece])
            place(MetadataIndex(each.name, start, 0), begin)
        for key in selection.values:
            begin = file.tell()
            file.write(values[key.stored])
            stored[key.name] = BytesStorageMetadata()
            place(MetadataIndex(key.name), begin)
    both = (*selection.tensors, *selection.values)
    metadata = Metadata(
        stored,
        planner_data={each.name: each.path for each in both},
        storage_data=places,
        storage_meta=StorageMeta(),
    )
    with (files.folder / ".metadata").open("wb") as file:
        pickle.dump(metadata, file)
    files.reserve(files.folder / ".metadata")  # it is synced with the others
    view = memoryview(files.map(files.folder / DATA))
    found: dict[str, torch.Tensor] = {}
    for each in selection.tensors:
        info = places[MetadataIndex(each.name, [0] * len(each.shape))]
        if math.prod(each.shape):
            blob = view[info.offset : info.offset + info.length]
            found[each.stored] = tensor_in(entries(blob)["data/0"], 0, each)
    return found
