"""Lays out safetensors files, sharded and indexed as Hugging Face's libraries do it.

A file is the length of its header (8 bytes), the header in JSON, and the tensors without gaps.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence

import torch

from tieredckpt.errors import UsageError
from tieredckpt.export.files import Files, tensor_in
from tieredckpt.export.selection import Selection, TensorKey

NAMES: Mapping[torch.dtype, str] = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8",
    torch.bool: "BOOL", torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ", torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
}  # fmt: skip
"""The types that the library reads into tensors."""

INDEX = "model.safetensors.index.json"
ALIGN_BYTES = 64
HEADER_BYTES_MAX = 100_000_000
"""The library opens no longer one."""


def shards_of(tensors: Sequence[TensorKey], shard_bytes: int) -> list[list[TensorKey]]:
    """Split tensors, in their order, into shards of at most ``shard_bytes``.

    A larger tensor gets a shard of its own. There is at least one shard.
    """
    shards: list[list[TensorKey]] = [[]]
    size = 0
    for each in tensors:
        if shards[-1] and size + each.size_bytes > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(each)
        size += each.size_bytes
    return shards


def header_of(tensors: Sequence[TensorKey]) -> tuple[bytes, list[TensorKey]]:
    """The bytes before the tensors, and the order of the tensors.

    Raises:
        UsageError: A type that the format does not have, or too many tensors for one file.
    """
    # The largest types first: so each tensor is aligned to its type, without gaps.
    ordered = sorted(tensors, key=lambda each: -each.dtype.itemsize)
    table: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for each in ordered:
        if each.dtype not in NAMES:
            raise UsageError(
                f"{each.stored!r} is of {each.dtype}, which safetensors does not have: leave it "
                "out with --keys, or export another format",
                state_key=each.stored,
            )
        begin, end = end, end + each.size_bytes
        table[each.name] = {
            "dtype": NAMES[each.dtype], "shape": each.shape, "data_offsets": [begin, end],
        }  # fmt: skip
    if "__metadata__" in (each.name for each in ordered):
        raise UsageError("safetensors has no tensor of the name '__metadata__'")
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGN_BYTES)
    if len(text) > HEADER_BYTES_MAX:
        raise UsageError("too many tensors for one file: choose smaller shards (--shard-size)")
    return struct.pack("<Q", len(text)) + text, ordered


def make(files: Files, selection: Selection, shard_bytes: int) -> dict[str, torch.Tensor]:
    """Make the files of an export, without the data.

    Returns:
        By key of the checkpoint, the tensor in the mapped file that is to be filled.

    Raises:
        UsageError: As :func:`header_of`, or there is no tensor.
        OSError: The disk is full.
    """
    if not selection.tensors:
        raise UsageError("no tensor is among the keys: safetensors holds nothing else")
    shards = shards_of(selection.tensors, shard_bytes)
    found: dict[str, torch.Tensor] = {}
    index: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        if len(shards) == 1:
            name = "model.safetensors"
        header, ordered = header_of(shard)
        size = len(header) + sum(each.size_bytes for each in ordered)
        mapped = files.map(files.folder / name, size)
        mapped[: len(header)] = header
        at = len(header)
        for each in ordered:
            found[each.stored] = tensor_in(mapped, at, each)
            index[each.name] = name
            at += each.size_bytes
    if len(shards) > 1:
        total = sum(each.size_bytes for each in selection.tensors)
        table = {"metadata": {"total_size": total}, "weight_map": index}
        text = json.dumps(table, indent=2).encode()
        files.map(files.folder / INDEX, len(text))[:] = text
    return found
