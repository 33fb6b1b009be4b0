"""Plans in a shared tier: copies under keys that are written once.

A plan is named by its content, so the same one is needed again when nobody needed it for a long
time, and whoever deletes it may be late by any time. A key that were written again could be
deleted then, after a manifest relied on it. So who commits relies on a young copy or writes one
under a new key, and only old keys are deleted.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from tieredckpt.errors import IntegrityError, NotFoundError
from tieredckpt.format.envelope import ENVELOPE_BYTES
from tieredckpt.format.manifest import ID_PATTERN
from tieredckpt.format.plan_record import PLAN_LIMIT_BYTES, encoded_plan_id
from tieredckpt.tiers.base import ObjectInfo, Tier
from tieredckpt.tiers.keys import plan_copy_key


class SharedPlans:
    """See the module. Thread-safe.

    Args:
        tier: Where they lie.
        mint: Makes nonces.
    """

    def __init__(self, tier: Tier, mint: Callable[[], str]) -> None:
        self._tier = tier
        self._mint = mint
        self._lock = threading.Lock()
        self._copies: dict[str, dict[str, ObjectInfo]] = {}
        """By plan and key; never changed, but replaced by another table."""
        self._intact: set[str] = set()
        """Keys of copies that were read and are what they should be."""

    def refresh(self) -> None:
        """List anew. Raises TierUnavailableError."""
        copies: dict[str, dict[str, ObjectInfo]] = {}
        for info in self._tier.list("plans/"):
            if (plan_id := plan_of_key(info.key)) is not None:
                copies.setdefault(plan_id, {})[info.key] = info
        with self._lock:
            self._copies = copies
            self._intact &= {key for each in copies.values() for key in each}

    def ids(self) -> frozenset[str]:
        """Of the plans that are there, as of the last refresh."""
        return frozenset(self._copies)

    def has(self, plan_id: str) -> bool:
        """Whether there is a copy, as of the last refresh."""
        return plan_id in self._copies

    def _newest_first(self, plan_id: str) -> list[ObjectInfo]:
        found = self._copies.get(plan_id, {}).values()
        return sorted(found, key=lambda each: (each.modified_s or 0.0, each.key), reverse=True)

    def find(self, plan_id: str) -> bytes | None:
        """An intact copy, of those that were listed. Raises TierUnavailableError."""
        for info in self._newest_first(plan_id):
            data = self._read(info.key, plan_id)
            if data is not None:
                return data
        return None

    def read(self, plan_id: str) -> bytes:
        """An intact copy.

        Raises:
            NotFoundError: There is none.
            IntegrityError: There are only damaged ones.
            TierUnavailableError: The tier does not answer.
        """
        data = self.find(plan_id)
        if data is None:
            self.refresh()
            data = self.find(plan_id)
        if data is not None:
            return data
        if self.has(plan_id):
            raise IntegrityError(
                f"all copies of plan {plan_id} in tier {self._tier.name} are damaged",
                tier=self._tier.name,
                key=plan_id,
            )
        raise NotFoundError(f"tier {self._tier.name} has no plan {plan_id}", key=plan_id)

    def _read(self, key: str, plan_id: str) -> bytes | None:
        try:
            data = self._tier.get(key, limit=PLAN_LIMIT_BYTES + ENVELOPE_BYTES)
            if encoded_plan_id(data) != plan_id:
                return None
        except (NotFoundError, IntegrityError):
            return None
        with self._lock:
            self._intact.add(key)
        return data

    def _is_known_and_young(self, plan_id: str, born_after_s: float) -> bool:
        """Whether a copy that was read or written here is still there, and as young: no listing.

        Nobody deletes a young one, but somebody may by hand.
        """
        for info in self._newest_first(plan_id):
            if info.key in self._intact and (info.modified_s or 0.0) > born_after_s:
                try:
                    return (self._tier.info(info.key).modified_s or 0.0) > born_after_s
                except NotFoundError:
                    return False
        return False

    def ensure(self, plan_id: str, read: Callable[[], bytes], fresh_s: float) -> None:
        """See that there is a copy that is younger than ``fresh_s``; ``read`` brings the plan.

        The plan must be named by something that is pending already.

        Raises:
            IntegrityError: What ``read`` brought is not this plan.
            CapacityError, TierUnavailableError: As :meth:`Tier.put`, and what ``read`` raises.
        """
        now_s = self._tier.now_s()
        if self._is_known_and_young(plan_id, now_s - fresh_s):
            return
        self.refresh()
        for info in self._newest_first(plan_id):
            young = info.modified_s is not None and now_s - info.modified_s < fresh_s
            if young and (info.key in self._intact or self._read(info.key, plan_id) is not None):
                return
        data = read()
        if encoded_plan_id(data) != plan_id:
            raise IntegrityError(f"these bytes are not plan {plan_id}", key=plan_id)
        key = plan_copy_key(plan_id, self._mint())
        self._tier.put(key, data)
        with self._lock:
            there = {**self._copies.get(plan_id, {}), key: ObjectInfo(key, len(data), now_s)}
            self._copies = {**self._copies, plan_id: there}
            self._intact.add(key)


def plan_of_key(key: str) -> str | None:
    """The plan of which ``key`` is a copy; None: of none."""
    name, dot, _ = key.rpartition("/")[2].partition(".")
    return name if dot and ID_PATTERN.fullmatch(name) else None
