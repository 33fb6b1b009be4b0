"""How fast bytes go to and from an S3 server with nothing around it: no digest of ours, no catalog.

The fair limit of an object tier: the same server, part size and number of requests at once, and
memory that is warm at both ends. All ways are tried and the fastest counts. Connections are kept,
and every request is signed, as the server demands. Imports neither torch nor our tiers.
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import mmap
import os
import queue
import socket
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from tieredckpt.testing.s3_server import ACCESS_KEY, BUCKET, REGION, SECRET_KEY

if TYPE_CHECKING:
    from obstore.store import S3Store

T = TypeVar("T")
Act = Callable[[], object]
_HEAD_BYTES_MAX = 16 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class At:
    """Which object, and how it is divided."""

    endpoint: str
    key: str
    """In the servers' own bucket."""
    part_bytes: int = 16 << 20
    at_once: int = 8


class Bytes:
    """What is sent, and where it is received: private memory, all of its pages there."""

    def __init__(self, size: int, *, sent: bool = True, received: bool = True) -> None:
        self.size = size
        noise = os.urandom(1 << 20)
        self.source = _memory(size, noise) if sent else memoryview(b"")
        self.into = _memory(size, bytes(1 << 20)) if received else memoryview(b"")

    def parts(self, at: At) -> Iterator[tuple[int, int]]:
        """Start and end of each part."""
        size = at.part_bytes
        return ((start, min(start + size, self.size)) for start in range(0, self.size, size))


def _memory(size: int, fill: bytes) -> memoryview:
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for at in range(0, size, len(fill)):
        memory[at : at + len(fill)] = fill[: size - at]
    return memoryview(memory)


def in_threads(work: Callable[[tuple[int, int]], object], data: Bytes, at: At) -> None:
    """``work`` for each part, so many at once."""
    with ThreadPoolExecutor(at.at_once) as pool:
        list(pool.map(work, data.parts(at)))


# --- the native client ----------------------------------------------------------------------------


def obstore_puts(at: At, data: Bytes) -> dict[str, Act]:
    """A Rust library's binding: it reads the parts from an iterator, one after another."""
    import obstore

    def put(to: S3Store) -> Act:
        def act() -> None:
            parts = (data.source[start:stop] for start, stop in data.parts(at))
            obstore.put(
                to,
                at.key,
                parts,
                use_multipart=True,
                chunk_size=at.part_bytes,
                max_concurrency=at.at_once,
            )

        return act

    return {
        "put obstore": put(_store(at)),
        "put obstore, payload not signed": put(_store(at, unsigned_payload=True)),
        "put obstore, checksum sha256": put(_store(at, checksum_algorithm="sha256")),
    }


def obstore_gets(at: At, data: Bytes) -> dict[str, Act]:
    """The same: what it received is memory of its own, and copied."""
    import obstore

    store = _store(at)

    def get() -> None:
        def part(where: tuple[int, int]) -> None:
            data.into[where[0] : where[1]] = memoryview(
                obstore.get_range(store, at.key, start=where[0], end=where[1])
            )

        in_threads(part, data, at)

    def get_streamed() -> None:
        def part(where: tuple[int, int]) -> None:
            done = where[0]
            for chunk in obstore.get(store, at.key, options={"range": where}).stream(1 << 20):
                data.into[done : done + len(chunk)] = memoryview(chunk)
                done += len(chunk)

        in_threads(part, data, at)

    return {"get obstore, get_range": get, "get obstore, get().stream()": get_streamed}


def _store(at: At, **more: Any) -> S3Store:
    from obstore.store import S3Store

    return S3Store(
        BUCKET,
        endpoint=at.endpoint,
        region=REGION,
        access_key_id=ACCESS_KEY,
        secret_access_key=SECRET_KEY,
        client_options={"allow_http": True},
        **more,
    )


# --- plain HTTP -----------------------------------------------------------------------------------


class Plain:
    """Presigned requests over the standard library, without retries or anything else."""

    def __init__(self, at: At) -> None:
        import botocore.auth
        import botocore.credentials

        self._at = at
        credentials = botocore.credentials.Credentials(ACCESS_KEY, SECRET_KEY)
        self._signer = botocore.auth.S3SigV4QueryAuth(credentials, "s3", REGION, expires=3600)
        self._host = urlsplit(at.endpoint).netloc
        self._lines: queue.SimpleQueue[http.client.HTTPConnection] = queue.SimpleQueue()
        self._sockets: queue.SimpleQueue[socket.socket] = queue.SimpleQueue()

    def puts(self, data: Bytes) -> dict[str, Act]:
        """Parts from memory, with and without a checksum that the server verifies."""
        return {
            "put presigned parts, http.client": lambda: self._put(data, summed=False),
            "put presigned parts, http.client, checksum crc32": lambda: self._put(
                data, summed=True
            ),
        }

    def gets(self, data: Bytes) -> dict[str, Act]:
        """Ranges into memory."""

        def act(part: Callable[[tuple[int, int], memoryview], None]) -> Act:
            return lambda: in_threads(
                lambda where: part(where, data.into[where[0] : where[1]]), data, self._at
            )

        return {
            "get presigned, http.client, readinto": act(self._get),
            "get presigned, socket, recv_into": act(self._get_by_socket),
        }

    def _put(self, data: Bytes, *, summed: bool) -> None:
        headers = {"x-amz-checksum-algorithm": "CRC32"} if summed else {}
        text, _ = self._ask("POST", "?uploads=", headers=headers)
        upload = text.partition("<UploadId>")[2].partition("</UploadId>")[0]
        lines: dict[int, str] = {}

        def part(where: tuple[int, int]) -> None:
            number = where[0] // self._at.part_bytes + 1
            body = data.source[where[0] : where[1]]
            headers, line = {}, ""
            if summed:
                value = base64.b64encode(zlib.crc32(body).to_bytes(4, "big")).decode()
                headers["x-amz-checksum-crc32"] = value
                line = f"<ChecksumCRC32>{value}</ChecksumCRC32>"
            _, got = self._ask("PUT", f"?partNumber={number}&uploadId={upload}", body, headers)
            line += f"<PartNumber>{number}</PartNumber><ETag>{got['ETag']}</ETag>"
            lines[number] = f"<Part>{line}</Part>"

        in_threads(part, data, self._at)
        parts = "".join(lines[number] for number in sorted(lines))
        whole = f"<CompleteMultipartUpload>{parts}</CompleteMultipartUpload>"
        self._ask("POST", f"?uploadId={upload}", whole.encode())

    def _get(self, where: tuple[int, int], into: memoryview) -> None:
        self._ask("GET", "", headers=_range(where), into=into)

    def _ask(
        self,
        method: str,
        query: str,
        body: Any = None,
        headers: dict[str, str] | None = None,
        into: memoryview | None = None,
    ) -> tuple[str, Any]:
        line = _idle(self._lines) or http.client.HTTPConnection(self._host, blocksize=1 << 20)
        line.request(method, self._signed(method, query, headers or {}), body, headers or {})
        reply = line.getresponse()
        assert reply.status in (200, 206), reply.read()
        text = ""
        if into is None:
            text = reply.read().decode()
        else:
            done = 0
            while done < len(into):
                count = reply.readinto(into[done:])
                assert count, "the answer ended early"
                done += count
        self._lines.put(line)
        return text, reply.headers

    def _get_by_socket(self, where: tuple[int, int], into: memoryview) -> None:
        """The least that can be done: one request, its head looked at, and the body received."""
        sock = _idle(self._sockets) or self._connect()
        target = self._signed("GET", "", _range(where))
        wanted = f"GET {target} HTTP/1.1\r\nHost: {self._host}\r\nRange: {_range(where)['Range']}"
        sock.sendall(f"{wanted}\r\n\r\n".encode())
        head, end = b"", -1
        while end < 0:
            head = sock.recv(_HEAD_BYTES_MAX, socket.MSG_PEEK)
            assert head.startswith(b"HTTP/1.1 206"[: len(head)]), head[:200]
            assert head, "the server has ended the connection"
            end = head.find(b"\r\n\r\n")
        sock.recv(end + 4, socket.MSG_WAITALL)
        done = 0
        while done < len(into):
            count = sock.recv_into(into[done : done + (1 << 20)], 0, socket.MSG_WAITALL)
            assert count, "the answer ended early"
            done += count
        self._sockets.put(sock)

    def _connect(self) -> socket.socket:
        host, _, port = self._host.rpartition(":")
        return socket.create_connection((host, int(port)))

    def _signed(self, method: str, query: str, headers: dict[str, str]) -> str:
        import botocore.awsrequest

        url = f"{self._at.endpoint}/{BUCKET}/{self._at.key}{query}"
        request = botocore.awsrequest.AWSRequest(method=method, url=url, headers=headers)
        self._signer.add_auth(request)
        where = urlsplit(request.url)
        return f"{where.path}?{where.query}"


def _range(where: tuple[int, int]) -> dict[str, str]:
    return {"Range": f"bytes={where[0]}-{where[1] - 1}"}


def _idle(lines: queue.SimpleQueue[T]) -> T | None:
    with contextlib.suppress(queue.Empty):
        return lines.get_nowait()
    return None


def empty(at: At) -> None:
    """Delete everything below the key."""
    import obstore

    store = _store(at)
    for page in obstore.list(store, prefix=at.key, chunk_size=1000):
        obstore.delete(store, [meta["path"] for meta in page])
