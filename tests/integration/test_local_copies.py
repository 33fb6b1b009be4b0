"""``memory.copies: local``: hosts keep what their own ranks have too, without fetching it.

Real ranks and agents. A host is a node name, a runtime folder and an agent of its own.
"""

from __future__ import annotations

import operator
import os
import signal
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import tieredckpt
from tests.conftest import processes_naming
from tests.support.faults import eventually
from tests.support.ranks import run_ranks
from tests.support.states import config, load, raw, same, save
from tieredckpt.agent.host.runtime import NODE_NAME_VARIABLE
from tieredckpt.engine import Engine
from tieredckpt.format.manifest import Manifest, decode_manifest
from tieredckpt.storage.holdings import decode_holdings

WAIT_S = 60.0
TIMEOUT_S = 180.0


def value(seed: int, rows: int) -> torch.Tensor:
    return torch.arange(rows * 1000, dtype=torch.float32).reshape(rows, 1000) * 0.5 + seed


def replicated(seed: int, **more: Any) -> dict[str, Any]:
    """What DDP has: all ranks the same."""
    model = {f"layer{i}": value(seed + i, 100 + 37 * i) for i in range(8)}
    return {"model": model, "meta": {"seed": seed}, **more}


def on_hosts(target: Any, folder: Path, layout: tuple[str, ...], *arguments: Any) -> list[Any]:
    """``target(rank, folder, layout, *arguments)`` on each rank."""
    return run_ranks(target, len(layout), str(folder), layout, *arguments, timeout_s=TIMEOUT_S)


def open_local(rank: int, folder: str, layout: tuple[str, ...], **more: Any) -> Engine:
    """This rank's engine; it lives on host ``layout[rank]`` from now on."""
    name = layout[rank]
    local = [each for each, host in enumerate(layout) if host == name]
    os.environ[NODE_NAME_VARIABLE] = name
    os.environ["LOCAL_RANK"] = str(local.index(rank))
    os.environ["LOCAL_WORLD_SIZE"] = str(len(local))
    runtime_dir = Path(folder) / name
    runtime_dir.mkdir(mode=0o700, exist_ok=True)
    memory = {"copies": "local", "capacity": "256MiB", **more.pop("memory", {})}
    return Engine.open(config(runtime_dir, memory=memory, **more))


def manifest(engine: Engine, step: int) -> Manifest | None:
    """The manifest of a step in this host's own memory."""
    held = decode_holdings(engine._session.client.holdings())
    for fact in held.tiers[0].manifests:
        if fact.manifest is not None:
            found = decode_manifest(fact.manifest)
            if found.step == step:
                return found
    return None


def segments_here(engine: Engine, step: int) -> tuple[set[str], set[str]]:
    """Segments of a step that this host's memory has whole, and all of that checkpoint."""
    found = manifest(engine, step)
    assert found is not None
    held = decode_holdings(engine._session.client.holdings())
    memory = next(each for each in held.tiers if each.tier == "memory")
    here = {each.id for each in memory.segments if each.error is None}
    return here & {ref.id for ref in found.segments}, {ref.id for ref in found.segments}


def pulled(engine: Engine) -> int:
    (namespace,) = engine.status().namespaces
    assert namespace.replication is not None
    return namespace.replication.pulled_bytes_total


def saves(rank: int, folder: str, layout: tuple[str, ...], steps: int, **more: Any) -> int:
    """Save some steps of a replicated state; bytes that this host has pulled."""
    with open_local(rank, folder, layout, **more) as engine:
        for step in range(1, steps + 1):
            save(engine, step, replicated(step))
            engine.wait(step, "replicated", WAIT_S)
            here, all_of_it = segments_here(engine, step)
            assert here == all_of_it, f"step {step}"
            dist.barrier()
        return pulled(engine)


@pytest.mark.parametrize(
    "layout", [("a", "b"), pytest.param(("a", "a", "b", "b"), marks=pytest.mark.full)]
)
def test_replicated_state_is_on_every_host_and_nothing_is_sent(
    runtime_dir: Path, layout: tuple[str, ...]
):
    steps = 3
    assert on_hosts(saves, runtime_dir, layout, steps) == [0] * len(layout)
    # Each host alone has all of it, whatever became of the others.
    for host in set(layout):
        for other in set(layout) - {host}:
            kill_agent(runtime_dir / other)
        assert on_hosts(restored_alone, runtime_dir, (host,), steps) == [{f"memory on {host}"}]


def kill_agent(runtime_dir: Path) -> None:
    for pid in processes_naming(runtime_dir):
        os.kill(pid, signal.SIGKILL)
    eventually(lambda: not processes_naming(runtime_dir))


def agent_pids(runtime_dir: Path) -> list[int]:
    eventually(lambda: len(processes_naming(runtime_dir)) == 1)
    return processes_naming(runtime_dir)


def restored_alone(rank: int, folder: str, layout: tuple[str, ...], step: int) -> set[str]:
    with open_local(rank, folder, layout) as engine:
        state = replicated(0)
        assert engine.load(state) == step
        assert same(state, replicated(step))
        assert engine.last_restore is not None
        return set(engine.last_restore.bytes_by_source)


# --- HSDP -----------------------------------------------------------------------------------------

ROWS = 1536
HSDP = ("a", "a", "b", "b")


def hsdp_state(rank: int, layout: tuple[str, ...], seed: int) -> dict[str, Any]:
    """Shards inside of a host, the same ones on each host; and what only this rank has."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(*(torch.nn.Linear(ROWS, ROWS, bias=False) for _ in range(4)))
    hosts = len(set(layout))
    mesh = init_device_mesh(
        "cpu", (hosts, len(layout) // hosts), mesh_dim_names=("replicate", "shard")
    )
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    own = tieredckpt.per_rank(Own(seed * 100 + rank))
    return {"model": model.state_dict(), "own": own, "plain": value(seed, 11)}


class Own:
    """Random state, say."""

    def __init__(self, what: int) -> None:
        self.what = what

    def state_dict(self) -> dict[str, Any]:
        return {"what": self.what, "padding": torch.full((1000,), float(self.what))}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.what = state["what"]


def hsdp_saves(rank: int, folder: str, layout: tuple[str, ...]) -> tuple[int, int]:
    with open_local(rank, folder, layout) as engine:
        for step in (1, 2, 3):
            save(engine, step, hsdp_state(rank, layout, step))
            engine.wait(step, "replicated", WAIT_S)
            here, all_of_it = segments_here(engine, step)
            assert here == all_of_it
            dist.barrier()
        found = manifest(engine, 3)
        assert found is not None
        theirs = sum(ref.size for ref in found.segments if ref.host != layout[rank])
        return pulled(engine), 3 * theirs


def hsdp_loads(rank: int, folder: str, layout: tuple[str, ...]) -> set[str]:
    with open_local(rank, folder, layout) as engine:
        state = hsdp_state(rank, layout, 9)
        assert engine.load(state) == 3
        wanted = hsdp_state(rank, layout, 3)
        for key, tensor in wanted["model"].items():
            assert torch.equal(state["model"][key].to_local(), tensor.to_local()), key
        assert same(state["plain"], wanted["plain"])
        assert state["own"].obj.what == 300 + rank
        assert engine.last_restore is not None
        return set(engine.last_restore.bytes_by_source)


@pytest.mark.full
def test_hsdp_sends_what_only_one_rank_has(runtime_dir: Path):
    """Each rank's own values are at the end of its segment: only their blocks are fetched."""
    for fetched, theirs in on_hosts(hsdp_saves, runtime_dir, HSDP):
        assert 0 < fetched < theirs // 4
    sources = on_hosts(hsdp_loads, runtime_dir, HSDP)
    assert sources == [{f"memory on {host}"} for host in HSDP]


# --- beyond the holders ---------------------------------------------------------------------------


def unreplicated(rank: int, folder: str, layout: tuple[str, ...]) -> int:
    """Pulled bytes, once this host has all segments."""
    with open_local(rank, folder, layout, memory={"replicas": 0}) as engine:
        save(engine, 1, replicated(1))
        eventually(lambda: operator.eq(*segments_here(engine, 1)), deadline_s=WAIT_S)
        dist.barrier()
        return pulled(engine)


@pytest.mark.full
def test_without_replicas_hosts_have_what_is_equal(runtime_dir: Path):
    assert on_hosts(unreplicated, runtime_dir, ("a", "b")) == [0] * 2
    (pid,) = agent_pids(runtime_dir / "a")
    os.kill(pid, signal.SIGSTOP)  # it does not answer, and its port takes connections
    try:
        assert on_hosts(restored_alone, runtime_dir, ("b",), 1) == [{"memory on b"}]
    finally:
        os.kill(pid, signal.SIGKILL)


# --- what is not equal ----------------------------------------------------------------------------


def diverged(rank: int, folder: str, layout: tuple[str, ...]) -> tuple[int, list[str]]:
    with open_local(rank, folder, layout) as engine, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for step in (1, 2):
            state = replicated(step)
            if layout[rank] == "b":
                state["model"]["layer2"][5, 5] += 1
                state["model"]["layer3"][0, 0] += 1
            save(engine, step, state)
            engine.wait(step, "replicated", WAIT_S)
            here, all_of_it = segments_here(engine, step)
            assert here == all_of_it
            dist.barrier()
        return pulled(engine), [
            str(each.message) for each in said if "diverged" in str(each.message)
        ]


def read_alone(rank: int, folder: str, layout: tuple[str, ...]) -> dict[str, bytes]:
    with open_local(rank, folder, layout) as engine:
        state = replicated(0)
        assert engine.load(state) == 2
        return {key: raw(tensor) for key, tensor in state["model"].items()}


def test_replicas_that_diverged_are_noticed_and_copied(runtime_dir: Path):
    found = on_hosts(diverged, runtime_dir, ("a", "b"))
    assert sum(fetched for fetched, _ in found) > 0
    assert [len(texts) for _, texts in found] == [1, 0]
    restored = []
    for host, other in (("a", "b"), ("b", "a")):
        kill_agent(runtime_dir / other)
        restored += on_hosts(read_alone, runtime_dir, (host,))
    assert restored[0] == restored[1]


# --- planning -------------------------------------------------------------------------------------


def cached_plans(rank: int, folder: str, layout: tuple[str, ...]) -> tuple[list[int], bool]:
    with open_local(rank, folder, layout) as engine:
        fetched = []
        for step in range(1, 8):
            state = replicated(step)
            if step >= 4:  # on all ranks
                state["model"]["more"] = value(step, 50)
            if step >= 6 and rank == 1:  # on this one alone
                state["model"]["single"] = value(step, 60)
            planner = DefaultSavePlanner(enable_plan_caching=True)
            dcp.save(state, storage_writer=engine.writer(step), planner=planner)
            engine.wait(step, "replicated", WAIT_S)
            fetched.append(pulled(engine))
            dist.barrier()
        state = replicated(0, more=0)
        state["model"] |= {"more": value(0, 50), "single": value(0, 60)}
        del state["more"]
        load(state, engine.reader())
        wanted = replicated(7)
        wanted["model"] |= {"more": value(7, 50), "single": value(7, 60)}
        dist.barrier()
        return fetched, same(state, wanted)


@pytest.mark.full
def test_cached_plans_keep_their_drafts(runtime_dir: Path):
    (first, first_right), (second, second_right) = on_hosts(cached_plans, runtime_dir, ("a", "b"))
    assert first[:5] == second[:5] == [0] * 5
    assert first_right
    assert second_right


def asynchronous(rank: int, folder: str, layout: tuple[str, ...]) -> int:
    with open_local(rank, folder, layout) as engine:
        for step in (1, 2, 3, 4):
            state = replicated(step)
            future = engine.async_save(state, step)
            for tensor in state["model"].values():
                tensor.fill_(-1)
            future.result(WAIT_S)
            engine.wait(step, "replicated", WAIT_S)
            here, all_of_it = segments_here(engine, step)
            assert here == all_of_it, f"step {step}"
        save(engine, 5, replicated(5))
        engine.wait(5, "replicated", WAIT_S)
        here, all_of_it = segments_here(engine, 5)
        assert here == all_of_it
        dist.barrier()
        return pulled(engine)


@pytest.mark.full
def test_saves_in_the_background_write_copies_too(runtime_dir: Path):
    """What is copied is of the call; what is staged for copies stays in memory of its own."""
    assert on_hosts(asynchronous, runtime_dir, ("a", "a", "b", "b")) == [0] * 4
    kill_agent(runtime_dir / "a")
    assert on_hosts(restored_alone, runtime_dir, ("b",), 5) == [{"memory on b"}]


# --- faults ---------------------------------------------------------------------------------------


def agent_dies(rank: int, folder: str, layout: tuple[str, ...]) -> int:
    if layout[rank] == "b":
        os.environ["TIEREDCKPT_FAILPOINTS"] = "agent.draft.before_seal=kill@2"
    with open_local(rank, folder, layout) as engine:
        os.environ.pop("TIEREDCKPT_FAILPOINTS", None)  # the agent that is started next lives
        pid = engine.status().health.pid
        for step in (1, 2, 3):
            save(engine, step, replicated(step))
            engine.wait(step, "replicated", WAIT_S)
            here, all_of_it = segments_here(engine, step)
            assert here == all_of_it
            dist.barrier()
        assert (engine.status().health.pid != pid) == (layout[rank] == "b")
        return pulled(engine)


@pytest.mark.full
def test_an_agent_that_dies_while_a_draft_becomes_a_copy(runtime_dir: Path):
    fetched = on_hosts(agent_dies, runtime_dir, ("a", "b"))
    assert fetched[0] == 0
    assert fetched[1] < 1 << 20  # the footer: what the slot held is what was to be in it
    kill_agent(runtime_dir / "a")
    assert on_hosts(restored_alone, runtime_dir, ("b",), 3) == [{"memory on b"}]
