"""Marks of copies that are known to be bad, so that recovery plans avoid them.

A mark is a hint, not a safeguard: every read verifies digests, and a lost mark costs one more
failed read. So marks are small records in the memory tier, and their number is bounded. A mark with
more blocks replaces the previous one. Earlier releases stored it under another key with a higher
revision; such marks are merged.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Iterable
from typing import Annotated

import msgspec

from tieredckpt.errors import IntegrityError, NotFoundError, TieredCkptError
from tieredckpt.format.envelope import ENVELOPE_BYTES, RecordCodec
from tieredckpt.format.manifest import HexId, Name, check_id, check_name
from tieredckpt.storage.base import Tier

MAX_MARKED_COPIES = 4096
"""Beyond this the oldest mark is dropped."""

MAX_MARKED_BLOCKS = 8192
"""Beyond this many bad blocks the whole copy counts as bad."""

MAX_REASON_CHARS = 500

_PREFIX = "quarantine/"
_OBJECT_KEY = re.compile(r"quarantine/([^/]+)/([0-9a-f]{32})-([0-9]{1,18})", re.ASCII)
_LIMIT_BYTES = 64 << 10

_log = logging.getLogger(__name__)


class Mark(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The bad parts of one copy of a segment."""

    tier: Name
    segment_id: HexId
    revision: int
    """Part of the mark's key: 1, or more if an earlier release stored it."""
    whole: bool
    """The whole copy is bad (its footer or size); False: single blocks are."""
    blocks: tuple[Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)], ...]
    """Bad blocks in ascending order; empty if ``whole``."""
    reason: str
    """The first problem that was found."""


_marks = RecordCodec(b"TCKQUAR\0", Mark, "quarantine record", limit_bytes=_LIMIT_BYTES)


class QuarantineMarks:
    """Bad copies, by tier and segment; thread-safe; survives the agent's death in ``store``.

    Args:
        store: The namespace's memory tier, which stores the marks. Read once, here; unreadable
            records are ignored.

    Raises:
        TierUnavailableError: ``store`` does not answer.
    """

    def __init__(self, store: Tier) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._marks: dict[tuple[str, str], Mark] = {}
        self._reported_ns: dict[tuple[str, str], int] = {}
        """When a copy was last reported (monotonic clock); of a stored mark, when it was read."""
        for info in store.list(_PREFIX):
            if not _OBJECT_KEY.fullmatch(info.key):
                continue
            try:
                record = _marks.decode(store.get(info.key, limit=_LIMIT_BYTES + ENVELOPE_BYTES))
            except NotFoundError:
                continue
            except IntegrityError as error:
                _log.warning("a quarantine record cannot be read: %s", error)
                continue
            key = (record.tier, record.segment_id)
            blocks = () if record.whole else record.blocks
            self._marks[key] = self._merged(key, blocks, record.reason)
            self._reported_ns[key] = time.monotonic_ns()

    def add(self, tier: str, segment_id: str, blocks: Iterable[int], reason: str) -> Mark:
        """Mark blocks, or the whole copy if ``blocks`` is empty; merged with an existing mark.

        The mark is in effect in this process even if it cannot be stored (that is logged).

        Raises:
            ValueError: Impossible names or block numbers.
        """
        key = (check_name(tier, "tier"), check_id(segment_id, "segment id"))
        wanted = tuple(sorted(set(blocks)))
        if wanted and not 0 <= wanted[0] <= wanted[-1] < 1 << 32:
            raise ValueError(f"impossible block numbers {wanted[0]} .. {wanted[-1]}")
        with self._lock:
            mark = self._merged(key, wanted, reason)
            self._reported_ns[key] = time.monotonic_ns()
            if mark != self._marks.get(key):
                self._marks[key] = mark
                self._store_mark(key, mark)
            while len(self._marks) > MAX_MARKED_COPIES:
                self._drop(next(iter(self._marks)))
        return mark

    def get(self, tier: str, segment_id: str) -> Mark | None:
        """The mark of one copy."""
        with self._lock:
            return self._marks.get((tier, segment_id))

    def forget(self, tier: str, segment_id: str) -> None:
        """Delete the mark of a copy that was deleted or repaired, if there is one."""
        with self._lock:
            if (tier, segment_id) in self._marks:
                self._drop((tier, segment_id))

    def lift(self, tier: str, segment_id: str, began_ns: int) -> None:
        """Delete the mark of a copy that was read whole and intact, if there is one.

        ``began_ns``: when reading began, by this host's monotonic clock. A mark that was reported
        since stays.
        """
        key = (tier, segment_id)
        with self._lock:
            if self._reported_ns.get(key, began_ns) < began_ns:
                self._drop(key)
                _log.info("the %s copy of segment %s is intact: its mark is lifted", *key)

    def count(self, tier: str) -> int:
        """Number of marked copies in ``tier``."""
        with self._lock:
            return sum(1 for name, _ in self._marks if name == tier)

    def _merged(self, key: tuple[str, str], blocks: tuple[int, ...], reason: str) -> Mark:
        """The mark extended by bad blocks; with none, or too many, the whole copy is bad."""
        known = self._marks.get(key)
        union = tuple(sorted({*blocks, *(known.blocks if known else ())}))
        whole = not blocks or len(union) > MAX_MARKED_BLOCKS or (known is not None and known.whole)
        return Mark(
            tier=key[0],
            segment_id=key[1],
            revision=1,
            whole=whole,
            blocks=() if whole else union,
            reason=known.reason if known else reason[:MAX_REASON_CHARS],
        )

    def _store_mark(self, key: tuple[str, str], mark: Mark) -> None:
        data = _marks.encode(mark)
        try:
            self._store.replace(f"{_PREFIX}{key[0]}/{key[1]}-{mark.revision}", data)
        except TieredCkptError as error:
            _log.warning("a quarantine mark of %s in %s is not stored: %s", key[1], key[0], error)

    def _drop(self, key: tuple[str, str]) -> None:
        del self._marks[key], self._reported_ns[key]
        try:
            for info in list(self._store.list(f"{_PREFIX}{key[0]}/")):
                named = _OBJECT_KEY.fullmatch(info.key)
                if named is not None and named[2] == key[1]:
                    self._store.delete(info.key)
        except TieredCkptError as error:
            _log.warning("an old quarantine mark cannot be deleted: %s", error)
