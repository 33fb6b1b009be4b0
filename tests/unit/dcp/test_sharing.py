"""Targets that share memory: index sets are the oracle."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import MetadataIndex

from tieredckpt.dcp.load.sharing import Piece, agreed, sharing
from tieredckpt.errors import UsageError

SHAPE = (4, 6)


@pytest.mark.parametrize(("start", "meets"), [(3, False), (2, True)])
def test_pieces_of_one_key_meet_where_their_boxes_do(start: int, meets: bool):
    """Columns of one matrix, as of ranks that each saved some: every row has parts of both."""
    memory = torch.zeros(SHAPE)

    def piece(begin: int, stop: int) -> Piece:
        request: Any = SimpleNamespace(
            dest_index=MetadataIndex("w"), dest_offsets=(0, begin), lengths=(4, stop - begin)
        )
        target = memory[:, begin:stop]
        return Piece(request, 0, 0, target, target)

    assert bool(sharing([piece(0, 3), piece(start, 6)])) == meets


@st.composite
def cuts(draw: Any) -> tuple[slice, ...]:
    """Rows and columns, also every second or third one; possibly none."""
    found = []
    for size in SHAPE:
        start = draw(st.integers(0, size - 1))
        found.append(slice(start, draw(st.integers(start, size)), draw(st.integers(1, 3))))
    return tuple(found)


def cut_of(whole: torch.Tensor, cut: tuple[slice, ...], turned: bool) -> torch.Tensor:
    return whole[cut].t() if turned else whole[cut]


@given(st.lists(st.tuples(cuts(), st.booleans(), st.integers(0, 9)), min_size=1, max_size=4))
def test_what_shares_elements_is_found_and_compared(drawn: list[Any]):
    memory = torch.zeros(SHAPE, dtype=torch.int16)
    content = torch.arange(24, dtype=torch.int16).view(SHAPE)
    pieces, elements = [], []
    for number, (cut, turned, spoilt) in enumerate(drawn):
        request: Any = SimpleNamespace(dest_index=SimpleNamespace(fqn=str(number)))
        target = cut_of(memory, cut, turned)
        piece = Piece(request, 0, 0, target, target)
        values = cut_of(content, cut, turned).clone(memory_format=torch.contiguous_format)
        if spoilt < values.numel():
            values.view(-1)[spoilt] = -number
        piece.read_aside()
        piece.into.copy_(values)
        pieces.append(piece)
        places = cut_of(torch.arange(24).view(SHAPE), cut, turned)
        elements.append(
            dict(zip(places.flatten().tolist(), values.flatten().tolist(), strict=True))
        )
    shared = {
        one
        for one in range(len(drawn))
        for other in range(len(drawn))
        if one != other and elements[one].keys() & elements[other].keys()
    }
    groups = sharing(pieces)
    found = [pieces.index(piece) for group in groups for piece in group]
    assert sorted(found) == sorted(shared)
    unequal = {
        (str(one), str(other))
        for one in range(len(drawn))
        for other in range(one + 1, len(drawn))
        for place in elements[one].keys() & elements[other].keys()
        if elements[one][place] != elements[other][place]
    }
    if unequal:
        with pytest.raises(UsageError) as refused:
            [agreed(group) for group in groups]
        assert tuple(refused.value.keys) in unequal
        return
    for piece in itertools.chain.from_iterable(map(agreed, groups)):
        piece.target.copy_(piece.into)
    assert all(torch.equal(piece.target, piece.into) for group in groups for piece in group)
