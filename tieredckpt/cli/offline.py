"""What a host holds, read from the slot folder, the file tiers and stores, without an agent.

Only reads: nothing is locked for writing, made, adopted or swept, so it is safe beside anything.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tieredckpt.agent.runtime import host_id
from tieredckpt.errors import TierUnavailableError
from tieredckpt.policy.config import Config, TierConfig
from tieredckpt.tiers.base import Scope, Tier
from tieredckpt.tiers.catalog import Catalog, gather
from tieredckpt.tiers.facts import Holdings, TierFacts, TierKind
from tieredckpt.tiers.file import FileTier, folder_of_url
from tieredckpt.tiers.memory import MemoryTier, SlotPool
from tieredckpt.tiers.object_settings import ObjectSettings
from tieredckpt.tiers.open_store import open_store
from tieredckpt.tiers.quarantine import QuarantineMarks
from tieredckpt.tiers.shared_catalog import SharedCatalog


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
                tiers[each.name] = open_tier(each, namespace)
            except TierUnavailableError as error:
                tiers[each.name] = error
        yield tiers
    finally:
        for tier in tiers.values():
            if isinstance(tier, Tier):
                tier.close()


def open_tier(config: TierConfig, namespace: str, *, read_only: bool = True) -> Tier:
    """One tier below memory; a folder for reading, unless it is said otherwise.

    Raises:
        ConfigError: The package that reads it is not installed.
        TierUnavailableError: It does not answer.
    """
    if config.is_file:
        return FileTier(
            config.name,
            folder_of_url(config.url),
            namespace,
            scope=Scope(config.scope),
            read_only=read_only,
        )
    settings = ObjectSettings(**dataclasses.asdict(config.object))
    return open_store(config.name, config.url, namespace, settings)


def _records(catalog: Catalog) -> tuple[bytes, ...]:
    try:
        catalog.read_records()
    except TierUnavailableError:
        return ()  # it was there a moment ago; what it holds is said without its marks
    return catalog.encoded_records(catalog.record_ids())


def read_holdings(config: Config | None, runtime_dir: Path, namespace: str) -> Holdings:
    """What the agent would report. A tier that cannot be read is reported as unavailable."""
    facts: list[TierFacts] = []
    attempts: dict[bytes, None] = {}
    records: dict[bytes, None] = {}
    with open_tiers(config, runtime_dir, namespace) as tiers:
        memory = tiers.get("memory")
        marks = QuarantineMarks(memory) if isinstance(memory, MemoryTier) else None
        known = config.tiers if config else ()
        scopes = {each.name: each.scope for each in known}
        kinds: dict[str, TierKind] = {
            each.name: "file" if each.is_file else "object" for each in known
        }
        for name, tier in tiers.items():
            kind: TierKind = "memory" if name == "memory" else kinds[name]
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
            catalog = SharedCatalog(tier) if tier.scope is Scope.SHARED else Catalog(tier)
            facts.append(gather(catalog, kind=kind, marks=marks))
            if facts[-1].available:
                found = catalog.load().attempts
                attempts.update(
                    dict.fromkeys(each.data for each in found if each.record and each.data)
                )
                records |= dict.fromkeys(_records(catalog))
    return Holdings(
        host_id=host_id(os.environ),
        namespace=namespace,
        attempts=tuple(attempts),
        tiers=tuple(facts),
        records=tuple(records),
    )
