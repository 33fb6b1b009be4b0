"""Slots for copies: bounded, behind the training's ring, and taken up again after a restart."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from tests.support.agent import FakeTickets
from tieredckpt.agent.host.sessions import Session, SessionRecord
from tieredckpt.agent.slots.allocator import RingShape, SlotLedger
from tieredckpt.agent.slots.replicas import ReplicaRoom
from tieredckpt.errors import CapacityError
from tieredckpt.format.manifest import SegmentRef
from tieredckpt.rpc.messages.agent import NamespaceSpec
from tieredckpt.storage.memory.pool import SlotPool
from tieredckpt.storage.memory.slot import LABEL_BYTES, REPLICA_ID
from tieredckpt.testing.tier_suite import sample_segment, segment_name

SIZE = 1 << 20
SLOT = SIZE + LABEL_BYTES
SESSION = "5e" * 16


class Host:
    """Pool and ledger over one folder, with one live session."""

    def __init__(self, runtime_dir: Path) -> None:
        self.pool = SlotPool(runtime_dir / "slots")
        self.pool.scan()
        self.session = Session(
            SESSION, SessionRecord(namespace="run", run=SESSION, local_rank=0, local_world_size=1)
        )
        self.tickets = FakeTickets()
        self.ledger = SlotLedger(
            self.pool, self.tickets, threading.RLock(), {SESSION: self.session}
        )
        self.replicas = self.ledger.replicas

    def reserve(self, number: int, *, slots: int = 8, **changes: int) -> tuple[int, bool]:
        """The locked descriptor, and whether it may hold part of the segment."""
        room = ReplicaRoom(
            namespace="run",
            capacity_bytes=changes.get("capacity_bytes", 64 << 20),
            ring_bytes=changes.get("ring_bytes", 0),
            slots_max=slots,
        )
        ref = SegmentRef(segment_name(number), changes.get("size", SIZE), "0" * 32, "other")
        reservation, resumed = self.replicas.reserve(room, ref)
        return reservation.fd, resumed

    def fill(self, number: int) -> None:
        """A whole copy of segment ``number``."""
        data = sample_segment(segment_name(number), 5000)
        fd, _ = self.reserve(number, size=len(data))
        slot = self.pool.find(segment_name(number))
        assert slot is not None
        os.pwrite(fd, data, 0)
        self.pool.seal(
            slot.slot_id,
            segment_id=segment_name(number),
            segment_bytes=len(data),
            root=data[-16:].hex(),
        )
        os.close(fd)


@pytest.fixture
def host(runtime_dir: Path) -> Host:
    return Host(runtime_dir)


def test_copies_reuse_the_slots_of_copies(host: Host):
    host.fill(1)
    assert host.replicas.held_bytes("run") == len(sample_segment(segment_name(1), 5000))
    (slot,) = host.replicas.of("run")
    host.pool.free(slot.slot_id)
    fd, resumed = host.reserve(2)
    assert not resumed
    os.close(fd)
    assert [each.slot_id for each in host.replicas.of("run")] == [slot.slot_id]


def test_an_interrupted_copy_goes_on_in_its_slot(host: Host, runtime_dir: Path):
    fd, resumed = host.reserve(1)
    os.close(fd)  # what the kernel does if the agent dies
    assert not resumed
    again = Host(runtime_dir)
    assert again.ledger.reap({segment_name(1)}) == 0, "a manifest refers to it"
    fd, resumed = again.reserve(1)
    assert resumed
    os.close(fd)
    assert len(again.pool.slots()) == 1
    assert again.ledger.reap(set()) == 1, "its checkpoint is gone"
    assert [each.label.state for each in again.pool.slots()] == ["free"]


def test_a_copy_that_is_being_written_is_left_alone(host: Host):
    fd, _ = host.reserve(1)
    assert host.ledger.reap(set()) == 0
    assert host.replicas.release_unwanted("run", lambda segment_id: False) == 0
    os.close(fd)
    assert host.replicas.release_unwanted("run", lambda segment_id: True) == 0
    assert host.replicas.release_unwanted("run", lambda segment_id: False) == 1


def test_their_number_is_bounded(host: Host):
    for number in (1, 2):
        os.close(host.reserve(number, slots=2)[0])
    with pytest.raises(CapacityError, match="all 2 slots for copies are in use"):
        host.reserve(3, slots=2)
    assert len(host.pool.slots()) == 2


def test_a_free_one_of_another_size_makes_place(host: Host):
    os.close(host.reserve(1, slots=1)[0])
    host.replicas.release_unwanted("run", lambda segment_id: False)
    os.close(host.reserve(2, slots=1, size=4 * SIZE)[0])
    (slot,) = host.replicas.of("run")
    assert slot.capacity >= 4 * SIZE


def test_what_the_ring_still_needs_is_not_theirs(host: Host):
    with pytest.raises(CapacityError, match="for this host's own saves"):
        host.reserve(1, capacity_bytes=3 * SLOT, ring_bytes=3 * SLOT)
    assert host.pool.slots() == ()
    os.close(host.reserve(1, capacity_bytes=4 * SLOT, ring_bytes=3 * SLOT)[0])


def test_a_session_takes_no_copys_slot_but_its_room_if_it_must(host: Host):
    os.close(host.reserve(1)[0])
    host.replicas.release_unwanted("run", lambda segment_id: False)
    spec = NamespaceSpec(capacity_bytes=3 * SLOT, keep_last=1, wait_s=0.0, tiers=())
    shape = RingShape(namespace="run", spec=spec, num_streams=1)
    assert len(host.ledger.prepare(host.session, shape, SIZE)) == 2
    assert len(host.replicas.of("run")) == 1
    spec = NamespaceSpec(capacity_bytes=3 * SLOT, keep_last=2, wait_s=0.0, tiers=())
    shape = RingShape(namespace="run", spec=spec, num_streams=1)
    assert len(host.ledger.prepare(host.session, shape, SIZE)) == 3
    assert host.replicas.of("run") == []
    host.tickets.close()


def test_a_bad_copy_is_discarded(host: Host):
    host.fill(1)
    ref = SegmentRef(segment_name(1), len(sample_segment(segment_name(1), 5000)), "0" * 32, "other")
    host.replicas.discard(ref)
    (slot,) = host.replicas.of("run")
    assert slot.label.state == "free"
    assert slot.label.session_id == REPLICA_ID
    host.replicas.discard(ref)


def test_rings_with_replicas():
    spec = NamespaceSpec(capacity_bytes=1, keep_last=2, wait_s=0.0, tiers=())
    one = RingShape(namespace="run", spec=spec, num_streams=1)
    assert one.slots == 3
    two = RingShape(namespace="run", spec=spec, num_streams=1, replicas=2)
    # The newest replicated one and the one that is being replicated, whatever the number of copies.
    assert two.slots == two.slots_min == 5
    streams = RingShape(namespace="run", spec=spec, num_streams=2, replicas=1)
    assert streams.slots == 4 + 1 + 2 + 1
