"""Where batches come from: any loader, as an endless sequence with a state after each batch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import count
from typing import Any
from weakref import WeakValueDictionary

from torch.utils.data import DataLoader

from tieredckpt.data.entries import mark_of
from tieredckpt.errors import UsageError


def place_of(batches: int) -> tuple[bytes, Any]:
    """Mark and state of a loader that only goes forward, after so many batches."""
    state = (0, batches, None, None)
    return mark_of(state), state


_begun: WeakValueDictionary[int, Any] = WeakValueDictionary()
"""By id, the loaders that a source has begun: no other one would know where they are."""


class Source:
    """A loader's epochs, one after another. Used by one thread.

    Args:
        loader: An iterable. Without ``load_state_dict`` it only goes forward.
        rows: Instead of a loader: the batch of a step, from 1.
        on_epoch: Called with the epoch, from 0, before it begins or is resumed.

    Raises:
        UsageError: Another source has used the loader.

    Attributes:
        can_seek: Whether it can go to any state.
        batches: So many came before its place: the step of the last one.
        loaded: So many batches were loaded here, skipped ones included: progress.
        state: Epoch, number of batches and the loader's state after the last one, and that of its
            generator; None: before the first batch.
        mark: Of the state; None: the loader's place is not known.
    """

    def __init__(
        self,
        loader: Any,
        rows: Callable[[int], Any] | None = None,
        on_epoch: Callable[[int], Any] | None = None,
    ) -> None:
        if _begun.get(id(loader), None) is loader is not None:
            raise UsageError("another cached() has used this loader: make a new one for each")
        self._loader, self._rows, self._on_epoch = loader, rows, on_epoch
        self._has_state = hasattr(loader, "load_state_dict")
        self.can_seek = self._has_state or rows is not None
        self._shuffles_here = (
            self._has_state and isinstance(loader, DataLoader) and not loader.num_workers
        )
        self._iterator: Iterator[Any] | None = None
        self._epoch = self.batches = self.loaded = 0
        self._draws: Any = None
        """State of the loader's generator, to be set once the loader is resumed."""
        self._first: Any = None
        """The state before the first batch, once it has begun: reading it begins it."""
        self._error: BaseException | None = None
        """Why a loader that only goes forward does not go on."""
        self.state: Any = None
        self.mark: bytes | None = b""

    def seek(self, mark: bytes, state: Any) -> None:
        """Continue after ``state``, of which ``mark`` is the mark.

        Raises:
            UsageError: The loader only goes forward and is elsewhere, or cannot begin anew.
        """
        if self._error is not None:
            raise self._error.with_traceback(None)
        if mark == self.mark:
            return
        epoch, batches, loader, draws = state or self._first or (0, 0, None, None)
        if self._has_state and loader is None and self.loaded:
            raise UsageError(
                "this loader continued from a later step, and cannot go back to its beginning: "
                "make a new one"
            )
        if self.can_seek:
            self.mark = None  # until all has succeeded
            self._iterator, self._epoch, self.batches, self._draws = None, epoch, batches, draws
            if loader is not None:
                self._loader.load_state_dict(copy.deepcopy(loader))
                self._iterator = self._begin()
                # Such as that of an iterable data set whose iterator has no state, twice resumed.
                if mark_of(self._read()) != mark_of(state or self._first):
                    raise UsageError(
                        "the loader did not return to the state that it was given: it, or its data "
                        "set, implements load_state_dict wrongly"
                    )
        elif batches != self.batches:
            raise UsageError(
                f"step {batches + 1} is not in the data cache any more, and this loader, which has "
                f"no state, is past it: raise data.behind, or use a StatefulDataLoader"
            )
        self.state, self.mark = state, mark

    def load(self) -> Any:
        """The next batch.

        Raises:
            StopIteration: The loader has come to its end for good.
            Exception: What the loader raises; see :meth:`fail`.
        """
        if self._error is not None:
            raise self._error.with_traceback(None)
        if self._iterator is None:
            self._iterator = self._begin()
        try:
            batch = next(self._iterator)
        except StopIteration:
            self._epoch += 1
            self._iterator = self._begin()
            batch = next(self._iterator)
        self.batches += 1
        self.loaded += 1
        self.state = self._read()
        self.mark = mark_of(self.state)
        return batch

    def fail(self, error: BaseException) -> None:
        """The last batch was not stored, and the loader may have gone on behind it.

        It is sought anew, or, if it only goes forward, raises the same error from now on.
        """
        self.mark = None
        self._error = None if self.can_seek else error

    def _begin(self) -> Iterator[Any]:
        if self._rows is not None:
            return map(self._rows, count(self.batches + 1))
        if self._on_epoch is not None:
            self._on_epoch(self._epoch)
        with suppress(TypeError):  # a list, for which it makes no difference
            _begun[id(self._loader)] = self._loader
        generator = self._loader.generator if isinstance(self._loader, DataLoader) else None
        draws = generator.get_state() if generator is not None else None
        try:
            found: Iterator[Any] = iter(self._loader)
        except BaseException as error:
            if generator is not None:
                generator.set_state(draws)  # it is tried again
            if isinstance(error, StopIteration):
                raise UsageError("iter() of the loader raised StopIteration") from error
            raise
        if self._draws is not None:
            self._loader.generator.set_state(self._draws)
            self._draws = None
        if not self.batches:
            self._first = copy.deepcopy(self._read())
        return found

    def _read(self) -> Any:
        if not self.can_seek:
            return place_of(self.batches)[1]
        # Without workers, a resumed StatefulDataLoader would shuffle later epochs in another order.
        draws = self._loader.generator.get_state() if self._shuffles_here else None
        loader = self._loader.state_dict() if self._has_state else None
        return self._epoch, self.batches, loader, draws
