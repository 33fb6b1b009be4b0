"""``tieredckpt config check --connect``: each tier opened as the agent would, and tried."""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import msgspec
from rich.text import Text

from tieredckpt.agent.tier_place import TierPlace
from tieredckpt.cli.place import Place
from tieredckpt.cli.show import one_line, print_table
from tieredckpt.errors import TieredCkptError, TierUnavailableError
from tieredckpt.policy.config import Config
from tieredckpt.policy.config_tiers import TierSpec
from tieredckpt.tiers.object_errors import NO_ANSWER
from tieredckpt.tiers.probe import STEPS, Probed, probe

RETRY_S = 10.0
"""A store that fails is asked for so long; the agent would go on for ``retry_for``."""
TIER_S = 120.0
"""A tier that takes longer is said not to answer: some clients know no deadline."""
OPEN = "open"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """What came of one tier."""

    tier: str
    url: str
    steps: Probed
    note: str | None = None

    @property
    def works(self) -> bool:
        """Whether nothing failed."""
        return not any(self.steps.values())

    @property
    def complaints(self) -> list[str]:
        """Each failure once, with the step that it stopped first."""
        said: dict[str, str] = {}
        for step, error in self.steps.items():
            if error is not None:
                said.setdefault(_said(error), step)
        return [f"{step}: {text}" for text, step in said.items()]

    def plain(self) -> dict[str, Any]:
        """For ``--json``."""
        return {
            "tier": self.tier,
            "url": self.url,
            "works": self.works,
            "steps": {
                step: None if step not in self.steps else self.steps[step] is None
                for step in (OPEN, *STEPS)
            },
            "errors": {step: _said(error) for step, error in self.steps.items() if error},
            "note": self.note,
        }


def _said(error: TieredCkptError) -> str:
    silent = isinstance(error, TierUnavailableError) and error.fields.get("status") == 0
    said = one_line(str(error))
    return f"{said}; {NO_ANSWER}" if silent and NO_ANSWER not in said else said


def try_tiers(config: Config, runtime_dir: Path, namespace: str) -> list[Tried]:
    """Open and probe all tiers at the same time, each within :data:`TIER_S`.

    Makes the folders of file tiers, as the agent would, and objects that it deletes again.
    """
    served = _served(config, runtime_dir, namespace)
    answers: list[queue.SimpleQueue[Tried]] = []
    for tier in config.tiers:
        answer: queue.SimpleQueue[Tried] = queue.SimpleQueue()
        answers.append(answer)
        # A daemon: nobody waits for a file system that hangs.
        threading.Thread(
            target=_answer,
            args=(tier, namespace, served, answer),
            name=f"tck-try-{tier.name}",
            daemon=True,
        ).start()
    found = []
    for tier, answer in zip(config.tiers, answers, strict=True):
        try:
            found.append(answer.get(timeout=TIER_S))
        except queue.Empty:
            error = TierUnavailableError(
                f"no answer within {TIER_S:g} s; {NO_ANSWER}", tier=tier.name, outcome="unknown"
            )
            found.append(Tried(tier=tier.name, url=tier.url, steps={OPEN: error}))
    return found


def _answer(
    tier: TierSpec, namespace: str, served: dict[str, str], answer: queue.SimpleQueue[Tried]
) -> None:
    error = TieredCkptError("an unexpected failure, see the traceback")
    found = Tried(tier=tier.name, url=tier.url, steps={OPEN: error})
    try:
        found = _try(tier, namespace, served)
    finally:
        answer.put(found)  # also after a bug, or of a library: nobody waits for what has ended


def _served(config: Config, runtime_dir: Path, namespace: str) -> dict[str, str]:
    """Name and URL of the tiers that the agent here has open."""
    status = Place(config=config, runtime_dir=runtime_dir).status()
    spaces = status.namespaces if status is not None else ()
    return {t.name: t.url for each in spaces if each.name == namespace for t in each.tiers}


def _try(tier: TierSpec, namespace: str, served: dict[str, str]) -> Tried:
    spec, note = _quick(tier), None
    if tier.is_file and tier.scope == "host" and served.get(tier.name) == tier.url:
        # It has the lock. Scope shared takes none, and sweeps nothing of the agent's.
        spec = msgspec.structs.replace(spec, scope="shared")
        note = "the agent that runs here has it open"
    place = TierPlace(spec, namespace)
    try:
        steps: Probed = {OPEN: None, **probe(place.open())}
    except (TieredCkptError, OSError) as error:
        wrong = error if isinstance(error, TieredCkptError) else TieredCkptError(str(error))
        steps = {OPEN: wrong}
    finally:
        place.close()
    return Tried(tier=tier.name, url=tier.url, steps=steps, note=note)


def _quick(spec: TierSpec) -> TierSpec:
    options = msgspec.structs.replace(
        spec.object,
        retry_for_s=min(RETRY_S, spec.object.retry_for_s),
        timeout_s=min(RETRY_S, spec.object.timeout_s),
    )
    return msgspec.structs.replace(spec, object=options)


def print_tried(found: Sequence[Tried]) -> None:
    """A table of what works, and below it what does not and why."""
    names = (OPEN, *STEPS)

    def cell(each: Tried, step: str) -> Text:
        if step not in each.steps:
            return Text("-")
        failed = each.steps[step] is not None
        return Text("failed", style="red") if failed else Text("ok", style="green")

    rows: list[list[str | Text]] = [
        [each.tier, *(cell(each, step) for step in names)] for each in found
    ]
    print_table("\ntiers, tried with objects that were deleted again", ("tier", *names), rows)
    for each in found:
        if each.note:
            click.secho(f"tier {each.tier}: {each.note}", dim=True)


def complain(found: Sequence[Tried]) -> list[str]:
    """Say on standard error what failed. Returns the tiers that cannot be used."""
    for each in found:
        for text in each.complaints:
            click.secho(f"tier {each.tier}: {text}", fg="red", err=True)
    return [each.tier for each in found if not each.works]
