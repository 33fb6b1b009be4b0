"""Whatever an encoder accepts, its decoder gives back, exactly and the same on every machine."""

from __future__ import annotations

import math
from typing import Any, get_args

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from tests.format.samples import fill, gaps, make_segment, plan_id, read_segment
from tieredckpt.errors import IntegrityError
from tieredckpt.format import manifest as m
from tieredckpt.format.digest import digest
from tieredckpt.format.envelope import INT_MAX, open_record, pack_column, seal_record, unpack_column
from tieredckpt.format.plain import decode_plain, encode_plain
from tieredckpt.format.plan import (
    BytesEntry,
    Chunk,
    Entry,
    TensorEntry,
    build_plan,
    decode_plan,
    encode_plan,
    rebuild_plan,
)
from tieredckpt.format.records import (
    RecordKind,
    SaveRecord,
    decode_save_record,
    encode_save_record,
)
from tieredckpt.format.segment import (
    DTYPE_BYTES,
    LARGE_ALIGN,
    LARGE_BYTES,
    SMALL_ALIGN,
    ItemSpec,
    lay_out,
    slot_capacity,
    structure_digest,
)

names = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
numbers = st.integers(0, INT_MAX)
ids = st.binary(min_size=16, max_size=16).map(bytes.hex)
safe_names = st.from_regex(m.NAME_PATTERN, fullmatch=True)


@given(st.lists(numbers | st.integers(0, 300)))
def test_column(values: list[int]):
    column = pack_column(values)
    assert unpack_column(column, len(values), "test") == values
    assert len(column) - 1 == len(values) * next(
        width for width in (1, 2, 4, 8) if max(values, default=0) < 1 << 8 * width
    )


@given(st.binary(max_size=2000), st.booleans(), st.integers(1, 65_535))
def test_envelope(payload: bytes, compress: bool, version: int):
    data = seal_record(b"TCKTEST!", version, payload, compress=compress)
    assert open_record(data, b"TCKTEST!", max_version=version, limit_bytes=2000) == payload


# --- plain ------------------------------------------------------------------------------------

scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.complex_numbers()
    | names
    | st.binary(max_size=30)
)
hashables = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4).map(tuple) | st.frozensets(inner, max_size=4),
    max_leaves=8,
)
plain_values = st.recursive(
    hashables,
    lambda inner: (
        st.lists(inner, max_size=6)
        | st.lists(inner, max_size=6).map(tuple)
        | st.sets(hashables, max_size=5)
        | st.dictionaries(hashables, inner, max_size=5)
    ),
    max_leaves=20,
)


def same(a: Any, b: Any) -> bool:
    """Equal in value, type and order; NaN is NaN, and -0.0 is not 0.0."""
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return (math.isnan(a) and math.isnan(b)) or (
            a == b and math.copysign(1, a) == math.copysign(1, b)
        )
    if isinstance(a, complex):
        return same(a.real, b.real) and same(a.imag, b.imag)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return same(list(a.items()), list(b.items()))
    if isinstance(a, set | frozenset):
        left = list(b)
        for each in a:
            found = next((i for i, other in enumerate(left) if same(each, other)), None)
            if found is None:
                return False
            left.pop(found)
        return not left
    return bool(a == b)


@given(plain_values)
def test_plain(value: Any):
    data = encode_plain(value)
    again = decode_plain(data)
    assert same(again, value)
    assert encode_plain(again) == data


# --- segment ----------------------------------------------------------------------------------


@st.composite
def chunks_of(draw: st.DrawFn, side: int) -> tuple[tuple[int, ...], ...]:
    """Global shape, and offsets and sizes of a chunk inside of it."""
    sizes = draw(st.lists(st.integers(0, side), max_size=4))
    offsets = [draw(st.integers(0, 1 << 40)) for _ in sizes]
    shape = tuple(o + s + draw(st.integers(0, 5)) for o, s in zip(offsets, sizes, strict=True))
    return shape, tuple(offsets), tuple(sizes)


@st.composite
def tensor_specs(draw: st.DrawFn, side: int = 9) -> ItemSpec:
    shape, offsets, sizes = draw(chunks_of(side))
    dtype = draw(st.sampled_from([*DTYPE_BYTES, "a_dtype_of_the_future"]))
    itemsize = DTYPE_BYTES.get(dtype, 3)
    return ItemSpec(
        draw(names), "tensor", itemsize * math.prod(sizes), dtype, shape, offsets, sizes
    )


bytes_specs = st.builds(ItemSpec, names, st.just("bytes"), st.integers(0, 5000))
spec_lists = st.builds(
    lambda a, b: a + b, st.lists(tensor_specs(), max_size=12), st.lists(bytes_specs, max_size=5)
)
big_lists = st.lists(
    st.builds(ItemSpec, names, st.just("bytes"), st.integers(0, 1 << 34)), max_size=20
)


@given(spec_lists, st.sampled_from([4096, 8192, 1 << 20]))
def test_segment(specs: list[ItemSpec], block_bytes: int):
    layout = lay_out(specs, block_bytes)
    data = make_segment(specs, block_bytes)
    footer = read_segment(data)
    assert footer.items == layout.items
    assert [msgspec.structs.astuple(item)[:7] for item in footer.items] == [
        msgspec.structs.astuple(spec) for spec in specs
    ]
    assert len(data) == layout.segment_bytes == footer.trailer.segment_bytes
    assert data[: layout.data_bytes] == fill(layout)
    assert all(
        footer.block_digest(i) == digest(data[slice(*footer.block_range(i))])
        for i in range(footer.trailer.num_blocks)
    )
    assert structure_digest(footer.items) == structure_digest(layout.items)
    plan = rebuild_or_none(footer)
    assert plan is None or plan.structures == (structure_digest(footer.items),)


def rebuild_or_none(footer: Any) -> Any:
    try:
        return rebuild_plan([footer])
    except IntegrityError:  # names drawn at random contradict each other now and then
        return None


@given(big_lists)
def test_items_are_aligned_and_do_not_overlap(specs: list[ItemSpec]):
    layout = lay_out(specs)
    end = 0
    for item in layout.items:
        align = LARGE_ALIGN if item.size_bytes >= LARGE_BYTES else SMALL_ALIGN
        assert item.offset % align == 0
        assert end <= item.offset < end + align
        end = item.offset + item.size_bytes
    assert layout.data_bytes - SMALL_ALIGN < end <= layout.data_bytes
    assert sum(b - a for a, b in gaps(layout)) == layout.data_bytes - sum(
        item.size_bytes for item in layout.items
    )


@given(st.integers(0, 1 << 50))
def test_slot_capacity(size: int):
    capacity = slot_capacity(size)
    assert capacity >= size
    assert capacity % 4096 == 0
    assert capacity <= max(1 << 20, size + size // 8 + 4096)
    assert slot_capacity(capacity) == capacity


# --- records ----------------------------------------------------------------------------------

lineages = st.lists(
    st.builds(m.Ancestor, numbers, ids, numbers), max_size=4, unique_by=lambda a: a.id
).map(tuple)
times = st.floats(0, 1e12)
segment_refs = st.builds(
    m.SegmentRef,
    ids,
    st.integers(1, 1 << 36).map(lambda pages: 4096 * pages),
    ids,
    st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=255),
)
hosts = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=255)
placements = st.lists(
    st.builds(m.Holders, hosts, st.lists(hosts, max_size=3, unique=True).map(tuple)),
    max_size=5,
    unique_by=lambda each: each.host,
).map(tuple)
manifests = st.builds(
    m.Manifest,
    save_id=ids,
    namespace=safe_names,
    stream=safe_names,
    step=numbers,
    attempt=st.builds(m.AttemptId, numbers, ids),
    seq=numbers,
    parent=st.none() | ids,
    lineage=lineages,
    plan=ids,
    tiers=st.lists(safe_names, max_size=3, unique=True).map(tuple),
    segments=st.lists(segment_refs, max_size=60, unique_by=lambda s: s.id).map(tuple),
    world_size=st.integers(1, INT_MAX),
    tags=st.dictionaries(names.filter(bool), names, max_size=4),
    created_at_s=times,
    replicas=placements,
)
save_records = st.builds(
    SaveRecord,
    namespace=safe_names,
    stream=safe_names,
    save_id=ids,
    kind=st.sampled_from(get_args(RecordKind)),
    id=ids,
    host=hosts,
    incarnation=ids,
    segments=st.lists(ids, max_size=5).map(tuple),
    placement=placements,
    text=safe_names,  # any text, except of those about a tier
)
bases = st.builds(m.StreamBase, safe_names, ids, numbers, lineages, lineages) | st.builds(
    m.StreamBase, safe_names, st.none(), st.none(), lineages, lineages
)


@st.composite
def attempts(draw: st.DrawFn) -> m.AttemptRecord:
    itself, *followed = draw(st.lists(ids, min_size=1, max_size=5, unique=True))
    return m.AttemptRecord(
        namespace=draw(safe_names),
        number=draw(numbers),
        id=itself,
        run=draw(ids),
        bases=tuple(draw(st.lists(bases, max_size=4, unique_by=lambda b: b.stream))),
        created_at_s=draw(times),
        followed=tuple(
            m.Followed(draw(numbers), each, saved=draw(st.booleans())) for each in followed
        ),
    )


@given(manifests)
def test_manifest(value: m.Manifest):
    data = m.encode_manifest(value)
    assert m.decode_manifest(data) == value
    assert m.encode_manifest(m.decode_manifest(data)) == data


@given(save_records)
def test_save_record(value: SaveRecord):
    data = encode_save_record(value)
    assert decode_save_record(data) == value
    assert encode_save_record(decode_save_record(data)) == data


@given(attempts())
def test_attempt(value: m.AttemptRecord):
    assert m.decode_attempt(m.encode_attempt(value)) == value


# --- plan -------------------------------------------------------------------------------------

ordinals = st.integers(0, 2)
items = st.integers(0, 1 << 20)


@st.composite
def tensor_entries(draw: st.DrawFn) -> TensorEntry:
    shape = tuple(draw(st.lists(st.integers(0, 1 << 40), max_size=4)))
    chunks = []
    for _ in range(draw(st.integers(0, 4))):
        sizes = tuple(draw(st.integers(0, side)) for side in shape)
        offsets = tuple(draw(st.integers(0, a - b)) for a, b in zip(shape, sizes, strict=True))
        chunks.append(Chunk(offsets, sizes, draw(ordinals), draw(items)))
    dtype = draw(st.sampled_from([*DTYPE_BYTES]))
    layout = draw(st.sampled_from(["strided", "sparse_coo"]))
    memory_format = draw(st.sampled_from(["contiguous_format", "channels_last"]))
    flags = draw(st.booleans()), draw(st.booleans())
    return TensorEntry(
        draw(names), dtype, layout, flags[0], memory_format, flags[1], shape, tuple(chunks)
    )


entry_lists = st.lists(
    tensor_entries() | st.builds(BytesEntry, names, ordinals, items),
    max_size=8,
    unique_by=lambda entry: entry.name,
)


@given(entry_lists, st.none() | st.binary(max_size=9), st.none() | names)
def test_plan(entries: list[Entry], opaque: bytes | None, version: str | None):
    structures = (bytes(16), b"\xff" * 16, bytes(range(16)))
    plan = build_plan(
        entries,
        structures=structures,
        planner_data=opaque,
        extras=opaque,
        metadata_version=version,
        storage_meta=opaque,
    )
    data = encode_plan(plan)
    again = decode_plan(data)
    assert list(again.entries()) == entries
    assert again.structures == structures
    assert (again.metadata_version, again.storage_meta) == (version, opaque)
    assert (again.planner_data, again.extras) == (plan.planner_data, plan.extras)
    assert plan_id(again) == plan_id(plan) == plan_id(data)
    assert encode_plan(again) == data
