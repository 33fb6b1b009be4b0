"""A planner with which one rank writes a state as many ranks do: each matrix in pieces."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)


class InPieces(DefaultSavePlanner):
    """Cuts each matrix into three pieces of different sizes, along one dimension."""

    def __init__(self, dim: int = 0) -> None:
        super().__init__()
        self.dim = dim

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        items: list[WriteItem] = []
        for item in plan.items:
            data = item.tensor_data
            if data is None or len(data.size) != 2 or not data.size.numel():
                items.append(item)
                continue
            cuts = [0, 1, data.size[self.dim] // 2, data.size[self.dim]]
            for number, (begin, end) in enumerate(itertools.pairwise(cuts)):
                offsets, sizes = [0, 0], list(data.size)
                offsets[self.dim], sizes[self.dim] = begin, end - begin
                chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
                piece = TensorWriteData(chunk, data.properties, data.size)
                index = MetadataIndex(item.index.fqn, torch.Size(offsets), number)
                items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=piece))
        self.plan = SavePlan(items, planner_data=plan.planner_data)
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Any:
        value = self.state_dict[index.fqn]
        for item in self.plan.items:
            if item.index == index and item.type == WriteItemType.SHARD:
                chunk = item.tensor_data.chunk
                start, length = chunk.offsets[self.dim], chunk.sizes[self.dim]
                return value.narrow(self.dim, start, length)
        return value
