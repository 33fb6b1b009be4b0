"""Objects as files below one folder: names, atomic publication, durable or not.

The file tier is such a tier, and so is the memory tier for its small objects. An object becomes
visible atomically by a link from ``tmp/``, and never replaces another. A durable folder survives a
power cut at any instant: see :meth:`ObjectFolder.publish` for the order and its reasons.

Only :func:`medium` translates errors of the operating system to ours.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypedDict, Unpack

from tieredckpt import failpoints
from tieredckpt.errors import (
    CapacityError,
    IntegrityError,
    NotFoundError,
    Outcome,
    TierUnavailableError,
    UsageError,
)
from tieredckpt.format.manifest import NAME_PATTERN
from tieredckpt.storage.base import ObjectInfo, OpenObject, Scope, Tier, damaged, too_large
from tieredckpt.storage.file_io import OpenFile, denied, open_regular, set_direct


class Known(TypedDict, total=False):
    """Fields for the error of a call that may fail."""

    outcome: Outcome
    """The outcome if it fails; by default "not_applied"."""
    missing_key: str | None
    """The key that is missing if the system or the store reports that something does not exist;
    None: that means that the medium is broken (its folder or bucket was removed)."""
    needed_bytes: int
    """Bytes needed, for CapacityError; by default 0."""


# ENOMEM: of tmpfs, if the memory cgroup refuses a page instead of killing a process.
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOMEM})


@contextlib.contextmanager
def medium(tier: str, doing: str, *, advice: str = "", **known: Unpack[Known]) -> Iterator[None]:
    """Run a few system calls for ``tier``; ``doing`` completes "cannot ...".

    Args:
        tier: The tier's name, for the error.
        doing: The action, for the error.
        advice: What to do when there is no space.
        known: Fields of the error. ``missing_key`` applies to ENOENT.

    Raises:
        NotFoundError, CapacityError, TierUnavailableError: In place of any OSError.
    """
    try:
        yield
    except OSError as error:
        missing_key = known.get("missing_key")
        if error.errno == errno.ENOENT and missing_key is not None:
            raise NotFoundError(f"tier {tier} has no {missing_key}", key=missing_key) from error
        if error.errno in _FULL:
            raise CapacityError(
                f"cannot {doing}: {error.strerror or error}; {advice or 'no space left'}",
                tier=tier,
                needed_bytes=known.get("needed_bytes", 0),
                available_bytes=0,
                limit="file system",
            ) from error
        text = f"cannot {doing}: {error}{denied(error)}"
        outcome = known.get("outcome", "not_applied")
        raise TierUnavailableError(text, tier=tier, outcome=outcome) from error


TMP = "tmp"
"""Folder of objects that are being written; no key begins with it."""

MAX_KEY_PARTS = 4
LEFT_MAX = 16
"""Most temporary files that could not be removed. Each may be as large as a segment, so with that
many no object is put."""
_FOLDER_MODE = 0o700
_FILE_MODE = 0o600
# Links are refused by some file systems (vfat, many FUSE ones), each with a code of its own.
_NO_LINKS = frozenset({errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK, errno.EXDEV})


def key_parts(key: str, *, least: int = 2) -> list[str]:
    """The validated components of a key. Raises UsageError: no such key can exist."""
    parts = key.split("/")
    valid = least <= len(parts) <= MAX_KEY_PARTS and all(
        NAME_PATTERN.fullmatch(part) for part in parts
    )
    if not valid or parts[0] == TMP:
        raise UsageError(f"{key[:200]!r} is not a key", key=key[:200])
    return parts


def folder_of(prefix: str) -> list[str]:
    """The components of a prefix, as :meth:`Tier.list` takes it. Raises UsageError."""
    if not prefix.endswith("/"):
        raise UsageError(f"prefix {prefix[:200]!r} does not end in '/'")
    return key_parts(prefix[:-1], least=1)


class ObjectFolder(Tier):
    """Files below ``root`` by key; thread-safe. Subclasses store large objects.

    Args:
        name: The tier's name.
        scope: The hosts that see the folder.
        root: The folder; :meth:`make` creates it.
        durable: Whether objects must survive a power cut (files) or only this process (tmpfs).
        advice: What to do when there is no space.
        read_only: Nothing is changed (for processes other than the owner).
    """

    _read_direct = False

    def __init__(
        self, name: str, scope: Scope, root: Path, *, durable: bool, advice: str, read_only: bool
    ) -> None:
        self.name = name
        self.scope = scope
        self.root = root
        self._durable = durable
        self._advice = advice
        self._read_only = read_only
        self._synced: set[Path] = set()
        self._unsynced: set[Path] = set()
        """Folders with names that may not be durable yet, because a sync failed."""
        self._left: dict[Path, None] = {}
        """Temporary files of finished puts, whose names could not be removed."""
        self._renaming = threading.Lock()

    def make(self) -> None:
        """Create the folder and its ``tmp/``. Raises TierUnavailableError or CapacityError."""
        with medium(self.name, f"make {self.root}", advice=self._advice):
            self._make_folder(self.root / TMP)

    def is_intact(self) -> bool:
        """Whether all folders that were made or used still exist."""
        return all(os.path.isdir(folder) for folder in list(self._synced))

    def _check_writable(self) -> None:
        if self._read_only:
            raise UsageError(f"tier {self.name} was opened for reading only")

    def sweep(self, older_than_s: float | None = None) -> int:
        """Remove the files that a crash left in ``tmp/``. Returns their number.

        With ``older_than_s`` only older files, by the file system's clock. Without it all files;
        then no other process may write here.
        """
        count = 0
        born_s = None if older_than_s is None else self.now_s() - older_than_s
        with medium(self.name, f"sweep {self.root / TMP}"):
            for entry in list(os.scandir(self.root / TMP)):
                with contextlib.suppress(FileNotFoundError):  # removed by another process
                    if entry.is_dir(follow_symlinks=False):
                        continue
                    if born_s is not None and entry.stat(follow_symlinks=False).st_mtime > born_s:
                        continue
                    os.unlink(entry.path)
                    count += 1
        return count

    def sync_names(self) -> None:
        """Make all existing names durable: their writers may have died before the sync.

        Raises TierUnavailableError.
        """
        with medium(self.name, f"sync the folders of {self.root}"):
            self._sync_below(self.root)

    def _sync_below(self, folder: Path) -> None:
        for entry in os.scandir(folder):
            if entry.is_dir(follow_symlinks=False) and entry.name != TMP:
                self._sync_below(folder / entry.name)
        self._sync_folder(folder)

    def path(self, key: str) -> Path:
        """The file of the object with this key. Raises UsageError."""
        return self.root.joinpath(*key_parts(key))

    # --- writing ------------------------------------------------------------------------------

    @contextlib.contextmanager
    def unpublished(self) -> Iterator[tuple[int, Path]]:
        """A new file in ``tmp/``, open for writing; finally it is closed and its name removed."""
        error = self._clear_left()
        if error is not None and len(self._left) >= LEFT_MAX:
            raise error
        path = self.root / TMP / secrets.token_hex(16)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        fd = os.open(path, flags, _FILE_MODE)
        try:
            yield fd, path
        finally:
            # In this order: a file in ``_left`` has no user.
            try:
                os.close(fd)
            finally:
                self._left[path] = None
                self._clear_left()

    def _clear_left(self) -> OSError | None:
        """Remove the temporary files of finished puts; return the error of one that cannot be.

        A medium that failed during a put may fail here, too, so each later operation tries again.
        Only names of this object's finished puts are removed: other files in ``tmp/`` may still be
        written by other processes.
        """
        failed = None
        for path in list(self._left):
            try:
                os.unlink(path)
            except FileNotFoundError:
                pass  # renamed already, or removed in another thread
            except OSError as error:
                failed = error
                continue
            self._left.pop(path, None)
        return failed

    def put(self, key: str, data: bytes) -> None:
        self._check_writable()
        final = self.path(key)
        with self._written(key, data) as path:
            linked = self.link(path, final)
        if not linked and not self.has_bytes(key, data):
            raise self.other_bytes(key)
        self.publish(key)

    def replace(self, key: str, data: bytes) -> None:
        self._check_writable()
        final = self.path(key)
        with self._written(key, data) as path:
            self._make_folder(final.parent)
            self.reach("tier.file.link")
            with medium(self.name, f"name {final}", outcome="unknown", advice=self._advice):
                os.rename(path, final)
        self.publish(key)

    @contextlib.contextmanager
    def _written(self, key: str, data: bytes) -> Iterator[Path]:
        """``data`` in a synced file that has no name yet."""
        doing = f"write {key} to tier {self.name}"
        with (
            medium(self.name, doing, needed_bytes=len(data), advice=self._advice),
            self.unpublished() as (fd, path),
        ):
            left = memoryview(data)
            while left:
                self.reach("tier.file.write")
                left = left[os.write(fd, left) :]
            self.sync(fd)
            yield path

    def now_s(self) -> float:
        """The clock of the file system, which may be a server's: as :meth:`Tier.now_s`.

        Of a read-only folder, this host's clock.
        """
        if self._read_only:
            return time.time()
        with (
            medium(self.name, f"write to {self.root}", advice=self._advice),
            self.unpublished() as (fd, _),
        ):
            os.write(fd, b"0")
            written = os.fstat(fd)
        return written.st_mtime

    def sync(self, fd: int) -> None:
        """Make a file's bytes durable before it gets a name: a named file must be complete.

        After a failure the kernel may have dropped the pages and report success the next time, so
        the file is abandoned, never synced again.
        """
        self.reach("tier.file.fsync")
        if self._durable:
            os.fsync(fd)

    def link(self, path: Path, final: Path) -> bool:
        """Give an unpublished, synced file its name; False if the name is taken already."""
        self._make_folder(final.parent)
        self.reach("tier.file.link")
        with medium(self.name, f"name {final}", outcome="unknown", advice=self._advice):
            try:
                # A link and not a rename: it is as atomic, and cannot replace an existing file.
                os.link(path, final, follow_symlinks=False)
            except FileExistsError:
                return False
            except OSError as error:
                if error.errno not in _NO_LINKS:
                    raise
                with self._renaming:
                    if final.exists():
                        return False
                    os.rename(path, final)
        return True

    def publish(self, key: str) -> None:
        """Make the name of an object durable; after that the put is complete.

        The steps of a put, and the state that a crash after each of them leaves:

        1. Write to ``tmp/``: a file that is never listed; the next sweep removes it.
        2. Fsync the file: the same. Without this a power cut could leave a name without bytes.
        3. Link: the object is visible and complete; a power cut may remove it.
        4. Fsync the folder: the object is durable.

        The last step is also done for an existing object: its writer may have died before it.

        Raises:
            TierUnavailableError: With outcome "unknown": it is visible, perhaps not durable.
        """
        with medium(self.name, f"sync the name of {key}", outcome="unknown"):
            self.reach("tier.file.publish")
            # Including the folders of puts that failed here: their objects are listed, so they may
            # never be put again.
            waiting = {self.path(key).parent, *self._unsynced}
            self._unsynced -= waiting
            try:
                for folder in waiting:
                    self._sync_folder(folder)
            except OSError:
                self._unsynced |= waiting
                raise
        self._clear_left()

    def delete(self, key: str) -> None:
        self._check_writable()
        path = self.path(key)
        with medium(self.name, f"delete {key} from tier {self.name}", outcome="unknown"):
            try:
                os.unlink(path)
            except (FileNotFoundError, NotADirectoryError):
                pass  # the folder is synced all the same: an earlier delete may have died before
            with contextlib.suppress(FileNotFoundError):
                self._sync_folder(path.parent)
        self._clear_left()

    def reach(self, name: str) -> None:
        """A failpoint of the file tier; the memory tier's small objects have none."""
        if self._durable:
            failpoints.reach(name)

    def _make_folder(self, folder: Path) -> None:
        if folder in self._synced:
            return
        parent = folder.parent
        if parent == self.root or self.root in parent.parents or not parent.exists():
            self._make_folder(parent)
        folder.mkdir(mode=_FOLDER_MODE, exist_ok=True)
        # Once per process for each folder, also if it exists: its maker may have died before the
        # name was durable. Existing folders above the root are the operator's.
        self._sync_folder(parent)
        self._synced.add(folder)

    def _sync_folder(self, folder: Path) -> None:
        if not self._durable:
            return
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        except OSError as error:
            # Some network file systems cannot sync a folder and make names durable at once.
            if error.errno != errno.EINVAL:
                raise
        finally:
            os.close(fd)

    # --- reading ------------------------------------------------------------------------------

    def open_fd(self, key: str) -> int:
        """A descriptor for reading. Raises NotFoundError, IntegrityError, or OSError as it is."""
        try:
            return open_regular(self.path(key), os.O_RDONLY, key)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise NotFoundError(f"tier {self.name} has no {key}", key=key) from error
        except IntegrityError as error:
            raise damaged(self.name, key, "is not a regular file") from error

    def get(self, key: str, *, limit: int) -> bytes:
        data = b""
        with medium(self.name, f"read {key} from tier {self.name}", missing_key=key):
            fd = self.open_fd(key)
            with os.fdopen(fd, "rb", buffering=0) as file:
                size = os.fstat(fd).st_size
                if size <= limit:
                    # Reading one byte more shows whether it grows beyond the limit.
                    data = b"".join(iter(lambda: file.read(limit + 1), b""))
                    size = len(data)
        if size > limit:
            raise too_large(self.name, key, limit=limit, size=size)
        return data

    def open(self, key: str) -> OpenObject:
        with medium(self.name, f"open {key} in tier {self.name}", missing_key=key):
            fd = self.open_fd(key)
            direct = self._read_direct and set_direct(fd)
            size = os.fstat(fd).st_size
        return OpenFile(fd, size, tier=self.name, key=key, direct=direct)

    def info(self, key: str) -> ObjectInfo:
        with medium(self.name, f"look at {key} in tier {self.name}", missing_key=key):
            fd = self.open_fd(key)
            try:
                found = os.fstat(fd)
            finally:
                os.close(fd)
        return ObjectInfo(key, found.st_size, found.st_mtime)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        yield from self._walk(folder_of(prefix))

    def _walk(self, parts: Sequence[str]) -> Iterator[ObjectInfo]:
        folder = self.root.joinpath(*parts)
        below = []
        with medium(self.name, f"list {folder}"):
            try:
                entries = sorted(os.scandir(folder), key=lambda each: each.name)
            except (FileNotFoundError, NotADirectoryError):
                return
            found = []
            for entry in entries:
                if not NAME_PATTERN.fullmatch(entry.name):
                    continue
                with contextlib.suppress(FileNotFoundError):  # deleted meanwhile
                    if entry.is_dir(follow_symlinks=False) and len(parts) < MAX_KEY_PARTS:
                        below.append([*parts, entry.name])
                    elif entry.is_file(follow_symlinks=False):
                        there = entry.stat(follow_symlinks=False)
                        key = "/".join([*parts, entry.name])
                        found.append(ObjectInfo(key, there.st_size, there.st_mtime))
        yield from found
        for each in below:
            yield from self._walk(each)
