"""Deletes what a benchmark left: its agent, its memory, its namespace in the tiers."""

from __future__ import annotations

import os
import shutil
import time
from contextlib import closing, suppress
from pathlib import Path

from tieredckpt.bench.settings import Settings
from tieredckpt.config.schema import load_config
from tieredckpt.errors import AgentError
from tieredckpt.recovery.folders import open_tier
from tieredckpt.rpc.agent_client import AgentClient
from tieredckpt.storage.backends.file import folder_of_url

END_S = 60.0
"""Longest wait for an agent to end."""
FOLDERS = (
    "manifests", "pending", "plans", "segments", "attempts", "records", "claims", "notices",
    "verdicts", "quarantine",
)  # fmt: skip
"""Of a store's keys; manifests first, so that nothing counts as a checkpoint meanwhile."""


def clean(settings: Settings) -> None:
    """End the benchmark's agent, and delete its memory and what is in the tiers.

    Raises TieredCkptError: a tier cannot be emptied; the message names it.
    """
    end_agent(settings)
    for folder in settings.folders.values():
        shutil.rmtree(folder, ignore_errors=True)
    for name in tiers(settings):
        empty_tier(settings, name)


def tiers(settings: Settings) -> list[str]:
    """Names of the configured tiers, the nearest first."""
    return [each.name for each in load_config(settings.config or None, os.environ).tiers]


def end_agent(settings: Settings) -> None:
    """End the benchmark's agent, wait until it has ended, and delete its memory."""
    folder, until_s = Path(settings.runtime_dir), time.monotonic() + END_S
    with suppress(AgentError), closing(AgentClient(folder)) as client:
        process = Path(f"/proc/{client.status().health.pid}")
        client.shutdown()
        while process.exists() and time.monotonic() < until_s:
            time.sleep(0.02)  # it still uses the tiers
    shutil.rmtree(folder, ignore_errors=True)


def empty_tier(settings: Settings, name: str) -> None:
    """Delete all objects of the benchmark's namespace in a tier; no agent uses it."""
    config = load_config(settings.config or None, os.environ)
    (spec,) = (each for each in config.tiers if each.name == name)
    with closing(open_tier(spec, settings.namespace, read_only=False)) as tier:
        for folder in FOLDERS:
            tier.delete_many([info.key for info in tier.list(f"{folder}/")])
    if spec.is_file:
        root = folder_of_url(spec.url) / settings.namespace
        shutil.rmtree(root, ignore_errors=True)
