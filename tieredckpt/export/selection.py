"""The part of a checkpoint to export: which keys, under which names, in which types. No I/O."""

from __future__ import annotations

import difflib
import fnmatch
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from tieredckpt.errors import UsageError

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
"""By name of ``--dtype``."""
CAST = frozenset((torch.float64, torch.float32, torch.float16, torch.bfloat16))
"""Types that are cast. Smaller ones mean something only together with their scales."""

Path = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Key:
    """One key of the checkpoint, and the place of its value in the exported state."""

    stored: str
    """Its flat name in the checkpoint."""
    path: Path
    """Keys of the exported, nested state."""

    @property
    def name(self) -> str:
        """The flat name in the export, as DCP joins a path."""
        return ".".join(map(str, self.path))


@dataclass(frozen=True, slots=True)
class TensorKey(Key):
    """A tensor, in C order."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    """In the export."""

    @property
    def size_bytes(self) -> int:
        """In the export."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Selection:
    """What is exported; both in the order of the checkpoint."""

    tensors: tuple[TensorKey, ...]
    values: tuple[Key, ...]
    stored_bytes: int
    """Of the tensors, as they are stored."""


def select(
    metadata: Metadata,
    keys: Sequence[str] = (),
    strip: str = "",
    dtype: torch.dtype | None = None,
    wrappers: Collection[str] = (),
) -> Selection:
    """Choose keys of a checkpoint.

    Args:
        metadata: Of the checkpoint.
        keys: Globs on flat names. A key is chosen if one matches; none: all keys.
        strip: A prefix that is removed from the names that have it.
        dtype: What floating tensors are cast to; None: their own types.
        wrappers: Keys that were saved as inner tensors, which no other program can put together.

    Raises:
        UsageError: A glob matches nothing, a wrapper matches, or two keys would have one name.
    """
    tensors: list[TensorKey] = []
    values: list[Key] = []
    stored_bytes = 0
    _check_globs(keys, list(metadata.state_dict_metadata))
    for name, stored in metadata.state_dict_metadata.items():
        if keys and not any(fnmatch.fnmatchcase(name, glob) for glob in keys):
            continue
        if name in wrappers:
            raise UsageError(
                f"{name!r} was saved as the inner tensors of a wrapper subclass, which only "
                "engine.load puts together: leave it out (--keys)",
                state_key=name,
            )
        path = stripped(recorded_path(name, metadata.planner_data), strip)
        if not isinstance(stored, TensorStorageMetadata):
            values.append(Key(name, path))
            continue
        own = stored.properties.dtype
        to = dtype if dtype is not None and own in CAST else own
        tensors.append(TensorKey(name, path, tuple(stored.size), to))
        stored_bytes += math.prod(stored.size) * own.itemsize
    _check_names([*tensors, *values])
    return Selection(tuple(tensors), tuple(values), stored_bytes)


def recorded_path(name: str, planner_data: object) -> Path:
    """The path that DCP's planner recorded for a flat name; the name itself if it did not."""
    mapped = planner_data.get(name) if isinstance(planner_data, dict) else None
    if isinstance(mapped, tuple) and ".".join(map(str, mapped)) == name:
        return mapped
    return (name,)


def stripped(path: Path, prefix: str) -> Path:
    """``path`` without ``prefix``, or as it is if its flat name does not begin with it."""
    left, rest = prefix, list(path)
    while left and rest:
        first = str(rest[0])
        if len(rest) > 1 and left.startswith(f"{first}."):
            left = left[len(first) + 1 :]
            rest.pop(0)
        elif first.startswith(left) and first != left:
            return (first[len(left) :], *rest[1:])
        else:
            return path
    return (str(rest[0]), *rest[1:]) if rest else path


def _check_globs(globs: Sequence[str], names: Sequence[str]) -> None:
    """Raise UsageError if one matches no name: what it was to choose would be left out unnoticed.

    An empty checkpoint is refused, too.
    """
    idle = [each for each in globs or ["*"] if not fnmatch.filter(names, each)]
    if idle:
        near = [key for glob in idle for key in difflib.get_close_matches(glob, names)]
        some = ", ".join((near or names)[:3])
        raise UsageError(f"no key matches {' or '.join(idle)}: its keys are like {some}")


def _check_names(keys: Sequence[Key]) -> None:
    """Raise UsageError if two keys have one name, or one lies inside of another one's value."""
    names: dict[str, str] = {}
    inner = {each.path[:n] for each in keys for n in range(1, len(each.path))}
    for each in keys:
        other = names.setdefault(each.name, each.stored)
        if other != each.stored or each.path in inner:
            raise UsageError(
                f"{each.stored!r} would be exported as {each.name!r}, a name that another key has "
                "too: choose fewer keys, or strip nothing",
                state_key=each.stored,
            )
