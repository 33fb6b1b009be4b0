"""Several real agents, each a host of its own, as one memory tier: what they tell each other."""

from __future__ import annotations

import os
import signal
import socket
import stat
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest
import trustme

from tests.support.agent import AgentProcess, FakeTrainer, join_run, spec_of, wait_until
from tests.support.copies import MIB
from tests.support.peers import Job, PeerHost, line_to
from tieredckpt.errors import (
    AgentError,
    CapacityError,
    ConfigError,
    IntegrityError,
    NamespaceInUseError,
    NotFoundError,
    StaleAttemptError,
    TierUnavailableError,
    UsageError,
)
from tieredckpt.format.manifest import Followed, Manifest, SegmentRef, encode_manifest
from tieredckpt.rpc.messages import agent as m
from tieredckpt.rpc.messages.peer import AskPlan, ForwardAttempt, Push, Sync

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


# --- commits --------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [2, 3])
def test_a_checkpoint_over_several_hosts(runtime_dir: Path, count: int):
    with Job(runtime_dir, count) as job:
        for step in (1, 2, 3):
            saved = job.save(step)
            wait_known(job, saved)
        for host, ref in zip(job.hosts, saved.segments, strict=True):
            own = msgspec.structs.replace(saved, segments=(ref,))
            host.trainer.check(own)
            facts = host.trainer.tier()
            assert len(facts.manifests) >= 2  # memory.keep, on every host
            assert ref.id in {each.id for each in facts.segments}


def test_the_first_holder_knows_before_the_save_returns(runtime_dir: Path):
    with Job(runtime_dir, 3, failpoints={2: "agent.ingest.before_manifest=slow"}) as job:
        for step in (1, 2):
            saved = job.save(step)
            assert knows(job.hosts[1], saved)
        wait_known(job, saved)


def test_any_host_may_coordinate(runtime_dir: Path):
    with Job(runtime_dir, 3) as job:
        wait_known(job, job.save(1, coordinator=job.hosts[2]))


def test_a_host_that_is_no_member_is_refused(runtime_dir: Path):
    with Job(runtime_dir, 2) as job:
        refs = job.seal(1)
        job.gather(job.hosts[:1])
        made = job.manifest(1, refs, job.hosts[0])
        with pytest.raises(UsageError, match="is stored on host h1"):
            job.hosts[0].trainer.commit(made)


def test_each_host_spills_its_own_segments(runtime_dir: Path, tmp_path: Path):
    disks = [tmp_path / f"disk{number}" for number in range(2)]
    for disk in disks:
        disk.mkdir()
    job = Job.__new__(Job)
    # One spec per host: as on real ones, each has its own disk under its own path.
    job.__init__(runtime_dir, 0)  # type: ignore[misc]
    with job:
        for number, disk in enumerate(disks):
            job.spec = spec_of(tiers={"disk": disk})
            job.add(number)
        job.gather()
        saved = job.save(1, tiers=("disk",))
        for host, ref in zip(job.hosts, saved.segments, strict=True):
            wait_until(
                lambda h=host: (
                    h.save_ids() and h.client.progress(saved.save_id).levels["disk"] == "done"
                )
            )
            facts = host.trainer.tier("disk")
            assert [each.save_id for each in facts.manifests] == [saved.save_id]
            assert [each.id for each in facts.segments] == [ref.id]


def test_an_agent_stops_while_another_host_stalls(runtime_dir: Path):
    with Job(runtime_dir, 1) as job, socket.create_server(("127.0.9.1", 0)) as stalled:
        (host,) = job.hosts
        where = f"127.0.9.1:{stalled.getsockname()[1]}"
        far = m.HostEntry(host_id="far", incarnation="f" * 32, addresses=(where,))
        host.set_peers([host.listen(job.token), far], host.name, 1)
        stalled.settimeout(CAUGHT_UP_S)
        with stalled.accept()[0] as sock:
            sock.settimeout(CAUGHT_UP_S)
            assert sock.recv(1)  # a request is under way
            assert host.agent.stop(deadline_s=CAUGHT_UP_S) == 0
        # Not for its deadline: it was cut.
        assert "was closed here" in host.agent.log()
        assert "no answer in time" not in host.agent.log()


# --- faults ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "point",
    [
        "agent.push.before_holders", "agent.push.before_send", "agent.push.after_send",
        "agent.push.after_holders",
    ],
)  # fmt: skip
def test_the_coordinators_agent_dies_while_it_tells(runtime_dir: Path, point: str):
    with Job(runtime_dir, 3) as job:
        job.hosts[0].trainer.open_attempt()
        job.hosts[0].restart(f"{point}=kill")
        refs = job.seal(1)
        saved = job.manifest(1, refs, job.hosts[0])
        with pytest.raises(AgentError):
            job.hosts[0].trainer.commit(saved)
        job.hosts[0].restart()
        wait_known(job, saved)
        for host, ref in zip(job.hosts, refs, strict=True):
            assert ref.id in sealed(host)


@pytest.mark.parametrize("point", ["before_manifest", "after_manifest"])
def test_a_holders_agent_dies_while_it_takes_over(runtime_dir: Path, point: str):
    with Job(runtime_dir, 2, failpoints={1: f"agent.ingest.{point}=kill"}) as job:
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


def test_a_missed_checkpoint_comes_by_anti_entropy(runtime_dir: Path):
    with Job(runtime_dir, 3) as job:
        wait_known(job, job.save(1))
        refs = job.seal(2)
        job.hosts[2].agent.kill()
        saved = job.manifest(2, refs, job.hosts[0])
        job.hosts[0].trainer.commit(saved)
        wait_known(job, saved, 0, 1)
        job.hosts[2].agent = job.hosts[2]._agent()
        wait_known(job, saved, 2)


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


def test_a_sealed_segment_stays_until_its_manifest_comes_late(runtime_dir: Path):
    with Job(runtime_dir, 2) as job:
        wait_known(job, job.save(1))
        refs = job.seal(2)
        saved = job.manifest(2, refs, job.hosts[0])
        job.hosts[0].agent.kill()
        goes_on(job.hosts[1])
        assert refs[1].id in sealed(job.hosts[1])
        job.hosts[0].agent = job.hosts[0]._agent()
        job.hosts[0].trainer.commit(saved)
        wait_known(job, saved)
        assert refs[1].id in sealed(job.hosts[1])


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


def test_nobody_says_for_another_rank_that_its_save_failed(runtime_dir: Path):
    with Job(runtime_dir, 2) as job:
        wait_known(job, job.save(1))
        other = job.hosts[1]
        refs = job.seal(2)
        with FakeTrainer(other.runtime, job.spec, rank=1) as neighbour:
            neighbour.client.unreported_segments = told((refs[1], "failed"))
            neighbour.client.reserve(neighbour.segment_bytes)
        assert refs[1].id in sealed(other)


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


def test_a_committed_one_that_was_not_heard_of_goes_where_retention_would_delete_it(
    runtime_dir: Path,
):
    spec = spec_of(keep_last=2, capacity_bytes=4 * SLOT)
    with Job(runtime_dir, 2, spec=spec, replicas=0) as job:
        leader, other = job.hosts
        unheard = job.seal(1)[1]
        known = [job.save(2)]
        wait_known(job, known[0])
        pending = job.seal(3)
        said = ((unheard, "committed"), (known[0].segments[1], "committed"))
        other.client.unreported_segments = told(*said, (pending[1], "unknown"))
        other.trainer.write_segment(4)
        with pytest.raises(CapacityError):
            goes_on(other)
        leader.trainer.commit(third := leader.trainer.manifest(3, pending))
        wait_known(job, third)
        goes_on(other)
        assert unheard.id not in sealed(other)


def test_what_an_ended_run_left_goes_when_the_next_one_has_begun(runtime_dir: Path):
    with Job(runtime_dir, 2) as job:
        first = job.save(1)
        wait_known(job, first)
        lost = job.seal(2)[1]
        other = job.hosts[1]
        for host in job.hosts:
            host.restart_trainer()
        job.gather()
        goes_on(other)
        assert lost.id in sealed(other), "opening engines changes nothing"
        job.hosts[0].trainer.open_attempt({"default": first.save_id})
        job.save(3)
        wait_until(lambda: lost.id not in sealed(other), deadline_s=CAUGHT_UP_S)
        assert first.segments[1].id in sealed(other)


def test_an_agent_that_restarts_keeps_what_may_be_committed_elsewhere(runtime_dir: Path):
    with Job(runtime_dir, 2) as job:
        wait_known(job, job.save(1))
        refs = job.seal(2)
        saved = job.manifest(2, refs, job.hosts[0])
        job.hosts[1].agent.kill()
        job.hosts[1].trainer.close()  # its session is over, too
        job.hosts[0].trainer.commit(saved)
        job.hosts[1].agent = job.hosts[1]._agent()
        job.hosts[1].trainer = job.hosts[1]._trainer()
        wait_known(job, saved)
        assert refs[1].id in sealed(job.hosts[1])


def test_an_agent_that_died_before_its_retention_catches_up_with_it(runtime_dir: Path):
    spec, points = spec_of(keep_last=1), {1: "agent.ingest.after_manifest=kill@2"}
    with Job(runtime_dir, 2, spec=spec, replicas=0, failpoints=points) as job:
        first = job.save(1)
        wait_known(job, first)
        second = job.save(2)
        job.hosts[1].agent.wait_end()
        job.hosts[1].restart()
        wait_until(lambda: job.hosts[1].save_ids() == {second.save_id})
        wait_until(lambda: first.segments[1].id not in sealed(job.hosts[1]))


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


# --- attempts -------------------------------------------------------------------------------------


def test_attempts_from_two_hosts_at_once_are_two_attempts(runtime_dir: Path):
    with Job(runtime_dir, 3) as job:
        opened = []
        threads = [
            threading.Thread(target=lambda h=host: opened.append(h.trainer.open_attempt()))
            for host in job.hosts
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert sorted(record.number for record in opened) == [1, 2, 3]
        assert len(job.hosts[0].trainer.holdings().attempts) == 3, "the leader opened them"


def test_the_leader_alone_opens_attempts(runtime_dir: Path):
    with Job(runtime_dir, 2) as job:
        job.hosts[0].agent.kill()
        with pytest.raises(TierUnavailableError, match="h0"):
            job.hosts[1].trainer.open_attempt()
        job.hosts[0].agent = job.hosts[0]._agent()

        def opened() -> bool:
            with suppress(TierUnavailableError):  # nobody says when the leader is found again
                return job.hosts[1].trainer.open_attempt().number > 0
            return False

        wait_until(opened)
        request = m.OpenAttempt(
            session_id="0" * 32, attempt_id="1" * 32, run="2" * 32, cause="load", bases=()
        )
        with (
            line_to(job.hosts[1], job.token) as line,
            pytest.raises(TierUnavailableError, match="not the leader"),
        ):
            line.ask(ForwardAttempt(request=request))


def test_a_trainer_from_before_the_restart_cannot_commit_on_any_host(runtime_dir: Path):
    with Job(runtime_dir, 3) as job:
        wait_known(job, job.save(1))
        zombie = job.hosts[1].trainer
        zombie.open_attempt()
        # The job starts again on two of the hosts; the third one's trainer lives on, and was told
        # nothing.
        for host in (job.hosts[0], job.hosts[2]):
            host.restart_trainer()
        members = [job.hosts[0], job.hosts[2]]
        job.gather(members)
        taking_over = job.hosts[0].trainer
        taking_over.open_attempt({"default": None})
        first = job.manifest(5, job.seal(5, members), job.hosts[0])
        taking_over.commit(first)
        wait_until(lambda: knows(job.hosts[1], first))
        refs = job.seal(2, [job.hosts[1]])
        with pytest.raises(StaleAttemptError, match="has superseded"):
            zombie.commit(job.manifest(2, refs, job.hosts[1]))
        wait_until(lambda: not knows(job.hosts[0], job.manifest(2, refs, job.hosts[1])))


def test_an_attempt_goes_on_from_a_checkpoint_that_only_others_hold(runtime_dir: Path):
    with Job(runtime_dir, 2) as job:
        saved = job.save(1)
        wait_known(job, saved)
        job.hosts[0].trainer.close()
        fresh = job.add(2)
        job.gather([fresh])  # it has never heard of h1, and gets no answer from it
        data = encode_manifest(saved)
        base = m.BaseSpec(stream="default", save_id=saved.save_id, manifest=data)
        seen = (Followed(saved.attempt.number, saved.attempt.id),)
        assert fresh.client.open_attempt("3" * 32, (base,), followed=seen)
        bare = m.BaseSpec(stream="default", save_id="9" * 32)
        with pytest.raises(NotFoundError):
            fresh.client.open_attempt("4" * 32, (bare,), followed=seen)


# --- who is there ---------------------------------------------------------------------------------


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


def test_a_host_that_moved_is_found_again(runtime_dir: Path):
    with Job(runtime_dir, 2) as job:
        moved = job.hosts[1]
        before = moved.client.peers().host
        moved.cidr = "127.0.9.1/32"
        moved.restart_trainer()
        entry = moved.listen(job.token)
        assert before is not None
        assert entry.addresses != before.addresses

        def seen() -> tuple[str, ...]:
            return job.hosts[0].client.peers().peers[0].host.addresses

        wait_until(lambda: seen() == entry.addresses, deadline_s=CAUGHT_UP_S)


@pytest.mark.parametrize("kind", ["seeds", "dns"])
def test_addresses_become_members(runtime_dir: Path, kind: str):
    with Job(runtime_dir, 2) as job:
        fresh = job.add(2)
        fresh.listen(job.token)
        known = job.hosts[0].client.peers().host
        assert known is not None
        address = known.addresses[0]
        where = {"seeds": (address,)} if kind == "seeds" else {"dns": address}
        fresh.client.call(
            m.SetPeers(
                session_id=fresh.client.session_id, run="5" * 32, leader="h0", hosts=(), **where
            )
        )
        wait_until(
            lambda: any(
                each.member and each.host.host_id == "h0" for each in fresh.client.peers().peers
            ),
            deadline_s=CAUGHT_UP_S,
        )


def test_with_certificates_instead_of_a_token(runtime_dir: Path, tmp_path: Path):
    ca = trustme.CA()
    with Job(runtime_dir, 2) as job:
        entries = []
        for number, host in enumerate(job.hosts):
            host.restart_trainer()  # or the token of before is still in use
            leaf = ca.issue_cert(host.cidr.partition("/")[0])
            files = {
                "cert": leaf.cert_chain_pems[0],
                "key": leaf.private_key_pem,
                "ca": ca.cert_pem,
            }
            for name, pem in files.items():
                pem.write_to_path(tmp_path / f"{name}{number}.pem")
            tls = m.TlsSpec(**{name: str(tmp_path / f"{name}{number}.pem") for name in files})
            entries.append(listen(host, "", tls=tls).host)
        run = "6" * 32
        for host in job.hosts:
            join_run(host.client, run)
            host.set_peers(entries, "h0", 1)
        saved = job.save(1)
        wait_known(job, saved)
        assert job.hosts[0].client.peers().token == ""
        job.hosts[1].restart()
        wait_known(job, job.save(2))
        with (
            line_to(job.hosts[0], job.token) as line,
            pytest.raises(TierUnavailableError),
        ):
            line.identify()


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


def test_another_live_session_wants_another_token(runtime_dir: Path):
    with Job(runtime_dir, 1) as job:
        host = job.hosts[0]
        other = FakeTrainer(host.runtime, job.spec, rank=1)
        try:
            request = m.Listen(
                session_id=other.client.session_id, token="t" * 32, tls=None, interfaces=(),
                cidrs=(host.cidr,), port=0, labels={},
            )  # fmt: skip
            with pytest.raises(NamespaceInUseError, match="another token"):
                other.client.call(request)  # type: ignore[union-attr]
            before = host.client.peers().host
            host.trainer.close()
            changed = other.client.call(request).host  # type: ignore[union-attr]
            assert before is not None
            assert changed.addresses == before.addresses
            assert changed.incarnation == before.incarnation
        finally:
            other.close()
            host.trainer = host._trainer()


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


def test_one_host_has_no_port_and_no_file_of_it(runtime_dir: Path):
    with AgentProcess(runtime_dir) as agent, FakeTrainer(runtime_dir, spec_of()) as trainer:
        trainer.save(1)
        trainer.save(2)
        assert trainer.client.peers().host is None  # type: ignore[union-attr]
        assert not (runtime_dir / "peers").exists()
        assert not (runtime_dir / "incarnation").exists()
        tcp = Path("/proc/net/tcp").read_text() + Path("/proc/net/tcp6").read_text()
        inodes = {line.split()[9] for line in tcp.splitlines() if "inode" not in line}
        fds = Path(f"/proc/{agent.pid}/fd")
        held = {os.readlink(each) for each in fds.iterdir() if each.is_symlink()}
        assert not held & {f"socket:[{inode}]" for inode in inodes}


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


def test_a_bad_copy_is_told_to_the_host_that_has_it(runtime_dir: Path):
    with Job(runtime_dir, 2) as job:
        saved = job.save(1)
        wait_known(job, saved)
        ref = saved.segments[1]
        bad = {"tier": "memory", "segment_id": ref.id, "blocks": (0,), "reason": "tested"}
        job.hosts[0].client.call(m.ReportDamage(**bad, host="h1"))
        facts = next(each for each in job.hosts[1].trainer.tier().segments if each.id == ref.id)
        assert facts.bad_blocks == (0,)
        with pytest.raises(NotFoundError, match="no host h9"):
            job.hosts[0].client.call(m.ReportDamage(**bad, host="h9"))


def test_saves_without_collectives_over_several_hosts_need_one_that_decides(runtime_dir: Path):
    with Job(runtime_dir, 2) as job:
        request = m.Contribute(
            session_id=job.hosts[0].client.session_id, run="0" * 32,
            key=m.GatheringKey(stream="default", epoch="1" * 32, ordinal=0), step=1, world_size=2,
            members="2" * 32, rank=1, part=None, values=(), plan=b"", draft=None, error=None,
        )  # fmt: skip
        with pytest.raises(UsageError, match="no host is named to commit"):
            job.hosts[0].client.call(request)


def test_a_wrong_token_says_nothing(runtime_dir: Path):
    with Job(runtime_dir, 1) as job:
        with line_to(job.hosts[0], "x" * 32) as line, pytest.raises(TierUnavailableError):
            line.identify()
        with line_to(job.hosts[0], job.token) as line:
            assert line.identify().host_id == "h0"
            with pytest.raises((NotFoundError, IntegrityError)):
                line.ask(AskPlan(plan_id="f" * 32, tier="memory"))
