"""A request is its message and the method of that name: their types must fit."""

from __future__ import annotations

import inspect
import typing
from typing import Any

import pytest

from tieredckpt.agent.node import Node
from tieredckpt.errors import RemoteProtocolError
from tieredckpt.rpc.messages import agent as m
from tieredckpt.rpc.messages import peer as pm
from tieredckpt.rpc.messages.base import Request

NODE: list[tuple[type[Request[Any]], Any]] = [
    (kind, getattr(Node, kind.verb(), None)) for kind in m.NodeRequest.__subclasses__()
]
PEER: list[tuple[type[Request[Any]], Any]] = [
    (kind, getattr(Node, f"peer_{kind.verb()}", None)) for kind in pm.PeerRequest.__subclasses__()
]


@pytest.mark.parametrize(("kind", "method"), NODE + PEER, ids=lambda each: each.__name__)
def test_what_answers_takes_the_message_and_returns_its_reply(
    kind: type[Request[Any]], method: Any
):
    assert method is not None, f"nobody answers {kind.__name__}"
    wanted = ["self", "namespace", "request"] + ["is_wanted"] * kind.awaited
    assert list(inspect.signature(method).parameters) == wanted
    assert inspect.iscoroutinefunction(method) == kind.awaited
    hints = typing.get_type_hints(method)
    assert (hints["namespace"], hints["request"]) == (str, kind)
    assert hints["return"] == kind.reply()


def test_all_requests_are_known():
    assert {m.Reserve, m.Contribute, m.SetPeers} <= {kind for kind, _ in NODE}
    assert {pm.Push, pm.Sync} <= {kind for kind, _ in PEER}
    assert len({kind.verb() for kind, _ in NODE}) == len(NODE)
    assert len({kind.verb() for kind, _ in PEER}) == len(PEER)


@pytest.mark.parametrize("size", [-1, pm.PROBE_BYTES_MAX + 1, 1 << 63])
def test_a_probe_asks_for_no_more_than_allowed(size: int):
    with pytest.raises(RemoteProtocolError, match="malformed request"):
        pm.Probe.decode(pm.Probe(size=size).encode())
