"""Which tensors of one name are compared between ranks, and by what."""

from __future__ import annotations

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

from tieredckpt.dcp.state.consistency import SAMPLE_BYTES, SAMPLED_MAX, Turns, sample_digest


def test_each_tensor_has_its_turn_on_all_ranks():
    names = [f"layers.{number}.weight" for number in range(1000)]
    here, there = Turns(names), Turns(reversed(names))
    seen: set[str] = set()
    for step in range(0, 100_000, 1000):
        chosen = here.at(step)
        assert chosen == there.at(step)
        assert len(set(chosen)) == SAMPLED_MAX
        seen.update(chosen)
    assert seen == set(names)


def test_a_rank_that_has_fewer_names_compares_those_that_another_one_does():
    names = [f"layers.{number}.weight" for number in range(1000)]
    some = names[::3]
    for step in range(20):
        assert set(Turns(names).at(step)) & set(some) <= set(Turns(some).at(step))


@pytest.mark.parametrize("shape", [(), (3, 5), (1, 1_000_000), (1_000_000, 1), (100, 100, 100)])
def test_a_sample_is_of_elements_and_not_of_how_they_are_stored(shape: tuple[int, ...]):
    tensor = torch.rand(shape)
    order = tuple(reversed(range(tensor.ndim)))
    turned = tensor.permute(order).contiguous().permute(order)
    wide = torch.rand((*shape, 2))
    wide[..., 0] = tensor
    for step in (1, 2):
        found = sample_digest("w", tensor, step)
        assert found == sample_digest("w", turned, step) == sample_digest("w", wide[..., 0], step)
        assert found != sample_digest("w", tensor + 1, step)
        assert found != sample_digest("w", tensor.double(), step)


def test_a_large_tensor_is_compared_at_other_places_at_other_steps():
    tensor = torch.zeros(16 * SAMPLE_BYTES, dtype=torch.uint8)
    changed = tensor.clone()
    changed[-1] = 1
    where = torch.arange(tensor.numel() // 8)
    assert sample_digest("w", where, 1) != sample_digest("w", where, 2)
    differ = [
        sample_digest("w", tensor, step) != sample_digest("w", changed, step) for step in range(200)
    ]
    assert not all(differ)
    changed[:] = 1
    assert sample_digest("w", tensor, 1) != sample_digest("w", changed, 1)


def test_of_a_tensor_that_was_left_to_another_rank_there_is_no_sample():
    assert sample_digest("w", torch.empty(3, device="meta"), 1) is None


def freed() -> torch.Tensor:
    """As FSDP1 frees a parameter: a view of a storage that has nothing any more."""
    flat = torch.zeros(1000)
    view = flat[100:200]
    flat.untyped_storage().resize_(0)
    return view


@pytest.mark.parametrize(
    "tensor",
    [
        freed(),
        torch.eye(3).to_sparse(),
        torch.nn.parameter.UninitializedParameter(),
        None,
    ],
)
def test_what_cannot_be_digested_fails_no_save(tensor: torch.Tensor | None):
    assert sample_digest("w", tensor, 1) is None


def test_an_empty_tensor_inside_a_wrapper_has_a_digest():
    made = TwoTensor(torch.zeros(0), torch.zeros(0))
    assert sample_digest("w", made, 1) is not None
