"""How fast a rank's state comes from other hosts' memory, verified; agents here are the hosts."""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import msgspec

from benchmarks import engines
from benchmarks import state as states
from benchmarks.measure import Report, Row, Samples, explore, interleave, ratio_row, timed
from benchmarks.peer_limits import BUFFERS, RECEIVERS, SENDERS, RawPeer
from benchmarks.processes import Setup, Spawner
from benchmarks.scenarios.peer import HOST, NAMESPACE, TOKEN, Served
from tieredckpt import Engine
from tieredckpt.format.manifest import SegmentRef
from tieredckpt.recovery.blocks import Range
from tieredckpt.recovery.copies import OpenedSource
from tieredckpt.recovery.fetch import SegmentFetcher
from tieredckpt.recovery.plan import SourceRef
from tieredckpt.recovery.remote import DONOR_STREAMS
from tieredckpt.rpc.auth import Secret
from tieredckpt.rpc.messages import agent as m
from tieredckpt.rpc.peer_client import PeerClient

EXPLORE_ROUNDS = 2
LIMIT = "best raw sendfile/send -> recv_into"


def load_process(setup: Setup, report: Report) -> Samples:
    """One host saves, another one loads; the raw limit reads the same slot."""
    saved = states.filled(setup.shape)
    digest = states.digest(saved)
    with contextlib.ExitStack() as stack:
        donor = stack.enter_context(_host(setup, "a"))
        engines.save(donor, saved, 0)
        reader = stack.enter_context(_host(setup, "b"))
        _introduce(donor, reader)
        slot = _slot_of(Path(setup.shm) / "a", setup.work_bytes)
        target = memoryview(mmap.mmap(-1, setup.work_bytes))
        target[:] = bytes(1) * len(target)  # warm: no page fault is measured
        raw = RawPeer(str(slot))
        stack.callback(raw.close)
        best, tried = _best_raw(raw, target)

        def load(_number: int) -> float:
            states.spoil(saved)
            seconds = engines.load(reader, saved)
            assert states.digest(saved) == digest, "loaded something else than was saved"
            return seconds

        samples = interleave(
            max(setup.repeat // 8, 3), report, {"raw": lambda _n: best(), "load": load}
        )
    return samples | tried


def _best_raw(raw: RawPeer, target: memoryview) -> tuple[Callable[[], float], Samples]:
    variants = {
        f"raw: {sender} -> {receiver}, buffers {buffer >> 20} MiB": partial(
            timed, partial(raw.fetch, target, DONOR_STREAMS, sender, receiver, buffer)
        )
        for sender in SENDERS
        for receiver in RECEIVERS
        for buffer in BUFFERS
    }
    best, tried = explore(variants, rounds=EXPLORE_ROUNDS)
    return variants[best], tried


@contextlib.contextmanager
def _host(setup: Setup, name: str) -> Iterator[Engine]:
    """An engine with an agent of its own, as a host of this name."""
    folder = Path(setup.shm) / name
    folder.mkdir(mode=0o700)
    config = engines.config(setup, spill=False) | {"agent": {"runtime_dir": str(folder)}}
    before = os.environ.get("TIEREDCKPT_NODE_NAME")
    os.environ["TIEREDCKPT_NODE_NAME"] = name
    try:
        engine = Engine.open(config)
    finally:
        if before is None:
            del os.environ["TIEREDCKPT_NODE_NAME"]
        else:
            os.environ["TIEREDCKPT_NODE_NAME"] = before
    with engine:
        yield engine


def _introduce(*hosts: Engine) -> None:
    """What Engine.open does on the ranks of several hosts."""
    token, run = secrets.token_hex(32), secrets.token_hex(16)
    clients = [engine._session.client for engine in hosts]
    entries = tuple(
        client.call(
            m.Listen(
                session_id=client.session_id, token=token, tls=None, interfaces=(),
                cidrs=(f"127.0.{number + 1}.1/32",), port=0, labels={},
            )
        ).host
        for number, client in enumerate(clients)
    )  # fmt: skip
    for engine, client in zip(hosts, clients, strict=True):
        client.call(
            m.SetPeers(
                session_id=client.session_id, run=run, leader=hosts[0].host_id, hosts=entries
            )
        )
        engine._session.peers = client.peers()


def _slot_of(folder: Path, least: int) -> Path:
    for path in sorted((folder / "slots").iterdir()):
        with path.open("rb") as file:
            if path.stat().st_size >= least and any(file.read(4096)):
                return path
    raise FileNotFoundError("no slot holds anything")


# --- donors ---------------------------------------------------------------------------------------


class _Donor:
    """A serving process with the slot, as a host of its own."""

    def __init__(self, path: Path) -> None:
        told = msgspec.json.encode(Served(path=str(path), tls=None)).decode()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.scenarios.peer", told],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._process.stdout is not None
        where = f"127.0.0.1:{int(self._process.stdout.readline())}"
        host = msgspec.structs.replace(HOST, addresses=(where,))
        self.client = PeerClient(host, NAMESPACE, Secret(TOKEN))

    def close(self) -> None:
        """End the process."""
        self.client.close()
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)


def donors_process(setup: Setup, report: Report) -> Samples:
    """The fetch alone, from one and from two hosts in turn, beside the raw limit."""
    with contextlib.ExitStack() as stack:
        engine = stack.enter_context(_host(setup, "a"))
        engines.save(engine, states.filled(setup.shape), 0)
        manifest = engine._session.history.recovery_plan("default").candidates[0].manifest
        slot = _slot_of(Path(setup.shm) / "a", setup.work_bytes)
        donors = {name: _Donor(slot) for name in ("h0", "h1")}
        for each in donors.values():
            stack.callback(each.close)
        target = memoryview(mmap.mmap(-1, setup.work_bytes))
        target[:] = bytes(1) * len(target)
        raw = RawPeer(str(slot))
        stack.callback(raw.close)
        best, tried = _best_raw(raw, target)
        ref = manifest.segments[0]
        parts = {"raw": lambda _n: best()} | {
            f"{count} donor(s)": partial(_fetch_s, ref, dict(list(donors.items())[:count]), target)
            for count in (1, 2)
        }
        return interleave(max(setup.repeat // 8, 3), report, parts) | tried


def _fetch_s(ref: SegmentRef, donors: dict[str, _Donor], target: memoryview, _number: int) -> float:
    sources = [
        SourceRef(
            host=name, tier="memory", segment_id=ref.id, size=ref.size, intact=True, kind="memory"
        )
        for name in donors
    ]

    def nothing_here(_source: SourceRef) -> OpenedSource:
        raise AssertionError("every copy is on another host")

    def damage(_source: SourceRef, _blocks: tuple[int, ...], reason: str) -> None:
        raise AssertionError(reason)

    with SegmentFetcher(
        ref, sources, nothing_here, damage,
        find_peer=lambda source: donors[source.host].client, host_id="reader",
    ) as fetcher:  # fmt: skip
        fetcher.footer()
        seconds = timed(lambda: fetcher.fetch([Range(0, len(target), target)]))
        assert len(fetcher.report.bytes_by_place) == len(donors), "a donor was left out"
    return seconds


def peer_load(spawn: Spawner) -> list[Row]:
    """A rank's state from one other host's memory, then from two."""
    loads = spawn.one(load_process)
    folder = Path(spawn.setup.shm)
    engines.stop_agents(folder)  # with their slots they would need twice the memory
    for name in ("a", "b"):
        shutil.rmtree(folder / name)
    fetches = spawn.one(donors_process)
    sockets = f"{DONOR_STREAMS} socket(s)"
    raws = [name for name in loads if name.startswith("raw: ")]
    size = spawn.setup.work_bytes
    return [
        ratio_row(
            "peer-load",
            "dcp.load of a rank's state from another host's memory, verified",
            loads,
            ours="load",
            limit="raw",
            limit_name=f"{LIMIT}, {sockets}",
            work_bytes=size,
            target=0.8,
            detail=raws,
        ),
        ratio_row(
            "peer-load",
            "its bytes alone, from one host",
            fetches,
            ours="1 donor(s)",
            limit="raw",
            limit_name=f"{LIMIT}, {sockets}",
            work_bytes=size,
        ),
        ratio_row(
            "peer-load",
            "its bytes alone, from two hosts at once",
            fetches,
            ours="2 donor(s)",
            limit="1 donor(s)",
            limit_name="the same from one host",
            work_bytes=size,
            target=1.0,
        ),
    ]
