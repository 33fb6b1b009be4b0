"""Labels and locks of one slot file."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tieredckpt.errors import FormatVersionError, IntegrityError
from tieredckpt.format.envelope import seal_record
from tieredckpt.storage.memory import slot as m
from tieredckpt.storage.memory.slot import LABEL_BYTES, Label

CAPACITY = 1 << 20
IDS = st.binary(min_size=16, max_size=16).map(bytes.hex)
NAMES = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", fullmatch=True)
LABELS = st.builds(
    Label,
    state=st.sampled_from(["free", "reserved", "sealed"]),
    namespace=NAMES | st.just(""),
    segment_id=IDS,
    session_id=IDS,
    segment_bytes=st.integers(0, CAPACITY),
    root=IDS,
    generation=st.integers(0, 2**64 - 1),
    slot_id=IDS,
)


@pytest.fixture
def slot(runtime_dir: Path) -> Iterator[int]:
    fd = os.open(runtime_dir / "slot", os.O_RDWR | os.O_CREAT)
    os.posix_fallocate(fd, 0, CAPACITY + LABEL_BYTES)
    yield fd
    os.close(fd)


def again(fd: int) -> int:
    """Another open file description of the same file."""
    return os.open(f"/proc/self/fd/{fd}", os.O_RDWR)


@given(LABELS)
def test_label_round_trip(label: Label):
    page = m.encode_label(label, CAPACITY)
    assert len(page) == LABEL_BYTES
    assert m.decode_label(page, CAPACITY) == label


@given(LABELS, st.integers(0, LABEL_BYTES * 8 - 1))
def test_any_flipped_bit_is_found(label: Label, bit: int):
    page = bytearray(m.encode_label(label, CAPACITY))
    page[bit // 8] ^= 1 << bit % 8
    with pytest.raises(IntegrityError):
        m.decode_label(bytes(page), CAPACITY)


@given(st.binary(max_size=5000) | st.binary(min_size=LABEL_BYTES, max_size=LABEL_BYTES))
def test_noise_is_no_label(page: bytes):
    with pytest.raises(IntegrityError):
        m.decode_label(page, CAPACITY)


@given(st.binary(min_size=LABEL_BYTES - 48, max_size=LABEL_BYTES - 48))
def test_hostile_payload_with_a_right_digest(payload: bytes):
    page = seal_record(m.LABEL_KIND, m.LABEL_VERSION, payload, compress=False)
    try:
        label = m.decode_label(page, CAPACITY)
    except IntegrityError:
        return
    assert m.decode_label(m.encode_label(label, CAPACITY), CAPACITY) == label


def test_label_of_another_capacity_or_release():
    page = m.encode_label(Label(state="free"), CAPACITY)
    with pytest.raises(IntegrityError):
        m.decode_label(page, CAPACITY + LABEL_BYTES)
    newer = seal_record(m.LABEL_KIND, m.LABEL_VERSION + 1, bytes(LABEL_BYTES - 48), compress=False)
    with pytest.raises(FormatVersionError):
        m.decode_label(newer, CAPACITY)


def test_impossible_labels_are_not_written():
    for label in (
        Label(state="free", namespace="../x"),
        Label(state="free", segment_id="x"),
        Label(state="sealed", segment_bytes=CAPACITY + 1),
    ):
        with pytest.raises(ValueError):
            m.encode_label(label, CAPACITY)


def test_write_then_read(slot: int):
    with pytest.raises(IntegrityError):
        m.read_label(slot, CAPACITY)
    label = Label(state="reserved", namespace="run", segment_id="ab" * 16, segment_bytes=4096)
    m.write_label(slot, CAPACITY, label)
    assert m.read_label(slot, CAPACITY) == label
    assert m.slot_capacity_of(slot) == CAPACITY


@pytest.mark.parametrize("size", [0, 1, LABEL_BYTES, CAPACITY, CAPACITY + LABEL_BYTES - 1])
def test_truncated_slot(slot: int, size: int):
    m.write_label(slot, CAPACITY, Label(state="free"))
    os.ftruncate(slot, size)
    with pytest.raises(IntegrityError):
        m.read_label(slot, CAPACITY)
    with pytest.raises(IntegrityError):
        m.check_slot(slot, CAPACITY)
    with pytest.raises(IntegrityError):
        m.write_label(slot, CAPACITY, Label(state="free"))
    assert os.fstat(slot).st_size == size, "a label must not lengthen a truncated file"
    with pytest.raises(IntegrityError):
        m.lock_reserved(slot, CAPACITY, "ab" * 16)
    other = again(slot)
    assert m.try_lock_exclusive(other), "no lock is left behind"
    os.close(other)


def test_slot_with_a_hole_is_not_safe_to_map(slot: int):
    os.ftruncate(slot, 0)
    os.ftruncate(slot, CAPACITY + LABEL_BYTES)
    with pytest.raises(IntegrityError, match="holes"):
        m.slot_capacity_of(slot)


def test_locks_belong_to_the_description(slot: int):
    other, copy = again(slot), os.dup(slot)
    assert m.try_lock_exclusive(slot)
    assert m.try_lock_exclusive(copy), "a copy of the descriptor is the same description"
    assert not m.try_lock_exclusive(other)
    assert not m.try_lock_shared(other)
    assert m.try_lock_shared(slot)
    assert m.try_lock_shared(other)
    assert not m.try_lock_exclusive(other)
    m.unlock(other)
    os.close(copy)
    m.unlock(slot)
    assert m.try_lock_exclusive(other)
    os.close(other)


def test_claim_reserved(slot: int):
    mine, wanted = again(slot), "ab" * 16
    m.write_label(slot, CAPACITY, Label(state="reserved", segment_id=wanted))
    assert not m.lock_reserved(mine, CAPACITY, "cd" * 16)
    assert m.try_lock_exclusive(slot), "a refused claim holds no lock"
    assert not m.lock_reserved(mine, CAPACITY, wanted), "somebody else has it"
    m.unlock(slot)
    assert m.lock_reserved(mine, CAPACITY, wanted)
    assert not m.try_lock_shared(slot)
    m.unlock(mine)
    for state in ("free", "sealed"):
        m.write_label(slot, CAPACITY, Label(state=state, segment_id=wanted))
        assert not m.lock_reserved(mine, CAPACITY, wanted)
    os.close(mine)


def test_golden_label():
    """What version 1 wrote is read for ever; see docs/reference/format/slot.md."""
    page = (Path(__file__).parents[2] / "format" / "golden" / "slot-label-v1.bin").read_bytes()
    label = Label(
        state="sealed",
        namespace="gpt-run-7",
        segment_id="0123456789abcdef" * 2,
        session_id="ab" * 16,
        segment_bytes=999_424,
        root="cd" * 16,
        generation=42,
    )
    assert m.decode_label(page, CAPACITY) == label
    assert m.encode_label(label, CAPACITY) == page
