"""Hooks of DCP on a tensor, as Megatron-FSDP sets them."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType


def hook(tensor: torch.Tensor, pieces: list[tuple[int, torch.Tensor]], size: torch.Size) -> None:
    """Have DCP plan ``tensor`` as pieces of a tensor of ``size``, each of which begins at a row."""
    chunks = [
        ChunkStorageMetadata(torch.Size((row, 0)), torch.Size(piece.shape)) for row, piece in pieces
    ]

    def items(fqn: str, _: object) -> list[WriteItem]:
        # Not create_from_tensor, whose is_pinned() no DTensor of torch 2.11 knows.
        properties = TensorProperties(tensor.dtype, tensor.layout, tensor.requires_grad)
        return [
            WriteItem(
                MetadataIndex(fqn, chunk.offsets, number),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, size),
            )
            for number, chunk in enumerate(chunks)
        ]

    def shard(index: MetadataIndex) -> torch.Tensor:
        return next(piece for row, piece in pieces if (row, 0) == tuple(index.offset or ()))

    hooked: Any = tensor
    hooked.__create_write_items__ = items
    hooked.__create_chunk_list__ = lambda: chunks
    hooked.__get_tensor_shard__ = shard
