"""engine.load and dcp.load of a checkpoint that other hosts hold: real agents, each as a host."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.agent import AgentProcess, wait_until
from tests.support.states import blank, config, flip, load, manifest_of, same, save, slot_of
from tieredckpt.engine import Engine
from tieredckpt.errors import NoRecoverableCheckpointError
from tieredckpt.rpc.messages import agent as m
from tieredckpt.storage.holdings import decode_holdings

DEADLINE_S = 60.0


def state_of(seed: int = 0) -> dict[str, Any]:
    """More than one block, with views, small pieces and bytes."""
    made = torch.Generator().manual_seed(seed)
    return {
        "model": {
            "big": torch.randn(1500, 1000, generator=made),
            "strided": torch.randn(300, 70, generator=made).t(),
            **{f"small{n}": torch.randn(n, generator=made) for n in range(1, 9)},
        },
        "step": seed,
    }


class Hosts:
    """Agents that serve each other, and an engine on each; closed at the end."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder = folder
        self.token = secrets.token_hex(32)
        self.agents: dict[str, AgentProcess] = {}
        self.engines: dict[str, Engine] = {}
        self._stack = stack

    def add(self, name: str, **changes: Any) -> Engine:
        folder = self.folder / name
        folder.mkdir(mode=0o700)
        agent = AgentProcess(folder, env={"TIEREDCKPT_NODE_NAME": name})
        self.agents[name] = agent
        self._stack.callback(lambda: agent.kill() if agent._process.poll() is None else None)
        engine = Engine.open(config(folder, **changes))
        self.engines[name] = engine
        self._stack.callback(engine.close)
        assert engine.host_id == name
        return engine

    def gather(self, *names: str, leader: str) -> None:
        """What Engine.open does on several hosts: these are the members of the job now."""
        run = secrets.token_hex(16)
        entries = []
        for number, name in enumerate(self.agents):
            if name in names:
                client = self.engines[name]._session.client
                entries.append(
                    client.call(
                        m.Listen(
                            session_id=client.session_id, token=self.token, tls=None,
                            interfaces=(), cidrs=(f"127.0.{number + 1}.1/32",), port=0, labels={},
                        )
                    ).host
                )  # fmt: skip
        for name in names:
            client = self.engines[name]._session.client
            client.call(
                m.SetPeers(
                    session_id=client.session_id, run=run, leader=leader, hosts=tuple(entries)
                )
            )
            self.engines[name]._session.peers = client.peers()

    def kill(self, name: str) -> None:
        self.agents[name].kill()


@pytest.fixture
def hosts(runtime_dir: Path) -> Iterator[Hosts]:
    with ExitStack() as stack:
        yield Hosts(runtime_dir, stack)


@pytest.fixture
def pair(hosts: Hosts) -> Hosts:
    """Host a has saved steps 1 and 2; host b is new."""
    a = hosts.add("a")
    hosts.add("b")
    hosts.gather("a", "b", leader="a")
    a.load({"nothing": 0})
    save(a, 1, state_of(1))
    save(a, 2, state_of(2))
    return hosts


def test_a_host_without_a_copy_loads_from_another_ones_memory(pair: Hosts):
    b = pair.engines["b"]
    found = b.checkpoints()
    assert [(info.step, info.tiers) for info in found] == [(2, ("memory",)), (1, ("memory",))]
    back = blank(state_of(1))
    load(back, b.reader(step=1))
    assert same(back, state_of(1))
    back = blank(state_of(2))
    assert b.load(back) == 2
    assert same(back, state_of(2))
    report = b.last_restore
    assert report is not None
    assert report.bytes_by_source.keys() == {"memory on a"}
    assert report.bytes_by_source["memory on a"] == report.bytes_by_tier["memory"]
    ((segment, places),) = report.segments
    assert len(segment) == 32
    assert places == report.bytes_by_source
    assert report.repaired_blocks == 0
    pair.kill("a")
    with pytest.raises(NoRecoverableCheckpointError) as caught:
        b.load(blank(state_of(2)))
    assert "not asked: host a" in str(caught.value)


def test_that_it_was_restored_is_told_to_all(pair: Hosts):
    """Or the leader would not have its copies made again."""
    b = pair.engines["b"]
    b.load(blank(state_of(2)))
    assert not list(pair.folder.glob("*/ns/*/records/*/*"))
    save(b, 3, state_of(3))  # from here on it counts
    wait_until(lambda: list(pair.folder.glob("a/ns/*/records/*/*")), deadline_s=DEADLINE_S)


def test_a_checkpoint_that_is_marked_bad_is_passed_over(pair: Hosts):
    a, b = (pair.engines[name] for name in "ab")
    newest = a.checkpoints()[0]
    a._session.client.call(
        m.AddRecord(stream="default", save_id=newest.save_id, kind="bad", text="it is all NaN")
    )
    back = blank(state_of(1))
    assert b.load(back) == 1
    assert same(back, state_of(1))
    assert b.last_restore is not None
    ((_, step, reason),) = b.last_restore.refused
    assert step == 2
    assert reason == "marked bad by a: it is all NaN"


def test_damage_on_the_other_host_is_found_told_to_it_and_not_loaded(pair: Hosts):
    a, b = (pair.engines[name] for name in "ab")
    flip(slot_of(pair.folder / "a", manifest_of(a, 2).segments[0].id), 1000)
    back = blank(state_of(1))
    assert b.load(back) == 1
    assert same(back, state_of(1))
    held = decode_holdings(a._session.client.holdings())
    assert sum(len(fact.bad_blocks) for fact in held.tiers[0].segments) == 1


@pytest.mark.full
def test_who_only_reads_has_the_other_hosts_and_tells_them_nothing(pair: Hosts):
    a = pair.engines["a"]
    settings = config(pair.folder / "b")
    with Engine.open(settings, read_only=True) as reader:
        assert reader.host_id == "b"
        assert [info.step for info in reader.checkpoints()] == [2, 1]
        for step in (2, 1):
            back = blank(state_of(step))
            assert reader.load(back, step=step) == step
            assert same(back, state_of(step))
            assert reader.last_restore is not None
            assert reader.last_restore.bytes_by_source.keys() == {"memory on a"}
        flip(slot_of(pair.folder / "a", manifest_of(a, 2).segments[0].id), 1000)
        assert reader.load(blank(state_of(1))) == 1
    held = decode_holdings(a._session.client.holdings())
    assert sum(len(fact.bad_blocks) for fact in held.tiers[0].segments) == 0
    assert list(pair.folder.glob("*/ns/*/records/*/*")) == []
    assert len({path.name for path in pair.folder.glob("*/ns/*/attempts/*")}) == 1
    save(a, 3, state_of(3))
    pair.kill("a")
    with Engine.open(settings, read_only=True) as reader:
        with pytest.raises(NoRecoverableCheckpointError) as caught:
            reader.load(blank(state_of(2)))
        assert "not asked: host a" in str(caught.value)
