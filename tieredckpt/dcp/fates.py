"""What becomes of the segments that this process sealed: what each rank tells its own agent.

Only the coordinator of a save knows whether it was committed. DCP brings its ``Metadata``, or its
exception, to all ranks; an :class:`Ended` travels in that, and finds its way by itself when a rank
unpickles it (as :class:`tieredckpt.dcp.lent.Outcome` does). So it costs no message, nothing of it
is in a plan, and a rank that hears nothing says nothing.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from tieredckpt.errors import (
    CapacityError,
    RankError,
    StaleAttemptError,
    TieredCkptError,
)
from tieredckpt.transport.messages import SEALED_BEFORE_MAX, SealedBefore

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata

    from tieredckpt.dcp.commit import Receipt
    from tieredckpt.dcp.session import Session

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


@contextlib.contextmanager
def telling(session: Session, metadata: Metadata, receipts: Sequence[Receipt]) -> Iterator[Ending]:
    """Around the end of a save: its ranks learn how it ended, if it returns or raises our error."""
    ending = Ending()
    ids = [each.segment_id for each in receipts if each.segment_id is not None]
    # One agent decides alone about saves of one host, and needs not be told.
    several = len(session.hosts.hosts) > 1
    try:
        yield ending
        if several:
            metadata.storage_data = Ended((ending.fate, *ids))
    except TieredCkptError as error:
        if several:
            error.fields["ended"] = Ended((ending.fate, *ids))
        raise
    finally:
        session.fates.end(ids, ending.fate)
