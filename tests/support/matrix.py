"""The fault matrix: which cases there are, and which of them are run by `make test` and the others.

A case is (operation, stage, victim, fault, seed). :func:`kinds` is the whole product; the seed
draws what is left open (world size, retention, sizes, which file, which byte, what happens
afterwards), so that the printed id alone brings a case back:

    FAULT_CASE="save/agent.commit.before_manifest/agent/kill/seed=17" make test PYTEST_ARGS=...
"""

from __future__ import annotations

import os
import random
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path

ROOT = Path(__file__).parents[2]
NIGHTLY_CASES = 5000

SAVE = (
    "save.reserve.before", "save.reserve.after", "save.copy", "save.seal.before",
    "save.seal.after", "save.commit.before", "save.commit.after",
    "agent.reserve.after_label", "agent.seal.before_label", "agent.seal.after_label",
    "agent.commit.before_plan", "agent.commit.before_manifest", "agent.commit.after_manifest",
)  # fmt: skip
ASYNC = ("save.stage.before", "save.stage.copy", "save.stage.after", *SAVE)
SPILL = (
    "agent.spill.segment", "agent.spill.before_plan", "agent.spill.before_manifest",
    "agent.spill.after_manifest", "tier.file.write", "tier.file.fsync", "tier.file.link",
    "tier.file.publish",
)  # fmt: skip
RETENTION = (
    "agent.retention.before_manifest_delete", "agent.retention.after_manifest_delete",
    "agent.retention.after_segments_delete",
)  # fmt: skip
LOAD = (
    "load.choose", "load.read.before", "load.read.after", "load.attempt.before",
    "load.attempt.after", "agent.holdings", "agent.open_segment",
)  # fmt: skip
OPEN = (
    "open.session.before", "open.session.after", "agent.session.before_lease",
    "agent.session.after_lease", "agent.adopt.before", "agent.adopt.after",
)  # fmt: skip
STAGES = {
    "save": SAVE,
    "async": ASYNC,
    "spill": SPILL,
    "retention": RETENTION,
    "load": LOAD,
    "open": OPEN,
}
"""Failpoints that are certainly reached by each operation."""

RECORDS = tuple(
    f"{kind}.{tier}" for kind in ("segment", "manifest", "plan", "attempt")
    for tier in ("memory", "disk")
)  # fmt: skip
DAMAGES = ("flip", "truncate", "empty", "delete", "older")
MEDIA = {
    "save": ("memory",), "async": ("memory",), "spill": ("disk",), "retention": ("memory", "disk"),
    "load": ("memory", "disk"), "open": ("memory", "disk"),
}  # fmt: skip


Kind = tuple[str, str, str, str]
"""Operation, stage, victim and fault."""


@dataclass(frozen=True)
class Case:
    """One case; its text brings it back."""

    operation: str
    stage: str
    victim: str
    fault: str
    seed: int

    def __str__(self) -> str:
        return f"{self.operation}/{self.stage}/{self.victim}/{self.fault}/seed={self.seed}"

    @classmethod
    def parse(cls, text: str) -> Case:
        """The inverse of ``str``. Raises ValueError."""
        operation, stage, victim, fault, seed = text.split("/")
        kind = (operation, stage, victim, fault)
        if kind not in kinds() or not seed.startswith("seed="):
            raise ValueError(f"{text!r} is no case of the fault matrix")
        return cls(*kind, int(seed.removeprefix("seed=")))


def kinds() -> list[Kind]:
    """All (operation, stage, victim, fault), without the seed."""
    return list(dict.fromkeys(_kinds()))


def _kinds() -> Iterator[Kind]:
    for operation, stages in STAGES.items():
        for stage, victim, fault in product(stages, ("trainer", "agent", "both"), ("kill", "stop")):
            if "adopt" not in stage or victim == "agent":
                yield operation, stage, victim, fault
        for stage in stages:
            if stage.startswith("agent."):
                yield operation, stage, "agent", "slow"
        for what, damage in product(RECORDS, DAMAGES) if operation != "async" else ():
            if not what.startswith("plan") or damage != "older":  # there is only one plan
                yield operation, what, "files", damage
        for medium in MEDIA[operation]:
            faults = {"enospc", "eio", "erofs", "emfile"}
            if operation == "load":
                faults -= {"enospc", "erofs"} if medium == "disk" else {"erofs"}
            for fault, how in product(sorted(faults), ("once", "lasting")):
                yield operation, f"{medium}.{how}", "agent", fault
        yield operation, "disk.full", "host", "enospc"
        yield operation, "memory.full", "host", "enospc"
        yield operation, "disk.remounted", "host", "erofs"
        for victim in ("trainer", "agent"):
            yield operation, "limit", victim, "emfile"
        for fault in ("same config", "other config"):
            yield operation, "rival", "trainer", fault
        for victim, fault in product(("trainer", "agent", "both"), ("clock back", "clock ahead")):
            yield operation, "clock", victim, fault
    for medium in ("memory", "disk"):
        yield "load", f"{medium}.read", "trainer", "eio"


FAMILIES = {
    **dict.fromkeys(DAMAGES, "damage"),
    **dict.fromkeys(("enospc", "eio", "erofs", "emfile"), "failing medium"),
    **dict.fromkeys(("same config", "other config"), "rival"),
    **dict.fromkeys(("clock back", "clock ahead"), "clock"),
}
"""Faults of which the gate draws one for each operation; any other is a family of its own."""
THIRDS = 3
"""The gate hits one stage of so many."""


def full(first_seed: int) -> list[Case]:
    """Each operation with each fault and each victim, each victim with each fault, and each stage:
    about 114 cases.
    """

    def wanted(kind: Kind) -> set[tuple[str, ...]]:
        operation, stage, victim, fault = kind
        return {("of", operation, fault), ("of", operation, victim), (victim, fault), (stage,)}

    return _cover(wanted, random.Random(first_seed), first_seed)


def gate(first_seed: int, draw: int) -> list[Case]:
    """Each operation and each victim with each family of faults, and a third of the stages: about
    48 cases.

    Args:
        first_seed: Of each case.
        draw: Which member of each family, and which stages. Another commit draws others.
    """
    stages = sorted({stage for each in STAGES.values() for stage in each})[draw % THIRDS :: THIRDS]

    def wanted(kind: Kind) -> set[tuple[str, ...]]:
        operation, stage, victim, fault = kind
        family = FAMILIES.get(fault, fault)
        found = {("of", operation, family), (victim, family)}
        return found | {(stage,)} if stage in stages else found

    return _cover(wanted, random.Random(draw), first_seed)


def _cover(
    wanted: Callable[[Kind], set[tuple[str, ...]]], chance: random.Random, seed: int
) -> list[Case]:
    """Cases that have all that is ``wanted`` of any kind. Each next one adds most of what is
    missing; ``chance`` orders equals.
    """
    left = kinds()
    chance.shuffle(left)
    has = {kind: wanted(kind) for kind in left}
    missing = set().union(*has.values())
    chosen = []
    while missing:
        chosen.append(best := max(left, key=lambda kind: len(has[kind] & missing)))
        missing -= has[best]
    return [Case(*kind, seed) for kind in chosen]


def nightly(first_seed: int, count: int) -> list[Case]:
    """``count`` cases: the whole product, with one seed after the other."""
    everything = kinds()
    return [
        Case(*everything[i % len(everything)], first_seed + i // len(everything))
        for i in range(count)
    ]


def chosen_cases() -> tuple[list[Case], list[Case], list[Case]]:
    """What the environment asks for: cases of `make test`, and those that `make test-all` and
    `make test-nightly` have beside them.
    """
    first_seed = int(os.environ.get("FAULT_SEED", "0"))
    if text := os.environ.get("FAULT_CASE"):
        return [Case.parse(each) for each in text.split(",")], [], []
    if text := os.environ.get("FAULT_CASES"):
        start, _, stop = text.rpartition("-")
        return nightly(first_seed, int(stop))[int(start or "0") :], [], []
    cases = gate(first_seed, commit())
    more = [case for case in full(first_seed) if case not in cases]
    known = {*cases, *more}
    return cases, more, [c for c in nightly(first_seed, NIGHTLY_CASES) if c not in known]


def commit() -> int:
    """The hash of the commit that is checked out; 0 where there is none."""
    command = ["git", "rev-parse", "HEAD"]
    try:
        asked = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):  # no git, or no checkout
        return 0
    return int(asked.stdout, 16)
