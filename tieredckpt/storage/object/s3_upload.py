"""Uploads a large object in parts to S3, from its source; stored parts are not sent again.

    find an unfinished upload of this key, else begin one
    each part: read it from the source (verified), digest, send, unless the store has it already
    complete it, unless the key exists (``If-None-Match: *``)

This host keeps no state: a restarted agent, or the agent of another host, finds the upload by its
key in the store's list, and compares each stored part's checksum with the bytes that it would send.
An upload is aborted if its source is bad or the store refuses it permanently. If the store fails or
the agent ends, it is kept for the next attempt. :meth:`Uploader.abandoned` finds uploads that were
not continued, by the store's clock.
"""

from __future__ import annotations

import base64
import contextlib
import email.utils
import hashlib
import queue
import re
import threading
import zlib
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, TypeVar
from xml.etree import ElementTree
from xml.sax.saxutils import escape

import msgspec

from tieredckpt import failpoints
from tieredckpt.errors import TieredCkptError, TierUnavailableError
from tieredckpt.storage.base import ByteSource
from tieredckpt.storage.file_io import RUN_BYTES, aligned_buffer
from tieredckpt.storage.object.errors import STALE, ObjectSettings, Refusal, refusal_of
from tieredckpt.storage.object.s3_http import Answer, S3Wire

PARTS_MAX = 10_000
_PART_MIN = 5 << 20
_PAGES_MAX = 1000
_MD5 = re.compile(r'"?([0-9a-f]{32})"?')


_Digits = Annotated[str, msgspec.Meta(pattern=r"\A[0-9]{1,18}\Z")]
T = TypeVar("T")


class StoredPart(msgspec.Struct, frozen=True, rename="pascal"):
    """A stored part; fields are named as in S3's XML."""

    part_number: _Digits
    size: _Digits
    e_tag: str = ""
    crc32: str | None = msgspec.field(default=None, name="ChecksumCRC32")


class Upload(msgspec.Struct, frozen=True, rename="pascal"):
    """An upload that was begun and not completed; likewise."""

    initiated: Annotated[datetime, msgspec.Meta(tz=True)]
    """By the store's clock."""
    key: str = ""
    upload_id: str = ""


def part_size(size: int, wanted: int) -> int:
    """Bytes of each part but the last: whole blocks, and not more parts than S3 allows."""
    least = max(wanted, _PART_MIN, -(-size // PARTS_MAX))
    return -(-least // RUN_BYTES) * RUN_BYTES


def stored_headers(settings: ObjectSettings) -> dict[str, str]:
    """Headers for the storage class and the encryption of objects."""
    headers = {}
    if settings.storage_class is not None:
        headers["x-amz-storage-class"] = settings.storage_class
    if settings.sse_type is not None:
        kind = "AES256" if settings.sse_type == "s3" else "aws:kms"
        headers["x-amz-server-side-encryption"] = kind
    if settings.sse_key is not None:
        headers["x-amz-server-side-encryption-aws-kms-key-id"] = settings.sse_key
    return headers


class PartBuffers:
    """Buffers of parts that are being sent: at most ``count``, for all uploads of a tier."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._free: queue.SimpleQueue[memoryview | None] = queue.SimpleQueue()
        for _ in range(count):
            self._free.put(None)  # made when first needed

    def acquire(self, size: int) -> memoryview:
        """A buffer of at least ``size`` bytes; waits for one. Return it with :meth:`release`."""
        found = self._free.get()
        return found if found is not None and len(found) >= size else aligned_buffer(size)

    def release(self, buffer: memoryview) -> None:
        """Return it."""
        self._free.put(buffer)

    def trim(self) -> None:
        """Free the memory of unused buffers."""
        for _ in range(self._count):
            with contextlib.suppress(queue.Empty):  # other threads may acquire them meanwhile
                self._free.get_nowait()
                self._free.put(None)


class Uploader:
    """Puts large objects. Thread-safe; several uploads may run at once.

    Args:
        wire: The bucket.
        settings: Part size, concurrency.
        prefix: Prefix of the tier's keys in the bucket: empty, or with its slash.
    """

    def __init__(self, wire: S3Wire, settings: ObjectSettings, prefix: str) -> None:
        self._wire = wire
        self._settings = settings
        self._prefix = prefix
        self._buffers = PartBuffers(settings.concurrency)
        self._threads = ThreadPoolExecutor(settings.concurrency, "tieredckpt-s3-put")
        self._lock = threading.Lock()
        self._stops: set[threading.Event] = set()

    def close(self) -> None:
        """Abort running uploads. Idempotent."""
        with self._lock:
            stops = list(self._stops)
        for each in stops:
            each.set()
        self._threads.shutdown(wait=False)

    def put(self, key: str, source: ByteSource) -> bool:
        """Store the object; False if another writer put an object under this key meanwhile.

        Raises:
            TieredCkptError: Of the source; CapacityError, TierUnavailableError.
        """
        stopped = threading.Event()
        with self._lock:
            self._stops.add(stopped)
        try:
            size = part_size(source.size, self._settings.part_bytes)
            if source.size <= size:
                return self._put_single(key, source, stopped)
            return self._put_parts(key, source, size, stopped)
        finally:
            with self._lock:
                self._stops.discard(stopped)
                idle = not self._stops
            if idle:
                self._buffers.trim()

    def _put_single(self, key: str, source: ByteSource, stopped: threading.Event) -> bool:
        doing = f"upload {key}"
        buffer = self._buffers.acquire(max(source.size, 1))
        try:
            body = buffer[: source.size]
            if source.size:
                source.read_into(0, body)
            headers = {
                **stored_headers(self._settings),
                "if-none-match": "*",
                "x-amz-checksum-crc32": _crc32(body),
            }
            answer = self._wire.ask(
                "PUT", key, headers=headers, body=body, stopped=stopped, doing=doing
            )
        finally:
            self._buffers.release(buffer)
        if answer.status not in (200, 412):
            raise self._wire.error(answer.refusal, doing=doing, needed_bytes=source.size)
        return answer.status == 200

    def _put_parts(self, key: str, source: ByteSource, size: int, stopped: threading.Event) -> bool:
        job = self._begin(key, stopped)
        try:
            parts = self._send_parts(job, source, size)
            failpoints.reach("tier.object.complete")
            return self._complete(job, parts)
        except TierUnavailableError as error:
            if error.fields.get("code") == "NoSuchUpload":
                return False  # completed by another host, or swept
            status, code = error.fields.get("status", 0), error.fields.get("code", "")
            if 400 <= status < 500 and status not in (401, 403) and code not in STALE:
                self.abort(key, job.upload_id)  # refused permanently: begin anew
            raise
        except TieredCkptError:
            self.abort(key, job.upload_id)
            raise

    # --- parts ------------------------------------------------------------------------------------

    def _begin(self, key: str, stopped: threading.Event) -> _Job:
        """An unfinished upload of this key, or a new one."""
        begun, _ = self._uploads(key)
        for each in sorted(begun, key=lambda upload: upload.initiated, reverse=True):
            if each.key == key and (stored := self._parts_of(each)) is not None:
                return _Job(key, each.upload_id, stored, stopped)
        doing = f"begin the upload of {key}"
        headers = {**stored_headers(self._settings), "x-amz-checksum-algorithm": "CRC32"}
        answer = self._wire.ask("POST", key, query={"uploads": ""}, headers=headers, doing=doing)
        if answer.status != 200:
            raise self._wire.error(answer.refusal, doing=doing)
        return _Job(key, upload_id_in(answer), {}, stopped)

    def _parts_of(self, upload: Upload) -> dict[int, StoredPart] | None:
        """The stored parts of an upload; None if it is gone or may not be listed."""
        found: dict[int, StoredPart] = {}
        after = "0"
        doing = f"list the parts of {upload.key}"
        for _ in range(_PAGES_MAX):
            query = {"uploadId": upload.upload_id, "part-number-marker": after}
            answer = self._wire.ask("GET", upload.key, query=query, doing=doing)
            if answer.status != 200:
                return None
            parts, after = parts_in(answer)
            found.update(parts)
            if not after:
                break
        return found

    def _send_parts(self, job: _Job, source: ByteSource, size: int) -> list[str]:
        """The XML of all parts, for completing. No part is in transfer after this call."""
        sending: list[Future[str]] = []
        try:
            for offset in range(0, source.size, size):
                buffer = self._buffers.acquire(size)  # (``_send`` releases it)
                part = buffer[: min(size, source.size - offset)]
                try:
                    if job.stopped.is_set():
                        break  # one failed
                    source.read_into(offset, part)
                    number = offset // size + 1
                    sending.append(self._threads.submit(self._send, job, number, part, buffer))
                except RuntimeError:  # of submit: the tier was closed meanwhile
                    job.stopped.set()
                    break
                finally:
                    if len(sending) <= offset // size:
                        self._buffers.release(buffer)
        except BaseException:
            job.stopped.set()
            raise
        finally:
            wait(sending)
        failures = [failure for each in sending if (failure := each.exception()) is not None]
        # Parts that were stopped by another part's failure come last.
        failures.sort(key=lambda failure: getattr(failure, "fields", {}).get("stopping", False))
        if failures:
            raise failures[0]
        if len(sending) * size < source.size:
            raise TierUnavailableError(
                "the transfer was aborted", outcome="not_applied", stopping=True
            )
        return [each.result() for each in sending]

    def _send(self, job: _Job, number: int, part: memoryview, buffer: memoryview) -> str:
        """Send one part, in a thread of the pool; return its XML for completing."""
        try:
            crc32 = _crc32(part)
            have = job.stored.get(number)
            if have is not None and _is_same(have, part, crc32):
                return _named(number, have.e_tag, crc32)
            failpoints.reach("tier.object.part")
            doing = f"upload part {number} of {job.key}"
            answer = self._wire.ask(
                "PUT",
                job.key,
                query={"partNumber": str(number), "uploadId": job.upload_id},
                headers={"x-amz-checksum-crc32": crc32},
                body=part,
                stopped=job.stopped,
                doing=doing,
            )
            if answer.status != 200:
                raise self._wire.error(answer.refusal, doing=doing, needed_bytes=len(part))
            return _named(number, answer.headers.get("etag", ""), crc32)
        except BaseException:
            job.stopped.set()
            raise
        finally:
            self._buffers.release(buffer)

    def _complete(self, job: _Job, parts: list[str]) -> bool:
        doing = f"complete the upload of {job.key}"
        body = f"<CompleteMultipartUpload>{''.join(parts)}</CompleteMultipartUpload>".encode()
        answer = self._wire.ask(
            "POST",
            job.key,
            query={"uploadId": job.upload_id},
            headers={"if-none-match": "*"},
            body=body,
            stopped=job.stopped,
            doing=doing,
        )
        if answer.status == 412:
            self.abort(job.key, job.upload_id)
            return False
        # The store may send status 200 to keep the connection before it knows the result.
        refusal = answer.refusal if answer.status != 200 else error_inside(answer)
        if refusal is not None:
            raise self._wire.error(refusal, doing=doing, outcome="unknown")
        return True

    # --- unfinished uploads -----------------------------------------------------------------------

    def abort(self, key: str, upload_id: str) -> bool:
        """Abort an upload, or leave it to the sweep; return whether it is gone."""
        with contextlib.suppress(TieredCkptError):
            doing = f"end the upload of {key}"
            answer = self._wire.ask("DELETE", key, query={"uploadId": upload_id}, doing=doing)
            return answer.status in (200, 204, 404)
        return False

    def abandoned(self, older_than_s: float) -> tuple[Upload, ...]:
        """Uploads that were begun so long ago, by the store's clock, and not completed.

        Raises TierUnavailableError, also if the store does not list them or does not permit it.
        """
        found, now_s = self._uploads("", strict=True)
        return tuple(each for each in found if now_s - each.initiated.timestamp() > older_than_s)

    def _uploads(self, prefix: str, *, strict: bool = False) -> tuple[list[Upload], float]:
        """Uploads of keys with this prefix, and the store's clock; not strict: ignores refusals."""
        found: list[Upload] = []
        now_s = 0.0
        query = {"uploads": "", "prefix": self._prefix + prefix}
        doing = "list unfinished uploads"
        for page in range(_PAGES_MAX):
            answer = self._wire.ask("GET", None, query=query, doing=doing)
            if answer.status != 200:
                if strict:
                    raise self._wire.error(answer.refusal, doing=doing)
                break
            now_s = now_s if page else clock_of(answer)
            uploads, after = uploads_in(answer, self._prefix)
            found += uploads
            if not after:
                break
            query.update(after)
        return found, now_s


@dataclass(frozen=True, slots=True)
class _Job:
    """One running upload. ``stopped`` is set when it fails or is aborted."""

    key: str
    upload_id: str
    stored: Mapping[int, StoredPart]
    stopped: threading.Event


def _crc32(data: memoryview) -> str:
    return base64.b64encode(zlib.crc32(data).to_bytes(4, "big")).decode()


def _is_same(have: StoredPart, part: memoryview, crc32: str) -> bool:
    """Whether the stored part has these bytes, by its size and checksum."""
    if int(have.size) != len(part):
        return False
    if have.crc32 is not None:
        return have.crc32 == crc32
    # Without a checksum in the list, the ETag is one, unless the bucket encrypts with its own keys;
    # then it does not match and the part is sent again.
    found = _MD5.fullmatch(have.e_tag)
    return found is not None and found[1] == hashlib.md5(part, usedforsecurity=False).hexdigest()


def _named(number: int, etag: str, crc32: str) -> str:
    return (
        f"<Part><PartNumber>{number}</PartNumber><ETag>{escape(etag)}</ETag>"
        f"<ChecksumCRC32>{crc32}</ChecksumCRC32></Part>"
    )


# --- responses of S3: XML, which may be hostile ---------------------------------------------------


def upload_id_in(answer: Answer) -> str:
    """The id of an upload that was begun. Raises TierUnavailableError, like all here."""
    found = _fields(_parsed(answer)).get("UploadId")
    if not found:
        raise _malformed("an upload has no id")
    return found


def parts_in(answer: Answer) -> tuple[dict[int, StoredPart], str]:
    """A page of parts by number, and the marker of the next page; empty: there is none."""
    page = _parsed(answer)
    fields = _fields(page)
    more = fields.get("IsTruncated") == "true"
    found = {int(each.part_number): each for each in _all(page, "Part", StoredPart)}
    return found, fields.get("NextPartNumberMarker", "") if more else ""


def uploads_in(answer: Answer, prefix: str) -> tuple[list[Upload], dict[str, str]]:
    """A page of uploads below ``prefix``, with keys relative to it, and how to ask for the next."""
    page = _parsed(answer)
    fields = _fields(page)
    found = [
        msgspec.structs.replace(each, key=each.key.removeprefix(prefix))
        for each in _all(page, "Upload", Upload)
        if each.key.startswith(prefix) and each.upload_id
    ]
    if fields.get("IsTruncated") != "true" or "NextKeyMarker" not in fields:
        return found, {}
    return found, {
        "key-marker": fields["NextKeyMarker"],
        "upload-id-marker": fields.get("NextUploadIdMarker", ""),
    }


def error_inside(answer: Answer) -> Refusal | None:
    """The error in a response with a status of success; None: it is a success."""
    text = answer.body.decode("utf-8", "replace")
    return refusal_of(text, 500) if "<Error>" in text else None


def clock_of(answer: Answer) -> float:
    """The store's clock in a response, in seconds since 1970."""
    try:
        return email.utils.parsedate_to_datetime(answer.headers["date"]).timestamp()
    except (KeyError, ValueError) as error:
        raise _malformed("an answer has no date") from error


def _parsed(answer: Answer) -> ElementTree.Element:
    if b"<!" in answer.body:
        raise _malformed(
            "an answer declares entities"
        )  # S3 declares none; a hostile one could expand to gigabytes
    try:
        return ElementTree.fromstring(answer.body)  # noqa: S314 (no entities, limited in size)
    except ElementTree.ParseError as error:
        raise _malformed(f"an answer is no XML ({error})") from error


def _fields(around: ElementTree.Element) -> dict[str, str]:
    """The texts in an element by their names, without empty ones."""
    return {each.tag.rpartition("}")[2]: each.text for each in around if each.text}


def _all(page: ElementTree.Element, name: str, kind: type[T]) -> list[T]:
    """The elements of this name, as values."""
    found = [_fields(each) for each in page if each.tag.rpartition("}")[2] == name]
    try:
        return [msgspec.convert(each, kind) for each in found]
    except msgspec.ValidationError as error:
        raise _malformed(f"{name}: {error}") from error


def _malformed(what: str) -> TierUnavailableError:
    return TierUnavailableError(
        f"the object store answers what S3 does not: {what}", outcome="unknown"
    )
