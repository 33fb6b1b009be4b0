"""tieredckpt as the suite sees it: the only module of the suite that knows a plug-in of ours."""

from __future__ import annotations

import os
import select
import time
from pathlib import Path
from typing import Any

from msgspec.structs import replace
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter

from tieredckpt.engine import Engine, Reader
from tieredckpt.errors import AgentError, UsageError, WaitError
from tieredckpt.rpc.agent_client import AgentClient
from tieredckpt.testing.dcp.storage import Storage

STOP_S = 30.0
PURGE_S = 20.0
SPILL_S = 30.0


class MemoryStorage(Storage):
    """Checkpoints in host memory only."""

    tiers: tuple[str, ...] = ()
    unsafe_pickle = False

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.engine = Engine.open(self.config(folder), unsafe_pickle=self.unsafe_pickle)

    @classmethod
    def config(cls, folder: Path) -> dict[str, Any]:
        """The engine's configuration."""
        return {
            "namespace": folder.name,
            "memory": {"capacity": "1GiB", "keep": {"last": 3}},
            "agent": {"runtime_dir": str(_runtime_dir(folder)), "start_timeout": "60s"},
            "recovery": {"wait": "0s"},
            "save": {"timeout": "60s", "on_error": "raise"},
            "tiers": [
                {"name": name, "url": f"file://{folder / name}", "every": "1 steps"}
                for name in cls.tiers
            ],
        }

    def writer(self, step: int, stream: str = "main") -> StorageWriter:
        return self.engine.writer(step, stream)

    def reader(self, step: int, stream: str = "main") -> StorageReader:
        return self.engine.reader(step, stream)

    def wait_at_most(self, seconds: float) -> None:
        session = self.engine._session
        save = replace(session.config.save, timeout_s=seconds)
        session.config = replace(session.config, save=save)

    def close(self) -> None:
        self.engine.close()

    @classmethod
    def discard(cls, folder: Path) -> None:
        _purge(folder)

    @classmethod
    def stop(cls, root: Path) -> None:
        runtime_dir = root / "agent"
        if not runtime_dir.is_dir():
            return  # no scenario came so far
        with AgentClient(runtime_dir, deadline_s=STOP_S) as client:
            handle = os.pidfd_open(client.health().pid)
            try:
                client.shutdown()
                if not select.select([handle], [], [], STOP_S)[0]:
                    raise AgentError(f"the agent in {runtime_dir} does not end", outcome="unknown")
            finally:
                os.close(handle)


class FileTierStorage(MemoryStorage):
    """A file tier below memory, and memory is emptied at every restart of the job."""

    tiers = ("disk",)

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._wrote = False
        self._readers: list[Reader] = []

    def writer(self, step: int, stream: str = "main") -> StorageWriter:
        self._wrote = True
        return super().writer(step, stream)

    def reader(self, step: int, stream: str = "main") -> StorageReader:
        reader = self.engine.reader(step, stream)
        self._readers.append(reader)
        return reader

    def close(self) -> None:
        super().close()
        # Or what is meant to be read from the file tier was in memory after all.
        if not self._wrote and any("memory" in each.bytes_by_tier for each in self._readers):
            raise AssertionError("read from memory, which was emptied before")

    @classmethod
    def restarted(cls, folder: Path) -> None:
        _spilled(folder)
        _purge(folder)


class EngineStorage(MemoryStorage):
    """In memory, and loaded with ``engine.load``, which agrees on a checkpoint and is strict."""

    unsafe_pickle = True  # scenarios have objects of their own

    def load(self, state: dict[str, Any], step: int, stream: str = "main", **options: Any) -> None:
        if options.pop("no_dist", False):
            super().load(state, step, stream, no_dist=True, **options)  # it has no such option
            return
        options["strict"] = False  # scenarios load parts of what they saved, and older steps
        older = any(each.step > step for each in self.engine.checkpoints(stream))
        options["abandon_newer"] = options["again"] = older
        loaded = self.engine.load(state, step=step, stream=stream, **options)
        assert loaded == step


def _runtime_dir(folder: Path) -> Path:
    # One agent for all scenarios; each has a namespace of its own.
    return folder.parent / "agent"


def _spilled(folder: Path) -> None:
    """Wait until the file tier has everything."""
    until_s = time.monotonic() + SPILL_S
    with AgentClient(_runtime_dir(folder), deadline_s=STOP_S) as client:
        while True:
            tiers = [
                tier
                for each in client.status().namespaces
                if each.name == folder.name
                for tier in each.tiers
            ]
            if not any(tier.queued or tier.active_save_id for tier in tiers):
                return
            if time.monotonic() > until_s:
                raise WaitError(f"the file tier has not got everything: {tiers}", reason="timeout")
            time.sleep(0.01)


def _purge(folder: Path) -> None:
    runtime_dir = _runtime_dir(folder)
    if not runtime_dir.is_dir():
        return
    until_s = time.monotonic() + PURGE_S
    with AgentClient(runtime_dir, deadline_s=STOP_S) as client:
        while folder.name in {each.name for each in client.status().namespaces}:
            try:
                client.purge(folder.name)
                return
            except UsageError:  # the agent has not seen yet that a killed rank is gone
                if time.monotonic() > until_s:
                    raise
                time.sleep(0.02)
