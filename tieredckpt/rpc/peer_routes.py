"""The requests that an agent answers to other hosts, and the proof of its replies.

A target is matched as received, undecoded: names and ids have patterns without ``%``, ``/`` and
``..``, so only targets that match literally exist.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Protocol

from aiohttp import web

from tieredckpt.errors import TieredCkptError
from tieredckpt.rpc.auth import HOST_HEADER, PROOF_HEADER, Secret, body_digest, sign_reply
from tieredckpt.rpc.bulk import Readable
from tieredckpt.rpc.messages import agent as m
from tieredckpt.rpc.messages import kv  # noqa: F401  # its requests are served, too
from tieredckpt.rpc.messages import peer as pm
from tieredckpt.rpc.messages.base import JSON_TYPE, encode_error

TARGET_CHARS_MAX = 512


class PeerApi(Protocol):
    """The node that requests are calls of: blocking, thread-safe, raising our errors only.

    It also has a method for each :class:`tieredckpt.rpc.messages.peer.PeerRequest`, ``peer_`` and
    its verb, which takes the namespace and the request. It is a coroutine if the request is
    ``awaited``.
    """

    def peer_served(self, namespace: str) -> tuple[m.HostEntry, Secret]: ...
    def read_segment(
        self, namespace: str, segment_id: str, tier: str | None
    ) -> tuple[str, Readable]: ...


@dataclass(frozen=True, slots=True)
class Target:
    """A parsed target: the kind of request, or None and a segment."""

    namespace: str
    kind: type[pm.PeerRequest[Any]] | None
    ident: str = ""
    tier: str = ""


_KINDS = {kind.verb(): kind for kind in pm.PeerRequest.__subclasses__()}
_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}"
_TARGET = re.compile(
    rf"/p1/ns/(?P<ns>{_NAME})/"
    rf"(?:(?P<verb>[a-z_]+)|segments/(?P<id>[0-9a-f]{{32}})\?tier=(?P<tier>{_NAME}))"
)


def find_target(method: str, target: str) -> Target | None:
    """The target of a request, or None if there is no such target."""
    found = _TARGET.fullmatch(target) if len(target) <= TARGET_CHARS_MAX else None
    if found is None:
        return None
    if found["verb"] is None:
        return Target(found["ns"], None, found["id"], found["tier"]) if method == "GET" else None
    kind = _KINDS.get(found["verb"]) if method == "POST" else None
    return Target(found["ns"], kind) if kind is not None else None


@dataclass(frozen=True, slots=True)
class Proven:
    """The part of a proven request that its reply needs."""

    name: str
    """This host's."""
    secret: Secret
    nonce: str
    counter: int

    def headers(self, status: int, span: str, digest: str) -> dict[str, str]:
        """This host's name and proof; see :func:`tieredckpt.rpc.auth.sign_reply`."""
        if not self.secret.token:
            return {HOST_HEADER: self.name}
        text = (self.name, status, span, digest)
        mac = sign_reply(self.secret.token, self.nonce, self.counter, *text)
        return {HOST_HEADER: self.name, PROOF_HEADER: mac}

    def answer(self, status: int, body: bytes, content_type: str) -> web.Response:
        """A reply."""
        headers = self.headers(status, "", body_digest(body))
        return web.Response(status=status, body=body, content_type=content_type, headers=headers)

    def error(self, error: TieredCkptError) -> web.Response:
        """One of our errors as a reply."""
        return self.answer(*encode_error(error), JSON_TYPE)
