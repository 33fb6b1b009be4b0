"""Proves knowledge of a shared secret that is never sent, and decides which addresses may listen.

A connection begins with ``GET /p1/hello``, which returns a nonce of this connection. Each later
request has a counter and an HMAC-SHA256 under the namespace's token over nonce, counter, the
addressed host, method, target, range and body digest; each reply has one over nonce, counter, the
answering host, status, range and body digest. So captured bytes are useless on another connection,
a second time on the same one, or as another host's. Bulk data is not authenticated and nothing is
encrypted without TLS. docs/operate/security.md has the threat model.

Mutual TLS (:class:`TlsFiles`) uses three PEM files, which are read again when they change. Both
sides show a certificate of the same CA; a client also checks that it names the host or IP address
that it connected to. Open connections keep the certificates that they began with.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import ipaddress
import logging
import os
import re
import ssl
import threading
import time
import urllib.parse
from dataclasses import dataclass, field

from tieredckpt.errors import AgentError
from tieredckpt.rpc.messages.agent import TlsSpec

NONCE_CHARS = 32
TOKEN_CHARS_MIN = 16
"""A captured request lets its reader try tokens offline: short ones would be found."""
TOKEN_CHARS_MAX = 1024
COUNTER_MAX = 1 << 62
REFUSED = (
    "the host refuses: the secret is not that of this namespace there; all hosts of a job need the "
    "same token or certificates of one CA"
)
"""The same for a wrong token, no token, and an unknown namespace, so it reveals nothing."""

PROOF_HEADER = "X-Tieredckpt-Proof"
"""``<counter> <mac>`` in requests, ``<mac>`` in replies."""
BODY_HEADER = "X-Tieredckpt-Body"
"""SHA-256 of the request's body, so that the proof can be checked before a body is read."""
HOST_HEADER = "X-Tieredckpt-Host"
"""Of requests: the addressed host; of replies: the answering host. See :func:`host_name`."""

_PROOF = re.compile(r"(\d{1,19}) ([0-9a-f]{64})")
_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Secret:
    """The secret that the hosts of a namespace share. Never in repr, messages or logs."""

    token: str = field(repr=False)
    """"" with TLS only."""
    tls: TlsSpec | None = None


def check_token(token: str) -> None:
    """Raise AgentError, which does not show it, if ``token`` cannot be one."""
    if not TOKEN_CHARS_MIN <= len(token) <= TOKEN_CHARS_MAX or not token.isprintable():
        raise AgentError(
            f"the token has {len(token)} characters: {TOKEN_CHARS_MIN} to {TOKEN_CHARS_MAX} "
            "printable ones are needed; make one with `openssl rand -hex 32`",
            outcome="not_applied",
        )


def check_listen(address: str, secret: Secret) -> None:
    """Whether an agent may listen on this IP address with this secret.

    Raises:
        AgentError: It is not a loopback address and there is neither token nor TLS, or the token
            is too short to be one.
    """
    if secret.token:
        check_token(secret.token)
    elif secret.tls is None and not ipaddress.ip_address(address).is_loopback:
        raise AgentError(
            f"will not listen on {address} without a token or mutual TLS, as anybody there could "
            "read and forge checkpoints: set security.token_file, security.token_env or "
            "security.tls, or let discovery be torch, which makes a token for the job",
            outcome="not_applied",
        )


def check_certificate(spec: TlsSpec, name: str) -> None:
    """Shake hands in memory, as a peer with these files that dials this host by ``name``.

    Raises:
        AgentError: The files cannot be used together, or a certificate is refused for its CA, its
            dates, its use or its names.
    """
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    server = TlsFiles(spec, server=True).context().wrap_bio(there, back, server_side=True)
    client = TlsFiles(spec, server=False).context().wrap_bio(back, there, server_hostname=name)
    try:
        for end in (client, server, client, server):
            with contextlib.suppress(ssl.SSLWantReadError):
                end.do_handshake()
    except ssl.SSLError as error:
        raise AgentError(
            f"{spec.cert} is refused for {name}: {getattr(error, 'verify_message', error)}; issue "
            f"one by the CA in {spec.ca}, valid now, for servers and clients, that names {name}",
            outcome="not_applied",
        ) from error


def body_digest(body: bytes | bytearray | memoryview) -> str:
    """SHA-256 in hex digits."""
    return hashlib.sha256(body).hexdigest()


def host_name(host_id: str, incarnation: str = "") -> str:
    """A host for :data:`HOST_HEADER`; without an incarnation any of this host, "": any host.

    A reboot changes the incarnation, since memory is lost then: the host does not answer requests
    for the earlier one.
    """
    return f"{urllib.parse.quote(host_id, safe='')} {incarnation}".strip()


def is_meant(name: str, meant: str) -> bool:
    """Whether ``name``, with its incarnation, is a host of the :func:`host_name` ``meant``."""
    return not meant or name == meant or name.startswith(f"{meant} ")


def show_host(name: str) -> str:
    """A :func:`host_name` for messages."""
    host_id, _, incarnation = name.partition(" ")
    shown = f"host {urllib.parse.unquote(host_id)[:100]}" if host_id else "a host without a name"
    return f"{shown} (incarnation {incarnation})" if incarnation else shown


def _mac(token: str, *parts: str) -> str:
    # No part can hold a line feed: HTTP's own framing forbids it in all of them.
    text = "\n".join(("tieredckpt-p2", *parts)).encode(errors="surrogateescape")
    return hmac.new(token.encode(), text, hashlib.sha256).hexdigest()


def sign(
    token: str,
    nonce: str,
    counter: int,
    meant: str,
    method: str,
    target: str,
    range_header: str,
    body: bytes,
) -> str:
    """Proof of one request: 64 hex digits.

    Args:
        token: The secret.
        nonce: Of the connection.
        counter: Higher than in every earlier request of the connection.
        meant: The addressed host: the :data:`HOST_HEADER`, "" without one.
        method: GET or POST.
        target: Path and query, as sent.
        range_header: "" without one.
        body: As sent.
    """
    text = (str(counter), meant, method, target, range_header, body_digest(body))
    return _mac(token, "request", nonce, *text)


def sign_reply(
    token: str, nonce: str, counter: int, name: str, status: int, range_header: str, digest: str
) -> str:
    """Proof of the reply of host ``name`` to request ``counter``.

    ``digest`` is that of its body, "" for bulk data.
    """
    return _mac(token, "reply", nonce, str(counter), name, str(status), range_header, digest)


def same(one: str, other: str) -> bool:
    """Whether two proofs are equal, in constant time."""
    return hmac.compare_digest(one.encode(), other.encode())


def refused() -> AgentError:
    """The error for every proof that is missing or wrong."""
    return AgentError(REFUSED, outcome="not_applied")


class Verifier:
    """Checks the proofs of one connection. Requests of one connection come one after another.

    Args:
        nonce: Of the connection.
    """

    def __init__(self, nonce: str) -> None:
        self.nonce = nonce
        self._last = 0

    def check(
        self, token: str, proof: str, meant: str, method: str, target: str, range_header: str,
        digest: str,
    ) -> int:  # fmt: skip
        """The counter of a proven request; it is used up.

        Args:
            token: The namespace's.
            proof: The :data:`PROOF_HEADER`.
            meant: The :data:`HOST_HEADER`; "" without one.
            method: As received.
            target: As received, undecoded.
            range_header: As received; "" without one.
            digest: The :data:`BODY_HEADER`; the caller compares it with the body.

        Raises:
            AgentError: The proof is missing, malformed, wrong, or was used before.
        """
        found = _PROOF.fullmatch(proof)
        if found is None or _DIGEST.fullmatch(digest) is None:
            raise refused()
        counter = int(found[1])
        text = (str(counter), meant, method, target, range_header, digest)
        expected = _mac(token, "request", self.nonce, *text)
        if not same(expected, found[2]) or not self._last < counter < COUNTER_MAX:
            raise refused()
        self._last = counter
        return counter


CHECK_S = 1.0
"""The files are checked for changes when a connection is made, at most this often."""

log = logging.getLogger(__name__)

_Seen = tuple[tuple[int, int, int], ...]


class TlsFiles:
    """The current context of one side. Thread-safe.

    Args:
        spec: Certificate with its chain, its unencrypted key, and the CA's certificates.
        server: Whether this is the server's side.

    Raises:
        AgentError: The files cannot be read or do not fit together.
    """

    def __init__(self, spec: TlsSpec, *, server: bool) -> None:
        self._spec = spec
        self._server = server
        self._lock = threading.Lock()
        self._checked_s = time.monotonic()
        self._seen = self._stat()
        self._context = self._load()

    def context(self) -> ssl.SSLContext:
        """The context for a new connection; the earlier one if changed files cannot be used."""
        with self._lock:
            now_s = time.monotonic()
            if now_s - self._checked_s >= CHECK_S:
                self._checked_s = now_s
                self._renew()
            return self._context

    def _renew(self) -> None:
        try:
            seen = self._stat()
            if seen == self._seen:
                return
            self._context = self._load()
        except AgentError as error:
            # Perhaps half of a renewal: the next check follows in a moment.
            log.warning("the changed TLS files are not used, the earlier ones are: %s", error)
            return
        self._seen = seen
        log.info("TLS: the changed files are used: %s", self._spec.cert)

    def _stat(self) -> _Seen:
        try:
            stats = [os.stat(each) for each in (self._spec.cert, self._spec.key, self._spec.ca)]
        except OSError as error:
            raise self._unusable(error) from error
        return tuple((each.st_ino, each.st_size, each.st_mtime_ns) for each in stats)

    def _load(self) -> ssl.SSLContext:
        side = ssl.PROTOCOL_TLS_SERVER if self._server else ssl.PROTOCOL_TLS_CLIENT
        context = ssl.SSLContext(side)
        # Both sides are ours; TLS 1.3 has no options that could be chosen wrongly.
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.verify_mode = ssl.CERT_REQUIRED
        try:
            # Without a callback OpenSSL would ask for an encrypted key's password on a terminal.
            context.load_cert_chain(self._spec.cert, self._spec.key, password=lambda: b"")
            context.load_verify_locations(self._spec.ca)
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            raise self._unusable(error) from error
        if self._server:
            # No client resumes a session, and a late ticket would look like a second reply.
            context.num_tickets = 0
        return context

    def _unusable(self, error: Exception) -> AgentError:
        text = getattr(error, "reason", None) or getattr(error, "strerror", None) or str(error)
        return AgentError(
            f"cannot use the TLS files {self._spec.cert}, {self._spec.key} and {self._spec.ca}: "
            f"{text}; see security.tls",
            outcome="not_applied",
        )
