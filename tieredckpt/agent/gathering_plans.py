"""The plans of one save's parts become the checkpoint's plan, once per structure.

What decodes plans needs numpy, 8 MiB that most agents never use: it is imported at the first save
without collectives.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from tieredckpt.errors import RemoteProtocolError
from tieredckpt.transport import messages as m

MERGED_MAX = 16
MERGED_BYTES_MAX = 64 << 20
"""Merged plans remembered, so that an unchanged structure is merged once per stream."""


class MergedPlans:
    """Of one namespace. Thread-safe; its lock is never held while plans are merged."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._merged: dict[tuple[str, ...], tuple[str, bytes]] = {}

    def __len__(self) -> int:
        return len(self._merged)

    def merge(self, parts: Sequence[m.Contribute]) -> tuple[str, bytes]:
        """Id and encoded plan of all parts.

        Raises:
            UsageError: What the ranks have does not fit together.
            RemoteProtocolError, IntegrityError: A plan is none.
        """
        from tieredckpt.format.plan import decode_plan, encode_plan, plan_id
        from tieredckpt.format.plan_merge import merge_plans

        ids = tuple(plan_id(each.plan) for each in parts)
        known = self._merged.get(ids)
        if known is None:
            plans = [decode_plan(each.plan) for each in parts]
            for part, plan in zip(parts, plans, strict=True):
                if len(plan.structures) != (part.part is not None):
                    raise RemoteProtocolError(f"rank {part.rank}'s plan is not of its one segment")
            data = encode_plan(merge_plans(plans))
            known = plan_id(data), data
        with self._lock:
            self._merged.pop(ids, None)
            self._merged[ids] = known
            while (
                len(self._merged) > MERGED_MAX
                or sum(len(data) for _, data in self._merged.values()) > MERGED_BYTES_MAX
            ):
                del self._merged[next(iter(self._merged))]
        return known
