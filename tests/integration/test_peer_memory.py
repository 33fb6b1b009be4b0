"""What somebody who knows the token can make an agent expand: little, however much he sends."""

from __future__ import annotations

import os
import secrets
import shutil
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.support.agent import wait_until
from tests.support.leftovers import shm
from tests.support.peers import Job, PeerHost, line_to
from tieredckpt.errors import TieredCkptError
from tieredckpt.format.envelope import seal_record
from tieredckpt.format.manifest import (
    ATTEMPT_LIMIT_BYTES,
    MANIFEST_LIMIT_BYTES,
    MAX_SEGMENTS,
    SegmentRef,
    encode_manifest,
)
from tieredckpt.format.plan_record import PLAN_LIMIT_BYTES, encoded_plan_id
from tieredckpt.format.records import RECORD_LIMIT_BYTES
from tieredckpt.rpc.auth import Secret
from tieredckpt.rpc.messages.peer import AskPlan, Push
from tieredckpt.rpc.peer_client import PeerClient

PUSHES = 12
MORE_BYTES_MAX = 300 << 20
"""What the agent may need beyond what it has, for all of them together."""
NAME = "ab"


def peak_bytes(pid: int, *, reset: bool = False) -> int:
    """The most memory that a process has had since the last reset."""
    if reset:
        Path(f"/proc/{pid}/clear_refs").write_text("5")
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))


def array(item: bytes, size: int) -> bytes:
    """A msgpack array of as many ``item`` as fit into ``size`` bytes."""
    count = size // len(item)
    return b"\xdd" + count.to_bytes(4, "big") + item * count


def filled(fields: dict[str, Any], name: str, item: bytes, limit: int) -> bytes:
    """``fields`` as msgpack; the one called ``name`` is an array as large as the limit allows."""
    mark = secrets.token_bytes(16)
    head, _, tail = msgspec.msgpack.encode({**fields, name: mark}).partition(b"\xc4\x10" + mark)
    return head + array(item, limit - len(head) - len(tail) - 5) + tail


MANIFEST: dict[str, Any] = {
    "save_id": "1" * 32, "namespace": "run", "stream": "default", "step": 1,
    "attempt": (1, "2" * 32), "seq": 0, "parent": None, "lineage": (), "plan": "3" * 32,
    "tiers": (), "segments": (), "world_size": 1, "tags": {}, "created_at_s": 1.0,
}  # fmt: skip
RECORD: dict[str, Any] = {
    "namespace": "run", "stream": "default", "save_id": "1" * 32, "kind": "order", "id": "2" * 32,
    "host": "h0", "incarnation": "3" * 32,
}  # fmt: skip
ATTEMPT: dict[str, Any] = {
    "namespace": "run", "number": 7, "id": "1" * 32, "run": "2" * 32, "bases": (),
    "created_at_s": 1.0,
}  # fmt: skip
TEXT = msgspec.msgpack.encode(NAME)
HOLDERS = msgspec.msgpack.encode((NAME, (NAME,) * 64))


def manifest(name: str, item: bytes) -> bytes:
    payload = filled(MANIFEST, name, item, MANIFEST_LIMIT_BYTES)
    return seal_record(b"TCKMANIF", 1 + (name == "replicas"), payload, compress=True)


def record(name: str, item: bytes) -> bytes:
    payload = filled(RECORD, name, item, RECORD_LIMIT_BYTES)
    return seal_record(b"TCKRECRD", 1, payload, compress=True)


def bomb(kind: str) -> Push:
    if kind == "plan":
        return Push(plans=(seal_record(b"TCKPPLAN", 1, bytes(PLAN_LIMIT_BYTES), compress=True),))
    if kind == "records":
        return Push(records=(record("placement", HOLDERS), record("segments", TEXT)) * 8)
    if kind == "attempts":
        ancestor = msgspec.msgpack.encode((1, NAME, 1))
        base = msgspec.msgpack.encode(("s", None, None)) + array(ancestor, 100_000)
        base = b"\x94" + base[1:]
        payload = filled(ATTEMPT, "bases", base, ATTEMPT_LIMIT_BYTES)
        return Push(attempts=(seal_record(b"TCKATTMT", 1, payload, compress=True),) * 8)
    items = {
        "tiers": TEXT,
        "segments": msgspec.msgpack.encode((NAME, 1, NAME, NAME)),
        "lineage": msgspec.msgpack.encode((1, NAME, 1)),
        "replicas": HOLDERS,
    }
    return Push(manifests=(manifest(kind, items[kind]),) * 4)


def patient(host: PeerHost, token: str) -> PeerClient:
    """A line that waits longer for an answer than hosts do: a busy machine is no finding."""
    table = host.client.peers()
    assert table.host is not None
    return PeerClient(table.host, host.trainer.namespace, Secret(token), stall_s=120.0)


def push_together(host: PeerHost, token: str, push: Push) -> None:
    """So many at the same time, each on a connection of its own."""

    def work() -> None:
        with line_to(host, token) as line, suppress(TieredCkptError):
            line.ask(push)

    threads = [threading.Thread(target=work) for _ in range(PUSHES)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = shm() / f"tck-peer-memory-{secrets.token_hex(4)}"
    folder.mkdir(mode=0o700)
    try:
        with Job(folder, 2) as job:
            yield job
    finally:
        shutil.rmtree(folder)


@pytest.mark.parametrize(
    "kind",
    [
        "segments",
        *(
            pytest.param(kind, marks=pytest.mark.full)
            for kind in ("plan", "tiers", "lineage", "replicas", "records", "attempts")
        ),
    ],
)
def test_what_expands(job: Job, kind: str):
    push = bomb(kind)
    size = len(msgspec.msgpack.encode(push))
    host = job.hosts[1]
    base = peak_bytes(host.agent.pid, reset=True)
    push_together(host, job.token, push)
    more = peak_bytes(host.agent.pid) - base
    print(f"{kind}: {PUSHES} pushes of {size} bytes: {more >> 20} MiB more")
    assert more <= MORE_BYTES_MAX


@pytest.mark.full
def test_what_is_good_expands_one_at_a_time(job: Job):
    """Manifests that nobody refuses for what is in them, as many as the message is long."""
    host = job.hosts[1]
    refs = tuple(
        SegmentRef(id=f"{number:032x}", size=1 << 20, root="0" * 32, host="h7")
        for number in range(MAX_SEGMENTS)
    )
    good = msgspec.structs.replace(
        job.save(2), namespace="other", save_id="6" * 32, segments=refs, world_size=MAX_SEGMENTS
    )
    push = Push(manifests=(encode_manifest(good),) * 12)
    base = peak_bytes(host.agent.pid, reset=True)

    def is_through(push: Push) -> bool:
        """Whether it was answered; one that comes later waits for those before."""
        with line_to(host, job.token) as line, suppress(TieredCkptError):
            return len(line.ask(push).refused) == len(push.manifests)
        return False

    is_through(push)  # on a busy machine the answer may be late
    wait_until(lambda: is_through(Push(manifests=push.manifests[:1])))
    more = peak_bytes(host.agent.pid) - base
    print(f"12 manifests of {len(push.manifests[0])} bytes: {more >> 20} MiB more")
    assert more <= MORE_BYTES_MAX


@pytest.mark.full
def test_what_is_large_and_good_goes_through(job: Job):
    """A plan of 64 MiB, and a manifest of as many segments as one may have, said by all at once."""
    plan = seal_record(b"TCKPPLAN", 1, os.urandom(64 << 20).hex().encode(), compress=True)
    host = job.hosts[1]
    before = job.save(1)
    refs = tuple(
        SegmentRef(id=secrets.token_hex(16), size=1 << 20, root=secrets.token_hex(16), host="h7")
        for _ in range(MAX_SEGMENTS)
    )
    large = msgspec.structs.replace(
        before, save_id="5" * 32, step=before.step + 1, seq=before.seq + 1, segments=refs,
        plan=encoded_plan_id(plan), world_size=MAX_SEGMENTS,
    )  # fmt: skip
    data = encode_manifest(large)
    wait_until(lambda: before.save_id in host.save_ids())
    with patient(host, job.token) as line:
        assert line.ask(Push(manifests=(data,))).need_plans == (large.plan,)
        answer = line.ask(Push(manifests=(data,), plans=(plan,)))
    assert (answer.need_plans, answer.refused) == ((), ())
    push_together(host, job.token, Push(manifests=(data,)))
    assert large.save_id in host.save_ids()
    with patient(host, job.token) as line:
        assert line.ask(AskPlan(plan_id=large.plan, tier="memory")) == plan
