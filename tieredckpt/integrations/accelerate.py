"""Hugging Face Accelerate's ``save_state`` and ``load_state`` with FSDP2, as one checkpoint.

``Accelerator.save_state`` makes two DCP checkpoints, of the model and of the optimizer, and files
for schedulers, random states and registered objects. Accelerate accepts no other storage writer.
So while it runs, and only then, ``torch.distributed.checkpoint.save`` and ``load`` are replaced for
the one folder that it was given (:func:`_redirected`). All of it, files included, becomes one
checkpoint with one commit: a killed trainer cannot leave a new model with an old optimizer, or
without its random states.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter

from tieredckpt.dcp.state.checkpoint_id import DEFAULT_STREAM
from tieredckpt.dcp.state.planner import SafeLoadPlanner
from tieredckpt.engine import Engine
from tieredckpt.errors import IntegrityError, TieredCkptError, UsageError
from tieredckpt.format.envelope import MALFORMED

try:
    from accelerate import Accelerator
    from accelerate.utils import save_fsdp_model, save_fsdp_optimizer
except ImportError as error:
    raise ImportError(
        "tieredckpt.integrations.accelerate needs accelerate 1.15 or newer, which cannot be "
        f"imported: {error}"
    ) from error

FILES_BYTES_MAX = 256 << 20
"""Limit of one rank's files, which are read into memory and stored as one value."""

_RANDOM_STATES = "random_states_"


def save_state(
    accelerator: Accelerator, engine: Engine, step: int, *, stream: str = DEFAULT_STREAM
) -> None:
    """Save the state of ``accelerator.save_state`` into the engine. Collective.

    Returns when the checkpoint is committed in host memory, as ``dcp.save`` does.

    Args:
        accelerator: With FSDP2 and ``SHARDED_STATE_DICT``; its models, optimizers, schedulers, data
            loaders and registered objects are saved, and each rank's random states.
        engine: Opened after the accelerator was made.
        step: The step after which the state is saved.
        stream: The sequence of checkpoints.

    Raises:
        UsageError: The accelerator is configured differently, or its files are too large.
        RankError: Accelerate failed on another rank.
        CheckpointException: As ``dcp.save``.
    """
    _check(accelerator)
    with tempfile.TemporaryDirectory(prefix="tieredckpt-") as name:
        folder = Path(name)
        state: dict[str, Any] = {}

        def collect() -> None:
            with _redirected(folder, save=state.__setitem__):
                accelerator.save_state(name)
            state[_files_key(accelerator.process_index)] = _pack(folder)

        # If this fails on one rank, the others must not wait for it in dcp.save.
        engine._session.ranks.run(collect)
    dcp.save(state, storage_writer=engine.writer(step, stream))


def load_state(
    accelerator: Accelerator,
    engine: Engine,
    *,
    step: int | None = None,
    stream: str = DEFAULT_STREAM,
    other_world_size: bool = False,
    unsafe_pickle: bool = False,
    abandon_newer: bool = False,
) -> int | None:
    """Restore the newest recoverable checkpoint by ``accelerator.load_state``. Collective.

    As ``Engine.load``: if a checkpoint is damaged, all ranks load the next older one together, and
    later saves continue from the restored checkpoint.

    Args:
        accelerator: After ``prepare``, configured as when the checkpoint was saved.
        engine: Opened after the accelerator was made.
        step: Only this step, and no older one instead.
        stream: The sequence of checkpoints.
        other_world_size: Accept a checkpoint of another number of ranks. Random states and other
            files per rank are then not restored.
        unsafe_pickle: Allow DCP's values to unpickle to anything.
        abandon_newer: Saves may abandon checkpoints that are newer than ``step``.

    Returns:
        The step; None if there certainly is no checkpoint.

    Raises:
        UsageError: The accelerator is configured differently, or the checkpoint is of another
            number of ranks.
        NoRecoverableCheckpointError, NotFoundError, CheckpointException: As ``Engine.load``.
    """
    _check(accelerator)
    rank = accelerator.process_index
    wanted = [_files_key(0)] if other_world_size else [_files_key(0), _files_key(rank)]
    with tempfile.TemporaryDirectory(prefix="tieredckpt-") as name:
        folder = Path(name)
        state = _structure(accelerator, folder)
        state |= dict.fromkeys(wanted, b"")
        # With this planner, strict=False allows additional keys in the checkpoint only.
        planner = SafeLoadPlanner(unsafe_pickle=unsafe_pickle)
        try:
            loaded = engine.load(
                state, step=step, stream=stream, strict=not other_world_size, planner=planner,
                abandon_newer=abandon_newer,
            )  # fmt: skip
        except (TieredCkptError, dcp.api.CheckpointException) as error:
            if not other_world_size:
                error.add_note(
                    "(if the message is about 'files of rank N': the checkpoint is of another "
                    "number of ranks; load_state(..., other_world_size=True) restores all but "
                    "random states)"
                )
            raise
        if loaded is None:
            return None

        def unpack() -> None:
            for key in wanted:
                _unpack(state[key], folder, random_states=not other_world_size)

        engine._session.ranks.run(unpack)
        with _redirected(folder, load=lambda part: state[part]):
            accelerator.load_state(name)
    return loaded


def _check(accelerator: Accelerator) -> None:
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    kind = getattr(getattr(plugin, "state_dict_type", None), "name", None)
    if not accelerator.is_fsdp2 or kind != "SHARDED_STATE_DICT":
        raise UsageError(
            "tieredckpt stores what Accelerate saves through DCP: set fsdp_version=2 and "
            "state_dict_type='SHARDED_STATE_DICT' in FullyShardedDataParallelPlugin, or use "
            "dcp.save with engine.writer(step)"
        )
    if accelerator.project_configuration.automatic_checkpoint_naming:
        raise UsageError(
            "automatic_checkpoint_naming makes Accelerate choose a folder of its own: turn it "
            "off, as tieredckpt names checkpoints by their step"
        )


@contextmanager
def _redirected(
    folder: Path,
    *,
    save: Callable[[str, Any], None] | None = None,
    load: Callable[[str], Any] | None = None,
) -> Iterator[None]:
    """Redirect DCP's saves to and loads from sub-folders of ``folder`` to ``save`` and ``load``.

    Calls with any other target, from any thread, reach DCP unchanged.
    """
    real_save, real_load = dcp.save, dcp.load

    def save_there(state_dict: Any, *args: Any, **options: Any) -> Any:
        part = _part(folder, options.get("storage_writer"))
        if part is None or save is None:
            return real_save(state_dict, *args, **options)
        save(part, state_dict)
        return None

    def load_there(state_dict: Any, *args: Any, **options: Any) -> None:
        part = _part(folder, options.get("storage_reader"))
        if part is None or load is None:
            real_load(state_dict, *args, **options)
        else:
            state_dict.update(load(part))

    vars(dcp).update(save=save_there, load=load_there)
    try:
        yield
    finally:
        vars(dcp).update(save=real_save, load=real_load)


def _part(folder: Path, storage: Any) -> str | None:
    if isinstance(storage, FileSystemWriter | FileSystemReader):
        path = Path(storage.path)
        if path.parent == folder:
            return path.name
    return None


def _structure(accelerator: Accelerator, folder: Path) -> dict[str, Any]:
    """Return the state of models and optimizers as Accelerate saves it, to load into."""
    state: dict[str, Any] = {}
    plugin = accelerator.state.fsdp_plugin
    with _redirected(folder, save=state.__setitem__):
        for number, model in enumerate(accelerator._models):
            save_fsdp_model(plugin, accelerator, model, str(folder), number)
        for number, optimizer in enumerate(accelerator._optimizers):
            model = accelerator._models[number]
            save_fsdp_optimizer(plugin, accelerator, optimizer, model, str(folder), number)
    return state


# --- files other than the tensors -----------------------------------------------------------------


def _files_key(rank: int) -> str:
    return f"files of rank {rank}"


def _pack(folder: Path) -> bytes:
    """All files below ``folder``, as one value. Raises UsageError if they are too large."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    size = sum(path.stat().st_size for path in paths)
    if size > FILES_BYTES_MAX:
        largest = max(paths, key=lambda path: path.stat().st_size)
        raise UsageError(
            f"Accelerate's files other than models and optimizers have {size} bytes, more than the "
            f"{FILES_BYTES_MAX} that a checkpoint may contain; the largest is {largest.name!r}"
        )
    return msgspec.msgpack.encode(
        {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}
    )


def _unpack(data: bytes, folder: Path, *, random_states: bool) -> None:
    """Write the files of :func:`_pack`. Raises IntegrityError: ``data`` is not its result."""
    try:
        files = msgspec.msgpack.decode(data, type=dict[str, bytes])
    except MALFORMED as error:
        raise IntegrityError(f"the checkpoint's files are malformed: {error}") from error
    for name, content in files.items():
        path = PurePosixPath(name)
        if path.is_absolute() or not path.parts or ".." in path.parts or "\0" in name:
            raise IntegrityError(f"the checkpoint holds a file named {name!r}")
        if random_states or not path.name.startswith(_RANDOM_STATES):
            target = folder / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)
