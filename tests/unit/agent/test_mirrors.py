"""Drafts in the agent: which become copies, which wait, which are given back."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tieredckpt.agent.slots.replicas import DRAFT_WAIT_S, Drafts, ReplicaRoom
from tieredckpt.errors import IntegrityError, NotFoundError
from tieredckpt.format.digest import digest
from tieredckpt.format.manifest import AttemptId, Manifest, SegmentRef
from tieredckpt.format.segment import (
    TRAILER_BYTES,
    ItemSpec,
    decode_trailer,
    encode_footer,
    lay_out,
    retitled,
)
from tieredckpt.rpc.messages.agent import ReserveDraft, SealDraft
from tieredckpt.storage.memory.pool import SlotPool
from tieredckpt.storage.memory.slot import REPLICA_ID, Label

NAMESPACE = "ns"
SESSION = "5" * 32
ROOM = ReplicaRoom(namespace=NAMESPACE, capacity_bytes=1 << 30, ring_bytes=0, slots_max=9)
LAYOUT = lay_out([ItemSpec("x", "tensor", 4096, "uint8", (4096,), (0,), (4096,))])
SIZE = LAYOUT.segment_bytes


def segment(content: int, segment_id: str) -> bytes:
    data = bytes([content]) * LAYOUT.data_bytes
    return data + encode_footer(LAYOUT, digest(data), bytes.fromhex(segment_id))


def ref_of(content: int, segment_id: str = "0a" * 16, host: str = "other") -> SegmentRef:
    root = segment(content, segment_id)[-16:].hex()
    return SegmentRef(segment_id, SIZE, root, host)


def manifest_of(*refs: SegmentRef, step: int = 1) -> Manifest:
    return Manifest(
        save_id=f"{step:032x}",
        namespace=NAMESPACE,
        stream="default",
        step=step,
        attempt=AttemptId(1, "a" * 32),
        seq=step,
        parent=None,
        lineage=(),
        plan="b" * 32,
        tiers=(),
        segments=refs,
        world_size=2,
        tags={},
        created_at_s=0.0,
    )


class Bench:
    """A pool, its drafts, and a trainer that writes them."""

    def __init__(self, folder: Path) -> None:
        self.now_s = 0.0
        self.live = {SESSION}
        self.pool = SlotPool(folder / "slots")
        self.pool.scan()
        self.drafts = self.make()
        self.minted = 0

    def make(self) -> Drafts:
        return Drafts(self.pool, lambda session: session in self.live, clock=lambda: self.now_s)

    def write(self, content: int, *, step: int = 1, ordinal: int = 0) -> str:
        """A sealed draft; its id."""
        self.minted += 1
        draft_id = f"{self.minted:032x}"
        self.drafts.begin(
            NAMESPACE,
            ReserveDraft(
                session_id=SESSION, segment_bytes=SIZE, stream="default", step=step, drafts=1
            ),
            lambda: ROOM,
        )
        slot = self.pool.create(1 << 20, namespace=NAMESPACE, session_id=REPLICA_ID)
        label = Label(
            state="reserved",
            namespace=NAMESPACE,
            segment_id=draft_id,
            session_id=REPLICA_ID,
            segment_bytes=SIZE,
        )
        reserved = self.pool.reserve(label, [slot.slot_id])
        assert reserved is not None
        os.pwrite(reserved.fd, segment(content, draft_id), 0)
        self.seal(draft_id, slot.slot_id, content, step=step, ordinal=ordinal)
        os.close(reserved.fd)
        return draft_id

    def seal(self, draft_id: str, slot_id: str, content: int, *, step: int, ordinal: int) -> None:
        self.drafts.seal(
            NAMESPACE,
            SealDraft(
                session_id=SESSION,
                segment_id=draft_id,
                slot_id=slot_id,
                segment_bytes=SIZE,
                root=segment(content, draft_id)[-16:].hex(),
                stream="default",
                step=step,
                ordinal=ordinal,
            ),
        )

    def state(self, segment_id: str) -> str:
        slot = self.pool.find(segment_id)
        return slot.label.state if slot is not None else "none"


@pytest.fixture
def bench(runtime_dir: Path) -> Bench:
    return Bench(runtime_dir)


def test_a_trailer_with_the_owners_id_is_the_owners_trailer():
    mine, theirs = segment(7, "01" * 16), segment(7, "02" * 16)
    assert retitled(mine[-TRAILER_BYTES:], bytes.fromhex("02" * 16)) == theirs[-TRAILER_BYTES:]
    assert decode_trailer(theirs[-TRAILER_BYTES:]).segment_id == bytes.fromhex("02" * 16)


def test_an_equal_draft_becomes_the_owners_segment(bench: Bench):
    draft_id = bench.write(7)
    assert bench.state(draft_id) == "reserved"  # and so it is no copy of anything yet
    ref = ref_of(7)
    bench.drafts.settle(manifest_of(ref), "here")
    assert bench.state(draft_id) == "none"
    assert bench.drafts.ids() == set()
    with bench.pool.open_segment(ref.id) as opened:
        found = bytearray(SIZE)
        opened.read_into(0, memoryview(found))
    assert bytes(found) == segment(7, ref.id)
    bench.drafts.settle(manifest_of(ref), "here")  # a manifest may come again


def test_a_draft_that_differs_waits_for_the_pull(bench: Bench):
    draft_id = bench.write(7)
    ref = ref_of(8)
    manifest = manifest_of(ref)
    bench.drafts.settle(manifest, "here")
    assert bench.state(ref.id) == "none"
    assert bench.drafts.ids(NAMESPACE) == {draft_id}
    assert bench.drafts.ids("another") == set()
    assert list(bench.drafts.parts_of(manifest)) == [ref]
    taken = bench.drafts.take_up(ref)
    assert taken is not None
    try:
        assert os.pread(taken.fd, LAYOUT.data_bytes, 0) == bytes([7]) * LAYOUT.data_bytes
        assert bench.state(ref.id) == "reserved"
        assert bench.drafts.take_up(ref) is None
        assert not bench.drafts.parts_of(manifest)
    finally:
        os.close(taken.fd)


def test_a_pull_that_comes_before_the_manifest_was_settled(bench: Bench):
    """The manifest is in the catalogue, and the thread that took it over was not here yet: who
    pulls settles it, and what that thread does afterwards leaves the slot alone.
    """
    draft = bench.write(7)
    slot = bench.pool.find(draft)
    ref = ref_of(8)
    assert slot is not None
    assert bench.drafts.take_up(ref) is None, "nobody knows yet what it is a part of"
    bench.drafts.settle(manifest_of(ref), "here")
    assert bench.drafts.parts_of(manifest_of(ref)) == [ref]
    taken = bench.drafts.take_up(ref)
    assert taken is not None
    assert taken.slot.slot_id == slot.slot_id
    bench.drafts.settle(manifest_of(ref), "here")
    assert bench.state(ref.id) == "reserved"
    os.close(taken.fd)


def test_the_number_in_the_manifest_says_what_a_draft_is_of(bench: Bench):
    bench.write(7, ordinal=1)
    mine, theirs = ref_of(7, "0b" * 16, "here"), ref_of(7)
    bench.drafts.settle(manifest_of(mine, theirs), "here")
    assert bench.state(theirs.id) == "sealed"
    assert bench.state(mine.id) == "none"


@pytest.mark.parametrize("refs", [(), (ref_of(7, host="here"),)])
def test_a_draft_of_nothing_is_given_back(bench: Bench, refs: tuple[SegmentRef, ...]):
    bench.write(7)
    bench.drafts.settle(manifest_of(*refs), "here")
    assert bench.drafts.ids() == set()
    assert [slot.label.state for slot in bench.pool.slots()] == ["free"]


def test_other_saves_are_nothing_to_it(bench: Bench):
    draft_id = bench.write(7, step=2)
    bench.drafts.settle(manifest_of(ref_of(7), step=1), "here")
    assert bench.drafts.ids() == {draft_id}
    assert bench.state(draft_id) == "reserved"


def test_a_second_draft_of_what_is_here_is_given_back(bench: Bench):
    bench.write(7)
    bench.write(7)  # the save was tried twice
    ref = ref_of(7)
    bench.drafts.settle(manifest_of(ref), "here")
    assert sorted(slot.label.state for slot in bench.pool.slots()) == ["free", "sealed"]


def test_a_draft_whose_manifest_never_comes_goes_with_the_saves_after_it(bench: Bench):
    ids = [bench.write(step, step=step) for step in (1, 2, 3)]
    assert bench.drafts.ids() == set(ids[1:])
    assert bench.state(ids[0]) == "none"


def test_a_draft_of_an_ended_session_goes_after_a_while(bench: Bench):
    draft_id = bench.write(7)
    bench.live.clear()
    bench.now_s = DRAFT_WAIT_S - 1
    assert bench.drafts.ids() == {draft_id}
    bench.now_s = DRAFT_WAIT_S + 1
    assert bench.drafts.ids() == set()
    assert bench.state(draft_id) == "none"


def test_what_an_agent_that_died_leaves_is_an_interrupted_pull(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
):
    bench.write(7)
    ref = ref_of(7)

    class Died(Exception):
        pass

    def die(name: str) -> None:
        if name == "agent.draft.labelled":
            raise Died

    monkeypatch.setattr("tieredckpt.failpoints.reach", die)
    with pytest.raises(Died):
        bench.drafts.settle(manifest_of(ref), "here")
    pool = SlotPool(bench.pool.folder)
    (slot,) = pool.scan()
    assert (slot.label.state, slot.label.segment_id) == ("reserved", ref.id)
    assert slot.label.session_id == REPLICA_ID


def test_a_slot_that_somebody_has_locked_is_left_alone(bench: Bench):
    draft_id = bench.write(7)
    slot = bench.pool.find(draft_id)
    assert slot is not None
    held = bench.pool.reassign(slot.slot_id, draft_id, SIZE)
    assert held is not None
    try:
        assert bench.pool.reassign(slot.slot_id, "0c" * 16, SIZE) is None
        bench.drafts.settle(manifest_of(ref_of(7)), "here")
        assert bench.state("0a" * 16) == "none"
    finally:
        os.close(held.fd)


def test_a_draft_that_is_not_what_it_says_is_refused(bench: Bench):
    draft_id = bench.write(7)
    slot = bench.pool.find(draft_id)
    assert slot is not None
    with pytest.raises(IntegrityError):
        bench.seal(draft_id, slot.slot_id, 8, step=1, ordinal=0)
    with pytest.raises(NotFoundError):
        bench.seal("0d" * 16, slot.slot_id, 7, step=1, ordinal=0)


def test_what_drafts_may_take_is_what_live_sessions_write(bench: Bench):
    bench.write(7)
    assert bench.drafts.slots_max(NAMESPACE, 5) == 5
    assert bench.drafts.slots_max("another", 5) == 0
    bench.live.clear()
    assert bench.drafts.slots_max(NAMESPACE, 5) == 0
