"""What a tier of each host must keep because other hosts may not have the newer part: pure.

In such a tier a checkpoint is whole once every host that has a part in it holds its part. Hosts
delete by themselves, so without more knowledge the fast ones would delete an old checkpoint before
the slow ones have any newer: for that while no checkpoint would be whole. So each host keeps the
newest one that it knows to be whole, and what is newer: that may become whole next.

Then nobody ever deletes the newest checkpoint that was whole. For who deletes a checkpoint knows a
newer one that was, and nobody has deleted the newest of these. Laws:
tests/property/policy/test_completeness.py.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from tieredckpt.format.manifest import Manifest

NOT_WHOLE = "no newer one is known to be on the disks of all hosts"
"""Why one stays that the rules do not keep."""


@dataclass(frozen=True, slots=True)
class Claim:
    """What one host says of a stream in its tier."""

    saves: frozenset[str]
    """It holds these, and will until it was told of a newer one that is whole."""
    coming: frozenset[str] | None = None
    """It is about to copy these, and no others that are older than ``upto``; None: unknown."""
    upto: tuple[int, int] = (0, 0)
    """The newest that it knows of: number of the attempt, and of the save in it."""


@dataclass(frozen=True, slots=True)
class Parts:
    """Of one checkpoint."""

    hosts: frozenset[str]
    age: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Whole:
    """What is known of one stream in one tier of each host."""

    newest: str | None = None
    """Save id of the newest checkpoint that all its hosts hold; None: none is known."""
    never: frozenset[str] = frozenset()
    """Given up by a host that does not hold its part: they will not be whole."""
    missing: frozenset[str] = frozenset()
    """A host does not hold its part just now and is not about to, or is not of the job any more:
    they may go where there is no room else."""


UNKNOWN = Whole()


def spared(line: Sequence[Manifest], whole: Whole, *, full: bool = False) -> dict[str, str]:
    """By save id, why the host must keep it for the sake of others.

    Args:
        line: What the host holds, undamaged, in the order in which a restart would want it: the
            candidates, newest first, then the abandoned ones, newest first.
        whole: As far as is known. Unknown is never permission to delete.
        full: There is no room for the next one.
    """
    found: dict[str, str] = {}
    for manifest in line:
        gone = whole.never | whole.missing if full else whole.never
        if manifest.save_id not in gone:
            found[manifest.save_id] = NOT_WHOLE
        if manifest.save_id == whole.newest:
            break
    return found


def newest_whole(
    saves: Sequence[str],
    claims: Mapping[str, Claim],
    members: Collection[str],
    parts: Callable[[str], Parts | None],
    is_lacking: Callable[[str], bool],
) -> Whole:
    """What a host is told that holds ``saves``.

    Args:
        saves: Save ids, in the order of :func:`spared`.
        claims: By host, the last that was heard.
        members: The hosts of the job.
        parts: Of a checkpoint; None: unknown.
        is_lacking: Whether a host has given a checkpoint up before it had its part.
    """
    never, missing = set[str](), set[str]()
    for save_id in saves:
        known = parts(save_id)
        if is_lacking(save_id):
            never.add(save_id)
        elif known is None:
            continue
        elif all(host in claims and save_id in claims[host].saves for host in known.hosts):
            return Whole(save_id, frozenset(never), frozenset(missing))
        elif any(
            host not in members or _misses(claims.get(host), save_id, known.age)
            for host in known.hosts
        ):
            missing.add(save_id)
    return Whole(None, frozenset(never), frozenset(missing))


def _misses(claim: Claim | None, save_id: str, age: tuple[int, int]) -> bool:
    if claim is None or claim.coming is None or age > claim.upto:
        return False
    return save_id not in claim.saves and save_id not in claim.coming
