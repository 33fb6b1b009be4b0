"""Scenario ``store``: AgentStore against TCPStore, for 4 ranks, 64 processes and 1,000 clients.

Clients do what gloo does for one group: each sets one key and reads those of all others. With an
AgentStore gloo reads many keys in one request, with a TCPStore it waits for each key and gets it.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import secrets
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from benchmarks.live.bench import Bench
from benchmarks.measure import percentile
from tieredckpt.errors import AgentError
from tieredckpt.live.store import AgentStore
from tieredckpt.rpc.agent_client import AgentClient
from tieredckpt.rpc.auth import Secret
from tieredckpt.rpc.messages import agent as m
from tieredckpt.rpc.messages.kv import Kv, KvReply, PeerKv
from tieredckpt.rpc.peer_client import PeerClient

NAMESPACE = "bench"
LIMIT = timedelta(seconds=60)
RANKS = 4
STAGES = ("init_process_group", "DeviceMesh", "FSDP2, one step", "first object collective")
GENERATIONS = 20
WARM = 2
PROCESSES, PROCESS_HOSTS, ROUNDS = 64, 8, 5
CLIENTS, CLIENT_HOSTS, CLIENT_PROCESSES = 1000, 125, 4
SAMPLED = 100
"""Simulated clients of the TCPStore, whose work per client does not depend on their number."""
_context = multiprocessing.get_context("forkserver")


def key_of(rank: int) -> str:
    """As gloo names a rank's key."""
    return f"default_pg/0//cpu//0/{rank}"


def value_of(size: int) -> bytes:
    """As large as the addresses that gloo publishes for each rank."""
    return bytes(154 + 8 * size)


@dataclass(frozen=True, slots=True)
class Host:
    """One agent as one host."""

    runtime_dir: Path
    entry: m.HostEntry
    token: str
    pid: int


@contextlib.contextmanager
def hosts(folder: Path, count: int) -> Iterator[list[Host]]:
    """So many agents on loopback addresses, each with a session that keeps it."""
    token, made = secrets.token_hex(32), list[Host]()
    spec = m.NamespaceSpec(capacity_bytes=1 << 20, keep_last=1, wait_s=1.0, tiers=())
    with contextlib.ExitStack() as stack:
        for number in range(count):
            runtime_dir = folder / f"h{number}"
            runtime_dir.mkdir(mode=0o700)
            command = [sys.executable, "-m", "tieredckpt.agent.daemon", "--log-level", "warning"]
            agent = stack.enter_context(
                subprocess.Popen(
                    [*command, "--runtime-dir", str(runtime_dir)],
                    env={**os.environ, "TIEREDCKPT_NODE_NAME": f"h{number}"},
                )
            )
            stack.callback(agent.terminate)
            client = stack.enter_context(AgentClient(runtime_dir))
            _wait_for(client)
            client.open_session(NAMESPACE, spec)
            listen = m.Listen(
                session_id=client.session_id, token=token, tls=None, interfaces=(),
                cidrs=(f"127.77.0.{number + 1}/32",), port=0, labels={},
            )  # fmt: skip
            made.append(Host(runtime_dir, client.call(listen).host, token, agent.pid))
        yield made


def _wait_for(client: AgentClient) -> None:
    until_s = time.monotonic() + 30.0
    while True:
        try:
            client.health()
            return
        except AgentError:
            if time.monotonic() > until_s:
                raise
            time.sleep(0.02)


def processor_s(pid: int) -> float:
    """Seconds of processor time that the threads of a process have taken."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def never() -> None:
    """A generation that does not end."""


def _serve(pipe: Connection) -> None:
    """A process with nothing but TCPStore's server, until the other end of the pipe is closed."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipe.send(server.port)
    with contextlib.suppress(EOFError):
        pipe.recv()


@contextlib.contextmanager
def tcp_server() -> Iterator[tuple[int, int]]:
    """Port and process id of a TCPStore's server."""
    mine, theirs = _context.Pipe()
    process = _context.Process(target=_serve, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    with mine:
        yield mine.recv(), process.pid or 0
    process.join(10)


def tcp_store(port: int) -> dist.Store:
    """A client."""
    return dist.TCPStore("127.0.0.1", port, wait_for_workers=False, timeout=LIMIT)


def in_processes(count: int, work: Callable[..., Any], *args: Any) -> list[Any]:
    """Results of ``work(number, begin, *args)`` in so many processes; ``begin()`` is a barrier."""
    barrier = _context.Barrier(count)
    running = []
    for number in range(count):
        mine, theirs = _context.Pipe(duplex=False)
        process = _context.Process(
            target=_reply, args=(theirs, work, number, barrier, args), daemon=True
        )
        process.start()
        theirs.close()
        running.append((process, mine))
    found = []
    for process, pipe in running:
        if not pipe.poll(150.0):
            raise RuntimeError(f"process {process.pid} did not finish")
        found.append(pipe.recv())
    for process, _ in running:
        process.join(10)
    return found


def _reply(
    pipe: Connection, work: Callable[..., Any], number: int, barrier: Any, args: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    pipe.send(work(number, lambda: barrier.wait(120.0), *args))


# --- 4 ranks ------------------------------------------------------------------------------------


def _rank(
    rank: int, begin: Callable[[], None], made: list[Host], port: int, count: int
) -> dict[str, list[tuple[float, ...]]]:
    """Seconds of each stage of each generation; the two stores take turns."""
    found: dict[str, list[tuple[float, ...]]] = {"agents": [], "tcp": []}
    for number in range(count):
        for kind, times in found.items():
            store: dist.Store
            if kind == "agents":
                home = made[rank % len(made)].runtime_dir
                entries = [host.entry for host in made]
                store = AgentStore(home, NAMESPACE, f"g{number}", entries, never)
            else:
                os.environ.pop("GLOO_ENABLE_STORE_V2_API", None)
                store = dist.PrefixStore(f"g{number}", tcp_store(port))
            begin()
            times.append(_generation(store, rank))
            dist.barrier()
            dist.destroy_process_group()
    return found


def _generation(store: dist.Store, rank: int) -> tuple[float, ...]:
    marks = [time.monotonic()]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=LIMIT)
    marks.append(time.monotonic())
    mesh = init_device_mesh("cpu", (RANKS // 2, 2), mesh_dim_names=("replicate", "shard"))
    marks.append(time.monotonic())
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model(torch.ones(2, 64)).sum().backward()
    marks.append(time.monotonic())
    group = dist.new_group(backend="gloo")
    dist.all_gather_object([None] * RANKS, rank, group=group)
    marks.append(time.monotonic())
    return tuple(after - before for before, after in itertools.pairwise(marks))


def _groups(bench: Bench, made: list[Host], port: int) -> None:
    count = 4 if bench.quick else GENERATIONS
    ranks = in_processes(RANKS, _rank, made[:2], port, WARM + count)
    stages: dict[str, list[list[float]]] = {}
    for kind in ("agents", "tcp"):
        generations = list(zip(*(rank[kind] for rank in ranks), strict=True))[WARM:]
        # A stage takes as long as in the slowest rank.
        slowest = [[max(each) for each in zip(*by_rank, strict=True)] for by_rank in generations]
        stages[kind] = [list(each) for each in zip(*slowest, strict=True)]
    totals = {kind: [sum(each) for each in zip(*of, strict=True)] for kind, of in stages.items()}
    bench.ratio(
        "init + mesh + FSDP2 + first object collective, 4 ranks", totals["agents"], totals["tcp"],
        limit_name="the same with TCPStore", target=1.5,
    )  # fmt: skip
    medians = {kind: [percentile(each, 0.5) * 1e3 for each in of] for kind, of in stages.items()}
    bench.at_most(
        "longest stage", [each * 1e3 for of in stages["agents"] for each in of],
        value=max(medians["agents"]), unit="ms", target=100.0, note="The largest of the medians.",
    )  # fmt: skip
    rows = [
        [name, *(f"{medians[kind][number]:.1f}" for kind in ("agents", "tcp"))]
        for number, name in enumerate(STAGES)
    ]
    bench.table("Milliseconds per stage, medians", ("stage", "AgentStore", "TCPStore"), rows)


# --- 64 processes -------------------------------------------------------------------------------


def read_all(store: dist.Store, rank: int, size: int, *, at_once: bool) -> float:
    """One group's work of one rank; returns the longest wait in seconds."""
    store.set(key_of(rank), value_of(size))  # type: ignore[arg-type]
    keys = [key_of(other) for other in range(size)]
    longest_s, began_s = 0.0, time.monotonic()
    if at_once:
        store.multi_get(keys)
        return time.monotonic() - began_s
    for key in keys:
        began_s = time.monotonic()
        store.wait([key])
        longest_s = max(longest_s, time.monotonic() - began_s)
        store.get(key)
    return longest_s


def _process(
    rank: int, begin: Callable[[], None], made: list[Host], port: int, table: str, rounds: int
) -> list[float]:
    found = []
    plain = tcp_store(port) if port else None
    for number in range(rounds):
        name = f"{table}-{number}"
        store: dist.Store
        if plain is None:
            home = made[rank % len(made)].runtime_dir
            entries = [host.entry for host in made]
            store = AgentStore(home, NAMESPACE, name, entries, never)
        else:
            store = dist.PrefixStore(name, plain)
        begin()
        found.append(read_all(store, rank, PROCESSES, at_once=plain is None))
    return found


def _processes(bench: Bench, made: list[Host], port: int, server: int) -> None:
    rounds = 1 if bench.quick else ROUNDS
    before = [processor_s(host.pid) for host in made]
    waits = in_processes(PROCESSES, _process, made, 0, "processes", rounds)
    spent = [processor_s(host.pid) - at for host, at in zip(made, before, strict=True)]
    at = processor_s(server)
    tcp = in_processes(PROCESSES, _process, [], port, "processes", rounds)
    _compare(
        bench, f"{PROCESSES} processes on {len(made)} hosts", max(spent) / rounds,
        (processor_s(server) - at) / rounds, [each for of in waits for each in of],
        [each for of in tcp for each in of],
    )  # fmt: skip


def _compare(
    bench: Bench, what: str, ours_s: float, tcp_s: float, waits: list[float], tcp: list[float]
) -> None:
    bench.ratio(
        f"processor time of the busiest agent, {what}", [ours_s], [tcp_s],
        limit_name="TCPStore's server", target=1.0, note="For one group.",
    )  # fmt: skip
    bench.at_most(
        f"p99 of a wait, {what}", waits, value=percentile(waits, 0.99), unit="s", target=1.0,
        note=f"With TCPStore {percentile(tcp, 0.99):.3f} s.",
    )  # fmt: skip


# --- 1,000 clients ------------------------------------------------------------------------------


def busiest(size: int, count: int) -> list[int]:
    """Ranks whose keys the busiest of ``count`` hosts has, for one group of this size."""
    owned: dict[int, list[int]] = {}
    for rank in range(size):
        owned.setdefault(zlib.crc32(key_of(rank).encode()) % count, []).append(rank)
    return max(owned.values(), key=len)


def _clients(
    number: int, begin: Callable[[], None], host: Host, ranks: Sequence[int], local: int
) -> list[float]:
    """A process's share of the clients, each with connections of its own; seconds of each wait."""
    mine = range(number, CLIENTS, CLIENT_PROCESSES)
    wanted = tuple(key_of(rank) for rank in ranks)
    clients: dict[int, tuple[Callable[[Kv], KvReply], Callable[[], None]]] = {}
    for rank in mine:
        clients[rank] = ask, _ = _client(host, is_local=rank < local)
        # Connected one by one: an agent takes 64 new connections of one address at a time.
        ask(Kv(table="clients", op="count"))

    def work(rank: int) -> float:
        ask, close = clients[rank]
        if rank in ranks:
            value = (value_of(CLIENTS),)
            ask(Kv(table="clients", op="set", keys=(key_of(rank),), values=value))
        began_s = time.monotonic()
        while not ask(Kv(table="clients", op="get", keys=wanted, wait_s=1.0)).number:
            pass
        took_s = time.monotonic() - began_s
        close()
        return took_s

    begin()
    with ThreadPoolExecutor(len(mine)) as pool:
        return list(pool.map(work, mine))


def _client(host: Host, *, is_local: bool) -> tuple[Callable[[Kv], KvReply], Callable[[], None]]:
    if is_local:
        own = AgentClient(host.runtime_dir)
        return lambda request: own.call(request, NAMESPACE), own.close
    peer = PeerClient(host.entry, NAMESPACE, Secret(host.token))
    return lambda request: peer.ask(PeerKv(request=request)), peer.close


def _tcp_clients(number: int, begin: Callable[[], None], port: int, sampled: int) -> list[float]:
    mine = range(number, sampled, CLIENT_PROCESSES)
    stores = {rank: dist.PrefixStore("clients", tcp_store(port)) for rank in mine}
    if not number:
        for rank in range(sampled, CLIENTS):
            stores[0].set(key_of(rank), value_of(CLIENTS))  # type: ignore[arg-type]
    begin()
    with ThreadPoolExecutor(len(mine)) as pool:
        work = lambda rank: read_all(stores[rank], rank, CLIENTS, at_once=False)  # noqa: E731
        return list(pool.map(work, mine))


def _thousand(bench: Bench, made: list[Host], port: int, server: int) -> None:
    sampled = 20 if bench.quick else SAMPLED
    host, ranks = made[0], busiest(CLIENTS, CLIENT_HOSTS)
    at = processor_s(host.pid)
    local = CLIENTS // CLIENT_HOSTS
    waits = in_processes(CLIENT_PROCESSES, _clients, host, ranks, local)
    ours_s = processor_s(host.pid) - at
    at = processor_s(server)
    tcp = in_processes(CLIENT_PROCESSES, _tcp_clients, port, sampled)
    tcp_s = (processor_s(server) - at) * CLIENTS / sampled
    _compare(
        bench, f"{CLIENTS:,} clients on {CLIENT_HOSTS} hosts", ours_s, tcp_s,
        [each for of in waits for each in of], [each for of in tcp for each in of],
    )  # fmt: skip
    bench.table(
        f"One group of {CLIENTS:,} ranks",
        ("what", "value"),
        [
            ["keys at the busiest agent", str(len(ranks))],
            ["processor seconds of the busiest agent", f"{ours_s:.3f}"],
            [f"of TCPStore's server ({sampled} clients, scaled)", f"{tcp_s:.3f}"],
        ],
    )


def store(bench: Bench) -> None:
    """See the module."""
    _context.set_forkserver_preload(["benchmarks.live.store", "torch._dynamo"])
    with hosts(bench.shm, PROCESS_HOSTS) as made, tcp_server() as (port, server):
        _groups(bench, made, port)
        _processes(bench, made, port, server)
        _thousand(bench, made, port, server)
