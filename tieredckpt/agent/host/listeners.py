"""Serving namespaces to other hosts over TCP: which sockets, which secret, also after a restart.

Nothing here happens until a trainer asks for it (``Listen``): an agent that serves one host opens
no port. One server per network settings is shared by all namespaces that have the same; each
namespace has a secret of its own. What was asked for lies in a file that only this user can read,
so that an agent that starts anew serves the same namespaces on the same ports before any trainer
comes.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from tieredckpt.agent.host.addresses import choose_addresses, pid_on_port, split_port, with_port
from tieredckpt.agent.host.runtime import RuntimeDir, boot_id, incarnation, write_private
from tieredckpt.errors import (
    AgentError,
    ConfigError,
    NamespaceInUseError,
    NotFoundError,
    TieredCkptError,
)
from tieredckpt.format.envelope import MALFORMED
from tieredckpt.rpc.auth import Secret, check_listen, check_token
from tieredckpt.rpc.messages import agent as m
from tieredckpt.rpc.peer_routes import PeerApi
from tieredckpt.rpc.peer_server import PeerServer, listen_tcp

_SUFFIX = ".listen"

log = logging.getLogger(__name__)


def _network(settings: m.Listen) -> tuple[object, ...]:
    """Namespaces for which this is equal share a server."""
    return (settings.interfaces, settings.cidrs, settings.port, settings.tls)


class _Remembered(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What lies in a namespace's file."""

    settings: m.Listen
    """What was asked for, by no session any more."""
    addresses: tuple[str, ...]
    """As they were bound, with ports."""


_decoder = msgspec.json.Decoder(_Remembered)


@dataclass(slots=True)
class _Served:
    """A namespace that is served."""

    settings: m.Listen
    entry: m.HostEntry
    secret: Secret
    sessions: set[str]
    """That asked for exactly this."""


@dataclass(slots=True)
class _Open:
    """A server and its addresses."""

    server: PeerServer
    addresses: tuple[str, ...]


class Listeners:
    """The TCP side of one agent. Thread-safe; :meth:`served` and :meth:`entry` never wait.

    Args:
        runtime: The runtime folder.
        host_id: This host.
        api: What requests are calls of.
        is_live: Whether a session's process still holds its lease.
        in_use: Whether a namespace has sessions.
    """

    def __init__(
        self,
        runtime: RuntimeDir,
        host_id: str,
        api: PeerApi,
        is_live: Callable[[str], bool],
        in_use: Callable[[str], bool],
    ) -> None:
        self._runtime = runtime
        self._host_id = host_id
        self._api = api
        self._is_live = is_live
        self._in_use = in_use
        # Taken before the node's lock (is_live takes that), never while it is held.
        self._changing = threading.RLock()
        self._served: dict[str, _Served] = {}
        self._open: dict[tuple[object, ...], _Open] = {}

    # --- looking ----------------------------------------------------------------------------------

    def entry(self, namespace: str) -> m.HostEntry | None:
        """This host as others are to know it; None: the namespace is not served."""
        found = self._served.get(namespace)
        return found.entry if found is not None else None

    def served(self, namespace: str) -> tuple[m.HostEntry, Secret]:
        """This host as others are to know it, and what hosts prove to each other.

        Raises:
            NotFoundError: The namespace is not served to other hosts.
        """
        found = self._served.get(namespace)
        if found is None:
            raise NotFoundError(
                f"namespace {namespace} is not served to other hosts here: no token is known",
                key=namespace,
                what="token",
            )
        return found.entry, found.secret

    def network(self, namespace: str) -> tuple[str, m.TlsSpec | None]:
        """Token and TLS files, for this host's own trainers; ("", None): not served."""
        found = self._served.get(namespace)
        return (found.settings.token, found.settings.tls) if found is not None else ("", None)

    # --- changing ---------------------------------------------------------------------------------

    def listen(self, namespace: str, request: m.Listen) -> m.HostEntry:
        """Serve ``namespace`` as asked. See :class:`tieredckpt.rpc.messages.agent.Listen`.

        Raises:
            ConfigError: No such address, or neither token nor TLS.
            NamespaceInUseError: Another live session asked for something else.
            AgentError: A port is taken, or the files of TLS cannot be used.
        """
        settings = msgspec.structs.replace(request, session_id="")
        if settings.token:
            check_token(settings.token)
        elif settings.tls is None:  # also on loopback, where other users of this host are
            raise ConfigError(
                "no port is opened without a token or mutual TLS: set security.token_file, "
                "security.token_env or security.tls",
                key="security",
            )
        with self._changing:
            old = self._served.get(namespace)
            if old is not None and old.settings == settings:
                old.sessions.add(request.session_id)
                return old.entry
            if old is not None:
                self._check_alone(namespace, old, request.session_id)
            # Who comes again (a restarted job) finds the ports where they were.
            before, served = old.entry.addresses if old is not None else (), list(self._served)
            try:
                return self._serve(namespace, settings, {request.session_id}, before).entry
            except TieredCkptError:
                self._served.pop(namespace, None)
                for each in (namespace, *served):
                    self.restore(each)  # as before: ports were closed for the new ones
                raise

    def _check_alone(self, namespace: str, old: _Served, session_id: str) -> None:
        old.sessions = {each for each in old.sessions if self._is_live(each)}
        if old.sessions - {session_id}:
            raise NamespaceInUseError(
                f"namespace {namespace} is served to other hosts with another token or other "
                "network settings, for another process that is alive: stop the other job, or use "
                "another namespace"
            )

    def restore(self, namespace: str) -> None:
        """Serve ``namespace`` as the agent before this one did; nothing if it did not."""
        with self._changing:
            if namespace in self._served:
                return
            try:
                data = (self._runtime.peers / f"{namespace}{_SUFFIX}").read_bytes()
                found = _decoder.decode(data)
                self._serve(namespace, found.settings, set(), found.addresses)
            except FileNotFoundError:
                return
            except (OSError, *MALFORMED, TieredCkptError) as error:
                log.warning(
                    "namespace %s is not served to other hosts until a trainer asks for it: %s",
                    namespace, error,
                )  # fmt: skip

    def forget(self, namespace: str) -> None:
        """The namespace was purged: serve it no more, forget its token."""
        with self._changing:
            self._served.pop(namespace, None)
            (self._runtime.peers / f"{namespace}{_SUFFIX}").unlink(missing_ok=True)
            self._close_unused()

    def stop(self) -> None:
        """Close all ports; the files stay."""
        with self._changing:
            self._served.clear()
            self._close_unused()

    # --- the sockets ------------------------------------------------------------------------------

    def _serve(
        self,
        namespace: str,
        settings: m.Listen,
        sessions: set[str],
        before: tuple[str, ...],
    ) -> _Served:
        opened = self._open.get(_network(settings))
        if opened is None:
            self._make_way(namespace, settings)
            opened = self._open_server(settings, before)
        self._runtime.peers.mkdir(mode=0o700, exist_ok=True)
        served = _Served(
            settings=settings,
            entry=m.HostEntry(
                host_id=self._host_id,
                incarnation=incarnation(self._runtime, boot_id()),
                addresses=opened.addresses,
                labels=settings.labels,
            ),
            secret=Secret(settings.token, settings.tls),
            sessions=sessions,
        )
        self._served[namespace] = served
        self._open[_network(settings)] = opened
        self._close_unused()
        note = _Remembered(settings=settings, addresses=opened.addresses)
        write_private(self._runtime.peers / f"{namespace}{_SUFFIX}", msgspec.json.encode(note))
        log.info("namespace %s is served at %s", namespace, ", ".join(opened.addresses))
        return served

    def _make_way(self, namespace: str, settings: m.Listen) -> None:
        """Close what may have the ports of ``settings``: servers of this namespace alone, and of
        others with that port that no process has open.
        """
        for name, each in list(self._served.items()):
            same_port = each.settings.port == settings.port != 0
            if name != namespace and same_port and not self._in_use(name):
                log.warning(
                    "%s is served no more: %s takes port %d", name, namespace, settings.port
                )
                del self._served[name]
        self._close_unused(leaving=namespace)

    def _open_server(self, settings: m.Listen, before: tuple[str, ...]) -> _Open:
        chosen = choose_addresses(settings.interfaces, settings.cidrs)
        for address in chosen:
            check_listen(address, Secret(settings.token, settings.tls))
        ports: dict[str, int] = {}
        for text in before:
            with contextlib.suppress(ValueError):
                ports.update([split_port(text)])
        with contextlib.ExitStack() as unused:
            sockets = []
            for address in chosen:
                sockets.append(self._bind(address, settings.port, ports.get(address, 0)))
                unused.callback(sockets[-1].close)
            server = PeerServer(self._api, sockets, tls=settings.tls)
            addresses = tuple(with_port(*sock.getsockname()[:2]) for sock in sockets)
            server.start()
            unused.pop_all()  # the server's now
        return _Open(server, addresses)

    def _close_unused(self, *, leaving: str = "") -> None:
        """Close what no namespace is served by; ``leaving``: this one does not count."""
        used = {_network(each.settings) for n, each in self._served.items() if n != leaving}
        for key in [key for key in self._open if key not in used]:
            self._open.pop(key).server.stop()

    def _bind(self, address: str, port: int, before: int) -> socket.socket:
        """A listening socket at ``port``; if that is 0 at the port of before, or at any free one.

        Raises AgentError, which names the process that has the port, where /proc shows it.
        """
        if not port and before:
            try:
                return listen_tcp(address, before)
            except AgentError as error:
                log.warning("not at the port of before: %s", error)
        try:
            return listen_tcp(address, port)
        except AgentError as error:
            pid = pid_on_port(port)
            if pid is None:
                raise
            own = "this agent, for another job with other network settings,"
            holder = own if pid == os.getpid() else f"process {pid}"
            text = f"{error.message}; {holder} listens there"
            raise AgentError(text, outcome="not_applied") from error
