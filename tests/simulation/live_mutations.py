"""The rules of live recovery on several hosts, broken on purpose: each must be found.

``python -m tests.simulation.live_mutations`` prints which seeds find each.
"""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from tests.simulation.live_case import Violation, run_case
from tieredckpt.live import board as b
from tieredckpt.live import decide as d
from tieredckpt.live import messages as m
from tieredckpt.policy.ranks import Member

_apply_here, _next, _views = d.apply_here, d._next, b.Board.views


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


def _views_from_before(self: Any, *, failing: bool, **_: Any) -> Any:
    return _views(self, failing=failing)


def _stands_for_ever(self: Any) -> float:
    return 0.0 if self._answer_s is None else max(0.0, b.time.monotonic() - self._answer_s)


def _same_term(now: d.Situation, **changes: Any) -> m.Decision:
    """Another start of a host goes on in its term."""
    decision = _next(now, **changes)
    (number, host, _), old = decision.term, now.known.term
    term = old if old[1] == host else (number, host, "")
    return d.msgspec.structs.replace(decision, term=term)


MUTATIONS: dict[str, tuple[Any, str, Any, str]] = {
    "any part of a split begins a generation": (d, "_may_begin", _any_part_begins, "alone"),
    "a rank enters while another one is in an old generation":
        (d, "apply_here", _enters_at_once, "returns"),
    "old messages count": (b.Seen, "record", _always_counts, "mixed"),
    "views from before a host leads count": (b.Board, "views", _views_from_before, "splits"),
    "ages stand while the own agent is lost": (b.Board, "_stands_s", _stands_for_ever, "links"),
    "a new start goes on in the old one's term": (d, "_next", _same_term, "hosts"),
}  # fmt: skip
"""By name: what is replaced by what, and the theme of the cases that find it."""


@contextlib.contextmanager
def mutated(name: str) -> Iterator[str]:
    """Break a rule; the theme that finds it."""
    place, what, broken, theme = MUTATIONS[name]
    plain = getattr(place, what)
    setattr(place, what, broken)
    try:
        yield theme
    finally:
        setattr(place, what, plain)


def first_found(name: str, seeds: range) -> tuple[int, str] | None:
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
