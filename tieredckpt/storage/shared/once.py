"""What is created once in a shared tier, under keys with a nonce: notices, verdicts, plans.

notices/<nonce>             what somebody is about to delete
verdicts/<nonce>            whether it is deleted: created once, by him or by who objects
plans/<plan id>.<nonce>     copies of a plan
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from tieredckpt.errors import IntegrityError, NotFoundError, UsageError
from tieredckpt.format.envelope import ENVELOPE_BYTES
from tieredckpt.format.manifest import ID_PATTERN
from tieredckpt.format.plan_record import PLAN_LIMIT_BYTES, encoded_plan_id
from tieredckpt.format.records import (
    INTENT_LIMIT_BYTES,
    DeletionDecision,
    DeletionIntent,
    decode_decision,
    decode_intent,
    encode_decision,
    encode_intent,
)
from tieredckpt.storage.base import ObjectInfo, Tier, decision_key, intent_key, plan_copy_key

NOTICES_MAX = 1 << 12
"""More are a mistake: one lies there only while something is deleted, and where somebody died."""
LIMIT_BYTES = INTENT_LIMIT_BYTES + ENVELOPE_BYTES


@dataclass(frozen=True, slots=True)
class Decided:
    """A notice that can be objected to no more."""

    nonce: str
    notice: DeletionIntent | None
    """None: it cannot be read, and may name anything."""
    goes: bool
    """What it names is deleted; False: its verdict cannot be read, and nobody acts on it."""

    def names(self, stream: str, save_id: str) -> bool:
        """Whether it may be about this checkpoint."""
        return self.notice is None or (stream, save_id) in self.notice.saves


class SharedNotices:
    """Nothing that is committed is deleted before its deletion was told. Thread-safe.

    Who deletes: the notice, then a look at pins and claims, then the verdict. Who objects: the pin
    or the claim, then a look at the notices, then the verdicts of those. One of them was second,
    and sees what the other one wrote: so either the deletion is given up, or it is known to be
    decided. How long anybody sleeps in between does not matter, and no clock is asked.

    Args:
        tier: Where they lie.
        mint: Makes nonces.
    """

    def __init__(self, tier: Tier, mint: Callable[[], str]) -> None:
        self._tier = tier
        self._mint = mint

    # --- who deletes ------------------------------------------------------------------------------

    def give(self, notice: DeletionIntent) -> str:
        """Say what is about to be deleted; look for objections after that. The nonce.

        Raises as :meth:`Tier.put`: then nothing is deleted because of it.
        """
        nonce = self._mint()
        self._tier.put(intent_key(nonce), encode_intent(notice))
        return nonce

    def decide(self, nonce: str) -> bool:
        """After nothing was found that speaks against it: whether it goes.

        Raises:
            CapacityError, TierUnavailableError: It is not known. Nothing may be deleted because of
                it here; if it was decided, somebody else will find it, and delete.
        """
        return self._create(nonce, goes=True) is True

    def withdraw(self, nonce: str) -> None:
        """It does not go: nobody acts on the notice any more, so it is not needed.

        The verdict, if there is one, stays: a request that is late may still try to create another.
        Raises TierUnavailableError.
        """
        self._tier.delete(intent_key(nonce))

    def end(self, nonce: str) -> None:
        """All that it names has its tombstone. Raises TierUnavailableError."""
        self._tier.delete_many([intent_key(nonce), decision_key(nonce)])

    # --- who objects ------------------------------------------------------------------------------

    def object(self, save: tuple[str, str] | None = None) -> list[Decided]:
        """Stop all deletions that are not decided, of one checkpoint or of all; the decided ones.

        Raises:
            CapacityError, TierUnavailableError: Some may be stopped, some not.
        """
        found = []
        for nonce in self._nonces():
            notice, gone = self._read(nonce)
            if gone or (save is not None and notice is not None and save not in notice.saves):
                continue
            verdict = self._create(nonce, goes=False)
            if verdict is not False:
                found.append(Decided(nonce, notice, goes=verdict is True))
        return found

    # --- what others left -------------------------------------------------------------------------

    def left(self) -> list[Decided]:
        """The decided ones of whoever did not come to an end. Raises TierUnavailableError."""
        found = []
        for nonce in self._nonces():
            goes = self._verdict(nonce)
            notice, gone = self._read(nonce) if goes else (None, True)
            if not gone:
                found.append(Decided(nonce, notice, goes=True))
        return found

    def sweep(self, older_than_s: float) -> None:
        """Delete notices that nobody can be acting on any more, and then their verdicts.

        Raises CapacityError, TierUnavailableError.
        """
        kept = set()
        since_s: float | None = None
        for kind in ("notices/", "verdicts/"):
            for info in self._tier.list(kind):
                nonce = info.key.rpartition("/")[2]
                if since_s is None:
                    since_s = self._tier.now_s() - older_than_s
                old = info.modified_s is not None and info.modified_s < since_s
                if old and nonce not in kept:
                    self._tier.delete(info.key)
                else:
                    kept.add(nonce)

    # --- parts ------------------------------------------------------------------------------------

    def _nonces(self) -> list[str]:
        there = self._tier.list_at_most(NOTICES_MAX, "notices/")
        return [info.key.rpartition("/")[2] for info in there if info.key.count("/") == 1]

    def _read(self, nonce: str) -> tuple[DeletionIntent | None, bool]:
        """The notice, if it can be read; and whether it was ended meanwhile."""
        try:
            return decode_intent(self._tier.get(intent_key(nonce), limit=LIMIT_BYTES)), False
        except NotFoundError:
            return None, True
        except IntegrityError:
            return None, False

    def _create(self, nonce: str, *, goes: bool) -> bool | None:
        """The verdict that is there now, whoever created it; None: it cannot be read."""
        data = encode_decision(DeletionDecision(notice=nonce, goes=goes))
        try:
            self._tier.put(decision_key(nonce), data)
        except UsageError:
            # Gone again: whoever gave notice has come to an end.
            return self._verdict(nonce, gone=False)
        return goes

    def _verdict(self, nonce: str, gone: bool | None = None) -> bool | None:
        try:
            verdict = decode_decision(self._tier.get(decision_key(nonce), limit=LIMIT_BYTES))
        except NotFoundError:
            return gone
        except IntegrityError:
            return None
        return verdict.goes if verdict.notice == nonce else None


class SharedPlans:
    """Copies of plans under keys that are written once. Thread-safe.

    A plan is named by its content, so the same one is needed again when nobody needed it for a long
    time, and whoever deletes it may be late by any time. A key that were written again could be
    deleted then, after a manifest relied on it. So who commits relies on a young copy or writes one
    under a new key, and only old keys are deleted.

    Args:
        tier: Where they lie.
        mint: Makes nonces.
    """

    def __init__(self, tier: Tier, mint: Callable[[], str]) -> None:
        self._tier = tier
        self._mint = mint
        self._lock = threading.Lock()
        self._copies: dict[str, ObjectInfo] = {}
        """By key; never changed, but replaced by another table."""
        self._intact: set[str] = set()
        """Keys of copies that were read and are what they should be."""

    def refresh(self) -> None:
        """List anew. Raises TierUnavailableError."""
        there = self._tier.list("plans/")
        copies = {info.key: info for info in there if plan_of_key(info.key) is not None}
        with self._lock:
            self._copies = copies
            self._intact &= copies.keys()

    def ids(self) -> frozenset[str]:
        """Of the plans that are there, as of the last refresh."""
        return frozenset(filter(None, map(plan_of_key, self._copies)))

    def _newest_first(self, plan_id: str) -> list[ObjectInfo]:
        found = [each for key, each in self._copies.items() if plan_of_key(key) == plan_id]
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
        if plan_id in self.ids():
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
            self._copies = {**self._copies, key: ObjectInfo(key, len(data), now_s)}
            self._intact.add(key)


def plan_of_key(key: str) -> str | None:
    """The plan of which ``key`` is a copy; None: of none."""
    name, dot, _ = key.rpartition("/")[2].partition(".")
    return name if dot and ID_PATTERN.fullmatch(name) else None
