"""The slot ring and the copy-and-digest pass, on real slot files and real locks."""

from __future__ import annotations

import os
import random
import resource
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor, Replicate, init_device_mesh

from tests.format.samples import gaps
from tests.support.slots import FakeAgent, is_warm
from tieredckpt import failpoints
from tieredckpt.dcp.slots.copy import CopyPool, default_copy_threads, write_segment
from tieredckpt.dcp.slots.slot_ring import SlotRing, WritableSlot
from tieredckpt.dcp.state.items import dtype_name
from tieredckpt.errors import CapacityError, IntegrityError, UsageError
from tieredckpt.format.digest import digest
from tieredckpt.format.segment import (
    BLOCK_BYTES,
    TRAILER_BYTES,
    Footer,
    ItemSpec,
    SegmentLayout,
    decode_footer,
    decode_trailer,
    lay_out,
)
from tieredckpt.storage.memory import mapping
from tieredckpt.storage.memory.slot import try_lock_exclusive


@pytest.fixture
def agent(runtime_dir: Path) -> Iterator[FakeAgent]:
    agent = FakeAgent(runtime_dir)
    yield agent
    agent.close()


@pytest.fixture(params=[1, 2], ids=["1 thread", "2 threads"])
def ring(request: pytest.FixtureRequest, agent: FakeAgent) -> Iterator[SlotRing]:
    ring = SlotRing(agent, request.param)
    yield ring
    ring.close()


def specs(tensors: list[torch.Tensor], blobs: list[bytes] = []) -> list[ItemSpec]:  # noqa: B006
    return [
        ItemSpec(
            f"tensor {number}",
            "tensor",
            tensor.numel() * tensor.element_size(),
            dtype_name(tensor.dtype),
            tuple(tensor.shape),
            (0,) * tensor.dim(),
            tuple(tensor.shape),
        )
        for number, tensor in enumerate(tensors)
    ] + [
        ItemSpec(f"blob {number}", "bytes", len(blob), "", (), (), ())
        for number, blob in enumerate(blobs)
    ]


def footer_of(slot: WritableSlot, size: int, root: bytes) -> Footer:
    """Decodes and checks everything that can be checked of a finished segment."""
    trailer = decode_trailer(bytes(slot.view[size - TRAILER_BYTES : size]))
    assert trailer.segment_bytes == size
    assert trailer.segment_id.hex() == slot.segment_id
    assert trailer.root == root
    footer = decode_footer(trailer, bytes(slot.view[trailer.index_offset : size]))
    for block in range(footer.trailer.num_blocks):
        start, stop = footer.block_range(block)
        assert digest(slot.view[start:stop]) == footer.block_digest(block)
    return footer


def check_padding(slot: WritableSlot, layout: SegmentLayout) -> None:
    for start, stop in gaps(layout):
        assert not any(slot.view[start:stop]), (start, stop)


def save(ring: SlotRing, tensors: list[torch.Tensor], blobs: list[bytes] = []) -> WritableSlot:  # noqa: B006
    layout = lay_out(specs(tensors, blobs))
    size = layout.segment_bytes
    slot = ring.acquire(size)
    root = write_segment(slot, layout, tensors, blobs, ring.pool)
    ring.seal(slot, size, root)
    return slot


def dtypes() -> list[torch.dtype]:
    found = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    names = ("quint", "qint", "bits", "uint1", "uint2", "uint3", "uint4", "uint5", "uint6", "uint7",
             "int1", "int2", "int3", "int4", "int5", "int6", "int7")  # fmt: skip
    keep = [d for d in found if not dtype_name(d).startswith(names) or dtype_name(d) in
            ("uint16", "uint32", "uint64", "int16", "int32", "int64")]  # fmt: skip
    return sorted(keep, key=dtype_name)


def random_tensor(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Any bits at all, NaNs too."""
    count = dtype.itemsize
    for extent in shape:
        count *= extent
    raw = torch.randint(0, 256, (count,), dtype=torch.uint8)
    if dtype is torch.bool:
        raw &= 1
    return raw.view(dtype).view(shape)


def raw_bytes(tensor: torch.Tensor) -> bytes:
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return plain.reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""


# --- the pass -----------------------------------------------------------------------------------


def test_every_dtype_contiguous_and_gathered(ring: SlotRing):
    torch.manual_seed(1)
    tensors, expected = [], []
    for dtype in dtypes():
        full = random_tensor(dtype, 6, 10)
        for tensor in (full, full.t(), full[1:5:2, 3:], full[:, 0], full[0, 0], full[:0]):
            tensors.append(tensor)
            same = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
            plain = same.get(dtype.itemsize)
            expected.append(raw_bytes(tensor.view(plain) if plain else tensor))
    layout = lay_out(specs(tensors))
    size = layout.segment_bytes
    slot = ring.acquire(size)
    slot.view[:] = b"\xaa" * slot.capacity_bytes  # what a recycled slot may hold
    root = write_segment(slot, layout, tensors, [], ring.pool)
    footer = footer_of(slot, size, root)
    for item, data, tensor in zip(footer.items, expected, tensors, strict=True):
        assert bytes(slot.view[item.offset : item.offset + item.size_bytes]) == data, tensor.dtype
    check_padding(slot, layout)
    assert len(dtypes()) > 20


def test_awkward_tensors(ring: SlotRing):
    base = torch.randn(5, 7, dtype=torch.complex64)
    tensors = [
        torch.randn(4, 4, requires_grad=True),
        torch.nn.Parameter(torch.randn(3, 3)),
        (torch.randn(4, 4, requires_grad=True) * 2).t(),
        base.conj(),
        base.t().conj(),
        base.conj().imag,  # has the negative bit set
        torch.randn(3).expand(5, 3),
        torch.zeros(()),
        torch.empty(0, 9),
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    ]
    assert tensors[5].is_neg()
    blobs = [b"", b"x", os.urandom(BLOCK_BYTES + 17)]
    layout = lay_out(specs(tensors, blobs))
    size = layout.segment_bytes
    slot = ring.acquire(size)
    root = write_segment(slot, layout, tensors, blobs, ring.pool)
    footer = footer_of(slot, size, root)
    expected = [raw_bytes(tensor) for tensor in tensors] + blobs
    for item, data in zip(footer.items, expected, strict=True):
        assert bytes(slot.view[item.offset : item.offset + item.size_bytes]) == data, item.name


@pytest.mark.parametrize("block_bytes", [BLOCK_BYTES, 128 << 10, 12 << 10, 2 * BLOCK_BYTES])
def test_tensors_over_block_and_piece_boundaries(ring: SlotRing, block_bytes: int):
    rng = random.Random(7)
    sizes = [BLOCK_BYTES - 64, 64, 1, BLOCK_BYTES * 2 + 1, 4095, 512 << 10, (512 << 10) - 1, 10000]
    sizes += [rng.randrange(200_000) for _ in range(40)]
    tensors = [torch.randint(0, 256, (size,), dtype=torch.uint8) for size in sizes]
    layout = lay_out(specs(tensors), block_bytes)
    size = layout.segment_bytes
    slot = ring.acquire(size)
    slot.view[:] = b"\x55" * slot.capacity_bytes
    root = write_segment(slot, layout, tensors, [], ring.pool)
    footer = footer_of(slot, size, root)
    assert footer.trailer.block_bytes == block_bytes
    for item, tensor in zip(footer.items, tensors, strict=True):
        stored = torch.frombuffer(slot.view[item.offset : item.offset + item.size_bytes],
                                  dtype=torch.uint8)  # fmt: skip
        assert torch.equal(stored, tensor)
    check_padding(slot, layout)


@pytest.mark.parametrize("tensors", [[], [torch.empty(0)]], ids=["no item", "an empty item"])
def test_a_segment_without_data(ring: SlotRing, tensors: list[torch.Tensor]):
    layout = lay_out(specs(tensors))
    size = layout.segment_bytes
    slot = ring.acquire(size)
    footer = footer_of(slot, size, write_segment(slot, layout, tensors, [], ring.pool))
    assert footer.trailer.num_blocks == 0


def test_dtensor_is_saved_as_its_local_part(ring: SlotRing, tmp_path: Path):
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1
    )
    try:
        mesh = init_device_mesh("cpu", (1,))
        local = torch.randn(6, 4)
        whole = DTensor.from_local(local, mesh, [Replicate()])
        layout = lay_out(specs([local, local.t()]))
        size = layout.segment_bytes
        slot = ring.acquire(size)
        tensors: list[torch.Tensor] = [whole, whole.t()]
        footer = footer_of(slot, size, write_segment(slot, layout, tensors, [], ring.pool))
    finally:
        torch.distributed.destroy_process_group()
    for item, tensor in zip(footer.items, (local, local.t()), strict=True):
        data = bytes(slot.view[item.offset : item.offset + item.size_bytes])
        assert data == raw_bytes(tensor)


@pytest.mark.gpu
def test_cuda_tensors(ring: SlotRing):
    on_cpu = [torch.randn(3000, 1000), torch.randn(40, 50).t(), torch.zeros(())]
    layout = lay_out(specs(on_cpu))
    size = layout.segment_bytes
    slot = ring.acquire(size)
    tensors = [tensor.cuda() for tensor in on_cpu]
    footer = footer_of(slot, size, write_segment(slot, layout, tensors, [], ring.pool))
    for item, tensor in zip(footer.items, on_cpu, strict=True):
        data = bytes(slot.view[item.offset : item.offset + item.size_bytes])
        assert data == raw_bytes(tensor)


@pytest.mark.parametrize(
    ("tensor", "says"),
    [
        (torch.zeros(5), "was laid out with 16 bytes and now has 20"),
        (torch.zeros(4, dtype=torch.int32), "is torch.int32 and its item float32"),
        (torch.zeros(4).to_sparse(), "sparse"),
        (torch.zeros(4, device="meta"), "meta"),
    ],
)
def test_a_tensor_that_is_not_what_was_laid_out(ring: SlotRing, tensor: torch.Tensor, says: str):
    layout = lay_out(specs([torch.zeros(4)]))
    slot = ring.acquire(layout.segment_bytes)
    with pytest.raises(UsageError, match=says) as caught:
        write_segment(slot, layout, [tensor], [], ring.pool)
    assert "tensor 0" in str(caught.value)


def test_a_segment_larger_than_its_slot(ring: SlotRing):
    small = lay_out(specs([torch.zeros(4)]))
    slot = ring.acquire(small.segment_bytes)
    tensors = [torch.zeros(1 << 20)]
    with pytest.raises(UsageError, match="does not fit"):
        write_segment(slot, lay_out(specs(tensors)), tensors, [], ring.pool)


def test_an_error_inside_the_pass_is_raised_and_the_slot_can_be_given_back(
    ring: SlotRing, agent: FakeAgent
):
    tensors = [torch.zeros(6 * BLOCK_BYTES, dtype=torch.uint8)]
    layout = lay_out(specs(tensors))
    slot = ring.acquire(layout.segment_bytes)
    failpoints.arm("save.copy=eio@3")
    try:
        with pytest.raises(OSError, match="failpoint save"):
            write_segment(slot, layout, tensors, [], ring.pool)
    finally:
        failpoints.arm("")
    assert not is_free(agent, slot.slot_id)
    ring.abandon(slot)
    assert is_free(agent, slot.slot_id)
    save(ring, tensors)


def test_copy_pool_draws_each_number_once_and_raises_the_first_error():
    pool = CopyPool(3)
    drawn: list[int] = []
    pool.run(drawn.append, 1000)
    assert sorted(drawn) == list(range(1000))
    pool.run(drawn.append, 0)

    def fail(number: int) -> None:
        if number == 5:
            raise ValueError("five")
        drawn.append(number)

    drawn.clear()
    with pytest.raises(ValueError, match="five"):
        pool.run(fail, 100_000)
    assert len(drawn) < 100_000
    pool.run(drawn.append, 10)
    pool.close()
    pool.close()


def test_default_threads():
    cores = len(os.sched_getaffinity(0))
    assert default_copy_threads(1) == min(4, cores)
    assert default_copy_threads(10_000) == 1
    assert default_copy_threads(0) >= 1


# --- the ring -----------------------------------------------------------------------------------


def is_free(agent: FakeAgent, slot_id: str) -> bool:
    fd = os.open(agent.path(slot_id), os.O_RDWR)
    try:
        return try_lock_exclusive(fd)
    finally:
        os.close(fd)


STATE = [torch.arange(20 << 20, dtype=torch.uint8), torch.ones(100)]
STATE_BYTES = lay_out(specs(STATE)).segment_bytes


def test_a_prepared_ring_saves_without_faults_and_with_one_request(
    ring: SlotRing, agent: FakeAgent
):
    ring.prepare(STATE_BYTES)
    assert is_warm(ring)
    save(ring, STATE)
    agent.calls.clear()
    used = []
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        slot = save(ring, STATE)
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
        used.append(slot.slot_id)
        assert not slot.cold
    assert agent.calls == ["seal"] * 5
    # The target is under 1 per MiB; what is left is the interpreter's own memory.
    assert faults < 20
    assert len(set(used)) == agent.ring


def test_the_first_save_is_cold_and_makes_the_ring_ready(ring: SlotRing, agent: FakeAgent):
    assert save(ring, STATE).cold
    assert is_warm(ring)
    assert "prepare" in agent.calls
    assert not any(save(ring, STATE).cold for _ in range(4))


def test_a_save_helps_a_prefault_that_is_under_way(
    agent: FakeAgent, monkeypatch: pytest.MonkeyPatch
):
    """A save that meets the piece that the background thread is in waits for it, and only that."""
    inside, go_on = threading.Event(), threading.Event()
    populate = mapping.Mapping.populate

    def held(self: mapping.Mapping, start: int, stop: int) -> None:
        if threading.current_thread().name == "tieredckpt-prefault" and not inside.is_set():
            inside.set()
            assert go_on.wait(60)
        populate(self, start, stop)

    monkeypatch.setattr(mapping.Mapping, "populate", held)
    ring = SlotRing(agent, 2)
    try:
        ring.prepare(STATE_BYTES)
        assert inside.wait(60)
        # The slot that the thread is in, and one that it has not begun.
        saver = threading.Thread(target=lambda: [save(ring, STATE), save(ring, STATE)])
        saver.start()
        go_on.set()
        saver.join(60)
        assert not saver.is_alive()
        assert is_warm(ring)
    finally:
        go_on.set()
        ring.close()


def test_a_load_holds_the_prefault(agent: FakeAgent):
    ring = SlotRing(agent, 1)
    try:
        with ring.quiet():
            with ring.quiet():
                ring.prepare(STATE_BYTES)
            assert not is_warm(ring, 0.3)  # nothing can be waited for: that it does not happen
            assert not any(slot.prefault.done.is_set() for slot in ring._slots.values())
        assert is_warm(ring)
        assert all(slot.prefault.done.is_set() for slot in ring._slots.values())
        with ring.quiet():
            ring.prepare(2 * STATE_BYTES)
            ring.close()  # also ends a prefault that is held
    finally:
        ring.close()


def test_prepare_logs_what_the_agent_says(
    ring: SlotRing, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def full(_: int) -> None:
        raise CapacityError("no room")

    monkeypatch.setattr(FakeAgent, "prepare", staticmethod(full))
    ring.prepare(STATE_BYTES)
    assert is_warm(ring)
    assert [each.getMessage() for each in caplog.records] == [
        f"cannot prepare slots of {STATE_BYTES} bytes ahead: no room"
    ]
    ring.prepare(STATE_BYTES)  # once is enough, but the first save tries again
    assert is_warm(ring)
    assert len(caplog.records) == 1
    save(ring, STATE)
    assert is_warm(ring)
    assert len(caplog.records) == 2
    save(ring, STATE)
    assert is_warm(ring)
    assert len(caplog.records) == 2


def test_what_is_prepared_last_stops_what_was_prepared_before(
    agent: FakeAgent, monkeypatch: pytest.MonkeyPatch
):
    asked, go_on = threading.Event(), threading.Event()
    sizes: list[int] = []
    prepare = FakeAgent.prepare

    def slow(self: FakeAgent, segment_bytes: int) -> Any:
        sizes.append(segment_bytes)
        asked.set()
        assert go_on.wait(60)
        return prepare(self, segment_bytes)

    monkeypatch.setattr(FakeAgent, "prepare", slow)
    ring = SlotRing(agent, 1)
    try:
        ring.prepare(STATE_BYTES)
        assert asked.wait(60)
        ring.prepare(2 * STATE_BYTES)  # never begins
        ring.prepare(3 * STATE_BYTES)
        go_on.set()
        assert is_warm(ring)
        assert sizes == [STATE_BYTES, 3 * STATE_BYTES]
    finally:
        go_on.set()
        ring.close()


def test_the_lock_is_held_from_acquire_to_seal(ring: SlotRing, agent: FakeAgent):
    agent.grants_ahead = False
    for _ in range(2):
        layout = lay_out(specs(STATE))
        slot = ring.acquire(STATE_BYTES)
        assert not is_free(agent, slot.slot_id)
        root = write_segment(slot, layout, STATE, [], ring.pool)
        assert not is_free(agent, slot.slot_id)
        ring.seal(slot, STATE_BYTES, root)
        is_warm(ring)
        assert is_free(agent, slot.slot_id)


def test_a_grant_that_did_not_come_about_is_not_used(ring: SlotRing, agent: FakeAgent):
    ring.prepare(STATE_BYTES)
    assert is_warm(ring)
    save(ring, STATE)
    assert ring._next is not None
    slot_id = ring._next.slot_id
    reader = os.open(agent.path(slot_id), os.O_RDONLY)
    try:
        assert try_lock_exclusive(reader)  # somebody holds it: the retention had to wait
        agent.calls.clear()
        assert save(ring, STATE).slot_id != slot_id
        assert "reserve" in agent.calls
    finally:
        os.close(reader)


def test_a_larger_segment_gets_a_larger_slot(ring: SlotRing, agent: FakeAgent):
    save(ring, STATE)
    is_warm(ring)
    agent.ring = 10
    larger = [*STATE, torch.ones(8 << 20)]
    slot = save(ring, larger)
    assert slot.capacity_bytes >= lay_out(specs(larger)).segment_bytes
    assert is_warm(ring)


@pytest.mark.parametrize("size", [0, 4096, STATE_BYTES // 2 // 4096 * 4096])
def test_a_truncated_slot_is_an_error_and_never_a_signal(
    ring: SlotRing, agent: FakeAgent, size: int
):
    ring.prepare(STATE_BYTES)
    is_warm(ring)
    save(ring, STATE)
    for slot_id in agent.order:
        os.truncate(agent.path(slot_id), size)
    with pytest.raises((IntegrityError, CapacityError)):
        save(ring, STATE)


def test_deleted_slots_are_not_kept_alive(ring: SlotRing, agent: FakeAgent):
    ring.prepare(STATE_BYTES)
    is_warm(ring)
    save(ring, STATE)
    for slot_id in agent.order:
        agent.path(slot_id).unlink()
    agent.order.clear()
    slot = save(ring, STATE)
    is_warm(ring)
    assert slot.cold
    assert set(ring._slots) == set(agent.order)


def test_view_is_of_the_very_file_that_the_lease_is_on(ring: SlotRing, agent: FakeAgent):
    ring.prepare(STATE_BYTES)
    is_warm(ring)
    slot = save(ring, STATE)
    path = agent.path(slot.slot_id)
    fd = os.open(path, os.O_RDONLY)
    view = ring.view(slot.slot_id, fd)
    assert view is not None
    assert view.readonly
    assert bytes(view[:4096]) == bytes(slot.view[:4096])
    assert ring.view("0" * 32, fd) is None
    path.rename(path.with_suffix(".old"))
    path.write_bytes(path.with_suffix(".old").read_bytes())
    other = os.open(path, os.O_RDONLY)
    assert ring.view(slot.slot_id, other) is None
    os.ftruncate(other_fd := os.open(path.with_suffix(".old"), os.O_RDWR), 8192)
    assert ring.view(slot.slot_id, fd) is None
    for each in (fd, other, other_fd):
        os.close(each)


def test_views_outlive_the_ring(ring: SlotRing):
    slot = save(ring, STATE)
    tensor = torch.frombuffer(slot.view, dtype=torch.uint8)
    ring.close()
    ring.close()
    assert int(tensor[5]) == 5


def test_a_forked_child_does_not_keep_a_dead_trainers_lock(agent: FakeAgent):
    """As a data loader's worker would, if it outlived its killed trainer."""
    ring = SlotRing(agent, 1)
    slot = ring.acquire(STATE_BYTES)
    ready_read, ready_write = os.pipe()
    end_read, end_write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(end_write)
            with pytest.raises(UsageError):
                ring.acquire(STATE_BYTES)
            os.write(ready_write, b"y")
            os.read(end_read, 1)
        finally:
            os._exit(0)
    try:
        assert os.read(ready_read, 1) == b"y"
        assert not is_free(agent, slot.slot_id)
        # All that the parent's death would do: its descriptor and its mapping go.
        fd = ring._slots[slot.slot_id].fd
        ring._slots[slot.slot_id].fd = -1
        os.close(fd)
        del slot
        ring._slots.clear()
        ring._writing.clear()
        assert is_free(agent, agent.order[-1])
    finally:
        os.close(end_write)
        os.waitpid(pid, 0)
        for each in (ready_read, ready_write, end_read):
            os.close(each)
        ring.close()


def test_populating_works_on_kernels_without_the_advice(
    ring: SlotRing, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(mapping, "MADV_POPULATE_WRITE", 4242)
    ring.prepare(STATE_BYTES)
    assert is_warm(ring)
    save(ring, STATE)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    save(ring, STATE)
    # Of 5,120 pages; other threads of the process have faults of their own.
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < 500


def test_growing_within_the_slack_of_a_slot_asks_for_nothing(ring: SlotRing, agent: FakeAgent):
    """Bytes items change their length at every save; slots have room for that."""
    ring.prepare(STATE_BYTES)
    assert is_warm(ring)
    agent.calls.clear()
    for extra in (1000, 9000, 90_000):
        assert not save(ring, STATE, [bytes(extra)]).cold
    assert agent.calls.count("prepare") == 0
    assert agent.calls.count("reserve") <= 1


def test_a_closed_ring_adopts_no_slot(ring: SlotRing, agent: FakeAgent):
    before = set(os.listdir("/proc/self/fd"))
    ring.prepare(STATE_BYTES)
    assert is_warm(ring)
    ring.close()
    with pytest.raises(UsageError, match="closed"):
        ring.acquire(STATE_BYTES)
    # Python closes what other tests left when it likes.
    assert set(os.listdir("/proc/self/fd")) <= before


def test_a_slot_that_is_being_written_stays_locked_when_the_ring_is_closed(
    ring: SlotRing, agent: FakeAgent
):
    slot = ring.acquire(1 << 20)
    ring.close()
    assert not is_free(agent, slot.slot_id)  # or the agent could grant it to another writer
    ring.abandon(slot)
    assert is_free(agent, slot.slot_id)
