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
from tieredckpt.format.digest import digest


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
            generator. If the loader has a state, also these four before the last batches, and a
            digest of those. None: before the first batch.
        mark: Of the four; None: the loader's place is not known.
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
        # A worker's state is seen once it has given a batch.
        self._window = max(1, loader.num_workers) if isinstance(loader, DataLoader) else 1
        self._last: list[tuple[Any, bytes]] = []
        """Of the last batches: the state before each, if it is known, and its digest."""
        self._known_from = 0
        """So many batches must have come before a state is known, if batches are loaded again."""
        self._is_moved = False
        """Whether the loader was given a state: it cannot begin by itself any more."""
        self._repeats = False
        """Whether it once had another state than it was given: later it may have it by chance."""
        self._is_repeated = False
        """Whether it resumed by loading a batch again, and has not begun an epoch since."""
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

        A loader may show another state until it is asked for a batch. Then it loads the last ones
        again, from the state before them. They, and the state, must be those that were delivered.

        Raises:
            UsageError: The loader only goes forward and is elsewhere, or cannot begin anew, or has
                not returned to the state.
            Exception: What the loader raises.
        """
        if self._error is not None:
            raise self._error.with_traceback(None)
        if mark == self.mark:
            return
        if self.can_seek:
            self._resume(state)
            if self._is_moved and not self._repeats:
                # The generator has the state that was set: it proves nothing.
                self._repeats = mark_of(self._read()[:3]) != mark_of(self.state[:3])
            if self._repeats:
                self._repeat(state)
                self._is_repeated = True
        elif state[1] != self.batches:
            raise UsageError(
                f"step {state[1] + 1} is not in the data cache any more, and this loader, which "
                f"has no state, is past it: raise data.behind, or use a StatefulDataLoader"
            )
        self.state, self.mark = state, mark

    def _resume(self, state: Any) -> None:
        state = state or self._first
        epoch, batches, loader, draws = (state or (0, 0, None, None))[:4]
        if loader is None and self._is_moved:
            raise UsageError(
                "this loader continued from a later step, and cannot go back to its beginning: "
                "make a new one"
            )
        self.state, self.mark = state, None  # until all has succeeded
        self._iterator, self._epoch, self.batches, self._draws = None, epoch, batches, draws
        self._is_repeated = False
        self._last, self._known_from = [], batches
        if loader is not None:
            self._is_moved = True
            self._loader.load_state_dict(copy.deepcopy(loader))
            self._iterator = self._begin()

    def _repeat(self, state: Any) -> None:
        """Load the last batches again. Raises UsageError: batches or state are others than then."""
        try:
            if state is not None and len(state) > 4:
                self._resume(state[4])
                self._known_from = state[1]
                while self.batches < state[1]:
                    self.load()
        except StopIteration:
            pass  # then its batches are too few
        finally:
            mark, self.mark = self.mark, None  # else a second try would take it for right
        if mark is None or [mark, self.state[5]] != [mark_of(state[:4]), state[5]]:
            raise UsageError(
                "the loader did not return to the state that it was given: it, or its data set, "
                "implements load_state_dict wrongly, or its batches are no function of its state"
            )
        self.mark = mark

    def load(self) -> Any:
        """The next batch.

        Raises:
            StopIteration: The loader has come to its end for good.
            UsageError: It resumed, and does not begin a new epoch as it would have otherwise.
            Exception: What the loader raises; see :meth:`fail`.
        """
        if self._error is not None:
            raise self._error.with_traceback(None)
        if self._iterator is None:
            self._iterator = self._begin()
        before, epoch = self.state or self._first, self._epoch
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
        if self._has_state:
            found, is_known = mark_of(batch, "batch"), self.batches > self._known_from
            self._last.append((before[:4] if is_known or not self._last else None, found))
            first = max(0, len(self._last) - self._window)
            while self._last[first][0] is None:
                first -= 1
            del self._last[:first]
            self.state += self._last[0][0], digest(b"".join(each for _, each in self._last))
            if self._is_repeated and epoch != self._epoch:
                # Some begin each epoch where they resumed: then this batch depends on that place.
                self._repeat((*self.state[:4], before[:4], digest(found)))
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
        if not self.batches and not self._is_moved:
            self._first = self._read()
        return found

    def _read(self) -> Any:
        if not self.can_seek:
            return place_of(self.batches)[1]
        # A resumed DataLoader would draw other random numbers in later epochs.
        draws = self._loader.generator.get_state() if isinstance(self._loader, DataLoader) else None
        loader = copy.deepcopy(self._loader.state_dict()) if self._has_state else None
        return self._epoch, self.batches, loader, draws
