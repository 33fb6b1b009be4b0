"""Commits a stock DCP folder or a ``torch.save`` file as a checkpoint of a namespace.

The files are mapped, and their bytes copied once: into the slot of the new checkpoint. Only a file
of ``torch.save`` that is no archive is read first. Nothing in any is executed.
"""

from __future__ import annotations

import enum
import io
import mmap
import os
import pathlib
import pickle
import re
import secrets
import struct
import time
import warnings
from collections.abc import Mapping
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
from tieredckpt.dcp.state.values import rebuild
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
_ARCHIVE = b"PK\3\4"
_BEFORE_ARCHIVES = b"\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
"""A number that begins a file of ``torch.save`` before torch 1.6, after pickle's version."""


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
        UsageError: ``source`` is neither, contains a type that ``torch.load(weights_only=True)``
            refuses, or the namespace has checkpoints already: then with the keys that differ.
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
        except RecursionError as error:
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
        malformed = isinstance(
            first, AttributeError | TypeError | ValueError | LookupError | RecursionError
        )
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
        begin, size = file.read(16), os.fstat(file.fileno()).st_size
    is_archive = begin.startswith(_ARCHIVE)
    if not is_archive and begin[2:15] != _BEFORE_ARCHIVES:
        raise UsageError(f"{path} is no file of torch.save{_advice(path)}")
    storages = _Storages(size)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's own, of its old formats
            where: Any = "cpu" if is_archive else storages
            state = torch.load(real, map_location=where, mmap=is_archive, weights_only=True)
        storages.check()
    except (
        pickle.UnpicklingError, struct.error, ArithmeticError, AssertionError, AttributeError,
        EOFError, LookupError, MemoryError, RuntimeError, TypeError, ValueError,
    ) as error:  # fmt: skip
        raise UsageError(_refusal(path, error)) from error
    if not isinstance(state, dict) or not state:
        raise UsageError(f"{path} holds a {type(state).__name__}, not a state dict")
    if not all(isinstance(key, str) for key in state):
        raise UsageError(f"{path} holds a dict whose keys are not all text, not a state dict")
    return dict(state)


def _refusal(path: Path, error: Exception) -> str:
    """One line: torch's own has its advice first, and its reason in the error that it replaced."""
    if named := re.search(r"GLOBAL (\S+)", str(error)):
        return (
            f"{path} holds {named[1]}, which torch.load(weights_only=True) refuses: if you trust "
            "the file, load it with weights_only=False, and save its tensors as a file of their own"
        )
    reason = re.split(r"\n|\. ", str(error.__context__ or error).strip(), maxsplit=1)[0]
    return (
        f"{path} cannot be read by torch.load(weights_only=True): {reason or type(error).__name__}"
    )


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


class _MetadataUnpickler(pickle.Unpickler):
    """Unpickles DCP's metadata, and calls nothing but the classes that it consists of."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ALLOWED:
            return _ALLOWED[module, name]
        raise UsageError(
            f"{METADATA} names {module}.{name}, which stock DCP does not write: it is not read"
        )


def _member(kind: Any, name: str) -> Any:
    """A member of an enum, which Python 3.11.0 to 3.11.3 pickle as ``getattr`` of its class.

    Raises:
        UsageError: It is asked of anything but a class of ``_ALLOWED`` that is an enum.
    """
    if not isinstance(kind, enum.EnumMeta):
        raise UsageError(f"{METADATA} asks for {name!r} of {kind!r:.80}: it is not read")
    return kind[name]


class _Properties(metadata.TensorProperties):
    """Also of torch 2.15, whose sixth value (strides, of one rank's piece) is not kept."""

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state[:5])  # type: ignore[no-untyped-call]
        self.__class__ = metadata.TensorProperties  # type: ignore[assignment]


_ALLOWED: Mapping[tuple[str, str], Any] = {
    (each.__module__, each.__qualname__): each
    for each in (
        *(getattr(metadata, name) for name in metadata.__all__),
        metadata._MEM_FORMAT_ENCODING,
        filesystem._StorageInfo,
        torch.Size,
        torch.serialization._get_layout,
    )
} | {
    ("builtins", "getattr"): _member,
    (metadata.__name__, "TensorProperties"): _Properties,
    # Where torch 2.2 had them.
    (_OLD_MODULE, "TensorProperties"): _Properties,
    (_OLD_MODULE, "MEM_FORMAT_ENCODING"): metadata._MEM_FORMAT_ENCODING,
    # Of the folder that it was saved as; where its class is depends on the Python that saved it.
    **{
        (module, name): pathlib.PurePosixPath
        for module in ("pathlib", "pathlib._local")
        for name in ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath")
    },
    **{
        ("torch", name): each
        for name, each in vars(torch).items()
        if isinstance(each, torch.dtype | torch.layout | torch.memory_format)
    },
}


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
        try:
            with self._open(METADATA) as file:
                if os.fstat(file.fileno()).st_size > METADATA_BYTES_MAX:
                    raise UsageError(f"{folder / METADATA} is too large")
                found = _MetadataUnpickler(file).load()
        except TieredCkptError:
            raise
        except FileNotFoundError as error:
            why = _advice(folder) or ": stock DCP writes one"
            raise UsageError(f"{folder} has no {METADATA}{why}") from error
        except (pickle.UnpicklingError, EOFError, AttributeError, TypeError, ValueError,
                LookupError) as error:  # fmt: skip
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
        if write_item.type == WriteItemType.BYTE_IO:
            return io.BytesIO(blob)
        try:
            return rebuild(blob, device="cpu", in_place=True)
        except BadValueError as error:
            raise IntegrityError(
                f"{index.fqn!r} in {info.relative_path} is no tensor of stock DCP: {error}",
                state_key=index.fqn,
            ) from error

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
