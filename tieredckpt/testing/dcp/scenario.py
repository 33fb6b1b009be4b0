"""The list of scenarios: what each one is called, and on how many ranks it runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tieredckpt.testing.dcp.job import Job

Body = Callable[["Job"], None]

ALONE = 0
"""Instead of a number of ranks: one process without a process group."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """One thing that users of DCP do, and what must come of it."""

    name: str
    subject: str
    """The module that it is in: what the table is grouped by."""
    title: str
    body: Body
    """Runs on each rank, once per stage; raises if the plug-in does not do it."""
    stages: tuple[int, ...]
    """Ranks of each stage. A stage is one start of a training job."""
    killed: dict[int, frozenset[int]]
    """Stage -> ranks that kill themselves in it; the launcher then kills the others."""
    deadline_s: float
    """For one stage, on a slow machine."""


SCENARIOS: dict[str, Scenario] = {}


def scenario(
    *stages: int,
    killed: dict[int, frozenset[int]] | None = None,
    deadline_s: float = 90.0,
) -> Callable[[Body], Body]:
    """Enter a function into the list; its docstring's first line is the title."""

    def enter(body: Body) -> Body:
        name = body.__name__.replace("_", "-")
        assert name not in SCENARIOS, name
        assert body.__doc__, name
        SCENARIOS[name] = Scenario(
            name=name,
            subject=body.__module__.rpartition(".")[2],
            title=body.__doc__.strip().splitlines()[0],
            body=body,
            stages=stages,
            killed=killed or {},
            deadline_s=deadline_s,
        )
        return body

    return enter
