"""Plans: entries in and out, identity, rebuilding, checks."""

from __future__ import annotations

import subprocess
import sys
import time

import msgspec
import numpy as np
import pytest

from tests.format.samples import (
    make_segment,
    many_specs,
    plan_id,
    read_segment,
    small_plan,
    small_specs,
)
from tieredckpt.errors import FormatVersionError, IntegrityError
from tieredckpt.format.plain import encode_plain
from tieredckpt.format.plan import (
    BytesEntry,
    Chunk,
    Columns,
    Entry,
    Plan,
    TensorEntry,
    build_plan,
    decode_plan,
    encode_plan,
    rebuild_plan,
)
from tieredckpt.format.plan_record import VERSION, encoded_plan_id, open_plan, seal_plan
from tieredckpt.format.segment import Footer, ItemSpec, structure_digest

STRUCTURES = (bytes(16), bytes(range(16)))


def tensor(
    name: str, shape: tuple[int, ...], *chunks: Chunk, dtype: str = "float32"
) -> TensorEntry:
    return TensorEntry(name, dtype, "strided", False, "contiguous_format", False, shape, chunks)


def test_entries_come_back_in_order():
    plan = small_plan()
    again = decode_plan(encode_plan(plan))
    assert list(again.entries()) == list(plan.entries())
    assert len(again) == 8
    assert [entry.name for entry in again.entries()][:3] == ["layers.0.weight", "rng/0", "scale"]


def test_who_only_stores_plans_needs_no_numpy():
    """The agent stays small: it imports plan.py only when it has to merge plans."""
    code = "import sys, tieredckpt.agent.daemon; sys.exit('numpy' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    data = encode_plan(small_plan())
    assert encoded_plan_id(data) == plan_id(data)


def test_empty_plan():
    plan = decode_plan(encode_plan(build_plan([], structures=())))
    assert list(plan.entries()) == []
    assert plan.planner_data == encode_plain(None)
    assert plan.extras == encode_plain({})
    assert plan.metadata_version is None
    assert plan.storage_meta is None


def test_id_is_of_the_content():
    plan = small_plan()
    data = encode_plan(plan)
    assert plan_id(plan) == plan_id(data) == plan_id(decode_plan(data))
    entries = list(plan.entries())
    ids = {
        plan_id(build_plan(e, structures=s, planner_data=p))
        for e in (entries, entries[::-1], entries[1:])
        for s in (STRUCTURES, STRUCTURES[::-1])
        for p in (None, encode_plain({}))
    }
    assert len(ids) == 12
    with pytest.raises(IntegrityError):
        plan_id(data[:-1])


@pytest.mark.parametrize(
    "entries",
    [
        [tensor("a", (4,)), BytesEntry("a", 0, 0)],
        [tensor("a", (4,), Chunk((1,), (4,), 0, 0))],
        [tensor("a", (4,), Chunk((-1,), (4,), 0, 0))],
        [tensor("a", (4,), Chunk((0,), (-1,), 0, 0))],
        [tensor("a", (4,), Chunk((2**63 - 1,), (2**63 - 1,), 0, 0))],
        [tensor("a", (2**63,), Chunk((0,), (1,), 0, 0))],
        [tensor("a", (-1,))],
        [tensor("a", (4,), Chunk((0, 0), (1, 1), 0, 0))],
        [tensor("a", (4,), Chunk((), (), 0, 0))],
        [tensor("a", (4,), Chunk((0,), (4,), 2, 0))],
        [tensor("a", (4,), Chunk((0,), (4,), -1, 0))],
        [tensor("a", (4,), Chunk((0,), (4,), 0, -1))],
        [tensor("a", (4,), Chunk((0,), (4,), 0, 1 << 40))],
        [BytesEntry("a", 2, 0)],
        [BytesEntry("a", 0, -1)],
        [tensor("a", (1,) * 65)],
    ],
)
def test_refused(entries: list[Entry]):
    with pytest.raises(ValueError):
        build_plan(entries, structures=STRUCTURES)


def test_name_with_lone_surrogate():
    with pytest.raises(ValueError):
        encode_plan(build_plan([tensor("\udcff", ())], structures=()))


def test_columns_that_do_not_fit():
    payload = open_plan(encode_plan(small_plan()))
    columns = msgspec.msgpack.decode(payload)
    for at, field in enumerate(Columns.__struct_fields__[:-1]):
        for bad in (b"", b"\x01", b"\x01\xff", b"\x03abc", b"\x08" + b"\xff" * 8, 7, [], None):
            opaque = field in ("planner_data", "extras", "storage_meta") and isinstance(bad, bytes)
            if opaque or (bad is None and field in ("metadata_version", "storage_meta")):
                continue
            # An empty column is a valid one; no sample column is empty but for these.
            changed = [*columns[:at], bad, *columns[at + 1 :]]
            with pytest.raises(IntegrityError):
                decode_plan(seal_plan(msgspec.msgpack.encode(changed)))
    for changed in (columns[:-1], [*columns, 1], [*columns, b"nested"], {}, columns[0]):
        with pytest.raises(IntegrityError):
            decode_plan(seal_plan(msgspec.msgpack.encode(changed)))
    with pytest.raises(IntegrityError, match="not of this version"):
        decode_plan(seal_plan(payload, VERSION))
    more = msgspec.msgpack.encode([*columns, b"nested"])
    assert decode_plan(seal_plan(more, VERSION)).nested == b"nested"
    with pytest.raises(FormatVersionError):
        decode_plan(seal_plan(more, VERSION + 1))


def test_properties_table_is_checked():
    columns = msgspec.msgpack.decode(open_plan(encode_plan(small_plan())))
    at = Columns.__struct_fields__.index("properties")
    for bad in ([], [()], [("float32", "strided", 1, "contiguous_format", False)] * 4, {}):
        columns[at] = encode_plain(bad)
        with pytest.raises(IntegrityError):
            decode_plan(seal_plan(msgspec.msgpack.encode(columns)))


def footers(*specs: list[ItemSpec]) -> list[Footer]:
    return [read_segment(make_segment(each)) for each in specs]


def test_rebuild_from_segments_alone():
    half = [
        ItemSpec("w", "tensor", 32, "float32", (4, 4), (0, 0), (2, 4)),
        ItemSpec("rng/0", "bytes", 5),
    ]
    other = [
        ItemSpec("w", "tensor", 16, "float32", (4, 4), (2, 0), (1, 4)),
        ItemSpec("w", "tensor", 16, "float32", (4, 4), (3, 0), (1, 4)),
        ItemSpec("w", "tensor", 32, "float32", (4, 4), (0, 0), (2, 4)),  # a copy
        ItemSpec("v", "tensor", 2, "bfloat16"),
        ItemSpec("rng/1", "bytes", 7),
    ]
    segments = footers(half, other)
    plan = decode_plan(encode_plan(rebuild_plan(segments)))
    chunks = (
        Chunk((0, 0), (2, 4), 0, 0),
        Chunk((2, 0), (1, 4), 1, 0),
        Chunk((3, 0), (1, 4), 1, 1),
    )
    assert list(plan.entries()) == [
        tensor("w", (4, 4), *chunks),
        BytesEntry("rng/0", 0, 1),
        tensor("v", (), Chunk((), (), 1, 3), dtype="bfloat16"),
        BytesEntry("rng/1", 1, 4),
    ]
    assert plan.structures == tuple(structure_digest(each.items) for each in segments)


@pytest.mark.parametrize(
    "other",
    [
        ItemSpec("layers.0.weight", "tensor", 840, "int32", (60, 7), (0, 0), (30, 7)),
        ItemSpec("layers.0.weight", "tensor", 840, "float32", (61, 7), (0, 0), (30, 7)),
        ItemSpec("rng/0", "bytes", 100),
        ItemSpec("layers.0.weight", "bytes", 100),
        ItemSpec("step", "tensor", 4, "int32"),
    ],
)
def test_segments_that_contradict_each_other(other: ItemSpec):
    with pytest.raises(IntegrityError):
        rebuild_plan(footers(small_specs(), [other]))


def test_rebuild_many():
    specs = [
        msgspec.structs.replace(spec, name=f"{spec.name}.{i}")
        for i, spec in enumerate(many_specs())
    ]
    assert len(rebuild_plan(footers(specs))) == 300


def test_a_hundred_thousand_chunks():
    per_tensor = 500
    entries = [
        tensor(
            f"model.layers.{i}.weight",
            (per_tensor * 16, 4096),
            *(Chunk((j * 16, 0), (16, 4096), j, i) for j in range(per_tensor)),
        )
        for i in range(200)
    ]
    start_s = time.process_time()
    plan = build_plan(entries, structures=[bytes(16)] * per_tensor)
    data = encode_plan(plan)
    again: Plan = decode_plan(data)
    assert list(again.entries()) == entries
    # Measured 0.3 s on 2 cores; the bound only catches a change of order.
    assert time.process_time() - start_s < 30
    assert len(data) < 1 << 20
    assert isinstance(again.chunk_items, np.ndarray)
