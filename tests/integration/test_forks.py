"""Which run may go on where two did not know of each other: one host, loopback, a bucket.

All agents and trainers are real; who is cut off stands still (SIGSTOP). With links that are cut:
test_hosts_forks.py.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.support import commands
from tests.support.agent import join_run, spec_of, wait_until
from tests.support.faults import Site, Trainer, state_of
from tests.support.peers import Job, PeerHost
from tieredckpt.errors import (
    CapacityError,
    NamespaceInUseError,
    NoRecoverableCheckpointError,
    StaleAttemptError,
)
from tieredckpt.format.manifest import Manifest, decode_attempt, encode_attempt
from tieredckpt.rpc.messages import agent as m

LONG_S = 120.0


# --- one host -------------------------------------------------------------------------------------


@pytest.fixture
def site(runtime_dir: Path) -> Iterator[Site]:
    found = Site(runtime_dir, None, keep=3)
    with found.forked_agent():
        yield found


def cli(runtime_dir: Path, *line: str) -> str:
    """What a command prints that works."""
    done = commands.tieredckpt(*line, "--runtime-dir", str(runtime_dir))
    assert done.returncode == 0, done.stderr
    return done.stdout


def stop_here(trainer: Trainer, point: str, command: str, *args: Any) -> None:
    """Begin a command, and wait until the process stands still at a failpoint."""
    trainer.arm(f"{point}=stop")
    trainer.start(command, *args)
    wait_until(lambda: state_of(trainer.pid) == "T", deadline_s=LONG_S)


full = pytest.mark.full
POINTS = [
    "save.attempt.before",
    pytest.param("save.attempt.after", marks=full),
    pytest.param("save.commit.before", marks=full),
]


@pytest.mark.parametrize("point", POINTS)
def test_a_first_save_that_pauses_for_a_whole_other_run(site: Site, point: str):
    """Who comes back after another run has begun, saved and ended has nothing to say any more."""
    with site.opened() as first:
        assert first.load().step is None
        first.save(20)
    with site.opened() as paused:
        assert paused.load().step == 20
        stop_here(paused, point, "save", 21)
        with site.opened() as other:
            assert other.load().step == 20
            for step in (30, 40):
                other.save(step)
        paused.signal(signal.SIGCONT)
        with pytest.raises(StaleAttemptError):
            paused.result()
        with pytest.raises(StaleAttemptError):
            paused.save(22)
    with site.opened() as last:
        assert [step for step, _, _ in last.checkpoints()] == [40, 30, 20]
        loaded = last.load()
        assert (loaded.step, loaded.wrong) == (40, [])
        last.save(50)


@full
def test_none_is_only_where_there_is_nothing_at_all(runtime_dir: Path):
    """What a roll-back left is all that there is: an error says so, and how to have it."""
    site = Site(runtime_dir, None, keep=5)
    with site.forked_agent():
        with site.opened() as run:
            assert run.load().step is None
            steps = {step: run.save(step) for step in (10, 20)}
        with site.opened() as run:
            assert run.load(step=10, abandon_newer=True).step == 10
            steps[11] = run.save(11)
            run.save(11, "other")
    lost = [steps[10], steps[11]]
    gone = [path for path in runtime_dir.rglob("*") if path.is_file() and path.stem in lost]
    assert len(gone) >= 2
    for path in gone:
        path.unlink()
    with site.forked_agent(), site.opened() as run:
        with pytest.raises(NoRecoverableCheckpointError) as raised:
            run.load()
        for wanted in (steps[20], "step 20", "save_id", "fresh_start"):
            assert wanted in str(raised.value), wanted
        assert run.load_save(steps[20], 20).wrong == []
        assert run.load(fresh_start=True).step is None
        run.save(30)
        assert run.load_save(steps[20], 20).wrong == []
        assert run.load().step == 30


# --- a bucket -------------------------------------------------------------------------------------


class Island:
    """A host that shares nothing with others but a bucket, under a path of its own."""

    def __init__(self, folder: Path, name: str, bucket: Path) -> None:
        (runtime := folder / name).mkdir(mode=0o700)
        tier = {"name": "bucket", "url": f"file://{bucket}", "scope": "shared", "keep": {"last": 9}}
        self.more = {"tiers": [tier]}
        self.site = Site(runtime, None, keep=3, more=self.more)

    def opened(self, armed: str = "") -> Any:
        return self.site.opened(armed)


@contextmanager
def islands(folder: Path, bucket: Path, count: int) -> Iterator[list[Island]]:
    found = [Island(folder, f"i{number}", bucket) for number in range(count)]
    with found[0].site.forked_agent():
        if count == 1:
            yield found
            return
        with found[1].site.forked_agent():
            yield found


def test_the_second_claimant_of_a_bucket_stops_at_its_first_save(runtime_dir: Path, tmp_path: Path):
    with islands(runtime_dir, tmp_path / "bucket", 2) as (one, other):
        with one.opened() as begun:
            assert begun.load().step is None
            begun.save(20)
            begun.wait(20, "bucket")
        with one.opened() as first, other.opened() as second:
            assert first.load().step == 20
            assert second.load().step == 20  # looking claims nothing, and ends nobody
            first.save(30)
            with pytest.raises(NamespaceInUseError):
                second.save(40)
            with pytest.raises(NamespaceInUseError):
                second.save(41)
            first.save(31)
            first.wait(31, "bucket")
        with other.opened() as last:  # it loads again, and so it knows of the first one
            assert last.load().step == 31
            last.save(50)
            last.wait(50, "bucket")


@full
@pytest.mark.parametrize("point", ["save.attempt.after", "save.commit.after"])
def test_a_claim_without_an_upload_locks_nobody_out(runtime_dir: Path, tmp_path: Path, point: str):
    with islands(runtime_dir, tmp_path / "bucket", 2) as (one, other):
        with one.opened() as begun:
            assert begun.load().step is None
            begun.save(20)
            begun.wait(20, "bucket")
        with one.opened() as dies:
            assert dies.load().step == 20
            dies.arm(f"{point}=kill")
            dies.start("save", 30)
            dies.dies()
            one.site.kill_agent()
        with other.opened() as last:
            assert last.load().step in (20, 30)
            last.save(50)
            last.wait(50, "bucket")
            assert last.load().step == 50


@pytest.mark.parametrize("fate", ["kill", pytest.param("stop", marks=full)])
def test_a_claim_that_came_after_the_load_of_an_empty_bucket(
    runtime_dir: Path, tmp_path: Path, fate: str
):
    """Nothing tells the claim of a run that will never save from the lease of one whose first
    checkpoint is still in memory: who comes second stops. Started again, it has seen the claim.
    """
    with islands(runtime_dir, tmp_path / "bucket", 2) as (one, other):
        with one.opened() as claims, other.opened() as saves:
            assert (claims.load().step, saves.load().step) == (None, None)
            if fate == "kill":
                claims.arm("save.attempt.after=kill")
                claims.start("save", 10)
                claims.dies()
            else:
                stop_here(claims, "save.attempt.after", "save", 10)
            for step in (20, 21):
                with pytest.raises(NamespaceInUseError, match="start this one again"):
                    saves.save(step)
            if fate == "stop":
                claims.signal(signal.SIGCONT)
                claims.result()
                claims.wait(10, "bucket")
        with other.opened() as last:
            assert last.load().step == (10 if fate == "stop" else None)
            last.save(30)
            last.wait(30, "bucket")
            assert last.load().step == 30


@full
@pytest.mark.parametrize("kind", ["cut", "another namespace's"])
def test_a_claim_that_nobody_can_read_ends_nobody(runtime_dir: Path, tmp_path: Path, kind: str):
    """The live job goes on, and so does the next start."""
    bucket = tmp_path / "bucket"
    with islands(runtime_dir, bucket, 1) as (one,):
        with one.opened() as live:
            assert live.load().step is None
            live.save(10)
            live.wait(10, "bucket")
            (claim,) = bucket.rglob("claims/*")
            whole = claim.read_bytes()
            other = msgspec.structs.replace(decode_attempt(whole), number=2, namespace="other")
            data = whole[:-9] if kind == "cut" else encode_attempt(other)
            (claim.parent / "00000002").write_bytes(data)
            live.save(20)
            live.wait(20, "bucket")
        for step in (30, 40):
            with one.opened() as again:
                assert again.load().step == step - 10
                again.save(step)
                again.wait(step, "bucket")


def went_on_beside(
    one: Island, other: Island, live_at: tuple[int, ...], side_at: tuple[int, ...]
) -> dict[int, str]:
    """The save ids by step, once a run of ``other`` has gone on from what one of ``one``, which is
    cut off from the bucket and lives on, had put there.
    """
    with one.opened() as live:
        assert live.load().step is None
        saved = {step: live.save(step) for step in (10, 20)}
        live.wait(20, "bucket")
        with other.opened() as side:
            assert side.load().step == 20
            saved |= {step: side.save(step) for step in side_at}
            side.wait(side_at[-1], "bucket")
        return saved | {step: live.save(step) for step in live_at}


@pytest.mark.parametrize(
    "goes_on",
    [
        "who lived on",
        pytest.param("who took over", marks=full),
        pytest.param("who is not marked", marks=full),
    ],
)
def test_who_got_further_without_knowing_is_not_left_without_a_word(
    runtime_dir: Path, tmp_path: Path, goes_on: str
):
    """A side took over, and who was taken over from lived on: a restart cannot tell which one the
    user means, and names both.
    """
    with islands(runtime_dir, tmp_path / "bucket", 2) as (one, other):
        saved = went_on_beside(one, other, (30, 40), (21,))
        with one.opened() as again:
            with pytest.raises(NoRecoverableCheckpointError, match="did not know of each") as found:
                again.load()
            for step in (21, 40):
                assert f"step {step}, save id {saved[step]}" in str(found.value)
            with pytest.raises(NoRecoverableCheckpointError, match="did not know of each"):
                again.load_save(None, 0)  # whatever a reader finds
            step = 40 if goes_on == "who lived on" else 21
            if goes_on == "who is not marked":
                why = ("--reason", "21 is meant")
                cli(one.site.runtime_dir, "mark", "bad", saved[40], *why)
                loaded = again.load()
            else:
                loaded = again.load(save_id=saved[step])
            assert (loaded.step, loaded.wrong) == (step, [])
            again.save(50)
            again.wait(50, "bucket")
            for step in (21, 40):
                assert again.load_save(saved[step], step).wrong == []
        with other.opened() as last:
            assert last.load().step == 50


@full
def test_who_did_not_get_so_far_is_named_when_it_is_left(runtime_dir: Path, tmp_path: Path):
    """The later one is loaded; what the other one was told is saved is a branch, and is named."""
    with islands(runtime_dir, tmp_path / "bucket", 2) as (one, other):
        saved = went_on_beside(one, other, (30,), (31, 40))
        told = cli(one.site.runtime_dir, "recovery", "plan", "--json")
        (warning,) = json.loads(told)["warnings"]
        assert f"load it by its save id: {saved[30]}" in warning
        with one.opened() as again:
            assert again.load().step == 40
            again.save(50)
            assert again.load_save(saved[30], 30).wrong == []


# --- over loopback, in memory alone ---------------------------------------------------------------


@contextmanager
def cut_off(*hosts: PeerHost) -> Iterator[None]:
    """Their agents neither hear nor say anything meanwhile."""
    for host in hosts:
        os.kill(host.agent.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for host in hosts:
            os.kill(host.agent.pid, signal.SIGCONT)


def branch_off(job: Job, live: list[PeerHost], old: PeerHost, base: Manifest) -> list[Manifest]:
    """What ``old`` saves from ``base`` on while the agents of ``live`` are dead: what it sends them
    then lies in no socket of theirs, so that they know nothing of it when they are back.
    """
    for host in live:
        host.agent.kill()
    start(job, [old], base)
    return [save(job, step, [old]) for step in (21, 22)]


def start(job: Job, hosts: list[PeerHost], base: Manifest | None) -> None:
    """A run on these hosts, which has loaded ``base`` and is about to save."""
    for host in hosts:
        host.restart_trainer()
    job.gather(hosts)
    hosts[0].trainer.open_attempt({"default": base.save_id} if base is not None else {})


def meet(job: Job) -> None:
    """All hosts are of the run of the first one from now on."""
    leader = job.hosts[0]
    entries = [host.listen(job.token) for host in job.hosts]
    for host in job.hosts:
        join_run(host.client, leader.client.run_id)
        host.set_peers(entries, leader.name, job.replicas)


def save(job: Job, step: int, hosts: list[PeerHost]) -> Manifest:
    """As an engine does, which opens another attempt where its host knows of a fork."""
    trainer = hosts[0].trainer
    for last in (False, True):
        try:
            return job.save(step, hosts)
        except StaleAttemptError as error:
            if last or not error.same_run:
                raise
            trainer.open_attempt()
            trainer.seqs.clear()
    raise AssertionError


def known_to(host: PeerHost, *saved: Manifest) -> bool:
    return {each.save_id for each in saved} <= host.save_ids()


def save_on(job: Job, *steps: int) -> Manifest:
    """All hosts save these; the last one."""
    return [save(job, step, job.hosts) for step in steps][-1]


def unpin(host: PeerHost, *saved: Manifest) -> None:
    for each in saved:
        said = m.AddRecord(stream=each.stream, save_id=each.save_id, kind="unpin")
        assert not host.client.pin(said).owed


@full
def test_a_branch_in_memory_holds_its_slots_until_a_person_lets_it_go(runtime_dir: Path):
    """Memory has room for the ring, and not for what the other side left beside it."""
    spec = spec_of(keep_last=2, capacity_bytes=5 << 20, wait_s=3.0)
    with Job(runtime_dir, 2, spec=spec, replicas=0) as job:
        live, old = job.hosts
        base = job.save(20)
        wait_until(lambda: known_to(old, base), deadline_s=LONG_S)
        branch = branch_off(job, [live], old, base)
        with cut_off(old):
            live.restart()
            start(job, [live], base)
            save(job, 50, [live])
        meet(job)
        wait_until(lambda: known_to(live, *branch), deadline_s=LONG_S)
        newest = save(job, 60, [live])
        wait_until(lambda: known_to(old, newest), deadline_s=LONG_S)
        start(job, job.hosts, newest)
        with pytest.raises(CapacityError, match=r"2 checkpoints are on a branch.* unpin --save-id"):
            save_on(job, *range(70, 120, 10))
        assert known_to(old, *branch)
        unpin(old, *branch)
        last = save_on(job, *range(120, 170, 10))
        for host in job.hosts:
            wait_until(lambda h=host: known_to(h, last), deadline_s=LONG_S)
            assert not {each.save_id for each in branch} & host.save_ids()
