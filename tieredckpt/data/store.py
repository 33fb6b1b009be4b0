"""The entries of one stream: files in the runtime folder, named by their steps.

A stream is what ranks with the same rows share. Its name is a digest of the loader's settings and
of the ranks' coordinate, so that another data set, or another world, has other entries.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import time

from tieredckpt import failpoints
from tieredckpt.data.entry import Encoded, Entry, read, write
from tieredckpt.dcp.job.session import Session
from tieredckpt.errors import IntegrityError, TieredCkptError
from tieredckpt.format.digest import digest
from tieredckpt.rpc.messages.agent import ReserveData

RESERVE_S = 2.0
"""How long the agent may take to free space."""
RETRY_S = 30.0
"""An agent that failed is not asked again for so long."""

log = logging.getLogger(__name__)


class Store:
    """See the module.

    Args:
        session: An open engine's.
        stream: 32 hex digits.
    """

    def __init__(self, session: Session, stream: str) -> None:
        self._client, self.limits = session.client, session.config.data
        info = os.statvfs(self._client.runtime_dir)
        self._capacity_bytes = self.limits.capacity_bytes or info.f_blocks * info.f_frsize // 8
        self._stream = stream
        self._folder = self._client.runtime_dir / "data" / session.namespace / stream
        self._lock_fd = -1
        self._not_before_s = 0.0

    def has(self, step: int) -> bool:
        """Whether there is a file for a step; what is in it is not known."""
        return os.path.lexists(self._folder / str(step))

    def read(self, step: int) -> Entry | None:
        """The entry of a step, verified; None: there is none. A damaged one is deleted."""
        try:
            return read(self._folder / str(step), self._id(step))
        except FileNotFoundError:
            return None
        except (IntegrityError, OSError) as error:
            log.warning("step %d in the data cache is loaded again: %s", step, error)
            self.drop(step)
            return None

    def _id(self, step: int) -> bytes:
        return digest(f"{self._folder.parent.name}/{self._stream}/{step}".encode())

    def drop(self, step: int) -> None:
        """Delete the entry of a step, if there is one."""
        with contextlib.suppress(OSError):
            (self._folder / str(step)).unlink()

    def write(self, step: int, position: int, encoded: Encoded) -> bool:
        """Store an entry for all ranks; False: the cache is full, or there is no agent.

        Args:
            step: Its step.
            position: The last step that this rank has used.
            encoded: The entry.
        """
        if time.monotonic() < self._not_before_s:
            return False
        request = ReserveData(
            session_id=self._client.session_id, stream=self._stream, step=step,
            size_bytes=encoded.layout.segment_bytes, position=position,
            behind=self.limits.behind, capacity_bytes=self._capacity_bytes,
        )  # fmt: skip
        temporary = self._folder / f"{step}.{request.session_id}"
        try:
            if not self._client.call(request, within_s=RESERVE_S).granted:
                return False
            failpoints.reach("data.reserved")
            # Not made here, as the agent would not count it.
            fd = os.open(temporary, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            write(fd, encoded, self._id(step))
            failpoints.reach("data.written")
            # Readers see all of it or nothing. No sync: it is to survive processes only.
            temporary.rename(self._folder / str(step))
        except (OSError, TieredCkptError) as error:
            log.warning("step %d is not in the data cache: %s", step, error)
            with contextlib.suppress(OSError):
                temporary.unlink()
            self._not_before_s = time.monotonic() + RETRY_S
            return False
        return True

    def lock(self) -> bool:
        """Become the one process of the stream that loads, unless another one is."""
        try:
            if self._lock_fd < 0:
                self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
                self._lock_fd = os.open(self._folder / "lock", flags, 0o600)
            # A lock of the process: forked loader workers do not keep it when their parent dies.
            fcntl.lockf(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        return True

    def unlock(self) -> None:
        """Let another process load. Idempotent."""
        fd, self._lock_fd = self._lock_fd, -1
        if fd >= 0:
            os.close(fd)
