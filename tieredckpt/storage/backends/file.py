"""The file tier: a namespace's objects as files below ``<root>/<namespace>``.

    <root>/<namespace>/
      .lock                          locked by the one agent that uses it (scope host)
      manifests/<stream>/<save id>   plans/<plan id>   segments/<segment id>   attempts/...
      tmp/<random>                   being written; swept when the tier is opened (scope host)

Segments are written with direct I/O if the file system supports it, else buffered. The order of
write, sync and link is explained in :mod:`tieredckpt.storage.folder`.
"""

from __future__ import annotations

import fcntl
import os
import threading
from pathlib import Path

from tieredckpt.errors import ConfigError, IntegrityError, TieredCkptError, TierUnavailableError
from tieredckpt.format.manifest import check_name
from tieredckpt.storage.base import ByteSource, OpenObject, Scope, unavailable
from tieredckpt.storage.file_io import ALIGN_BYTES, Output, aligned_buffer, set_direct, write_from
from tieredckpt.storage.folder import ObjectFolder, medium
from tieredckpt.storage.headroom import Headroom

LOCK = ".lock"
"""Not a valid key, since it begins with a dot."""


def folder_of_url(url: str) -> Path:
    """The absolute path that a ``file://`` URL names, literally, without %-escapes.

    Raises:
        ConfigError: Another scheme, a host, or a path that is not absolute.
    """
    scheme, _, rest = url.partition("://")
    if scheme != "file" or not rest.startswith("/") or "\0" in rest:
        raise ConfigError(
            f"{url!r} is not the URL of a folder: write file:///absolute/path", key="url"
        )
    return Path(rest)


def device_of(folder: Path) -> int:
    """Number of the file system that ``folder`` is on, or would be on once it is made.

    Raises:
        TierUnavailableError: Access is denied.
    """
    with medium("file", f"look for {folder}"):
        for each in (folder, *folder.parents):
            try:
                return os.stat(each).st_dev
            except (FileNotFoundError, NotADirectoryError):
                continue
    raise AssertionError("unreachable: there is always a root")


class FileTier(ObjectFolder):
    """Objects are files below ``<root>/<namespace>``.

    Args:
        name: The tier's name in the configuration.
        root: The folder of the URL; made if missing.
        namespace: Name of the namespace.
        scope: HOST locks the folder, so that no second agent uses it, and sweeps ``tmp/``.
        direct: False never uses O_DIRECT.
        read_only: Locks, creates and sweeps nothing (for processes other than the owner).

    Raises:
        TierUnavailableError: The folder cannot be made or read, or another agent has it.
        CapacityError: There is no space even for the folder.
        ValueError: ``namespace`` is not a name.
    """

    def __init__(
        self,
        name: str,
        root: Path,
        namespace: str,
        *,
        scope: Scope = Scope.HOST,
        direct: bool = True,
        read_only: bool = False,
    ) -> None:
        folder = root / check_name(namespace, "namespace")
        super().__init__(
            name,
            scope,
            folder,
            durable=True,
            advice=f"free space on the file system of {folder}, or keep fewer checkpoints in "
            f"tier {name} (tiers[].keep.last)",
            read_only=read_only,
        )
        self._write_direct = direct
        self._read_direct = direct
        self._probed = False
        self._lock_fd = -1
        self._idle_buffers: list[memoryview] = []
        self._buffers_lock = threading.Lock()
        if read_only:
            return
        self.make()
        if scope is Scope.HOST:
            try:
                self._lock_folder()
                self.sweep()
                self.sync_names()
            except TieredCkptError:
                self.close()  # or our own lock would refuse the next attempt
                raise

    def _lock_folder(self) -> None:
        with medium(self.name, f"lock {self.root}"):
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            self._lock_fd = os.open(self.root / LOCK, flags, 0o600)
            try:
                fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise unavailable(
                    self.name,
                    f"another agent uses {self.root}: two hosts or runtime folders must not share "
                    f"a folder of scope host; give tier {self.name} another one",
                ) from error

    def beside(self) -> list[str]:
        with medium(self.name, f"list {self.root.parent}"):
            return [each.parent.name for each in self.root.parent.glob("*/manifests")]

    def is_intact(self) -> bool:
        """Whether the lock and all folders that were made or used still exist.

        False: they were deleted or unmounted, so puts fail and another agent may lock the folder.
        Close this tier and open a new one.
        """
        if self._lock_fd >= 0:
            try:
                there = os.stat(self.root / LOCK, follow_symlinks=False)
                if not os.path.samestat(there, os.fstat(self._lock_fd)):
                    return False
            except OSError:
                return False
        return super().is_intact()

    def close(self) -> None:
        """Release the lock on the folder. Idempotent; open objects are not closed."""
        fd, self._lock_fd = self._lock_fd, -1
        if fd >= 0:
            os.close(fd)

    def put_from(self, key: str, source: ByteSource) -> None:
        self._check_writable()
        if self.is_there(key, source.size):
            self.publish(key)
            return
        self._check_space(key, source.size)
        with medium(
            self.name,
            f"write {key} to tier {self.name}",
            needed_bytes=source.size,
            advice=self._advice,
        ):
            linked = self._write(key, source)
        if not linked:
            self.check_kept(key, source.size)
        self.publish(key)

    def _check_space(self, key: str, size: int) -> None:
        """Raise CapacityError before gigabytes are written to a full disk, not after."""
        with medium(self.name, f"ask for free space in {self.root}"):
            stat = os.statvfs(self.root)
        available = stat.f_bavail * stat.f_frsize
        headroom = Headroom(available, "file system", self._advice)
        headroom.check(size, f"{key} needs {size} bytes in tier {self.name}", tier=self.name)

    def _write(self, key: str, source: ByteSource) -> bool:
        """Write, sync, link; False if the name was taken meanwhile. Leaves nothing in ``tmp/``."""
        with self._buffers_lock:
            buffers, self._idle_buffers = self._idle_buffers, []
        try:
            with self.unpublished() as (fd, path):
                output = Output(fd, direct=self._write_direct and set_direct(fd))
                write_from(source, output, buffers)
                if output.refused:
                    self._write_direct = False  # it will refuse the next one too
                # Direct writes need it, too: for the file's size and extents, and the disk's cache.
                self.sync(fd)
                return self.link(path, self.path(key))
        finally:
            with self._buffers_lock:
                # One set is kept for the next spill: fresh memory costs as much as writing.
                self._idle_buffers = self._idle_buffers or buffers

    def open(self, key: str) -> OpenObject:
        opened = super().open(key)
        if opened.direct and not self._probed and opened.size >= ALIGN_BYTES:
            # Trainers read from the descriptor, so a file system that accepts the flag but refuses
            # the transfer is detected here, once.
            try:
                opened.read_into(0, aligned_buffer(ALIGN_BYTES))
            except (IntegrityError, TierUnavailableError):
                pass  # the reader will see the error
            else:
                self._probed, self._read_direct = True, opened.direct
        return opened

    def sweep_unfinished(self, older_than_s: float) -> int:
        self._check_writable()
        return self.sweep(older_than_s)
