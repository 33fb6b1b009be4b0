"""The rules of live recovery on several hosts, broken on purpose: each must be found.

``python -m tests.simulation.live_mutations`` prints which seeds find each.
"""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from tests.simulation.live_case import Violation, run_case
from tieredckpt.live import board as b
from tieredckpt.live import decide as d
from tieredckpt.live import messages as m
from tieredckpt.live import supervisor as s
from tieredckpt.policy.ranks import Member

_apply_here, _other_voters = d.apply_here, d._other_voters
_acknowledge = s.Supervisor._acknowledge


def _any_part_begins(_: d.Policy, known: m.Decision, members: Sequence[Member]) -> bool:
    return bool(known.voters) or not members or len({each.host for each in members}) > 1


def _enters_at_once(
    policy: d.Policy,
    known: m.Decision,
    host: str,
    processes: Sequence[m.ProcessFacts],
    **others: Any,
) -> d.Action:
    action = _apply_here(policy, known, host, processes, **others)
    if action is None:
        rest = [each for each in processes if each.where != "in"]
        action = _apply_here(policy, known, host, rest, **others)
        return action if isinstance(action, d.Enter) else None
    return action


def _always_counts(self: Any, host: str, data: Any, **_: Any) -> bool:
    before = self._found.get(host)
    self._found = {**self._found, host: (data, self._clock())}
    return before is None or before[0].beat != data.beat


def _voters_at_once(*arguments: Any) -> m.Decision | None:
    """Only the new voters agree."""
    found = _other_voters(*arguments)
    return found and d.msgspec.structs.replace(found, old_voters={})


def _stands_for_ever(self: Any) -> float:
    return 0.0 if self._answer_s is None else max(0.0, b.time.monotonic() - self._answer_s)


def _same_term(self: Any, records: Any) -> None:
    """Another start of a host goes on in its term."""
    self._id, own = "", self._id
    _acknowledge(self, records)
    self._id = own


MUTATIONS: dict[str, tuple[Any, str, Any, str, int]] = {
    "any part of a split begins a generation": (d, "_may_begin", _any_part_begins, "alone", 2),
    "a rank enters while another one is in an old generation":
        (d, "apply_here", _enters_at_once, "returns", 388),
    "old messages count": (b.Seen, "record", _always_counts, "links", 1),
    "voters change at once": (d, "_other_voters", _voters_at_once, "voters", 167),
    "ages stand while the own agent is lost": (b.Board, "_stands_s", _stands_for_ever, "links", 0),
    "a new start goes on in the old one's term":
        (s.Supervisor, "_acknowledge", _same_term, "hosts", 4),
}  # fmt: skip
"""By name: what is replaced by what, the theme of the cases that find it, and a seed that does."""


@contextlib.contextmanager
def mutated(name: str) -> Iterator[str]:
    """Break a rule; the theme that finds it."""
    place, what, broken, theme, _ = MUTATIONS[name]
    plain = getattr(place, what)
    setattr(place, what, broken)
    try:
        yield theme
    finally:
        setattr(place, what, plain)


def first_found(name: str, seeds: Iterable[int]) -> tuple[int, str] | None:
    """The first of the seeds that finds it, and how."""
    with mutated(name) as theme:
        for seed in seeds:
            try:
                run_case(seed, theme=theme)
            except Violation as violation:
                return seed, str(violation.__cause__)
    return None


def main(arguments: list[str]) -> None:
    last = int(arguments[0]) if arguments else 500
    for name in arguments[1:] or MUTATIONS:
        first, since_s = 0, time.monotonic()
        while (found := first_found(name, range(first, last))) is not None:
            print(f"{name}: {found}")
            first = found[0] + 1
        print(f"{name}: {math.ceil(time.monotonic() - since_s)} s")


if __name__ == "__main__":
    main(sys.argv[1:])
