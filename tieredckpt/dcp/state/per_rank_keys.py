"""Names and bytes of per-rank values, for planner and writer.

A per-rank value is one bytes leaf under a key with its coordinate, so that no two ranks share a
name and DCP's flattening does not change it. The leaf begins with a line with the coordinate and
the number of coordinates; a ``torch.save`` stream follows.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

MARK = b"tieredckpt.per_rank "
"""The first bytes of every leaf; also found inside of a value that contains a leaf."""

VERSION = 1
HEADER_BYTES_MAX = 200
COUNT_MAX = 1 << 24

_KIND = r"[A-Za-z0-9_-]{1,64}"
_KEY = re.compile(
    rf"(?:(?P<place>.*)\.)?per_rank:(?P<kind>{_KIND}):(?P<index>\d{{1,8}})", re.DOTALL
)
_HEADER = re.compile(
    rb"tieredckpt\.per_rank (\d{1,4}) (" + _KIND.encode() + rb") (\d{1,8}) (\d{1,8})\n"
)


@dataclass(frozen=True, slots=True, order=True)
class Coordinate:
    """A position among others: rank 3 of 8, data-parallel rank 0 of 4."""

    kind: str
    index: int
    size: int

    @property
    def key(self) -> str:
        """The key of the value in the dict that DCP sees; the size is not in it."""
        return f"per_rank:{self.kind}:{self.index}"

    def __str__(self) -> str:
        return f"{self.kind} {self.index} of {self.size}"


def is_valid_kind(kind: object) -> bool:
    """Whether ``kind`` may be part of a key."""
    return isinstance(kind, str) and re.fullmatch(_KIND, kind) is not None


def parse_key(name: str) -> tuple[str, str, int] | None:
    """Place (the keys before it), kind and index of a flattened key; None for any other key."""
    found = _KEY.fullmatch(name)
    return (found["place"] or "", found["kind"], int(found["index"])) if found else None


def make_leaf(coordinate: Coordinate, stream: bytes) -> bytes:
    """The leaf of a value that ``torch.save`` wrote as ``stream``."""
    header = f"{VERSION} {coordinate.kind} {coordinate.index} {coordinate.size}\n"
    return MARK + header.encode() + stream


def read_leaf(leaf: object) -> tuple[Coordinate, memoryview] | None:
    """Coordinate and stream of a leaf; None if it is not one of a known version."""
    if not isinstance(leaf, bytes):
        return None
    found = _HEADER.match(leaf[:HEADER_BYTES_MAX])
    if found is None or int(found[1]) != VERSION:
        return None
    coordinate = Coordinate(found[2].decode(), int(found[3]), int(found[4]))
    if not coordinate.index < coordinate.size <= COUNT_MAX:
        return None
    return coordinate, memoryview(leaf)[found.end() :]


def coordinate_of(value: object) -> Coordinate | None:
    """The coordinate of a leaf of the state, loaded or not; None if it is no per-rank value."""
    if isinstance(value, Found):
        return value.own
    read = read_leaf(value)
    return None if read is None else read[0]


@dataclass(slots=True)
class Found:
    """The loaded leaves, which :class:`SafeLoadPlanner` puts in the place of the own leaf.

    Attributes:
        own: This rank's coordinate, for a state that is loaded again after a load that failed.
        leaves: By key; the own one alone if no other is needed.
        allow: Types that may be unpickled besides the usual ones.
        unsafe_pickle: Unpickle anything.
    """

    own: Coordinate
    leaves: dict[str, Any] = field(default_factory=dict)
    allow: tuple[Any, ...] = ()
    unsafe_pickle: bool = False


def saved_places(names: Iterable[str]) -> dict[str, dict[str, dict[int, str]]]:
    """The per-rank keys among the flattened keys of a checkpoint, by place, kind and index."""
    found: dict[str, dict[str, dict[int, str]]] = {}
    for name in names:
        if "per_rank:" in name and (parsed := parse_key(name)) is not None:
            place, kind, index = parsed
            found.setdefault(place, {}).setdefault(kind, {})[index] = name
    return found


def launched_ranks() -> int:
    """The number of ranks in the environment of torchrun and other launchers; else 1."""
    text = os.environ.get("WORLD_SIZE", "")
    return int(text) if text.isdecimal() else 1
