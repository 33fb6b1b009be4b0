"""What a host holds, read from the slot folder and the file tiers, without an agent.

Only reads: nothing is locked for writing, made, adopted or swept, so it is safe beside anything.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from tieredckpt.agent.runtime import host_id
from tieredckpt.errors import TierUnavailableError
from tieredckpt.policy.config import Config
from tieredckpt.tiers.base import Scope, Tier
from tieredckpt.tiers.catalog import Catalog, gather
from tieredckpt.tiers.facts import Holdings, TierFacts
from tieredckpt.tiers.file import FileTier, folder_of_url
from tieredckpt.tiers.memory import MemoryTier, SlotPool
from tieredckpt.tiers.quarantine import QuarantineMarks


def namespaces(runtime_dir: Path) -> list[str]:
    """The namespaces that a runtime folder holds, sorted; none if there is no such folder."""
    try:
        return sorted(each.name for each in (runtime_dir / "ns").iterdir() if each.is_dir())
    except FileNotFoundError:
        return []


def open_memory(runtime_dir: Path, namespace: str) -> MemoryTier | None:
    """The memory tier as it lies there, or None if there is none.

    Raises TierUnavailableError: it cannot be read.
    """
    folder = runtime_dir / "ns" / namespace
    if not folder.is_dir() or not (runtime_dir / "slots").is_dir():
        return None
    pool = SlotPool(runtime_dir / "slots")
    pool.scan(sweep=False)
    return MemoryTier(pool, folder, namespace, read_only=True)


@contextmanager
def open_tiers(
    config: Config | None, runtime_dir: Path, namespace: str
) -> Iterator[dict[str, Tier | TierUnavailableError]]:
    """The tiers by name, cheapest first; one that cannot be read is there as its error."""
    tiers: dict[str, Tier | TierUnavailableError] = {}
    try:
        memory = open_memory(runtime_dir, namespace)
        if memory is not None:
            tiers["memory"] = memory
    except TierUnavailableError as error:
        tiers["memory"] = error
    try:
        for each in config.tiers if config else ():
            try:
                tiers[each.name] = FileTier(
                    each.name,
                    folder_of_url(each.url),
                    namespace,
                    scope=Scope(each.scope),
                    read_only=True,
                )
            except TierUnavailableError as error:
                tiers[each.name] = error
        yield tiers
    finally:
        for tier in tiers.values():
            if isinstance(tier, FileTier):
                tier.close()


def read_holdings(config: Config | None, runtime_dir: Path, namespace: str) -> Holdings:
    """What the agent would report. A tier that cannot be read is reported as unavailable."""
    facts: list[TierFacts] = []
    attempts: dict[bytes, None] = {}
    with open_tiers(config, runtime_dir, namespace) as tiers:
        memory = tiers.get("memory")
        marks = QuarantineMarks(memory) if isinstance(memory, MemoryTier) else None
        scopes = {each.name: each.scope for each in config.tiers} if config else {}
        for name, tier in tiers.items():
            kind: Literal["memory", "file"] = "memory" if name == "memory" else "file"
            if isinstance(tier, TierUnavailableError):
                facts.append(
                    TierFacts(
                        tier=name,
                        scope=scopes.get(name, "host"),
                        kind=kind,
                        available=False,
                        error=str(tier),
                    )
                )
                continue
            catalog = Catalog(tier)
            facts.append(gather(catalog, kind=kind, marks=marks))
            if facts[-1].available:
                found = catalog.load().attempts
                attempts.update(
                    dict.fromkeys(each.data for each in found if each.record and each.data)
                )
    return Holdings(
        host_id=host_id(os.environ),
        namespace=namespace,
        attempts=tuple(attempts),
        tiers=tuple(facts),
    )
