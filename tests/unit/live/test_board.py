"""The exchange of supervisors, as far as one host's agent sees it: real tables, and time passes."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tieredckpt.agent.tables import UNUSED_S, Tables
from tieredckpt.config.network import DiscoveryConfig
from tieredckpt.live.board import Board, Record
from tieredckpt.live.messages import Decision, View
from tieredckpt.rpc.auth import Secret
from tieredckpt.rpc.messages.agent import HostEntry
from tieredckpt.rpc.messages.kv import Kv, KvReply

HOST = HostEntry(host_id="h0", incarnation="0" * 32, addresses=())
TERM = (1, "h0", "start")


class Agent:
    """The own agent, whose clock a test sets."""

    namespace = "run"

    def __init__(self) -> None:
        self.now_s = 0.0
        self.tables = Tables(lambda: self.now_s)

    def call(self, request: Kv, **_: Any) -> KvReply:
        return asyncio.run(self.tables.do(self.namespace, request))


@pytest.mark.parametrize("ends", [False, True])
def test_the_keys_of_a_generation_stay_while_its_ranks_do_not_use_them(*, ends: bool):
    """A group that is made after hours of training finds those that were set before."""
    agent = Agent()
    board = Board(agent, HOST, Secret(""), DiscoveryConfig(), "job", lambda: None)  # type: ignore[arg-type]
    first = Decision(term=TERM, number=3, generation=1, began=(TERM, 3), hosts=(HOST,))
    second = Decision(term=TERM, number=4, generation=2, began=(TERM, 4), hosts=(HOST,))
    asked = Kv(table=first.table_of("job"), op="set", keys=("k",), values=(b"x",))
    before = agent.call(asked)
    for _ in range(40):
        agent.now_s += UNUSED_S / 20
        decision = second if ends else first
        record = Record(leader="h0", term=TERM, decision=decision, trains=True, sizes="")
        board.put(record, View(), ())
        board._put_record()
        agent.tables.expire()
    after = agent.call(Kv(table=first.table_of("job"), op="count"))
    assert (after.table_id == before.table_id, after.number) == (not ends, int(not ends))
