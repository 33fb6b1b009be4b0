"""What a scenario holds on one rank: its storage, its place among the ranks, DCP's calls."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from tieredckpt.testing.dcp import oracle
from tieredckpt.testing.dcp.storage import Storage, hooks_of, open_storage

MEET_S = 45.0
"""How long a rank waits for the others where all of them must come by."""


class Job:
    """One rank of one stage of a scenario.

    Args:
        found: The storage class, or factory, under test.
        folder: The scenario's.
        stage: Which start of the job this is, from 0 on.
        rank: This rank.
        world: How many there are.
        store: For meeting the other ranks without collectives, which may be out of step after a
            failure.
    """

    def __init__(
        self, found: Any, folder: Path, stage: int, rank: int, world: int, store: dist.Store
    ) -> None:
        self.stage = stage
        self.rank = rank
        self.world = world
        self._found = found
        self._folder = folder
        self._store = store
        self._meetings = 0
        self._storage: Storage | None = open_storage(found, folder)

    @property
    def storage(self) -> Storage:
        """The open storage."""
        assert self._storage is not None
        return self._storage

    def close(self) -> None:
        """Close the storage. Idempotent."""
        if self._storage is not None:
            storage, self._storage = self._storage, None
            storage.close()

    # --- DCP ------------------------------------------------------------------------------------

    def save(self, state: dict[str, Any], step: int, stream: str = "main", **options: Any) -> Any:
        """``dcp.save`` with a writer of the plug-in."""
        return dcp.save(state, storage_writer=self.storage.writer(step, stream), **options)

    def load(self, state: dict[str, Any], step: int, stream: str = "main", **options: Any) -> None:
        """``dcp.load`` with a reader of the plug-in, or what it has around that."""
        self.storage.load(state, step, stream, **options)

    def save_filled(self, state: dict[str, Any], step: int, **options: Any) -> None:
        """Fill the tensors of ``state`` for ``step`` and save them."""
        oracle.fill(state, step)
        self.save(state, step, **options)

    def load_checked(self, state: dict[str, Any], step: int, **options: Any) -> None:
        """Spoil the tensors of ``state``, load ``step`` into them, and compare every bit."""
        oracle.fill(state, -1)
        self.load(state, step, **options)
        assert oracle.check(state, step), "the scenario compares nothing"

    # --- the other ranks ------------------------------------------------------------------------

    def meet(self, word: str = "", ranks: Sequence[int] | None = None) -> list[str]:
        """Wait until all ranks have come here; what each of them says.

        Raises:
            AssertionError: One did not come in time.
        """
        self._meetings += 1
        everyone = range(self.world) if ranks is None else ranks
        self._store.set(f"{self._meetings}/{self.rank}", word)
        said = []
        for rank in everyone:
            key = f"{self._meetings}/{rank}"
            try:
                self._store.wait([key], timedelta(seconds=MEET_S))
            except (dist.DistStoreError, RuntimeError) as error:
                raise AssertionError(
                    f"rank {rank} did not come within {MEET_S:g} s: it hangs, or it died"
                ) from error
            said.append(self._store.get(key).decode())
        return said

    def tell(self, word: str) -> None:
        """Let who waits for ``word`` on this rank's behalf, or on another's, go on."""
        self._store.set(f"told/{word}", "")

    def wait_for(self, word: str) -> None:
        """Wait until some rank has told ``word``."""
        try:
            self._store.wait([f"told/{word}"], timedelta(seconds=MEET_S))
        except (dist.DistStoreError, RuntimeError) as error:
            raise AssertionError(f"no rank reported {word!r} within {MEET_S:g} s") from error

    def all_raise(
        self, call: Callable[[], Any], ranks: Sequence[int] | None = None
    ) -> BaseException:
        """Check that ``call`` raises on every rank, and that none of them hangs.

        Returns:
            What it raised on this one.
        """
        raised: BaseException | None = None
        try:
            call()
        # Of whatever kind: only that it raises is asked for. DCP's own is no Exception.
        except (Exception, CheckpointException) as error:  # noqa: BLE001
            raised = error
        said = self.meet("" if raised is None else "raised", ranks)
        silent = [rank for rank, word in enumerate(said) if not word]
        assert raised is not None, f"no error on rank(s) {silent}, where there must be one on all"
        assert not silent, f"no error on rank(s) {silent}, while others raised {raised!r}"
        return raised

    def not_visible(self, state: dict[str, Any], step: int, stream: str = "main") -> None:
        """Check that ``step`` cannot be loaded, on any rank."""
        self.all_raise(lambda: self.load(state, step, stream))

    def restart(self) -> None:
        """As if the job ended and started again: nothing that the plug-in holds here survives."""
        self.close()
        self.meet()
        if self.rank == 0:
            hooks_of(self._found).restarted(self._folder)
        self.meet()
        self._storage = open_storage(self._found, self._folder)

    def die(self) -> None:
        """End this process as the kernel's OOM killer does."""
        os.kill(os.getpid(), signal.SIGKILL)
