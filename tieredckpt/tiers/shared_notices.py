"""Notices in a shared tier: nothing that is committed is deleted before its deletion was told.

    notices/<nonce>      what somebody is about to delete
    verdicts/<nonce>     whether it is deleted: created once, by him or by who objects

Who deletes: the notice, then a look at pins and claims, then the verdict. Who objects: the pin or
the claim, then a look at the notices, then the verdicts of those. One of them was second, and sees
what the other one wrote: so either the deletion is given up, or it is known to be decided. How long
anybody sleeps in between does not matter, and no clock is asked.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tieredckpt.errors import IntegrityError, NotFoundError, UsageError
from tieredckpt.format.envelope import ENVELOPE_BYTES
from tieredckpt.format.record import (
    NOTICE_LIMIT_BYTES,
    Notice,
    Verdict,
    decode_notice,
    decode_verdict,
    encode_notice,
    encode_verdict,
)
from tieredckpt.tiers.base import Tier, unavailable
from tieredckpt.tiers.keys import notice_key, verdict_key

NOTICES_MAX = 1 << 12
"""More are a mistake: one lies there only while something is deleted, and where somebody died."""
LIMIT_BYTES = NOTICE_LIMIT_BYTES + ENVELOPE_BYTES


@dataclass(frozen=True, slots=True)
class Decided:
    """A notice that can be objected to no more."""

    nonce: str
    notice: Notice | None
    """None: it cannot be read, and may name anything."""
    goes: bool
    """What it names is deleted; False: its verdict cannot be read, and nobody acts on it."""

    def names(self, stream: str, save_id: str) -> bool:
        """Whether it may be about this checkpoint."""
        return self.notice is None or (stream, save_id) in self.notice.saves


class SharedNotices:
    """See the module. Thread-safe.

    Args:
        tier: Where they lie.
        mint: Makes nonces.
    """

    def __init__(self, tier: Tier, mint: Callable[[], str]) -> None:
        self._tier = tier
        self._mint = mint

    # --- who deletes ------------------------------------------------------------------------------

    def give(self, notice: Notice) -> str:
        """Say what is about to be deleted; look for objections after that. The nonce.

        Raises as :meth:`Tier.put`: then nothing is deleted because of it.
        """
        nonce = self._mint()
        self._tier.put(notice_key(nonce), encode_notice(notice))
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
        self._tier.delete(notice_key(nonce))

    def end(self, nonce: str) -> None:
        """All that it names has its tombstone. Raises TierUnavailableError."""
        self._tier.delete_many([notice_key(nonce), verdict_key(nonce)])

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
        found: list[str] = []
        for info in self._tier.list("notices/"):
            if info.key.count("/") == 1:
                found.append(info.key.rpartition("/")[2])
            if len(found) > NOTICES_MAX:
                raise unavailable(
                    self._tier.name,
                    f"tier {self._tier.name} holds over {NOTICES_MAX} notices of one namespace",
                )
        return found

    def _read(self, nonce: str) -> tuple[Notice | None, bool]:
        """The notice, if it can be read; and whether it was ended meanwhile."""
        try:
            return decode_notice(self._tier.get(notice_key(nonce), limit=LIMIT_BYTES)), False
        except NotFoundError:
            return None, True
        except IntegrityError:
            return None, False

    def _create(self, nonce: str, *, goes: bool) -> bool | None:
        """The verdict that is there now, whoever created it; None: it cannot be read."""
        data = encode_verdict(Verdict(notice=nonce, goes=goes))
        try:
            self._tier.put(verdict_key(nonce), data)
        except UsageError:
            # Gone again: whoever gave notice has come to an end.
            return self._verdict(nonce, gone=False)
        return goes

    def _verdict(self, nonce: str, gone: bool | None = None) -> bool | None:
        try:
            verdict = decode_verdict(self._tier.get(verdict_key(nonce), limit=LIMIT_BYTES))
        except NotFoundError:
            return gone
        except IntegrityError:
            return None
        return verdict.goes if verdict.notice == nonce else None
