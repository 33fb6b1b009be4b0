"""Long ranges of an object in a store, one request each, as a reader takes them piece by piece."""

from __future__ import annotations

import contextlib
import http.client
import socket

from tieredckpt.errors import TierUnavailableError
from tieredckpt.tiers.object_wire import S3Wire


class WireRange:
    """The body of one answer, received where it is wanted.

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
