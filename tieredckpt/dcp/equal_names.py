"""Values of equal name that differ between ranks: DCP keeps one of them, and nobody would notice.

Each rank says in its receipt what the values are that it would have saved under names that others
may use too; the coordinator compares. Values of per-rank objects are compared at every save, and a
difference fails it. All others are compared when the structure of the state is new, as it costs as
much as saving them, and a difference is warned of once.
"""

from __future__ import annotations

import io
import logging
import re
import struct
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
import xxhash
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType

from tieredckpt.dcp.per_rank_values import MARK, parse_key, read_leaf
from tieredckpt.dcp.planner import safe_loads
from tieredckpt.errors import TieredCkptError, UsageError

log = logging.getLogger(__name__)

NAMES_MAX = 10_000
"""Names that are compared per save; they travel to the coordinator, beside DCP's own plans."""

WARNED_MAX = 10_000
NAMES_SHOWN = 10

Digests = tuple[tuple[str, bytes], ...]
"""Name and digest of each value that a rank would have saved."""


class _Receipt(Protocol):
    @property
    def rank(self) -> int: ...
    @property
    def values(self) -> Digests: ...


@dataclass(slots=True)
class NamesSeen:
    """What one stream's saves of this process have compared, and on the coordinator warned of."""

    compared: frozenset[str] = frozenset()
    warned: set[str] = field(default_factory=set)


def digests_to_compare(
    seen: NamesSeen,
    local_plan: SavePlan | None,
    planner: SavePlanner,
    written: Mapping[str, memoryview],
    *,
    alone: bool,
) -> Digests:
    """What this rank reports of its bytes items, before DCP has dropped those that others have.

    Args:
        seen: Of the stream.
        local_plan: What the planner gave to ``prepare_local_plan``.
        planner: Resolves what this rank does not write.
        written: The values that it does write.
        alone: Whether no other rank takes part in any save.

    Raises:
        UsageError: A per-rank value is inside of another value, where all ranks have one name.
    """
    if alone:
        return ()
    items = [
        item for item in planned_items(local_plan, planner) if item.type == WriteItemType.BYTE_IO
    ]
    names = frozenset(item.index.fqn for item in items)
    new = names != seen.compared
    found: list[tuple[str, bytes]] = []
    for item in items[:NAMES_MAX]:
        name = item.index.fqn
        of_rank = parse_key(name) is not None
        if not (new or of_rank):
            continue
        blob = written.get(name)
        if blob is None:
            blob = _resolve(planner, item)
        if blob is None:
            continue
        if not of_rank:
            _check_not_inside(name, blob)
        found.append((name, value_digest(blob)))
    seen.compared = names
    return tuple(found)


def planned_items(local_plan: SavePlan | None, planner: SavePlanner) -> Sequence[WriteItem]:
    """What this rank has, before DCP has dropped what others write."""
    if local_plan is None:
        return ()
    if getattr(local_plan, "usable", True):
        return local_plan.items
    # An empty plan says: as cached. It was compared when it was made, but per-rank values change.
    cached = getattr(planner, "_cached_save_plan", {})
    known = cached.get(getattr(planner, "_cached_plans_key", None))
    return () if known is None else known.items


def _resolve(planner: SavePlanner, item: WriteItem) -> memoryview | None:
    """The value of an item that another rank writes; None if the planner does not know it now.

    A planner that renames in its global plan does not know the names of its local one.
    """
    try:
        value = planner.resolve_data(item)
    except TieredCkptError:
        raise
    except (LookupError, ValueError, AttributeError, AssertionError) as error:
        log.debug("%r is not compared between ranks: %r", item.index.fqn, error)
        return None
    return value.getbuffer() if hasattr(value, "getbuffer") else None


def planned_tensors(
    local_plan: SavePlan | None,
    plan: SavePlan,
    planner: SavePlanner,
    which: Callable[[WriteItem], bool] = lambda item: True,
) -> Iterator[torch.Tensor]:
    """The tensors that this rank planned to write and DCP then left to others, as it knows them."""
    mine = {item.index for item in plan.items}
    for item in planned_items(local_plan, planner):
        if item.type == WriteItemType.BYTE_IO or item.index in mine or not which(item):
            continue
        try:
            value = planner.resolve_data(item)
        except (LookupError, ValueError, AttributeError, AssertionError) as error:
            log.debug("%r is not known to the planner any more: %r", item.index.fqn, error)
            continue
        if isinstance(value, torch.Tensor):
            yield value


_MARK = re.compile(re.escape(MARK))


def _check_not_inside(name: str, blob: memoryview) -> None:
    if _MARK.search(blob):
        raise UsageError(
            f"{name!r} is one value that contains a per-rank value: all ranks save it under the "
            "same name, and DCP keeps that of one rank. Save with flatten_state_dict=True, and put "
            "per_rank objects on the top level of the state",
            state_key=name,
        )


def check_equal_names(seen: NamesSeen, receipts: Sequence[_Receipt]) -> None:
    """Compare what the ranks reported. Called on the coordinator, before the commit.

    Raises:
        UsageError: Per-rank values of one coordinate differ between ranks.
    """
    values: dict[str, dict[bytes, list[int]]] = {}
    for receipt in receipts:
        for name, digest in receipt.values:
            values.setdefault(name, {}).setdefault(digest, []).append(receipt.rank)
    differing = {name: list(groups.values()) for name, groups in values.items() if len(groups) > 1}
    of_ranks = [name for name in differing if parse_key(name) is not None]
    if of_ranks:
        raise UsageError(
            "ranks with one per-rank coordinate have different values: "
            f"{_text(of_ranks, differing)}; give per_rank a coordinate= that tells them apart",
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
            "tieredckpt.per_rank(...)",
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

    Not of the stream's bytes, as far as that can be helped: two pickles of equal values differ
    where one has the same string twice and the other two equal ones, or in the order of a set.
    """
    data = bytes(blob)
    try:
        value = safe_loads("", io.BytesIO(data), device="cpu")
        digest = xxhash.xxh3_128(b"value")
        _feed(digest, value)
    except (_NotPlainError, UsageError, RuntimeError, ValueError, LookupError, OSError):
        # Not plain data, endlessly nested, or not torch's at all: the bytes are what there is.
        digest = xxhash.xxh3_128(b"bytes")
        digest.update(data)
    return digest.digest()


def _feed(digest: xxhash.xxh3_128, value: Any) -> None:
    kind = type(value)
    digest.update(f"<{kind.__module__}.{kind.__qualname__}>".encode())
    if value is None or kind in (bool, int, complex, str):
        _feed_bytes(digest, repr(value).encode("utf-8", "surrogatepass"))
    elif kind is float:
        digest.update(struct.pack("<d", value))
    elif kind in (bytes, bytearray):
        leaf = read_leaf(value)
        if leaf is None:
            _feed_bytes(digest, value)
        else:
            digest.update(str(leaf[0]).encode())
            _feed_bytes(digest, value_digest(leaf[1]))
    elif isinstance(value, torch.Tensor):
        _feed_tensor(digest, value)
    elif isinstance(value, np.ndarray | np.generic):
        _feed_array(digest, np.asarray(value))
    elif isinstance(value, Mapping):
        digest.update(len(value).to_bytes(8, "little"))
        for key, each in value.items():
            _feed(digest, key)
            _feed(digest, each)
    elif isinstance(value, set | frozenset):
        _feed_bytes(digest, b"".join(sorted(map(_digest_of, value))))
    elif isinstance(value, list | tuple):
        digest.update(len(value).to_bytes(8, "little"))
        for each in value:
            _feed(digest, each)
    elif isinstance(value, torch.dtype | torch.device | slice | range):
        _feed_bytes(digest, repr(value).encode())
    else:
        raise _NotPlainError


def _feed_bytes(digest: xxhash.xxh3_128, data: bytes | bytearray) -> None:
    digest.update(len(data).to_bytes(8, "little"))
    digest.update(bytes(data))


def _feed_tensor(digest: xxhash.xxh3_128, tensor: torch.Tensor) -> None:
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
        raise _NotPlainError
    digest.update(f"{tensor.dtype}{tuple(tensor.shape)}{tensor.requires_grad}".encode())
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    if plain.numel():
        digest.update(plain.view(torch.uint8).numpy().tobytes())


def _feed_array(digest: xxhash.xxh3_128, array: np.ndarray[Any, Any]) -> None:
    if array.dtype.hasobject:
        digest.update(f"{array.shape}".encode())
        _feed(digest, array.tolist())
        return
    digest.update(f"{array.dtype.descr}{array.shape}".encode())
    digest.update(np.ascontiguousarray(array).tobytes())


def _digest_of(value: Any) -> bytes:
    digest = xxhash.xxh3_128()
    _feed(digest, value)
    return digest.digest()
