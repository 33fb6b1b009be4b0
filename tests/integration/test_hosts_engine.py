"""Engines over several hosts: opening, saving, waiting and loading, with real ranks and agents.

A host is a node name, a runtime folder and an agent of its own, all on this machine; the network is
loopback. Losing one means that its agent is killed and its folder deleted.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tests.conftest import processes_naming
from tests.support import commands
from tests.support.faults import death, eventually
from tests.support.preloaded import fork_for_dcp
from tests.support.ranks import run_ranks
from tests.support.states import config, load, save
from tieredckpt.agent.host.runtime import NODE_NAME_VARIABLE
from tieredckpt.dcp.job import checkpoints
from tieredckpt.engine import Engine
from tieredckpt.errors import AgentError, ConfigError, UsageError, WaitError
from tieredckpt.format.manifest import Manifest, decode_manifest
from tieredckpt.recovery.other_hosts import OtherHosts
from tieredckpt.storage.holdings import decode_holdings
from tieredckpt.testing.dcp.process_executor import meet_on_loopback

WAIT_S = 60.0
TIMEOUT_S = 180.0


def live_on(rank: int, folder: str, layout: tuple[str, ...]) -> Path:
    """This rank is on host ``layout[rank]`` from now on; the host's runtime folder."""
    name = layout[rank]
    local = [each for each, host in enumerate(layout) if host == name]
    os.environ.update(
        {
            NODE_NAME_VARIABLE: name,
            "LOCAL_RANK": str(local.index(rank)),
            "LOCAL_WORLD_SIZE": str(len(local)),
        }
    )
    runtime_dir = Path(folder) / name
    runtime_dir.mkdir(mode=0o700, exist_ok=True)
    return runtime_dir


def opened(rank: int, folder: str, layout: tuple[str, ...], **more: Any) -> Engine:
    return Engine.open(config(live_on(rank, folder, layout), **more))


def on_hosts(
    target: Callable[..., Any], folder: Path, layout: tuple[str, ...], *arguments: Any
) -> list[Any]:
    """``target(rank, folder, layout, *arguments)`` on each rank."""
    return run_ranks(target, len(layout), str(folder), layout, *arguments, timeout_s=TIMEOUT_S)


def lose(folder: Path, name: str) -> None:
    """The host is gone, with all that its memory held."""
    runtime_dir = folder / name
    for pid in processes_naming(runtime_dir):
        os.kill(pid, signal.SIGKILL)
    eventually(lambda: not processes_naming(runtime_dir))
    shutil.rmtree(runtime_dir)


def content(seed: int) -> torch.Tensor:
    return torch.arange(seed, seed + 240_000, dtype=torch.float64).reshape(600, 400) / 3


def sharded(seed: int | None, group: dist.ProcessGroup | None = None) -> dict[str, Any]:
    """A tensor in shards, one that all ranks have, and plain values."""
    mesh = DeviceMesh.from_group(group or dist.group.WORLD, "cpu")  # type: ignore[arg-type]
    whole = content(seed) if seed is not None else torch.zeros(600, 400, dtype=torch.float64)
    return {
        "w": distribute_tensor(whole, mesh, [Shard(0)]),
        "all": distribute_tensor(whole[:7], mesh, [Replicate()]),
        "meta": {"seed": seed if seed is not None else -1},
    }


def assert_is(state: dict[str, Any], seed: int) -> None:
    assert torch.equal(state["w"].full_tensor(), content(seed))
    assert torch.equal(state["all"].to_local(), content(seed)[:7])
    assert state["meta"] == {"seed": seed}


def manifest(engine: Engine, step: int, stream: str = "default") -> Manifest | None:
    """The manifest of a step in this host's own memory."""
    held = decode_holdings(engine._session.client.holdings())
    for fact in held.tiers[0].manifests:
        if fact.stream == stream and fact.manifest is not None:
            found = decode_manifest(fact.manifest)
            if found.step == step:
                return found
    return None


def failures_of(call: Callable[[], Any]) -> dict[int, BaseException]:
    with pytest.raises(CheckpointException) as caught:
        call()
    return {rank: failure[0] for rank, failure in caught.value.failures.items()}


# --- one host: nothing of this --------------------------------------------------------------------


def sockets_of(pid: int) -> list[str]:
    """The TCP sockets that a process listens on, as inodes that /proc/net names."""
    inodes = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = os.readlink(fd)
        except OSError:  # closed meanwhile
            continue
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    found = []
    for name in ("tcp", "tcp6"):
        table = Path(f"/proc/{pid}/net/{name}")
        for line in table.read_text().splitlines()[1:] if table.exists() else ():
            fields = line.split()
            if fields[9] in inodes and fields[3] == "0A":  # LISTEN
                found.append(fields[1])
    return found


def agent_pid(engine: Engine) -> int:
    return engine.status().health.pid


def one_host(rank: int, folder: str, layout: tuple[str, ...]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        engine = opened(rank, folder, layout)
    with engine:
        assert engine._session.peers is None
        save(engine, 1, sharded(1))
        assert sockets_of(agent_pid(engine)) == []
        (namespace,) = engine.status().namespaces
        assert namespace.peers == ()
        found = manifest(engine, 1)
        assert found is not None
        assert found.replicas == ()
        with pytest.raises(WaitError, match="no replicas") as caught:
            engine.wait(1, "replicated", 10)
        assert caught.value.reason == "not_scheduled"


def test_on_one_host_no_port_is_opened(runtime_dir: Path):
    on_hosts(one_host, runtime_dir, ("a", "a"))


# --- save, wait, load -----------------------------------------------------------------------------


def saves(rank: int, folder: str, layout: tuple[str, ...], before: int | None, step: int) -> Any:
    """Load what is there, save ``step``, wait until it is replicated.

    Returns bytes by source of the load, and how many this host's agent had pulled until then.
    """
    with opened(rank, folder, layout) as engine:
        state = sharded(None)
        assert engine.load(state) == before
        if before is not None:
            assert_is(state, before)
        replication = engine.status().namespaces[0].replication
        assert replication is not None
        refilled = replication.pulled_bytes_total
        save(engine, step, sharded(step))
        engine.wait(step, "replicated", WAIT_S)
        state = sharded(None)
        load(state, engine.reader())
        assert_is(state, step)
        assert next(each.step for each in engine.checkpoints()) == step
        assert engine.latest() is not None
        found = manifest(engine, step)
        assert found is not None
        assert sorted({ref.host for ref in found.segments}) == sorted(set(layout))
        report = engine.last_restore
        dist.barrier()
        return (report.bytes_by_source if report is not None else {}), refilled


@pytest.mark.full
def test_save_on_all_hosts_and_load_on_all(runtime_dir: Path):
    layout = ("a", "a", "b", "b")
    on_hosts(saves, runtime_dir, layout, None, 1)
    on_hosts(saves, runtime_dir, layout, 1, 2)


def test_a_replaced_host_restores_from_its_peers(runtime_dir: Path):
    """Each host in turn, that of rank 0 too: memory gone, another machine in its place."""
    on_hosts(saves, runtime_dir, ("a", "b"), None, 1)
    lose(runtime_dir, "b")
    on_a, on_c = on_hosts(saves, runtime_dir, ("a", "c"), 1, 2)
    assert set(on_a[0]) == {"memory on a"}
    assert_came_from("a", "c", *on_c)
    lose(runtime_dir, "a")
    on_d, on_c = on_hosts(saves, runtime_dir, ("d", "c"), 2, 3)
    assert_came_from("c", "d", *on_d)
    assert set(on_c[0]) == {"memory on c"}
    lose(runtime_dir, "d")
    on_c, *fresh = on_hosts(saves, runtime_dir, ("c", "e", "f"), 3, 4)
    assert set(on_c[0]) == {"memory on c"}
    for name, found in zip(("e", "f"), fresh, strict=True):
        assert_came_from("c", name, *found)


def assert_came_from(donor: str, name: str, sources: dict[str, int], refilled: int) -> None:
    """All that a fresh host loaded came from ``donor``: at once, or through its own agent, which
    may have pulled the copies that it is to keep before its ranks load.
    """
    assert set(sources) <= {f"memory on {donor}", f"memory on {name}"}
    assert sources.get(f"memory on {name}", 0) <= refilled


def alone_in_memory(
    rank: int, folder: str, layout: tuple[str, ...], before: int | None, steps: tuple[int, ...]
) -> None:
    """Each host has its own parts only."""
    with opened(rank, folder, layout, memory={"replicas": 0}) as engine:
        state = sharded(None)
        assert engine.load(state) == before
        for step in steps:
            save(engine, step, sharded(step))
        dist.barrier()


@pytest.mark.full
def test_a_new_host_asks_those_of_the_job_before(runtime_dir: Path):
    """Rank 0 is on a host that has met nobody, and what b holds is in no other memory."""
    on_hosts(alone_in_memory, runtime_dir, ("a", "b"), None, (10,))
    on_hosts(alone_in_memory, runtime_dir, ("c", "a"), 10, (20,))


def waits_for_a_mute_host(rank: int, folder: str, layout: tuple[str, ...]) -> None:
    """Rank 1 waits for what rank 0 saves, and whose agent is dead when rank 1 asks for it."""
    checkpoints.ARRIVAL_S = 0.0
    asked, ask_all = threading.Event(), OtherHosts.ask_all

    def noted(self: OtherHosts, *arguments: Any, **options: Any) -> Any:
        found = ask_all(self, *arguments, **options)
        checkpoints.ARRIVAL_S = WAIT_S  # once its agent is back, all answer and nobody has it yet
        asked.set()
        return found

    with opened(rank, folder, layout) as engine, ThreadPoolExecutor(1) as threads:
        alone = dist.new_group([0])
        with pytest.raises(WaitError, match=r"no step 1 in stream 'alone'$"):
            engine.wait(1, "memory", WAIT_S, stream="alone")
        dist.barrier()
        if rank == 0:
            os.kill(agent_pid(engine), signal.SIGKILL)
        dist.barrier()
        if rank == 1:
            with pytest.raises(WaitError, match=r"hosts that may know of it do not answer \(a:"):
                engine.wait(1, "memory", 1, stream="alone")
            OtherHosts.ask_all = noted  # type: ignore[method-assign]
            waiting = threads.submit(engine.wait, 1, "memory", WAIT_S, stream="alone")
            assert asked.wait(WAIT_S)
        dist.barrier()
        if rank == 0:
            save(engine, 1, sharded(1, alone), stream="alone", process_group=alone)
        else:
            waiting.result(WAIT_S)


@pytest.mark.full
def test_a_wait_ends_before_its_time_only_if_all_hosts_answer(runtime_dir: Path):
    on_hosts(waits_for_a_mute_host, runtime_dir, ("a", "b"))


def the_rest(rank: int, folder: str, layout: tuple[str, ...], step: int) -> None:
    with opened(rank, folder, layout) as engine:
        state = sharded(None)
        assert engine.load(state) == step
        assert_is(state, step)
        save(engine, step + 1, sharded(step + 1))


def test_one_host_is_left(runtime_dir: Path):
    """The only host of the new job asks one that is not in it, by the token that it kept."""
    on_hosts(saves, runtime_dir, ("a", "b"), None, 1)
    on_hosts(the_rest, runtime_dir, ("b",), 1)


# --- several saves at once ------------------------------------------------------------------------


def in_groups(rank: int, folder: str, layout: tuple[str, ...]) -> None:
    """Ranks 0 and 1 on hosts a and b, 2 and 3 on b and c: neither coordinator knows the other."""
    with opened(rank, folder, layout, save={"ack": "replicated"}) as engine:
        groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        mine = groups[rank // 2]
        stream = f"part{rank // 2}"
        for step in range(3):
            save(engine, step, sharded(step, mine), stream=stream, process_group=mine)
        engine.wait(2, "replicated", WAIT_S, stream=stream)
        dist.barrier()
        state = sharded(None, mine)
        assert engine.load(state, stream=stream, process_group=mine) == 2
        assert_is(state, 2)
        save(engine, 3, sharded(3, mine), stream=stream, process_group=mine)
        found = manifest(engine, 3, stream)
        if rank % 2 == 0:
            assert found is not None
            hosts = {layout[each] for each in dist.get_process_group_ranks(mine)}
            assert {each.host for each in found.replicas} == hosts
        dist.barrier()


@pytest.mark.full
def test_sub_groups_over_several_hosts(runtime_dir: Path):
    on_hosts(in_groups, runtime_dir, ("a", "b", "b", "c"))


def in_background(rank: int, folder: str, layout: tuple[str, ...], executor: str) -> None:
    """Each save is done when it is replicated: the wait is in the background, too."""
    fork_for_dcp()
    meet_on_loopback()
    with opened(rank, folder, layout, save={"ack": "replicated"}) as engine:
        for step in range(1, 4):
            state = sharded(step)
            future = engine.async_save(state, step, executor=executor)  # type: ignore[arg-type]
            with torch.no_grad():
                state["w"].to_local().fill_(-1.0)
            future.result(WAIT_S)
            engine.wait(step, "replicated", 0 if rank == 0 else WAIT_S)
        found = manifest(engine, 3)
        assert found is not None
        assert {each.host for each in found.replicas} == set(layout)
        state = sharded(None)
        load(state, engine.reader(3))
        assert_is(state, 3)


@pytest.mark.full
@pytest.mark.parametrize("executor", ["thread", "process"])
def test_async_save_over_several_hosts(runtime_dir: Path, executor: str):
    on_hosts(in_background, runtime_dir, ("a", "b"), executor)


class Caching(DefaultSavePlanner):
    """DCP's plan cache is by class name, and process-wide."""

    def __init__(self) -> None:
        super().__init__(enable_plan_caching=True)


def with_cached_plans(rank: int, folder: str, layout: tuple[str, ...]) -> None:
    """The coordinator does not see plans that DCP cached: it reads the others' segments."""
    with opened(rank, folder, layout) as engine:
        for step in range(1, 5):
            save(engine, step, sharded(step), planner=Caching())
            state = sharded(None)
            load(state, engine.reader(step))
            assert_is(state, step)
            if step == 2:  # and the coordinator forgets what it has read
                engine._session.plans.clear()
        dist.barrier()


def test_plan_caching_over_several_hosts(runtime_dir: Path):
    on_hosts(with_cached_plans, runtime_dir, ("a", "b"))


def agents_die(rank: int, folder: str, layout: tuple[str, ...]) -> None:
    """An agent that starts anew is reached by the others as before, without another open."""
    with opened(rank, folder, layout) as engine:
        save(engine, 1, sharded(1))
        for step, host in ((2, "b"), (3, "a")):  # a's is the leader
            dist.barrier()
            if layout[rank] == host:
                pid = agent_pid(engine)
                os.kill(pid, signal.SIGKILL)
                eventually(lambda pid=pid: not Path(f"/proc/{pid}/cmdline").exists() or  # type: ignore[misc]
                           not Path(f"/proc/{pid}/cmdline").read_bytes())  # fmt: skip
            dist.barrier()
            save(engine, step, sharded(step))
            engine.wait(step, "replicated", WAIT_S)
        state = sharded(None)
        load(state, engine.reader(3))
        assert_is(state, 3)
        dist.barrier()


def test_agents_that_die_between_saves(runtime_dir: Path):
    on_hosts(agents_die, runtime_dir, ("a", "b"))


def loaded_after_an_agent_died(rank: int, folder: str, layout: tuple[str, ...]) -> None:
    """The load is the first request to the new agent of another host than the coordinator's."""
    disk = {"name": "disk", "url": f"file://{folder}/disk-{layout[rank]}", "scope": "host"}
    more = {"tiers": [disk], "memory": {"replicas": 0}, "recovery": {"wait": "5s"}}
    with opened(rank, folder, layout, **more) as engine:
        for step in (1, 2):
            save(engine, step, sharded(step))
            engine.wait(step, "disk", WAIT_S)
        dist.barrier()
        if layout[rank] == "b":
            with death(pid := agent_pid(engine)):
                os.kill(pid, signal.SIGKILL)
            for lost in ("ns", "peers", "sessions", "slots", "specs"):
                shutil.rmtree(Path(folder) / "b" / lost)
        dist.barrier()
        state = sharded(None)
        assert engine.load(state) == 2
        assert_is(state, 2)
        dist.barrier()


@pytest.mark.full
def test_a_load_revives_the_agents_of_all_hosts(runtime_dir: Path):
    on_hosts(loaded_after_an_agent_died, runtime_dir, ("a", "b"))


# --- acknowledged when replicated -----------------------------------------------------------------


def acknowledged(rank: int, folder: str, layout: tuple[str, ...]) -> None:
    with opened(rank, folder, layout, save={"ack": "replicated"}) as engine:
        save(engine, 1, sharded(1))
        if rank == 0:
            found = manifest(engine, 1)
            assert found is not None
            progress = engine._session.client.progress(found.save_id)
            assert progress.levels["replicated"] == "done"
            report = engine.last_save
            assert report is not None
            assert (report.save_id, report.skipped) == (found.save_id, None)
            assert report.not_replicated is None
        dist.barrier()


def test_a_save_waits_for_its_replicas(runtime_dir: Path):
    on_hosts(acknowledged, runtime_dir, ("a", "b"))


def not_acknowledged(rank: int, folder: str, layout: tuple[str, ...], on_error: str) -> None:
    """The agent of the other host stands still: the checkpoint exists, its copies do not."""
    save_config = {"ack": "replicated", "on_error": on_error, "timeout": "60s"}
    with opened(rank, folder, layout, save=save_config) as engine:
        save(engine, 1, sharded(1))
        pid = agent_pid(engine)
        session = engine._session
        dist.barrier()
        msgspec.structs.force_setattr(session.config.save, "timeout_s", 3.0)
        step = 2
        # Rank 1 has sealed its part before its agent stops: see the planner's hook below.
        state = sharded(step)
        if rank == 1:
            original = session.client.seal

            def seal_then_stop(*args: Any) -> Any:
                sealed = original(*args)
                os.kill(pid, signal.SIGSTOP)
                return sealed

            session.client.seal = seal_then_stop  # type: ignore[method-assign]
        try:
            if on_error == "raise":
                found = failures_of(lambda: save(engine, step, state))
                assert isinstance(found[0], WaitError)
                assert found[0].reason == "timeout"
                assert "committed in memory" in str(found[0])
            else:
                save(engine, step, state)
        finally:
            dist.barrier()
            if rank == 1:
                os.kill(pid, signal.SIGCONT)
        if rank == 0:
            report = engine.last_save
            assert report is not None
            assert report.skipped is None
            assert report.save_id is not None
            assert engine.skipped_saves == 0
            if on_error == "skip":
                assert "has not reached 'replicated'" in (report.not_replicated or "")
        # It was never lost: when the other host is back it gets there by itself.
        engine.wait(step, "replicated", WAIT_S)


@pytest.mark.parametrize("on_error", [pytest.param("raise", marks=pytest.mark.full), "skip"])
def test_a_save_that_is_not_replicated_in_time(runtime_dir: Path, on_error: str):
    on_hosts(not_acknowledged, runtime_dir, ("a", "b"), on_error)


# --- opening --------------------------------------------------------------------------------------


def too_few(rank: int, folder: str, layout: tuple[str, ...], replicas: int) -> list[str]:
    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("tieredckpt.dcp.open").addHandler(handler)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine = opened(rank, folder, layout, memory={"replicas": replicas})
    with engine:
        dist.barrier()
        (namespace,) = engine.status().namespaces
        assert namespace.replication is not None
        assert namespace.replication.replicas == replicas
        assert namespace.replication.possible == replicas - 1
        said = [str(each.message) for each in caught if "replicas" in str(each.message)]
        assert said == lines
        save(engine, 1, sharded(1))
        return lines


def test_one_warning_if_there_are_too_few_hosts(runtime_dir: Path):
    first, *others = on_hosts(too_few, runtime_dir, ("a", "b"), 2)
    assert len(first) == 1
    assert "1/2 replicas" in first[0]
    assert not any(others)


def refused(rank: int, folder: str, layout: tuple[str, ...], more: dict[str, Any]) -> list[str]:
    with pytest.raises((ConfigError, UsageError, AgentError)) as caught:
        opened(rank, folder, layout, **more)
    dist.barrier()
    return [type(caught.value).__name__, str(caught.value)]


def cannot_listen(rank: int, folder: str, layout: tuple[str, ...]) -> list[str]:
    network = {"interface": "no-such-if0"} if rank == 1 else {}
    return refused(rank, folder, layout, {"network": network})


def test_all_ranks_raise_if_one_agent_cannot_listen(runtime_dir: Path):
    found = on_hosts(cannot_listen, runtime_dir, ("a", "b", "b"))
    assert len({text.split("\n")[0] for _, text in found}) == 1
    assert all("no-such-if0" in text for _, text in found)


def with_token(rank: int, folder: str, layout: tuple[str, ...], tokens: list[str]) -> list[str]:
    os.environ["TCK_TEST_TOKEN"] = tokens[rank]
    return refused(rank, folder, layout, {"security": {"token_env": "TCK_TEST_TOKEN"}})


@pytest.mark.full
def test_hosts_must_be_given_the_same_token(runtime_dir: Path):
    """All ranks raise, and no message has the token."""
    tokens = ["0" * 32, "f" * 32]
    for name, text in on_hosts(with_token, runtime_dir, ("a", "b"), tokens):
        assert name == "ConfigError"
        assert "security" in text
        assert not any(token in text for token in tokens)


def forgetful(rank: int, folder: str, layout: tuple[str, ...]) -> None:
    """A new host's first rank saves without a load: the other hosts hold checkpoints."""
    with opened(rank, folder, layout) as engine:
        found = failures_of(lambda: save(engine, 5, sharded(5)))
        assert isinstance(found[0], UsageError)
        assert "engine.load" in str(found[0])


@pytest.mark.full
def test_a_save_before_the_load_is_refused(runtime_dir: Path):
    on_hosts(saves, runtime_dir, ("a", "b"), None, 1)
    lose(runtime_dir, "a")
    on_hosts(forgetful, runtime_dir, ("c", "b"))


# --- the command line, and the token --------------------------------------------------------------


@pytest.mark.full
def test_the_command_line_shows_the_other_hosts(runtime_dir: Path):
    on_hosts(saves, runtime_dir, ("a", "b", "c"), None, 7)

    def tieredckpt(host: str, *arguments: str) -> str:
        done = commands.tieredckpt(*arguments, "--runtime-dir", str(runtime_dir / host))
        assert done.returncode == 0, done.stderr
        return done.stdout

    def answer(host: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(tieredckpt(host, "peers", "--json"))
        return found

    eventually(lambda: all(each["reachable"] and each["rtt_s"] for each in answer("b")["peers"]))
    found = answer("b")
    assert (found["leader"], found["host"]["host_id"]) == ("a", "b")
    assert [each["host"]["host_id"] for each in found["peers"]] == ["a", "c"]
    assert all(each["member"] and each["rtt_s"] > 0 for each in found["peers"])
    status = json.loads(tieredckpt("b", "status", "--json"))
    (namespace,) = status["namespaces"]
    assert namespace["replication"]["newest_replicated_step"] == 7
    assert namespace["replication"]["lag_steps"] == 0
    assert "1/1" in tieredckpt("b", "status")
    lose(runtime_dir, "c")
    lines = tieredckpt("a", "peers").splitlines()
    assert [line.split()[0] for line in lines[2:]] == ["a", "b", "c"]


def secretive(rank: int, folder: str, layout: tuple[str, ...]) -> str:
    lines: list[str] = []
    handler = logging.Handler(logging.DEBUG)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    root = logging.getLogger()
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    with opened(rank, folder, layout) as engine:
        peers = engine._session.peers
        assert peers is not None
        assert len(peers.token) == 64
        shown = [repr(engine._session), repr(peers), str(engine.status()), *lines]
        assert not any(peers.token in text for text in shown)
        dist.barrier()
        return peers.token


@pytest.mark.full
def test_the_token_is_never_shown_and_stays_that_of_the_namespace(runtime_dir: Path):
    tokens = set(on_hosts(secretive, runtime_dir, ("a", "b")))
    assert len(tokens) == 1
    tokens.update(on_hosts(secretive, runtime_dir, ("c", "b")))
    assert len(tokens) == 1
    for path in runtime_dir.rglob("*.log*"):
        assert not any(token in path.read_text() for token in tokens)
