"""The blocking client of another host's agent: one of our errors for every failure.

Bulk data is received straight into the caller's memory. All requests are idempotent: if the other
side has closed a kept connection, the request is sent again on a fresh one.
"""

from __future__ import annotations

import email.utils
import math
import os
import ssl
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec

from tieredckpt import errors
from tieredckpt.errors import (
    AgentError,
    IntegrityError,
    NotFoundError,
    RemoteProtocolError,
    TieredCkptError,
    TierUnavailableError,
    UsageError,
)
from tieredckpt.format.envelope import MALFORMED
from tieredckpt.rpc.auth import Secret, TlsFiles, host_name
from tieredckpt.rpc.http1 import ERROR_BYTES_MAX, Broken, Dial, Head, Malformed, PeerConnection
from tieredckpt.rpc.messages import agent as m
from tieredckpt.rpc.messages import peer as pm
from tieredckpt.rpc.messages.base import decode_error

IDLE_PER_ADDRESS_MAX = 8
CHECK_TLS = "run `tieredckpt config check` on both hosts, which checks the certificates"
_IDENTIFY = pm.Identify.verb()
SHUNNED_S = 30.0
"""For so long an address that did not answer is tried last."""

_REPLIED = (
    NotFoundError,
    IntegrityError,
    TierUnavailableError,
    errors.CapacityError,
    errors.StaleAttemptError,
    errors.NamespaceInUseError,
    UsageError,
)
"""Errors of a host's reply that are raised as they are; any other is a failure of the host."""

_Reply = TypeVar("_Reply")
_clients: weakref.WeakSet[PeerClient] = weakref.WeakSet()


def _close_in_child() -> None:
    for client in list(_clients):
        client.abandon()


os.register_at_fork(after_in_child=_close_in_child)


class Stream:
    """The bytes of one range, on a connection of its own until all bytes are read.

    One thread at a time. :meth:`PeerClient.open_range` makes it.
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
        """Bytes that are not read yet."""
        self._connection: PeerConnection | None = connection
        self._head = head
        self._give = give
        self._fail = fail

    def read_into(self, into: memoryview) -> None:
        """Fill ``into`` with the next bytes.

        Raises:
            TierUnavailableError: The stream broke off or is too slow. It is closed, and the
                contents of ``into`` are undefined.
            UsageError: Fewer bytes are left, or the stream is closed.
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
        """End it from any thread: a read that waits raises in its own thread, which closes it."""
        connection = self._connection
        if connection is not None:
            connection.cut()

    def close(self) -> None:
        """Close it; unread bytes are lost. Idempotent."""
        connection, self._connection = self._connection, None
        self.left = 0
        if connection is not None:
            connection.close()


class PeerClient:
    """A process's client of one other host's agent. Thread-safe, invalid after fork.

    Args:
        host: The host and its addresses; without a host id any host at the addresses.
        namespace: The namespace of all requests.
        secret: The namespace's.
        connect_s: Longest time to connect.
        stall_s: Longest wait for 256 KiB, or for the rest if that is less.
        address: Use this address alone; None: any of the host's, and all in turn for bulk data.

    Raises:
        TierUnavailableError: From every method: the host does not answer, breaks off or stalls, or
            another host (or this one after a reboot) answers in its place.
        AgentError: From every method: the host refuses the secret, does not know it itself, or is
            of another version.
    """

    def __init__(
        self,
        host: m.HostEntry,
        namespace: str,
        secret: Secret,
        *,
        connect_s: float = 2.0,
        stall_s: float = 10.0,
        address: str | None = None,
    ) -> None:
        self.host = host
        self.namespace = namespace
        self.secret = secret
        self.doubts = False
        """Whether an address has failed since the owner last set this to False."""
        self.failed_s = -math.inf
        """When bulk data failed for the last time (monotonic clock)."""
        self._connect_s = connect_s
        self._stall_s = stall_s
        self._addresses = [address] if address is not None else list(host.addresses)
        self._tls = TlsFiles(secret.tls, server=False) if secret.tls is not None else None
        self._lock = threading.Lock()
        self._idle: dict[str, list[PeerConnection]] = {}
        self._made: weakref.WeakSet[PeerConnection] = weakref.WeakSet()
        self._shunned: dict[str, float] = {}
        self._turn = 0
        self._closed = self._retired = False
        self._pid = os.getpid()
        _clients.add(self)

    def __enter__(self) -> PeerClient:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Abort all requests and streams: they raise, each in its own thread. Idempotent.

        Later ones raise, too.
        """
        with self._lock:
            self._closed = True
            made = list(self._made)
        for connection in made:
            connection.cut()
        self.retire()

    def retire(self) -> None:
        """Keep no idle connection any more; running requests and streams continue. Idempotent."""
        with self._lock:
            self._retired = True
            idle, self._idle = self._idle, {}
        for connection in [each for those in idle.values() for each in those]:
            connection.close()

    def abandon(self) -> None:
        """In a forked child: close the inherited sockets.

        Takes no lock: its holder does not exist in the child.
        """
        self._idle = {}
        for connection in list(self._made):
            connection.close()

    # --- requests ---------------------------------------------------------------------------------

    def ask(self, request: pm.PeerRequest[_Reply]) -> _Reply:
        """Send a request and return its reply; the request's class documents the errors."""
        data = self._answered(request)[1]
        kind = request.reply()
        if kind is bytes:
            return data  # type: ignore[return-value]
        try:
            return msgspec.msgpack.decode(data, type=kind)
        except MALFORMED as error:
            raise self._broken(error) from error

    def _answered(self, request: pm.PeerRequest[_Reply]) -> tuple[Head, bytes]:
        connection, head = self._ask("POST", request.verb(), request.encode(), "")
        try:
            data = connection.proven_body(head, request.reply_bytes_max)
        except TieredCkptError:
            connection.close()
            raise
        except (Malformed, OSError) as error:
            connection.close()
            raise self._broken(error) from error
        self._keep(connection)
        if head.status >= 400:
            raise self._replied(head.status, data)
        return head, data

    def clock(self, now_s: Callable[[], float] = time.time) -> tuple[float, float]:
        """Return how far the host's wall clock is ahead of this one: at least, and at most.

        In seconds, negative if it is behind. The two differ by a round trip and by a second, since
        the host answers in whole ones. Nobody proves this time: it is for people.

        Args:
            now_s: This host's wall clock, in seconds since 1970.
        """
        self.ask(pm.Probe(size=0))  # connects, if need be
        asked_s = now_s()
        head, _ = self._answered(pm.Probe(size=0))
        answered_s = now_s()
        try:
            found_s = email.utils.parsedate_to_datetime(head.date).timestamp()
        except (ArithmeticError, TypeError, ValueError) as error:
            raise self._broken(error) from error
        return found_s - answered_s, found_s + 1 - asked_s

    def identify(self, caller: m.HostEntry | None = None) -> m.HostEntry:
        """The host at these addresses, in any incarnation; it records ``caller``."""
        return self.ask(pm.Identify(caller=caller))

    def report_damage(self, tier: str, segment_id: str, blocks: Sequence[int], reason: str) -> None:
        """Report bad blocks in a copy that the host sent (none: the copy as a whole)."""
        named = tuple(blocks) if len(blocks) <= m.DAMAGED_BLOCKS_MAX else ()
        self.ask(pm.BadBlocks(tier=tier, segment_id=segment_id, blocks=named, reason=reason[:500]))

    def probe(self, size: int) -> tuple[float, float]:
        """Round trip (seconds) and bytes per second of a reply of ``size`` bytes, at most 4 MiB."""
        self.ask(pm.Probe(size=0))  # connects, if need be
        began_s = time.monotonic()
        self.ask(pm.Probe(size=0))
        rtt_s = time.monotonic() - began_s
        began_s = time.monotonic()
        count = len(self.ask(pm.Probe(size=min(size, pm.PROBE_BYTES_MAX))))
        return rtt_s, count / max(time.monotonic() - began_s, 1e-9)

    def open_range(self, segment_id: str, tier: str, start: int, stop: int) -> Stream:
        """Bytes ``start`` to ``stop`` of a segment in one of the host's tiers; one request.

        Raises:
            NotFoundError: The host has no such segment in this tier.
            IntegrityError: The host's copy is shorter than ``stop``.
        """
        if not 0 <= start < stop:
            raise UsageError(f"the range {start} to {stop} is empty")
        try:
            connection, head = self._ask_range(segment_id, tier, start, stop)
        except TierUnavailableError:
            self.failed_s = time.monotonic()
            raise

        def failed(error: Exception) -> TieredCkptError:
            self.failed_s = time.monotonic()
            self._shun(connection.address)
            return self._broken(error)

        return Stream(connection, head, stop - start, self._keep, failed)

    # --- transport --------------------------------------------------------------------------------

    def _ask_range(
        self, segment_id: str, tier: str, start: int, stop: int
    ) -> tuple[PeerConnection, Head]:
        """The checked head of the reply to a request for bulk data."""
        want = f"bytes={start}-{stop - 1}"
        connection, head = self._ask("GET", f"segments/{segment_id}?tier={tier}", b"", want)
        try:
            if head.status != 206:
                raise self._replied(head.status, connection.proven_body(head, ERROR_BYTES_MAX))
            connection.check(head, "")
            if head.length != stop - start or not head.span.startswith(
                f"bytes {start}-{stop - 1}/"
            ):
                raise Malformed(f"{head.length} bytes, {head.span!r}, for {want}")
        except TieredCkptError:
            self._keep(connection)
            raise
        except (Malformed, OSError) as error:
            connection.close()
            raise self._broken(error) from error
        return connection, head

    def _ask(
        self, method: str, rest: str, body: bytes, range_header: str
    ) -> tuple[PeerConnection, Head]:
        """The head of the reply, from the first address that answers."""
        if os.getpid() != self._pid:
            raise UsageError("a peer client cannot be used after fork: make a new one")
        target = f"/p1/ns/{self.namespace}/{rest}"
        if not target.isascii() or not target.isprintable() or " " in target:
            raise UsageError(f"the request path {target[:200]!r} has characters of no valid name")
        meant = host_name(self.host.host_id, self.host.incarnation * (rest != _IDENTIFY))
        left, problem = self._order(bulk=bool(range_header)), Exception("it has no address")
        while left and not self._closed:
            kept, failed = self._idle_connection(left[0]), list[str]()
            try:
                connection = kept or self._connect(left, failed)
                try:
                    head = connection.ask(meant, method, target, body, range_header)
                except BaseException:
                    connection.close()
                    failed.append(connection.address)
                    raise
                return connection, head
            except (OSError, Malformed) as error:
                if kept is not None and isinstance(error, Broken | ConnectionError):
                    failed.clear()  # the other side had closed an idle connection
                problem = error
            finally:
                for address in failed:
                    self._shun(address)
            left = [each for each in left if each not in failed]
        raise self._broken(problem) from problem

    def _shun(self, address: str) -> None:
        self.doubts = True
        with self._lock:
            self._shunned[address] = time.monotonic() + SHUNNED_S
            kept = self._idle.pop(address, [])
        for connection in kept:  # on a cut link each would stall, and a new one fails soon
            connection.close()

    def _order(self, *, bulk: bool) -> list[str]:
        """All addresses, shunned ones last; for bulk data each call begins with another address."""
        now_s = time.monotonic()
        with self._lock:
            if bulk:
                self._turn += 1
            count = max(len(self._addresses), 1)
            first = self._turn % count if bulk else 0
            turned = self._addresses[first:] + self._addresses[:first]
            return sorted(turned, key=lambda each: self._shunned.get(each, 0.0) > now_s)

    def _connect(self, addresses: Sequence[str], failed: list[str]) -> PeerConnection:
        """A connection to the first address that answers; adds the others to ``failed``."""
        context = self._tls.context() if self._tls is not None else None
        for again in (True, False):
            dial = Dial(addresses, self._connect_s, lambda: not self._closed)
            try:
                address, sock = dial.run()
            except OSError:
                failed += addresses
                raise
            failed += dial.failed
            connection = PeerConnection(
                sock, address, self.secret.token, connect_s=self._connect_s, stall_s=self._stall_s
            )
            with self._lock:
                self._made.add(connection)
                closed = self._closed
            try:
                if closed:
                    raise ConnectionAbortedError("closed meanwhile")
                connection.greet(context)
                return connection
            except BaseException as error:
                connection.close()
                # A server under a flood cuts connections without a proof, such as this one.
                if not again or not isinstance(error, Broken | ConnectionResetError):
                    failed.append(address)
                    raise
        raise AssertionError  # the loop returns or raises

    def _idle_connection(self, address: str) -> PeerConnection | None:
        while True:
            with self._lock:
                connection = those.pop() if (those := self._idle.get(address)) else None
            if connection is None or connection.usable:
                return connection
            connection.close()

    def _keep(self, connection: PeerConnection) -> None:
        if connection.clean and os.getpid() == self._pid:
            with self._lock:
                those = self._idle.setdefault(connection.address, [])
                if len(those) < IDLE_PER_ADDRESS_MAX and not self._retired:
                    those.append(connection)
                    return
        connection.close()

    # --- errors -----------------------------------------------------------------------------------

    def _replied(self, status: int, body: bytes) -> TieredCkptError:
        """The error of a reply."""
        error = decode_error(status, body)
        if isinstance(error, _REPLIED) and not isinstance(error, AgentError):
            return error
        outcome = "unknown"
        if isinstance(error, TierUnavailableError | RemoteProtocolError):
            outcome = str(error.fields.get("outcome", "unknown"))
        return TierUnavailableError(
            f"host {self._name}: {error.message[:500]}", tier="peer", outcome=outcome
        )

    def _broken(self, error: Exception) -> TierUnavailableError:
        if self._closed:
            what = "its client was closed here"
        elif isinstance(error, ssl.SSLCertVerificationError):
            what = f"its certificate is refused: {error.verify_message}; {CHECK_TLS}"
        elif isinstance(error, ssl.SSLError):
            what = f"TLS fails: {error.reason}; {CHECK_TLS}"
        elif isinstance(error, TimeoutError):
            limits = f"{self._connect_s:g} s to connect, {self._stall_s:g} s stalled"
            what = f"no answer in time ({limits})"
        elif isinstance(error, Malformed | OSError):
            what = str(error) or type(error).__name__
        else:
            what = f"not understood: {error}"
        return TierUnavailableError(
            f"host {self._name} does not answer: {what[:300]}", tier="peer", outcome="unknown"
        )

    @property
    def _name(self) -> str:
        return f"{self.host.host_id or '?'} ({', '.join(self._addresses)})"
