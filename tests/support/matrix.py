"""The fault matrix: which cases there are, which of them `make test` runs, and what was counted.

A case is (operation, stage, victim, fault, seed). :func:`kinds` is the whole product; the seed
draws what is left open (world size, retention, sizes, which file, which byte, what happens
afterwards), so that the printed id alone brings a case back:

    FAULT_CASE="save/agent.commit.before_manifest/agent/kill/seed=17" make test PYTEST_ARGS=...
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

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


def kinds() -> list[tuple[str, str, str, str]]:
    """All (operation, stage, victim, fault), without the seed."""
    return list(dict.fromkeys(_kinds()))


def _kinds() -> Iterator[tuple[str, str, str, str]]:
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


PAIRS = ((0, 3), (0, 2), (2, 3), (1,))
"""Operation and fault, operation and victim, victim and fault; and each stage."""


def quick(first_seed: int) -> list[Case]:
    """Cases that have all :data:`PAIRS` between them: about 114, most are the stages of a kill.

    Each next case is the one that adds the most pairs. The order of equals is drawn with
    ``first_seed``: one commit runs one choice.
    """
    left = kinds()
    random.Random(first_seed).shuffle(left)
    pairs = {kind: {(f, *(kind[i] for i in f)) for f in PAIRS} for kind in left}
    missing = set().union(*pairs.values())
    chosen = []
    while missing:
        chosen.append(best := max(left, key=lambda kind: len(pairs[kind] & missing)))
        missing -= pairs[best]
    return [Case(*kind, first_seed) for kind in chosen]


def nightly(first_seed: int, count: int) -> list[Case]:
    """``count`` cases: the whole product, with one seed after the other."""
    everything = kinds()
    return [
        Case(*everything[i % len(everything)], first_seed + i // len(everything))
        for i in range(count)
    ]


def chosen_cases() -> tuple[list[Case], list[Case]]:
    """What the environment asks for: (cases of `make test`, further ones of the nightly run)."""
    first_seed = int(os.environ.get("FAULT_SEED", "0"))
    if text := os.environ.get("FAULT_CASE"):
        return [Case.parse(each) for each in text.split(",")], []
    if text := os.environ.get("FAULT_CASES"):
        start, _, stop = text.rpartition("-")
        return nightly(first_seed, int(stop))[int(start or "0") :], []
    cases = quick(first_seed)
    known = set(cases)
    return cases, [c for c in nightly(first_seed, NIGHTLY_CASES) if c not in known]
