"""The object stores of one engine: each rank reads them with clients of its own."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass, field

from tieredckpt.config.schema import TierSpec
from tieredckpt.errors import TierUnavailableError
from tieredckpt.recovery.folders import open_tier
from tieredckpt.recovery.plan import SourceRef
from tieredckpt.recovery.remote import STORE_STREAMS_MAX, Peer, Stream
from tieredckpt.storage.base import OpenObject, Tier, segment_key
from tieredckpt.storage.object.supplied import Supplied


class Stores:
    """The tiers of one engine that are read by range. Thread-safe; opened when first needed.

    Args:
        tiers: All tiers of the configuration.
        namespace: Whose checkpoints.
        retry_s: The longest that one request is repeated.
        script: Credentials of the training script.
    """

    def __init__(
        self,
        tiers: Iterable[TierSpec],
        namespace: str,
        retry_s: float,
        script: Supplied | None = None,
    ) -> None:
        self._configs = {tier.name: tier for tier in tiers}
        self._namespace = namespace
        self._retry_s = retry_s
        self._script = script
        self._lock = threading.Lock()
        self._opened: dict[str, _Store] = {}

    def find_peer(self, source: SourceRef) -> Peer:
        """The store that has this copy.

        Raises:
            TierUnavailableError: It cannot be opened; the message names what is missing.
        """
        with self._lock:
            found = self._opened.get(source.tier)
            if found is None:
                config = self._configs.get(source.tier)
                if config is None:
                    raise TierUnavailableError(
                        f"tier {source.tier} is not in this job's configuration", tier=source.tier
                    )
                found = self._opened[source.tier] = _Store(
                    open_tier(config, self._namespace, retry_s=self._retry_s, script=self._script)
                )
            return found

    def streams(self, source: SourceRef) -> int:
        """Requests at a time that its tier is configured for."""
        config = self._configs.get(source.tier)
        return 1 if config is None else min(STORE_STREAMS_MAX, config.object.concurrency)

    def close(self) -> None:
        """Close all clients; the next use makes new ones."""
        with self._lock:
            opened, self._opened = list(self._opened.values()), {}
        for store in opened:
            store.close()


@dataclass(slots=True)
class _Store:
    """One tier: a :class:`~tieredckpt.recovery.remote.Peer`."""

    tier: Tier
    lock: threading.Lock = field(default_factory=threading.Lock)
    objects: dict[str, OpenObject] = field(default_factory=dict)
    """By segment: all ranges of a segment are read from one opened object."""

    def open_range(self, segment_id: str, tier: str, start: int, stop: int) -> Stream:
        with self.lock:
            opened = self.objects.get(segment_id)
        if opened is None:
            opened = self.tier.open(segment_key(segment_id))
            with self.lock:
                opened = self.objects.setdefault(segment_id, opened)
        return opened.stream(start, stop)

    def close(self) -> None:
        with self.lock:
            objects, self.objects = list(self.objects.values()), {}
        for opened in objects:
            opened.close()
        self.tier.close()
