"""The object tier: a namespace's objects in a bucket, under the keys that they have in every tier.

S3, Google Cloud Storage, Azure Blob Storage, through obstore. For S3, parts of large objects and
ranges use requests of our own (see :mod:`tieredckpt.storage.object.s3_http`). Any other URL is
fsspec's. Only ``storage/object/`` imports the stores' clients, and only when a tier is opened: jobs
without an object tier do not need them.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
import urllib.request
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Literal, TypeVar, Unpack
from urllib.parse import urlsplit

import msgspec

from tieredckpt.errors import NotFoundError, TieredCkptError, TierUnavailableError, UsageError
from tieredckpt.storage.base import (
    ByteSource,
    ObjectInfo,
    OpenObject,
    RangedObject,
    RangeStream,
    Scope,
    Tier,
    short,
    too_large,
    unavailable,
)
from tieredckpt.storage.file_io import CopyPool
from tieredckpt.storage.folder import TMP, Known, folder_of, key_parts
from tieredckpt.storage.object.client import ExistsError, make_store, may_pass, store_call
from tieredckpt.storage.object.credentials import find_credentials
from tieredckpt.storage.object.errors import ObjectSettings, ObjectUrl, Refusal
from tieredckpt.storage.object.s3_http import Answer, Pace, S3Wire
from tieredckpt.storage.object.s3_upload import Uploader, clock_of, part_size
from tieredckpt.storage.object.supplied import Handed, Supplied

if TYPE_CHECKING:
    from obstore.store import ObjectStore

T = TypeVar("T")

_DELETE_BATCH = 1000
_CHECK_S = 5.0
_QUICK_S = 3.0
"""Retries of obstore, which does not report its failures meanwhile; the others are made here."""


class ObjectTier(Tier):
    """Objects in a bucket.

    Args:
        name: The tier's name in the configuration.
        at: Bucket and prefix.
        settings: Options of the store.
        script: Credentials of the training script, if the settings want those.

    Raises:
        ConfigError, TierUnavailableError: As :func:`tieredckpt.storage.backends.open.open_store`.
    """

    leases = False

    def __init__(
        self,
        name: str,
        at: ObjectUrl,
        settings: ObjectSettings,
        script: Handed | Supplied | None = None,
    ) -> None:
        self.name = name
        self.scope = Scope.SHARED
        self.at = at
        self.settings = settings
        kept = settings.storage_class
        self._attributes = {"Storage-Class": kept} if kept is not None else {}
        self._pace = Pace(settings.bandwidth_bytes_per_s)
        credentials = None
        if at.scheme == "s3":
            credentials = find_credentials(settings, tier=name, script=script)
        self._credentials = credentials
        self._store = make_store(at, settings, credentials, tier=name)
        self._quick = self._store  # a second store in memory would have other objects
        if at.scheme != "memory":
            self._quick = self._impatient(_QUICK_S)
        self._wire: S3Wire | None = None
        self._uploader: Uploader | None = None
        if credentials is not None:
            wire = S3Wire(name, at, settings, credentials, self._pace)
            # obstore uses the proxies of the environment, the standard library does not.
            if not _is_proxied(wire.origin):
                self._wire = wire
                self._uploader = Uploader(wire, settings, at.path(""))
        self._threads = CopyPool(settings.concurrency)
        self._closed = threading.Event()

    def _impatient(self, retry_for_s: float, **more: float) -> ObjectStore:
        """The same store through a client that retries for a shorter time."""
        retry_for_s = min(self.settings.retry_for_s, retry_for_s)
        settings = msgspec.structs.replace(self.settings, retry_for_s=retry_for_s, **more)
        return make_store(self.at, settings, self._credentials, tier=self.name)

    def retrying(self) -> str | None:
        return self._pace.retrying

    def close(self) -> None:
        """Abort running transfers. Idempotent."""
        self._closed.set()
        if self._uploader is not None:
            self._uploader.close()
        if self._wire is not None:
            self._wire.close()
        self._threads.close()

    def beside(self) -> list[str]:
        import obstore

        above = self.at.prefix.rpartition("/")[0] or None
        found = self._call(lambda s: obstore.list_with_delimiter(s, above), "list namespaces")
        return [each.rpartition("/")[2] for each in found["common_prefixes"]]

    def check(self) -> None:
        """List an empty prefix, with retries for a few seconds only.

        So a wrong port or secret is reported at once, while a transfer would repeat its requests.
        Raises TierUnavailableError.
        """
        import obstore

        store, path = self._store, self.at.path(TMP)
        if self.at.scheme != "memory":
            store = self._impatient(_CHECK_S, timeout_s=min(self.settings.timeout_s, _CHECK_S))
        self._call(
            lambda _: next(iter(obstore.list(store, prefix=path, chunk_size=1)), None),
            f"look into {self.at.scheme}://{self.at.bucket}",
            retry_for_s=0.0,
        )

    # --- writing ----------------------------------------------------------------------------------

    def put(self, key: str, data: bytes) -> None:
        try:
            self._write(key, data, "create")
        except ExistsError:
            # A repeated request, whose first response was lost, also gets this error.
            if not self.has_bytes(key, data):
                raise self.other_bytes(key) from None

    def replace(self, key: str, data: bytes) -> None:
        self._write(key, data, "overwrite")

    def _write(self, key: str, data: bytes, mode: Literal["create", "overwrite"]) -> None:
        """Put a small object; if the outcome is unknown, read the key to find it out.

        Raises ExistsError: the key is taken, perhaps by the same bytes.
        """
        import obstore

        path, attributes = self._path(key), self._attributes
        try:
            self._call(
                lambda store: obstore.put(store, path, data, mode=mode, attributes=attributes),
                f"write {key}",
                outcome="unknown",
                needed_bytes=len(data),
            )
        except TierUnavailableError as error:
            found = None
            if error.fields.get("outcome") == "unknown":
                with contextlib.suppress(TieredCkptError):  # it is unknown still
                    found = self.has_bytes(key, data)
            if found is False and mode == "create":
                raise self.other_bytes(key) from error
            if not found:
                raise

    def _call(
        self,
        call: Callable[[ObjectStore], T],
        doing: str,
        *,
        retry_for_s: float | None = None,
        **known: Unpack[Known],
    ) -> T:
        """Call obstore, and repeat it after temporary failures, for ``retry_for_s`` (None: of the
        settings); once more if the store refused credentials that have been renewed.

        Raises as :func:`store_call`, and TierUnavailableError: there are no credentials any more.
        """
        for_s = self.settings.retry_for_s if retry_for_s is None else retry_for_s
        try:
            return self._repeated(call, doing, for_s, **known)
        finally:
            self._pace.ended()

    def _repeated(
        self, call: Callable[[ObjectStore], T], doing: str, for_s: float, **known: Unpack[Known]
    ) -> T:
        since_s = time.monotonic()
        attempt, renewed = 0, False
        while True:
            used = None
            if self._credentials is not None:
                used = self._credentials.now()  # its error is clearer than obstore's
            try:
                with store_call(self.name, doing, **known):
                    return call(self._quick)
            except TierUnavailableError as error:
                refusal = Refusal(error.fields.get("status", 0), error.fields.get("code", ""), "")
                if not renewed and self._credentials and self._credentials.renewed(refusal, used):
                    renewed = True
                    continue
                attempt += 1
                if not may_pass(error) or not self._pace.back_off(
                    attempt,
                    since_s=since_s,
                    until_s=since_s + for_s,
                    why=error,
                    throttled=refusal.throttled,
                    stopped=self._closed,
                ):
                    raise

    def put_from(self, key: str, source: ByteSource) -> None:
        path = self._path(key)
        if self.is_there(key, source.size):
            return
        if self._uploader is not None:
            put = self._uploader.put(key, source)
        else:
            put = self._put_stream(path, source)
        if not put:
            self.check_kept(key, source.size)

    def _put_stream(self, path: str, source: ByteSource) -> bool:
        """Put an object through obstore: streamed, not resumable; False if the key is taken.

        Uses memory for ``concurrency`` parts and two more. An object of several parts is put
        without a condition, which these stores' clients do not offer; two uploads of one segment
        have the same bytes.
        """
        import obstore

        part_bytes = part_size(source.size, self.settings.part_bytes)
        attributes, doing = self._attributes, f"upload {path}"
        never = threading.Event()

        def filled(offset: int) -> bytearray:
            # A new buffer each time: the client keeps it until it was sent.
            run = bytearray(min(part_bytes, source.size - offset))
            if run:
                source.read_into(offset, memoryview(run))
                self._pace.send(len(run), never)
            return run

        if source.size <= part_bytes:
            run = filled(0)
            try:
                with store_call(self.name, doing, outcome="unknown", needed_bytes=source.size):
                    obstore.put(self._store, path, run, mode="create", attributes=attributes)
            except ExistsError:
                return False
            return True
        with store_call(self.name, doing, needed_bytes=source.size):
            writer = obstore.open_writer(
                self._store,
                path,
                attributes=attributes,
                buffer_size=part_bytes,
                max_concurrency=self.settings.concurrency,
            )
        # Without close() nothing becomes visible; a rule of the bucket deletes the sent parts. The
        # source is read in this thread, not in a callback, in which the client must not be called:
        # the source may be an object in a store, too.
        for offset in range(0, source.size, part_bytes):
            run = filled(offset)
            with store_call(self.name, doing, needed_bytes=source.size):
                writer.write(run)
        with store_call(self.name, doing, outcome="unknown", needed_bytes=source.size):
            writer.close()
        return True

    def delete(self, key: str) -> None:
        self.delete_many([key])

    def delete_many(self, keys: Iterable[str]) -> None:
        paths = [self._path(key) for key in keys]
        for at in range(0, len(paths), _DELETE_BATCH):
            batch = paths[at : at + _DELETE_BATCH]
            doing = f"delete {len(batch)} objects" if len(batch) > 1 else f"delete {batch[0]}"
            try:
                self._delete(batch, doing)
            except NotFoundError:
                # Some stores report missing keys, and may have stopped at the first.
                for path in batch:
                    with contextlib.suppress(NotFoundError):
                        self._delete(path, doing)

    def _delete(self, paths: list[str] | str, doing: str) -> None:
        import obstore

        self._call(
            lambda store: obstore.delete(store, paths), doing, outcome="unknown", missing_key=""
        )

    # --- reading ----------------------------------------------------------------------------------

    def get(self, key: str, *, limit: int) -> bytes:
        path = self._path(key)

        import obstore

        def read(store: ObjectStore) -> tuple[int, bytes | None]:
            got = obstore.get(store, path)
            size = got.meta["size"]
            return size, bytes(got.buffer()) if size <= limit else None

        size, data = self._call(read, f"read {key}", missing_key=key)
        if data is None:
            raise too_large(self.name, key, limit=limit, size=size)
        if len(data) != size:
            raise short(self.name, key, len(data), size)
        return data

    def open(self, key: str) -> OpenObject:
        meta = self._metadata(key, f"open {key}")
        common = (self.name, key, meta, part_size(0, self.settings.part_bytes), self._threads)
        if self._wire is not None:
            return S3Object(self._wire, *common)
        return StoredObject(self._store, self.at.path(key), *common)

    def _metadata(self, key: str, doing: str) -> Any:
        path = self._path(key)
        import obstore

        return self._call(lambda store: obstore.head(store, path), doing, missing_key=key)

    def info(self, key: str) -> ObjectInfo:
        meta = self._metadata(key, f"look at {key}")
        return ObjectInfo(key, meta["size"], meta["last_modified"].timestamp())

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        folder_of(prefix)
        import obstore

        root, path, doing = self.at.path(""), self.at.path(prefix), f"list {prefix}"

        def begin(store: ObjectStore) -> tuple[Iterator[Any], Any]:
            pages = iter(obstore.list(store, prefix=path, chunk_size=1000))
            return pages, next(pages, None)

        pages, page = self._call(begin, doing)
        while page is not None:
            for meta in page:
                key = meta["path"].removeprefix(root)
                with contextlib.suppress(UsageError):  # of other programs
                    key_parts(key)
                    yield ObjectInfo(key, meta["size"], meta["last_modified"].timestamp())
            with store_call(self.name, doing):
                page = next(pages, None)

    def now_s(self) -> float:
        if self._wire is not None:
            doing = "ask for the store's time"
            answer = self._wire.ask("HEAD", f"{TMP}/clock", doing=doing)
            if answer.status not in (200, 404):
                raise self._wire.error(answer.refusal, doing=doing)
            return clock_of(answer)
        import obstore

        path = self.at.path(f"{TMP}/clock-{secrets.token_hex(8)}")
        with store_call(self.name, "ask for the store's time", outcome="unknown"):
            obstore.put(self._store, path, b"0")
            try:
                written = obstore.head(self._store, path)["last_modified"]
            finally:
                obstore.delete(self._store, path)
        return written.timestamp()

    # --- unfinished uploads -----------------------------------------------------------------------

    def sweep_unfinished(self, older_than_s: float) -> int:
        """As :meth:`Tier.sweep_unfinished`: uploads of segments, whose parts no listing shows.

        Returns 0 if the store's client cannot list them (other stores than S3, S3 through a proxy):
        then a rule of the bucket must abort them.
        """
        if self._uploader is None:
            return 0
        found = self._uploader.abandoned(older_than_s)
        return sum(self._uploader.abort(each.key, each.upload_id) for each in found)

    def _path(self, key: str) -> str:
        key_parts(key)
        if self._closed.is_set():
            raise unavailable(self.name, f"tier {self.name} is closed")
        return self.at.path(key)


class PartedObject(RangedObject):
    """Base of objects that are read in ranges, without a descriptor and without a lease.

    Args:
        tier: Name of the tier, for errors.
        key: The object's.
        meta: Its size and ETag when it was opened; an object with others is an error.
        part_bytes: Longer reads are divided into ranges of this size.
        threads: Fetch the ranges.
    """

    has_descriptor = False

    def __init__(self, tier: str, key: str, meta: Any, part_bytes: int, threads: CopyPool) -> None:
        super().__init__(tier, key, meta["size"])
        self._etag = meta["e_tag"]
        self._part_bytes = part_bytes
        self._threads = threads

    def _read(self, offset: int, into: memoryview) -> None:
        size = self._part_bytes

        def fetch(number: int) -> None:
            at = number * size
            self._fetch(offset + at, into[at : at + size])

        self._threads.run(fetch, -(-len(into) // size))

    @abstractmethod
    def _fetch(self, offset: int, into: memoryview) -> None:
        """Read one range, not longer than a part."""


class S3Object(PartedObject):
    """Ranges through our own requests, received in place.

    Args:
        wire: The bucket.
        args: As :class:`PartedObject`.
    """

    def __init__(self, wire: S3Wire, *args: Any) -> None:
        super().__init__(*args)
        self._wire = wire

    def _fetch(self, offset: int, into: memoryview) -> None:
        headers = self._asks_for(offset, offset + len(into))
        doing = f"read {self._key}"
        self._check(self._wire.ask("GET", self._key, headers=headers, into=into, doing=doing))

    def stream(self, start: int, stop: int) -> RangeStream:
        answer, stream = self._wire.begin(self._key, self._asks_for(start, stop))
        try:
            self._check(answer)
            assert stream is not None, "a refusal raises"
            if stream.length not in (None, stop - start):
                # ETag and size are right: the response is cut short, not the object.
                raise short(self._tier, self._key, stream.length, stop - start)
        except TieredCkptError:
            if stream is not None:
                stream.close()
            raise
        return stream

    def _asks_for(self, start: int, stop: int) -> dict[str, str]:
        headers = {"range": f"bytes={start}-{stop - 1}"}
        if self._etag:
            headers["if-match"] = self._etag
        return headers

    def _check(self, answer: Answer) -> None:
        """Raise the error of a response that is not a range of this object."""
        if answer.status in (200, 206):
            found = answer.headers.get("content-range", "")
            if found.startswith("bytes ") and found.rpartition("/")[2] not in (str(self.size), "*"):
                raise self._damaged(f"had {self.size} bytes and is now {found}")
            return
        if answer.status == 404:
            raise NotFoundError(f"tier {self._tier} has no {self._key} any more", key=self._key)
        if answer.status == 412:
            raise self._damaged("was changed after it was opened")
        if answer.status == 416:
            raise self._damaged("was truncated after it was opened", expected=self.size)
        raise self._wire.error(answer.refusal, doing=f"read {self._key}")


class StoredObject(PartedObject):
    """Ranges through obstore, for all stores that it supports.

    Args:
        store: obstore's.
        path: The object's path in it.
        args: As :class:`PartedObject`.
    """

    def __init__(self, store: ObjectStore, path: str, *args: Any) -> None:
        super().__init__(*args)
        self._store = store
        self._path = path

    def _fetch(self, offset: int, into: memoryview) -> None:
        import obstore

        stop = offset + len(into)
        try:
            with store_call(self._tier, f"read {self._key}", missing_key=self._key):
                got = obstore.get(
                    self._store,
                    self._path,
                    options={"range": (offset, stop), "if_match": self._etag},
                )
                data = memoryview(got.buffer())
                size = got.meta["size"]
        except ExistsError as error:
            raise self._damaged("was changed after it was opened") from error
        except TierUnavailableError as error:
            if error.fields.get("status") == 416:
                raise self._damaged("was truncated after it was opened") from error
            raise
        if size != self.size:
            raise self._damaged(
                f"had {self.size} bytes and has {size}", expected=self.size, actual=size
            )
        if len(data) != len(into):
            raise short(self._tier, self._key, len(data), len(into))
        into[:] = data


def _is_proxied(origin: str) -> bool:
    """Whether the environment sends requests to this host through a proxy."""
    parts = urlsplit(origin)
    if not {parts.scheme, "all"} & urllib.request.getproxies().keys():
        return False
    return not urllib.request.proxy_bypass(parts.netloc)
