"""What waits to be copied into one tier: oldest first, and before all what somebody asked for.

Nothing leaves a queue because something newer came: every host copies the same checkpoints, and one
is given up for all of them by a record (``agent/leader/shedding.py``). Guarded by its owner.
"""

from __future__ import annotations

from collections.abc import Callable

from tieredckpt.format.manifest import Manifest

QUEUE_MAX = 4096
"""Checkpoints that wait; memory and the tier above have room for far fewer."""
TRIES = 3
"""After so many failures in a row the next one is tried, which may be whole."""


class SpillQueue:
    """See the module."""

    def __init__(self) -> None:
        self._waiting: dict[str, Manifest] = {}
        self._urgent: dict[str, None] = {}
        self._failures: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, save_id: str) -> bool:
        return save_id in self._waiting

    def manifests(self) -> list[Manifest]:
        """All of them, in the order of their turn."""
        first = [self._waiting[each] for each in self._urgent if each in self._waiting]
        return first + [m for i, m in self._waiting.items() if i not in self._urgent]

    def by_age(self) -> list[Manifest]:
        """All of them, oldest first."""
        return sorted(self._waiting.values(), key=age)

    def add(self, manifest: Manifest, *, urgent: bool = False) -> bool:
        """Let it wait; again is no change, but for its turn. False: there are too many."""
        if urgent:
            self._urgent = {manifest.save_id: None, **self._urgent}
        if manifest.save_id in self._waiting:
            return True
        if len(self._waiting) >= QUEUE_MAX:
            return False
        self._waiting[manifest.save_id] = manifest
        ordered = sorted(self._waiting.values(), key=age)
        self._waiting = {each.save_id: each for each in ordered}
        return True

    def take(self, ready: Callable[[Manifest], bool]) -> Manifest | None:
        """The next one that is ``ready``, out of the queue; None: there is none."""
        for manifest in self.manifests():
            if ready(manifest):
                del self._waiting[manifest.save_id]
                return manifest
        return None

    def back(self, manifest: Manifest) -> None:
        """It failed, and is to be tried again: what was begun goes on before others begin."""
        save_id = manifest.save_id
        self._failures[save_id] = self._failures.get(save_id, 0) + 1
        # Not in order of age again: of two that always fail one would be tried for ever.
        if self._failures[save_id] % TRIES:
            self._waiting = {save_id: manifest, **self._waiting}
        else:
            self._urgent.pop(save_id, None)
            self._waiting[save_id] = manifest

    def remove(self, save_id: str) -> Manifest | None:
        """It waits no more; what it was."""
        self.settled(save_id)
        return self._waiting.pop(save_id, None)

    def settled(self, save_id: str) -> None:
        """It has come to its end, one way or another."""
        self._urgent.pop(save_id, None)
        self._failures.pop(save_id, None)


def age(manifest: Manifest) -> tuple[int, int, str]:
    """A greater one is newer."""
    return manifest.attempt.number, manifest.seq, manifest.save_id
