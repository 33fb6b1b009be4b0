"""The agent's core, driven directly: sessions, slots, commits, retention, adoption."""

from __future__ import annotations

import errno
import os
import secrets
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from tests.support.agent import (
    DirectClient,
    FakeTickets,
    FakeTrainer,
    layout_of,
    spec_of,
    wait_until,
)
from tieredckpt.agent import namespaces as namespaces_module
from tieredckpt.agent.host.runtime import prepare_runtime_dir
from tieredckpt.agent.node import Node
from tieredckpt.agent.slots import allocator
from tieredckpt.agent.tiers import worker as worker_module
from tieredckpt.config.tiers import Keep
from tieredckpt.errors import (
    AgentError,
    CapacityError,
    IntegrityError,
    NamespaceInUseError,
    NotFoundError,
    RemoteProtocolError,
    StaleAttemptError,
    UsageError,
)
from tieredckpt.format.envelope import seal_record
from tieredckpt.format.manifest import (
    AttemptRecord,
    Followed,
    Manifest,
    decode_attempt,
    encode_attempt,
    encode_manifest,
)
from tieredckpt.format.plan import encode_plan
from tieredckpt.format.plan_record import encoded_plan_id
from tieredckpt.recovery.evidence import read_attempts
from tieredckpt.rpc.messages import agent as m
from tieredckpt.rpc.messages.peer import Push
from tieredckpt.storage.base import manifest_key
from tieredckpt.storage.headroom import Headroom
from tieredckpt.storage.memory import slot_file as slot_file_module
from tieredckpt.storage.memory.slot import LABEL_BYTES, SlotInfo


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


class Host:
    """A node that can be 'killed' and started again over the same folder."""

    def __init__(self, runtime_dir: Path) -> None:
        self.runtime = prepare_runtime_dir(runtime_dir)
        self.clock = Clock()
        self.tickets = FakeTickets()
        self.trainers: list[FakeTrainer] = []
        self.node = self._start()

    def _start(self) -> Node:
        node = Node(self.runtime, self.tickets, host_id="host-a", clock=self.clock)
        node.start()
        return node

    def restart(self) -> None:
        """What SIGKILL and a new agent do, as far as the core can tell."""
        self.node.stop()
        self.tickets.close()
        self.tickets = FakeTickets()
        self.node = self._start()
        for trainer in self.trainers:
            trainer.client.node = self.node
            trainer.client._tickets = self.tickets

    def trainer(
        self, spec: m.NamespaceSpec | None = None, *, run: str = "", **options: object
    ) -> FakeTrainer:
        client = DirectClient(self.node, self.tickets)
        client.run_id = run or client.run_id
        trainer = FakeTrainer(
            self.runtime.path,
            spec or spec_of(),
            client=client,
            **options,  # type: ignore[arg-type]
        )
        self.trainers.append(trainer)
        return trainer

    def slots(self) -> dict[str, int]:
        """Number of slots by state."""
        found: dict[str, int] = {}
        for slot in self.node._pool.slots():
            found[slot.label.state] = found.get(slot.label.state, 0) + 1
        return found

    def close(self) -> None:
        for trainer in self.trainers:
            trainer.close()
        self.node.stop()
        self.tickets.close()


@pytest.fixture
def host(runtime_dir: Path) -> Iterator[Host]:
    host = Host(runtime_dir)
    yield host
    host.close()


def steps(trainer: FakeTrainer, tier: str = "memory") -> list[int]:
    from tieredckpt.format.manifest import decode_manifest

    return sorted(decode_manifest(f.manifest).step for f in trainer.tier(tier).manifests)


# --- saving ---------------------------------------------------------------------------------------


def test_a_steady_state_save_costs_no_reserve_and_no_new_slot(host: Host):
    trainer = host.trainer()
    assert trainer.prepare() == 3
    for step in range(10):
        trainer.save(step)
    assert trainer.reserves == 1
    assert sum(host.slots().values()) == 3
    assert steps(trainer) == [8, 9]


def test_a_segment_that_grows_takes_the_place_of_what_is_too_small(host: Host):
    """Free slots of its old size are of no use to anybody, and count."""
    spec = spec_of(capacity_bytes=21 << 20, keep_last=1, wait_s=0.05)
    trainer = host.trainer(spec, size=4 << 20)
    tick = iter(range(10_000))
    host.node._ledger._clock = lambda: float(next(tick))
    for step in (1, 2, 3):
        trainer.save(step)
    trainer.size, trainer.layout = 9 << 20, layout_of(9 << 20)
    trainer.segment_bytes = trainer.layout.segment_bytes
    for step in (4, 5, 6):
        made = trainer.save(step)
    trainer.check(made)
    assert steps(trainer) == [6]


def test_what_was_saved_reads_back(host: Host):
    trainer = host.trainer()
    for step in (1, 2):
        manifest = trainer.save(step)
    trainer.check(manifest)
    fact = next(f for f in trainer.tier().segments if f.id == manifest.segments[0].id)
    assert (fact.root, fact.error) == (manifest.segments[0].root, None)


def test_a_deleted_slot_of_the_ring_fails_nothing(host: Host):
    trainer = host.trainer()
    trainer.prepare()
    next(host.runtime.slots.iterdir()).unlink()
    assert trainer.prepare() == 2
    assert trainer.prepare() == 3
    for step in range(5):
        trainer.save(step)


def test_a_slot_that_cannot_be_opened_at_the_start_is_not_taken_for_empty(
    host: Host, monkeypatch: pytest.MonkeyPatch
):
    trainer = host.trainer()
    saved = trainer.save(1)
    real, left = slot_file_module.open_file, [1]

    def without_descriptors(path: Path, flags: int) -> int:
        if left:
            left.pop()
            raise OSError(errno.EMFILE, "too many open files")
        return real(path, flags)

    monkeypatch.setattr(slot_file_module, "open_file", without_descriptors)
    host.restart()
    assert not left
    trainer.check(saved)


def test_without_prepare_slots_are_made_as_they_are_needed(host: Host):
    trainer = host.trainer()
    for step in range(5):
        trainer.save(step)
    assert sum(host.slots().values()) == 3


def test_two_streams_keep_their_own(host: Host):
    trainer = host.trainer()
    for step in range(6):
        trainer.save(step, stream="actor")
        trainer.save(step, stream="critic")
    assert steps(trainer) == [4, 4, 5, 5]


def test_seal_is_idempotent_and_names_the_same_next_slot(host: Host):
    trainer = host.trainer()
    trainer.prepare()
    grant, fd = trainer.reserve()
    root = trainer.write(grant, fd, 1)
    first = trainer.client.seal(grant.segment_id, grant.slot_id, trainer.segment_bytes, root.hex())
    again = trainer.client.seal(grant.segment_id, grant.slot_id, trainer.segment_bytes, root.hex())
    assert first == again
    trainer.release(grant, fd)


def test_seal_refuses_what_the_trailer_does_not_say(host: Host):
    trainer = host.trainer()
    grant, fd = trainer.reserve()
    trainer.write(grant, fd, 1)
    with pytest.raises(IntegrityError):
        trainer.client.seal(grant.segment_id, grant.slot_id, trainer.segment_bytes, "0" * 32)
    with pytest.raises(NotFoundError):
        trainer.client.seal("ab" * 16, grant.slot_id, trainer.segment_bytes, "0" * 32)
    trainer.release(grant, fd)


def test_commit_is_idempotent_for_the_same_bytes_only(host: Host):
    trainer = host.trainer()
    manifest = trainer.save(1)
    data = encode_manifest(manifest)
    assert not trainer.client.commit(data).need_plan
    other = encode_manifest(msgspec.structs.replace(manifest, step=2))
    with pytest.raises(UsageError, match="other contents"):
        trainer.client.commit(other)


def test_commit_asks_for_the_plan_once(host: Host):
    trainer = host.trainer()
    trainer.open_attempt()
    ref = trainer.write_segment(1)
    data = encode_manifest(trainer.manifest(1, (ref,)))
    assert trainer.client.commit(data).need_plan
    assert steps(trainer) == []
    assert not trainer.client.commit(data, encode_plan(trainer.plan)).need_plan
    assert steps(trainer) == [1]


def test_commit_refuses_a_plan_that_is_not_the_named_one(host: Host):
    trainer = host.trainer()
    ref = trainer.write_segment(1)
    data = encode_manifest(trainer.manifest(1, (ref,)))
    wrong = encode_plan(host.trainer(size=4096).plan)
    with pytest.raises(IntegrityError):
        trainer.client.commit(data, wrong)
    with pytest.raises(IntegrityError):
        trainer.client.commit(data, b"no plan")


def test_commit_survives_the_plan_file_being_deleted(host: Host):
    trainer = host.trainer()
    trainer.save(1)
    for path in (host.runtime.namespaces / "run" / "plans").iterdir():
        path.unlink()
    trainer.save(2)
    assert 2 in steps(trainer)


def test_commit_notices_that_the_plan_was_damaged(host: Host):
    trainer = host.trainer()
    saved = trainer.save(1)
    (path,) = (host.runtime.namespaces / "run" / "plans").iterdir()
    path.write_bytes(b"damaged")
    data = encode_manifest(trainer.manifest(2, (trainer.write_segment(2),)))
    assert trainer.client.commit(data).need_plan
    assert not trainer.client.commit(data, encode_plan(trainer.plan)).need_plan
    assert encoded_plan_id(host.node.plan("run", "memory", saved.plan)) == saved.plan


def test_what_fails_after_the_commit_does_not_say_that_it_failed(host: Host):
    """Its ranks would give its parts back, each at its own host."""
    trainer = host.trainer(spec_of(keep_last=1))
    old = trainer.save(1)
    path = host.runtime.namespaces / "run" / manifest_key("default", old.save_id)
    path.unlink()
    (path / "in the way").mkdir(parents=True)
    saved = trainer.save(2)
    assert 2 in steps(trainer)
    trainer.check(saved)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"size": 4096}, IntegrityError),
        ({"root": "1" * 32}, IntegrityError),
        ({"id": "1" * 32}, NotFoundError),
        ({"host": "elsewhere"}, UsageError),
    ],
)
def test_commit_refuses_segments_that_are_not_sealed_here(
    host: Host, change: dict[str, object], error: type[Exception]
):
    trainer = host.trainer()
    ref = msgspec.structs.replace(trainer.write_segment(1), **change)
    data = encode_manifest(trainer.manifest(1, (ref,)))
    with pytest.raises(error):
        trainer.client.commit(data, encode_plan(trainer.plan))
    assert steps(trainer) == []


def test_commit_refuses_another_namespace_and_garbage(host: Host):
    trainer = host.trainer()
    manifest = trainer.save(1)
    foreign = encode_manifest(msgspec.structs.replace(manifest, namespace="other"))
    with pytest.raises(UsageError, match="other"):
        trainer.client.commit(foreign)
    with pytest.raises(IntegrityError):
        trainer.client.commit(b"garbage")


# --- attempts -------------------------------------------------------------------------------------


def test_a_zombie_cannot_commit(host: Host):
    zombie, trainer = host.trainer(), host.trainer()
    last = zombie.save(1)
    trainer.open_attempt({"default": last.save_id})
    zombie.save(2)  # who has saved nothing takes nothing over
    trainer.save(3)
    with pytest.raises(StaleAttemptError, match="from before a restart"):
        zombie.save(4)
    assert steps(trainer) == [1, 2, 3], "nobody went back behind what was not known"


def test_a_record_without_a_checkpoint_ends_nothing(host: Host):
    """Any host that has the token can send one; numbers decide nothing."""
    trainer = host.trainer()
    trainer.save(1)
    mine = trainer.attempt
    assert mine is not None
    for number, followed in ((2**63 - 1, ()), (2, (Followed(mine.number, mine.id),))):
        forged = AttemptRecord(
            namespace="run", number=number, id=secrets.token_hex(16), run=secrets.token_hex(16),
            bases=(), created_at_s=0.0, followed=followed,
        )  # fmt: skip
        host.node._registry.namespace("run").across.take(Push(attempts=(encode_attempt(forged),)))
    newest = trainer.save(2)
    host.restart()
    again = host.trainer()
    assert again.open_attempt({"default": newest.save_id}).number == mine.number + 1
    again.save(3)
    assert steps(again) == [2, 3]


def test_open_attempt_is_idempotent(host: Host):
    trainer = host.trainer()
    attempt_id = secrets.token_hex(16)
    first = trainer.client.open_attempt(attempt_id)
    assert trainer.client.open_attempt(attempt_id) == first


def test_roll_back_makes_the_abandoned_go_first(host: Host):
    trainer = host.trainer(spec_of(keep_last=3))
    kept = trainer.save(80)
    trainer.save(90)
    trainer.save(100)
    trainer.open_attempt({"default": kept.save_id})
    trainer.seqs.clear()
    trainer.save(81)
    trainer.save(82)
    assert steps(trainer) == [80, 81, 82]


# --- room -----------------------------------------------------------------------------------------


def test_a_ring_that_cannot_fit_is_refused_before_anything_is_allocated(host: Host):
    trainer = host.trainer(spec_of(capacity_bytes=4 << 20), size=2 << 20)
    with pytest.raises(CapacityError, match=r"memory\.capacity") as caught:
        trainer.prepare()
    assert caught.value.limit == "memory.capacity"
    assert host.slots() == {}
    with pytest.raises(CapacityError, match="live ranks"):
        trainer.save(1)


def test_the_sum_over_all_ranks_counts(host: Host):
    first = host.trainer(spec_of(capacity_bytes=6 << 20))
    second = host.trainer(spec_of(capacity_bytes=6 << 20), rank=1)
    first.prepare()
    with pytest.raises(CapacityError, match="1 other live ranks"):
        second.prepare()
    first.close()
    assert second.prepare() == 3


def test_no_free_slot_waits_and_then_says_why(host: Host):
    trainer = host.trainer(spec_of(capacity_bytes=3 << 20, keep_last=1, wait_s=0.05))
    host.clock.now_s = 0.0
    tick = iter(range(1000))
    host.node._ledger._clock = lambda: float(next(tick))  # each look at the clock takes a second
    manifests = [trainer.save(1), trainer.save(2)]
    _, reader = trainer.client.open_segment("memory", manifests[1].segments[0].id)
    trainer.save(3)
    with pytest.raises(CapacityError, match=r"memory\.wait"):
        trainer.save(4)
    os.close(reader)
    trainer.save(5)


def test_a_free_slot_of_the_right_size_is_taken_over_from_a_dead_session(host: Host):
    first = host.trainer()
    first.prepare()
    first.save(1)
    first.save(2)
    first.close()
    second = host.trainer()
    assert second.prepare() == 3
    assert sum(host.slots().values()) == 3
    for step in range(3, 9):
        second.save(step)
    assert sum(host.slots().values()) == 3
    assert second.reserves == 1


def test_another_size_after_a_restart_makes_room_by_removing_spare_slots(host: Host):
    spec = spec_of(capacity_bytes=14 << 20)
    first = host.trainer(spec)
    first.prepare()
    first.save(1)
    first.close()
    second = host.trainer(spec, size=3 << 20)
    second.prepare()
    for step in range(2, 8):
        second.save(step)
    assert steps(second) == [6, 7]
    assert host.node._ledger.bytes_of("run") <= spec.capacity_bytes


def test_checkpoints_of_an_earlier_run_make_room_but_the_newest_stays(host: Host):
    spec = spec_of(capacity_bytes=10 << 20, wait_s=0.0)
    first = host.trainer(spec, size=3 << 20)
    first.prepare()
    for step in (1, 2):
        newest = first.save(step)
    first.close()
    second = host.trainer(spec, size=1 << 20)
    second.prepare()
    second.open_attempt({"default": newest.save_id})
    second.save(3)
    assert steps(second) == [2, 3]
    for step in range(4, 8):
        second.save(step)
    assert steps(second) == [6, 7]
    third = host.trainer(spec_of(capacity_bytes=3 << 20, keep_last=1, wait_s=0.0), namespace="b")
    third.save(1)
    third.close()
    again = host.trainer(
        spec_of(capacity_bytes=3 << 20, keep_last=1, wait_s=0.0), namespace="b", size=5 << 18
    )
    again.save(2)
    assert steps(again) == [2]


def room_for(host: Host, size: int) -> Callable[[Path], Headroom]:
    """A host whose memory is used up when the slots take ``size`` bytes."""

    def headroom(folder: Path) -> Headroom:
        left = size - host.node._pool.total_bytes()
        return Headroom(max(0, left), "host memory", "keep less")

    return headroom


def test_old_checkpoints_make_room_also_if_it_is_the_host_that_is_full(
    host: Host, monkeypatch: pytest.MonkeyPatch
):
    first = host.trainer(size=3 << 20)
    for step in (1, 2):
        newest = first.save(step)
    first.close()
    monkeypatch.setattr(allocator, "headroom_of", room_for(host, 8 << 20))
    second = host.trainer(spec_of(wait_s=0.0), size=2 << 20)
    second.open_attempt({"default": newest.save_id})
    second.save(3)
    assert steps(second) == [2, 3]


def test_a_full_host_is_waited_for(host: Host, monkeypatch: pytest.MonkeyPatch):
    trainer = host.trainer(spec_of(wait_s=0.5))
    answers = iter([0, 0, 0])

    def headroom(folder: Path) -> Headroom:
        return Headroom(next(answers, 1 << 30), "host memory", "keep less")

    monkeypatch.setattr(allocator, "headroom_of", headroom)
    trainer.save(1)
    assert steps(trainer) == [1]
    monkeypatch.setattr(allocator, "headroom_of", lambda folder: Headroom(0, "host memory", "less"))
    impatient = host.trainer(spec_of(wait_s=0.0), namespace="other")
    with pytest.raises(CapacityError, match=r"host memory has 0"):
        impatient.save(1)


def test_abandoned_checkpoints_make_room_first(host: Host):
    trainer = host.trainer(spec_of(keep_last=4))
    manifests = {step: trainer.save(step) for step in (1, 2, 3)}
    trainer.open_attempt({"default": manifests[2].save_id})
    trainer.save(4)
    assert steps(trainer) == [1, 2, 3, 4]
    evict = host.node._registry.namespace("run").retention.evict_leftover
    for left in ([1, 2, 4], [2, 4], [4]):
        assert evict(lambda segment_id: True)
        assert steps(trainer) == left
    assert not evict(lambda segment_id: True)


def test_a_damaged_manifest_keeps_its_segments_until_a_newer_checkpoint_exists(host: Host):
    trainer = host.trainer(spec_of(keep_last=1))
    trainer.prepare()
    saved = trainer.save(1)
    trainer.close()
    (manifest,) = (host.runtime.namespaces / "run" / "manifests" / "default").iterdir()
    manifest.write_bytes(b"damaged")
    host.restart()
    again = host.trainer(spec_of(keep_last=1))
    (fact,) = again.tier().manifests
    assert fact.error is not None
    again.check(saved)
    again.open_attempt()
    again.save(2)
    host.node.reap()
    assert steps(again) == [2]
    assert host.slots()["sealed"] == 1


def test_a_request_that_was_given_up_and_is_read_late_takes_nothing_back(host: Host):
    """The agent stood still; the trainer gave a save up, and asks for the next one's slot."""
    trainer = host.trainer(spec_of(keep_last=1, capacity_bytes=3 << 20, wait_s=30.0))
    size = trainer.segment_bytes

    def ask(at_ns: int) -> m.Grant:
        request = m.Reserve(
            session_id=trainer.client.session_id, segment_bytes=size, asked_at_ns=at_ns
        )
        return host.node.reserve("run", request)

    grant = ask(2)
    with pytest.raises(AgentError, match="was abandoned"):
        ask(1)
    fd = trainer.client.redeem(grant.ticket or "")
    assert grant.slot_id in {slot.slot_id for slot in host.node._pool.slots()}
    # One that waits for room gives way, too: else it would get the slot that the next one needs.
    held = [fd, trainer.client.redeem(ask(3).ticket or "")]
    assert host.slots() == {"reserved": 2}, "there is room for no third one"
    found: list[Exception] = []

    def waiting() -> None:
        try:
            ask(4)
        except AgentError as error:
            found.append(error)

    thread = threading.Thread(target=waiting)
    thread.start()
    session, _, _ = host.node._registry.session(trainer.client.session_id, "run")
    wait_until(lambda: session.reserve_asked_ns == 4)
    session.asks(5)
    thread.join(60)
    assert len(found) == 1
    for each in held:
        os.close(each)


def test_sizes_that_no_segment_has_are_refused(host: Host):
    trainer = host.trainer()
    for size in (0, -4096, 100, 1 << 60):
        with pytest.raises(UsageError):
            trainer.client.reserve(size)


# --- endings --------------------------------------------------------------------------------------


def test_a_second_reserve_frees_what_was_never_committed(host: Host):
    trainer = host.trainer()
    trainer.prepare()
    trainer.write_segment(1)
    trainer.next = None
    trainer.write_segment(2)
    assert host.slots() == {"sealed": 1, "reserved": 1, "free": 1}


@pytest.mark.parametrize("stage", ["reserve", "write", "seal", "commit"])
def test_death_of_a_trainer_frees_what_it_must_and_keeps_what_it_must(host: Host, stage: str):
    trainer = host.trainer()
    trainer.prepare()
    trainer.save(1)
    grant, fd = trainer.reserve()
    if stage != "reserve":
        root = trainer.write(grant, fd, 2)
    if stage in ("seal", "commit"):
        ref = trainer.seal(grant, root)
    if stage == "commit":
        trainer.commit(trainer.manifest(2, (ref,)))
    trainer.release(grant, fd)
    trainer.client.drop_lease()
    host.node.reap()
    survivor = host.trainer()
    assert steps(survivor) == ([1, 2] if stage == "commit" else [1])
    assert host.slots() == (
        {"sealed": 2, "free": 1} if stage == "commit" else {"sealed": 1, "free": 2}
    )


def test_a_slot_that_is_still_locked_is_freed_only_when_its_writer_lets_go(host: Host):
    trainer = host.trainer()
    grant, fd = trainer.reserve()
    trainer.client.drop_lease()
    host.node.reap()
    assert host.slots() == {"reserved": 1}
    trainer.release(grant, fd)
    host.node.reap()
    assert host.slots() == {"free": 1}


def test_a_grant_that_nobody_fetched_is_taken_back(host: Host):
    trainer = host.trainer()
    grant = trainer.client.reserve(trainer.segment_bytes)
    host.tickets.revoke(grant.ticket or "")
    host.node.reap()
    assert host.slots() == {"reserved": 1}
    host.clock.now_s += 11
    host.node.reap()
    assert host.slots() == {"free": 1}


def test_a_provisional_grant_stands_however_long_the_next_save_takes(host: Host):
    trainer = host.trainer()
    trainer.prepare()
    trainer.save(1)
    host.clock.now_s += 3600
    host.node.reap()
    trainer.save(2)
    assert trainer.reserves == 1


# --- restart of the agent -------------------------------------------------------------------------


def test_a_restart_adopts_everything(host: Host):
    trainer = host.trainer()
    trainer.prepare()
    manifests = [trainer.save(step) for step in (1, 2, 3)]
    trainer.close()
    host.restart()
    again = host.trainer()
    assert steps(again) == [2, 3]
    again.check(manifests[-1])
    assert host.slots() == {"sealed": 2, "free": 1}
    assert again.open_attempt().number == 2


@pytest.mark.parametrize("stage", ["reserve", "write", "seal"])
def test_a_trainer_in_the_middle_of_a_save_goes_on_after_a_restart(host: Host, stage: str):
    trainer = host.trainer()
    trainer.prepare()
    trainer.save(1)
    grant, fd = trainer.reserve()
    root = trainer.write(grant, fd, 2) if stage != "reserve" else b""
    ref = trainer.seal(grant, root) if stage == "seal" else None
    manifest = trainer.manifest(2, (ref,)) if ref is not None else None
    host.restart()
    host.clock.now_s += 60
    host.node.reap()
    opened = trainer.client.open_session("run", spec_of())
    assert opened.lease_ticket == ""  # the lease never ended
    root = root or trainer.write(grant, fd, 2)
    again = trainer.seal(grant, root)
    assert ref is None or ref == again
    trainer.release(grant, fd)
    trainer.commit(manifest or trainer.manifest(2, (again,)))
    assert steps(trainer) == [1, 2]
    for step in (3, 4):
        trainer.save(step)
    assert sum(host.slots().values()) == 3


def test_a_restart_frees_what_dead_sessions_left(host: Host):
    trainer = host.trainer()
    trainer.prepare()
    trainer.save(1)
    trainer.write_segment(2)
    trainer.client.drop_lease()
    host.restart()
    assert host.slots() == {"sealed": 1, "free": 2}
    assert list(host.runtime.sessions.iterdir()) == []


def test_requests_of_an_unknown_session_say_so(host: Host):
    trainer = host.trainer()
    host.restart()
    for path in host.runtime.sessions.iterdir():
        path.unlink()
    host.restart()
    with pytest.raises(NotFoundError) as caught:
        host.node.check_session("run", trainer.client.session_id)
    assert caught.value.what == "session"


def test_damaged_slots_are_reported_and_replaced(host: Host):
    trainer = host.trainer()
    trainer.prepare()
    manifests = [trainer.save(1), trainer.save(2)]
    trainer.close()
    host.node.stop()
    for slot in host.node._pool.slots():
        if slot.label.segment_id == manifests[1].segments[0].id:
            os.truncate(host.runtime.slots / slot.slot_id, 8192)
        elif slot.label.state == "free":
            os.truncate(host.runtime.slots / slot.slot_id, 0)
    host.restart()
    again = host.trainer()
    facts = {fact.id: fact for fact in again.tier().segments}
    # Its label was cut off with its trailer, so nothing tells any more what it held.
    assert manifests[1].segments[0].id not in facts
    assert facts[manifests[0].segments[0].id].error is None
    for step in range(3, 8):
        again.save(step)
    assert steps(again) == [6, 7]
    assert all(slot.error is None for slot in host.node._pool.slots())


def slot_file(host: Host, manifest: Manifest) -> Path:
    slot = host.node._pool.find(manifest.segments[0].id)
    assert slot is not None
    return host.runtime.slots / slot.slot_id


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset, os.SEEK_END if offset < 0 else os.SEEK_SET)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))


def test_a_namespace_that_cannot_be_adopted_keeps_its_slots(host: Host):
    trainer = host.trainer()
    trainer.prepare()
    manifests = [trainer.save(1), trainer.save(2)]
    trainer.client.drop_lease()
    tmp = host.runtime.namespaces / "run" / "tmp"
    tmp.rmdir()
    tmp.write_text("in the way")
    host.restart()
    other = host.trainer(namespace="other")
    other.save(1)
    host.node.reap()
    assert host.slots()["sealed"] == 3
    tmp.unlink()
    again = host.trainer()
    host.node.reap()
    assert steps(again) == [1, 2]
    for manifest in manifests:
        again.check(manifest)


def test_a_manifest_that_is_damaged_while_the_agent_lives_keeps_its_segments(host: Host):
    trainer = host.trainer(spec_of(keep_last=1))
    saved = trainer.save(1)
    trainer.close()
    host.node.reap()
    (path,) = (host.runtime.namespaces / "run" / "manifests" / "default").iterdir()
    path.write_bytes(b"damaged")
    (fact,) = host.trainer(spec_of(keep_last=1)).tier().manifests
    assert fact.error is not None
    host.trainers[-1].close()
    host.node.reap()
    again = host.trainer(spec_of(keep_last=1))
    again.check(saved)
    again.open_attempt()
    again.save(2)
    host.node.reap()
    assert steps(again) == [2]
    assert host.slots()["sealed"] == 1


def test_a_slot_that_lost_its_label_is_known_by_its_trailer(host: Host):
    trainer = host.trainer()
    trainer.prepare()
    manifests = [trainer.save(1), trainer.save(2)]
    trainer.client.drop_lease()
    for manifest in manifests:
        flip(slot_file(host, manifest), -100)
    for _ in range(2):  # the label that was written anew is read at the second time
        host.restart()
        assert host.slots() == {"sealed": 2, "free": 1}
        assert all(slot.error is None for slot in host.node._pool.slots())
        again = host.trainer()
        for manifest in manifests:
            again.check(manifest)
        again.close()
    again = host.trainer()
    again.open_attempt({"default": manifests[1].save_id})
    again.save(3)
    assert steps(again) == [2, 3]


def test_a_slot_without_label_and_trailer_stays_while_it_may_be_needed(host: Host):
    trainer = host.trainer(spec_of(keep_last=1))
    saved = trainer.save(1)
    trainer.client.drop_lease()
    path = slot_file(host, saved)
    flip(path, -100)
    flip(path, saved.segments[0].size - 100)
    host.restart()
    host.node.reap()
    assert path.exists()
    again = host.trainer(spec_of(keep_last=1))
    again.open_attempt()
    again.save(2)
    host.node.reap()
    assert not path.exists()
    again.save(3)


def test_a_slot_without_label_stays_while_a_namespace_cannot_be_read(host: Host):
    trainer = host.trainer()
    saved = trainer.save(1)
    trainer.client.drop_lease()
    flip(slot_file(host, saved), -100)
    tmp = host.runtime.namespaces / "run" / "tmp"
    tmp.rmdir()
    tmp.write_text("in the way")
    host.restart()
    host.node.reap()
    tmp.unlink()
    again = host.trainer()
    host.node.reap()
    again.check(saved)


def delete_records(host: Host) -> None:
    """What somebody does beside the agent, who is the only one to write there."""
    for kind in ("manifests/*", "attempts"):
        for path in (host.runtime.namespaces / "run").glob(f"{kind}/*"):
            path.unlink()


@pytest.mark.parametrize("by", ["a save", "a load"])
def test_records_that_were_deleted_are_written_again(host: Host, by: str):
    trainer = host.trainer()
    saved = trainer.save(1)
    delete_records(host)
    if by == "a save":
        trainer.save(2)
    else:
        assert steps(trainer) == [1]
    host.restart()
    assert steps(trainer) == ([1, 2] if by == "a save" else [1])
    assert [decode_attempt(each).id for each in trainer.holdings().attempts] == [saved.attempt.id]
    trainer.check(saved)


def test_a_manifest_that_was_deleted_is_spilled(
    host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(worker_module, "BACKOFF_S", 0.05)
    disk = tmp_path / "disk"
    disk.write_text("in the way")
    trainer = host.trainer(spec_of(tiers={"disk": disk}))
    saved = trainer.save(1, tiers=("disk",))
    delete_records(host)
    disk.unlink()
    wait_until(lambda: trainer.client.progress(saved.save_id).levels["disk"] == "done")
    assert steps(trainer, "disk") == [1]


def test_a_slot_that_was_deleted_after_the_seal_is_not_committed(host: Host):
    trainer = host.trainer()
    trainer.save(1)
    ref = trainer.write_segment(2)
    slot = host.node._pool.find(ref.id)
    assert slot is not None
    (host.runtime.slots / slot.slot_id).unlink()
    with pytest.raises(NotFoundError, match=ref.id):
        trainer.commit(trainer.manifest(2, (ref,)))
    trainer.save(3)
    assert steps(trainer) == [1, 3]


def test_a_manifest_of_a_later_release_stays(host: Host):
    trainer = host.trainer(spec_of(keep_last=1))
    saved = trainer.save(1)
    trainer.close()
    (path,) = (host.runtime.namespaces / "run" / "manifests" / "default").iterdir()
    later = seal_record(path.read_bytes()[:8], 99, b"who knows", compress=False)
    path.write_bytes(later)
    host.restart()
    again = host.trainer(spec_of(keep_last=1))
    again.open_attempt()
    for step in (2, 3):
        again.save(step)
    host.node.reap()
    assert path.read_bytes() == later
    again.check(saved)


def test_the_number_of_a_damaged_attempt_is_not_given_again(host: Host):
    trainer = host.trainer()
    first = trainer.open_attempt()
    saved = trainer.save(1)
    other = host.trainer()
    assert other.open_attempt({"default": saved.save_id}).number == 2
    newest = other.save(2)
    (path,) = (host.runtime.namespaces / "run" / "attempts").glob("00000002-*")
    path.write_bytes(b"damaged")
    host.restart()
    again = host.trainer()
    records, warnings = read_attempts([again.holdings()])
    assert ([record.number for record in records], len(warnings)) == ([1], 1)
    again.attempt = first
    with pytest.raises(StaleAttemptError, match="attempt 2 of"):  # its checkpoint says so
        again.save(3)
    assert again.open_attempt({"default": newest.save_id}).number == 3
    again.save(4)


# --- specs ----------------------------------------------------------------------------------------


def test_a_differing_spec_is_refused_key_by_key(host: Host, tmp_path: Path):
    host.trainer(spec_of(tiers={"disk": tmp_path / "a"})).open_attempt()
    other = spec_of(capacity_bytes=1 << 30, keep_last=5, tiers={"disk": tmp_path / "b"})
    with pytest.raises(NamespaceInUseError) as caught:
        host.trainer(other)
    text = str(caught.value)
    for key in ("memory.capacity", "memory.keep.last", "tiers[disk].url"):
        assert key in text
    assert "memory.wait" not in text
    assert len(caught.value.differences) == 3


def test_with_no_live_session_the_new_spec_wins(host: Host, tmp_path: Path):
    host.trainer().client.drop_lease()
    trainer = host.trainer(spec_of(keep_last=1, tiers={"disk": tmp_path}))
    for step in (1, 2, 3):
        trainer.save(step)
    assert steps(trainer) == [3]
    assert [tier.tier for tier in trainer.holdings().tiers] == ["memory", "disk"]


def test_names_are_validated(host: Host):
    trainer = host.trainer()
    request = m.OpenSession(
        api=m.API_VERSION, version="", session_id="../" * 10 + "ab", namespace="run",
        run="ab" * 16, spec=spec_of(), local_rank=0, local_world_size=1,
    )  # fmt: skip
    with pytest.raises(RemoteProtocolError):
        host.node.open_session(request)
    good = msgspec.structs.replace(request, session_id="ab" * 16)
    with pytest.raises(RemoteProtocolError):
        host.node.open_session(msgspec.structs.replace(good, namespace="../etc"))
    for tier in ("memory", "../x"):
        bad = m.TierSpec(name=tier, url="file:///x", scope="host", keep=Keep(last=1))
        spec = msgspec.structs.replace(spec_of(), tiers=(bad,))
        with pytest.raises(RemoteProtocolError):
            host.node.open_session(msgspec.structs.replace(good, spec=spec))
    with pytest.raises(RemoteProtocolError):
        trainer.client.open_segment("memory", "../../../etc/passwd")


def test_purge_refuses_while_sessions_live(host: Host):
    trainer = host.trainer()
    trainer.save(1)
    with pytest.raises(NamespaceInUseError):
        host.node.purge("run")
    trainer.close()
    spec = host.runtime.specs / "run.json"
    assert spec.exists()
    host.node.purge("run")
    assert host.slots() == {}
    assert not spec.exists(), "or its tiers would be filled again after a restart"
    assert not (host.runtime.namespaces / "run").exists(), "or the next agent would know it again"
    with pytest.raises(NotFoundError, match="knows none"):
        host.node.holdings("run")
    fresh = host.trainer()
    assert fresh.open_attempt().number == 1
    fresh.save(1)


def test_status_counts(host: Host, tmp_path: Path):
    trainer = host.trainer(spec_of(tiers={"disk": tmp_path}))
    trainer.prepare()
    saved = trainer.save(7, tiers=("disk",))
    wait_until(lambda: trainer.client.progress(saved.save_id).levels["disk"] == "done")
    (found,) = trainer.client.status().namespaces
    assert (found.slots, found.sessions, found.checkpoints, found.newest_step) == (4, 1, 1, 7)
    assert found.slot_bytes == 4 * (found.slot_bytes // 4)
    assert found.slot_bytes // 4 % LABEL_BYTES == 0
    (disk,) = found.tiers
    assert (disk.available, disk.checkpoints, disk.newest_step, disk.lag_steps) == (True, 1, 7, 0)


def test_skipped_saves_are_counted_as_a_counter_is(host: Host):
    """Also those of a session that ends; a session reports all of its own each time."""

    def skipped() -> int:
        return host.node.status().namespaces[0].skipped_saves

    for count in (2, 5):
        trainer = host.trainer()
        for so_far in (1, count, count):
            request = m.SaveFailed(
                session_id=trainer.client.session_id, segments=(), skipped=so_far
            )
            trainer.client.request(request)
        trainer.client.drop_lease()
        host.node.reap()
    assert skipped() == 7
    host.node.purge("run")
    host.trainer()
    assert skipped() == 0


def test_a_second_job_is_refused_while_the_first_one_saves(host: Host):
    def opens(job: str, *, run: str = "", take_over: bool = False) -> FakeTrainer:
        """A process of ``job``; ``host.trainer`` would be of none, which is never refused."""
        client = DirectClient(host.node, host.tickets)
        client.run_id = run or client.run_id
        client.more = {"job": job, "pid": 4711, "take_over": take_over}
        return FakeTrainer(host.runtime.path, spec_of(), client=client)

    with opens("slurm-1") as first:
        with opens("slurm-2"):
            pass  # the first one has not saved yet: nothing of it would be lost
        first.save(7)
        host.clock.now_s += 5
        with pytest.raises(
            NamespaceInUseError,
            match=r"process 4711 of host host-a saves into run \(last 5 s ago, newest step 7\)",
        ):
            opens("slurm-2")
        opens("slurm-1").close()  # the launcher's restart, beside a process that hangs
        opens("other\nslurm-1").close()  # of two launchers' names one is the same
        opens("slurm-2", run=first.client.run_id).close()  # a run of several jobs
        host.trainer().close()
        with opens("slurm-2", take_over=True):
            first.client._open()  # again, as after a restart of the agent: it is known
        host.clock.now_s += namespaces_module.SAVES_S
        opens("slurm-2").close()  # it has not saved for long: it hangs
        first.save(8)
        host.restart()
        opens("slurm-2").close()  # no save is known of
    with opens("slurm-3") as ended:
        ended.save(9)
    opens("slurm-2").close()


def reported(call: Callable[[], object]) -> str:
    with pytest.raises(NotFoundError) as caught:
        call()
    return str(caught.value)


def test_unknown_things_are_not_found(host: Host):
    trainer = host.trainer()
    nothing = "ab" * 16
    assert nothing in reported(lambda: trainer.client.progress(nothing))
    assert nothing in reported(lambda: trainer.client.open_segment("memory", nothing))
    assert "nvme" in reported(lambda: trainer.client.open_segment("nvme", nothing))
    assert "run" in reported(lambda: host.node.holdings("elsewhere"))


def test_no_draft_is_reaped_that_is_sealed_while_the_reaper_looks(
    host: Host, monkeypatch: pytest.MonkeyPatch
):
    """The trainer unlocks its slot with the answer, and the reaper had asked for drafts before."""
    trainer = host.trainer()
    trainer.prepare()
    session_id, size = trainer.client.session_id, trainer.segment_bytes
    grant = host.node.reserve_draft(
        "run",
        m.ReserveDraft(
            session_id=session_id, segment_bytes=size, stream="default", step=1, drafts=1
        ),
    )
    draft_id = grant.segment_id
    assert grant.ticket is not None
    fd = trainer.client.redeem(grant.ticket)
    root = trainer.write(grant, fd, 1).hex()

    def seal() -> None:
        host.node.seal_draft(
            "run",
            m.SealDraft(
                session_id=session_id, segment_id=draft_id, slot_id=grant.slot_id,
                segment_bytes=size, root=root, stream="default", step=1, ordinal=0,
            ),
        )  # fmt: skip
        os.close(fd)

    drafts, pool = host.node._ledger.drafts, host.node._pool
    known, slot_of, sealing = drafts.ids, pool.slot, threading.Thread(target=seal)
    within, looked = threading.Event(), threading.Event()

    def slot(slot_id: str) -> SlotInfo:
        within.set()
        looked.wait(0.3)  # for the reaper, which is to wait for this one
        return slot_of(slot_id)

    def ids(namespace: str | None = None) -> set[str]:
        found = known(namespace)
        looked.set()
        sealing.join(5.0)
        return found

    monkeypatch.setattr(drafts, "ids", ids)
    monkeypatch.setattr(pool, "slot", slot)
    sealing.start()
    assert within.wait(5.0)
    host.node.reap()
    sealing.join(5.0)
    assert known() == {draft_id}
    assert pool.find(draft_id) is not None
