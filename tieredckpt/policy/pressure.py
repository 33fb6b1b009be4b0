"""Which waiting spill is given up when memory has no room: pure, asked on the leader's host.

A checkpoint waits in memory for a tier that is slower than the saves. What is given up is a place
in that tier's queue, for all hosts, by a ``dropped`` record; then memory may let go of it.
Laws: tests/property/test_policy_pressure.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingSpill:
    """One checkpoint of a stream, and one tier that it is to reach."""

    save_id: str
    age: tuple[int, int]
    """Number of the attempt and the save's number in it: a greater one is newer."""
    waiting: bool = True
    """Nothing of it was begun in the tier by the host that has no room. False: it is here because
    it is safe, and so counts for the others."""
    safe: bool = False
    """Copied to other hosts, or committed in another tier."""
    committed: bool = False
    """In this tier, whole."""
    kept: bool = False
    """Pinned, or somebody asked for it to be brought there."""


def give_up(spills: Iterable[WaitingSpill]) -> str | None:
    """The save id of the one to be given up in this tier, or None: all of them stay.

    The oldest that waits, but never

    * the newest of those that wait: the tier would get none,
    * one that the tier holds already,
    * one that somebody wants there (pinned, asked for by ``spill``),
    * the only safe copy: one that is safe elsewhere while nothing newer is safe. Were it lost
      there, the job would go back to something older than what this tier could have had.
    """
    found = sorted(spills, key=lambda each: (each.age, each.save_id))
    waiting = [each for each in found if each.waiting and not each.committed]
    newest_safe = next((e for e in reversed(found) if e.safe or e.committed), None)
    for each in waiting[:-1]:
        if not each.kept and each is not newest_safe:
            return each.save_id
    return None
