"""Commits a stock DCP folder or a ``torch.save`` file as a checkpoint of a namespace.

The files are mapped, and their bytes copied once: into the slot of the new checkpoint. Only a file
of ``torch.save`` that is no archive is read first. Nothing in any is executed.
"""

from __future__ import annotations

import io
import mmap
import os
import pathlib
import pickle
import pickletools
import re
import secrets
import struct
import time
import warnings
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from tieredckpt.config.schema import Config
from tieredckpt.dcp.job.session import Session
from tieredckpt.dcp.load.sources import find_plan
from tieredckpt.dcp.open import open_together
from tieredckpt.dcp.save.writer import Writer
from tieredckpt.dcp.state.checkpoint_id import DEFAULT_STREAM
from tieredckpt.dcp.state.value_archive import BadValueError
from tieredckpt.dcp.state.values import RefusedTypesError, SafeGlobal, rebuild
from tieredckpt.errors import IntegrityError, TieredCkptError, UsageError, WaitError
from tieredckpt.format.nested import nested_of
from tieredckpt.format.parts import join_parts
from tieredckpt.recovery.flush import flush_and_wait
from tieredckpt.recovery.other_hosts import read_everywhere
from tieredckpt.storage.file_io import open_regular

METADATA = ".metadata"
METADATA_BYTES_MAX = 1 << 30
KEYS_SHOWN = 10

_OLD_MODULE = "torch.distributed._shard.sharded_tensor.metadata"
_MALFORMED = (
    pickle.UnpicklingError, struct.error, ArithmeticError, AssertionError, AttributeError, EOFError,
    LookupError, MemoryError, RuntimeError, TypeError, ValueError,
)  # fmt: skip
"""What torch, DCP and Python raise of bytes that nobody wrote so."""

_ARCHIVE = b"PK\3\4"
_BEFORE_ARCHIVES = b"\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
"""A number that begins a file of ``torch.save`` before torch 1.6, after pickle's version."""
_OF_TENSORS = re.compile(
    r"collections\.OrderedDict|torch\.(\w+Storage|Size|device|b?float\d+|u?int\d+|bool|complex\d+)"
    r"|torch\._utils\._rebuild_(tensor_v2|parameter)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """What was committed. ``tier``: where it is besides memory; None: no tier is configured."""

    step: int
    stream: str
    save_id: str
    keys: int
    bytes: int
    tier: str | None
    seconds: float


def import_checkpoint(
    config: Config,
    source: Path,
    step: int,
    stream: str = DEFAULT_STREAM,
    *,
    timeout_s: float = 3600.0,
    prefix: str = "",
) -> Imported:
    """Commit ``source`` as the first checkpoint of a namespace, and copy it to a tier.

    This host's agent is started if none runs. A job that opens the namespace then loads it.

    Args:
        config: Of the job that is to load it.
        source: A folder that stock DCP wrote, or a file of ``torch.save``. It may be a link; those
            in the folder lead to files of it.
        step: Its step.
        stream: Its sequence of checkpoints.
        timeout_s: How long the copy to the tier may take.
        prefix: Of a file: what its names begin with from now on, as ``train.``.

    Raises:
        UsageError: ``source`` is neither, contains a type that a load refuses, or the namespace
            has checkpoints already: then with the keys that differ.
        IntegrityError: A file is damaged or no regular one, or does not fit the folder's metadata.
        WaitError: The checkpoint is committed in memory, and not in a tier yet; its copy goes on.
        AgentError, CapacityError: The agent cannot be used, or memory is too small.
    """
    begun_s = time.perf_counter()
    planner: SavePlanner = DefaultSavePlanner()
    state: dict[str, Any] = {}
    if source.is_dir():
        if prefix:
            raise UsageError(f"{source} is a folder: a prefix is for a file of torch.save")
        planner = folder = _Folder(source)
        names = folder.names
    else:
        state = _torch_file(source)
        for part in reversed(prefix.removesuffix(".").split(".") if prefix else ()):
            state = {part: state}
        try:
            names = set(flatten_state_dict(state)[0])
        except (RecursionError, ValueError) as error:  # or two of its keys have one flat name
            raise IntegrityError(f"{source} is malformed: {error!r}") from error
    session = open_together(
        config, None, unsafe_pickle=False, read_only=False, run_id=secrets.token_hex(16)
    )
    try:
        _check_empty(session, stream, names)
        writer = Writer(session, step, stream, None, None)
        writer.nested = nested_of(state)
        keys = _save(writer, state, planner, source)
        report = session.last_save
        assert report is not None
        if report.save_id is None:
            raise UsageError(f"step {step} was not committed: {report.skipped}")
        return Imported(
            step=step,
            stream=stream,
            save_id=report.save_id,
            keys=keys,
            bytes=report.bytes_written,
            tier=_flush(session, step, timeout_s) if config.tiers else None,
            seconds=time.perf_counter() - begun_s,
        )
    finally:
        session.close()


def _save(writer: Writer, state: dict[str, Any], planner: SavePlanner, source: Path) -> int:
    """Save, and return the number of keys. Raises our errors, or what another package raised."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is")
            found = dcp.save(state, storage_writer=writer, planner=planner, no_dist=True)
    except CheckpointException as error:
        first = next(iter(error.failures.values()))[0]
        malformed = isinstance(first, _MALFORMED)
        if malformed and not isinstance(first, TieredCkptError):
            raise IntegrityError(f"{source} is malformed: {first!r}") from error
        raise first from error
    return len(found.state_dict_metadata)


def _flush(session: Session, step: int, timeout_s: float) -> str:
    """Copy the checkpoint to the tiers, and return the surest one. Raises WaitError."""
    flushed = flush_and_wait(session.client, None, timeout_s)
    if flushed.errors:
        why = "; ".join(f"{tier}: {why}" for tier, why in flushed.errors.items())
        raise WaitError(
            f"step {step} is committed in memory, and not in every tier yet ({why}); the agent "
            "goes on copying it (`tieredckpt status`)",
            reason="timeout",
        )
    return flushed.tier


def _check_empty(session: Session, stream: str, names: set[str]) -> None:
    """Raise UsageError if the namespace has checkpoints: the import would supersede their job.

    Also with the keys in which ``names`` differs from the newest one of ``stream``.
    """
    found = read_everywhere(session.client, session.history.others(), None)
    there = {
        fact.save_id for each in found.holdings for tier in each.tiers for fact in tier.manifests
    }
    if not there:
        return
    text = (
        f"namespace {session.namespace} holds {len(there)} checkpoint(s) already: import into a "
        "namespace of its own (--namespace), and have a job load it from there"
    )
    if (newest := session.history.recovery_plan(stream).chosen) is not None:
        theirs = {each.name for each in join_parts(find_plan(session, newest).entries())[0]}
        what = f"step {newest.manifest.step}"
        for has, keys in ((what, theirs - names), ("the source", names - theirs)):
            if keys:
                some = ", ".join(sorted(keys)[:KEYS_SHOWN])
                text += f"\nonly {has} has {len(keys)} of the keys: {some}"
    raise UsageError(text)


def _torch_file(path: Path) -> dict[str, Any]:
    """The state in a file of ``torch.save``: of an archive, mapped."""
    real = Path(os.path.realpath(path))
    # Torch would wait at a pipe.
    with io.FileIO(open_regular(real, os.O_RDONLY, str(path))) as file:
        begin = file.read(16)
        if not begin.startswith(_ARCHIVE) and begin[2:15] != _BEFORE_ARCHIVES:
            raise UsageError(f"{path} is no file of torch.save{_advice(path)}")
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    try:
        if begin.startswith(_ARCHIVE):
            state = rebuild(memoryview(mapped), device="cpu", in_place=True)
        else:
            _check_names(mapped)
            storages: Any = _Storages(len(mapped))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch's own, of its old formats
                state = torch.load(real, map_location=storages, weights_only=True)
            storages.check()
    except RefusedTypesError as error:
        raise UsageError(
            f"{path} holds {error}, which a load would refuse: if you trust the file, load it with "
            "torch.load(weights_only=False), and save its tensors as a file of their own"
        ) from error
    except (BadValueError, *_MALFORMED) as error:
        # Of torch's text the first part: the rest is advice.
        reason = re.split(r"\n|\. ", str(error.__context__ or error).strip(), maxsplit=1)[0]
        raise UsageError(f"{path} cannot be read: {reason or type(error).__name__}") from error
    if not isinstance(state, dict) or not state:
        raise UsageError(f"{path} holds a {type(state).__name__}, not a state dict")
    if not all(isinstance(key, str) for key in state):
        raise UsageError(f"{path} holds a dict whose keys are not all text, not a state dict")
    return dict(state)


def _check_names(file: Any) -> None:
    """Raise RefusedTypesError if a file from before torch 1.6 names more than tensors consist of.

    ``weights_only`` permits functions, too, whose results may be of any size.
    """
    for _ in range(5):  # its number, version, machine, state, and the storages' names
        for operation, argument, _ in pickletools.genops(file):
            name = str(argument).replace(" ", ".")
            if operation.name == "GLOBAL" and not _OF_TENSORS.fullmatch(name):
                raise RefusedTypesError([name])


class _Storages:
    """The memory of an old file's tensors, which torch makes first and fills afterwards."""

    def __init__(self, size: int) -> None:
        self._left = size
        self._made: list[tuple[torch.UntypedStorage, int]] = []

    def __call__(self, storage: torch.UntypedStorage, location: str) -> torch.UntypedStorage:
        """On the CPU, and without what was in that memory before."""
        self._left -= storage.nbytes()
        if self._left < 0:
            raise ValueError("its tensors are larger than the file")
        torch.empty(0, dtype=torch.uint8).set_(storage).zero_()
        self._made.append((storage, storage.nbytes()))
        return storage

    def check(self) -> None:
        """Raise ValueError if a tensor made its memory larger: the file has no bytes for that."""
        if any(storage.nbytes() != size for storage, size in self._made):
            raise ValueError("a tensor is larger than its data")


def _advice(path: Path) -> str:
    """What becomes of a file or folder that Hugging Face's libraries wrote; else ""."""
    names = [path.name, *(each.name for each in path.glob("*"))]
    if not any(map(re.compile(r".*\.safetensors|pytorch_model.*\.bin").fullmatch, names)):
        return ""
    return (
        " (Hugging Face's libraries wrote it): load the model with from_pretrained(), save it with "
        "torch.save(model.state_dict(), ...), and import that file"
    )


# --- stock DCP ------------------------------------------------------------------------------------


class _Properties(metadata.TensorProperties):
    """Also of torch 2.15, whose sixth value (strides, of one rank's piece) is not kept."""

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state[:5])  # type: ignore[no-untyped-call]
        self.__class__ = metadata.TensorProperties  # type: ignore[assignment]


_ALLOWED: Sequence[SafeGlobal] = (
    *(getattr(metadata, name) for name in metadata.__all__ if name != "TensorProperties"),
    metadata._MEM_FORMAT_ENCODING,
    filesystem._StorageInfo,
    (_Properties, f"{metadata.__name__}.TensorProperties"),
    # Where torch 2.2 had them.
    (_Properties, f"{_OLD_MODULE}.TensorProperties"),
    (metadata._MEM_FORMAT_ENCODING, f"{_OLD_MODULE}.MEM_FORMAT_ENCODING"),
    # Of the folder that it was saved as, on Windows.
    *(
        (pathlib.PurePosixPath, f"{module}.{name}")
        for module in ("pathlib", "pathlib._local")
        for name in ("WindowsPath", "PureWindowsPath")
    ),
)


def _check_size(root: Any, limit: int) -> None:
    """Raise ValueError if ``root`` has more parts than ``limit``, shared ones counted each time.

    A few bytes can describe a tuple of the same tuple twice, and so on: nobody could print that.
    """
    parts = [root]
    for each in parts:  # it grows
        if isinstance(each, Mapping):
            parts += [*each.keys(), *each.values()]
        elif isinstance(each, list | tuple | Set):
            parts += each
        else:
            parts += getattr(each, "__dict__", {}).values()
        if len(parts) > limit:
            raise ValueError("it has more parts than bytes")


class _Folder(DefaultSavePlanner):
    """Plans the save of a stock DCP folder as it is: its pieces, names and values.

    Args:
        folder: With ``.metadata`` and the files that it names.

    Raises:
        UsageError: It is no such folder.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._root = Path(os.path.realpath(folder))
        self._maps: dict[str, memoryview] = {}
        if not (folder / METADATA).exists():
            why = _advice(folder) or ": stock DCP writes one"
            raise UsageError(f"{folder} has no {METADATA}{why}")
        data = self._file(METADATA)
        if len(data) > METADATA_BYTES_MAX:
            raise UsageError(f"{folder / METADATA} is too large")
        try:
            found = rebuild(data, _ALLOWED, bare=True)
            _check_size(found, len(data))
        except RefusedTypesError as error:
            raise UsageError(
                f"{METADATA} names {error}, which stock DCP does not write: it is not read"
            ) from error
        except (BadValueError, ValueError) as error:
            raise IntegrityError(f"{folder / METADATA} is damaged: {error}") from error
        if not isinstance(found, Metadata) or not all(
            isinstance(each, dict) for each in (found.storage_data, found.state_dict_metadata)
        ):
            raise UsageError(f"{folder / METADATA} is not of stock DCP's file system writer")
        self._found = found
        self.names = set(map(str, found.state_dict_metadata))

    def set_up_planner(
        self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False
    ) -> None:
        """Nothing: the state is in the folder."""

    def create_local_plan(self) -> SavePlan:
        items = []
        for name, stored in self._found.state_dict_metadata.items():
            if isinstance(stored, BytesStorageMetadata):
                items.append(WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO))
                continue
            for number, chunk in enumerate(stored.chunks):
                data = TensorWriteData(chunk, stored.properties, stored.size)
                index = MetadataIndex(name, chunk.offsets, number)
                items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
        return SavePlan(items, planner_data=self._found.planner_data)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        found = self._found
        return all_plans, Metadata(found.state_dict_metadata, planner_data=found.planner_data)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Any:
        index = write_item.index
        info = self._found.storage_data.get(index)
        if info is None:
            raise IntegrityError(f"{METADATA} has no place for {index}", state_key=index.fqn)
        if getattr(info, "transform_descriptors", None):
            raise UsageError(f"{index.fqn!r} was written with an extension of DCP's writer")
        view = self._file(info.relative_path)
        if not 0 <= info.offset <= info.offset + info.length <= len(view):
            raise IntegrityError(f"{info.relative_path} is truncated", state_key=index.fqn)
        blob = view[info.offset : info.offset + info.length]
        is_value = write_item.type == WriteItemType.BYTE_IO
        try:
            found = rebuild(blob, device="cpu", in_place=True)
        except BadValueError as error:
            if is_value and isinstance(error, RefusedTypesError):  # the save warns of it
                return io.BytesIO(blob)
            raise IntegrityError(
                f"{index.fqn!r} in {info.relative_path} is no {'value' if is_value else 'tensor'} "
                f"of stock DCP: {error}",
                state_key=index.fqn,
            ) from error
        return io.BytesIO(blob) if is_value else found

    def _file(self, name: str) -> memoryview:
        """A file of the folder, mapped: private, so that nothing can change it."""
        if name not in self._maps:
            if os.path.basename(name) != name:
                raise UsageError(f"{METADATA} names {name!r}, which is not in its folder")
            try:
                with self._open(name) as file:
                    mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            except (OSError, ValueError) as error:
                raise IntegrityError(f"{self._root / name} cannot be read: {error}") from error
            self._maps[name] = memoryview(mapped)
        return self._maps[name]

    def _open(self, name: str) -> io.FileIO:
        """A regular file of the folder: no pipe that never ends, and no link that leads out."""
        path = Path(os.path.realpath(self._root / name))
        if not path.is_relative_to(self._root):
            raise IntegrityError(
                f"{self._root / name} is a link out of its folder: put the file itself there"
            )
        return io.FileIO(open_regular(path, os.O_RDONLY, str(self._root / name)))
