"""How one message reaches many hosts though nobody sends it to more than a few.

The sender divides the hosts into at most ``degree`` branches. The first host of a branch, the
*child*, gets the message with the rest of its branch, which it divides in the same way. A child
that does not answer is passed over: the next of its branch takes its place, so that a dead host
costs itself alone. Who is passed over learns it from anti-entropy.

Laws (tests/property/test_policy_fanout.py): every host is reached exactly once, nobody sends to
more than ``degree`` at a time, the depth is logarithmic.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

DEGREE = 8
"""Hosts that one host sends a message to. With it 10,000 hosts are five hops away, and a sender's
work is the same however many there are."""

Branch = tuple[str, tuple[str, ...]]
"""A child, and the hosts that it is to reach."""


def split(hosts: Sequence[str], degree: int = DEGREE) -> list[Branch]:
    """Whom to send to, and which hosts each of them forwards to.

    Args:
        hosts: All that are to be reached, without the sender; each once. Neighbours stay together,
            so hosts that are near each other should stand near each other.
        degree: At least 1.

    Returns:
        At most ``degree`` branches whose sizes differ by at most 1; together exactly ``hosts``.
    """
    assert degree >= 1
    count = min(degree, len(hosts))
    bounds = [len(hosts) * number // count for number in range(count + 1)] if count else []
    return [
        (hosts[start], tuple(hosts[start + 1 : stop])) for start, stop in itertools.pairwise(bounds)
    ]


def promote(branch: Branch) -> Branch | None:
    """What to send instead, if the branch's child did not answer; None if it was the last."""
    _, rest = branch
    return (rest[0], rest[1:]) if rest else None
