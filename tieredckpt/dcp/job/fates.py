"""How the saves ended for which a session sealed segments, as far as its rank knows.

The agent of a host keeps a sealed segment until it knows whether the save was committed. Each rank
reports that with its next reservation.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Collection, Iterator
from typing import Any, Literal

import msgspec

from tieredckpt.errors import CapacityError, RankError, StaleAttemptError, TieredCkptError
from tieredckpt.rpc.messages.agent import SEALED_BEFORE_MAX, SealedBefore

Fate = Literal["committed", "failed", "unknown"]

_REFUSED = (CapacityError, RankError, StaleAttemptError)
"""A commit that ends with one of these was not made, whoever raised it."""


class Fates:
    """The segments that one session has sealed lately, oldest first. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sealed: dict[str, SealedBefore] = {}
        _all.add(self)

    def begin(self, segment_id: str, stream: str, fate: Fate = "unknown") -> None:
        """A segment is being written for a save of ``stream``."""
        with self._lock:
            self._sealed[segment_id] = SealedBefore(segment_id=segment_id, stream=stream, fate=fate)
            while len(self._sealed) > SEALED_BEFORE_MAX:
                del self._sealed[next(iter(self._sealed))]

    def end(self, segments: Collection[str], fate: Fate) -> None:
        """A save ended so; of these, segments of other processes are passed over."""
        with self._lock:
            for each in self._sealed.keys() & set(segments):
                self._sealed[each] = msgspec.structs.replace(self._sealed[each], fate=fate)

    def told(self) -> tuple[SealedBefore, ...]:
        """What the agent is told with the next reserve."""
        with self._lock:
            return tuple(self._sealed.values())


_all: weakref.WeakSet[Fates] = weakref.WeakSet()


class Ended(tuple[str, ...]):
    """How a save ended, and what was sealed for it; reaches the ranks that have sealed it."""

    def __reduce__(self) -> Any:
        return _arrived, tuple(self)


def _arrived(fate: Fate, *segments: str) -> Ended:
    # A segment has one fate for good: it does not matter who unpickles this again later.
    for each in list(_all):
        each.end(segments, fate)
    return Ended((fate, *segments))


class Ending:
    """The end of one save on its coordinator, or on one of the ranks that meet in the agent."""

    fate: Fate = "failed"  # as long as nobody was asked to commit it

    @contextlib.contextmanager
    def committing(self) -> Iterator[None]:
        """Around asking the agent to commit."""
        self.fate = "unknown"
        try:
            yield
        except TieredCkptError as error:
            self.fate = _fate_after(error)
            raise
        self.fate = "committed"


def _fate_after(error: TieredCkptError) -> Fate:
    certain = error.fields.get("outcome") == "not_applied" or isinstance(error, _REFUSED)
    return "failed" if certain else "unknown"
