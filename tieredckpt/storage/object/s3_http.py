"""Requests to S3 that obstore does not offer: parts of an upload by its id, reads into our memory.

obstore hides the id of an upload, so uploads could not be resumed, and the memory that it returns
must be copied once more. So these few requests are signed by botocore and sent with the standard
library: a part is sent from the buffer that the source filled, a range is received in place.
"""

from __future__ import annotations

import contextlib
import http.client
import logging
import random
import socket
import ssl
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Unpack
from urllib.parse import quote, urlsplit

from tieredckpt.errors import TieredCkptError, TierUnavailableError
from tieredckpt.storage.base import damaged, unavailable
from tieredckpt.storage.folder import Known
from tieredckpt.storage.object.credentials import Credentials
from tieredckpt.storage.object.errors import (
    ObjectSettings,
    ObjectUrl,
    Refusal,
    error_of,
    refusal_of,
)

_PIECE_BYTES = 256 << 10
"""Bytes per send: each has the full time-out, and bandwidth is limited between two of them."""

_RECEIVED_BYTES = 1 << 20

_FIRST_S = 0.1
_FIRST_THROTTLED_S = 0.5
_LONGEST_S = 20.0
_RETRY_AFTER_MAX_S = 60.0
_REPORTED_AFTER_S = 1.0
"""A request that fails for so long is reported (:attr:`Pace.retrying`): most are over sooner."""

ANSWER_BYTES_MAX = 8 << 20
"""Limit of a response in memory: the list of 10,000 parts takes 2 MB."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Answer:
    """A response of the store."""

    status: int
    headers: Mapping[str, str]
    """Names in lower case."""
    body: bytes

    @property
    def refusal(self) -> Refusal:
        """The response as a refusal."""
        return refusal_of(self.body.decode("utf-8", "replace"), self.status)


@dataclass(frozen=True, slots=True)
class _Request:
    """A request without headers, which differ if only the rest of a range is requested."""

    method: str
    key: str | None
    query: Mapping[str, str]
    body: memoryview | bytes
    stopped: threading.Event


class Pace:
    """Limits the rate of a tier: by its bandwidth, and by the delays that a store asks for.

    It also knows why requests are being repeated. Shared by all requests of one tier. Thread-safe.

    Args:
        bytes_per_s: Limit of uploads; None: no limit.
    """

    def __init__(self, bytes_per_s: int | None) -> None:
        self._bytes_per_s = bytes_per_s
        self._lock = threading.Lock()
        self._free_s = 0.0
        self._not_before_s = 0.0
        self.retrying: str | None = None
        """The error of the last attempt, while a request is repeated and no other one succeeds."""

    def send(self, size: int, stopped: threading.Event) -> None:
        """Wait until ``size`` more bytes may be sent. Raises TierUnavailableError if stopped."""
        if self._bytes_per_s:
            with self._lock:
                now_s = time.monotonic()
                start_s = max(now_s, self._free_s)
                self._free_s = start_s + size / self._bytes_per_s
            _wait(start_s - now_s, stopped)

    def begin(self, stopped: threading.Event) -> None:
        """Wait until requests are allowed: after SlowDown none is sent for a while."""
        with self._lock:
            wait_s = self._not_before_s - time.monotonic()
        _wait(wait_s, stopped)

    def ended(self) -> None:
        """A request was answered, or failed for good: then its caller reports the error."""
        self.retrying = None

    def back_off(
        self,
        attempt: int,
        *,
        since_s: float,
        until_s: float,
        why: TieredCkptError,
        throttled: bool,
        stopped: threading.Event,
        retry_after_s: float = 0.0,
    ) -> bool:
        """Wait before attempt number ``attempt`` (the first retry is 1); False: no time is left.

        The wait is random, up to a bound that doubles, so that clients that were refused together
        do not retry together. ``since_s``: when the request was sent first; ``why``: its error.
        """
        bound_s = (_FIRST_THROTTLED_S if throttled else _FIRST_S) * 2.0 ** min(attempt - 1, 10)
        wait_s = random.uniform(0.0, min(bound_s, _LONGEST_S))
        wait_s = max(wait_s, min(retry_after_s, _RETRY_AFTER_MAX_S))
        now_s = time.monotonic()
        if now_s + wait_s >= until_s:
            return False
        if now_s - since_s >= _REPORTED_AFTER_S:
            if self.retrying is None:
                log.warning("%s (it is retried)", why)
            self.retrying = str(why)
        if throttled:
            with self._lock:
                self._not_before_s = max(self._not_before_s, now_s + wait_s)
        _wait(wait_s, stopped)
        return True


def _wait(wait_s: float, stopped: threading.Event) -> None:
    if (wait_s > 0 and stopped.wait(wait_s)) or stopped.is_set():
        raise TierUnavailableError("the transfer was aborted", outcome="unknown", stopping=True)


def endpoint_of(at: ObjectUrl, settings: ObjectSettings, region: str) -> tuple[str, str]:
    """Scheme with host, and the path before a key: ``https://host`` and ``/bucket`` or nothing."""
    if settings.endpoint is None:
        dns = "amazonaws.com.cn" if region.startswith("cn-") else "amazonaws.com"
        # A dot in the bucket's name does not fit the certificate of virtual hosts.
        if settings.path_style or "." in at.bucket:
            return f"https://s3.{region}.{dns}", f"/{at.bucket}"
        return f"https://{at.bucket}.s3.{region}.{dns}", ""
    scheme, _, host = settings.endpoint.rstrip("/").partition("://")
    name = host.partition(":")[0]
    if settings.path_style or name.replace(".", "").isdigit() or host.startswith("["):
        return f"{scheme}://{host}", f"/{at.bucket}"  # (an address has no names below it)
    return f"{scheme}://{at.bucket}.{host}", ""


class S3Wire:
    """Signed requests to one bucket, repeated while that may help. Thread-safe.

    Args:
        tier: The tier's name, for errors.
        at: The tier's URL.
        settings: Endpoint, time-outs.
        credentials: Sign the requests.
        pace: Shared limits.
    """

    def __init__(
        self,
        tier: str,
        at: ObjectUrl,
        settings: ObjectSettings,
        credentials: Credentials,
        pace: Pace,
    ) -> None:
        self._tier = tier
        self._at = at
        self._settings = settings
        self._credentials = credentials
        self._pace = pace
        self.origin, self._bucket_path = endpoint_of(at, settings, credentials.region)
        self._tls: ssl.SSLContext | None = None
        if self.origin.startswith("https:"):
            self._tls = ssl.create_default_context()
            if settings.ca is not None:
                self._tls.load_verify_locations(settings.ca)
        self._lock = threading.Lock()
        self._idle: list[http.client.HTTPConnection] = []
        self.closed = threading.Event()

    def close(self) -> None:
        """Close idle connections, and abort waiting requests. Idempotent."""
        self.closed.set()
        with self._lock:
            idle, self._idle = self._idle, []
        for each in idle:
            each.close()

    # --- requests ---------------------------------------------------------------------------------

    def ask(
        self,
        method: str,
        key: str | None,
        *,
        query: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        body: memoryview | bytes = b"",
        into: memoryview | None = None,
        stopped: threading.Event | None = None,
        doing: str,
    ) -> Answer:
        """Send a request, and repeat it after temporary failures, for ``retry_for_s``.

        All requests may be repeated: parts, creates with a condition, lists and deletes.

        Args:
            method: HTTP's.
            key: Relative to the tier; None: the bucket itself.
            query: Of the URL.
            headers: Signed and sent.
            body: The request's body.
            into: Receives the body of a successful response, which must fill it; None: the body
                is returned.
            stopped: Once set, the request is aborted.
            doing: For errors; completes "cannot ...".

        Returns:
            The last response, also if it is a permanent refusal.

        Raises:
            TierUnavailableError: No response, or only temporary failures. The outcome is unknown.
            IntegrityError: The response has another length than ``into``.
        """
        asked = _Request(method, key, query or {}, body, stopped or self.closed)
        try:
            return self._repeated(asked, headers or {}, into, doing)
        finally:
            self._pace.ended()

    def _repeated(
        self, asked: _Request, headers: Mapping[str, str], into: memoryview | None, doing: str
    ) -> Answer:
        since_s = time.monotonic()
        until_s = since_s + self._settings.retry_for_s
        attempt, done, renewed = 0, 0, False
        while True:
            self._pace.begin(asked.stopped)
            got, retry_after_s = 0, 0.0
            refusal: Refusal
            used = self._credentials.now()
            try:
                rest = into[done:] if into is not None else None
                answer, got = self._once(asked, _rest(headers, done), rest, used)
                refusal = answer.refusal if answer.status >= 300 else Refusal(200, "", "")
                if not renewed and self._credentials.renewed(refusal, used):
                    renewed = True
                    continue
                if not refusal.passing:
                    return answer
                retry_after_s = _seconds(answer.headers.get("retry-after", ""))
            except _Broken as error:
                got, refusal = error.got, Refusal(0, "", str(error))
            if got:
                attempt, done = 0, done + got  # progress resets the deadline
                since_s = time.monotonic()
                until_s = since_s + self._settings.retry_for_s
            attempt += 1
            why = self.error(refusal, doing=doing, outcome="unknown")
            if not self._pace.back_off(
                attempt,
                since_s=since_s,
                until_s=until_s,
                why=why,
                throttled=refusal.throttled,
                retry_after_s=retry_after_s,
                stopped=asked.stopped,
            ):
                raise why

    def error(self, refusal: Refusal, *, doing: str, **known: Unpack[Known]) -> TieredCkptError:
        """``refusal`` as the error to raise."""
        where = f"(tier {self._tier}, {self._at.scheme}://{self._at.bucket})"
        return error_of(refusal, tier=self._tier, doing=f"{doing} {where}", **known)

    def _once(
        self, asked: _Request, headers: Mapping[str, str], into: memoryview | None, used: Any
    ) -> tuple[Answer, int]:
        """The response to one attempt, and the number of bytes read into ``into``.

        Raises _Broken, and IntegrityError for a response of the wrong length.
        """
        connection = self._connect()
        got, kept = 0, False
        try:
            reply, found = self._send(connection, asked, headers, used)
            if into is not None and reply.status in (200, 206):
                if reply.length is not None and reply.length != len(into):
                    what = f"sends {reply.length} bytes, {len(into)} were asked for"
                    raise damaged(
                        self._tier, str(asked.key), what, expected=len(into), actual=reply.length
                    )
                while got < len(into):
                    # In pieces: a piece that fails loses its bytes.
                    count = reply.readinto(into[got : got + _RECEIVED_BYTES])
                    if not count:
                        raise ConnectionResetError("the answer ended early")
                    got += count
                data = b""
            else:
                data = reply.read(ANSWER_BYTES_MAX)
            kept = reply.isclosed() and not reply.will_close
            return Answer(reply.status, found, data), got
        except (OSError, http.client.HTTPException) as error:
            raise _Broken(f"{type(error).__name__}: {error}", got) from error
        finally:
            self.give_back(connection, kept)

    def give_back(self, connection: http.client.HTTPConnection, kept: bool) -> None:
        """Return a connection; ``kept``: reuse it, since its last response was read to the end."""
        if kept and not self.closed.is_set():
            with self._lock:
                self._idle.append(connection)
        else:
            connection.close()

    def begin(self, key: str, headers: Mapping[str, str]) -> tuple[Answer, WireRange | None]:
        """Send one GET, once: the reader of the body requests the rest after a failure.

        The second value reads the body; None: the response is a refusal.

        Raises:
            TierUnavailableError: No response.
        """
        self._pace.begin(self.closed)
        renewed = False
        asked = _Request("GET", key, {}, b"", self.closed)
        used = self._credentials.now()
        connection = self._connect()
        while True:
            was_idle = connection.sock is not None
            try:
                reply, found = self._send(connection, asked, headers, used)
                if reply.status in (200, 206):
                    return Answer(reply.status, found, b""), WireRange(self, connection, reply, key)
                answer = Answer(reply.status, found, reply.read(ANSWER_BYTES_MAX))
                self.give_back(connection, reply.isclosed() and not reply.will_close)
                if renewed or not self._credentials.renewed(answer.refusal, used):
                    return answer, None
                renewed = True
                used, connection = self._credentials.now(), self._connect()
            except (OSError, http.client.HTTPException) as error:
                connection.close()
                if was_idle:
                    continue  # the server had closed it: connect anew
                refusal = Refusal(0, "", f"{type(error).__name__}: {error}")
                raise self.error(refusal, doing=f"read {key}") from error

    def _send(
        self,
        connection: http.client.HTTPConnection,
        asked: _Request,
        headers: Mapping[str, str],
        used: Any,
    ) -> tuple[http.client.HTTPResponse, dict[str, str]]:
        """The response to one signed request, of which only the headers were read."""
        path = "" if asked.key is None else quote(self._at.path(asked.key))
        query = "&".join(
            f"{quote(name, safe='')}={quote(value, safe='')}" for name, value in asked.query.items()
        )
        target = f"{self._bucket_path}/{path}{'?' if query else ''}{query}"
        body = memoryview(asked.body)
        signed = self._credentials.sign(used, asked.method, self.origin + target, headers, body)
        sent = {**signed, "Content-Length": str(len(body))}
        try:
            connection.request(asked.method, target, self._pieces(body, asked.stopped), sent)
        except (BrokenPipeError, ConnectionResetError):
            if not len(body):
                raise
            # The store may have refused before it read all of the body; then it has responded.
        reply = connection.getresponse()
        return reply, {name.lower(): value for name, value in reply.getheaders()}

    def _pieces(self, body: memoryview, stopped: threading.Event) -> Iterator[memoryview]:
        for at in range(0, len(body), _PIECE_BYTES):
            piece = body[at : at + _PIECE_BYTES]
            self._pace.send(len(piece), stopped)
            yield piece

    def _connect(self) -> http.client.HTTPConnection:
        if self.closed.is_set():
            raise unavailable(self._tier, f"tier {self._tier} is closed")
        with self._lock:
            if self._idle:
                return self._idle.pop()
        host, timeout_s = urlsplit(self.origin).netloc, self._settings.timeout_s
        if self._tls is not None:
            return http.client.HTTPSConnection(host, timeout=timeout_s, context=self._tls)
        return http.client.HTTPConnection(host, timeout=timeout_s)


class WireRange:
    """The body of one response: a long range, which is read piece by piece.

    Args:
        wire: Owner of the connection.
        connection: The connection.
        body: The response.
        name: Of the object and its tier, for errors.
    """

    def __init__(
        self,
        wire: S3Wire,
        connection: http.client.HTTPConnection,
        body: http.client.HTTPResponse,
        name: str,
    ) -> None:
        self._wire = wire
        self._connection = connection
        self._body = body
        self._name = name
        self._broken = False
        self.length = body.length
        """Bytes of the body as the store reported them; None: it did not."""
        # If the server will close the connection, the response takes the socket from it.
        self._socket: socket.socket | None = connection.sock

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
            with contextlib.suppress(OSError):  # it is closed already
                self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        kept = self._body.isclosed() and not self._body.will_close and not self._broken
        if not kept:
            self._body.close()
        self._wire.give_back(self._connection, kept)


class _Broken(Exception):
    """A request without a complete response."""

    def __init__(self, why: str, got: int) -> None:
        super().__init__(why)
        self.got = got


def _rest(headers: Mapping[str, str], done: int) -> Mapping[str, str]:
    """The headers of a request for a range without its first ``done`` bytes."""
    if not done:
        return headers
    first, _, last = headers["range"].removeprefix("bytes=").partition("-")
    return {**headers, "range": f"bytes={int(first) + done}-{last}"}


def _seconds(retry_after: str) -> float:
    with contextlib.suppress(ValueError):
        return max(0.0, float(retry_after))
    return 0.0
