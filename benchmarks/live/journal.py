"""Reads what a training wrote: the ranks' journal and the supervisor's lines. No process here."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

Event = dict[str, Any]
"""One line of the journal: kind, at, pid, rank, generation, and more; see train.py."""

EXACT = ("loss", "ids", "scale", "buffers")
"""Fields of an update that must be equal to the bit."""

_ENDED = re.compile(r"generation (\d+) ended: (.*)")
_RESUMED = re.compile(
    r"generation (\d+): resumed at step (\d+) from the (.*), (no|\d+) steps? lost \((.*)\)"
)
_BEGUN = re.compile(r"generation (\d+): training begins(?:.*?(no|\d+) steps? lost)?")
_UPDATE = re.compile(r"first update after the fault: step (\d+), ([\d.]+) s")
_STAGE = re.compile(r"(\w+) ([\d.]+) s")


@dataclass
class Recovery:
    """One generation after the first, as the supervisor reports it."""

    generation: int
    step: int
    source: str
    lost: int
    stages: dict[str, float]
    seconds: float | None = None
    """From the fault to the first update after it; None: there was none."""
    cause: str = ""


@dataclass(frozen=True)
class Restart:
    """The way from a fault to the first update after it, in seconds since the fault.

    Attributes:
        begun: All ranks are in ``train``.
        loaded: All ranks have their state.
        updated: All ranks have made an update.
        lost: Updates that are made once more.
    """

    begun: float
    loaded: float
    updated: float
    lost: int


@dataclass
class Comparison:
    """The updates of a run with faults, beside those of an undisturbed one."""

    rows: int = 0
    differing: list[str] = field(default_factory=list)
    missing: list[int] = field(default_factory=list)
    """Steps that no rank has updated."""
    executed: int = 0
    """Updates, one for all ranks; a step that was updated in two generations counts twice."""


def events_of(text: str) -> list[Event]:
    """The lines of a journal in the order of their times; one that was cut off is left out."""
    lines = text.split("\n")[:-1]
    return sorted((json.loads(line) for line in lines), key=lambda event: event["at"])


def recoveries_of(lines: Iterable[str]) -> list[Recovery]:
    """What the supervisor wrote about each generation that began with a state.

    A generation that began anew after a fault is reported with step 0.
    """
    found: list[Recovery] = []
    cause = ""
    for line in lines:
        if not line.startswith("[tieredckpt]"):
            continue
        if (match := _ENDED.search(line)) is not None:
            cause = match[2]
        elif (match := _RESUMED.search(line)) is not None:
            stages = {name: float(value) for name, value in _STAGE.findall(match[5])}
            found.append(
                Recovery(
                    int(match[1]), int(match[2]), match[3], lost_in(match[4]), stages, cause=cause
                )
            )
        elif (match := _BEGUN.search(line)) is not None and int(match[1]) > 1:
            found.append(Recovery(int(match[1]), 0, "none", lost_in(match[2]), {}, cause=cause))
        elif found and (match := _UPDATE.search(line)) is not None:
            found[-1].seconds = float(match[2])
    return found


def lost_in(text: str | None) -> int:
    """The number of steps in "no step lost" or "2 steps lost"; 0 without either."""
    return 0 if text in (None, "no") else int(text)


def restart_after(events: Sequence[Event], fault: Event) -> Restart:
    """What followed a fault. Raises ValueError if no update did."""
    later = [each for each in events if each["generation"] > fault["generation"]]
    updates = [each for each in later if each["kind"] == "update"]
    if not updates:
        raise ValueError(f"no update followed the fault at step {fault['step']}")
    generation = min(each["generation"] for each in updates)
    step = min(each["step"] for each in updates if each["generation"] == generation)
    of = [each for each in later if each["generation"] == generation]

    def last(kind: str) -> float:
        at = [
            each["at"]
            for each in of
            if each["kind"] == kind and (kind != "update" or each["step"] == step)
        ]
        return float(max(at)) - float(fault["at"])

    before = [
        each["step"]
        for each in events
        if each["kind"] == "update" and each["generation"] < generation
    ]
    lost = max(0, max(before, default=0) - step + 1)
    return Restart(last("begun"), last("loaded"), last("update"), lost)


def progress_of(events: Iterable[Event], begun_s: float) -> list[tuple[float, int]]:
    """Seconds since the start and step, of each update of rank 0."""
    return [
        (float(each["at"]) - begun_s, int(each["step"]))
        for each in events
        if each["kind"] == "update" and each["rank"] == 0
    ]


def compared(reference: Iterable[Event], found: Iterable[Event], steps: int) -> Comparison:
    """Each update of each rank with the undisturbed run's of the same step."""
    exact = {
        each["step"]: {name: each[name] for name in EXACT}
        for each in reference
        if each["kind"] == "update" and each["rank"] == 0
    }
    result = Comparison()
    executed = set()
    for each in found:
        if each["kind"] != "update":
            continue
        result.rows += 1
        executed.add((each["generation"], each["step"]))
        wrong = [name for name in EXACT if each[name] != exact[each["step"]][name]]
        if wrong:
            result.differing.append(
                f"step {each['step']}, rank {each['rank']}, generation {each['generation']}: "
                + ", ".join(wrong)
            )
    result.executed = len(executed)
    updated = {step for _, step in executed}
    result.missing = [step for step in range(1, steps + 1) if step not in updated]
    return result


def slope(points: Sequence[tuple[float, float]]) -> float:
    """Of the line with the least squares through at least two points of different x."""
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / spread


def samples_of(events: Iterable[Event], name: str) -> dict[int, list[tuple[float, float]]]:
    """By process, the generations and what it counted in each."""
    found: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for each in events:
        if each["kind"] == "sample":
            found[each["pid"]].append((float(each["generation"]), float(each[name])))
    return dict(found)


def step_times(events: Iterable[Event], skip: int) -> list[float]:
    """Seconds between one update of rank 0 and the next, after the first ``skip``."""
    times = [each["at"] for each in events if each["kind"] == "update" and each["rank"] == 0]
    return [b - a for a, b in zip(times[skip:], times[skip + 1 :], strict=False)]


def least_times(events: Iterable[Event], name: str, skip: int) -> list[float]:
    """Of each step after the first ``skip``, the least of all ranks.

    "own_s" is ``update`` but for its body: all ranks but the last one also wait for that one, which
    they would do later otherwise. "begin_s" is ``begin``.
    """
    by_step: dict[int, list[float]] = defaultdict(list)
    for each in events:
        if each["kind"] == "update":
            by_step[each["step"]].append(float(each[name]))
    return [min(each) for step, each in by_step.items() if step > skip]
