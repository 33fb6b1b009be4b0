"""What a plug-in gives to the suite: a writer and a reader for each checkpoint of a folder."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter

BUILT_IN = {
    "stock": "tieredckpt.testing.dcp.storage:StockStorage",
    "tieredckpt": "tieredckpt.testing.dcp.ours:MemoryStorage",
    "tieredckpt-engine": "tieredckpt.testing.dcp.ours:EngineStorage",
    "tieredckpt-file": "tieredckpt.testing.dcp.ours:FileTierStorage",
}
"""Names that the command line knows. They are imported only when asked for."""


class Storage:
    """One rank's view of one run's checkpoints; subclass it and say what your plug-in is.

    The suite makes one on each rank when a scenario begins, after ``init_process_group``, closes
    it, and makes another one where the scenario restarts the job. All ranks of a scenario get the
    same ``folder``, which is theirs alone. Steps and streams may be mapped to anything; only what
    was saved under a step and stream is loaded under them.

    Args:
        folder: Exists, is empty at first, and is deleted after the scenario.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def writer(self, step: int, stream: str = "main") -> StorageWriter:
        """A writer for one save of ``step`` in the sequence of checkpoints ``stream``."""
        raise NotImplementedError

    def reader(self, step: int, stream: str = "main") -> StorageReader:
        """A reader of that checkpoint, which need not exist: then loading from it must raise."""
        raise NotImplementedError

    def load(self, state: dict[str, Any], step: int, stream: str = "main", **options: Any) -> None:
        """How the suite loads: ``dcp.load`` with :meth:`reader`.

        A plug-in with a function of its own around it overrides this, to have that one tested.

        Args:
            state: As for ``dcp.load``.
            step: Only this one, whatever else there is.
            stream: Of which it is.
            options: ``planner``, ``process_group`` or ``no_dist``, as for ``dcp.load``.
        """
        dcp.load(state, storage_reader=self.reader(step, stream), **options)

    def wait_at_most(self, seconds: float) -> None:
        """From now on let a save that waits for other ranks give up after so long.

        Only for writers that wait by themselves, where DCP does not (``use_collectives=False``).
        """

    def close(self) -> None:
        """Called on each rank at the end of the scenario, and before a restart of the job."""

    # What follows is called in the process that runs the suite, which has no process group.

    @classmethod
    def start(cls, root: Path) -> None:
        """Called once before the first scenario; ``root`` holds the folders of all."""

    @classmethod
    def restarted(cls, folder: Path) -> None:
        """Called on one rank while all have closed theirs, before they open again."""

    @classmethod
    def discard(cls, folder: Path) -> None:
        """Called after a scenario, when its ranks have closed, or are dead."""

    @classmethod
    def stop(cls, root: Path) -> None:
        """Called once after the last scenario, before ``root`` is deleted."""


Factory = Callable[[Path], tuple[StorageWriter, StorageReader]]
"""Takes a path of one checkpoint, whose parent exists: a writer to it and a reader from it."""


class StockStorage(Storage):
    """PyTorch's own: ``FileSystemWriter`` and ``FileSystemReader``, as they are by default."""

    def writer(self, step: int, stream: str = "main") -> StorageWriter:
        return FileSystemWriter(_path(self.folder, step, stream))

    def reader(self, step: int, stream: str = "main") -> StorageReader:
        return FileSystemReader(_path(self.folder, step, stream))


class PairStorage(Storage):
    """A storage of a plain factory of (writer, reader).

    Args:
        folder: As for :class:`Storage`.
        factory: See :data:`Factory`.
    """

    def __init__(self, folder: Path, factory: Factory) -> None:
        super().__init__(folder)
        self._factory = factory

    def writer(self, step: int, stream: str = "main") -> StorageWriter:
        return self._pair(step, stream)[0]

    def reader(self, step: int, stream: str = "main") -> StorageReader:
        return self._pair(step, stream)[1]

    def _pair(self, step: int, stream: str) -> tuple[StorageWriter, StorageReader]:
        path = _path(self.folder, step, stream)
        path.parent.mkdir(parents=True, exist_ok=True)
        return self._factory(path)


def _path(folder: Path, step: int, stream: str) -> Path:
    return folder / stream / f"step-{step}"


def hooks_of(found: Any) -> type[Storage]:
    """The class whose class methods are called around scenarios: the author's, or none of note.

    Raises:
        TypeError: It is neither.
    """
    if isinstance(found, type) and issubclass(found, Storage):
        return found
    if isinstance(found, Storage) or not callable(found):
        raise TypeError(f"{found!r} is neither a subclass of Storage nor a function")
    return StockStorage


def find(name: str) -> Any:
    """What ``package.module:attribute``, or a built-in name, stands for.

    Raises:
        ValueError: It has no colon, and is no built-in name.
        ImportError: There is no such module.
        AttributeError: The module has nothing of that name.
    """
    module, colon, attribute = BUILT_IN.get(name, name).partition(":")
    if not colon:
        raise ValueError(
            f"{name!r} is neither one of {', '.join(BUILT_IN)} nor package.module:name"
        )
    found = importlib.import_module(module)
    for part in attribute.split("."):
        found = getattr(found, part)
    return found


def open_storage(found: Any, folder: Path) -> Storage:
    """This rank's storage over ``folder``."""
    if isinstance(found, type) and issubclass(found, Storage):
        return found(folder)
    return PairStorage(folder, found)
