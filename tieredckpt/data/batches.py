"""A loader whose batches are in the data cache of the host.

The thread that loads derives what to do from the files alone: the lowest step after the rank's
position that has no entry is the next one. So damage, a roll-back and the death of the process that
loaded before are one case. The rank's own thread decides whether this process loads.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sized
from functools import partial
from threading import Thread, main_thread
from typing import Any, NamedTuple, Self

import torch
from torch.utils.data import DataLoader

from tieredckpt.data.entries import Entry, Store, decode, encode
from tieredckpt.data.source import Source
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
CLOSE_S = 5.0
_PLAIN = (bool, int, float, str)


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
            "give the DataLoader a generator of its own: it would draw from training's, in a thread"
        )
    place = resolve_coordinate(coordinate)
    if rows is not None:
        own = share(global_batch, place.size, place.index)
        source = Source(None, partial(_compute, rows, own.start, own.stop))
    else:
        source = Source(loader, None, on_epoch)
    parts = ("dataset", "sampler", "batch_sampler", "collate_fn", "generator")
    about = [_settings(rows or loader), *(_settings(getattr(loader, part, 0)) for part in parts)]
    identity = [name, place.kind, place.index, place.size, global_batch, about]
    store = Store(engine.session, digest(encode_plain(identity)).hex())
    return Cached(source, store, 0 if rows is not None else place.size)


def _compute(rows: Callable[[int, int, int], Any], start: int, stop: int, step: int) -> Any:
    return rows(step, start, stop)


def _settings(thing: Any) -> Any:
    """Plain data that differs between loaders, data sets and functions that differ."""
    if isinstance(thing, torch.Generator):
        return thing.initial_seed()
    known = getattr(thing, "__dict__", {})
    plain = {k: v for k, v in known.items() if not k.startswith("_") and type(v) in _PLAIN}
    length = len(thing) if isinstance(thing, Sized) else 0
    return [str(type(thing)), getattr(thing, "__qualname__", ""), length, plain]


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
        """Whether this process loads."""
        self._is_alone = False
        """Whether it does for itself: nothing is stored, or another process does not load."""
        self._patience_s = WAIT_S
        self._loaded = 0
        """The step that was loaded last."""
        self._ready: dict[int, Entry] = {}
        """What this process has loaded, as the loader gave it: verifying it again takes time."""
        self._failed: tuple[int, BaseException] | None = None
        """What the loader raised: nothing further is loaded until its step is asked for."""

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
        step, began_s, waited_s = self._at.step + 1, time.monotonic(), 0.0
        while (entry := self._find(step)) is None:
            if waited_s > LOAD_S:
                raise WaitError(f"step {step} was not loaded in {LOAD_S} s", reason="timeout")
            if self._failed is not None:
                at, error = self._failed
                self._failed, self._source.mark = None, None
                if at == step:
                    self._store.unlock()  # others would wait for an entry that does not come
                    raise error
            if waited_s >= self._patience_s:
                self._is_alone, self._patience_s = True, 0.0
            self._load_ahead()
            if self._thread.is_alive():
                self._thread.join(POLL_S)
            else:
                time.sleep(POLL_S)
            waited_s = time.monotonic() - began_s
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
        self._ready.clear()

    def close(self) -> None:
        """End the loading, as the end of the last reference does; entries stay. Idempotent.

        Waits five seconds at most for a loader to return.
        """
        self._is_closed = True
        if self._thread.is_alive():
            self._thread.join(CLOSE_S)
        self._store.unlock()

    # --- loading ----------------------------------------------------------------------------------

    def _find(self, step: int) -> Entry | None:
        """The entry of a step, if it follows the loader's state at the position."""
        entry = self._ready.pop(step, None) or self._store.read(step)
        if entry is None or entry.before == self._at.mark:
            return entry
        if self._leads:
            self._store.drop(step)  # of another history of the run
        return None

    def _load_ahead(self) -> None:
        """Load what is missing, in the thread, if no other process of the stream does."""
        if self._is_alone:
            self._store.unlock()  # others would wait for entries that do not come
        self._leads = self._is_alone or self._store.lock()
        if self._leads and not self._thread.is_alive():
            # Not of a pool, of which loader workers, forked in it, would try to join the threads.
            self._thread = Thread(target=self._load_missing, name="tck-data")
            self._thread.start()

    def _load_missing(self) -> None:
        while not (self._failed or self._is_closed):
            at = self._at
            count = 1 if self._is_alone else self._store.limits.ahead
            ahead = range(at.step + 1, at.step + 1 + count)
            step = next((each for each in ahead if self._is_missing(each)), None)
            if step is None or not main_thread().is_alive():
                return
            try:
                self._load(step, at)
            except BaseException as error:  # noqa: BLE001  raised in the training loop
                self._failed = step, error

    def _is_missing(self, step: int) -> bool:
        return not (self._store.has(step) or (self._is_alone and step in self._ready))

    def _load(self, step: int, at: Position) -> None:
        mark, state = at.mark, at.state
        here = self._source.mark
        if step > at.step + 1 and step == self._loaded + 1 and here is not None:
            mark, state = here, self._source.state
        elif step > at.step + 1:
            before = self._store.read(step - 1)
            if before is None:
                return  # it was damaged, and is loaded first
            mark, state = before.after, before.state
        self._source.seek(mark, state)
        batch = self._source.load()
        self._loaded = step
        encoded = encode(Entry(mark, self._source.mark or b"", self._source.state, batch))
        self._is_alone = not self._store.write(step, at.step, encoded)
        self._ready[step] = decode(encoded.rest, encoded.tensors)
        if self._at.step >= step:
            self._ready.pop(step, None)  # it was used meanwhile, from the store
