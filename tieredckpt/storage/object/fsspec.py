"""File systems that fsspec supports (sftp, hdfs, smb, another client for S3, ...) as shared tiers.

fsspec guarantees little: few of its file systems show a file only when it is complete. So an object
is written under ``tmp/`` and then moved to its name. One of several writers is chosen by a *lease*:
a file ``tmp/claim-...`` made with exclusive create ("xb"), removed after the move, and broken after
:data:`LEASE_S` if its maker died. Object stores, whose objects appear atomically, need neither: the
store itself creates an object only if its name is free.

Both rest on exclusive creation, and a client that does not know it replaces what exists. So it is
tried before the first :meth:`FsspecTier.put`.
"""

from __future__ import annotations

import contextlib
import errno
import math
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from datetime import datetime
from inspect import signature
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
from tieredckpt.storage.object.errors import NO_ANSWER, ObjectSettings, Refusal, error_of, shown

PREFIX = "fsspec+"
"""``fsspec+s3://...`` is fsspec's, where ``s3://...`` is ours."""

UNREAD = (
    "fsspec does not read it: write the option of its file system into fsspec's own configuration "
    "(docs/operate/object-stores.md)"
)
"""Of a key that :func:`unread` finds."""

LEASE_S = 60.0
"""A lease this old, by the store's clock, is of a writer that died."""

_WAIT_S = 0.2
_ATOMIC = frozenset({"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az"})
"""Protocols of s3fs, gcsfs and adlfs, whose objects appear atomically when they are closed, cannot
be renamed, and can be created by the store only if their name is free."""
_UNREAD = {
    "endpoint": "endpoint", "region": "region", "profile": "profile", "anonymous": "anonymous",
    "path_style": "path_style", "allow_http": "allow_http", "ca": "ca",
    "concurrency": "concurrency", "part_bytes": "part_size", "bandwidth_bytes_per_s": "bandwidth",
    "storage_class": "storage_class", "sse_type": "sse",
}  # fmt: skip
"""Settings by their keys in the configuration."""
_OF_ANOTHER = frozenset({"fo", "target_protocol", "default_method"})
"""Arguments of file systems that are built from another one. What they do follows from the files of
that one: fsspec before 2026.6 runs code from them."""


def why_refused(url: str) -> str | None:
    """Why no tier can have a URL of this scheme; None: one can. fsspec is not given the URL."""
    try:
        from fsspec import get_filesystem_class
    except ImportError:
        return f"it needs the extra fsspec: {how_to_install('fsspec')}"
    scheme = url.removeprefix(PREFIX).partition("://")[0]
    try:
        kind = get_filesystem_class(scheme)
    except ValueError:
        return f"there is no tier for {scheme}://: neither this package nor fsspec knows it"
    except ImportError as error:
        return f"a package that fsspec needs for {scheme}:// is not installed: {error}"
    arguments = {name for each in kind.__mro__ for name in signature(each.__init__).parameters}
    # (Of hdfs:// only a base takes "fs".)
    if arguments & _OF_ANOTHER or "fs" in signature(kind.__init__).parameters:
        return f"{scheme}:// is built from another file system; write that one's URL"
    if getattr(kind, "local_file", False):
        return f"{scheme}:// through fsspec is a folder of this host; write file:///absolute/folder"
    return None


def unread(settings: ObjectSettings) -> str | None:
    """A key that is set and that fsspec does not read: its file system would go elsewhere."""
    default = ObjectSettings()
    names = (name for name in _UNREAD if getattr(settings, name) != getattr(default, name))
    return next((_UNREAD[name] for name in names), None)


class FsspecTier(Tier):
    """Objects are files below the URL, under the keys that they have in every tier.

    Args:
        name: The tier's name in the configuration.
        url: As fsspec takes it, without the prefix :data:`PREFIX`, and accepted by
            :func:`why_refused`. Options of the file system are fsspec's own configuration
            (``~/.config/fsspec``), where credentials belong, too.
        settings: ``retry_for_s`` limits the wait for another writer of a key, and calls that last
            longer than ``timeout_s`` are reported. For the others see :func:`unread`.

    Raises:
        ConfigError: A package that fsspec needs for this URL is not installed; not a URL; a
            setting that would have another meaning here.
        TierUnavailableError: The file system does not answer.
    """

    leases = False

    def __init__(self, name: str, url: str, settings: ObjectSettings) -> None:
        self.name = name
        self.scope = Scope.SHARED
        self._retry_for_s, self._timeout_s = settings.retry_for_s, settings.timeout_s
        if (key := unread(settings)) is not None:
            raise ConfigError(f"tier {name}: {key}: {UNREAD}", key=key)
        from fsspec.core import url_to_fs

        with fsspec_call(name, f"open {url[:200]}"):
            try:
                # Of its own: fsspec keeps a shared one, with its connections, for ever.
                self._fs, root = url_to_fs(
                    url.removeprefix(PREFIX), use_listings_cache=False, skip_instance_cache=True
                )
            except (ImportError, ValueError) as error:  # not installed, or unknown to fsspec
                raise ConfigError(f"tier {name}: {error}", key="url") from error
        self._root = str(root).rstrip("/")
        protocol = self._fs.protocol
        protocols = {protocol} if isinstance(protocol, str) else {*protocol}
        self._atomic = not _ATOMIC.isdisjoint(protocols)
        # In one process a lock is cheaper than a lease, and fsspec's files are not all thread-safe.
        self._creating = threading.Lock()
        self._creates_exclusively = False
        self._under_way: dict[object, tuple[float, str]] = {}
        self._closed = False

    def check(self) -> None:
        """List an empty folder: an object store without the bucket does not look empty."""
        self._entries(TMP)

    @contextlib.contextmanager
    def _call(self, doing: str, **known: Unpack[Known]) -> Iterator[None]:
        """As :func:`fsspec_call`; reported while it lasts."""
        mark = object()
        self._under_way[mark] = time.monotonic(), doing
        try:
            with fsspec_call(self.name, doing, **known):
                yield
        finally:
            del self._under_way[mark]

    def retrying(self) -> str | None:
        """The call that has lasted longest, if for over ``timeout_s``: its library may retry it."""
        since_s, doing = min(tuple(self._under_way.values()), default=(math.inf, ""))
        lasted_s = time.monotonic() - since_s
        return f"no answer for {lasted_s:.0f} s: {doing}" if lasted_s > self._timeout_s else None

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
        with self._creating:
            self._try_exclusive_creation()
            put = self._create(key, path, data) if self._atomic else self._lease(key, path, data)
        if not put and not self.has_bytes(key, data):
            raise self.other_bytes(key)

    def _try_exclusive_creation(self) -> None:
        """Raise TierUnavailableError if the file system replaces a file instead of refusing it."""
        if self._creates_exclusively:
            return
        name = f"claim-{secrets.token_hex(8)}"
        path = f"{self._root}/{TMP}/{name}"
        try:
            self._create(name, path, b"1")
            replaced = self._create(name, path, b"2")
        finally:
            with contextlib.suppress(Exception):
                self._fs.rm_file(path)
        if replaced:
            raise unavailable(
                self.name,
                f"tier {self.name} cannot be used: its file system replaced a file instead of "
                "refusing a second one, so two jobs could overwrite each other's checkpoints; use "
                "a newer release of its package, or another store",
            )
        self._creates_exclusively = True

    def _create(self, name: str, path: str, data: bytes) -> bool:
        """Create a file; False: there was one already. Raises TierUnavailableError: as a put."""
        try:
            with self._call(f"write {name}", outcome="unknown"):
                if self._atomic:
                    self._fs.pipe_file(path, data, mode="create")
                else:
                    self._make_folder(path)
                    with self._fs.open(path, "xb") as file:
                        file.write(data)
        except TierUnavailableError:
            # Not all file systems raise FileExistsError. (A failed look changes no outcome.)
            with contextlib.suppress(TierUnavailableError):
                if self._exists(name, path):
                    return False
            raise
        return True

    def replace(self, key: str, data: bytes) -> None:
        path = self._path(key)
        with self._creating:
            if self._atomic:
                with self._call(f"write {key}", outcome="unknown"):
                    self._fs.pipe_file(path, data)
            else:
                self._move(key, path, data)

    def _move(self, key: str, path: str, data: bytes, until_s: float = float("inf")) -> None:
        with self._written(key, path, until_s) as file, self._call(f"write {key}"):
            file.write(data)

    def put_from(self, key: str, source: ByteSource) -> None:
        path = self._path(key)
        if self.is_there(key, source.size):
            return
        try:
            self._write_from(key, path, source)
        except TierUnavailableError:
            # A store that did what the last request asks may refuse its repetition.
            with contextlib.suppress(TierUnavailableError):
                if self.is_there(key, source.size):
                    return
            raise

    def _write_from(self, key: str, path: str, source: ByteSource) -> None:
        # No lease: segments have random ids, so any other writer writes the same bytes.
        with self._written(key, path) as file:
            run = memoryview(bytearray(min(RUN_BYTES, source.size)))
            for offset in range(0, source.size, RUN_BYTES):
                part = run[: min(RUN_BYTES, source.size - offset)]
                source.read_into(offset, part)
                with self._call(f"write {key}", needed_bytes=source.size):
                    file.write(bytes(part))  # some file systems keep the object they are given

    @contextlib.contextmanager
    def _written(self, key: str, path: str, until_s: float = float("inf")) -> Iterator[Any]:
        """A file to write to; it gets its name when the block ends, and is deleted if it raises.

        Later than ``until_s`` it gets no name: other hosts take its writer for dead by then.
        """
        at = path if self._atomic else f"{self._root}/{TMP}/{secrets.token_hex(16)}"
        with self._call(f"write {key}"):
            self._make_folder(at)
            # With autocommit, closing after a failure would publish an incomplete file.
            file = self._fs.open(at, "wb", **({"autocommit": False} if self._atomic else {}))
        try:
            yield file
            with self._call(f"write {key}", outcome="unknown"):
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
                    _abandon(file)
                else:
                    file.close()
                    self._fs.rm_file(at)
            raise

    def _make_folder(self, path: str) -> None:
        if not self._atomic:  # (these would create the bucket)
            self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)

    def _lease(self, key: str, path: str, data: bytes) -> bool:
        """Write a file while holding its lease; False: there was one already."""
        lease = f"{self._root}/{TMP}/claim-{key.replace('/', '-')}"
        until_s = time.monotonic() + max(self._retry_for_s, 2 * LEASE_S)
        while not self._exists(key, path):
            # Half of LEASE_S: a suspended writer must not replace another one's object.
            mine_until_s = time.monotonic() + LEASE_S / 2
            if not self._create(f"the lease of {key}", lease, b"1"):
                if time.monotonic() > until_s:
                    busy = f"{key} in tier {self.name} is being written by another process"
                    raise unavailable(self.name, busy)
                self._break_if_old(lease)
                time.sleep(_WAIT_S)  # no file system here reports deletions
                continue
            try:
                # The previous owner of the lease may have written the key since the check.
                if self._exists(key, path):
                    return False
                self._move(key, path, data, mine_until_s)
                return True
            finally:
                if time.monotonic() < mine_until_s:  # else it may be another writer's
                    with contextlib.suppress(Exception):
                        self._fs.rm_file(lease)
        return False

    def _break_if_old(self, lease: str) -> None:
        with contextlib.suppress(OSError, NotFoundError):
            made_s = modified_s(self._fs.info(lease))
            if made_s is not None and self.now_s() - made_s > LEASE_S:
                self._fs.rm_file(lease)

    def _exists(self, key: str, path: str) -> bool:
        try:
            self._stat(key, path)  # fsspec's own exists() is False after any failure
        except NotFoundError:
            return False
        return True

    def delete(self, key: str) -> None:
        path = self._path(key)
        try:
            with self._call(f"delete {key}", outcome="unknown", missing_key=key):
                self._fs.rm_file(path)
        except NotFoundError:
            pass
        except TierUnavailableError:
            with contextlib.suppress(TierUnavailableError):
                if not self._exists(key, path):  # not all file systems raise FileNotFoundError
                    return
            raise

    # --- reading ----------------------------------------------------------------------------------

    def open(self, key: str) -> OpenObject:
        path = self._path(key)
        found = self._stat(key, path)
        if found.get("type") != "file":
            raise damaged(self.name, key, "is no file")
        return FsspecObject(self._fs, self._call, path, found, tier=self.name, key=key)

    def info(self, key: str) -> ObjectInfo:
        found = self._stat(key, self._path(key))
        return ObjectInfo(key, int(found["size"]), modified_s(found))

    def _stat(self, key: str, path: str) -> dict[str, Any]:
        with self._call(f"look at {key}", missing_key=key):
            found: dict[str, Any] = self._fs.info(path)
        return found

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        yield from self._walk("/".join(folder_of(prefix)))

    def _walk(self, folder: str) -> Iterator[ObjectInfo]:
        for entry in self._entries(folder):
            key = f"{folder}/{_name_of(entry)}"
            with contextlib.suppress(UsageError):  # of other programs
                key_parts(key, least=1)
                if entry["type"] == "directory" and key.count("/") < MAX_KEY_PARTS:
                    yield from self._walk(key)
                elif entry["type"] == "file":
                    yield ObjectInfo(key, int(entry["size"]), modified_s(entry))

    def _entries(self, folder: str) -> Sequence[dict[str, Any]]:
        path = f"{self._root}/{folder}"
        try:
            with self._call(f"list {folder}", missing_key=folder):
                entries: Sequence[dict[str, Any]] = self._fs.ls(path, detail=True)
        except NotFoundError:
            return []
        # Some list an empty folder as its own entry.
        return [each for each in entries if _folder_of(each).endswith(folder)]

    def now_s(self) -> float:
        path = f"{self._root}/{TMP}/clock-{secrets.token_hex(8)}"
        found: float | None = None
        with self._call("ask for the store's time"):
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
                with self._call(f"delete {name}", missing_key=name):
                    self._fs.rm_file(name)
                count += 1
        return count


class FsspecObject(RangedObject):
    """Ranges of a file, as long as it is the one that was opened.

    Args:
        fs: Its file system.
        call: As :func:`fsspec_call`, without the tier's name.
        path: Its path there.
        found: The file system's info of it.
        tier: The tier's name, for errors.
        key: The object's, for errors.
    """

    has_descriptor = False

    def __init__(
        self,
        fs: Any,
        call: Callable[..., AbstractContextManager[None]],
        path: str,
        found: dict[str, Any],
        *,
        tier: str,
        key: str,
    ) -> None:
        super().__init__(tier, key, int(found["size"]))
        self._fs, self._call, self._path = fs, call, path
        self._was = identity(found)

    def _read(self, offset: int, into: memoryview) -> None:
        stop = offset + len(into)
        with self._call(f"read {self._key}", missing_key=self._key):
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


def _folder_of(entry: dict[str, Any]) -> str:
    return str(entry["name"]).rstrip("/").rpartition("/")[0]


def _name_of(entry: dict[str, Any]) -> str:
    return str(entry["name"]).rstrip("/").rpartition("/")[2]


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


def _abandon(file: Any) -> None:
    """Delete the sent parts of a file that is being written, so that it never appears."""
    try:
        file.discard()
    finally:
        file.closed = True  # else its finalizer closes it, which makes some of them appear


def _refusal_in(error: BaseException) -> Refusal | None:
    """A store's error response, as s3fs has it from botocore; None: there is none."""
    response = getattr(error.__cause__ or error, "response", None)
    if not isinstance(response, dict):
        return None
    stated = response.get("Error", {})
    code = str(stated.get("Code", ""))  # of an answer without a body it is the status
    status = int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    return Refusal(status, "" if code.isdigit() else code, str(stated.get("Message", ""))[:400])


def _why_unreached(error: BaseException) -> str:
    """The system's error below a library's own, which does not always quote it; "": none."""
    found, below = "", error.__cause__ or error.__context__
    while below is not None:
        if isinstance(below, OSError) and below.errno is not None:
            found = f" ({type(below).__name__}: {below})"
        below = below.__cause__ or below.__context__
    return f"{found}; {NO_ANSWER}" if found else ""


@contextlib.contextmanager
def fsspec_call(tier: str, doing: str, **known: Unpack[Known]) -> Iterator[None]:
    """As :func:`medium`, for libraries that raise arbitrary exceptions. Raises our errors."""
    advice = f"free space there, or keep fewer checkpoints in tier {tier} (tiers[].keep)"
    with medium(tier, doing, advice=advice, **known):
        try:
            yield
        except TieredCkptError:
            raise
        except Exception as error:
            text = shown(str(error))
            cause = error if text == str(error) else None  # a traceback shows it
            if (refusal := _refusal_in(error)) is not None:
                raise error_of(refusal, tier=tier, doing=doing, **known) from cause
            if isinstance(error, FileNotFoundError):
                raise FileNotFoundError(errno.ENOENT, str(error)) from error
            if isinstance(error, OSError) and error.errno is not None:
                raise
            raise TierUnavailableError(
                f"cannot {doing}: {type(error).__name__}: {text}{_why_unreached(error)}",
                tier=tier,
                outcome=known.get("outcome", "not_applied"),
            ) from cause
