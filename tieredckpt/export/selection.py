"""The part of a checkpoint to export: which keys, under which names, in which types. No I/O."""

from __future__ import annotations

import difflib
import fnmatch
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from tieredckpt.errors import IntegrityError, UsageError
from tieredckpt.format.nested import Nested, Real, real_path
from tieredckpt.format.plain import MAX_DEPTH
from tieredckpt.format.plan import MAX_NAMES

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
"""By name of ``--dtype``."""
CAST = frozenset((torch.float64, torch.float32, torch.float16, torch.bfloat16))
"""Types that are cast. Smaller ones mean something only together with their scales."""

Path = tuple[str | int, ...]
RealPath = tuple[str | int | Real, ...]


@dataclass(frozen=True, slots=True)
class Key:
    """One key of the checkpoint, and the place of its value in the exported state."""

    stored: str
    """Its flat name in the checkpoint."""
    path: RealPath
    """Keys of the exported, nested state."""

    @property
    def name(self) -> str:
        """The flat name in the export, as DCP joins a path."""
        return name_of(self.path)


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
    empty: tuple[RealPath, ...] = ()
    """Of dicts that may have nothing in them."""


def select(
    metadata: Metadata,
    keys: Sequence[str] = (),
    strip: str = "",
    dtype: torch.dtype | None = None,
    wrappers: Collection[str] = (),
    nested: Nested | None = None,
) -> Selection:
    """Choose keys of a checkpoint.

    Args:
        metadata: Of the checkpoint.
        keys: Globs on flat names. A key is chosen if one matches; none: all keys.
        strip: A prefix that is removed from the names that have it.
        dtype: What floating tensors are cast to; None: their own types.
        wrappers: Keys that were saved as inner tensors, which no other program can put together.

        nested: The keys that are no text.

    Raises:
        UsageError: A glob matches nothing, a wrapper matches, or two keys would have one name.
    """
    nested = nested or {}
    tensors: list[TensorKey] = []
    values: list[Key] = []
    stored_bytes = 0
    _check_globs(keys, list(metadata.state_dict_metadata))
    for name, stored in metadata.state_dict_metadata.items():
        if not _matches(name, keys):
            continue
        if name in wrappers:
            raise UsageError(
                f"{name!r} was saved as the inner tensors of a wrapper subclass, which only "
                "engine.load puts together: leave it out (--keys)",
                state_key=name,
            )
        path = stripped(real_path(recorded_path(name, metadata.planner_data), nested), strip)
        if not isinstance(stored, TensorStorageMetadata):
            values.append(Key(name, path))
            continue
        own = stored.properties.dtype
        to = dtype if dtype is not None and own in CAST else own
        tensors.append(TensorKey(name, path, tuple(stored.size), to))
        stored_bytes += math.prod(stored.size) * own.itemsize
    _check_names([*tensors, *values])
    empty = tuple(stripped(real_path(path, nested), strip) for path in _empty(nested, keys))
    return Selection(tuple(tensors), tuple(values), stored_bytes, empty)


def _matches(name: str, globs: Sequence[str]) -> bool:
    return not globs or any(fnmatch.fnmatchcase(name, glob) for glob in globs)


def _empty(nested: Nested, globs: Sequence[str]) -> list[Path]:
    return [p for p, keys in nested.items() if keys == {} and _matches(name_of(p), globs)]


def name_of(path: RealPath) -> str:
    """The flat name, as DCP joins a path."""
    return ".".join(map(str, path))


def in_doubt(metadata: Metadata, keys: Sequence[str], nested: Nested) -> tuple[list[Path], ...]:
    """Where the names of the chosen keys leave the state in doubt, with what is known of it.

    Returns:
        Paths of dicts whose keys are decimal text, and may have been numbers; and of what was
        empty, so that it was not saved: a place of a list that has later ones, or a dict.
    """
    chosen = [name for name in metadata.state_dict_metadata if _matches(name, keys)]
    paths = [recorded_path(name, metadata.planner_data) for name in chosen]
    inside: dict[Path, set[Any]] = {}
    for path in (*paths, *_empty(nested, keys)):
        for depth, at in enumerate(real_path(path, nested)):
            inside.setdefault(path[:depth], set()).add(at)
    text_keys, missing = [], []
    for path, there in inside.items():
        if all(isinstance(at, str) and at.isdecimal() for at in there):
            text_keys.append(path)
        places = {at for at in there if isinstance(at, int)}
        missing += [(*path, n) for n in range(len(places)) if n not in places]
        if "param_groups" in there and "state" not in there:  # an optimizer's
            missing.append((*path, "state"))
    return text_keys, missing


def recorded_path(name: str, planner_data: object) -> Path:
    """The path that DCP's planner recorded for a flat name; the name itself if it did not.

    Raises:
        IntegrityError: It is deeper, or a place in a list higher, than those of any state.
    """
    mapped = planner_data.get(name) if isinstance(planner_data, dict) else None
    if not mapped or not isinstance(mapped, tuple) or {*map(type, mapped)} - {str, int}:
        return (name,)
    places = [at for at in mapped if isinstance(at, int)]
    if max(places, key=abs, default=0).bit_length() > 64 or ".".join(map(str, mapped)) != name:
        return (name,)
    if len(mapped) > MAX_DEPTH or any(not 0 <= at < MAX_NAMES for at in places):
        raise IntegrityError(f"the plan has a path that no state has, of {name[:200]!r}")
    return mapped


def stripped(path: RealPath, prefix: str) -> RealPath:
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
    return (rest[0] if isinstance(rest[0], Real) else str(rest[0]), *rest[1:]) if rest else path


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
