"""Copies while hosts, agents and bytes are lost."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import threading
import time
from pathlib import Path

import pytest

from tests.support.agent import join_run, spec_of, wait_until
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
from tests.support.faults import state_of
from tests.support.peers import Job, PeerHost
from tests.support.proxy import Proxy
from tieredckpt.errors import NotFoundError, TieredCkptError
from tieredckpt.format.manifest import Manifest
from tieredckpt.rpc.messages import agent as m

SLOW = 8 * MIB
"""Bytes per second: what is killed meanwhile is killed in the middle."""


def wait_pulling(host: PeerHost, least: int) -> None:
    """Until it has received so many bytes of copies."""
    wait_until(lambda: status(host).pulled_bytes_total >= least, deadline_s=DEADLINE_S)


def check_slots(job: Job, most: int) -> None:
    """No slot was leaked."""
    for host in job.hosts:
        assert copy_slots(host) <= most, host.agent.log()


def ask_again(host: PeerHost) -> None:
    """The trainer's next request opens its session again, if its agent died before it had written
    down by whose rules it keeps what it had just heard of.
    """
    join_run(host.client, host.client.run_id)


@pytest.mark.parametrize(
    "stage", [pytest.param("reserved", marks=pytest.mark.full), "block", "before_seal"]
)
def test_a_holder_dies_at_each_stage(runtime_dir: Path, stage: str):
    """Its next agent goes on by itself with what the one before had begun."""
    points = {1: f"agent.replica.{stage}=kill"}
    with Job(runtime_dir, 2, size=5 * MIB, failpoints=points) as job:
        saved = job.save(1)
        assert job.hosts[1].agent.wait_end(deadline_s=DEADLINE_S) == -9
        job.hosts[1].restart()
        if stage == "reserved":
            # So early that the thread that heard of the checkpoint may not have come to that.
            ask_again(job.hosts[1])
        wait_replicated(job, saved)
        assert intact(job.hosts[1], saved.segments[0], 1)
        check_slots(job, 1)


@pytest.mark.full
def test_a_leader_that_was_killed_orders_again(runtime_dir: Path):
    with Job(runtime_dir, 2, size=8 * MIB, bytes_per_s=SLOW) as job:
        first = job.save(1)
        newest = [job.save(step) for step in range(2, 5)][-1]
        wait_pulling(job.hosts[1], 2 * MIB)
        job.hosts[0].restart()
        wait_replicated(job, newest)
        with contextlib.suppress(NotFoundError):  # retention may have deleted it since
            assert level(job.hosts[0], first) in ("done", "superseded")


def test_a_copy_that_went_bad_is_made_anew_but_the_only_one_is_kept(runtime_dir: Path):
    """A reader finds a bad block in a copy: the holder pulls it again, from the owner. When that is
    gone, the good blocks of a damaged copy may still serve a recovery.
    """
    with Job(runtime_dir, 2, size=5 * MIB) as job:
        saved = job.save(1)
        wait_replicated(job, saved)
        holder, ref = job.hosts[1], saved.segments[0]
        flip(slot_path(holder, ref), 2 * MIB)
        assert holds(holder, ref), "nobody has told it yet"
        assert not intact(holder, ref, 1)
        holder.client.report_damage("memory", ref.id, (0,), "a reader found it")
        wait_until(lambda: intact_by_now(holder, ref, 1), deadline_s=DEADLINE_S)
        wait_replicated(job, saved)
        job.hosts[0].agent.kill()
        holder.client.report_damage("memory", ref.id, (0,), "a reader found it")
        wait_until(
            lambda: "no other host has one" in str(status(holder).error), deadline_s=DEADLINE_S
        )
        assert intact(holder, ref, 1)


def reboot(job: Job, number: int, failpoints: str = "") -> PeerHost:
    """A host is gone with its memory, and comes back under its old name; the job starts again.

    ``failpoints``: Of its agent, which may stop at them: ``learnt`` is to be looked at.
    """
    lost = job.hosts[number]
    lost.close()
    shutil.rmtree(lost.runtime)
    back = PeerHost(lost.runtime, number + 1, job.spec, failpoints=failpoints, size=job.size)
    back.bytes_per_s = job.bytes_per_s
    job.hosts[number] = back
    job.gather(stops=back if failpoints else None)
    return back


@pytest.mark.parametrize(
    "number",
    [pytest.param(1, id="member"), pytest.param(0, id="leader", marks=pytest.mark.full)],
)
def test_a_host_that_comes_back_empty_gets_back_what_it_had(runtime_dir: Path, number: int):
    """A reboot: the same name, another incarnation. What it held counts no more, until it has
    pulled its own segments and its copies again; then it is as good a donor as before.
    """
    with Job(runtime_dir, 3) as job:
        saved = job.save(1)
        wait_replicated(job, saved)
        back = reboot(job, number, "agent.replica.reserved=stop")
        others = [host for host in job.hosts if host is not back]
        try:
            wait_until(lambda: state_of(back.agent.pid) == "T", deadline_s=DEADLINE_S)
            for host in others:
                assert level(host, saved) in ("active", "waiting"), "it believes an old word"
                assert status(host).newest_replicated_step is None
        finally:
            os.kill(back.agent.pid, signal.SIGCONT)
        back.learnt.result(DEADLINE_S)
        wait_replicated(job, saved)
        for each, ref in enumerate(saved.segments):
            assert intact(job.hosts[each], ref, 1)
            assert intact(job.hosts[(each + 1) % 3], ref, 1)
            assert not holds(job.hosts[(each + 2) % 3], ref), "two are enough"


@pytest.mark.full
def test_the_disk_of_a_host_that_comes_back(runtime_dir: Path, tmp_path: Path):
    """Its part of the checkpoint is on its own disk, which is empty, in the end: once it was pulled
    back and the job, started again, has saved: before that its rules do not hold.
    """
    with Job(runtime_dir, 0) as job:
        for number in range(2):
            job.spec = spec_of(tiers={"disk": tmp_path / f"disk{number}"})
            job.add(number)
        job.gather()
        saved = job.save(1, tiers=("disk",))
        wait_replicated(job, saved)
        wait_until(lambda: on_disk(job.hosts[1], saved) == "done", deadline_s=DEADLINE_S)
        shutil.rmtree(tmp_path / "disk1")
        back = reboot(job, 1)
        wait_replicated(job, saved)
        job.hosts[0].trainer.open_attempt({"default": saved.save_id})
        job.save(2)
        wait_until(lambda: on_disk(back, saved) == "done", deadline_s=DEADLINE_S)
        assert [each.id for each in back.trainer.tier("disk").segments] == [saved.segments[1].id]


def on_disk(host: PeerHost, saved: Manifest) -> str:
    return progress(host, saved).levels["disk"]


@pytest.mark.full
@pytest.mark.parametrize(
    "seed", [1, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(2, 12))]
)
def test_saves_faster_than_copies_and_a_host_is_lost(runtime_dir: Path, seed: int):
    """100 saves at 0.3 of the time that a copy takes; a host dies at a random moment, once one of
    them was replicated. What was last said to be is whole on the hosts that are left."""
    chance = random.Random(seed)
    with Job(runtime_dir, 3, spec=spec_of(keep_last=1), size=MIB, bytes_per_s=4 * MIB) as job:
        began_s = time.monotonic()
        saved = [job.save(0)]
        wait_replicated(job, saved[0], job.hosts[:1])
        interval_s = 0.3 * (time.monotonic() - began_s)
        victim = job.hosts[chance.randrange(3)]
        killer = threading.Timer(chance.uniform(0, 60) * interval_s, victim.agent.kill)
        try:
            for step in range(1, 101):
                until_s = time.monotonic() + interval_s
                saved.append(job.save(step))
                if killer.ident is None and status(job.hosts[0]).newest_replicated_step:
                    killer.start()
                time.sleep(max(0.0, until_s - time.monotonic()))  # the rate that is tested
        except TieredCkptError:
            # The job ends with its host, and not for want of a slot.
            wait_until(victim.agent.ended, deadline_s=DEADLINE_S)
        assert killer.ident is not None, f"none of {len(saved) - 1} saves was replicated"
        killer.join()
        victim.close()
        live = [host for host in job.hosts if host is not victim]
        steps = {host.name: status(host).newest_replicated_step for host in live}
        newest = max(step for step in steps.values() if step is not None)
        whole = next((each for each in saved if each.step == newest), None)
        assert whole is not None, newest
        for ref in whole.segments:
            assert any(intact_by_now(host, ref, newest) for host in live), (newest, steps)
        for host in live:
            assert copy_slots(host) <= 2
            # The ring, what is replicated, what is being, copies; and the last save may have been
            # committed by the lost host, which told others of it, and not this one.
            assert host.client.status().namespaces[0].slots <= 2 + 1 + 1 + 2 + 1


@pytest.mark.full
def test_a_host_is_lost_while_the_one_before_it_is_made_up_for(runtime_dir: Path):
    """One host is lost; while its copies are made again and saves go on, who makes them is lost,
    too. What was said to be replicated stays whole, and is replicated again in the end.
    """
    with Job(runtime_dir, 4, size=4 * MIB, bytes_per_s=SLOW) as job:
        saved = [job.save(1)]
        wait_replicated(job, saved[0])
        lose(job, 3)
        pulled = status(job.hosts[1]).pulled_bytes_total
        job.gather()
        # Of what the lost host wrote one copy is left, on the first host; the second makes another.
        wait_pulling(job.hosts[1], pulled + MIB)
        saved += [job.save(step) for step in (2, 3)]
        lose(job, 1)
        job.add(5)
        job.gather()
        leader = job.hosts[0]
        wait_until(lambda: status(leader).newest_replicated_step is not None, deadline_s=DEADLINE_S)
        newest = next(s for s in saved if s.step == status(leader).newest_replicated_step)
        for ref in newest.segments:
            copies = [host for host in job.hosts if intact_by_now(host, ref, newest.step)]
            assert len(copies) >= 2, (newest.step, ref.host)
        wait_replicated(job, job.save(4))


def lose(job: Job, number: int) -> None:
    """A host of the job is gone, with its memory."""
    gone = job.hosts.pop(number)
    gone.close()
    shutil.rmtree(gone.runtime)


def test_a_member_that_is_lost_is_made_up_for(runtime_dir: Path):
    """Nothing is restarted: after a while without an answer the others take over its copies."""
    with Job(runtime_dir, 3, lost_after_s=3.0) as job:
        saved = job.save(1)
        wait_replicated(job, saved)
        job.hosts[1].close()
        # It held the copy of the first host's segment, and its own, of which the third has one.
        first, second = saved.segments[0], saved.segments[1]
        wait_until(lambda: intact_by_now(job.hosts[2], first, 1), deadline_s=2 * DEADLINE_S)
        wait_until(lambda: intact_by_now(job.hosts[0], second, 1), deadline_s=DEADLINE_S)
        # "Replicated" is said anew: the first word rested on the memory that is lost.
        wait_replicated(job, saved, (job.hosts[0], job.hosts[2]))


def test_who_answers_in_a_lost_hosts_place_does_not_keep_it_alive(runtime_dir: Path):
    """A forwarder (a load balancer, an address given away) leads from its address to another host:
    that one knows the token, and is not the one that is asked.
    """
    with Job(runtime_dir, 3, lost_after_s=3.0) as job, Proxy() as proxy:
        saved = job.save(1)
        wait_replicated(job, saved)
        entries = [host.client.peers().host for host in job.hosts]
        job.hosts[1].close()
        proxy.forward(entries[2].addresses[0], listen=entries[1].addresses[0])

        def seen() -> m.PeerState:
            peers = job.hosts[0].client.peers().peers
            return next(each for each in peers if each.host.host_id == "h1")

        # It may have been refused first, before the forwarder was there.
        answered = f"host h2 (incarnation {entries[2].incarnation}) answered"
        wait_until(lambda: answered in str(seen().error), deadline_s=DEADLINE_S)
        assert seen().reachable is False
        assert proxy.opened > 0
        first, second = saved.segments[0], saved.segments[1]
        wait_until(lambda: intact_by_now(job.hosts[2], first, 1), deadline_s=2 * DEADLINE_S)
        wait_until(lambda: intact_by_now(job.hosts[0], second, 1), deadline_s=DEADLINE_S)
        wait_replicated(job, saved, (job.hosts[0], job.hosts[2]))
        assert seen().host == entries[1]


@pytest.mark.full
def test_a_copy_waits_for_room_and_leaves_the_ring_alone(runtime_dir: Path):
    """memory.capacity is enough for the ring alone: saves go on, copies say why they wait."""
    with Job(runtime_dir, 2, spec=spec_of(keep_last=1, capacity_bytes=5 * MIB)) as job:
        saved = job.save(1)
        for host in job.hosts:
            wait_until(
                lambda h=host: "memory.capacity" in str(status(h).error), deadline_s=DEADLINE_S
            )
        for step in range(2, 8):
            job.save(step)
        assert level(job.hosts[0], saved) in ("waiting", "active", "superseded")
        assert copy_slots(job.hosts[0]) == 0
