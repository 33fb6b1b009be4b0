"""A loader whose batches are in the data cache of the host.

The thread that loads derives what to do from the files alone: the lowest step after the rank's
position that has no entry is the next one. So damage, a roll-back and the death of the process that
loaded before are one case. The rank's own thread decides whether this process loads.
"""

from __future__ import annotations

import atexit
import time
from collections.abc import Callable, Iterable
from functools import partial
from threading import Thread, main_thread
from typing import Any, NamedTuple, Self
from weakref import WeakSet

from torch.utils.data import (
    DataLoader,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from tieredckpt.data.entries import Entry, Store, decode, encode
from tieredckpt.data.identity import identify
from tieredckpt.data.source import Source, place_of
from tieredckpt.dcp.state.per_rank import CoordinateLike, resolve_coordinate
from tieredckpt.engine import Engine
from tieredckpt.errors import UsageError, WaitError
from tieredckpt.format.digest import digest
from tieredckpt.format.plain import encode_plain
from tieredckpt.policy.elastic import share

WAIT_S = 30.0
"""A rank that has waited so long for the process that loads loads the step by itself."""
LOAD_S = 600.0
"""Longest wait for a loader's next batch."""
POLL_S = 0.002
"""How often a rank looks for an entry that another process loads."""
CLOSE_S = 5.0

_open: WeakSet[Cached] = WeakSet()
"""What this process has open: two of one stream would be two loaders' batches."""
_threads: WeakSet[Thread] = WeakSet()


def cached(
    loader: Iterable[Any] | None,
    engine: Engine,
    *,
    coordinate: CoordinateLike = None,
    rows: Callable[[int, int, int], Any] | None = None,
    global_batch: int = 0,
    on_epoch: Callable[[int], Any] | None = None,
    name: str = "",
) -> Cached:
    """Wrap a loader, so that its batches outlive this process, and ranks share them.

    Args:
        loader: A StatefulDataLoader, or any iterable. It is used in another thread, and only here
            from now on. None: ``rows`` is given.
        engine: An open engine, such as ``world.engine``.
        coordinate: Whose batches these are, as for :func:`tieredckpt.per_rank`: ranks with equal
            coordinates get equal batches, such as ``mesh["dp"]``. None: each rank has its own.
        rows: Instead of a loader, for a number of coordinates that changes: a function that returns
            the batch of ``step``, from 1, with the rows ``start`` to ``stop`` of the global batch.
        global_batch: Rows of one step of all coordinates; with ``rows``.
        on_epoch: Called with the epoch, from 0, before it begins or is resumed, such as
            ``sampler.set_epoch``.
        name: Identifies the data and its preparation, beside what can be seen of them: give another
            one when anything else changes. Required if a part of the loader cannot be seen.

    Raises:
        UsageError: Neither or both of ``loader`` and ``rows``, or one that cannot be used, or was
            used before; or the engine is closed, or only reads.
        WaitError: Another cache of this loader, or of equal ones, is open in this process, and its
            loader does not return.
    """
    if (loader is None) == (rows is None):
        raise UsageError("give either a loader or rows")
    _check(loader)
    place = resolve_coordinate(coordinate)
    if rows is not None:
        own = share(global_batch, place.size, place.index)
        source = Source(None, partial(_compute, rows, own.start, own.stop))
    else:
        source = Source(loader, None, on_epoch)
    about = identify([rows or loader, on_epoch])
    if about.unseen and not name:
        raise UsageError(
            f"the cache cannot distinguish this loader from another one ({about.unseen}): give a "
            f"name to cached(), and another one whenever the data or their preparation change"
        )
    identity = [name, place.kind, place.index, place.size, global_batch, about.digest]
    store = Store(engine.session, digest(encode_plain(identity)).hex())
    for each in list(_open):
        each.replace(store)
    found = Cached(source, store, 0 if rows is not None else place.size)
    _open.add(found)
    return found


def _compute(rows: Callable[[int, int, int], Any], start: int, stop: int, step: int) -> Any:
    return rows(step, start, stop)


def _check(loader: Any) -> None:
    """Raises UsageError: it was used, or its order is not a function of its state."""
    if not isinstance(loader, DataLoader):
        return
    if loader._iterator is not None or getattr(loader, "next_iter_state", None) is not None:
        raise UsageError(
            "this loader was used, or has a state: make a new one for cached(), which has its state"
        )
    if loader.generator is None:
        raise UsageError(
            "give the DataLoader a generator of its own: it would draw from training's, in a thread"
        )
    for sampler in (loader.sampler, getattr(loader.batch_sampler, "sampler", None)):
        # Of torch, whose iterators have no state: torchdata's own, of shuffle=True, are others.
        if not isinstance(sampler, RandomSampler | SubsetRandomSampler | WeightedRandomSampler):
            continue
        if sampler.generator is None:
            raise UsageError(f"give the {type(sampler).__name__} a generator of its own")
        if hasattr(loader, "load_state_dict"):
            raise UsageError(
                f"a StatefulDataLoader cannot resume a {type(sampler).__name__} in a later epoch: "
                f"give shuffle=True, or a sampler with set_epoch and on_epoch=sampler.set_epoch"
            )


class Position(NamedTuple):
    """The last step that was used, from 1, and the loader's state after it with its mark."""

    step: int = 0
    mark: bytes = b""
    state: Any = None


class Cached:
    """An iterator over batches, made by :func:`cached`; epochs follow one another without an end.

    Put it into the state of checkpoints, in general as ``per_rank(batches, coordinate=...)``. The
    tensors of a batch may be changed. Use it in one thread.
    """

    def __init__(self, source: Source, store: Store, parts: int) -> None:
        self._source, self._store, self._parts = source, store, parts
        self._thread = Thread()
        self._is_closed = False
        self._at = Position()
        self._leads = False
        """Whether this process loads for all."""
        self._own = 0
        """The step that this process loads, although it does not lead, or there is a file."""
        self._again = 0
        """The step whose entry the thread could not read."""
        self._patience_s = WAIT_S
        self._refused = -1
        """The last step that could not be stored although it was due."""
        self._kept: tuple[int, Entry] | None = None
        """What was loaded and cannot be stored yet; nothing further is loaded before."""
        self._ready: dict[int, Entry] = {}
        """What this process has loaded, not yet used: verifying it again takes time."""
        self._failed: tuple[int, BaseException] | None = None
        """What the loader raised: nothing further is loaded until its step is asked for."""

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        """The batch of the next step.

        Raises:
            StopIteration: The loader has come to its end, and does not begin again.
            UsageError: The batch, or the loader's state, holds a type that cannot be stored; or a
                loader without a state is past the step; or this is closed.
            WaitError: The loader does not return within ten minutes.
            Exception: What the loader raised. The next call tries again, if the loader has a state;
                otherwise it raises the same.
        """
        if self._is_closed:
            raise UsageError(
                "these batches are closed, by close() or by another cached() of the same data in "
                "this process; give different data different names: cached(..., name=...)"
            )
        step, began_s = self._at.step + 1, time.monotonic()
        loaded, loaded_s = self._source.loaded, began_s
        while (entry := self._find(step)) is None:
            self._raise_error(step)
            now_s = time.monotonic()
            if self._source.loaded != loaded:
                loaded, loaded_s = self._source.loaded, now_s
            if now_s - loaded_s > LOAD_S:
                raise WaitError(f"step {step} was not loaded in {LOAD_S} s", reason="timeout")
            if now_s - began_s >= self._patience_s:
                self._own = step
            self._load_ahead()
            if self._thread.is_alive():
                self._thread.join(POLL_S)
            else:
                time.sleep(POLL_S)
        self._patience_s = 0.0 if self._own == step else WAIT_S
        self._at = Position(step, entry.after, entry.state)
        self._ready.pop(step, None)
        self._load_ahead()
        return entry.batch

    def state_dict(self) -> dict[str, Any]:
        """The step, and the state from which the loader continues; of no cost."""
        return {**self._at._asdict(), "parts": self._parts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the step of a state.

        Raises:
            UsageError: It is of another number of coordinates, and there are no ``rows``.
        """
        if state["parts"] != self._parts:
            raise UsageError(
                f"the data was split for {state['parts']} coordinates, and now there are "
                f"{self._parts}: a loader cannot be split anew, so give rows= to cached()"
            )
        self._at = Position(state["step"], state["mark"], state["state"])
        self._own, self._refused, self._failed = 0, -1, None
        self._ready.clear()

    def close(self) -> None:
        """End the loading, as the end of the last reference does; entries stay. Idempotent.

        Waits five seconds at most for a loader to return.
        """
        self._is_closed = True
        if self._thread.is_alive():
            self._thread.join(CLOSE_S)
        self._store.unlock()

    def replace(self, store: Store) -> None:
        """Close it if it is of the same stream: another one takes its place.

        Raises WaitError: The loader does not return; its batches would be lost to the other one.
        """
        if self._store.folder == store.folder:
            self.close()
            if self._thread.is_alive():
                raise WaitError("another cached() of this data still loads", reason="timeout")

    # --- loading ----------------------------------------------------------------------------------

    def _find(self, step: int) -> Entry | None:
        """The entry of a step, if it follows the loader's state at the position."""
        entry = self._ready.get(step)
        if entry is None:
            if not self._store.has(step) or self._own == step:
                return None
            entry = self._store.read(step)
        if entry is not None and entry.before == self._at.mark:
            return entry
        # Damaged, or of another history: the process that leads may be past it.
        self._own = step
        self._ready.pop(step, None)
        if self._leads:
            self._store.drop(step)
        return None

    def _raise_error(self, step: int) -> None:
        """Raise what the loader raised at or before this step; later steps are tried again."""
        if self._failed is not None and not self._thread.is_alive():
            at, error = self._failed
            self._failed = None
            if at <= step:
                self._store.unlock()  # others would wait for an entry that does not come
                raise error

    def _load_ahead(self) -> None:
        """Load what is missing, in the thread, if no other process of the stream does."""
        if self._is_closed:
            return
        if self._refused >= self._at.step:
            self._store.unlock()  # others would wait for entries that do not come
            self._leads, self._own = False, self._at.step + 1
        else:
            self._leads = self._store.lock()
        if (self._leads or self._own > self._at.step) and not self._thread.is_alive():
            # A daemon, as a loader that hangs must not keep the process. Not of a pool, of which
            # loader workers, forked in it, would try to join the threads.
            self._thread = Thread(target=self._load_missing, name="tck-data", daemon=True)
            _threads.add(self._thread)
            self._thread.start()

    def _load_missing(self) -> None:
        while not (self._failed or self._is_closed):
            at = self._at
            step = self._next_missing(at)
            if step is None or not main_thread().is_alive():
                return
            try:
                is_stored = self._load(step, at)
            except BaseException as error:  # noqa: BLE001  raised in the training loop
                self._failed = step, error
                return
            if not is_stored:
                return

    def _next_missing(self, at: Position) -> int | None:
        """The step to be loaded next, up to ``ahead`` after the position; None: there is none."""
        count = self._store.limits.ahead if self._leads else 1
        for step in range(at.step + 1, at.step + 1 + count):
            if step in self._ready:
                continue
            if not self._source.can_seek and step > self._source.batches:
                return self._source.batches + 1  # and keep it: there is no way back
            if step in (self._own, self._again) or not self._store.has(step):
                return step
        return None

    def _load(self, step: int, at: Position) -> bool:
        """Load a step and store it; False: it cannot be stored now."""
        if self._kept is not None and self._kept[0] == step:
            entry = self._kept[1]
        elif not self._seek(step, at):
            return True
        else:
            entry = None
        try:
            if entry is None:
                mark = self._source.mark or b""
                batch = self._source.load()
                entry = Entry(mark, self._source.mark or b"", self._source.state, batch)
            encoded = encode(entry)
        except BaseException as error:
            self._source.fail(error)
            raise
        self._kept = None
        if self._is_closed:
            return False  # another cache may use the loader by now
        if step <= at.step:
            return True  # passed by a loader that only goes forward
        entry = decode(encoded.rest, encoded.tensors)
        is_stored = self._store.has(step) and step not in (self._own, self._again)
        is_stored = is_stored or self._store.write(step, at.step, encoded)
        if is_stored:
            self._refused = -1
        elif step > self._at.step + 1:
            self._kept = step, entry
            return False
        else:
            self._refused = step
        self._ready[step] = entry
        if self._at.step >= step:
            self._ready.pop(step, None)  # it was used meanwhile, from the store
        return is_stored

    def _seek(self, step: int, at: Position) -> bool:
        """Put the loader before a step; False: the entry before is damaged, and is loaded first."""
        if step == at.step + 1:
            self._source.seek(at.mark, at.state)
        elif not self._source.can_seek:
            self._source.seek(*place_of(step - 1))
        else:
            before = self._ready.get(step - 1) or self._store.read(step - 1)
            if before is None:
                self._again = step - 1
                return False
            self._source.seek(before.after, before.state)
        return True


@atexit.register
def _join_threads() -> None:
    """A thread that is in native code at the end of the process would crash it."""
    until_s = time.monotonic() + CLOSE_S
    for thread in list(_threads):
        thread.join(max(0.0, until_s - time.monotonic()))
