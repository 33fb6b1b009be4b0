"""Exports a checkpoint: chooses its keys, makes the files, and reads the data into them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from tieredckpt.config.schema import Config
from tieredckpt.dcp.load.sources import find_plan
from tieredckpt.dcp.state.planner import SafeLoadPlanner
from tieredckpt.errors import UsageError
from tieredckpt.export import safetensors, torch_files
from tieredckpt.export.files import Files, appearing, check_free
from tieredckpt.export.selection import DTYPES, Selection, in_doubt, name_of, select
from tieredckpt.export.source import Source, Which, opened
from tieredckpt.format.nested import Nested, decode_nested

Format = Literal["dcp", "safetensors", "torch"]
SHARD_BYTES = 5_000_000_000
POLL_S = 0.2

Progress = Callable[[int, int], object]
"""Called as (bytes read, bytes to read), from another thread."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What to export.

    Attributes:
        out: The file (torch) or folder (the others) to make.
        format: Its format.
        keys: Globs on flat names. A key is chosen if one matches; none: all keys.
        strip: A prefix that is removed from the names that have it.
        dtype: What floating tensors are cast to: a name of ``DTYPES``.
        shard_bytes: Of safetensors, the most bytes of tensors in one file.
        number_keys: Of torch: the keys of ``Report.text_keys`` become numbers.
    """

    out: Path
    format: Format
    keys: tuple[str, ...] = ()
    strip: str = ""
    dtype: str | None = None
    shard_bytes: int = SHARD_BYTES
    number_keys: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What was exported.

    Attributes:
        bytes: Of the tensors, in the export.
        text_keys: Of torch: dicts whose keys are all decimal text, and may have been numbers.
        missing: Of torch: dicts and places of lists that were empty, and were not saved.
        left_out: By key that matched and was not exported, the reason.
        bytes_by_tier: Bytes of verified blocks that were read, by tier.
        repaired_blocks: Blocks that were damaged in one copy and read from another one.
    """

    step: int
    save_id: str
    stream: str
    out: Path
    tensors: int
    values: int
    bytes: int
    text_keys: list[str]
    missing: list[str]
    left_out: Mapping[str, str]
    bytes_by_tier: Mapping[str, int]
    repaired_blocks: int
    seconds: float


def export_checkpoint(
    config: Config,
    which: Which,
    request: Request,
    progress: Progress = lambda done, total: None,
) -> Report:
    """Export a checkpoint, every block of it verified.

    Changes nothing but ``request.out``, which appears complete or, after a failure, not at all.
    Needs no agent. The tensors are read straight into the files' page cache; the values that are
    no tensors take memory.

    Args:
        config: Namespace, tiers and runtime folder.
        which: The checkpoint.
        request: What to export.
        progress: Is called five times a second while data is read.

    Raises:
        UsageError: ``out`` exists, a glob matches no key, two keys would have one name, a key was
            saved as inner tensors, or the format does not have a tensor's type.
        NotFoundError, NoRecoverableCheckpointError: There is no such checkpoint, or it was deleted
            meanwhile.
        IntegrityError: All copies of some block are damaged.
        TierUnavailableError: Some copy could not be read, and no other one is intact.
        OSError: The disk of ``out`` is full or failed.
    """
    begun_s = time.perf_counter()
    check_free(request.out, folder=request.format != "torch")
    with opened(config, which) as source:
        dtype = DTYPES[request.dtype] if request.dtype is not None else None
        nested, text_keys, missing = _structure(source, request)
        selection = select(
            source.metadata, request.keys, request.strip, dtype, source.wrappers, nested
        )
        with appearing(request.out, folder=request.format != "torch") as files:
            state, left_out = _make(source, selection, request, files)
            # An empty tensor has no block.
            state = {name: tensor for name, tensor in state.items() if tensor.numel()}
            files.expect(state.values())
            with _watched(source, files, selection.stored_bytes, progress):
                _fill(source, state, dtype, files)
        reader, manifest = source.reader, source.manifest
        return Report(
            step=manifest.step,
            save_id=manifest.save_id,
            stream=manifest.stream,
            out=request.out,
            tensors=len(selection.tensors),
            values=len(selection.values) - len(left_out),
            bytes=sum(each.size_bytes for each in selection.tensors),
            text_keys=text_keys,
            missing=missing,
            left_out=left_out,
            bytes_by_tier=dict(reader.bytes_by_tier),
            repaired_blocks=reader.repaired_blocks,
            seconds=time.perf_counter() - begun_s,
        )


def _structure(source: Source, request: Request) -> tuple[Nested, list[str], list[str]]:
    """The keys that are no text, and the names of what is in doubt."""
    if request.format != "torch":
        return {}, [], []
    nested = decode_nested(find_plan(source.session, source.candidate).nested)
    text_keys, missing = in_doubt(source.metadata, request.keys, nested)
    if request.number_keys:
        nested |= dict.fromkeys(text_keys, True)
        text_keys = []
    return nested, [*map(name_of, text_keys)], [*map(name_of, missing)]


def _make(
    source: Source, selection: Selection, request: Request, files: Files
) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """The tensors in the mapped files, by key of the checkpoint, and the keys that are left out."""
    names = [each.stored for each in selection.values]
    if request.format == "safetensors":
        tensors = safetensors.make(files, selection, request.shard_bytes)
        return tensors, dict.fromkeys(names, "it is no tensor")
    streams = source.read_values(names)
    if request.format == "dcp":
        return torch_files.make_dcp(files, selection, streams), {}
    values: dict[str, Any] = {}
    left_out: dict[str, str] = {}
    for name in names:
        try:
            values[name] = torch_files.loadable(name, streams[name])
        except UsageError as error:
            left_out[name] = error.message
    return torch_files.make_torch(files, request.out.name, selection, values), left_out


def _fill(
    source: Source, state: dict[str, torch.Tensor], dtype: torch.dtype | None, files: Files
) -> None:
    """Read the tensors. Raises as :meth:`Source.read`."""
    try:
        if state:
            source.read(state, SafeLoadPlanner(flatten_state_dict=False), files.put)
    except UsageError as error:
        key = error.fields.get("state_key")
        if dtype is None or key is None:
            raise
        raise UsageError(
            f"{key!r} has values that {dtype} cannot hold: choose a type of a larger range, or "
            "leave the key out",
            state_key=key,
        ) from error


@contextmanager
def _watched(source: Source, files: Files, total: int, progress: Progress) -> Iterator[None]:
    """Report progress, and have the disk write, while data is read."""
    over = threading.Event()

    def watch() -> None:
        while not over.wait(POLL_S):
            # Of a block in which the keys have only a part, all is read.
            progress(min(source.reader.bytes_read, total), total)
            files.write_back()

    watcher = threading.Thread(target=watch, name="tieredckpt-export", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()
    progress(total, total)
