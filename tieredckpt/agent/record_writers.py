"""Writing what was said of checkpoints into the tiers that hold them, until they have it.

A thread per tier, while it is owed something: a store that does not answer may keep one for
minutes, and neither another tier nor whoever said it waits for that.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping

from tieredckpt.errors import TieredCkptError
from tieredckpt.format.record import SaveRecord
from tieredckpt.tiers.catalog import Catalog

OWED_MAX = 1 << 12
"""Of one tier; the oldest is forgotten, and written when the tier is attached again."""
PAUSE_S = 1.0
PAUSE_S_MAX = 60.0

log = logging.getLogger(__name__)


class RecordWriters:
    """Of one namespace; thread-safe. No lock is held over a tier's I/O.

    Args:
        namespace: Its name.
        catalogs: Of the configured tiers, by name; None: it is not attached at this moment.
    """

    def __init__(
        self, namespace: str, catalogs: Callable[[], Mapping[str, Catalog | None]]
    ) -> None:
        self._namespace = namespace
        self._catalogs = catalogs
        self._cond = threading.Condition()
        self._owed: dict[str, OrderedDict[str, tuple[SaveRecord, bytes]]] = {}
        self._errors: dict[tuple[str, str], str] = {}
        """By tier and record, why it could not be written."""
        self._writing: set[str] = set()
        self._nudged: set[str] = set()
        self._stopping = False

    def owe(self, tier: str, record: SaveRecord, data: bytes) -> None:
        """``tier`` holds the checkpoint, and is to hold this; it is tried at once."""
        with self._cond:
            if self._stopping:
                return
            owed = self._owed.setdefault(tier, OrderedDict())
            owed[record.id] = (record, data)
            while len(owed) > OWED_MAX:
                gone, _ = owed.popitem(last=False)
                self._errors.pop((tier, gone), None)
            self._nudged.add(tier)
            self._cond.notify_all()
            if tier not in self._writing:
                self._writing.add(tier)
                threading.Thread(
                    target=self._run, args=(tier,), name=f"tck-records-{tier}", daemon=True
                ).start()

    def wait(self, record_id: str, tiers: Iterable[str], timeout_s: float) -> dict[str, str]:
        """Wait until all ``tiers`` have the record; those that still lack it, and why."""
        names = list(tiers)
        with self._cond:
            self._cond.wait_for(
                lambda: self._stopping or not self._lack(record_id, names), timeout_s
            )
            return {
                tier: self._errors.get((tier, record_id), "it has not answered yet")
                for tier in self._lack(record_id, names)
            }

    def _lack(self, record_id: str, tiers: Iterable[str]) -> list[str]:
        return [tier for tier in tiers if record_id in self._owed.get(tier, ())]

    def stop(self) -> None:
        """Nothing more is begun. Idempotent; waits for nobody."""
        with self._cond:
            self._stopping = True
            self._cond.notify_all()

    def _run(self, tier: str) -> None:
        pause_s = PAUSE_S
        while True:
            with self._cond:
                waiting = list(self._owed.get(tier, {}).values())
                if not waiting or self._stopping:
                    self._writing.discard(tier)
                    return
                self._nudged.discard(tier)
            failed = [each for each in waiting if not self._write(tier, *each)]
            pause_s = PAUSE_S if len(failed) < len(waiting) else min(PAUSE_S_MAX, 2 * pause_s)
            with self._cond:
                if failed:
                    self._cond.wait_for(lambda: self._stopping or tier in self._nudged, pause_s)

    def _write(self, tier: str, record: SaveRecord, data: bytes) -> bool:
        error = None
        try:
            catalogs = self._catalogs()
            catalog = catalogs.get(tier)
            if catalog is None and tier in catalogs:
                error = "it does not answer"
            elif catalog is not None and catalog.get(record.save_id) is not None:
                catalog.put_record(data)
        except (TieredCkptError, OSError) as failure:
            error = str(failure)
        except Exception as failure:  # the top of a thread: a bug must not end this tier's writer
            error = f"{type(failure).__name__}: {failure}"
            if self._errors.get((tier, record.id)) != error:  # thousands may be owed, for hours
                log.exception("namespace %s: writing to %s failed", self._namespace, tier)
        with self._cond:
            if error is None:
                self._owed.get(tier, OrderedDict()).pop(record.id, None)
                self._errors.pop((tier, record.id), None)
            elif self._errors.get((tier, record.id)) != error:
                self._errors[tier, record.id] = error
                log.warning(
                    "namespace %s: a %s of %s is not in %s yet: %s",
                    self._namespace, record.kind, record.save_id, tier, error,
                )  # fmt: skip
            self._cond.notify_all()
        return error is None
