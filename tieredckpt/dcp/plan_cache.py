"""The plan of a stream's last save, reused for as long as the structure stays what it was.

Equal structure digests mean that every piece lies where it lay; equal metadata means that the rest
of the plan is equal too. The comparison is stricter than ``==``, which ignores extra attributes of
DCP's data classes and takes 1 for True.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from tieredckpt.dcp.metadata import Places, to_plan
from tieredckpt.format.plan import encode_plan
from tieredckpt.format.plan_record import encoded_plan_id

_NOT_OURS = ("storage_data", "state_dict_metadata")


@dataclass(frozen=True, slots=True)
class EncodedPlan:
    """A plan as it is committed: its id (32 hex digits) and its bytes."""

    id: str
    data: bytes


def same_plain(one: object, other: object) -> bool:
    """Whether two values are equal in value and type all the way down. False if in doubt."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        assert isinstance(other, dict)
        return len(one) == len(other) and all(
            same_plain(a, b) for a, b in zip(one.items(), other.items(), strict=True)
        )
    if isinstance(one, list | tuple):
        assert isinstance(other, list | tuple)
        return len(one) == len(other) and all(map(same_plain, one, other))
    if isinstance(one, _COMPARABLE):
        return bool(one == other)
    return one is None


_COMPARABLE = (str, bytes, int, float, complex, torch.dtype, torch.layout, torch.memory_format)


def _same_tensor(one: TensorStorageMetadata, other: TensorStorageMetadata) -> bool:
    # By their dicts: several times faster than the dataclasses' own ==, and extra attributes show.
    mine, theirs = vars(one.properties), vars(other.properties)
    return (
        one.size == other.size
        and mine == theirs
        and len(one.chunks) == len(other.chunks)
        and all(vars(a) == vars(b) for a, b in zip(one.chunks, other.chunks, strict=True))
        and len(vars(one)) == len(vars(other)) == 3
        and len(mine) == 5
        and all(len(vars(chunk)) == 2 for chunk in one.chunks)
    )


class _Snapshot:
    """What a metadata object said when it was encoded; later changes to it do not show."""

    def __init__(self, metadata: Metadata) -> None:
        self._stored = dict(metadata.state_dict_metadata)
        self._rest = copy.deepcopy(self._attributes(metadata))

    @staticmethod
    def _attributes(metadata: Metadata) -> dict[str, Any]:
        found = {key: value for key, value in vars(metadata).items() if key not in _NOT_OURS}
        if metadata.storage_meta is not None:
            found["storage_meta"] = dict(vars(metadata.storage_meta))
        return found

    def matches(self, metadata: Metadata) -> bool:
        stored = metadata.state_dict_metadata
        if len(stored) != len(self._stored):
            return False
        for (name, one), (name_before, other) in zip(
            stored.items(), self._stored.items(), strict=True
        ):
            if name != name_before or type(one) is not type(other):
                return False
            if isinstance(one, TensorStorageMetadata):
                assert isinstance(other, TensorStorageMetadata)
                if one is not other and not _same_tensor(one, other):
                    return False
            elif vars(one) or vars(other):
                return False
        return same_plain(self._attributes(metadata), self._rest)


class PlanCache:
    """The last plan of one stream."""

    def __init__(self) -> None:
        self._structures: tuple[bytes, ...] = ()
        self._snapshot: _Snapshot | None = None
        self._encoded: EncodedPlan | None = None
        self.builds = 0
        """How often a plan was built and encoded."""

    def plan_for(
        self,
        metadata: Metadata,
        structures: Sequence[bytes],
        places: Callable[[], Places],
        *,
        partial: bool = False,
    ) -> EncodedPlan:
        """The plan of a save.

        Args:
            metadata: What DCP's planner made.
            structures: Structure digest of each segment, in order.
            places: Finds out where the pieces lie; called only if the plan must be built.
            partial: It is one rank's part only, see :func:`~tieredckpt.dcp.metadata.to_plan`.

        Raises:
            UsageError: As :func:`~tieredckpt.dcp.metadata.to_plan`; the cache stays as it was.
        """
        if (
            self._encoded is not None
            and self._snapshot is not None
            and self._structures == tuple(structures)
            and self._snapshot.matches(metadata)
        ):
            return self._encoded
        plan = to_plan(metadata, places(), structures, partial=partial)
        data = encode_plan(plan)
        self._encoded = EncodedPlan(encoded_plan_id(data), data)
        self._snapshot = _Snapshot(metadata)
        self._structures = tuple(structures)
        self.builds += 1
        return self._encoded
