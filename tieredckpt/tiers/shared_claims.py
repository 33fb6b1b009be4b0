"""The claims of a shared tier: which attempt has which number, and so who may write and delete."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from tieredckpt.errors import NamespaceInUseError, UsageError
from tieredckpt.format.manifest import (
    ATTEMPT_LIMIT_BYTES,
    AttemptRecord,
    encode_attempt,
)
from tieredckpt.tiers.base import Tier
from tieredckpt.tiers.contents import StoredAttempt
from tieredckpt.tiers.keys import claim_key
from tieredckpt.tiers.listed import Fetch, Listed
from tieredckpt.tiers.shared_records import parse_claim


class SharedClaims:
    """See the module. Thread-safe.

    Args:
        tier: Where they lie.
        fetch: Calls a function of each of some objects.
    """

    def __init__(self, tier: Tier, fetch: Fetch[Any]) -> None:
        self._tier = tier
        self._claims: Listed[StoredAttempt] = Listed(
            tier, "claims/", ATTEMPT_LIMIT_BYTES, parse_claim, fetch
        )

    def refresh(self) -> None:
        """List anew. Raises TierUnavailableError."""
        self._claims.refresh()

    def all(self) -> list[StoredAttempt]:
        """As of the last refresh and what was put since; no I/O."""
        return self._claims.values()

    def old_ones(self, born_before_s: float) -> list[StoredAttempt]:
        """Claims that one which is as old as that makes superfluous: whoever has a lower number is
        refused by that one, also who lists while they are deleted.
        """
        old = [
            each
            for info, each in self._claims.all().values()
            if info.modified_s is not None and info.modified_s < born_before_s
        ]
        newest = max(map(_number, old), default=0)
        return [each for each in old if _number(each) < newest]

    def hold(self, mine: AttemptRecord, known: Collection[str]) -> None:
        """Claim the namespace for attempt ``mine``, unless that is done already: a lease.

        Args:
            mine: The attempt. Two that followed the same one have the same number, and so the same
                key, which is created once.
            known: Ids of the attempts that it followed, knowingly.

        Raises:
            NamespaceInUseError: An attempt that is not ``known`` has a claim: another run's.
            CapacityError, TierUnavailableError: As :meth:`Tier.put`.
        """
        for last in (False, True):
            self._claims.refresh()
            _check(self._tier.name, self.all(), mine, known)
            key = claim_key(mine.number)
            if key in self._claims.all():
                return
            data = encode_attempt(mine)
            try:
                self._tier.put(key, data)
            except UsageError:  # somebody was faster, perhaps with the same record
                if last:
                    raise
                continue
            self._claims.note(key, StoredAttempt(key=key, data=data, record=mine, error=None))
            return


def _number(claim: StoredAttempt) -> int:
    return int(claim.key.rpartition("/")[2])


def _check(
    tier: str,
    claims: Iterable[StoredAttempt],
    mine: AttemptRecord,
    known: Collection[str],
) -> None:
    for each in claims:
        number = _number(each)
        if each.record is None:  # it is somebody's: its number is taken
            ours = number < mine.number
        else:
            ours = each.record.id in known or each.record.run == mine.run
        if not ours:
            raise NamespaceInUseError(
                f"attempt {number} of another run has claimed the namespace in tier {tier}, and "
                f"this one has attempt {mine.number}: if the other one is to go on, stop this one, "
                "else start this one again"
            )
