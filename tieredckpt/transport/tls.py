"""Mutual TLS from three PEM files, which are read again when they change.

Both sides show a certificate of the same CA; a client also checks that it names the host or IP
address that it connected to. Connections that exist go on with what they began with.
"""

from __future__ import annotations

import logging
import os
import ssl
import threading
import time
from collections.abc import Callable

from tieredckpt.errors import AgentError
from tieredckpt.transport.messages import TlsSpec

LOOK_S = 1.0
"""The files are looked at when a connection is made, at most this often."""

log = logging.getLogger(__name__)

_Seen = tuple[tuple[int, int, int], ...]


class TlsFiles:
    """The current context of one side. Thread-safe.

    Args:
        spec: Certificate with its chain, its unencrypted key, and the CA's certificates.
        server: Which side this is.
        clock: Monotonic seconds.

    Raises:
        AgentError: The files cannot be read or do not fit together.
    """

    def __init__(
        self, spec: TlsSpec, *, server: bool, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._spec = spec
        self._server = server
        self._clock = clock
        self._lock = threading.Lock()
        self._looked_s = clock()
        self._seen = self._look()
        self._context = self._load()

    def context(self) -> ssl.SSLContext:
        """The context for a new connection. A renewal that cannot be read leaves the one before."""
        with self._lock:
            now_s = self._clock()
            if now_s - self._looked_s >= LOOK_S:
                self._looked_s = now_s
                self._renew()
            return self._context

    def _renew(self) -> None:
        try:
            seen = self._look()
            if seen == self._seen:
                return
            self._context = self._load()
        except AgentError as error:
            # Half of a renewal perhaps: it is looked at again in a moment.
            log.warning("the TLS files changed, the ones before stay in use: %s", error)
            return
        self._seen = seen
        log.info("TLS: %s was read again", self._spec.cert)

    def _look(self) -> _Seen:
        try:
            stats = [os.stat(each) for each in (self._spec.cert, self._spec.key, self._spec.ca)]
        except OSError as error:
            raise self._unusable(error) from error
        return tuple((each.st_ino, each.st_size, each.st_mtime_ns) for each in stats)

    def _load(self) -> ssl.SSLContext:
        side = ssl.PROTOCOL_TLS_SERVER if self._server else ssl.PROTOCOL_TLS_CLIENT
        context = ssl.SSLContext(side)
        # Both sides are ours; 1.3 leaves nothing to choose wrongly.
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.verify_mode = ssl.CERT_REQUIRED
        try:
            # Without a password an encrypted key would be asked for on a terminal.
            context.load_cert_chain(self._spec.cert, self._spec.key, password=lambda: b"")
            context.load_verify_locations(self._spec.ca)
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            raise self._unusable(error) from error
        if self._server:
            # Nobody resumes a session, and a ticket that came late would look like a second reply.
            context.num_tickets = 0
        return context

    def _unusable(self, error: Exception) -> AgentError:
        text = getattr(error, "reason", None) or getattr(error, "strerror", None) or str(error)
        return AgentError(
            f"cannot use the TLS files {self._spec.cert}, {self._spec.key} and {self._spec.ca}: "
            f"{text}; see security.tls",
            outcome="not_applied",
        )
