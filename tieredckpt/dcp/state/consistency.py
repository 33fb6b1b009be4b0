"""Finds values and tensors of one name that differ between ranks, of which DCP silently keeps one.

Each rank reports in its receipt a digest of what it would have saved under a name that other ranks
may use, too; the coordinator compares them. Values of per-rank objects are compared at every save,
and a difference fails it. Of all else the coordinator warns once. Other values are compared when
the structure of the state is new, since that costs as much as saving them, and so are small
tensors. Each save compares samples of some tensors, in turn.
"""

from __future__ import annotations

import io
import logging
import math
import re
import struct
import warnings
from bisect import bisect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import xxhash
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType

from tieredckpt.dcp.state.items import check_storage
from tieredckpt.dcp.state.per_rank_keys import MARK, parse_key, read_leaf
from tieredckpt.dcp.state.planner import safe_loads
from tieredckpt.dcp.state.wrappers import CLASS_ERRORS, plain_parts
from tieredckpt.errors import TieredCkptError, UsageError

log = logging.getLogger(__name__)

NAMES_MAX = 10_000
"""Names that are compared per save; they are sent to the coordinator with DCP's own plans."""

SAMPLED_MAX = 128
SAMPLE_BYTES = 64 << 10
"""Each save compares so many tensors, of each at most so many bytes: together 8 MiB."""

WARNED_MAX = 10_000
NAMES_SHOWN = 10

Digests = tuple[tuple[str, bytes], ...]
"""Name and digest of each value that a rank would have saved."""


class Turns:
    """Which of some tensors are compared at which step.

    Names and steps are points on a ring, the same on all ranks. A step chooses the names that
    follow it.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._ring = sorted((_point(name), name) for name in names)

    def at(self, step: int) -> list[str]:
        """At most SAMPLED_MAX names."""
        start = bisect(self._ring, (_point(str(step)), ""))
        return [name for _, name in (*self._ring[start:], *self._ring[:start])[:SAMPLED_MAX]]


def _point(text: str) -> int:
    return xxhash.xxh3_64_intdigest(text.encode("utf-8", "surrogatepass"))


@dataclass(slots=True)
class NamesSeen:
    """Names that one stream's saves compared, and on the coordinator those it warned of."""

    compared: frozenset[str] = frozenset()
    turns: Turns = field(default_factory=lambda: Turns(()))
    warned: set[str] = field(default_factory=set)


def digests_to_compare(
    seen: NamesSeen,
    local_plan: SavePlan | None,
    planner: SavePlanner,
    written: Mapping[str, memoryview],
    *,
    step: int,
    alone: bool,
) -> Digests:
    """Digests of this rank's bytes items and whole tensors, also of those left to other ranks.

    Args:
        seen: Of the stream.
        local_plan: The plan that the planner gave to ``prepare_local_plan``.
        planner: Resolves the values that this rank does not write.
        written: The values that this rank writes.
        step: Of the save.
        alone: Whether no other rank takes part in any save.

    Raises:
        UsageError: A per-rank value is inside of another value, where all ranks have one name.
    """
    if alone:
        return ()
    planned = planned_items(local_plan, planner)
    items = {
        each.index.fqn: each
        for each in planned
        if each.type == WriteItemType.BYTE_IO or _has_all_elements(each)
    }
    new = items.keys() != seen.compared
    found = _value_digests(items.values(), planner, written, new=new)
    tensors = {name: each for name, each in items.items() if each.type != WriteItemType.BYTE_IO}
    if new:
        seen.compared, seen.turns = frozenset(items), Turns(tensors)
    if getattr(planner, "dedup_save_to_lowest_rank", False):
        return tuple(found)  # of tensors rank 0's are meant
    small = [name for name, each in tensors.items() if _bytes_of(each) <= SAMPLE_BYTES]
    chosen = dict.fromkeys([*seen.turns.at(step), *(small if new else ())])
    for name in [*chosen][: NAMES_MAX - len(found)]:
        digest = sample_digest(name, _resolve(planner, tensors[name]), step)
        if digest is not None:
            found.append((name, digest))
    return tuple(found)


def _value_digests(
    items: Iterable[WriteItem],
    planner: SavePlanner,
    written: Mapping[str, memoryview],
    *,
    new: bool,
) -> list[tuple[str, bytes]]:
    found: list[tuple[str, bytes]] = []
    for item in items:
        name = item.index.fqn
        of_rank = parse_key(name) is not None
        if item.type != WriteItemType.BYTE_IO or not (new or of_rank) or len(found) == NAMES_MAX:
            continue
        blob = written.get(name)
        if blob is None:
            value = _resolve(planner, item)
            if not hasattr(value, "getvalue"):
                continue
            blob = memoryview(value.getvalue())
        if not of_rank:
            _check_not_inside(name, blob)
        found.append((name, value_digest(blob)))
    return found


def _has_all_elements(item: WriteItem) -> bool:
    """Whether it is a tensor as a whole, so that other ranks may plan it, too."""
    data = item.tensor_data
    return data is not None and tuple(data.chunk.sizes) == tuple(data.size)


def _bytes_of(item: WriteItem) -> float:
    data = item.tensor_data
    return 0 if data is None else math.prod(data.size) * data.properties.dtype.itemsize


def sample_digest(name: str, tensor: Any, step: int) -> bytes | None:
    """A digest of at most SAMPLE_BYTES of a tensor, at a place that the step decides.

    Returns:
        16 bytes; None: the tensor was left to another rank and no sample of it was taken, or it
        cannot be digested. That must not fail a save.
    """
    digest = xxhash.xxh3_128()
    try:
        for part in plain_parts(tensor):
            if part.is_meta:
                return getattr(part, "sample", None)
            check_storage(name, part)
            digest.update(f"{part.dtype}{tuple(part.shape)}".encode())
            sample = part.detach()
            for dim, size in enumerate(part.shape):
                count = max(1, SAMPLE_BYTES * size // max(1, sample.nbytes))
                if count < size:
                    sample = sample.narrow(dim, _point(str(step)) % (size - count + 1), count)
            plain = sample.resolve_conj().resolve_neg().contiguous().reshape(-1)
            digest.update(plain.view(torch.uint8).cpu().numpy().data)
    except (*CLASS_ERRORS, UsageError) as error:
        log.debug("%r is not compared between ranks: %r", name, error)
        return None
    return digest.digest()


def planned_items(local_plan: SavePlan | None, planner: SavePlanner) -> Sequence[WriteItem]:
    """The items of this rank, also those that DCP leaves to other ranks."""
    if local_plan is None:
        return ()
    if getattr(local_plan, "usable", True):
        return local_plan.items
    # An empty plan means: as cached. It was compared when it was made, but per-rank values change.
    cached = getattr(planner, "_cached_save_plan", {})
    known = cached.get(getattr(planner, "_cached_plans_key", None))
    return () if known is None else known.items


def _resolve(planner: SavePlanner, item: WriteItem) -> Any:
    """The value of an item that another rank writes; None if the planner does not know it now.

    A planner that renames in its global plan does not know the names of its local one.
    """
    try:
        with torch.no_grad():  # or a DTensor gives a view of its tensor
            return planner.resolve_data(item)
    except TieredCkptError:
        raise
    except (LookupError, ValueError, AttributeError, AssertionError) as error:
        log.debug("%r is not known to the planner any more: %r", item.index.fqn, error)
        return None


def planned_tensors(
    local_plan: SavePlan | None,
    plan: SavePlan,
    planner: SavePlanner,
    which: Callable[[WriteItem], bool] = lambda item: True,
) -> Iterator[torch.Tensor]:
    """The tensors that this rank planned to write and that DCP left to other ranks.

    Of a wrapper its parts.
    """
    mine = {item.index for item in plan.items}
    for item in planned_items(local_plan, planner):
        if item.type == WriteItemType.BYTE_IO or item.index in mine or not which(item):
            continue
        value = _resolve(planner, item)
        if isinstance(value, torch.Tensor):
            yield from plain_parts(value)


_MARK = re.compile(re.escape(MARK))


def _check_not_inside(name: str, blob: memoryview) -> None:
    if _MARK.search(blob):
        raise UsageError(
            f"{name!r} is one value that contains a per-rank value: all ranks save it under the "
            "same name, and DCP keeps that of one rank. Save with flatten_state_dict=True, and put "
            "per_rank objects on the top level of the state",
            state_key=name,
        )


def check_consistent(
    seen: NamesSeen, reported: Iterable[tuple[int, Digests]], saved: Collection[str]
) -> None:
    """Compare the digests that each rank reported. On the coordinator, before the commit.

    Args:
        seen: Of the stream.
        reported: By rank.
        saved: The names in the checkpoint, as a planner may rename in its global plan; empty: they
            are not known.

    Raises:
        UsageError: Per-rank values of one coordinate differ between ranks.
    """
    values: dict[str, dict[bytes, list[int]]] = {}
    for rank, digests in reported:
        for name, digest in digests:
            values.setdefault(name, {}).setdefault(digest, []).append(rank)
    differing = {
        name: list(groups.values())
        for name, groups in values.items()
        if len(groups) > 1 and (not saved or name in saved)
    }
    of_ranks = [name for name in differing if parse_key(name) is not None]
    if of_ranks:
        raise UsageError(
            "ranks with one per-rank coordinate have different values: "
            f"{_text(of_ranks, differing)}; give per_rank a coordinate= that distinguishes them",
            keys=of_ranks[:NAMES_SHOWN],
        )
    warn_of_names(seen, differing)


def warn_of_names(seen: NamesSeen, differing: Mapping[str, list[list[int]]]) -> None:
    """Warn of names under which ranks save different values, once of each.

    Args:
        seen: Of the stream.
        differing: By name, the ranks that agree with each other.
    """
    new = [name for name in differing if name not in seen.warned]
    if new and len(seen.warned) < WARNED_MAX:
        seen.warned.update(new)
        warnings.warn(
            f"ranks save different values under one name: {_text(new, differing)}; DCP keeps that "
            "of one rank, and a load gives it to all. Wrap what belongs to each rank in "
            "tieredckpt.per_rank(...); where rank 0's is meant, as for the buffers of BatchNorm "
            "under DDP, save with planner=DefaultSavePlanner(dedup_save_to_lowest_rank=True)",
            stacklevel=2,
        )


def _text(names: Sequence[str], differing: Mapping[str, list[list[int]]]) -> str:
    each = []
    for name in names[:NAMES_SHOWN]:
        groups = " differ from ".join(_ranks(ranks) for ranks in differing[name][:3])
        each.append(f"{name!r} (ranks {groups})")
    more = len(names) - NAMES_SHOWN
    return ", ".join(each) + (f" and {more} more" if more > 0 else "")


def _ranks(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")


# --- equal values have equal digests --------------------------------------------------------------


class _NotPlainError(Exception):
    pass


def value_digest(blob: memoryview) -> bytes:
    """A digest of the value in a ``torch.save`` stream: equal for equal values.

    Of the value and not the stream, if that can be read: two pickles of equal values differ if one
    has the same string twice and the other two equal ones, or in the order of a set.
    """
    data = bytes(blob)
    try:
        value = safe_loads("", io.BytesIO(data), device="cpu")
        digest = xxhash.xxh3_128(b"value")
        _feed(digest, value)
    except (_NotPlainError, UsageError, RuntimeError, ValueError, LookupError, OSError):
        # Not plain data, endlessly nested, or not torch's at all: only the bytes can be compared.
        digest = xxhash.xxh3_128(b"bytes")
        digest.update(data)
    return digest.digest()


_BY_TEXT = bool | int | complex | str | torch.dtype | torch.device | slice | range


def _feed(digest: xxhash.xxh3_128, value: Any) -> None:
    """Digest a value: its type and attributes, its bytes, and the values in it."""
    kind, about, content = type(value), "", b""
    parts: Sequence[Any] = ()
    if isinstance(value, np.ndarray | np.generic):
        array = np.asarray(value)
        about = f"{array.dtype.descr}{array.shape}"
        if array.dtype.hasobject:
            parts = [array.tolist()]
        else:
            content = np.ascontiguousarray(array).tobytes()
    elif isinstance(value, torch.Tensor):
        if value.layout != torch.strided or value.is_quantized or value.is_meta:
            raise _NotPlainError
        about = f"{value.dtype}{tuple(value.shape)}{value.requires_grad}"
        plain = value.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
        if plain.numel():
            content = plain.view(torch.uint8).numpy().tobytes()
    elif isinstance(value, float):
        content = struct.pack("<d", value)
    elif isinstance(value, bytes | bytearray):
        leaf = read_leaf(value)
        about = "" if leaf is None else str(leaf[0])
        content = bytes(value) if leaf is None else value_digest(leaf[1])
    elif isinstance(value, Mapping):
        parts = [each for pair in value.items() for each in pair]
    elif isinstance(value, set | frozenset):
        content = b"".join(sorted(map(_digest_of, value)))
    elif isinstance(value, list | tuple):
        parts = value
    elif value is None or isinstance(value, _BY_TEXT):
        content = repr(value).encode("utf-8", "surrogatepass")
    else:
        raise _NotPlainError
    name = f"{kind.__module__}.{kind.__qualname__}"
    digest.update(f"<{name} {about} {len(content)} {len(parts)}>".encode())
    digest.update(content)
    for each in parts:
        _feed(digest, each)


def _digest_of(value: Any) -> bytes:
    digest = xxhash.xxh3_128()
    _feed(digest, value)
    return digest.digest()
