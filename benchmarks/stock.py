"""What is compared with besides the limits: DCP's own writers, and a writer that writes nothing."""

from __future__ import annotations

import shutil
import time
from concurrent.futures import Future as ConcurrentFuture
from pathlib import Path
from typing import Any, cast

from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from benchmarks.state import State


class NoWriter(StorageWriter):
    """Writes nothing: what a save with it costs is DCP's own planning and collectives."""

    def reset(self, checkpoint_id: object = None) -> None: ...

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None: ...

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        done: Future[list[WriteResult]] = Future()
        done.set_result([])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None: ...

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: object) -> bool:
        return True


def planning(state: State) -> float:
    """Seconds of a save that writes nothing."""
    start_s = time.perf_counter()
    state_dict_saver.save(state, storage_writer=NoWriter())
    return time.perf_counter() - start_s


def save(state: State, folder: Path) -> float:
    """Seconds of DCP's FileSystemWriter (default options: fsync, one thread) to a new folder."""
    shutil.rmtree(folder, ignore_errors=True)
    start_s = time.perf_counter()
    state_dict_saver.save(state, storage_writer=FileSystemWriter(folder))
    return time.perf_counter() - start_s


def load(state: State, folder: Path) -> float:
    """Seconds of DCP's FileSystemReader, from the page cache if the folder was just written."""
    start_s = time.perf_counter()
    state_dict_loader.load(state, storage_reader=FileSystemReader(folder))
    return time.perf_counter() - start_s


def async_save(state: State, folder: Path) -> tuple[float, float]:
    """Seconds that ``dcp.async_save`` (default: thread) stalls, and seconds until it is on disk."""
    shutil.rmtree(folder, ignore_errors=True)
    start_s = time.perf_counter()
    done = state_dict_saver.async_save(state, storage_writer=FileSystemWriter(folder))
    stall_s = time.perf_counter() - start_s
    cast("ConcurrentFuture[Metadata]", done).result()
    return stall_s, time.perf_counter() - start_s
