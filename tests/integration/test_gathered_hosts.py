"""``dcp.save(use_collectives=False)`` over several hosts: one checkpoint of all ranks, or none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from tests.integration.test_hosts_engine import WAIT_S, content, manifest, on_hosts, opened
from tests.support.agent import FakeTrainer, join_run, wait_until
from tests.support.peers import Job, line_to
from tests.support.states import load
from tests.support.states import save as save_state
from tieredckpt.engine import Engine
from tieredckpt.errors import UsageError
from tieredckpt.format.manifest import encode_manifest
from tieredckpt.format.plan import encode_plan
from tieredckpt.rpc.messages import agent as m
from tieredckpt.rpc.messages.no_collectives import HandOver

FOUR = ("a", "a", "b", "b")


def state_of(step: int | None) -> dict[str, Any]:
    """A tensor in shards, and one of this rank alone."""
    rank = dist.get_rank()
    mesh = DeviceMesh.from_group(dist.group.WORLD, "cpu")  # type: ignore[arg-type]
    whole = content(step) if step is not None else torch.zeros(600, 400, dtype=torch.float64)
    own = torch.full((1000,), -1 if step is None else step * 10 + rank)
    return {"w": distribute_tensor(whole, mesh, [Shard(0)]), f"own{rank}": own}


def assert_is(state: dict[str, Any], step: int) -> None:
    rank = dist.get_rank()
    assert torch.equal(state["w"].full_tensor(), content(step))
    assert torch.equal(state[f"own{rank}"], torch.full((1000,), step * 10 + rank))


def put(engine: Engine, step: int) -> None:
    save_state(engine, step, state_of(step), use_collectives=False)


def together(rank: int, folder: str, layout: tuple[str, ...]) -> None:
    with opened(rank, folder, layout, save={"ack": "replicated"}) as engine:
        engine.load({})
        for step in (1, 2):
            put(engine, step)
            report = engine.last_save
            assert report is not None
            assert (report.skipped, report.not_replicated) == (None, None)
            known: list[Any] = [None] * len(layout)
            dist.all_gather_object(known, report.save_id)
            assert len(set(known)) == 1
            assert known[0] is not None
            found = manifest(engine, step)
            assert found is not None
            assert [ref.host for ref in found.segments] == list(layout)
            assert found.save_id == report.save_id
            assert {each.host for each in found.replicas} == set(layout)
        state = state_of(None)
        load(state, engine.reader(2))
        assert_is(state, 2)
        save_state(engine, 4, state_of(4))
        put(engine, 5)
        dist.barrier()
        if rank == 0:
            found, before = manifest(engine, 5), manifest(engine, 4)
            assert found is not None
            assert before is not None
            assert found.parent == before.save_id
        dist.barrier()


def again(rank: int, folder: str, layout: tuple[str, ...]) -> None:
    with opened(rank, folder, layout) as engine:
        state = state_of(None)
        assert engine.load(state) == 5
        assert_is(state, 5)
        put(engine, 6)
        engine.wait(6, "replicated", WAIT_S)


def test_ranks_on_several_hosts_make_one_checkpoint(runtime_dir: Path):
    on_hosts(together, runtime_dir, FOUR)
    on_hosts(again, runtime_dir, FOUR)


# --- agents that die ------------------------------------------------------------------------------


class Ranks:
    """Two ranks on each of two hosts, which have opened an attempt; rank 0's agent decides."""

    def __init__(self, job: Job) -> None:
        self.hosts = job.hosts
        self.trainers = []
        for host in job.hosts:
            second = FakeTrainer(host.runtime, job.spec, size=job.size, rank=1)
            join_run(second.client, host.client.run_id)
            self.trainers += [host.trainer, second]
        job.hosts[0].trainer.open_attempt()
        self.parts: dict[int, m.Contribute] = {}

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *exc: object) -> None:
        for trainer in self.trainers[1::2]:
            trainer.close()

    def key(self, step: int) -> m.GatheringKey:
        return m.GatheringKey(stream="default", epoch="1" * 32, ordinal=step)

    def put(self, rank: int, step: int, /, **change: Any) -> m.Gathered:
        """The rank seals its segment and hands in its part; the same again, if it has."""
        trainer, first = self.trainers[rank], self.trainers[0]
        if rank not in self.parts or self.parts[rank].key.ordinal != step:
            ref = trainer.write_segment(step)
            draft = first.manifest(step, ()) if rank == 0 else None
            if draft is not None:
                draft = msgspec.structs.replace(draft, plan="0" * 32, world_size=4)
            self.parts[rank] = m.Contribute(
                session_id=trainer.client.session_id, run=trainer.client.run_id,
                key=self.key(step), step=step, world_size=4, members="2" * 32, rank=rank,
                part=m.SealedPart(segment_id=ref.id, size=ref.size, root=ref.root), values=(),
                plan=encode_plan(trainer.plan), error=None, decider="h0", here=2,
                draft=encode_manifest(draft) if draft is not None else None,
                hosts=("h0", "h1") if rank == 0 else (),
            )  # fmt: skip
        return trainer.client.call(msgspec.structs.replace(self.parts[rank], **change))

    def ask(self, rank: int, step: int, give_up: m.ErrorReply | None = None) -> m.Gathered:
        """As a rank that waits: it hands its part in anew if its agent has forgotten it."""
        found = self.trainers[rank].client.poll_save(self.key(step), rank, give_up)
        return self.put(rank, step) if found.state == "unknown" else found

    def settled(self, step: int, *ranks: int) -> m.Gathered:
        """The outcome, when these ranks have heard of it."""
        found: dict[int, m.Gathered] = {}

        def heard() -> bool:
            found.update({rank: self.ask(rank, step) for rank in ranks})
            return all(each.state in ("committed", "failed") for each in found.values())

        wait_until(heard, deadline_s=WAIT_S)
        assert len({(each.state, each.save_id) for each in found.values()}) == 1
        return found[ranks[0]]

    def save(self, step: int) -> str:
        """A whole save without any trouble."""
        for rank in (2, 0, 3, 1):
            self.put(rank, step)
        save_id = self.settled(step, 0, 1, 2, 3).save_id
        assert save_id is not None
        self.trainers[0].seqs["default"] = self.trainers[0].seqs.get("default", 0) + 1
        self.trainers[0].parents["default"] = save_id
        return save_id


TOO_LATE = m.ErrorReply(
    error="TierUnavailableError", message="too late", fields={"outcome": "not_applied"}
)


def said(found: m.Gathered) -> str:
    assert found.error is not None
    assert found.error.fields["outcome"] == "not_applied"
    return found.error.message


@pytest.mark.full
def test_a_host_that_is_killed_before_all_have_sealed(runtime_dir: Path):
    """Also if its own ranks had, and handed their parts over: nothing is committed."""
    with Job(runtime_dir, 2) as job, Ranks(job) as ranks:
        saved = ranks.save(1)
        for rank in (0, 2, 3):
            ranks.put(rank, 2)
        wait_until(lambda: ranks.ask(0, 2).missing == (1,), deadline_s=WAIT_S)
        job.hosts[1].agent.kill()
        assert ranks.put(1, 2) == m.Gathered(state="open", missing=(2, 3))
        assert ranks.ask(0, 2, TOO_LATE).error == TOO_LATE
        assert ranks.settled(2, 0, 1).error == TOO_LATE
        assert job.hosts[0].save_ids() == {saved}
        # Its processes wait for the next agent there, and learn the same of it.
        job.hosts[1].restart()
        assert ranks.settled(2, 2, 3).error == TOO_LATE
        assert job.hosts[1].save_ids() <= {saved}
        new = ranks.save(3)
        wait_until(lambda: all(new in each.save_ids() for each in job.hosts), deadline_s=WAIT_S)


@pytest.mark.parametrize(
    "point",
    [
        pytest.param("agent.gather.after_confirm", marks=pytest.mark.full),
        "agent.push.before_holders",
    ],
)
def test_the_agent_that_decides_dies_while_it_commits(runtime_dir: Path, point: str):
    """Whoever waits asks the next one, which knows what was committed, or commits it now."""
    with Job(runtime_dir, 2) as job:
        job.hosts[0].restart(f"{point}=kill")
        with Ranks(job) as ranks:
            for rank in (0, 1, 2):
                ranks.put(rank, 1)
            ranks.put(3, 1)  # the answer to the other host is lost with the agent
            job.hosts[0].agent.wait_end()
            job.hosts[0].restart()
            found = ranks.settled(1, 0, 1, 2, 3)
            assert found.state == "committed"
            wait_until(
                lambda: all(each.save_ids() == {found.save_id} for each in job.hosts),
                deadline_s=WAIT_S,
            )


@pytest.mark.full
def test_a_host_that_has_promised_and_forgot(runtime_dir: Path):
    """Its agent dies as it says that it stands by its parts: they are handed over again."""
    points = {1: "agent.gather.before_promise=kill"}
    with Job(runtime_dir, 2, failpoints=points) as job, Ranks(job) as ranks:
        for rank in (2, 3, 0):
            ranks.put(rank, 1)
        wait_until(lambda: ranks.ask(0, 1).missing == (1,), deadline_s=WAIT_S)
        assert ranks.put(1, 1).state == "open"
        job.hosts[1].agent.wait_end()
        job.hosts[1].restart()
        assert ranks.settled(1, 0, 1, 2, 3).state == "committed"


def assert_only_members_hand_over(job: Job) -> None:
    with line_to(job.hosts[0], job.token) as line:
        request = HandOver(
            host="h1", key=m.GatheringKey(stream="default", epoch="3" * 32, ordinal=0), step=1,
            world_size=2, members="2" * 32, have=(), parts=(), give_up=None,
        )  # fmt: skip
        assert line.ask(request).outcome.state == "unknown"
        for host in ("h0", "stranger"):
            with pytest.raises(UsageError, match="is not another host of this job"):
                line.ask(msgspec.structs.replace(request, host=host))


@pytest.mark.full
def test_ranks_of_two_hosts_that_save_different_things(runtime_dir: Path):
    with Job(runtime_dir, 2) as job, Ranks(job) as ranks:
        for step, change in enumerate(({"step": 99}, {"members": "3" * 32}, {"world_size": 5})):
            ranks.put(0, step)
            ranks.put(1, step)
            ranks.put(3, step)
            ranks.put(2, step, **change)
            found = ranks.settled(step, 2, 3)
            assert found.error is not None
            assert found.error.error == "UsageError"
            assert ranks.settled(step, 0, 1).error == found.error
        assert_only_members_hand_over(job)
        # Ranks that end leave nobody waiting.
        step += 1
        for rank in (0, 1, 2):
            ranks.put(rank, step)
        job.hosts[1].trainer.close()
        assert "rank 2's process ended" in said(ranks.settled(step, 0, 1))
        assert not job.hosts[0].save_ids()
