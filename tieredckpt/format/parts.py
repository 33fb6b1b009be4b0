"""Parts of wrapper tensors: their names, and the tensors of the state that they make up.

A wrapper subclass of a tensor has no bytes of its own, but inner tensors and a context. Each rank
stores the inner tensors of its piece as tensors of their own, the parts. Their names state the key,
the place inside of the wrapper, and the piece; that of the first part also the kind, which is
everything else. So segments without their plan describe it, too. docs/reference/format/plan.md is
normative.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, NamedTuple

import msgspec

from tieredckpt.errors import IntegrityError
from tieredckpt.format.plain import decode_plain, encode_plain
from tieredckpt.format.plan import Chunk, Entry, TensorEntry

MARK = ".tieredckpt.part:"
"""In every part's name, and in no key that a user may save."""

_NUMBERS = r"(?:[0-9]{1,19}(?:,[0-9]{1,19})*)?"
_NAME = re.compile(
    rf"(?P<key>.*){re.escape(MARK)}(?P<path>[^:]+):(?P<offsets>{_NUMBERS}):(?P<kind>(?:[0-9a-f]{{2}})*)",
    re.DOTALL,
)


class PartName(NamedTuple):
    """The name of a part.

    Attributes:
        key: Of the wrapper in the state.
        path: Names of the inner tensors on the way to this one, with dots between them.
        offsets: Of the rank's piece in the wrapper.
        kind: Of the piece, encoded; empty for all but its first part.
    """

    key: str
    path: str
    offsets: tuple[int, ...]
    kind: bytes = b""

    def __str__(self) -> str:
        offsets = ",".join(map(str, self.offsets))
        return f"{self.key}{MARK}{self.path}:{offsets}:{self.kind.hex()}"


def parse_part(name: str) -> PartName | None:
    """The name of a part as its fields; None for any other name."""
    found = _NAME.fullmatch(name) if MARK in name else None
    if found is None:
        return None
    offsets = tuple(map(int, filter(None, found["offsets"].split(","))))
    return PartName(found["key"], found["path"], offsets, bytes.fromhex(found["kind"]))


Tree = tuple[str, tuple[int, ...], Any, dict[str, Any]]
"""Of a wrapper: class, shape, description of the context, and by name the tree of each inner
tensor, or None for a plain one. Plain data."""


class Kind(NamedTuple):
    """All that one piece of a wrapper is besides its parts.

    Attributes:
        dtype: That the piece appears to have.
        shape: Of the whole wrapper, over all pieces.
        tree: Of the piece.
    """

    dtype: str
    shape: tuple[int, ...]
    tree: Tree

    @property
    def sizes(self) -> tuple[int, ...]:
        """Of the piece."""
        return self.tree[1]

    def encode(self) -> bytes:
        """As plain data. Raises UsageError if the tree holds anything else."""
        return encode_plain(tuple(self))


def decode_kind(data: bytes) -> Kind:
    """The inverse of :meth:`Kind.encode`. Raises IntegrityError if it is malformed."""
    match decode_plain(data):
        case (str(), tuple() as shape, tree) as found if _is_shape(shape) and _is_tree(tree):
            return Kind(*found)
    raise IntegrityError("the kind of a wrapper's piece is malformed")


def _is_shape(shape: tuple[Any, ...]) -> bool:
    return all(type(size) is int and size >= 0 for size in shape)


def _is_tree(tree: object) -> bool:
    match tree:
        case (str(), tuple() as shape, _, dict() as inner):
            below = [each for each in inner.values() if each is not None]
            return _is_shape(shape) and all(map(_is_tree, below))
    return False


class Piece(NamedTuple):
    """One piece of a wrapper.

    Attributes:
        kind: Its kind.
        chunk: Its place in the wrapper; as its place in a segment, that of its first part.
        names: Of its parts, by path.
    """

    kind: Kind
    chunk: Chunk
    names: dict[str, str]


Pieces = dict[tuple[str, tuple[int, ...]], Piece]
"""By key and offsets."""


def join_parts(entries: Iterable[Entry]) -> tuple[list[Entry], Pieces]:
    """The tensors and values of the state, each wrapper instead of its parts; and its pieces.

    Of several kinds of one piece the first counts, as of several copies of a plain one. A wrapper's
    entry may have plain pieces, too: those of ranks that have a plain tensor there.

    Raises:
        IntegrityError: A kind is missing or malformed, or the pieces do not fit together.
    """
    found: dict[str, Entry] = {}
    pieces: Pieces = {}
    kinds: dict[bytes, Kind] = {}
    chunks: dict[str, list[Chunk]] = {}
    for entry in entries:
        part = parse_part(entry.name)
        if part is None:
            found[entry.name] = entry
            continue
        piece = pieces.get((part.key, part.offsets))
        # Of a rebuilt plan it may have several copies.
        if not isinstance(entry, TensorEntry) or {c.sizes for c in entry.chunks} != {entry.shape}:
            raise IntegrityError(f"the part {entry.name!r} is malformed")
        if piece is None:
            kind = kinds.get(part.kind) or decode_kind(part.kind)
            kinds[part.kind] = kind
            if not _fits(part, kind):
                raise IntegrityError(f"the part {entry.name!r} is outside of its tensor")
            chunk = Chunk(part.offsets, kind.sizes, *entry.chunks[0][2:])
            piece = pieces[part.key, part.offsets] = Piece(kind, chunk, {})
            chunks.setdefault(part.key, []).append(chunk)
            whole = msgspec.structs.replace(
                entry, name=part.key, dtype=kind.dtype, shape=kind.shape, chunks=()
            )
            found.setdefault(part.key, whole)
        piece.names.setdefault(part.path, entry.name)
    for key, own in chunks.items():
        known = found[key]
        if not isinstance(known, TensorEntry) or any(
            len(each.sizes) != len(known.shape) for each in own
        ):
            raise IntegrityError(f"the parts of {key!r} are not of one tensor")
        found[key] = msgspec.structs.replace(known, chunks=(*known.chunks, *own))
    return list(found.values()), pieces


def _fits(part: PartName, kind: Kind) -> bool:
    ends = zip(part.offsets, kind.sizes, kind.shape, strict=False)
    same = len(part.offsets) == len(kind.sizes) == len(kind.shape)
    return same and all(at + n <= size for at, n, size in ends)
