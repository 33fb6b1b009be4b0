"""The segments that a session sealed lately, with the outcomes of their saves as far as known.

A host's agent keeps a sealed segment until it knows whether the save was committed. Each rank
reports the outcomes with every reservation.
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

Outcome = Literal["committed", "failed", "unknown"]

_REFUSED = (CapacityError, RankError, StaleAttemptError)
"""A commit that ends with one of these errors was not made."""


class UnreportedSegments:
    """The segments that one session sealed lately, oldest first. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sealed: dict[str, SealedBefore] = {}
        _all.add(self)

    def begin(self, segment_id: str, stream: str, outcome: Outcome = "unknown") -> None:
        """A segment is being written for a save of ``stream``."""
        with self._lock:
            self._sealed[segment_id] = SealedBefore(
                segment_id=segment_id, stream=stream, fate=outcome
            )
            while len(self._sealed) > SEALED_BEFORE_MAX:
                del self._sealed[next(iter(self._sealed))]

    def end(self, segments: Collection[str], outcome: Outcome) -> None:
        """A save ended with this outcome. Segments of other processes are ignored."""
        with self._lock:
            for each in self._sealed.keys() & set(segments):
                self._sealed[each] = msgspec.structs.replace(self._sealed[each], fate=outcome)

    def report(self) -> tuple[SealedBefore, ...]:
        """The report to the agent with the next reservation."""
        with self._lock:
            return tuple(self._sealed.values())


_all: weakref.WeakSet[UnreportedSegments] = weakref.WeakSet()


class Ended(tuple[str, ...]):
    """How a save ended, and its sealed segments; unpickling it informs a rank's sessions."""

    def __reduce__(self) -> Any:
        return _arrived, tuple(self)


def _arrived(outcome: Outcome, *segments: str) -> Ended:
    # The outcome of a segment is final: unpickling this again later does no harm.
    for each in list(_all):
        each.end(segments, outcome)
    return Ended((outcome, *segments))


class Ending:
    """The end of one save on its coordinator, or on one of the ranks that meet in the agent."""

    outcome: Outcome = "failed"  # as long as no agent was asked to commit it

    @contextlib.contextmanager
    def committing(self) -> Iterator[None]:
        """Around asking the agent to commit."""
        self.outcome = "unknown"
        try:
            yield
        except TieredCkptError as error:
            self.outcome = _outcome_after(error)
            raise
        self.outcome = "committed"


def _outcome_after(error: TieredCkptError) -> Outcome:
    certain = error.fields.get("outcome") == "not_applied" or isinstance(error, _REFUSED)
    return "failed" if certain else "unknown"
