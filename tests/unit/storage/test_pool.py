"""The slots of one host: never two owners, never a damaged one, never a crash over one."""

from __future__ import annotations

import errno
import mmap
import os
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    rule,
    run_state_machine_as_test,
)

from tieredckpt.errors import (
    CapacityError,
    IntegrityError,
    NotFoundError,
    TierUnavailableError,
)
from tieredckpt.storage.headroom import Headroom
from tieredckpt.storage.memory import pool as pool_module
from tieredckpt.storage.memory.pool import SlotPool
from tieredckpt.storage.memory.slot import (
    LABEL_BYTES,
    Label,
    Reservation,
    SlotInfo,
    lock_reserved,
    read_label,
    try_lock_shared,
    write_label,
)
from tieredckpt.testing.tier_suite import sample_segment, segment_name

CAPACITY = 1 << 20
SESSION = "5e" * 16
SEGMENT = segment_name(1)


@pytest.fixture
def pool(runtime_dir: Path) -> SlotPool:
    pool = SlotPool(runtime_dir / "slots")
    assert pool.scan() == ()
    return pool


def reserve(pool: SlotPool, segment_id: str = SEGMENT, **changes: object) -> Reservation | None:
    among = changes.pop("among", [slot.slot_id for slot in pool.slots()])
    return pool.reserve(reserved_label(segment_id, **changes), among)


def reserved_label(segment_id: str, **changes: object) -> Label:
    wanted = {"namespace": "run", "session_id": SESSION, "segment_bytes": 4096, **changes}
    return Label(state="reserved", segment_id=segment_id, **wanted)


def fill(fd: int, segment_id: str = SEGMENT, seed: int = 0) -> tuple[int, str]:
    """Write a segment; its size and root."""
    data = sample_segment(segment_id, 9000, seed)
    os.pwrite(fd, data, 0)
    return len(data), data[-16:].hex()


def sealed(pool: SlotPool, segment_id: str = SEGMENT, *, close: bool = True) -> SlotInfo:
    reserved = reserve(pool, segment_id) or (pool.create(CAPACITY) and reserve(pool, segment_id))
    size, root = fill(reserved.fd, segment_id)
    slot = pool.seal(reserved.slot.slot_id, segment_id=segment_id, segment_bytes=size, root=root)
    if close:
        os.close(reserved.fd)
    return slot


def path_of(pool: SlotPool, slot: SlotInfo) -> Path:
    return pool.folder / slot.slot_id


def rescanned(pool: SlotPool) -> SlotPool:
    """As the next agent sees it."""
    other = SlotPool(pool.folder)
    other.scan()
    return other


# --- life of a slot -------------------------------------------------------------------------------


def test_a_mapping_alone_keeps_the_lock(pool: SlotPool):
    """mmap keeps the open file description alive, and the lock with it."""
    slot = pool.create(CAPACITY)
    reserved = reserve(pool)
    mapped = mmap.mmap(reserved.fd, CAPACITY)
    os.close(reserved.fd)
    assert pool.is_locked(slot.slot_id)
    assert not pool.release(slot.slot_id)
    mapped.close()
    assert pool.release(slot.slot_id)


def test_locks_of_a_killed_process_end(pool: SlotPool):
    slot = pool.create(CAPACITY)
    reserved = reserve(pool)
    code = "import sys; sys.stdout.write('x'); sys.stdout.flush(); sys.stdin.read()"
    # It inherits the locked description as a trainer receives it.
    trainer = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        pass_fds=[reserved.fd],
    )
    try:
        trainer.stdout.read(1)
        os.close(reserved.fd)
        agent = rescanned(pool)
        assert agent.is_locked(slot.slot_id)
        assert not agent.release(slot.slot_id)
        assert reserve(agent, segment_name(2)) is None
        trainer.send_signal(signal.SIGKILL)
        trainer.wait(timeout=30)
        assert agent.release(slot.slot_id)
        os.close(reserve(agent, segment_name(2)).fd)
    finally:
        trainer.kill()
        trainer.communicate(timeout=30)


def test_grant_is_proven_by_lock_and_label(pool: SlotPool):
    slot = sealed(pool)
    mine = pool.open_slot(slot.slot_id)
    wanted = reserved_label(segment_name(2))
    assert not pool.grant(slot.slot_id, wanted), "not free"
    assert not lock_reserved(mine, CAPACITY, segment_name(2))
    pool.free(slot.slot_id)
    with_reader = os.open(path_of(pool, slot), os.O_RDONLY)
    assert try_lock_shared(with_reader)
    assert not pool.grant(slot.slot_id, wanted), "somebody reads"
    os.close(with_reader)
    assert pool.grant(slot.slot_id, wanted)
    assert lock_reserved(mine, CAPACITY, segment_name(2))
    assert not pool.release(slot.slot_id), "its writer has claimed it"
    os.close(mine)
    late = pool.open_slot(slot.slot_id)
    assert pool.release(slot.slot_id)
    assert not lock_reserved(late, CAPACITY, segment_name(2)), "it was taken back"
    os.close(late)
    assert not pool.grant("00" * 16, wanted)


def test_seal_compares_the_trailer(pool: SlotPool):
    pool.create(CAPACITY)
    reserved = reserve(pool)
    slot_id = reserved.slot.slot_id
    size, root = fill(reserved.fd)
    with pytest.raises(NotFoundError):
        pool.seal(slot_id, segment_id=segment_name(2), segment_bytes=size, root=root)
    for wrong_size, wrong_root in (
        (size, "00" * 16),
        (size + 4096, root),
        (CAPACITY + 4096, root),
        (0, root),
    ):
        with pytest.raises(IntegrityError):
            pool.seal(slot_id, segment_id=SEGMENT, segment_bytes=wrong_size, root=wrong_root)
    assert pool.slot(slot_id).label.state == "reserved"
    assert pool.slot(slot_id).error is None, "a wrong writer does not spoil the slot"
    for _ in range(2):
        done = pool.seal(slot_id, segment_id=SEGMENT, segment_bytes=size, root=root)
        assert (done.label.state, done.label.root) == ("sealed", root)
    with pytest.raises(IntegrityError):
        pool.seal(slot_id, segment_id=SEGMENT, segment_bytes=size, root="00" * 16)
    with pytest.raises(TierUnavailableError):
        pool.open_segment(SEGMENT)  # the writer has not let go
    os.close(reserved.fd)
    pool.open_segment(SEGMENT).close()
    assert rescanned(pool).find(SEGMENT).label == done.label


def test_the_segment_that_lay_there_before_cannot_be_sealed_again(pool: SlotPool):
    """A writer that died after its reservation leaves the old segment's trailer in the slot."""
    slot = sealed(pool)
    pool.free(slot.slot_id)
    reserved = reserve(pool, segment_name(2))
    with pytest.raises(IntegrityError, match="its trailer has id"):
        pool.seal(
            slot.slot_id,
            segment_id=segment_name(2),
            segment_bytes=slot.label.segment_bytes,
            root=slot.label.root,
        )
    os.close(reserved.fd)
    assert rescanned(pool).find(SEGMENT) is None


# --- damage ---------------------------------------------------------------------------------------


def punch(path: Path) -> None:
    size = path.stat().st_size
    os.truncate(path, 0)
    os.truncate(path, size)


def flip_label(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(CAPACITY + 100)
        byte = file.read(1)[0]
        file.seek(CAPACITY + 100)
        file.write(bytes([byte ^ 1]))


def replace_by_link(path: Path) -> None:
    path.unlink()
    path.symlink_to("/etc/passwd")


def replace_by_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


DAMAGE = {
    "emptied": lambda path: os.truncate(path, 0),
    "truncated": lambda path: os.truncate(path, 8192),
    "truncated by a byte": lambda path: os.truncate(path, CAPACITY + LABEL_BYTES - 1),
    "lengthened": lambda path: os.truncate(path, 2 * CAPACITY),
    "punched": punch,
    "label flipped": flip_label,
    "a link": replace_by_link,
    "a pipe": replace_by_pipe,
}


@pytest.mark.parametrize("how", DAMAGE)
@pytest.mark.parametrize("state", ["free", "reserved", "sealed"])
def test_damaged_slots_are_reported_and_never_handed_out(pool: SlotPool, how: str, state: str):
    slot = pool.create(CAPACITY)
    if state == "reserved":
        os.close(reserve(pool).fd)
    elif state == "sealed":
        sealed(pool)
    DAMAGE[how](path_of(pool, slot))
    found = rescanned(pool)
    assert found.slot(slot.slot_id).error
    assert reserve(found, segment_name(2)) is None
    assert not found.free(slot.slot_id)
    assert found.find(SEGMENT) is None
    with pytest.raises(IntegrityError):
        found.open_slot(slot.slot_id)
    assert found.remove(slot.slot_id)
    assert list(pool.folder.iterdir()) == []


@pytest.mark.parametrize("how", [each for each in DAMAGE if each != "label flipped"])
def test_damage_under_a_running_pool(pool: SlotPool, how: str):
    slot = pool.create(CAPACITY)
    DAMAGE[how](path_of(pool, slot))
    assert reserve(pool) is None
    assert pool.slot(slot.slot_id).error
    with pytest.raises(IntegrityError):
        pool.open_slot(slot.slot_id)
    assert pool.remove(slot.slot_id)


def test_a_flipped_label_of_a_free_slot_is_just_written_anew(pool: SlotPool):
    slot = pool.create(CAPACITY)
    flip_label(path_of(pool, slot))
    os.close(reserve(pool).fd)
    assert rescanned(pool).find(SEGMENT).error is None


def test_truncated_segment_still_gives_what_is_left(pool: SlotPool):
    slot = sealed(pool)
    os.truncate(path_of(pool, slot), 4096)
    with pool.open_segment(SEGMENT) as opened:
        assert opened.size == 4096
        data = bytearray(4096)
        opened.read_into(0, memoryview(data))
        assert data == sample_segment(SEGMENT, 9000)[:4096]
        with pytest.raises(IntegrityError):
            opened.read_into(1, memoryview(data))
    assert not pool.free(slot.slot_id)
    assert pool.slot(slot.slot_id).error


def test_slot_truncated_while_it_is_being_read(pool: SlotPool):
    slot = sealed(pool)
    with pool.open_segment(SEGMENT) as opened:
        os.truncate(path_of(pool, slot), 4096)
        with pytest.raises(IntegrityError, match="truncated"):
            opened.read_into(0, memoryview(bytearray(8192)))


def test_deleted_slots_are_forgotten(pool: SlotPool):
    slot = sealed(pool)
    path_of(pool, slot).unlink()
    with pytest.raises(NotFoundError):
        pool.open_segment(SEGMENT)
    assert pool.slots() == ()
    free = pool.create(CAPACITY)
    path_of(pool, free).unlink()
    assert reserve(pool) is None
    assert pool.slots() == ()


@pytest.mark.parametrize("first", [True, False])
def test_a_slot_that_was_replaced_by_another(pool: SlotPool, first: bool):
    """Whichever name comes first: the segment stays where it was written, whole or damaged."""
    slot = sealed(pool)
    copy = pool.folder / (("00" if first else "ff") * 16)
    data = bytearray(path_of(pool, slot).read_bytes())
    data[100] ^= 1
    copy.write_bytes(data)
    found = rescanned(pool)
    good = found.find(slot.label.segment_id)
    assert good is not None
    assert (good.slot_id, good.error) == (slot.slot_id, None)
    bad = found.slot(copy.name)
    assert bad.label_lost
    assert slot.slot_id in str(bad.error)
    # The original is lost, too: what its trailer says of the copy can be taken up.
    assert found.remove(good.slot_id)
    assert found.find(slot.label.segment_id) is None
    assert found.readopt(copy.name, slot.label)
    again = rescanned(pool).find(slot.label.segment_id)
    assert again is not None
    assert (again.slot_id, again.error) == (copy.name, None)


def test_twins(pool: SlotPool):
    """Two slots say that they hold the same segment: only one is believed."""
    slot = sealed(pool)
    copy = pool.folder / ("ff" * 16)
    copy.write_bytes(path_of(pool, slot).read_bytes())
    with copy.open("r+b") as file:
        write_label(file.fileno(), slot.capacity, replace(slot.label, slot_id=copy.name))
    found = rescanned(pool)
    assert sorted(bool(each.error) for each in found.slots()) == [False, True]
    good = found.find(slot.label.segment_id)
    assert good is not None
    assert not good.error
    # It goes: what is left of the segment is known still, until it goes, too.
    assert found.remove(good.slot_id)
    left = found.find(slot.label.segment_id)
    assert left is not None
    assert left.error
    assert found.remove(left.slot_id)
    assert found.find(slot.label.segment_id) is None


def test_scan_leaves_strangers_alone_and_removes_the_unfinished(pool: SlotPool):
    (pool.folder / "README").write_text("not a slot")
    (pool.folder / ("new-" + "ab" * 16)).write_bytes(b"x" * 100)
    looking = SlotPool(pool.folder)
    assert looking.scan(sweep=False) == ()
    assert len(list(pool.folder.iterdir())) == 2
    assert pool.scan() == ()
    assert [each.name for each in pool.folder.iterdir()] == ["README"]


# --- room -----------------------------------------------------------------------------------------


def test_no_headroom_is_a_capacity_error_with_advice(runtime_dir: Path):
    pool = SlotPool(
        runtime_dir / "slots", headroom=lambda _: Headroom(CAPACITY, "memory cgroup", "raise it")
    )
    with pytest.raises(CapacityError, match="raise it") as caught:
        pool.create(CAPACITY)
    assert caught.value.limit == "memory cgroup"
    assert caught.value.available_bytes == CAPACITY
    assert caught.value.needed_bytes == CAPACITY + LABEL_BYTES
    assert list(pool.folder.iterdir()) == []
    assert pool.total_bytes() == 0


def test_headroom_is_asked_again_while_allocating(
    runtime_dir: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(pool_module, "ALLOCATE_STEP_BYTES", CAPACITY)
    answers = [8 * CAPACITY, 8 * CAPACITY, 8 * CAPACITY, 0]
    pool = SlotPool(
        runtime_dir / "slots", headroom=lambda _: Headroom(answers.pop(0), "memory cgroup", "")
    )
    with pytest.raises(CapacityError):
        pool.create(4 * CAPACITY)
    assert answers == []
    assert list(pool.folder.iterdir()) == []
    assert pool.total_bytes() == 0


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.ENOMEM, errno.EIO])
def test_failed_allocation_leaves_nothing(
    pool: SlotPool, monkeypatch: pytest.MonkeyPatch, code: int
):
    def fail(fd: int, offset: int, size: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "posix_fallocate", fail)
    with pytest.raises(TierUnavailableError if code == errno.EIO else CapacityError):
        pool.create(CAPACITY)
    assert list(pool.folder.iterdir()) == []
    assert pool.total_bytes() == 0


def test_tmpfs_full(small_tmpfs: Path):
    """On a real tmpfs of 8 MiB: the check says so before, the kernel during the allocation."""
    pool = SlotPool(small_tmpfs / "slots")
    with pytest.raises(CapacityError, match="shm-size") as caught:
        pool.create(16 << 20)
    assert caught.value.limit == "file system"
    trusting = SlotPool(small_tmpfs / "slots", headroom=lambda _: Headroom(1 << 40, "", ""))
    with pytest.raises(CapacityError, match="tmpfs is full"):
        trusting.create(16 << 20)
    assert list(pool.folder.iterdir()) == []
    made = [pool.create(3 << 20), pool.create(3 << 20)]
    with pytest.raises(CapacityError):
        pool.create(3 << 20)
    assert pool.remove(made[0].slot_id)
    pool.create(3 << 20)


def test_allocation_holds_no_lock(pool: SlotPool, monkeypatch: pytest.MonkeyPatch):
    pool.create(CAPACITY)
    allocating, go_on = threading.Event(), threading.Event()
    allocate_now = os.posix_fallocate

    def slow(fd: int, offset: int, size: int) -> None:
        allocating.set()
        assert go_on.wait(30)
        allocate_now(fd, offset, size)

    monkeypatch.setattr(os, "posix_fallocate", slow)
    thread = threading.Thread(target=pool.create, args=(CAPACITY,))
    thread.start()
    try:
        assert allocating.wait(30)
        assert pool.total_bytes() == 2 * (CAPACITY + LABEL_BYTES)
        assert len(pool.slots()) == 1
        sealed(pool)  # reserve, write, seal: all while the other one is being allocated
    finally:
        go_on.set()
        thread.join(30)
    assert len(pool.slots()) == 2


def test_creations_at_once_count_each_other(runtime_dir: Path, monkeypatch: pytest.MonkeyPatch):
    pool = SlotPool(runtime_dir / "slots", headroom=lambda _: Headroom(CAPACITY * 3 // 2, "x", ""))
    results: list[object] = []

    def create_another(fd: int, offset: int, size: int) -> None:
        with pytest.raises(CapacityError) as caught:
            pool.create(CAPACITY)
        results.append(caught.value.needed_bytes)
        os.ftruncate(fd, offset + size)
        os.pwrite(fd, b"\1" * size, offset)

    monkeypatch.setattr(os, "posix_fallocate", create_another)
    pool.create(CAPACITY)
    assert results == [2 * (CAPACITY + LABEL_BYTES)]


# --- the law --------------------------------------------------------------------------------------


class PoolMachine(RuleBasedStateMachine):
    """Writers, readers and restarts of the agent in any order, against a model of who has what."""

    folder: Path
    readers = Bundle("readers")
    writers = Bundle("writers")

    def __init__(self) -> None:
        super().__init__()
        for each in self.folder.iterdir():
            each.unlink()
        self.pool = SlotPool(self.folder)
        self.number = 0
        self.held: dict[int, tuple[str, str]] = {}  # descriptor -> slot, "r" or "w"
        self.sealed: dict[str, str] = {}  # segment -> slot

    def teardown(self) -> None:
        for fd in self.held:
            os.close(fd)

    @rule()
    def create(self) -> None:
        if len(self.pool.slots()) < 4:
            self.pool.create(1 << 16)

    @rule(target=writers)
    def reserve(self) -> tuple[int, str, str] | None:
        self.number += 1
        segment = segment_name(self.number)
        reserved = reserve(self.pool, segment)
        busy = {slot for slot, _ in self.held.values()} | set(self.sealed.values())
        if reserved is None:
            free = {s.slot_id for s in self.pool.slots() if s.label.state == "free"}
            assert free <= busy, "a free slot that nobody holds was not handed out"
            return None
        slot = reserved.slot.slot_id
        assert slot not in busy, "a slot that somebody holds was handed out"
        self.held[reserved.fd] = (slot, "w")
        return reserved.fd, slot, segment

    @rule(writer=consumes(writers), seal=st.booleans())
    def end_writing(self, writer: tuple[int, str, str] | None, seal: bool) -> None:
        if writer is None:
            return
        fd, slot, segment = writer
        if seal:
            size, root = fill(fd, segment)
            self.pool.seal(slot, segment_id=segment, segment_bytes=size, root=root)
            self.sealed[segment] = slot
        os.close(fd)
        del self.held[fd]
        assert self.pool.release(slot) is not seal

    @rule(target=readers, data=st.data())
    def read(self, data: st.DataObject) -> object:
        if not self.sealed:
            return None
        segment = data.draw(st.sampled_from(sorted(self.sealed)))
        opened = self.pool.open_segment(segment)
        fd = os.dup(opened.fileno())
        opened.close()
        self.held[fd] = (self.sealed[segment], "r")
        return fd, segment

    @rule(reader=consumes(readers))
    def end_reading(self, reader: tuple[int, str] | None) -> None:
        if reader is not None:
            fd, segment = reader
            wanted = sample_segment(segment, 9000)
            assert os.pread(fd, len(wanted), 0) == wanted, "a reader's bytes changed"
            os.close(fd)
            del self.held[fd]

    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        if self.sealed:
            segment = data.draw(st.sampled_from(sorted(self.sealed)))
            assert self.pool.free(self.sealed.pop(segment))

    @rule()
    def remove_one(self) -> None:
        for slot in self.pool.slots():
            if slot.label.state == "free":
                held = slot.slot_id in {each for each, _ in self.held.values()}
                assert self.pool.remove(slot.slot_id) is not held
                return

    @rule()
    def restart(self) -> None:
        self.pool = SlotPool(self.folder)
        self.pool.scan()

    @invariant()
    def state_is_what_is_known(self) -> None:
        for slot in self.pool.slots():
            assert slot.error is None
            fd = os.open(self.folder / slot.slot_id, os.O_RDONLY)
            assert read_label(fd, slot.capacity) == slot.label
            os.close(fd)
        found = {s.label.segment_id for s in self.pool.slots() if s.label.state == "sealed"}
        assert found == set(self.sealed)
        for slot in self.pool.slots():
            taken = slot.label.state != "free"
            assert self.pool.find(slot.label.segment_id) == (slot if taken else None)


def test_one_writer_or_readers(runtime_dir: Path):
    folder = runtime_dir / "slots"
    folder.mkdir()
    machine = type("Machine", (PoolMachine,), {"folder": folder})
    run_state_machine_as_test(machine, settings=settings(stateful_step_count=40))
