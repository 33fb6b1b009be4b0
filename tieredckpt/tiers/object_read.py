"""An object in a store, opened for reading: ranges, several at once, always of the same object."""

from __future__ import annotations

import contextlib
import http.client
import socket
from abc import abstractmethod
from typing import TYPE_CHECKING

from tieredckpt.errors import NotFoundError, TieredCkptError, TierUnavailableError
from tieredckpt.tiers.base import RangedObject, RangeStream
from tieredckpt.tiers.copy_pool import CopyPool
from tieredckpt.tiers.object_store import ExistsError, store_call
from tieredckpt.tiers.object_wire import Answer, S3Wire

if TYPE_CHECKING:
    from obstore.store import ObjectStore


class PartedObject(RangedObject):
    """What each way to read ranges has in common. It has no descriptor and holds no lease.

    Args:
        tier: Name of the tier, for errors.
        key: The object's.
        size: Its bytes when it was opened.
        part_bytes: Longer reads are divided into ranges of this size.
        threads: What fetches them.
    """

    has_descriptor = False

    def __init__(self, tier: str, key: str, size: int, part_bytes: int, threads: CopyPool) -> None:
        super().__init__(tier, key, size)
        self._part_bytes = part_bytes
        self._threads = threads

    def _read(self, offset: int, into: memoryview) -> None:
        size = self._part_bytes
        if len(into) <= size:
            self._fetch(offset, into)
            return

        def fetch(number: int) -> None:
            at = number * size
            self._fetch(offset + at, into[at : at + size])

        self._threads.run(fetch, -(-len(into) // size))

    @abstractmethod
    def _fetch(self, offset: int, into: memoryview) -> None:
        """One range, not longer than a part."""

    def _missing(self) -> NotFoundError:
        return NotFoundError(f"tier {self._tier} has no {self._key} any more", key=self._key)


class WireRange:
    """The body of one answer: a long range, which a reader takes piece by piece.

    Args:
        wire: Where the connection goes back to.
        line: The connection.
        body: What comes over it.
        name: Of the object and its tier, for errors.
    """

    def __init__(
        self,
        wire: S3Wire,
        line: http.client.HTTPConnection,
        body: http.client.HTTPResponse,
        name: str,
    ) -> None:
        self._wire = wire
        self._line = line
        self._body = body
        self._name = name
        self._broken = False
        # The response takes it from the connection if the server will close it.
        self._socket: socket.socket | None = line.sock

    def read_into(self, into: memoryview) -> None:
        got = 0
        try:
            while got < len(into):
                count = self._body.readinto(into[got:])
                if not count:
                    raise ConnectionResetError("the answer ended early")
                got += count
        except (OSError, ValueError, http.client.HTTPException) as error:
            self._broken = True
            raise TierUnavailableError(
                f"cannot read {self._name}: {type(error).__name__}: {error}"
            ) from error

    def abort(self) -> None:
        self._broken = True
        if self._socket is not None:
            with contextlib.suppress(OSError):  # it has ended already
                self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        kept = self._body.isclosed() and not self._body.will_close and not self._broken
        if not kept:
            self._body.close()
        self._wire.give_back(self._line, kept)


class S3Object(PartedObject):
    """Ranges are received where they are wanted.

    Args:
        wire: The bucket.
        etag: Of the object that was opened; another one is an error.
        args: As :class:`PartedObject`.
    """

    def __init__(self, wire: S3Wire, etag: str | None, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self._wire = wire
        self._etag = etag

    def _fetch(self, offset: int, into: memoryview) -> None:
        headers = self._asks_for(offset, offset + len(into))
        doing = f"read {self._key}"
        self._check(self._wire.ask("GET", self._key, headers=headers, into=into, doing=doing))

    def stream(self, start: int, stop: int) -> RangeStream:
        begun = self._wire.begin(self._key, self._asks_for(start, stop))
        if begun.line is None or begun.body is None:
            self._check(begun.answer)
            raise AssertionError("unreachable: a refusal raises")
        stream = WireRange(self._wire, begun.line, begun.body, self._key)
        try:
            self._check(begun.answer)
            if begun.body.length not in (None, stop - start):
                raise self._damaged(f"sends {begun.body.length} bytes of {stop - start}")
        except TieredCkptError:
            stream.close()
            raise
        return stream

    def _asks_for(self, start: int, stop: int) -> dict[str, str]:
        headers = {"range": f"bytes={start}-{stop - 1}"}
        if self._etag:
            headers["if-match"] = self._etag
        return headers

    def _check(self, answer: Answer) -> None:
        """Raises what a reader is to know of an answer that is not a part of this object."""
        if answer.status in (200, 206):
            told = answer.headers.get("content-range", "")
            if told.startswith("bytes ") and told.rpartition("/")[2] not in (str(self.size), "*"):
                raise self._damaged(f"had {self.size} bytes and is now {told}")
            return
        if answer.status == 404:
            raise self._missing()
        if answer.status == 412:
            raise self._damaged("was changed after it was opened")
        if answer.status == 416:
            raise self._damaged("was truncated after it was opened", expected=self.size)
        raise self._wire.error(answer.refusal, doing=f"read {self._key}")


class StoredObject(PartedObject):
    """Ranges through obstore, for every store that it knows.

    Args:
        store: obstore's.
        path: The object's, there.
        etag: Of the object that was opened; another one is an error.
        args: As :class:`PartedObject`.
    """

    def __init__(self, store: ObjectStore, path: str, etag: str | None, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self._store = store
        self._path = path
        self._etag = etag

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
        if len(data) != len(into) or size != self.size:
            raise self._damaged(
                f"had {self.size} bytes and has {size}", expected=self.size, actual=size
            )
        into[:] = data
