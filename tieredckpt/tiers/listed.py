"""One prefix of a tier that others write to as well: listed anew, each object read once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from tieredckpt.errors import IntegrityError, NotFoundError, TierUnavailableError
from tieredckpt.format.envelope import ENVELOPE_BYTES
from tieredckpt.tiers.base import ObjectInfo, Tier, unavailable

LISTED_MAX = 1 << 17
"""More of one kind is not a checkpoint store but a mistake. A deleted checkpoint counts twice."""
ARCHIVED = "InvalidObjectState"
"""S3's code for an object that has to be brought back from an archive first."""

T = TypeVar("T")


class Listed(Generic[T]):
    """See the module. Thread-safe: refreshes exclude each other, looking never waits for them.

    Args:
        tier: Where they lie.
        prefix: Ends in ``/``.
        limit: Most bytes of one, without its envelope.
        parse: Value of (key, bytes or None, error or None); None: it is none of ours.
        dated: Of values that replace others under their key, and whose age counts: their time is
            asked after they were read, since what was listed may have been the one before.
    """

    def __init__(
        self,
        tier: Tier,
        prefix: str,
        limit: int,
        parse: Callable[[str, bytes | None, str | None], T | None],
        dated: Callable[[T], bool] = lambda value: False,
    ) -> None:
        self._tier = tier
        self._prefix = prefix
        self._limit = limit
        self._parse = parse
        self._dated = dated
        self._refreshing = threading.Lock()
        self._known: dict[str, tuple[ObjectInfo, T]] = {}
        self._ahead: dict[str, tuple[ObjectInfo, T]] = {}
        """What a refresh had read that failed: of thousands, none is read twice for one failure."""

    def refresh(self) -> None:
        """List, read what is new or was replaced, forget what is gone.

        Raises:
            TierUnavailableError: What was known before stays.
        """
        with self._refreshing:
            known = self._known | self._ahead if self._ahead else self._known
            listed: dict[str, ObjectInfo] = {}
            for info in self._tier.list(self._prefix):
                listed[info.key] = info
                if len(listed) > LISTED_MAX:
                    raise unavailable(
                        self._tier.name,
                        f"tier {self._tier.name} holds over {LISTED_MAX} objects in {self._prefix} "
                        "of one namespace",
                    )
            found = {
                k: known[k] for k, info in listed.items() if k in known and known[k][0] == info
            }
            new = [info for key, info in listed.items() if key not in found]
            try:
                for info, value in self._tier.each(self._read, new):
                    if value is not None:
                        found[info.key] = (info, value)
            except TierUnavailableError:
                self._ahead = found
                raise
            self._known, self._ahead = found, {}

    def _read(self, info: ObjectInfo) -> tuple[ObjectInfo, T | None]:
        try:
            data = self._tier.get(info.key, limit=self._limit + ENVELOPE_BYTES)
            value = self._parse(info.key, data, None)
            if value is not None and self._dated(value):
                info = _later(info, self._tier.info(info.key))
            return info, value
        except NotFoundError:  # deleted meanwhile
            return info, None
        except IntegrityError as error:
            return info, self._parse(info.key, None, str(error))
        except TierUnavailableError as error:
            if error.fields.get("code") != ARCHIVED:
                raise
            # One that a rule of the bucket has archived hides no others. Read again each time.
            return ObjectInfo(info.key, -1), self._parse(info.key, None, str(error))

    def all(self) -> dict[str, tuple[ObjectInfo, T]]:
        """By key, as of the last refresh and what was noted since; no I/O. Do not change it."""
        return self._known

    def values(self) -> list[T]:
        """Likewise, without keys."""
        return [value for _, value in self._known.values()]

    def note(self, key: str, value: T) -> None:
        """This was put just now."""
        with self._refreshing:
            # Of no known time: the next refresh reads it again.
            self._known = self._known | {key: (ObjectInfo(key, -1), value)}

    def forget(self, key: str) -> None:
        """This was deleted just now."""
        with self._refreshing:
            self._known = {k: v for k, v in self._known.items() if k != key}


def _later(listed: ObjectInfo, now: ObjectInfo) -> ObjectInfo:
    """What a listing says, unless it was replaced since; stores round times differently."""
    if listed.modified_s is None or now.modified_s is None:
        return listed
    return now if now.modified_s > listed.modified_s else listed
