"""Whatever bytes come in place of a message: a decoder returns or raises one of our errors."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.format.samples import mutate
from tieredckpt.errors import TieredCkptError
from tieredckpt.live import messages as m
from tieredckpt.live.board import Record, Seen
from tieredckpt.policy.ranks import Member
from tieredckpt.rpc.messages.agent import HostEntry, SetPeers
from tieredckpt.rpc.messages.base import decode_error, describe_error
from tieredckpt.rpc.messages.kv import Kv, PeerKv
from tieredckpt.storage.holdings import Holdings, decode_holdings, encode_holdings

HOST = HostEntry(
    host_id="host-ä", incarnation="0" * 32, addresses=("10.0.0.1:7411",), labels={"rack": "r7"}
)
TERM = (3, "host-ä", "start")
DECISION = m.Decision(
    term=TERM, number=7, voters={"host-ä": "x", "b": "y"}, run="run", generation=2,
    began=(TERM, 6), members=(Member(host="b", pid=1, local_rank=0),), hosts=(HOST,),
    reason="rank 1 died", order=m.Order(at_ns=1 << 60, size=4), left_s=1.5,
)  # fmt: skip
VIEW = m.View(
    start="x", leader="b", term=TERM, place=(TERM, 7), newer=DECISION, entry=HOST,
    processes=(m.ProcessFacts(pid=1, where="in", began=(TERM, 6), version=3),),
    failures=(m.Failure(text="died: ä", is_death=True),), step_s=0.25, beat=1 << 60,
)  # fmt: skip
RECORD = Record(leader="b", term=TERM, decision=DECISION, trains=True, sizes="4", beat=1 << 60)
TRAIN = m.Train(
    generation=2, rank=0, size=2, run="r", store="/x", reason="rank 1 died: \"ä\"",
    keys=m.Keys(runtime_dir="/x", namespace="n", table="t", hosts=(HOST,)),
)  # fmt: skip
KV = Kv(table="t", op="set", keys=("ä", "b"), values=(b"1", b"\xff"))
PEERS = SetPeers(session_id="s", run="0" * 32, leader="b", hosts=(HOST,), dns="x:1")
HELD = Holdings(host_id="host-ä", namespace="n", attempts=(b"\xff",), tiers=(), saved=("ä",))


def seen(kind: type) -> Callable[[bytes], object]:
    return lambda data: Seen(kind, time.monotonic).record("b", data, is_first=False)


ERROR = TieredCkptError("nothing: ä")
DECODERS: dict[str, tuple[bytes, Callable[[bytes], object]]] = {
    "view": (msgspec.msgpack.encode(VIEW), seen(m.View)),
    "record": (msgspec.msgpack.encode(RECORD), seen(Record)),
    **{
        type(each).__name__: (m.encode(each), m.decode_to_process)
        for each in (TRAIN, m.Change(size=3, left_s=1.5), m.Stop(generation=2), m.Leave(code=1))
    },
    **{
        type(each).__name__: (m.encode(each), m.decode_from_process)
        for each in (
            m.Ready(version=3),
            m.Progress(what="load", version=3, restored="ä"),
            m.Fault(error="ä"),
            m.Done(version=4),
        )
    },
    "request, msgpack": (KV.encode(), Kv.decode),
    "request of a host": (PeerKv(request=KV).encode(), PeerKv.decode),
    "request, JSON": (PEERS.encode(), SetPeers.decode),
    "error": (msgspec.json.encode(describe_error(ERROR)), lambda data: decode_error(500, data)),
    "holdings": (encode_holdings(HELD), decode_holdings),
}
PIECES = (b"\xff\xfe", b"\xa4\xff\xff\xff\xff", b"\x91" * 5000, b"[" * 5000, b'{"":' * 5000)
"""No UTF-8, and nesting."""


@pytest.mark.parametrize("name", DECODERS)
@given(seed=st.integers(0, 2**64 - 1))
def test_a_decoder_raises_only_our_errors(name: str, seed: int):
    rng = random.Random(seed)
    sample, decode = DECODERS[name]
    decode(sample)
    for _ in range(10):
        bad = mutate(sample, rng.choice(PIECES), rng)
        at = rng.randrange(len(bad) + 1)
        for data in (bad, sample[: at % len(sample)] + rng.choice(PIECES) + sample[at:]):
            try:
                decode(data)
            except TieredCkptError:
                pass
