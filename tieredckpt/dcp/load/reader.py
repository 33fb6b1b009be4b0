"""DCP's storage reader: one checkpoint, the same on all ranks, every block verified.

DCP turns an exception of ``read_metadata`` into the text of an AssertionError, and calls the method
a second time. So a failure there is kept in the returned metadata. The first access to it, by the
planner or ``set_up_storage_reader``, raises our error, which arrives unchanged in
``CheckpointException.failures``.
"""

from __future__ import annotations

import io
import itertools
import math
import operator
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from tieredckpt import failpoints
from tieredckpt.dcp.job.session import Session
from tieredckpt.dcp.load.casting import may_lose, put_unchanged
from tieredckpt.dcp.load.sharing import Piece, agreed, sharing
from tieredckpt.dcp.load.sources import fetcher_of, find_plan
from tieredckpt.dcp.load.tensors import SCRATCH_BYTES, Put, Region, SegmentReads
from tieredckpt.dcp.load.wrappers import check_plain, piece_of, wrapped_reads
from tieredckpt.dcp.state.checkpoint_id import DEFAULT_STREAM, Named, checked_target
from tieredckpt.dcp.state.items import check_storage, dtype_name
from tieredckpt.dcp.state.metadata import Places, to_metadata
from tieredckpt.dcp.state.per_rank_keys import parse_key
from tieredckpt.errors import (
    IntegrityError,
    NoRecoverableCheckpointError,
    NotFoundError,
    TieredCkptError,
    UsageError,
)
from tieredckpt.format.segment import Footer, Item
from tieredckpt.recovery.fetch import SegmentFetcher
from tieredckpt.recovery.plan import Candidate, RecoveryPlan, fork_error, naming

NAMES_SHOWN = 10


class _Unreadable(Metadata):
    """Stands for metadata that could not be read: an access to its content raises the error."""

    def __init__(self, error: TieredCkptError) -> None:
        self._error = error

    def __getattr__(self, name: str) -> Any:
        # Only called for missing attributes: the fields without a default, which are never set.
        raise self._error if name == "state_dict_metadata" else AttributeError(name)

    def __repr__(self) -> str:
        return f"<metadata that could not be read: {self._error}>"


Write = Callable[[str, torch.Tensor, torch.Tensor], object]
"""Called as (key, target, what is stored)."""


class Reader(Named, StorageReader):
    """A ``StorageReader`` for ``dcp.load``. Made by ``Engine.reader``; never walks back.

    Args:
        session: The open engine's parts.
        step: Only this step; None: the newest that can be restored.
        stream: The stream, if ``checkpoint_id`` names none.
        save_id: Only this checkpoint, also one that was abandoned by a roll-back.
        pinned: Read this one, which all ranks have agreed on.
        strict: Raise (True) or warn (False) if the checkpoint holds keys that no rank asked for;
            None, as DCP: ignore them. True also raises for a value that does not survive the cast
            to its target's type (:mod:`tieredckpt.dcp.load.casting`); such casts are always warned
            of.
        check_casts: Raise for such a value, whatever ``strict`` is.
        scratch_bytes: Limit of the memory for what cannot be read straight into its tensor.
    """

    def __init__(
        self,
        session: Session,
        step: int | None = None,
        stream: str = DEFAULT_STREAM,
        save_id: str | None = None,
        *,
        pinned: Candidate | None = None,
        strict: bool | None = None,
        check_casts: bool = False,
        scratch_bytes: int = SCRATCH_BYTES,
    ) -> None:
        super().__init__()
        self._session = session
        self._made_for = checked_target(step, stream)
        self._save_id = save_id
        self.pinned = pinned
        """The checkpoint that all ranks have agreed on; None: this rank chooses one."""
        self._strict = strict
        self._check_casts = check_casts or bool(strict)
        self._scratch_bytes = scratch_bytes
        self.write: Write | None = None
        """Takes each box to its tensor from scratch memory, instead of a read straight into it."""
        self._fetcher: SegmentFetcher | None = None
        self._candidate: Candidate
        """The one that is read, once the metadata was."""
        self._places = Places({}, {})
        self._metadata = Metadata(state_dict_metadata={})
        self._known: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
        """All that it has by name, also the parts of wrappers, which planners do not see."""
        self.bytes_by_tier: Counter[str] = Counter()
        """Bytes of verified blocks that this rank has read, by tier."""
        self.segments: dict[str, Counter[str]] = {}
        """By segment, how many of these bytes came from each place ("memory on host")."""
        self.repaired_blocks = 0
        """Blocks that were damaged in one copy and came from another one."""
        self.may_have_written = False
        """Whether any destination may have been changed."""
        self.asked: set[tuple[str, str]] = set()
        """Stream and key of what this rank reads into the state, once that is planned."""

    @property
    def chosen(self) -> Candidate:
        """The checkpoint that is read; known once the metadata was read."""
        return self._candidate

    @property
    def wrappers(self) -> frozenset[str]:
        """Keys that were saved as the inner tensors of a wrapper; known as :attr:`chosen` is."""
        return frozenset(key for key, _ in self._places.pieces)

    @property
    def bytes_read(self) -> int:
        """Bytes of verified blocks that this rank has read so far. From any thread."""
        fetcher = self._fetcher
        both = (self.bytes_by_tier, fetcher.report.bytes_by_tier if fetcher is not None else {})
        # Lists at once: other threads add tiers meanwhile.
        return sum(sum([*each.values()]) for each in both)

    # --- what dcp.load calls, in this order ------------------------------------------------------

    # No parameter may be called "kwargs", or DCP calls again with rank= after a failure.
    def read_metadata(self, *_args: Any, **_options: Any) -> Metadata:
        try:
            return self._read_metadata()
        except TieredCkptError as error:
            return _Unreadable(error)

    def _read_metadata(self) -> Metadata:
        self._session.check()
        if self._reset_error is not None:
            raise self._reset_error
        candidate = self._candidate = self.pinned or self._choose()
        metadata, self._places = to_metadata(find_plan(self._session, candidate))
        self._check_ordinals(candidate)
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta(save_id=candidate.manifest.save_id)
        self._metadata = metadata
        self._known = {**metadata.state_dict_metadata, **self._places.parts}
        return metadata

    def _choose(self) -> Candidate:
        target = self._made_for.merged(self._named)
        stream = target.stream or DEFAULT_STREAM
        plan = self._session.history.recovery_plan(
            stream,
            step=target.step,
            save_id=self._save_id,
            wait_s=self._session.config.recovery.wait_s,
        )
        if plan.chosen is None and plan.sides:
            raise fork_error(plan)
        if plan.chosen is None:
            raise not_recoverable(plan, target.step, self._save_id)
        return plan.chosen

    def _check_ordinals(self, candidate: Candidate) -> None:
        places = [place for place, _ in self._places.chunks.values()]
        places += self._places.blobs.values()
        if max((ordinal for ordinal, _ in places), default=-1) >= len(candidate.sources):
            raise IntegrityError("the plan names a segment that the manifest does not have")

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *_args: Any, **_options: Any
    ) -> None:
        _ = metadata.state_dict_metadata  # raises the error if it could not be read

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        # In the plan, so that the coordinator can compare the choices of all ranks.
        manifest = self._candidate.manifest
        return replace(plan, storage_data=naming(manifest.step, manifest.save_id))

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        choices = [plan.storage_data for plan in plans]
        for rank, choice in enumerate(choices):
            if choice != choices[0]:
                raise UsageError(
                    f"the ranks would load different checkpoints: rank 0 {choices[0]}, rank {rank} "
                    f"{choice}; engine.load agrees on one, or name it: engine.reader(save_id=...)"
                )
        if self._strict is not None:
            asked = {item.storage_index.fqn for plan in plans for item in plan.items}
            self._check_all_asked(asked, strict=self._strict)
        return plans

    def _check_all_asked(self, asked: set[str], *, strict: bool) -> None:
        left = [
            name
            for name, stored in self._metadata.state_dict_metadata.items()
            if name not in asked
            and not (isinstance(stored, TensorStorageMetadata) and 0 in stored.size)
        ]
        if not left:
            return
        text = f"{len(left)} key(s) of the checkpoint that no rank asked for: {names_text(left)}"
        if any(parse_key(name) is not None for name in left):
            text += " (per-rank values of another number of ranks are found by a SafeLoadPlanner)"
        if any(".state." in f".{name}" for name in left):
            text += (
                " (an optimizer has no state before its first step: get_state_dict of "
                "torch.distributed.checkpoint.state_dict makes it)"
            )
        if strict:
            raise UsageError(
                f"the load would leave out {text}; give the whole state, or leave them out with "
                "strict=False",
                keys=left[:NAMES_SHOWN],
            )
        warnings.warn(f"not loaded: {text}", stacklevel=2)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        stream = self._candidate.manifest.stream
        self.asked = {(stream, request.dest_index.fqn) for request in plan.items}
        wrapped = self._places.pieces
        reads, wrappers = wrapped_reads(plan.items, planner, wrapped, self._places.parts)
        plain = [each for each in plan.items if piece_of(each, wrapped) is None]
        pieces = [self._piece_of(request, planner) for request in plain]
        for request, target in reads:
            place = self._place_of(request)
            pieces.append(Piece(request, *place, target, target, is_part=True))
        values = any(request.type == LoadItemType.BYTE_IO for request in plan.items)
        unpickles = type(planner).load_bytes is DefaultLoadPlanner.load_bytes
        if values and unpickles and not self._session.unsafe_pickle:
            _warn_of_unpickling()
        self._warn_of_narrowing(pieces)
        with self._session.ring.quiet():
            self._read(self._read_shared(pieces, planner), planner)
        for request, target in wrappers:
            planner.commit_tensor(request, target)
        if self.pinned is None:
            self._session.history.was_read(stream, self._candidate.manifest)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _warn_of_narrowing(self, pieces: Sequence[Piece]) -> None:
        narrowed = dict.fromkeys(
            f"{piece.request.dest_index.fqn!r} ({dtype_name(stored)} to {dtype_name(dtype)})"
            for piece in pieces
            if piece.request.type != LoadItemType.BYTE_IO
            and (stored := self._stored(piece.request.storage_index.fqn).properties.dtype)
            != (dtype := piece.target.dtype)
            and may_lose(stored, dtype)
        )
        if narrowed:
            warnings.warn(
                f"the load casts {len(narrowed)} key(s) to a type that may not hold all of their "
                f"values: {', '.join([*narrowed][:NAMES_SHOWN])}",
                stacklevel=2,
            )

    def _read_shared(self, pieces: Sequence[Piece], planner: LoadPlanner) -> list[Piece]:
        """Read the pieces whose targets share memory, if their values agree; the other pieces.

        Raises:
            UsageError: The values do not agree; nothing was written.
        """
        groups = sharing(pieces)
        shared = dict.fromkeys(itertools.chain.from_iterable(groups))
        for piece in shared:
            piece.read_aside()
        self._read(shared, planner)
        for piece in [piece for group in groups for piece in agreed(group)]:
            self.may_have_written = True
            piece.target.copy_(piece.into)
        for piece in shared:
            piece.into = piece.target  # the other may be large
            _commit(piece, planner)
        return [piece for piece in pieces if piece not in shared]

    def _read(self, pieces: Iterable[Piece], planner: LoadPlanner) -> None:
        by_segment = operator.attrgetter("segment")
        for ordinal, found in itertools.groupby(sorted(pieces, key=by_segment), by_segment):
            self._read_segment(ordinal, found, planner)

    # --- one segment -----------------------------------------------------------------------------

    def _piece_of(self, request: ReadItem, planner: LoadPlanner) -> Piece:
        values = request.type == LoadItemType.BYTE_IO
        target = torch.empty(0) if values else planner.resolve_tensor(request).detach()
        check_plain(request.dest_index.fqn, target)
        put: Put = torch.Tensor.copy_
        if self._check_casts:
            put = partial(put_unchanged, request.dest_index.fqn)
        if self.write is not None:
            put = partial(self.write, request.dest_index.fqn)
        return Piece(request, *self._place_of(request), target, target, put)

    def _place_of(self, request: ReadItem) -> tuple[int, int]:
        index = request.storage_index
        if request.type == LoadItemType.BYTE_IO:
            place = self._places.blobs.get(index.fqn)
        else:
            chunk = self._chunk_of(request)
            box = (index.fqn, tuple(chunk.offsets), tuple(chunk.sizes))
            place = self._places.chunks[box][0]
        if place is None:
            raise UsageError(f"the planner asks for {index.fqn!r}, which is not in the checkpoint")
        return place

    def _chunk_of(self, request: ReadItem) -> Any:
        index = request.storage_index
        stored = self._known.get(index.fqn)
        if isinstance(stored, TensorStorageMetadata):
            chunks = stored.chunks
            if index.index is not None and 0 <= index.index < len(chunks):
                chunks = [chunks[index.index], *chunks]
            for chunk in chunks:
                if chunk.offsets == index.offset:
                    return chunk
        raise UsageError(f"the planner asks for {index}, which is not in the checkpoint")

    def _read_segment(self, ordinal: int, pieces: Iterable[Piece], planner: LoadPlanner) -> None:
        ref = self._candidate.manifest.segments[ordinal]
        fetcher = fetcher_of(self._session, ref, self._candidate.sources[ordinal])
        self._fetcher = fetcher
        try:
            footer = fetcher.footer()
            reads = SegmentReads(fetcher, self._scratch_bytes, straight=self.write is None)
            for piece in pieces:
                item = self._checked_item(footer, piece.item, piece.request, ordinal)
                if piece.request.type == LoadItemType.BYTE_IO:
                    _add_blob(reads, item, piece.request, planner)
                else:
                    _add_tensor(reads, item, piece, planner, self._stored(item.name))
            # All of them are alike: read aside, or straight to their targets.
            self.may_have_written |= piece.into is piece.target
            failpoints.reach("load.read.before")
            reads.run()
            failpoints.reach("load.read.after")
        finally:
            self._fetcher = None
            self.bytes_by_tier.update(fetcher.report.bytes_by_tier)
            self.segments.setdefault(ref.id, Counter()).update(fetcher.report.bytes_by_place)
            self.repaired_blocks += sum(map(len, fetcher.report.damaged.values()))
            fetcher.close()

    def _stored(self, name: str) -> TensorStorageMetadata:
        stored = self._known[name]
        assert isinstance(stored, TensorStorageMetadata)
        return stored

    def _checked_item(self, footer: Footer, number: int, request: ReadItem, ordinal: int) -> Item:
        """The item in the segment's index, which must match the plan."""
        name = request.storage_index.fqn
        item = footer.items[number] if number < len(footer.items) else None
        stored = self._known[name]
        planned: object = (name, "bytes", "", (), (), ())
        if isinstance(stored, TensorStorageMetadata):
            chunk = self._chunk_of(request)
            planned = (
                name, "tensor", dtype_name(stored.properties.dtype), tuple(stored.size),
                tuple(chunk.offsets), tuple(chunk.sizes),
            )  # fmt: skip
        actual = item and (
            item.name, item.kind, item.dtype, item.global_shape,
            item.chunk_offsets, item.chunk_sizes,
        )  # fmt: skip
        if item is None or planned != actual:
            raise IntegrityError(
                f"plan and segment {ordinal} disagree about {name!r}: planned {planned}, stored "
                f"{actual}",
                state_key=name,
            )
        return item


@cache
def _warn_of_unpickling() -> None:
    """Once per process."""
    warnings.warn(
        "DCP's own planner unpickles values, so a forged checkpoint can run code: pass "
        "planner=tieredckpt.SafeLoadPlanner() to dcp.load, or load with engine.load (with "
        "Engine.open(..., unsafe_pickle=True) nothing warns)",
        stacklevel=2,
    )


def _add_blob(reads: SegmentReads, item: Item, request: ReadItem, planner: LoadPlanner) -> None:
    data = bytearray(item.size_bytes)
    reads.add_bytes(item.offset, data, lambda: planner.load_bytes(request, io.BytesIO(data)))


def _add_tensor(
    reads: SegmentReads,
    item: Item,
    piece: Piece,
    planner: LoadPlanner,
    stored: TensorStorageMetadata,
) -> None:
    request, target = piece.request, piece.target
    starts, lengths = tuple(request.storage_offsets), tuple(request.lengths)
    inside = len(starts) == len(lengths) == len(item.chunk_sizes) and all(
        0 <= start <= start + length <= size
        for start, length, size in zip(starts, lengths, item.chunk_sizes, strict=True)
    )
    if not inside or tuple(target.shape) != lengths:
        raise UsageError(
            f"the planner asks for {list(lengths)} elements from {list(starts)} of a piece of "
            f"{item.name!r} of size {list(item.chunk_sizes)}, to be put into a tensor of shape "
            f"{list(target.shape)}",
            state_key=item.name,
        )
    check_storage(item.name, target)
    dtype = stored.properties.dtype
    region = Region(item.chunk_sizes, starts, lengths, dtype.itemsize)
    if math.prod(item.chunk_sizes) * dtype.itemsize != item.size_bytes:
        raise IntegrityError(f"{item.name!r} has {item.size_bytes} bytes, not those of its shape")

    landed = partial(_commit, piece, planner)
    reads.add_tensor(item.offset, region, dtype, piece.into, landed, piece.put)


def _commit(piece: Piece, planner: LoadPlanner) -> None:
    """Inform the planner that its tensor has the data; of a wrapper it is once for all parts."""
    if piece.into is piece.target and not piece.is_part:
        planner.commit_tensor(piece.request, piece.target)


def names_text(names: list[str]) -> str:
    """Some of ``names``, for a message."""
    more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
    return ", ".join(map(repr, names[:NAMES_SHOWN])) + more


OFF_TIMELINE_SHOWN = 10


def not_recoverable(plan: RecoveryPlan, step: int | None, save_id: str | None) -> TieredCkptError:
    """The error for a recovery plan that chose nothing."""
    asked = [f"step {step}"] * (step is not None) + [f"save {save_id}"] * (save_id is not None)
    wanted = " and ".join(asked) + " of " if asked else ""
    # Only checkpoints off the timeline are left: they are intact, and a person may choose one.
    off = () if wanted or plan.refused else plan.abandoned[:OFF_TIMELINE_SHOWN]
    refused = [(each.save_id, each.step, each.reason) for each in (*plan.refused, *off)]
    reasons = [f"{naming(at, name)}: {why}" for name, at, why in refused]
    anew = " (engine.load(..., fresh_start=True) begins anew without it)"
    hint = "" if refused or wanted or plan.is_denied else anew
    reasons += [f"not asked: {tier}{hint}" for tier in plan.incomplete]
    if off:
        reasons.append(
            "engine.load(state, save_id=...) resumes from one of them, engine.load(state, "
            "fresh_start=True) begins anew and keeps them"
        )
    what = f"{wanted}stream {plan.stream!r}"
    if not reasons:
        hint = "; a first run begins without one, as engine.load does"
        if wanted:
            hint = ", with --json their whole save ids" if save_id is not None else ""
        return NotFoundError(
            f"there is no checkpoint for {what}: `tieredckpt ls` lists those that there are{hint}",
            key=what,
        )
    return NoRecoverableCheckpointError(
        f"no checkpoint of {what} can be restored:\n  " + "\n  ".join(reasons),
        refused=refused,
        incomplete=list(plan.incomplete),
    )
