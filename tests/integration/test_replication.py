"""Copies in other hosts' memory: real agents, real sockets, real slots."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.agent import spec_of, wait_until
from tests.support.copies import (
    DEADLINE_S,
    MIB,
    copy_slots,
    flip,
    holds,
    intact,
    intact_by_now,
    level,
    progress,
    slot_path,
    status,
    wait_replicated,
)
from tests.support.peers import Job
from tieredckpt.rpc.messages import agent as m


def test_every_copy_is_pulled_verified_and_counted(runtime_dir: Path):
    with Job(runtime_dir, 3) as job:
        saved = job.save(1)
        wait_replicated(job, saved)
        for number, ref in enumerate(saved.segments):
            assert intact(job.hosts[number], ref, 1)
            assert intact(job.hosts[(number + 1) % 3], ref, 1)
            assert not holds(job.hosts[(number + 2) % 3], ref), "one copy was wanted"
        found = progress(job.hosts[0], saved)
        assert (found.copies_done, found.copies_wanted) == (3, 3)
        told = status(job.hosts[1])
        assert (told.replicas, told.possible, told.newest_replicated_step) == (1, 1, 1)
        assert told.lag_steps == 0
        assert told.held_bytes == saved.segments[0].size
        assert told.pulled_bytes_total >= told.held_bytes


def test_slots_go_round(runtime_dir: Path):
    """Eight saves, each replicated: no host has more slots than the rule gives it."""
    with Job(runtime_dir, 2, spec=spec_of(keep_last=2)) as job:
        for step in range(1, 9):
            wait_replicated(job, job.save(step))
        for host in job.hosts:
            assert copy_slots(host) <= 3, "keep.last + 1 for the one segment that it copies"
            found = host.client.status().namespaces[0]
            assert found.slots <= 3 + 2 + 1 + 2
            assert found.checkpoints == 2


@pytest.mark.full
def test_what_no_memory_has_comes_from_a_disk(runtime_dir: Path, tmp_path: Path):
    """Owner and holder lose a segment, and both have it again, from the owner's disk."""
    with Job(runtime_dir, 0) as job:
        for number in range(2):
            disk = tmp_path / f"disk{number}"
            disk.mkdir()
            job.spec = spec_of(tiers={"disk": disk})
            job.add(number)
        job.gather()
        saved = job.save(1, tiers=("disk",))
        wait_replicated(job, saved)
        ref = saved.segments[1]  # the leader only keeps a copy
        owner = job.hosts[1]
        wait_until(lambda: progress(owner, saved).levels["disk"] == "done", deadline_s=DEADLINE_S)
        for host in job.hosts:
            path = slot_path(host, ref)
            host.agent.kill()
            path.unlink()
        for host in job.hosts:
            host.restart()
        for host in job.hosts:
            wait_until(lambda h=host: intact_by_now(h, ref, 1), deadline_s=DEADLINE_S)


def test_a_damaged_block_is_never_acknowledged(runtime_dir: Path):
    """The owner's copy goes bad between seal and commit: nobody says that it is safe."""
    with Job(runtime_dir, 2, size=9 * MIB) as job:
        owner, holder = job.hosts
        refs = job.seal(1)
        flip(slot_path(owner, refs[0]), 5 * MIB)
        bad = job.manifest(1, refs, owner)
        owner.trainer.commit(bad)
        for host in job.hosts:
            wait_until(lambda h=host: level(h, bad) == "failed", deadline_s=DEADLINE_S)
        assert "blocks 1 to 1" in progress(owner, bad).errors["replicated"]
        assert not holds(holder, refs[0])
        # The owner was told which block it is.
        fact = next(each for each in owner.trainer.tier().segments if each.id == refs[0].id)
        assert fact.bad_blocks == (1,)
        # It holds up nothing: the next one is copied as ever.
        good = job.save(2)
        wait_replicated(job, good)


@pytest.mark.full
def test_a_slow_host_makes_all_copy_the_same_checkpoints(runtime_dir: Path):
    """One host pulls slowly, saves go on: what is replicated is the same everywhere, and stays."""
    with Job(runtime_dir, 3, spec=spec_of(keep_last=1)) as job:
        job.hosts[2].bytes_per_s = MIB // 2  # no save takes as long as a copy, on any machine
        job.gather()
        first = job.save(1)
        later = [job.save(step) for step in range(2, 12)]
        # The first was begun, so it is finished, though ten newer ones exist.
        wait_replicated(job, first)
        wait_replicated(job, later[-1])
        outcomes = [level(job.hosts[0], each) for each in later[:-1]]
        assert "superseded" in outcomes
        assert set(outcomes) <= {"superseded", "done"}
        for host in job.hosts:
            assert status(host).newest_replicated_step == 11
            assert copy_slots(host) <= 2


@pytest.mark.full
def test_the_leader_orders_what_came_before_the_record_of_its_attempt(runtime_dir: Path):
    """Until the record is here too, two groups of one run look like two runs, and a fork."""
    with Job(runtime_dir, 2, failpoints={0: "agent.ingest.before_attempt=slow"}) as job:
        leader, other = job.hosts
        first = job.save(1, stream="critic")
        wait_replicated(job, first)
        # As a load says it. The leader looks at once what copies are missing, and not again.
        leader.client.call(m.AddRecord(stream="critic", save_id=first.save_id, kind="restored"))
        leader.trainer.open_attempt({"actor": None})
        wait_replicated(job, job.save(1, stream="actor"))
        other.trainer.open_attempt({"critic": first.save_id})
        wait_replicated(job, job.save(2, stream="critic", coordinator=other))
