"""DCP's Metadata through the plan and back; the plan cache; what is refused by name."""

from __future__ import annotations

import dataclasses
import math
import pathlib
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from tieredckpt.dcp.state.items import planned_layout, resolve_all, tensor_spec
from tieredckpt.dcp.state.metadata import Places, PlanCache, same_plain, to_metadata, to_plan
from tieredckpt.errors import IntegrityError, UsageError
from tieredckpt.format.plan import decode_plan, encode_plan
from tieredckpt.format.segment import ItemSpec, structure_digest

DTYPES = sorted(
    {value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str
)


def chunk(offsets: tuple[int, ...], sizes: tuple[int, ...]) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))


def tensor(
    shape: tuple[int, ...],
    chunks: list[ChunkStorageMetadata] | None = None,
    **properties: Any,
) -> TensorStorageMetadata:
    whole = [chunk((0,) * len(shape), shape)]
    return TensorStorageMetadata(
        TensorProperties(**properties), torch.Size(shape), whole if chunks is None else chunks
    )


def places_of(metadata: Metadata, num_segments: int = 1) -> tuple[Places, list[bytes]]:
    """Spread the pieces of ``metadata`` over segments in turn."""
    segments: list[list[ItemSpec]] = [[] for _ in range(num_segments)]
    turn = 0
    for name, stored in metadata.state_dict_metadata.items():
        if isinstance(stored, BytesStorageMetadata):
            segments[turn % num_segments].append(ItemSpec(name, "bytes", 3))
            turn += 1
            continue
        dtype = stored.properties.dtype
        for each in stored.chunks:
            segments[turn % num_segments].append(
                ItemSpec(
                    name,
                    "tensor",
                    math.prod(each.sizes) * dtype.itemsize,
                    str(dtype).removeprefix("torch."),
                    tuple(stored.size),
                    tuple(each.offsets),
                    tuple(each.sizes),
                )
            )
            turn += 1
    return Places.of_segments(segments), [bytes([n]) * 16 for n in range(num_segments)]


def through(metadata: Metadata, num_segments: int = 1) -> Metadata:
    places, structures = places_of(metadata, num_segments)
    plan = to_plan(metadata, places, structures)
    back, found = to_metadata(decode_plan(encode_plan(plan)))
    assert found.blobs == places.blobs
    assert {box: place for box, (place, _) in found.chunks.items()} == {
        box: place for box, (place, _) in places.chunks.items()
    }
    assert list(back.state_dict_metadata) == list(metadata.state_dict_metadata)
    return back


def parts_of(metadata: Metadata) -> tuple[Metadata, Places, list[bytes]]:
    return metadata, *places_of(metadata)


def test_every_dtype():
    metadata = Metadata({str(dtype): tensor((3, 2), dtype=dtype) for dtype in DTYPES})
    assert through(metadata) == metadata
    assert len(DTYPES) > 30


@pytest.mark.parametrize(
    "properties",
    [
        {"requires_grad": True},
        {"pin_memory": True},
        {"memory_format": torch.channels_last},
        {"memory_format": torch.preserve_format},
        {"layout": torch.sparse_coo},
    ],
)
def test_properties(properties: dict[str, Any]):
    metadata = Metadata({"a": tensor((2,), **properties), "b": tensor(())})
    assert through(metadata) == metadata


def test_shapes_names_and_order():
    names = ["z", "", "ключ", "a.b.c", "名前/😀", "a\nb", "\x00"]
    stored: dict[str, Any] = {name: tensor((4,)) for name in names}
    stored["bytes"] = BytesStorageMetadata()
    stored["scalar"] = tensor(())
    stored["empty"] = tensor((0, 5))
    stored["halves"] = tensor((5, 2), [chunk((0, 0), (3, 2)), chunk((3, 0), (2, 2))])
    stored["uneven"] = tensor((1, 2), [chunk((0, 0), (1, 2)), chunk((1, 0), (0, 2))])
    stored["none"] = tensor((0,), [])
    metadata = Metadata(stored)
    back = through(metadata, num_segments=3)
    assert back == metadata
    assert isinstance(back.state_dict_metadata["halves"].chunks[0].offsets, torch.Size)


def test_planner_data_storage_meta_version():
    metadata = Metadata(
        {"a": tensor((1,))},
        planner_data={"a": ("x", 0, "y"), "n": [1, 2.5, None, {3: {True: b"x"}}], "big": 1 << 99},
        storage_meta=StorageMeta("dir/step-1", "save", "load", ["m1", "m2"]),
        version="1.0.0",
    )
    back = through(metadata)
    assert back == metadata
    assert type(back.planner_data["a"]) is tuple
    meta = Metadata({}, storage_meta=StorageMeta(checkpoint_id=pathlib.Path("/x/step-1")))
    assert through(meta).storage_meta == meta.storage_meta


def test_extra_attributes_that_are_plain_data():
    metadata = Metadata({"a": tensor((2,), dtype=torch.bfloat16), "b": BytesStorageMetadata()})
    vars(metadata)["mcore_data"] = {"a": {"shape": torch.Size([2]), "dtype": torch.float16}}
    vars(metadata.state_dict_metadata["a"])["note"] = [1, (2, 3)]
    vars(metadata.state_dict_metadata["a"].properties)["scale"] = 0.5
    vars(metadata.state_dict_metadata["a"].chunks[0])["owner"] = 7
    vars(metadata.state_dict_metadata["b"])["codec"] = "x"
    back = through(metadata)
    assert back.mcore_data == metadata.mcore_data
    assert type(back.mcore_data["a"]["shape"]) is torch.Size
    entry = back.state_dict_metadata["a"]
    assert (entry.note, entry.properties.scale, entry.chunks[0].owner) == ([1, (2, 3)], 0.5, 7)
    assert back.state_dict_metadata["b"].codec == "x"


class Opaque:
    pass


@pytest.mark.parametrize("where", ["planner_data", "mcore_data", "entry", "storage_meta"])
def test_what_is_not_plain_is_named(where: str):
    metadata = Metadata({"a": tensor((2,))})
    if where == "planner_data":
        metadata.planner_data = {"a": ("x", Opaque())}
    elif where == "storage_meta":
        metadata.storage_meta = StorageMeta(modules=[Opaque()])
    elif where == "entry":
        vars(metadata.state_dict_metadata["a"])["note"] = Opaque()
    else:
        vars(metadata)["mcore_data"] = Opaque()
    expected = {"entry": "note"}.get(where, where)
    with pytest.raises(UsageError, match=rf"Metadata\..*{expected}.*Opaque"):
        through(metadata)


def test_unknown_entry_type_is_named():
    @dataclasses.dataclass
    class Other(TensorStorageMetadata):
        pass

    entry = tensor((2,))
    metadata = Metadata({"a": Other(entry.properties, entry.size, entry.chunks)})
    with pytest.raises(UsageError, match=r"Other.*'a'"):
        through(metadata)


def test_missing_and_unplanned_pieces_are_named():
    metadata = Metadata({"a": tensor((2,)), "b": BytesStorageMetadata()})
    places, structures = places_of(metadata)
    with pytest.raises(UsageError, match="'b' was planned, but no rank wrote it"):
        to_plan(metadata, Places(places.chunks, {}), structures)
    with pytest.raises(UsageError, match="the piece of 'a'"):
        to_plan(metadata, Places({}, places.blobs), structures)
    with pytest.raises(UsageError, match="not in the planner's metadata: 'b'"):
        to_plan(Metadata({"a": tensor((2,))}), places, structures)


def test_a_tensor_with_holes_is_refused():
    metadata = Metadata({"a": tensor((4,), [chunk((0,), (2,))])})
    with pytest.raises(UsageError, match="saved by all of its ranks"):
        through(metadata)


def test_pieces_that_overlap_and_leave_a_hole_are_neither_saved_nor_loaded():
    halves = [chunk((0,), (8,)), chunk((8,), (8,))]
    plan = to_plan(*parts_of(Metadata({"a": tensor((16,), halves)})))
    twice = Metadata({"a": tensor((16,), halves[:1] * 2)})
    with pytest.raises(UsageError, match="overlapping pieces of 'a'"):
        to_plan(*parts_of(twice))
    to_plan(*parts_of(twice), partial=True)  # of one rank, of several that save it
    forged = dataclasses.replace(plan, chunk_offsets=plan.chunk_offsets * 0)
    with pytest.raises(IntegrityError, match="damaged: there are overlapping pieces of 'a'"):
        to_metadata(forged)


def test_stored_dtype_is_the_truth():
    metadata = Metadata({"a": tensor((2,), dtype=torch.bfloat16)})
    places, structures = places_of(metadata)
    planned = Metadata({"a": tensor((2,), dtype=torch.float32)})
    back, _ = to_metadata(to_plan(planned, places, structures))
    assert back.state_dict_metadata["a"].properties.dtype == torch.bfloat16
    halves = [chunk((0,), (2,)), chunk((2,), (2,))]
    mixed = Metadata({"a": tensor((4,), halves)})
    box = {("a", (0,), (2,)): ((0, 0), "float32"), ("a", (2,), (2,)): ((0, 1), "bfloat16")}
    with pytest.raises(UsageError, match=r"'a' was planned as float32.*bfloat16, float32"):
        to_plan(mixed, Places(box, {}), structures)


def test_unknown_dtype_in_a_plan():
    metadata = Metadata({"a": tensor((2,))})
    places, structures = places_of(metadata)
    plan = to_plan(metadata, places, structures)
    hostile = dataclasses.replace(plan, properties=(plan.properties[0]._replace(dtype="save"),))
    with pytest.raises(IntegrityError, match=r"torch\.save"):
        to_metadata(hostile)


@given(
    st.lists(st.tuples(st.text(max_size=5), st.lists(st.integers(0, 5), max_size=3)), max_size=8),
    st.integers(1, 4),
)
def test_any_structure_round_trips(entries: list[tuple[str, list[int]]], num_segments: int):
    metadata = Metadata({name: tensor(tuple(shape)) for name, shape in entries})
    assert through(metadata, num_segments) == metadata


# --- the cache ----------------------------------------------------------------------------------


def cached(cache: PlanCache, metadata: Metadata, structure: bytes = b"s" * 16) -> str:
    return cache.plan_for(metadata, [structure], lambda: places_of(metadata)[0]).id


def test_equal_metadata_reuses_the_plan():
    def make() -> Metadata:
        return Metadata({"a": tensor((2,)), "b": BytesStorageMetadata()}, planner_data={"a": (1,)})

    cache = PlanCache()
    first = cached(cache, make())
    assert cached(cache, make()) == first
    assert cache.builds == 1
    cached(cache, make(), b"t" * 16)
    assert cache.builds == 2


@pytest.mark.parametrize("change", ["shape", "dtype", "extra", "planner_data", "order", "nested"])
def test_any_change_builds_anew(change: str):
    cache = PlanCache()
    metadata = Metadata({"a": tensor((2,)), "b": tensor((2,))}, planner_data={"a": (1,)})
    before = cached(cache, metadata)
    if change == "shape":
        metadata.state_dict_metadata["a"] = tensor((3,))
    elif change == "dtype":
        metadata.state_dict_metadata["a"] = tensor((2,), dtype=torch.int8)
    elif change == "extra":
        vars(metadata)["mcore_data"] = 1
    elif change == "planner_data":
        metadata.planner_data["a"] = (True,)  # equal to 1, but not the same
    elif change == "order":
        metadata.state_dict_metadata = dict(reversed(metadata.state_dict_metadata.items()))
    else:
        entry = tensor((2,))
        vars(entry.properties)["scale"] = 2
        metadata.state_dict_metadata["a"] = entry
    assert cached(cache, metadata) != before


def test_strides_are_neither_stored_nor_compared():
    """torch 2.15 has them in TensorProperties. They are of one rank's piece, so ranks differ."""
    metadata, other, plain = (Metadata({"a": tensor((2, 3))}) for _ in range(3))
    vars(metadata.state_dict_metadata["a"].properties)["strides"] = (3, 1)
    vars(other.state_dict_metadata["a"].properties)["strides"] = (1, 2)
    vars(plain.state_dict_metadata["a"].properties).pop("strides", None)
    cache = PlanCache()
    assert cached(cache, metadata) == cached(cache, other) == cached(cache, plain)
    assert cache.builds == 1
    assert cached(PlanCache(), plain) == cached(cache, metadata)


def test_same_plain_is_strict():
    assert same_plain({"a": [1, (2.0, None)]}, {"a": [1, (2.0, None)]})
    for one, other in [(1, True), (1, 1.0), ([1], (1,)), ({1: 2, 3: 4}, {3: 4, 1: 2}), ("a", "b")]:
        assert not same_plain(one, other)
    assert not same_plain(Opaque(), Opaque())


# --- items ----------------------------------------------------------------------------------------


class Casting(DefaultSavePlanner):
    def resolve_data(self, write_item: Any) -> Any:
        return super().resolve_data(write_item).to(torch.bfloat16)


def planned(planner: DefaultSavePlanner, state: dict[str, Any]) -> Any:
    planner.set_up_planner(state, None, True)
    return planner.create_local_plan().items


def test_resolved_is_compared_with_planned():
    planner = Casting()
    [item] = planned(planner, {"w": torch.zeros(3)})
    with pytest.raises(UsageError, match=r"'w' was planned as float32 \[3\], but is bfloat16"):
        resolve_all(planner, [item])
    plain = DefaultSavePlanner()
    state = {"w": torch.zeros(3)}
    [item] = planned(plain, state)
    plain.state_dict["w"] = torch.zeros(4)
    with pytest.raises(UsageError, match=r"'w' was planned as float32 \[3\], but is float32 \[4\]"):
        resolve_all(plain, [item])
    plain.state_dict["w"] = torch.zeros(3, device="meta")
    with pytest.raises(UsageError, match="meta device"):
        resolve_all(plain, [item])
    plain.state_dict["w"] = torch.zeros(3).to_sparse()
    with pytest.raises(UsageError, match="sparse"):
        resolve_all(plain, [item])


def test_planned_structure_is_that_of_what_is_written():
    planner = DefaultSavePlanner()
    items = planned(planner, {"b": "text", "w": torch.zeros(3, 2), "x": torch.tensor(1.0)})
    layout = planned_layout(items)
    assert [item.name for item in layout.items] == ["w", "x", "b"]
    longer = [*(tensor_spec(i) for i in items if i.tensor_data), ItemSpec("b", "bytes", 999)]
    from tieredckpt.format.segment import lay_out

    assert structure_digest(lay_out(longer).items) == structure_digest(layout.items)
