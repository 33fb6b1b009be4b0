"""A loader whose batches are in the data cache of the host.

The thread that loads derives what to do from the files alone: the lowest step after the rank's
position that has no entry is the next one. So damage, a roll-back and the death of the process that
loaded before are one case.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sized
from typing import Any, NamedTuple, Self

import torch
from torch.utils.data import DataLoader

from tieredckpt.data.entry import Entry, decode, encode
from tieredckpt.data.source import Plain, Rows, Source
from tieredckpt.data.store import Store
from tieredckpt.dcp.state.per_rank import CoordinateLike, resolve_coordinate
from tieredckpt.engine import Engine
from tieredckpt.errors import UsageError, WaitError
from tieredckpt.format.digest import digest
from tieredckpt.format.plain import encode_plain
from tieredckpt.policy.elastic import share

WAIT_S = 30.0
"""A rank that has waited so long for the process that loads loads by itself."""
LOAD_S = 600.0
"""Longest wait for a loader."""
POLL_S = 0.002
"""How often a rank looks for an entry that another process loads."""
THREAD_POLL_S = 0.2
"""How often the thread looks for entries that have vanished."""
CLOSE_S = 5.0
"""Longest wait for the thread at the end; a loader may not return."""


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
        name: Identifies the data and its preparation: give another one when they change.

    Raises:
        UsageError: Neither or both of ``loader`` and ``rows``, or one that cannot be used; or the
            engine is closed, or only reads.
    """
    if (loader is None) == (rows is None):
        raise UsageError("give either a loader or rows")
    if isinstance(loader, DataLoader) and loader.generator is None:
        raise UsageError(
            "give the DataLoader a generator of its own, generator=torch.Generator(): it is used "
            "in another thread, and would draw from training's random numbers"
        )
    place = resolve_coordinate(coordinate)
    parts = ("dataset", "sampler", "batch_sampler", "collate_fn", "generator")
    about = [_settings(rows or loader), *(_settings(getattr(loader, part, 0)) for part in parts)]
    found: Any = loader
    if rows is not None:
        own = share(global_batch, place.size, place.index)
        found = Rows(rows, own.start, own.stop)
    elif not hasattr(loader, "load_state_dict"):
        found = Plain(found)
    identity = [name, place.kind, place.index, place.size, global_batch, about]
    store = Store(engine.session, digest(encode_plain(identity)).hex())
    return Cached(Source(found, on_epoch), store, 0 if rows is not None else place.size)


def _settings(thing: Any) -> Any:
    """Plain data that differs between loaders, data sets and functions that differ."""
    if isinstance(thing, torch.Generator):
        return thing.initial_seed()
    known = vars(thing) if hasattr(thing, "__dict__") else {}
    plain = {
        key: value
        for key, value in known.items()
        if not key.startswith("_") and type(value) in (bool, int, float, str)
    }
    kind = thing if hasattr(thing, "__qualname__") else type(thing)
    return [
        kind.__module__,
        kind.__qualname__,
        len(thing) if isinstance(thing, Sized) else 0,
        plain,
    ]


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
        self._changed = threading.Condition()
        self._stop = threading.Event()
        self._end: Callable[[], Any] | None = None
        """Ends the thread, once it runs."""
        self._at = Position()
        self._leads = False
        """Whether this process loads."""
        self._loaded = 0
        """The step that was loaded last."""
        self._unstored: tuple[int, Entry] | None = None
        """What the full cache did not take: nothing further is loaded until it is used."""
        self._failed: tuple[int, BaseException] | None = None

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        """The batch of the next step.

        Raises:
            StopIteration: The loader has come to its end, and does not begin again.
            UsageError: The batch, or the loader's state, holds a type that cannot be stored.
            WaitError: The loader does not return within ten minutes.
            Exception: What the loader raised; the next call tries again.
        """
        step, began_s = self._at.step + 1, time.monotonic()
        with self._changed:
            while True:
                waited_s = time.monotonic() - began_s
                if self._failed is not None and self._failed[0] <= step:
                    error, self._failed = self._failed[1], None
                    raise error
                self._lead(anyway=waited_s > WAIT_S)
                entry = self._find(step)
                if entry is not None:
                    self._at = Position(step, entry.after, entry.state)
                    self._changed.notify_all()
                    return entry.batch
                if waited_s > LOAD_S:
                    raise WaitError(f"step {step} was not loaded in {LOAD_S} s", reason="timeout")
                self._changed.notify_all()
                self._changed.wait(POLL_S)

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
        with self._changed:
            self._at = Position(state["step"], state["mark"], state["state"])
            self._unstored = self._failed = None
            self._changed.notify_all()

    def close(self) -> None:
        """End the loading; entries stay for the next process. Idempotent."""
        self._stop.set()
        if self._end is not None:
            self._end()

    # --- loading ----------------------------------------------------------------------------------

    def _find(self, step: int) -> Entry | None:
        """The entry of a step, if it follows the loader's state at the position."""
        entry = self._store.read(step)
        if self._unstored is not None and self._unstored[0] == step:
            entry, self._unstored = self._unstored[1], None
        if entry is None or entry.before == self._at.mark:
            return entry
        if self._leads:
            self._store.drop(step)  # of another history of the run
        return None

    def _lead(self, *, anyway: bool) -> None:
        """Begin to load if no other process does, or ``anyway``."""
        if self._leads or not (self._store.lock() or anyway):
            return
        self._leads = True
        if self._end is None:
            store = self._store
            args = weakref.ref(self), self._changed, self._stop
            thread = threading.Thread(target=_load_ahead, args=args, name="tck-data", daemon=True)
            self._end = weakref.finalize(self, _end, self._stop, self._changed, thread, store)
            thread.start()

    def load_missing(self) -> bool:
        """Load a step, in the thread; False: nothing is missing."""
        with self._changed:
            step, at = self._missing(), self._at
        if step is None:
            return False
        try:
            self._load(step, at)
        except BaseException as error:  # noqa: BLE001  raised in the training loop
            self._source.mark = None
            with self._changed:
                self._failed = step, error
                self._give_way()
        return True

    def _missing(self) -> int | None:
        """The step to load now, or None."""
        if not self._leads or self._unstored is not None or self._failed is not None:
            return None
        first = self._at.step + 1
        ahead = range(first, first + self._store.limits.ahead)
        return next((step for step in ahead if not self._store.has(step)), None)

    def _load(self, step: int, at: Position) -> None:
        mark, state = at.mark, at.state
        if step > at.step + 1 and step == self._loaded + 1 and self._source.mark is not None:
            mark, state = self._source.mark, self._source.state
        elif step > at.step + 1:
            before = self._store.read(step - 1)
            if before is None:
                return  # it was damaged, and is loaded first
            mark, state = before.after, before.state
        self._source.seek(mark, state)
        batch = self._source.load()
        self._loaded = step
        encoded = encode(Entry(mark, self._source.mark or b"", self._source.state, batch))
        stored = self._store.write(step, at.step, encoded)
        with self._changed:
            if not stored:
                self._unstored = step, decode(encoded.rest, encoded.tensors)
                self._give_way()
            self._changed.notify_all()

    def _give_way(self) -> None:
        """Another process may load now: others would wait for entries that do not come."""
        self._leads = False
        self._store.unlock()
        self._changed.notify_all()


def _load_ahead(
    found: weakref.ref[Cached], changed: threading.Condition, stop: threading.Event
) -> None:
    """The thread: it keeps no loader, and so no workers, alive that nobody uses."""
    while (batches := found()) is not None and not stop.is_set():
        if not batches.load_missing():
            del batches
            with changed:
                changed.wait(THREAD_POLL_S)


def _end(
    stop: threading.Event, changed: threading.Condition, thread: threading.Thread, store: Store
) -> None:
    stop.set()
    with changed:
        changed.notify_all()
    if thread is not threading.current_thread():  # it may have had the last reference
        thread.join(CLOSE_S)
    store.unlock()
