"""The data cache: batches outlive who loaded them, are shared, verified, bounded, never wrong."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

from tests.support.states import config
from tieredckpt import data
from tieredckpt.engine import Engine

pytestmark = [
    pytest.mark.usefixtures("served"),
    pytest.mark.filterwarnings("ignore:.set_vital. is deprecated:UserWarning"),  # of torchdata
]
ROWS = 20
"""Five batches of four are an epoch."""


class Numbers(Dataset[dict[str, Any]]):
    """Rows that are functions of their number; ``fetched`` has what this process computed."""

    def __init__(self, rows: int = ROWS, scale: float = 1.0) -> None:
        self.rows, self.scale = rows, scale
        self._fetched: list[int] = []

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> dict[str, Any]:
        self._fetched.append(index)
        row = torch.full((300, 2), index * self.scale)
        return {"id": index, "name": f"row {index}", "row": row}


def loader(dataset: Numbers | None = None, **options: Any) -> StatefulDataLoader:
    generator = torch.Generator().manual_seed(options.pop("seed", 1))
    return StatefulDataLoader(
        Numbers() if dataset is None else dataset, batch_size=4, shuffle=True, generator=generator,
        **options,
    )  # fmt: skip


def ids(batches: Iterator[Any], count: int) -> list[list[int]]:
    """The rows of the next batches, which are right in all their parts."""
    found = []
    for _ in range(count):
        batch = next(batches)
        numbers = batch["id"].tolist()
        assert batch["name"] == [f"row {n}" for n in numbers]
        assert torch.equal(batch["row"], batch["id"][:, None, None].expand(-1, 300, 2).float())
        found.append(numbers)
    return found


def undisturbed(count: int, **options: Any) -> list[list[int]]:
    """What the loader gives without a cache, epoch after epoch."""
    plain, found = loader(**options), []
    while len(found) < count:
        found += [batch["id"].tolist() for batch in plain]
    return found[:count]


@pytest.fixture
def engine(runtime_dir: Path) -> Iterator[Engine]:
    with Engine.open(options(runtime_dir)) as engine:
        yield engine


def options(runtime_dir: Path, **limits: Any) -> dict[str, Any]:
    return {**config(runtime_dir), "data": {"ahead": 3, "behind": 4, **limits}}


def entries(runtime_dir: Path) -> dict[int, Path]:
    return {int(p.name): p for p in runtime_dir.glob("data/*/*/*") if p.name.isdigit()}


def wait_for_ahead(runtime_dir: Path, last: int) -> None:
    from tests.support.agent import wait_until

    wait_until(lambda: last in entries(runtime_dir))


# --- order ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
def test_the_order_is_that_of_the_loader_over_epochs(engine: Engine, workers: int):
    batches = data.cached(loader(num_workers=workers), engine)
    assert ids(batches, 13) == undisturbed(13, num_workers=workers)
    batches.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_restarted_process_uses_no_loader_for_batches_that_exist(
    engine: Engine, runtime_dir: Path, workers: int
):
    expected = undisturbed(16, num_workers=workers)
    first = data.cached(loader(num_workers=workers), engine)
    assert ids(first, 4) == expected[:4]
    state = first.state_dict()
    wait_for_ahead(runtime_dir, 7)
    first.close()
    dataset = Numbers()
    again = data.cached(loader(dataset, num_workers=workers), engine)
    again.load_state_dict(state)
    again._store.limits = type(again._store.limits)(ahead=1)  # nothing is loaded meanwhile
    assert ids(again, 3) == expected[4:7]
    assert not dataset._fetched
    assert ids(again, 9) == expected[7:]
    again.close()
