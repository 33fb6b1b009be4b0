"""A checkpoint to read beside a live job: opened read-only, chosen, and read verified."""

from __future__ import annotations

import io
import secrets
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import ReadItem

from tieredckpt.config.schema import Config
from tieredckpt.dcp.job.session import Session
from tieredckpt.dcp.load.reader import Reader, Write
from tieredckpt.dcp.open import open_together
from tieredckpt.dcp.state.checkpoint_id import DEFAULT_STREAM
from tieredckpt.dcp.state.planner import SafeLoadPlanner
from tieredckpt.errors import (
    IntegrityError,
    NotFoundError,
    TieredCkptError,
    TierUnavailableError,
)
from tieredckpt.format.manifest import Manifest
from tieredckpt.recovery.plan import Candidate

SCRATCH_BYTES = 16 << 20
"""A load takes more, but an export may take 256 MiB; of these torch and its libraries use 210."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Which:
    """The checkpoint that is asked for.

    Attributes:
        step: Its step; None: the newest that can be restored.
        save_id: Its id, also of one that is off the timeline; None: any.
        stream: Its sequence of checkpoints.
    """

    step: int | None = None
    save_id: str | None = None
    stream: str = DEFAULT_STREAM


class Source:
    """One checkpoint, wherever it is. Made by :func:`opened`."""

    def __init__(self, session: Session, which: Which) -> None:
        first = Reader(session, which.step, which.stream, which.save_id)
        self._session = session
        self.metadata: Metadata = first.read_metadata()
        _ = self.metadata.state_dict_metadata  # raises the error if it could not be read
        self.candidate: Candidate = first.chosen
        self.wrappers = first.wrappers
        # Pinned: the same in all reads, although the job goes on to save.
        self.reader = Reader(
            session, pinned=self.candidate, check_casts=True, scratch_bytes=SCRATCH_BYTES
        )

    @property
    def session(self) -> Session:
        """That reads it; it only reads."""
        return self._session

    @property
    def manifest(self) -> Manifest:
        """Of the checkpoint."""
        return self.candidate.manifest

    def read(
        self, state: dict[str, Any], planner: SafeLoadPlanner, write: Write | None = None
    ) -> None:
        """Read the tensors of a flat state, each block verified.

        ``write`` takes each box from scratch memory to its tensor, called as
        :class:`~tieredckpt.dcp.load.reader.Reader` does; None: it is read into the tensor.

        Raises:
            NotFoundError: The checkpoint was deleted meanwhile.
            IntegrityError: All copies of some block are damaged.
            TierUnavailableError: Some copy could not be read, and no other one is intact.
            UsageError: A value does not survive the cast to its tensor's type.
        """
        self.reader.write = write
        try:
            with warnings.catch_warnings():
                # There is no process group, and casts were asked for.
                warnings.filterwarnings("ignore", message="torch.distributed is")
                warnings.filterwarnings("ignore", message="the load casts")
                dcp.load(state, storage_reader=self.reader, planner=planner, no_dist=True)
        except CheckpointException as error:
            first = next(iter(error.failures.values()))[0]
            if isinstance(first, IntegrityError | NotFoundError | TierUnavailableError):
                self._check_not_deleted(first)
            raise first from error

    def _check_not_deleted(self, error: TieredCkptError) -> None:
        manifest = self.manifest
        found = self._session.history.recovery_plan(manifest.stream, save_id=manifest.save_id)
        known = {each.save_id for each in (*found.refused, *found.abandoned)}
        if found.chosen is None and manifest.save_id not in known and not found.incomplete:
            raise NotFoundError(
                f"step {manifest.step} ({manifest.save_id}) was deleted by retention while it was "
                "read: export a newer one, or pin one before (`tieredckpt pin`)",
                key=manifest.save_id,
            ) from error

    def read_values(self, names: Sequence[str]) -> dict[str, bytes]:
        """The values of these keys, which are no tensors, as DCP's streams.

        Raises as :meth:`read`.
        """
        found: dict[str, bytes] = {}
        if names:
            self.read(dict.fromkeys(names), _KeepStreams(found))
        return found


class _KeepStreams(SafeLoadPlanner):
    """Puts the stream of each value into a dict."""

    def __init__(self, into: dict[str, bytes]) -> None:
        super().__init__(flatten_state_dict=False)
        self._into = into

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self._into[read_item.dest_index.fqn] = value.getvalue()


@contextmanager
def opened(config: Config, which: Which) -> Iterator[Source]:
    """Choose a checkpoint. No agent is started, and nothing is locked or written.

    Memory and other hosts are read through this host's agent if one runs, tiers from here.

    Args:
        config: Namespace, tiers and runtime folder.
        which: The checkpoint.

    Raises:
        NotFoundError, NoRecoverableCheckpointError: There is no such checkpoint.
        ConfigError, UsageError, TierUnavailableError: As ``Engine.open`` and ``Engine.reader``.
    """
    run_id = secrets.token_hex(16)
    session = open_together(config, None, unsafe_pickle=False, read_only=True, run_id=run_id)
    try:
        yield Source(session, which)
    finally:
        session.close()
