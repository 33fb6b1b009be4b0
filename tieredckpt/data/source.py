"""Where batches come from: any loader, as an endless sequence with a state after each batch."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

from torch.utils.data import DataLoader

from tieredckpt.data.entry import mark_of
from tieredckpt.errors import UsageError


class Rows:
    """A loader that computes each batch from its step, which is its state."""

    def __init__(self, rows: Callable[[int, int, int], Any], start: int, stop: int) -> None:
        self._rows, self._start, self._stop = rows, start, stop
        self._step = 0

    def __iter__(self) -> Iterator[Any]:
        while True:
            batch = self._rows(self._step + 1, self._start, self._stop)
            self._step += 1
            yield batch

    def state_dict(self) -> int:
        return self._step

    def load_state_dict(self, step: int) -> None:
        self._step = step


class Plain:
    """Makes any iterable a loader with a state, the number of its batches: it only goes forward."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self._loader = loader
        self._iterator: Iterator[Any] | None = None
        self._batches = 0

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._iterator is None:
            self._iterator = iter(self._loader)
        try:
            batch = next(self._iterator)
        except StopIteration:
            self._iterator = None  # the next epoch
            raise
        self._batches += 1
        return batch

    def state_dict(self) -> int:
        return self._batches

    def load_state_dict(self, batches: int) -> None:
        if batches < self._batches:
            raise UsageError(
                f"step {batches + 1} is not in the data cache any more, and this loader, which has "
                f"no state, is past step {self._batches}: raise data.behind, or use a loader with "
                "a state, such as StatefulDataLoader"
            )
        while (before := self._batches) < batches:
            deque(islice(self, batches - before), maxlen=0)
            if self._batches == before:
                raise UsageError(f"the loader ended before step {batches}")


class Source:
    """A loader's epochs, one after another. Used by one thread.

    Args:
        loader: Has ``state_dict`` and ``load_state_dict``.
        on_epoch: Called with the epoch, from 0, before it begins or is resumed.

    Attributes:
        state: The epoch and the loader's state after the last batch; None: before the first.
        mark: Of the state; None: the loader's place is not known.
    """

    def __init__(self, loader: Any, on_epoch: Callable[[int], Any] | None) -> None:
        self._loader, self._on_epoch = loader, on_epoch
        self._shuffles_here = isinstance(loader, DataLoader) and not loader.num_workers
        self._iterator: Iterator[Any] | None = None
        self._epoch = 0
        self._first: Any = None
        """As ``state``, before the first batch, once it has begun: reading it begins it."""
        self._draws: Any = None
        """State of the loader's generator, to be set once the loader is resumed."""
        self.state: Any = None
        self.mark: bytes | None = b""

    def seek(self, mark: bytes, state: Any) -> None:
        """Continue after ``state``, of which ``mark`` is the mark."""
        if mark == self.mark:
            return
        self._iterator, self._epoch = None, 0
        if found := state or self._first:
            self._epoch, loader, self._draws = found
            self._loader.load_state_dict(copy.deepcopy(loader))
        self.state, self.mark = state, mark

    def load(self) -> Any:
        """The next batch. Raises StopIteration: the loader has come to its end for good."""
        if self._iterator is None:
            self._iterator = self._begin()
        try:
            batch = next(self._iterator)
        except StopIteration:
            self._epoch += 1
            self._iterator = self._begin()
            batch = next(self._iterator)
        self.state = self._read()
        self.mark = mark_of(self.state)
        return batch

    def _begin(self) -> Iterator[Any]:
        if self._on_epoch is not None:
            self._on_epoch(self._epoch)
        found: Iterator[Any] = iter(self._loader)
        if self._draws is not None:
            self._loader.generator.set_state(self._draws)
            self._draws = None
        if self.state is None and self._first is None:
            self._first = copy.deepcopy(self._read())
        return found

    def _read(self) -> Any:
        # Without workers, a resumed StatefulDataLoader would shuffle later epochs in another order.
        draws = self._loader.generator.get_state() if self._shuffles_here else None
        return self._epoch, self._loader.state_dict(), draws
