"""Wrappers taken apart, and read region by region; the class's own slices are the oracle."""

from __future__ import annotations

import enum
from collections import namedtuple
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner_helpers import (
    _create_read_item_for_byteio,
    create_read_items_for_chunk_list,
)
from torch.testing._internal.two_tensor import TwoTensor

from tieredckpt.dcp.load.wrappers import wrapped_reads
from tieredckpt.dcp.state.items import resolve_all
from tieredckpt.dcp.state.wrappers import flatten, plain_parts, unflatten
from tieredckpt.errors import IntegrityError, UsageError
from tieredckpt.format.parts import MARK, Kind, PartName, Piece, Pieces, join_parts
from tieredckpt.format.plan import Chunk, TensorEntry

BLOCK = 4
aten = torch.ops.aten


class Blocks(torch.Tensor):
    """As torchao's 8-bit states: codes of the outer shape, a flat scale, a table for all."""

    codes: torch.Tensor
    scale: torch.Tensor
    table: torch.Tensor
    cuts = "as a view"

    @staticmethod
    def table_of(x: Blocks, start: int, stop: int) -> torch.Tensor:
        """The table of a cut."""
        return x.table.clone()

    @staticmethod
    def __new__(
        cls, codes: torch.Tensor, scale: torch.Tensor, table: torch.Tensor, context: Any
    ) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)

    def __init__(
        self, codes: torch.Tensor, scale: torch.Tensor, table: torch.Tensor, context: Any
    ) -> None:
        self.codes, self.scale, self.table, self.context = codes, scale, table, context

    def __tensor_flatten__(self) -> Any:
        return ["codes", "scale", "table"], self.context

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, context: Any, size: Any, stride: Any) -> Blocks:
        assert tuple(inner["codes"].shape) == tuple(size)
        return cls(inner["codes"], inner["scale"], inner["table"], context)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not aten.slice.Tensor:
            raise NotImplementedError(f"{func}")
        x, dim, start, stop = args[:4]
        width = x.shape[1]
        if dim or start * width % BLOCK or stop * width % BLOCK:
            raise ValueError("not at a block")
        scale = x.scale[start * width // BLOCK : stop * width // BLOCK]
        if cls.cuts == "as a copy":
            scale = scale.clone()
        elif cls.cuts == "every second":
            scale = x.scale[::2]
        elif cls.cuts == "another way":
            scale = x.scale.flip(0)[: len(scale)]
        context = x.context
        if isinstance(context, list):
            context = [tuple(x.codes[start:stop].shape), *context[1:]]
        return cls(x.codes[start:stop], scale, cls.table_of(x, start, stop), context)


class AsCopy(Blocks):
    cuts = "as a copy"


class EverySecond(Blocks):
    cuts = "every second"


class AnotherWay(Blocks):
    cuts = "another way"


def blocks(rows: int, width: int, begin: int = 0, kind: type[Blocks] = Blocks) -> Blocks:
    """Rows of a tensor whose elements are all different."""
    first = begin * width
    codes = torch.arange(first, first + rows * width).view(rows, width)
    scale = torch.arange(first // BLOCK, (first + rows * width) // BLOCK).float()
    return kind(codes, scale, torch.arange(3), [(rows, width), "blocks", torch.float32])


def blank(like: Blocks) -> Blocks:
    parts = {path: torch.full_like(each, -1) for path, each in flatten("", like)[0].items()}
    made: Blocks = unflatten(like, parts)
    return made


class Saved:
    """A checkpoint of wrappers, each the rows of one tensor from some row on."""

    def __init__(self, whole: tuple[int, ...], given: list[tuple[int, Any]]) -> None:
        self.content: dict[str, torch.Tensor] = {}
        self.stored: dict[str, TensorStorageMetadata] = {}
        entries: list[Any] = []
        chunks = []
        for begin, wrapper in given:
            parts, tree = flatten("w", wrapper)
            kind = Kind(str(wrapper.dtype)[6:], whole, tree).encode()
            offsets = (begin,) + (0,) * (len(whole) - 1)
            chunks.append(ChunkStorageMetadata(torch.Size(offsets), wrapper.shape))
            for number, (path, part) in enumerate(parts.items()):
                name = str(PartName("w", path, offsets, b"" if number else kind))
                self.content[name] = part
                only = [ChunkStorageMetadata(torch.Size([0] * part.ndim), part.shape)]
                properties = TensorProperties(part.dtype)
                self.stored[name] = TensorStorageMetadata(properties, part.shape, only)
                zeros = (0,) * part.ndim
                chunk = Chunk(zeros, tuple(part.shape), 0, 0)
                shape, dtype = tuple(part.shape), "int64"
                entries.append(
                    TensorEntry(name, dtype, "strided", False, "", False, shape, (chunk,))
                )
        self.pieces: Pieces = join_parts(entries)[1]
        self.about = TensorStorageMetadata(TensorProperties(), torch.Size(whole), chunks)

    def load(self, begin: int, target: torch.Tensor) -> None:
        """As a reader does for a rank whose piece begins at row ``begin``."""
        offsets = torch.Size((begin,) + (0,) * (target.ndim - 1))
        wanted = [ChunkStorageMetadata(offsets, target.shape)]
        items = create_read_items_for_chunk_list("w", self.about, wanted)
        planner: Any = SimpleNamespace(resolve_tensor=lambda _: target)
        reads, [(whole, given)] = wrapped_reads(items, planner, self.pieces, self.stored)
        assert given is target
        assert (sum(whole.dest_offsets), whole.lengths) == (0, target.shape)
        for request, into in reads:
            source = self.content[request.storage_index.fqn]
            for dim, at in enumerate(request.storage_offsets):
                source = source.narrow(dim, at, request.lengths[dim])
            into.copy_(source)


def same(one: Any, other: Any) -> bool:
    mine, theirs = flatten("", one), flatten("", other)
    return mine[1] == theirs[1] and all(
        torch.equal(part, theirs[0][path]) for path, part in mine[0].items()
    )


@st.composite
def rows(draw: st.DrawFn, total: int) -> list[tuple[int, int]]:
    """Begin and end of each rank's rows."""
    cuts = draw(st.lists(st.integers(1, total - 1), max_size=3, unique=True))
    return [*zip([0, *sorted(cuts)], [*sorted(cuts), total], strict=True)]


@given(rows(12), rows(12), st.sampled_from([2, 4, 6]))
def test_any_number_of_ranks_gets_its_rows_or_an_error(
    before: list[tuple[int, int]], after: list[tuple[int, int]], width: int
):
    if any(at * width % BLOCK for cut in before for at in cut):
        return  # such a piece cannot be made
    saved = Saved((12, width), [(a, blocks(b - a, width, a)) for a, b in before])
    for begin, end in after:
        if begin * width % BLOCK or end * width % BLOCK:
            continue
        wanted = blocks(end - begin, width, begin)
        target = blank(wanted)
        saved.load(begin, target)
        assert same(target, wanted)


def test_a_cut_inside_of_a_block_is_refused_by_key():
    saved = Saved((8, 6), [(0, blocks(8, 6))])
    odd = Blocks(
        torch.zeros(3, 6).long(),
        torch.zeros(4),
        torch.zeros(3).long(),
        [(3, 6), "blocks", torch.float32],
    )
    with pytest.raises(
        UsageError,
        match=r"'w' is a Blocks .*was saved in other pieces .*not at a block.*number of ranks",
    ):
        saved.load(0, odd)
    assert not odd.codes.any()


@pytest.mark.parametrize("kind", [AsCopy, EverySecond, AnotherWay])
def test_a_class_that_does_not_cut_its_inner_tensors_is_refused(kind: type[Blocks]):
    saved = Saved((8, 4), [(0, blocks(8, 4, kind=kind))])
    whole = blank(blocks(8, 4, kind=kind))
    saved.load(0, whole)  # as at the save: nothing is cut
    assert same(whole, blocks(8, 4, kind=kind))
    with pytest.raises(
        UsageError, match=r"'w' is a .*was saved in other pieces.*'scale' is not cut"
    ):
        saved.load(4, blocks(4, 4, 4, kind=kind))


def load_half(table: Any) -> torch.Tensor:
    """Read the lower half of rows, by a class with such tables of cuts."""
    kind = type("Own", (Blocks,), {"table_of": staticmethod(table)})
    target = blank(blocks(4, 4, 4, kind=kind))
    Saved((8, 4), [(0, blocks(8, 4, kind=kind))]).load(4, target)
    assert same(target, blocks(4, 4, 4, kind=kind))
    return target.table


UNCUT: dict[str, Any] = {
    "itself": lambda x, *_: x.table,
    "views": lambda x, *_: x.table.detach().view(3, 1).squeeze(1),
    "copies": lambda x, *_: x.table.clone().detach().clone()[:],
}


@pytest.mark.parametrize("name", UNCUT)
def test_an_inner_tensor_that_is_not_cut_may_be_copied(name: str):
    assert load_half(UNCUT[name]).tolist() == [0, 1, 2]


ANEW, NO_BOX, WRITES = "not cut, but made anew", "not cut to a box", "writes to tensors"
OTHER: dict[str, tuple[str, Any]] = {
    "of the rows": (ANEW, lambda x, start, stop: x.codes[start:stop].sum(0)[:3]),
    "other order": (ANEW, lambda x, *_: x.table.flip(0)),
    "copy in other order": (ANEW, lambda x, *_: x.table.clone().flip(0)),
    "put together": (ANEW, lambda x, *_: torch.cat([x.table[:1], x.table[1:]])),
    "copy of a part": (ANEW, lambda x, *_: x.table[:1].clone().expand(3)),
    "cast": (ANEW, lambda x, *_: x.table.int().long()),
    "view of another": (ANEW, lambda x, *_: x.codes.view(-1)[:3]),
    "repeated": (NO_BOX, lambda x, *_: x.table[:1].expand(3)),
    "other type": (NO_BOX, lambda x, *_: x.table.view(torch.float64)),
    "negated": (NO_BOX, lambda x, *_: torch._neg_view(x.table)),
    "changed": (WRITES, lambda x, *_: x.table.clone().add_(1)),
    "filled": (WRITES, lambda x, *_: torch.empty_like(x.table).copy_(x.table)),
}


@pytest.mark.parametrize("name", OTHER)
def test_an_inner_tensor_of_the_old_shape_that_is_another_one_is_refused(name: str):
    """The others are cut as views. What it has may depend on the rows."""
    why, table = OTHER[name]
    with pytest.raises(UsageError, match=f"'w' is a Own .*was saved in other pieces.*{why}"):
        load_half(table)


class Uncut(TwoTensor):
    """Its cut is the whole."""

    @staticmethod
    def __tensor_unflatten__(inner: Any, context: Any, size: Any, stride: Any) -> TwoTensor:
        return Uncut(inner["a"], inner["b"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
        return Uncut(args[0].a, args[0].b)


class Other(TwoTensor):
    """What is made of its parts is a TwoTensor."""


@pytest.mark.parametrize(
    ("kind", "why"),
    [(Uncut, "none of its inner tensors is cut"), (Other, "it makes a TwoTensor of its parts")],
)
def test_a_class_that_does_not_cut_itself_is_refused(kind: type[TwoTensor], why: str):
    def two(rows: int) -> TwoTensor:
        return kind(torch.zeros(rows, 3), torch.zeros(rows, 3))

    with pytest.raises(UsageError, match=f"'w' is a {kind.__name__} .*{why}"):
        Saved((8, 3), [(0, two(8))]).load(4, two(4))


def test_an_inner_tensor_that_each_piece_has_must_be_alike():
    """The reader compares what two pieces have for one place in memory."""
    one, other = blocks(4, 4), blocks(4, 4, 4)
    saved = Saved((8, 4), [(0, one), (4, other)])
    target = blank(blocks(8, 4))
    items = create_read_items_for_chunk_list(
        "w", saved.about, [ChunkStorageMetadata(torch.Size((0, 0)), target.shape)]
    )
    planner: Any = SimpleNamespace(resolve_tensor=lambda _: target)
    reads, _ = wrapped_reads(items, planner, saved.pieces, saved.stored)
    tables = [each for each, into in reads if into.data_ptr() == target.table.data_ptr()]
    assert [each.lengths for each in tables] == [(3,), (3,)]


class Mode(enum.Enum):
    FAST = 1
    EXACT = 2


@dataclass(frozen=True)
class Options:
    block: int
    mode: Mode


Pair = namedtuple("Pair", "a b")


@pytest.mark.parametrize(
    ("saved", "other"),
    [
        (torch.float32, torch.bfloat16),
        (torch.float32, "torch.float16"),
        (Mode.FAST, Mode.EXACT),
        (Options(32, Mode.FAST), Options(64, Mode.FAST)),
        (Options(32, Mode.FAST), Options(32, Mode.EXACT)),
        (Pair(1, 2), Pair(1, 3)),
        (Pair(1, 2), (1, 2)),
        ({"a": [1, 2]}, {"a": [1, 3]}),
        (1, True),
        (1, 1.0),
        (None, False),
        (blocks, blank),
        (Options, Pair),
        ([(2, 2)], [(2, 3)]),
    ],
)
def test_another_context_is_refused_by_key_before_anything_is_read(saved: Any, other: Any):
    def made(context: Any) -> Blocks:
        found = blocks(4, 4)
        found.context = context
        return found

    checkpoint = Saved((4, 4), [(0, made(saved))])
    target = blank(made(saved))
    checkpoint.load(0, target)
    assert same(target, made(saved))
    target = blank(made(other))
    with pytest.raises(
        UsageError, match=r"'w' is a Blocks in the .*, and another one in the state"
    ):
        checkpoint.load(0, target)
    assert same(target, blank(made(other)))


def test_the_same_values_in_another_container_are_the_same_context():
    one, other = blocks(4, 4), blocks(4, 4)
    one.context, other.context = [torch.Size((4, 4)), {"a": 1, "b": 2}], ((4, 4), {"b": 2, "a": 1})
    target = blank(other)
    Saved((4, 4), [(0, one)]).load(0, target)
    assert torch.equal(target.codes, one.codes)
    one.context, other.context = torch.device("cpu"), torch.device("cuda", 1)
    Saved((4, 4), [(0, one)]).load(0, target if target.context == other.context else other)


def test_what_cannot_be_described_is_refused_by_key():
    wrapper = blocks(4, 4)
    for context in (object(), [SimpleNamespace()], torch.ones(1), {"f": lambda: 1}, {1}):
        wrapper.context = context
        with pytest.raises(UsageError, match=r"'a\.b' is a wrapper whose context holds a"):
            flatten("a.b", wrapper)


def test_a_wrapper_of_another_class_shape_or_size_of_blocks_is_refused():
    checkpoint = Saved((4, 4), [(0, blocks(4, 4))])
    with pytest.raises(
        UsageError, match=r"'w' is a Blocks in the .*, and another one in the state"
    ):
        checkpoint.load(0, blank(blocks(4, 4, kind=AsCopy)))
    with pytest.raises(UsageError, match=r"'w' is a Blocks in the checkpoint, .* a Tensor in the"):
        checkpoint.load(0, torch.zeros(4, 4))
    larger = blank(blocks(4, 4))
    larger.scale = larger.scale[::2].clone()
    with pytest.raises(UsageError, match=r"'scale' is torch.float32 \[4\] there and .* \[2\]"):
        checkpoint.load(0, larger)
    coarse = blank(blocks(4, 4))
    coarse.scale = coarse.scale.double()
    with pytest.raises(UsageError, match=r"'scale' is .*32 \[4\] there and torch.float64 \[4\]"):
        checkpoint.load(0, coarse)
    [piece] = checkpoint.pieces.values()
    del piece.names["scale"]
    with pytest.raises(IntegrityError, match="does not have all parts of 'w'"):
        checkpoint.load(0, blank(blocks(4, 4)))


def test_wrappers_in_wrappers_have_parts_of_their_own_and_are_cut_too():
    def made(begin: int, end: int) -> TwoTensor:
        a, b, c, d = (each.clone() for each in torch.arange(96.0).view(4, 8, 3)[:, begin:end])
        return TwoTensor(TwoTensor(a, b), TwoTensor(c, d))

    whole = made(0, 8)
    assert [*flatten("", whole)[0]] == ["a.a", "a.b", "b.a", "b.b"]
    assert all(
        torch.equal(one, other)
        for one, other in zip(plain_parts(whole), whole_parts(whole), strict=True)
    )
    saved = Saved((8, 3), [(0, made(0, 3)), (3, made(3, 8))])
    for begin, end in ((0, 8), (0, 3), (2, 5), (4, 8)):
        parts = {path: torch.zeros(end - begin, 3) for path in ("a.a", "a.b", "b.a", "b.b")}
        target = unflatten(made(begin, end), parts)
        saved.load(begin, target)
        assert same(target, made(begin, end))
    with pytest.raises(UsageError, match=r"'w' is a TwoTensor in the .*, and another one"):
        saved.load(0, TwoTensor(torch.zeros(8, 3), torch.zeros(8, 3)))


def whole_parts(two: Any) -> list[torch.Tensor]:
    return [two.a.a, two.a.b, two.b.a, two.b.b]


def test_a_stored_tree_that_is_none_is_refused():
    checkpoint = Saved((4, 4), [(0, blocks(4, 4))])
    at, piece = next(iter(checkpoint.pieces.items()))
    for tree in (("Blocks", (4, 4), 1, {}), ("Blocks", (4, 4), None, {"codes": None})):
        checkpoint.pieces[at] = piece._replace(kind=piece.kind._replace(tree=tree))
        with pytest.raises(UsageError, match=r"'w' is a Blocks in the .*, and another one"):
            checkpoint.load(0, blocks(4, 4))


def test_a_key_that_could_be_the_name_of_a_part_is_refused():
    planner = DefaultSavePlanner()
    for value in (torch.zeros(1), 1):
        planner.set_up_planner({f"a{MARK}b": value}, None, True)
        with pytest.raises(UsageError, match="which is kept for parts of wrappers"):
            resolve_all(planner, planner.create_local_plan().items)


def test_an_item_of_another_offset_asks_for_no_piece():
    checkpoint = Saved((4, 4), [(0, blocks(4, 4))])
    wanted = [ChunkStorageMetadata(torch.Size((0, 0)), torch.Size((4, 4)))]
    [item] = create_read_items_for_chunk_list("w", checkpoint.about, wanted)
    for index in (MetadataIndex("w"), MetadataIndex("v", torch.Size((0, 0)))):
        other = replace(item, storage_index=index)
        assert wrapped_reads([other], SimpleNamespace(), checkpoint.pieces, {}) == ([], [])  # type: ignore[arg-type]


class Tiled(torch.Tensor):
    """Rows in one tile that is padded to eight; its slice unpacks, cuts and packs again."""

    tile: torch.Tensor

    @staticmethod
    def __new__(cls, tile: torch.Tensor, rows: int) -> Any:
        shape = (rows, tile.shape[1])
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=torch.float32)

    def __init__(self, tile: torch.Tensor, rows: int) -> None:
        self.tile = tile

    def __tensor_flatten__(self) -> Any:
        return ["tile"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, context: Any, size: Any, stride: Any) -> Tiled:
        return cls(inner["tile"], size[0])

    @classmethod
    def of(cls, plain: torch.Tensor) -> Tiled:
        padding = plain.new_zeros(-len(plain) % 8, plain.shape[1])
        return cls(torch.cat([plain, padding]), len(plain))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten.detach.default:
            return cls(args[0].tile, args[0].shape[0])
        assert func is aten.slice.Tensor
        tensor, dim, start, stop = args[:4]
        assert dim == 0
        return cls.of(tensor.tile[: tensor.shape[0]][start:stop])


def test_a_class_that_packs_what_it_cuts_anew_is_refused():
    """Its cut has the shape of the whole, and other rows."""
    parts, tree = flatten("w", Tiled.of(torch.arange(24.0).view(8, 3)))
    kind = Kind("float32", (8, 3), tree)
    name = str(PartName("w", "tile", (0, 0), kind.encode()))
    pieces: Pieces = {("w", (0, 0)): Piece(kind, Chunk((0, 0), (8, 3), 0, 0), {"tile": name})}
    stored = {name: entry_of(parts["tile"])}
    mine = Tiled.of(torch.zeros(4, 3))
    planner = SimpleNamespace(resolve_tensor=lambda _: mine)
    item = create_read_items_for_chunk_list("w", whole((8, 3)), [chunk((4, 0), (4, 3))])[0]
    with pytest.raises(UsageError, match=r"'w' .*'tile' is not cut, but made anew"):
        wrapped_reads([item], planner, pieces, stored)  # type: ignore[arg-type]


def test_plain_pieces_are_refused_by_a_wrapper_whose_cuts_are_plain():
    """Else they would be read into a temporary tensor, and the wrapper would keep its values."""
    mine = blocks(8, 4)
    planner = SimpleNamespace(resolve_tensor=lambda _: mine)
    stored = whole((8, 4), (4, 4), (4, 4))
    items = create_read_items_for_chunk_list("w", stored, [chunk((0, 0), (8, 4))])
    assert len(items) == 2
    value = _create_read_item_for_byteio(MetadataIndex("v"), 0, MetadataIndex("v"), 0, 9)
    assert wrapped_reads([value], planner, {}, {}) == ([], [])  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="'w' is a plain tensor in the checkpoint and a Blocks"):
        wrapped_reads(items, planner, {}, {})  # type: ignore[arg-type]


def chunk(offsets: tuple[int, ...], sizes: tuple[int, ...]) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))


def whole(size: tuple[int, ...], *heights: tuple[int, ...]) -> TensorStorageMetadata:
    """A tensor in pieces of some rows, one below the other."""
    chunks, row = [], 0
    for each in heights or (size,):
        chunks.append(chunk((row, *(0,) * (len(size) - 1)), each))
        row += each[0]
    return TensorStorageMetadata(TensorProperties(torch.float32), torch.Size(size), chunks)


def entry_of(part: torch.Tensor) -> TensorStorageMetadata:
    return whole(tuple(part.shape))
