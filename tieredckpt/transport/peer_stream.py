"""A range of a segment on its way from another host."""

from __future__ import annotations

from collections.abc import Callable

from tieredckpt.errors import TieredCkptError, UsageError
from tieredckpt.transport.peer_line import Head, Malformed, PeerConnection


class Stream:
    """The bytes of one range, on a connection of its own until they were all read.

    One thread at a time. Made by :meth:`.peer_client.PeerClient.open_range`.
    """

    def __init__(
        self,
        connection: PeerConnection,
        head: Head,
        size: int,
        give: Callable[[PeerConnection], None],
        fail: Callable[[Exception], TieredCkptError],
    ) -> None:
        self.left = size
        """Bytes that were not read yet."""
        self._connection: PeerConnection | None = connection
        self._head = head
        self._give = give
        self._fail = fail

    def read_into(self, into: memoryview) -> None:
        """Fill ``into`` with the next bytes.

        Raises:
            TierUnavailableError: They do not come, or not fast enough; the stream is closed, and
                what was filled is undefined.
            UsageError: There are not so many left, or the stream is closed.
        """
        connection = self._connection
        if connection is None or len(into) > self.left or into.itemsize != 1:
            raise UsageError(f"{len(into)} bytes wanted of a stream with {self.left} left")
        try:
            connection.fill(into)
            self.left -= len(into)
            if self.left:
                return
            connection.end(self._head)
        except (Malformed, OSError) as error:
            self.close()
            raise self._fail(error) from error
        self._connection = None
        self._give(connection)

    def abort(self) -> None:
        """End it from any thread: a read that waits raises, in its own thread, which closes it."""
        connection = self._connection
        if connection is not None:
            connection.cut()

    def close(self) -> None:
        """Give the rest up. Idempotent."""
        connection, self._connection = self._connection, None
        self.left = 0
        if connection is not None:
            connection.close()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
