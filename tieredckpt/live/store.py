"""The key-value store of one generation on one host: torch's FileStore, with waits that end.

There is no server, port or root. A store is used for one generation, so it has no stale keys.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch.distributed as dist

POLL_S_MIN = 0.001
POLL_S_MAX = 0.02


class GenerationStore(dist.Store):
    """Thread-safe, as torch's.

    Args:
        path: Of the file; made by the first rank.
        size: Ranks of the generation.
        check: Raises once the generation ends, in waits too: a rank that died never sets its keys.
    """

    def __init__(self, path: str, size: int, check: Callable[[], None]) -> None:
        super().__init__()
        self._file = dist.FileStore(path, size)
        self._check = check
        self._timeout = timedelta(minutes=10)

    def clone(self) -> GenerationStore:
        return self

    @property
    def timeout(self) -> timedelta:
        return self._timeout

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Raises DistStoreError after the time-out, and what ``check`` raises."""
        limit = self._timeout if timeout is None else timeout
        until_s, pause_s = time.monotonic() + limit.total_seconds(), POLL_S_MIN
        while not self._file.check(list(keys)):
            self._check()
            if time.monotonic() >= until_s:
                raise dist.DistStoreError(f"{', '.join(keys)} not set within {limit}")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, POLL_S_MAX)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._file.get(key)

    def set(self, key: str, value: str) -> None:
        self._file.set(key, value)

    def add(self, key: str, amount: int) -> int:
        return self._file.add(key, amount)

    def check(self, keys: Sequence[str]) -> bool:
        return self._file.check(list(keys))

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        return self._file.compare_set(key, expected, desired)

    def delete_key(self, key: str) -> bool:
        return self._file.delete_key(key)

    def has_extended_api(self) -> bool:
        return False
