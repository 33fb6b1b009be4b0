"""Several real agents, each a host of its own, as one memory tier: what they tell each other."""

from __future__ import annotations

import os
import signal
import stat
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from tests.support.agent import FakeTrainer, spec_of, wait_until
from tests.support.copies import MIB
from tests.support.peers import Job, PeerHost, line_to
from tieredckpt.errors import (
    AgentError,
    CapacityError,
    ConfigError,
    NotFoundError,
    TierUnavailableError,
)
from tieredckpt.format.manifest import Manifest, SegmentRef, encode_manifest
from tieredckpt.rpc.messages import agent as m
from tieredckpt.rpc.messages.peer import ForwardAttempt, Push, Sync

CAUGHT_UP_S = 60.0
"""Anti-entropy comes every 10 s or so; on a loaded machine its rounds take long."""


def knows(host: PeerHost, manifest: Manifest) -> bool:
    return manifest.save_id in host.save_ids()


def wait_known(job: Job, manifest: Manifest, *hosts: int) -> None:
    for number in hosts or range(len(job.hosts)):
        wait_until(lambda n=number: knows(job.hosts[n], manifest), deadline_s=CAUGHT_UP_S)


def sealed(host: PeerHost) -> set[str]:
    """Segments that its memory holds."""
    return {each.id for each in host.trainer.tier().segments}


# --- faults ---------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize("point", ["before_send", "after_send"])
def test_the_coordinators_agent_dies_while_it_tells(runtime_dir: Path, point: str):
    with Job(runtime_dir, 3) as job:
        job.hosts[0].trainer.open_attempt()
        job.hosts[0].restart(f"agent.push.{point}=kill")
        refs = job.seal(1)
        saved = job.manifest(1, refs, job.hosts[0])
        with pytest.raises(AgentError):
            job.hosts[0].trainer.commit(saved)
        job.hosts[0].restart()
        wait_known(job, saved)
        for host, ref in zip(job.hosts, refs, strict=True):
            assert ref.id in sealed(host)


def test_a_holders_agent_dies_while_it_takes_over(runtime_dir: Path):
    with Job(runtime_dir, 2, failpoints={1: "agent.ingest.before_manifest=kill"}) as job:
        saved = job.save(1)  # the save does not fail for it
        job.hosts[1].agent.wait_end()
        job.hosts[1].restart()
        wait_known(job, saved)
        assert saved.segments[1].id in sealed(job.hosts[1])


def test_a_host_that_does_not_answer_costs_two_seconds_and_catches_up(runtime_dir: Path):
    with Job(runtime_dir, 3) as job:
        wait_known(job, job.save(1))
        refs = job.seal(2)
        os.kill(job.hosts[1].agent.pid, signal.SIGSTOP)
        began_s = time.monotonic()
        saved = job.manifest(2, refs, job.hosts[0])
        job.hosts[0].trainer.commit(saved)
        assert time.monotonic() - began_s < 40.0  # two seconds, on a machine that is busy
        wait_known(job, saved, 0, 2)
        os.kill(job.hosts[1].agent.pid, signal.SIGCONT)
        wait_known(job, saved, 1)


@pytest.mark.full
def test_an_agent_that_restarts_is_found_at_its_port_without_a_trainer(runtime_dir: Path):
    with Job(runtime_dir, 2) as job:
        saved = job.save(1)
        wait_known(job, saved)
        before = job.hosts[1].client.peers()
        job.hosts[1].trainer.close()
        job.hosts[1].restart()
        assert before.host is not None
        with line_to(job.hosts[0], job.token) as line:
            assert line.identify().host_id == "h0"
        again = job.hosts[1]._trainer()
        job.hosts[1].trainer = again
        after = again.client.peers()
        assert after.host == before.host  # address and incarnation
        assert after.token == job.token
        assert {each.host.host_id for each in after.peers} == {"h0"}
        with line_to(job.hosts[1], job.token) as line:
            assert saved.save_id not in line.ask(_nothing(saved)).wanted_manifests


def _nothing(manifest: Manifest) -> Sync:
    return Sync(manifests=(manifest.save_id,), records=(), attempts=())


@pytest.mark.full
def test_what_retention_deleted_does_not_come_back(runtime_dir: Path):
    with Job(runtime_dir, 2, replicas=0) as job:
        old = job.save(1)
        for step in (2, 3, 4):
            newest = job.save(step)
        wait_known(job, newest)
        with line_to(job.hosts[1], job.token) as line:
            answer = line.ask(Push(manifests=(encode_manifest(old),)))
            assert [save_id for save_id, _ in answer.refused] == [old.save_id]
            assert old.save_id not in line.ask(_nothing(old)).wanted_manifests
        # A fresh host has no segment in it; there retention alone refuses.
        fresh = job.add(2)
        job.gather()
        wait_known(job, newest, 2)
        with line_to(fresh, job.token) as line:
            answer = line.ask(Push(manifests=(encode_manifest(old),)))
            assert answer.refused == ((old.save_id, "retention would delete it at once"),)
            assert old.save_id not in line.ask(_nothing(old)).wanted_manifests
        assert all(old.save_id not in host.save_ids() for host in job.hosts)


def test_the_first_holder_knows_before_the_save_returns(runtime_dir: Path):
    """Else a checkpoint that was reported could be lost with the host that committed it."""
    with Job(runtime_dir, 3, failpoints={2: "agent.ingest.before_manifest=slow"}) as job:
        for step in (1, 2):
            saved = job.save(step)
            assert knows(job.hosts[1], saved)


# --- segments of unknown fate ---------------------------------------------------------------------


def told(*said: tuple[SegmentRef, str]) -> Callable[[], tuple[m.SealedBefore, ...]]:
    """What a rank says of the segments that it has sealed, oldest first."""
    found = tuple(
        m.SealedBefore(segment_id=ref.id, stream="default", fate=fate)  # type: ignore[arg-type]
        for ref, fate in said
    )
    return lambda: found


SLOT = MIB + (200 << 10)
"""Enough for one slot."""


def goes_on(host: PeerHost) -> None:
    """Its rank asks for the slot of its next save."""
    host.client.reserve(host.trainer.segment_bytes)


@pytest.mark.full
def test_a_rank_says_that_its_last_save_failed(runtime_dir: Path):
    """Nothing of it came over the network; what was given back is never part of a checkpoint."""
    with Job(runtime_dir, 2) as job:
        other = job.hosts[1]
        first = job.save(1)
        wait_known(job, first)
        refs = job.seal(2)
        made = job.manifest(2, refs, job.hosts[0])
        other.client.unreported_segments = told((refs[1], "unknown"))
        goes_on(other)
        with FakeTrainer(other.runtime, job.spec, rank=1) as neighbour:  # not its own save
            neighbour.client.unreported_segments = told((refs[1], "failed"))
            neighbour.client.reserve(neighbour.segment_bytes)
        assert refs[1].id in sealed(other)
        # What a manifest names stays, whatever is said.
        other.client.unreported_segments = told((first.segments[1], "failed"), (refs[1], "failed"))
        goes_on(other)
        assert sealed(other) & {first.segments[1].id, refs[1].id} == {first.segments[1].id}
        job.hosts[0].trainer.commit(made)
        with line_to(other, job.token) as line:
            answer = line.ask(Push(manifests=(encode_manifest(made),)))
        ((save_id, why),) = answer.refused
        assert save_id == made.save_id
        assert "was released" in why


@pytest.mark.full
def test_what_nobody_vouches_for_goes_for_room_if_something_newer_is_known(runtime_dir: Path):
    """Three slots: an older checkpoint, a save of unknown fate, and one that was heard of."""
    spec = spec_of(keep_last=1, capacity_bytes=3 * SLOT)
    with Job(runtime_dir, 2, spec=spec, replicas=0) as job:
        leader, other = job.hosts
        first = job.save(1)
        wait_known(job, first)
        second, third = job.seal(2), job.seal(3)
        other.client.unreported_segments = told(
            (first.segments[1], "committed"), (second[1], "unknown"), (third[1], "unknown")
        )
        with pytest.raises(CapacityError, match="2 of this rank's slots hold parts of saves"):
            goes_on(other)
        # For all that is known here each of them may be the newest checkpoint.
        assert sealed(other) == {first.segments[1].id, second[1].id, third[1].id}
        leader.trainer.commit(saved := leader.trainer.manifest(3, third))
        wait_known(job, saved)
        goes_on(other)  # the room of the first one is free: retention has deleted it
        assert sealed(other) == {second[1].id, third[1].id}
        other.trainer.write_segment(4)
        goes_on(other)
        assert second[1].id not in sealed(other)


def test_a_failed_save_frees_the_segments_of_all_hosts(runtime_dir: Path):
    with Job(runtime_dir, 3) as job:
        wait_known(job, job.save(1))
        refs = job.seal(2)
        made = job.manifest(2, refs, job.hosts[0])
        job.hosts[0].client.save_failed([ref.id for ref in refs], 1)
        for host, ref in zip(job.hosts, refs, strict=True):
            wait_until(lambda h=host, r=ref: r.id not in sealed(h))
        with pytest.raises(NotFoundError):
            job.hosts[0].trainer.commit(made)
        saved = job.save(3)
        wait_known(job, saved)
        # What a manifest names is not given back for whatever anybody says.
        job.hosts[0].client.save_failed([ref.id for ref in saved.segments], 2)
        with line_to(job.hosts[2], job.token) as line:
            line.ask(Push(failed_segments=tuple(ref.id for ref in saved.segments)))
        assert saved.segments[2].id in sealed(job.hosts[2])


def test_the_leader_alone_opens_attempts(runtime_dir: Path):
    """Else two coordinators of one job would begin two lines that do not know of each other."""
    with Job(runtime_dir, 2) as job:
        request = m.OpenAttempt(
            session_id="0" * 32, attempt_id="1" * 32, run="2" * 32, cause="load", bases=()
        )
        with (
            line_to(job.hosts[1], job.token) as line,
            pytest.raises(TierUnavailableError, match="not the leader"),
        ):
            line.ask(ForwardAttempt(request=request))
        job.hosts[0].agent.kill()
        with pytest.raises(TierUnavailableError, match="h0"):
            job.hosts[1].trainer.open_attempt()


# --- who is there ---------------------------------------------------------------------------------


@pytest.mark.full
def test_status_says_who_answers(runtime_dir: Path):
    with Job(runtime_dir, 3) as job:
        client = job.hosts[0].client

        def states() -> dict[str, m.PeerState]:
            return {each.host.host_id: each for each in client.status().namespaces[0].peers}

        wait_until(lambda: all(each.bytes_per_s for each in states().values()))
        assert set(states()) == {"h1", "h2"}
        assert all(each.reachable and each.member and each.rtt_s for each in states().values())
        assert states()["h1"].address == states()["h1"].host.addresses[0]
        assert states()["h1"].host.labels == {"rack": "h1"}
        job.hosts[2].agent.kill()
        wait_until(lambda: states()["h2"].reachable is False, deadline_s=CAUGHT_UP_S)
        assert "does not answer" in str(states()["h2"].error)
        # A job without it: it stays known, to be asked at a recovery.
        job.hosts[2].close()
        del job.hosts[2]
        job.gather()
        assert states()["h2"].member is False


# --- listening ------------------------------------------------------------------------------------


def listen(host: PeerHost, token: str, **values: object) -> m.Listening:
    fields = {
        "session_id": host.client.session_id, "token": token, "tls": None, "interfaces": (),
        "cidrs": (host.cidr,), "port": 0, "labels": {}, **values,
    }  # fmt: skip
    return host.client.call(m.Listen(**fields))  # type: ignore[arg-type]


def test_what_cannot_be_listened_to(runtime_dir: Path):
    with Job(runtime_dir, 1) as job:
        host = job.hosts[0]
        with pytest.raises(ConfigError, match="without a token or mutual TLS"):
            listen(host, "", port=1)
        with pytest.raises(ConfigError, match="without a token or mutual TLS"):
            listen(host, "", cidrs=("0.0.0.0/32",))
        with pytest.raises(ConfigError, match="no address on this host"):
            listen(host, job.token, cidrs=(), interfaces=("no-such-0",))
        with pytest.raises(ConfigError, match=r"network\.cidr"):
            listen(host, job.token, cidrs=("203.0.113.0/24",))
        with pytest.raises(AgentError, match="characters"):
            listen(host, "short")
        assert host.listen(job.token) == host.listen(job.token)


def test_files_of_the_token_are_private_and_go_with_a_purge(runtime_dir: Path):
    with Job(runtime_dir, 2) as job:
        host = job.hosts[0]
        folder = host.runtime / "peers"
        files = [folder / "run.listen", folder / "run.hosts", host.runtime / "incarnation"]
        assert [stat.S_IMODE(each.stat().st_mode) for each in files] == [0o600] * 3
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        host.trainer.close()
        with host.agent.client() as client:
            client.purge("run")
        assert list(folder.iterdir()) == []
        host.trainer = host._trainer()
        assert host.client.peers().token == ""


# --- hostile and wrong requests -------------------------------------------------------------------


def test_what_is_pushed_is_validated(runtime_dir: Path):
    with Job(runtime_dir, 2) as job:
        saved = job.save(1)
        wait_known(job, saved)
        foreign = msgspec.structs.replace(saved, save_id="a" * 32, namespace="other")
        ref = saved.segments[1]
        forged = msgspec.structs.replace(
            saved, save_id="b" * 32, segments=(msgspec.structs.replace(ref, root="0" * 32),)
        )
        lacking = msgspec.structs.replace(
            saved, save_id="c" * 32, plan="d" * 32, segments=saved.segments[:1]
        )
        with line_to(job.hosts[1], job.token) as line:
            answer = line.ask(
                Push(
                    manifests=(
                        b"garbage", encode_manifest(foreign), encode_manifest(forged),
                        encode_manifest(lacking), encode_manifest(saved),
                    ),
                    plans=(b"garbage",), records=(b"garbage",), attempts=(b"garbage",),
                    failed_segments=("e" * 32,), forward=("no-such-host",),
                )
            )  # fmt: skip
            assert answer.need_plans == ("d" * 32,)
            reasons = dict(answer.refused)
            assert "namespace other" in reasons["a" * 32]
            assert "another root" in reasons["b" * 32]
        assert job.hosts[1].save_ids() == {saved.save_id}
