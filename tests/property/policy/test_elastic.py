"""Laws of the division of a batch, for any world."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from tieredckpt.errors import UsageError
from tieredckpt.policy.elastic import largest_world, learning_rate, rows, share, worlds

SIZES = st.integers(1, 64)


@given(st.integers(1, 2000), SIZES, st.none() | st.integers(1, 40))
def test_shares_divide_the_batch_in_order(batch: int, size: int, micro: int | None):
    assume(batch >= size and (micro != 1 or batch % size == 0))
    shares = [share(batch, size, rank, micro) for rank in range(size)]
    parts = [part for each in shares for part in each.parts]
    seen = [row for part in parts for row in range(part.start, part.stop)]
    assert seen == list(range(batch))
    assert len({len(each.parts) for each in shares}) == 1, "a forward pass is collective"
    assert all(part.stop > part.start for part in parts)
    assert micro is None or max(part.stop - part.start for part in parts) <= micro
    lengths = [each.stop - each.start for each in shares]
    assert max(lengths) - min(lengths) <= 1


@given(st.integers(1, 300), SIZES, st.none() | st.integers(2, 40), st.integers(0, 1 << 32))
def test_the_mean_of_gradients_is_that_of_the_batch(
    batch: int, size: int, micro: int | None, seed: int
):
    assume(batch >= size)
    numbers = torch.randint(-1000, 1000, (batch,), generator=torch.manual_seed(seed)).tolist()
    per_rank = [
        sum(
            Fraction(part.weight).limit_denominator(batch)
            * Fraction(sum(numbers[part.start : part.stop]), part.stop - part.start)
            for part in share(batch, size, rank, micro).parts
        )
        for rank in range(size)
    ]
    assert sum(per_rank) / size == Fraction(sum(numbers), batch)


@given(st.integers(1, 500), st.lists(st.tuples(SIZES, st.integers(0, 5)), max_size=12))
def test_each_row_is_seen_once_over_resizes_and_roll_backs(
    batch: int, changes: list[tuple[int, int]]
):
    """A world trains some steps; the next one begins at an earlier step, and those count again."""
    seen: dict[int, list[int]] = {}
    step = 1
    for size, back in [*changes, (1, 0)]:
        step = max(1, step - back)
        seen = {at: found for at, found in seen.items() if at < step}
        for _ in range(4):
            found = rows(step, batch)
            if batch >= size:
                shares = [share(batch, size, rank) for rank in range(size)]
                seen[step] = [row for each in shares for row in found[each.start : each.stop]]
            else:
                seen[step] = list(found)
            step += 1
    assert [row for at in sorted(seen) for row in seen[at]] == list(range((step - 1) * batch))


@given(st.integers(1, 100), st.integers(1, 100), st.integers(1, 9), st.integers(0, 120))
def test_worlds_hold_whole_states(smallest: int, largest: int, group: int, available: int):
    allowed = worlds(smallest, largest, group)
    expected = [n for n in range(1, largest + 1) if n >= smallest and n % group == 0]
    assert list(allowed) == expected
    best = largest_world(allowed, available)
    assert best == max([n for n in expected if n <= available], default=0)


def test_refused_shares():
    with pytest.raises(UsageError, match="none for some of 4 ranks"):
        share(3, 4, 0)
    with pytest.raises(UsageError, match="allow 2 rows"):
        share(5, 4, 0, micro=1)
    with pytest.raises(UsageError, match="rank 4 of 4"):
        share(8, 4, 4)


def test_learning_rates():
    assert learning_rate(0.1, 512, 256) == 0.1
    assert learning_rate(0.1, 512, 256, "linear") == pytest.approx(0.2)
    assert learning_rate(0.1, 1024, 256, "sqrt") == pytest.approx(0.2)
    with pytest.raises(UsageError, match="cubic"):
        learning_rate(0.1, 1, 1, "cubic")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="0 rows"):
        learning_rate(0.1, 0, 1)
