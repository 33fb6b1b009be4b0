"""What other hosts may ask of an agent: paths, sizes, and the calls that they are.

A target is matched as it came, undecoded: names and ids have patterns without ``%``, ``/`` and
``..``, so what is not one of these routes to the letter does not exist.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

from tieredckpt.transport import gathering_messages as gm
from tieredckpt.transport import messages as m
from tieredckpt.transport import peer_messages as pm
from tieredckpt.transport.auth import Secret
from tieredckpt.transport.decoding import from_msgpack as _decode
from tieredckpt.transport.server import Readable

TARGET_CHARS_MAX = 512
SMALL_BYTES_MAX = 1 << 20
IDS_BYTES_MAX = 16 << 20
"""A request that lists ids and hosts: RECORDS_MAX of each."""

_Request = TypeVar("_Request")


class PeerApi(Protocol):
    """What requests are calls of: blocking, thread-safe, raising our errors only."""

    def peer_served(self, namespace: str) -> tuple[m.HostEntry, Secret]: ...
    def peer_identify(self, namespace: str, request: pm.Identify) -> m.HostEntry: ...
    def peer_holdings(self, namespace: str, request: pm.Have) -> bytes: ...
    def peer_plan(self, namespace: str, tier: str, plan_id: str) -> bytes: ...
    def peer_push(self, namespace: str, request: pm.Push) -> pm.Pushed: ...
    def peer_sync(self, namespace: str, request: pm.Sync) -> pm.SyncReply: ...
    def peer_attempt(self, namespace: str, request: pm.ForwardAttempt) -> bytes: ...
    def peer_gather(self, namespace: str, request: gm.HandOver) -> gm.Taken: ...
    def peer_confirm(self, namespace: str, request: gm.ConfirmParts) -> gm.Confirmed: ...
    def peer_damage(self, namespace: str, request: m.Damage) -> None: ...
    def read_segment(
        self, namespace: str, segment_id: str, tier: str | None
    ) -> tuple[str, Readable]: ...


@dataclass(frozen=True, slots=True)
class Target:
    """A request's target, taken apart. ``tier`` and ``ident`` are "" where there are none."""

    namespace: str
    verb: str
    ident: str = ""
    tier: str = ""
    count: int = 0


Call = Callable[[PeerApi, Target, bytes | bytearray], m.Message | bytes | None]


@dataclass(frozen=True, slots=True)
class Route:
    """One verb: its method, the largest body, and what it does; ``call`` is None for segments."""

    method: str
    body_bytes_max: int
    call: Call | None


def _probe(api: PeerApi, target: Target, body: bytes | bytearray) -> bytes:
    return bytes(min(target.count, pm.PROBE_BYTES_MAX))


ROUTES: dict[str, Route] = {
    "host": Route(
        "POST", SMALL_BYTES_MAX,
        lambda a, t, b: a.peer_identify(t.namespace, _decode(b, pm.Identify)),
    ),
    "holdings": Route(
        "POST", IDS_BYTES_MAX, lambda a, t, b: a.peer_holdings(t.namespace, _decode(b, pm.Have))
    ),
    "push": Route(
        "POST", m.MAX_BODY_BYTES, lambda a, t, b: a.peer_push(t.namespace, _decode(b, pm.Push))
    ),
    "sync": Route(
        "POST", m.MAX_BODY_BYTES, lambda a, t, b: a.peer_sync(t.namespace, _decode(b, pm.Sync))
    ),
    "attempts": Route(
        "POST", SMALL_BYTES_MAX,
        lambda a, t, b: a.peer_attempt(t.namespace, _decode(b, pm.ForwardAttempt)),
    ),
    "gather": Route(
        "POST", m.MAX_BODY_BYTES,
        lambda a, t, b: a.peer_gather(t.namespace, _decode(b, gm.HandOver)),
    ),
    "confirm": Route(
        "POST", IDS_BYTES_MAX,
        lambda a, t, b: a.peer_confirm(t.namespace, _decode(b, gm.ConfirmParts)),
    ),
    "damage": Route(
        "POST", SMALL_BYTES_MAX, lambda a, t, b: a.peer_damage(t.namespace, _decode(b, m.Damage))
    ),
    "plans": Route("GET", 0, lambda a, t, b: a.peer_plan(t.namespace, t.tier, t.ident)),
    "probe": Route("GET", 0, _probe),
    "segments": Route("GET", 0, None),
}  # fmt: skip

_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}"
_TARGET = re.compile(
    rf"/p1/ns/(?P<ns>{_NAME})/"
    r"(?:(?P<verb>host|holdings|push|sync|attempts|gather|confirm|damage)"
    rf"|(?P<kind>plans|segments)/(?P<id>[0-9a-f]{{32}})\?tier=(?P<tier>{_NAME})"
    r"|(?P<probe>probe)\?bytes=(?P<count>[0-9]{1,9}))"
)


def find_route(method: str, target: str) -> tuple[Route, Target] | None:
    """The route of a request, or None if there is none."""
    found = _TARGET.fullmatch(target) if len(target) <= TARGET_CHARS_MAX else None
    if found is None:
        return None
    verb = found["verb"] or found["kind"] or found["probe"]
    route = ROUTES[verb]
    if route.method != method:
        return None
    return route, Target(
        namespace=found["ns"],
        verb=verb,
        ident=found["id"] or "",
        tier=found["tier"] or "",
        count=int(found["count"] or 0),
    )
