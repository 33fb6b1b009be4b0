"""AgentStore over real agents: process groups without a server, and agents that are lost."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.support.faults import eventually, state_of
from tests.support.ports import hold_port
from tests.support.preloaded import context
from tests.support.tables import NAMESPACE, TableHosts
from tieredckpt.live import store as store_module
from tieredckpt.live.store import AgentStore
from tieredckpt.rpc.messages.agent import HostEntry

LONG = timedelta(seconds=60)
RANKS = 2


class Ended(BaseException):
    """As WorldChanged."""


@pytest.fixture
def once(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From now on requests that fail are not repeated for ten seconds."""
    return lambda: monkeypatch.setattr(store_module, "DEADLINE_S", 0.0)


def never() -> None:
    """A generation that does not end."""


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[TableHosts]:
    with TableHosts(tmp_path, 2) as hosts:
        yield hosts


@pytest.fixture
def make(hosts: TableHosts) -> Iterator[Callable[..., AgentStore]]:
    """Stores on two hosts, used from the first one."""
    made: list[AgentStore] = []
    table = secrets.token_hex(4)

    def make(check: Callable[[], None] = never) -> AgentStore:
        store = AgentStore(hosts.hosts[0].runtime_dir, NAMESPACE, table, hosts.entries, check)
        store.set_timeout(LONG)
        made.append(store)
        return store

    yield make
    for store in made:
        store.close()


def key_of(store: AgentStore, host: int) -> str:
    """A key whose owner is this host."""
    return next(key for key in (f"k{i}" for i in range(100)) if store._owner(key) == host)


def test_keys_are_spread_over_the_hosts(hosts: TableHosts, make: Callable[..., AgentStore]):
    store = make()
    keys = [f"default_pg/0//0//gloo/{number}" for number in range(100)]
    store.multi_set(keys, keys)
    counts = [store._ask(host, "count").number for host in (0, 1)]
    assert sum(counts) == 100
    assert min(counts) > 30
    other = AgentStore(hosts.hosts[1].runtime_dir, NAMESPACE, store._table, hosts.entries, never)
    assert other.multi_get(keys) == [key.encode() for key in keys]
    other.close()


def test_a_wait_ends_with_its_generation(make: Callable[..., AgentStore]):
    ended = threading.Event()

    def check() -> None:
        if ended.is_set():
            raise Ended

    store = make(check)
    threading.Timer(0.1, ended.set).start()
    for each in (store, dist.PrefixStore("p", store)):
        with pytest.raises(Ended):
            each.wait([key_of(store, 1)], LONG)  # else a time-out


@pytest.mark.parametrize("host", [pytest.param(0, marks=pytest.mark.full), 1])
def test_an_agent_that_was_restarted_is_named(
    hosts: TableHosts, make: Callable[..., AgentStore], host: int
):
    """And the other one serves its keys."""
    store = make()
    key = key_of(store, host)
    store.set(key, "x")
    hosts.hosts[host].restart()
    with pytest.raises(dist.DistStoreError, match=rf"host h{host}: .*(restarted|answer)"):
        store.get(key)
    other = key_of(store, 1 - host)
    store.set(other, "x")
    assert store.get(other) == b"x"


@pytest.mark.parametrize("host", [pytest.param(0, marks=pytest.mark.full), 1])
def test_a_lost_agent_is_named_and_the_end_of_the_generation_is_the_better_reason(
    hosts: TableHosts, make: Callable[..., AgentStore], once: Callable[[], None], host: int
):
    ended = threading.Event()

    def check() -> None:
        if ended.is_set():
            raise Ended

    store = make(check)
    key = key_of(store, host)
    store.set(key, "x")
    hosts.hosts[host].agent.kill()
    once()
    with pytest.raises(dist.DistStoreError, match=rf"host h{host}: .*answer"):
        store.get(key)
    ended.set()
    with pytest.raises(Ended):
        store.get(key)


def test_closing_ends_requests_to_a_host_that_does_not_answer(
    hosts: TableHosts, make: Callable[..., AgentStore]
):
    store = make()
    key = key_of(store, 1)
    store.set(key, "x")
    pid = hosts.hosts[1].agent.pid
    os.kill(pid, signal.SIGSTOP)
    eventually(lambda: state_of(pid) == "T")  # until then a thread may answer
    threading.Timer(0.2, store.close).start()
    try:
        with pytest.raises(dist.DistStoreError, match=r"host h1: .*closed"):
            store.get(key)  # a time-out has another message
    finally:
        os.kill(pid, signal.SIGCONT)


def test_a_value_that_is_too_large_is_refused(
    make: Callable[..., AgentStore], once: Callable[[], None]
):
    store = make()
    keys = [key_of(store, host) for host in (0, 1)]
    for key in keys:
        store.set(key, bytes(1_000_000))
        assert store.get(key) == bytes(1_000_000)
    once()
    for key in keys:
        with pytest.raises(dist.DistStoreError, match="limit is 1048576"):
            store.set(key, bytes(1 << 20))


# --- process groups ---------------------------------------------------------------------------


def use_groups(store: dist.Store, rank: int) -> tuple[list[int], float]:
    """What training does with a store; a gathered object and a sum of gradients."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=LONG)
    mesh = init_device_mesh("cpu", (RANKS // 2, 2), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model(torch.full((2, 8), float(rank))).sum().backward()
    gradients = sum(p.grad.full_tensor().sum().item() for p in model.parameters())
    dist.barrier(group=dist.new_group(list(range(RANKS)), backend="gloo"))
    found: list[int | None] = [None] * RANKS
    dist.all_gather_object(found, rank * 11)
    dist.barrier()
    dist.destroy_process_group()
    return [each for each in found if each is not None], gradients


def _rank(rank: int, make: Callable[[int], dist.Store], pipe: Connection) -> None:
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    pipe.recv()
    pipe.send(use_groups(make(rank), rank))


def _agents(homes: list[Path], table: str, entries: list[HostEntry], rank: int) -> dist.Store:
    return AgentStore(homes[rank % len(homes)], NAMESPACE, table, entries, never)


def _server(port: int, rank: int) -> dist.Store:
    return dist.TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False)


def run(make: Callable[[int], dist.Store], begun: Callable[[list[int]], None]) -> None:
    """Ranks that use groups. ``begun``: called with their process ids before they begin."""
    ranks = []
    for rank in range(RANKS):
        mine, theirs = context.Pipe()
        process = context.Process(target=_rank, args=(rank, make, theirs), daemon=True)
        process.start()
        theirs.close()
        ranks.append((process, mine))
    begun([process.pid or 0 for process, _ in ranks])
    for _, pipe in ranks:
        pipe.send("begin")
    replies = []
    for process, pipe in ranks:
        assert pipe.poll(60), f"rank process {process.pid} did not finish"
        replies.append(pipe.recv())
    for process, _ in ranks:
        process.join(20)
        assert process.exitcode == 0
    assert len({gradients for _, gradients in replies}) == 1
    assert [found for found, _ in replies] == [[0, 11]] * RANKS


@contextlib.contextmanager
def traced(folder: Path, pids: list[int]) -> Iterator[None]:
    """Writes each process's calls of ``listen``, of all its threads, to a file of its number."""
    with contextlib.ExitStack() as stack:
        for number, pid in enumerate(pids):
            command = ["strace", "-f", "-e", "trace=listen", "-o", str(folder / f"{number}")]
            tracer = stack.enter_context(
                subprocess.Popen([*command, "-p", str(pid)], stderr=subprocess.PIPE, text=True)
            )
            stack.callback(tracer.terminate)
            assert tracer.stderr is not None
            assert "attached" in tracer.stderr.readline()
        yield


def listens(folder: Path, make: Callable[[int], dist.Store]) -> list[int]:
    """How many sockets each rank listens on."""
    folder.mkdir()
    with contextlib.ExitStack() as stack:
        run(make, lambda pids: stack.enter_context(traced(folder, pids)))
    calls = [(folder / f"{rank}").read_text() for rank in range(RANKS)]
    return [len(re.findall(r"^\d+ +listen\(.*\) += 0$", text, re.MULTILINE)) for text in calls]


@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
def test_no_rank_listens_for_a_store(hosts: TableHosts, tmp_path: Path):
    """gloo's own sockets are the same with a TCPStore, whose first rank has one more."""
    with socket.socket() as held:
        make = functools.partial(_server, hold_port(held))
        with_server = listens(tmp_path / "server", make)
    gloo = with_server[1]
    assert with_server == [gloo + 1, gloo]
    homes = [host.runtime_dir for host in hosts.hosts]
    make = functools.partial(_agents, homes, "traced", hosts.entries)
    assert listens(tmp_path / "agents", make) == [gloo] * RANKS
