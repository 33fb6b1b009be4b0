"""File systems that fsspec supports (sftp, hdfs, smb, another client for S3, ...) as shared tiers.

fsspec guarantees little: few of its file systems can create a file only if it does not exist, or
show it only when it is complete. So an object is written under ``tmp/`` and then moved to its name.
One of several writers is chosen by a *lease*: a file ``tmp/claim-...`` made with exclusive create
("xb"), removed after the move, and broken after :data:`LEASE_S` if its maker died. Object stores,
whose objects appear atomically, need no move.
"""

from __future__ import annotations

import contextlib
import errno
import secrets
import threading
import time
from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Any, Unpack

from tieredckpt.errors import (
    ConfigError,
    NotFoundError,
    TieredCkptError,
    TierUnavailableError,
    UsageError,
    how_to_install,
)
from tieredckpt.storage.base import (
    ByteSource,
    ObjectInfo,
    OpenObject,
    RangedObject,
    Scope,
    Tier,
    damaged,
    short,
    unavailable,
)
from tieredckpt.storage.file_io import RUN_BYTES
from tieredckpt.storage.folder import MAX_KEY_PARTS, TMP, Known, folder_of, key_parts, medium
from tieredckpt.storage.object.errors import ObjectSettings

PREFIX = "fsspec+"
"""``fsspec+s3://...`` is fsspec's, where ``s3://...`` is ours."""

LEASE_S = 60.0
"""A lease this old, by the store's clock, is of a writer that died."""

_WAIT_S = 0.2
_ATOMIC = frozenset({"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl", "oss", "oci"})
"""Protocols whose objects appear atomically when they are closed, and that cannot rename."""


def why_unknown(url: str) -> str | None:
    """Why the installed fsspec cannot open a URL of this scheme; None: it can. Sends no request."""
    from fsspec import get_filesystem_class

    scheme = url.removeprefix(PREFIX).partition("://")[0]
    try:
        get_filesystem_class(scheme)
    except ValueError:
        return f"there is no tier for {scheme}://: neither this package nor fsspec knows it"
    except ImportError as error:
        return f"a package that fsspec needs for {scheme}:// is not installed: {error}"
    return None


class FsspecTier(Tier):
    """Objects are files below the URL, under the keys that they have in every tier.

    Args:
        name: The tier's name in the configuration.
        url: As fsspec takes it, without the prefix :data:`PREFIX`. Options of the file system are
            fsspec's own configuration (``~/.config/fsspec``), where credentials belong, too.
        settings: Only the deadlines are used.

    Raises:
        ConfigError: fsspec, or a package it needs for this URL, is not installed; not a URL.
        TierUnavailableError: The file system does not answer.
    """

    leases = False

    def __init__(self, name: str, url: str, settings: ObjectSettings) -> None:
        self.name = name
        self.scope = Scope.SHARED
        self._retry_for_s = settings.retry_for_s
        try:
            from fsspec.core import url_to_fs
        except ImportError as error:
            raise ConfigError(
                f"tier {name} needs the extra fsspec: {how_to_install('fsspec')}", key="url"
            ) from error
        with fsspec_call(name, f"open {url[:200]}"):
            try:
                self._fs, root = url_to_fs(url.removeprefix(PREFIX), use_listings_cache=False)
            except (ImportError, ValueError) as error:  # not installed, or unknown to fsspec
                raise ConfigError(f"tier {name}: {error}", key="url") from error
        self._root = str(root).rstrip("/")
        protocol = self._fs.protocol
        protocols = {protocol} if isinstance(protocol, str) else {*protocol}
        self._atomic = not _ATOMIC.isdisjoint(protocols)
        # In one process a lock is cheaper than a lease, and fsspec's files are not all thread-safe.
        self._creating = threading.Lock()
        self._closed = False

    def close(self) -> None:
        """Refuse further calls. Idempotent."""
        self._closed = True

    def _path(self, key: str) -> str:
        key_parts(key)
        if self._closed:
            raise unavailable(self.name, f"tier {self.name} is closed")
        return f"{self._root}/{key}"

    # --- writing ----------------------------------------------------------------------------------

    def put(self, key: str, data: bytes) -> None:
        path = self._path(key)
        with self._leased(key, path) as until_s:
            if until_s is not None:
                self._write(key, path, data, until_s)
                return
        if not self.has_bytes(key, data):
            raise self.other_bytes(key)

    def replace(self, key: str, data: bytes) -> None:
        path = self._path(key)
        with self._creating:
            self._write(key, path, data)

    def _write(self, key: str, path: str, data: bytes, until_s: float = float("inf")) -> None:
        with self._written(key, path, until_s) as file, fsspec_call(self.name, f"write {key}"):
            file.write(data)

    def put_from(self, key: str, source: ByteSource) -> None:
        path = self._path(key)
        if self.is_there(key, source.size):
            return
        # No lease: segments have random ids, so any other writer writes the same bytes.
        with self._written(key, path) as file:
            run = memoryview(bytearray(min(RUN_BYTES, source.size)))
            for offset in range(0, source.size, RUN_BYTES):
                part = run[: min(RUN_BYTES, source.size - offset)]
                source.read_into(offset, part)
                with fsspec_call(self.name, f"write {key}", needed_bytes=source.size):
                    file.write(bytes(part))  # some file systems keep the object they are given

    @contextlib.contextmanager
    def _written(self, key: str, path: str, until_s: float = float("inf")) -> Iterator[Any]:
        """A file to write to; it gets its name when the block ends, and is deleted if it raises.

        Later than ``until_s`` it gets no name: other hosts take its writer for dead by then.
        """
        at = path if self._atomic else f"{self._root}/{TMP}/{secrets.token_hex(16)}"
        with fsspec_call(self.name, f"write {key}"):
            self._make_folder(at)
            # With autocommit, closing after a failure would publish an incomplete file.
            file = self._fs.open(at, "wb", **({"autocommit": False} if self._atomic else {}))
        try:
            yield file
            with fsspec_call(self.name, f"write {key}", outcome="unknown"):
                file.close()
                if time.monotonic() > until_s:
                    late = f"cannot write {key}: it took longer than {LEASE_S / 2:g} s"
                    raise unavailable(self.name, late)
                if self._atomic:
                    file.commit()
                else:
                    self._make_folder(path)
                    self._fs.mv(at, path)
        except BaseException:
            with contextlib.suppress(Exception):
                if self._atomic:
                    file.discard()
                else:
                    file.close()
                    self._fs.rm_file(at)
            raise

    def _make_folder(self, path: str) -> None:
        if not self._atomic:  # (object stores would create the bucket)
            self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)

    @contextlib.contextmanager
    def _leased(self, key: str, path: str) -> Iterator[float | None]:
        """Monotonic time until which this process may write ``key``; None: the key is taken."""
        lease = f"{self._root}/{TMP}/claim-{key.replace('/', '-')}"
        until_s = time.monotonic() + max(self._retry_for_s, 2 * LEASE_S)
        with self._creating:
            while not self._exists(key, path):
                # Half of LEASE_S: a suspended writer must not replace another one's object.
                mine_until_s = time.monotonic() + LEASE_S / 2
                try:
                    with fsspec_call(self.name, f"lease {key}", missing_key=key):
                        self._make_folder(lease)
                        self._fs.open(lease, "xb").close()
                except TierUnavailableError as error:
                    # Not all file systems raise FileExistsError.
                    if not self._exists(key, lease):
                        raise
                    if time.monotonic() > until_s:
                        busy = f"{key} in tier {self.name} is being written by another process"
                        raise unavailable(self.name, busy) from error
                    self._break_if_old(lease)
                    time.sleep(_WAIT_S)  # no file system here reports deletions
                    continue
                try:
                    # The previous owner of the lease may have written the key since the check.
                    yield None if self._exists(key, path) else mine_until_s
                finally:
                    if time.monotonic() < mine_until_s:  # else it may be another writer's
                        with contextlib.suppress(Exception):
                            self._fs.rm_file(lease)
                return
            yield None

    def _break_if_old(self, lease: str) -> None:
        with contextlib.suppress(OSError, NotFoundError):
            made_s = modified_s(self._fs.info(lease))
            if made_s is not None and self.now_s() - made_s > LEASE_S:
                self._fs.rm_file(lease)

    def _exists(self, key: str, path: str) -> bool:
        with fsspec_call(self.name, f"look at {key}"):
            found = self._fs.exists(path)
        return bool(found)

    def delete(self, key: str) -> None:
        path = self._path(key)
        try:
            with fsspec_call(self.name, f"delete {key}", outcome="unknown", missing_key=key):
                self._fs.rm_file(path)
        except NotFoundError:
            pass
        except TierUnavailableError:
            if self._exists(key, path):  # not all file systems raise FileNotFoundError
                raise

    # --- reading ----------------------------------------------------------------------------------

    def open(self, key: str) -> OpenObject:
        path = self._path(key)
        found = self._stat(key, path)
        if found.get("type") != "file":
            raise damaged(self.name, key, "is no file")
        return FsspecObject(self._fs, path, found, tier=self.name, key=key)

    def info(self, key: str) -> ObjectInfo:
        found = self._stat(key, self._path(key))
        return ObjectInfo(key, int(found["size"]), modified_s(found))

    def _stat(self, key: str, path: str) -> dict[str, Any]:
        with fsspec_call(self.name, f"look at {key}", missing_key=key):
            found: dict[str, Any] = self._fs.info(path)
        return found

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        yield from self._walk("/".join(folder_of(prefix)))

    def _walk(self, folder: str) -> Iterator[ObjectInfo]:
        for entry in self._entries(folder):
            above, _, name = str(entry["name"]).rstrip("/").rpartition("/")
            if not above.endswith(folder):
                continue  # some list an empty folder as its own entry
            key = f"{folder}/{name}"
            with contextlib.suppress(UsageError):  # of other programs
                key_parts(key, least=1)
                if entry["type"] == "directory" and key.count("/") < MAX_KEY_PARTS:
                    yield from self._walk(key)
                elif entry["type"] == "file":
                    yield ObjectInfo(key, int(entry["size"]), modified_s(entry))

    def _entries(self, folder: str) -> Sequence[dict[str, Any]]:
        path = f"{self._root}/{folder}"
        try:
            with fsspec_call(self.name, f"list {folder}", missing_key=folder):
                entries: Sequence[dict[str, Any]] = self._fs.ls(path, detail=True)
        except NotFoundError:
            return []
        return entries

    def now_s(self) -> float:
        path = f"{self._root}/{TMP}/clock-{secrets.token_hex(8)}"
        found: float | None = None
        with fsspec_call(self.name, "ask for the store's time"):
            self._make_folder(path)
            self._fs.pipe_file(path, b"0")
            try:
                found = modified_s(self._fs.info(path))
            finally:
                self._fs.rm_file(path)
        if found is None:
            raise unavailable(self.name, f"tier {self.name} does not report the age of files")
        return found

    def sweep_unfinished(self, older_than_s: float) -> int:
        now_s, count = self.now_s(), 0
        for entry in self._entries(TMP):
            made_s = modified_s(entry)
            if entry["type"] != "file" or made_s is None or now_s - made_s <= older_than_s:
                continue
            with contextlib.suppress(NotFoundError):  # deleted by its writer
                name = str(entry["name"])
                with fsspec_call(self.name, f"delete {name}", missing_key=name):
                    self._fs.rm_file(name)
                count += 1
        return count


class FsspecObject(RangedObject):
    """Ranges of a file, as long as it is the one that was opened.

    Args:
        fs: Its file system.
        path: Its path there.
        found: The file system's info of it.
        tier: The tier's name, for errors.
        key: The object's, for errors.
    """

    has_descriptor = False

    def __init__(self, fs: Any, path: str, found: dict[str, Any], *, tier: str, key: str) -> None:
        super().__init__(tier, key, int(found["size"]))
        self._fs, self._path = fs, path
        self._was = identity(found)

    def _read(self, offset: int, into: memoryview) -> None:
        stop = offset + len(into)
        with fsspec_call(self._tier, f"read {self._key}", missing_key=self._key):
            data = self._fs.cat_file(self._path, start=offset, end=stop)
            # fsspec has no conditional reads: a replaced file shows in its info afterwards.
            changed = identity(self._fs.info(self._path)) != self._was
        if not changed and len(data) != len(into):
            raise short(self._tier, self._key, len(data), len(into))
        if changed:
            raise self._damaged(
                f"had {self.size} bytes; {offset} to {stop} cannot be read, or it was changed "
                "after it was opened",
                expected=stop,
                actual=self.size,
            )
        into[:] = data


def modified_s(found: dict[str, Any]) -> float | None:
    """When a file was written, from any of the fields that fsspec's file systems report."""
    for name in ("mtime", "LastModified", "last_modified", "modified", "updated", "created"):
        value = found.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
        if isinstance(value, str):
            with contextlib.suppress(ValueError):
                value = datetime.fromisoformat(value)
        if isinstance(value, datetime):
            return value.timestamp()
    return None


def identity(found: dict[str, Any]) -> tuple[object, ...]:
    """Fields that differ between a file and its replacement, if the file system reports them."""
    return (*map(found.get, ("size", "ino", "ETag", "etag")), modified_s(found))


@contextlib.contextmanager
def fsspec_call(tier: str, doing: str, **known: Unpack[Known]) -> Iterator[None]:
    """As :func:`medium`, for libraries that raise arbitrary exceptions. Raises our errors."""
    advice = f"free space there, or keep fewer checkpoints in tier {tier} (tiers[].keep)"
    with medium(tier, doing, advice=advice, **known):
        try:
            yield
        except TieredCkptError:
            raise
        except (FileNotFoundError, KeyError) as error:
            raise FileNotFoundError(errno.ENOENT, str(error)) from error
        except OSError as error:
            # (as when a library's own error is one, without a number)
            raise OSError(error.errno or errno.EIO, str(error)) from error
        except Exception as error:
            raise TierUnavailableError(
                f"cannot {doing}: {type(error).__name__}: {error}",
                tier=tier,
                outcome=known.get("outcome", "not_applied"),
            ) from error
