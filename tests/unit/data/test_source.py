"""A loader resumes: those that are right do, on any host, and those that are wrong are refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

from tieredckpt.data.source import Source
from tieredckpt.errors import UsageError

pytestmark = pytest.mark.filterwarnings("ignore:.set_vital. is deprecated:UserWarning")
ROWS, STEPS = 20, 13
"""Without workers five batches of four are an epoch, with two workers six."""
Make = Callable[[], Source]


class Rows(Dataset[int]):
    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> int:
        return index


class Augmented(Rows):
    """With a random number from the global generator, which no state has."""

    def __getitem__(self, index: int) -> Any:
        return index, torch.rand(())


class Part(IterableDataset[int]):
    """The rows of this worker, as a generator, and their position as the state of the data set."""

    at = start = 0

    def row(self) -> int | None:
        info = get_worker_info()
        number, count = (info.id, info.num_workers) if info else (0, 1)
        row = self.at * count + number
        self.at += row < ROWS
        return row if row < ROWS else None

    def __iter__(self) -> Iterator[int]:
        self.at = self.start
        while (row := self.row()) is not None:
            yield row

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.start = state["at"]


class HuggingFace(Part):
    """As ``datasets.IterableDataset``, 5.2, of a generator.

    Its state is that of the last iterator, which sets it at its first row. ``load_state_dict``
    only notes a state, from which every iterator of that epoch begins.
    """

    epoch, noted = 0, None

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        self.start = self.noted["at"] if self.noted and self.noted["epoch"] == self.epoch else 0
        return super().__iter__()

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "epoch": self.epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.noted = state


class ItsOwnIterator(Part):
    def __iter__(self) -> Iterator[int]:
        self.at = 0
        return self

    def __next__(self) -> int:
        if (row := self.row()) is None:
            raise StopIteration
        return row

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


def source(dataset: Any, on_epoch: Any = None, **options: Any) -> Source:
    generator = torch.Generator().manual_seed(1)
    options = {"batch_size": 4, "generator": generator, **options}
    return Source(StatefulDataLoader(dataset, **options), None, on_epoch)


def distributed() -> Source:
    sampler = StatefulDistributedSampler(Rows(), num_replicas=1, rank=0)
    return source(Rows(), sampler.set_epoch, sampler=sampler)


def hugging_face(workers: int = 0) -> Source:
    dataset = HuggingFace()
    return source(dataset, dataset.set_epoch, num_workers=workers)


def load(found: Source, count: int) -> list[tuple[Any, bytes, Any]]:
    """The next batches, without random numbers, with mark and state after each."""
    delivered = []
    for _ in range(count):
        batch = found.load()
        rows = batch[0] if isinstance(batch, list) else batch
        delivered.append((rows.tolist(), found.mark, found.state))
    return delivered


@pytest.mark.parametrize(
    ("make", "steps"),
    [
        pytest.param(distributed, range(1, STEPS), id="distributed sampler"),
        pytest.param(hugging_face, range(1, STEPS), id="hugging face"),
        # After the fifth batch one worker of the second has come to its end, and not the other.
        pytest.param(lambda: hugging_face(2), (3,), id="hugging face, workers"),
        pytest.param(lambda: source(ItsOwnIterator(), num_workers=2), (5,), id="own, workers"),
        pytest.param(lambda: source(Augmented(), shuffle=True), range(1, STEPS), id="augmented"),
    ],
)
def test_a_loader_that_is_right_resumes_on_this_host_and_on_another(make: Make, steps: Any):
    host = make()
    expected = load(host, steps[-1] + 4)
    for step in steps:
        _, mark, state = expected[step - 1]
        for resumed in (make(), host):
            resumed.seek(mark, state)
            assert (resumed.batches, resumed.mark) == (step, mark)
            after = load(resumed, len(expected) - step)
            assert [each[:2] for each in after] == [each[:2] for each in expected[step:]]
        # A state of one that resumed is complete, too.
        _, mark, state = after[0]
        again = make()
        again.seek(mark, state)
        assert load(again, 1)[0][:2] == expected[step + 1][:2]


class FromTheStart(Part):
    def load_state_dict(self, _: dict[str, Any]) -> None:
        """It is forgotten."""


class OneTooFar(Part):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.start = state["at"] + 1


class OtherOrder(Part):
    """The position is restored, and the order is another one in each process."""

    made = 0

    def __init__(self) -> None:
        OtherOrder.made += 1
        generator = torch.Generator().manual_seed(self.made)
        self.order = torch.randperm(ROWS, generator=generator).tolist()

    def __iter__(self) -> Iterator[int]:
        return map(self.order.__getitem__, super().__iter__())


@pytest.mark.parametrize("equal", [True, False])
@pytest.mark.parametrize("kind", [FromTheStart, OneTooFar])
def test_a_wrong_place_is_refused_even_if_all_batches_are_equal(kind: Any, equal: bool):
    def constant(rows: list[int]) -> torch.Tensor:
        return torch.tensor([7] * 4 if equal else rows)

    _, mark, state = load(source(kind(), collate_fn=constant), 3)[-1]
    resumed = source(kind(), collate_fn=constant)
    for _ in range(2):
        with pytest.raises(UsageError, match="did not return to the state"):
            resumed.seek(mark, state)
    assert resumed.mark is None


def test_other_rows_at_the_same_place_are_refused():
    _, mark, state = load(source(OtherOrder()), 3)[-1]
    resumed = source(OtherOrder())
    for _ in range(2):
        with pytest.raises(UsageError, match="did not return to the state"):
            resumed.seek(mark, state)


def test_an_epoch_that_begins_where_the_loader_resumed_is_refused():
    """As with ``datasets`` without ``on_epoch=dataset.set_epoch``."""
    for step in range(1, 12):
        _, mark, state = load(source(HuggingFace()), step)[-1]
        resumed = source(HuggingFace())
        left = -step % 5  # before the next epoch
        with pytest.raises(UsageError, match="did not return to the state"):  # noqa: PT012
            resumed.seek(mark, state)
            load(resumed, left)
            left = 0
            resumed.load()
        assert left == 0 or step % 5 == 1, (
            "none of this epoch is missing, none of the next is there"
        )


def test_a_state_of_before_is_checked_as_then():
    """Older releases wrote its first four parts only."""
    for make, is_refused in ((lambda: source(Rows(), shuffle=True), False), (distributed, True)):
        expected = load(make(), 9)
        _, mark, state = expected[2]
        resumed = make()
        if is_refused:
            with pytest.raises(UsageError, match="did not return to the state"):
                resumed.seek(mark, state[:4])
        else:
            resumed.seek(mark, state[:4])
            assert [each[:2] for each in load(resumed, 6)] == [each[:2] for each in expected[3:]]


def test_the_epoch_of_each_batch_is_announced_when_it_is_loaded_again():
    begun: list[int] = []
    sampler = StatefulDistributedSampler(Rows(), num_replicas=1, rank=0)

    def on_epoch(epoch: int) -> None:
        begun.append(epoch)
        sampler.set_epoch(epoch)

    expected = load(distributed(), 7)
    resumed = source(Rows(), on_epoch, sampler=sampler)
    resumed.seek(*expected[5][1:])
    assert begun == [1, 0, 1], "the state, the one before, whose epoch has ended, and the next"
    assert load(resumed, 1)[0][:2] == expected[6][:2]


def test_a_loader_that_was_given_a_state_cannot_begin():
    _, mark, state = load(distributed(), 3)[-1]
    resumed = distributed()
    resumed.seek(mark, state)
    with pytest.raises(UsageError, match="cannot go back to its beginning"):
        resumed.seek(b"", None)
