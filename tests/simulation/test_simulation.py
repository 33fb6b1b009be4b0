"""The fault layer without processes: the product's code on a file system that forgets.

Run one case with its trace: ``python -m tests.simulation.case SEED``.
"""

from __future__ import annotations

import ast
import importlib
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.simulation.case import CaseFailed, run_case, shrink
from tests.simulation.known_seeds import check_known_seed
from tests.simulation.mutations import MUTATIONS, NOT_VISIBLE, first_found
from tests.simulation.system import MODULES, simulated
from tests.support import counts

CASES = 400
FULL_CASES = 2000
NIGHTLY_CASES = int(os.environ.get("TIEREDCKPT_TEST_SIMULATED_CASES", "200000"))

REGRESSIONS = {
    2173: "a manifest that a failed spill had named, but not synced, was done after a restart",
    3468: "a run that had saved nothing left one aside that had, once its agent had forgotten it",
    4535: "a save in doubt was taken for other ranks' by the attempt that went on from it",
    13096: "a manifest that a failed spill had named, but not synced, was done after a load",
}
"""Seeds that find what was wrong with the product once (see mutations.py), and what it was."""

FOUND_BY = {
    "a folder is never synced": 3,
    "a file is named without being synced": 3,
    "the folder is not synced after a name (publish)": 17,
    "the manifest is spilled before the segments": 0,
    "blocks are not compared with their digests": 28,
    "commits of an older attempt are accepted": 13,
    "a commit does not look whether the plan is there": 0,
    "retention leaves one checkpoint less": 15,
    "abandoned checkpoints are candidates": 166,
}
"""Mutations that a few seeds find, and the first of these."""


@pytest.fixture(autouse=True)
def _simulated() -> Iterator[None]:
    with simulated(), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # "other streams hold checkpoints"
        yield


def run_seeds(seeds: range) -> None:
    found = counts.of("simulation")
    for seed in seeds:
        try:
            run_case(seed, found)
        except CaseFailed:
            run_case(seed, length=shrink(seed))
            raise


def test_what_is_intact_is_restored_and_nothing_is_lost():
    run_seeds(range(CASES))


@pytest.mark.full
@pytest.mark.parametrize("chunk", range(4))
def test_more_cases(chunk: int):
    run_seeds(range(CASES, FULL_CASES)[chunk::4])


@pytest.mark.parametrize("seed", REGRESSIONS)
def test_seeds_that_failed_once(seed: int):
    run_case(seed)


@pytest.mark.parametrize("name", FOUND_BY)
def test_what_is_broken_on_purpose_is_found(name: str):
    check_known_seed(FOUND_BY[name], lambda seeds: first_found(name, seeds), "FOUND_BY")


@pytest.mark.nightly
@pytest.mark.timeout(2 * 3600)
@pytest.mark.parametrize("name", sorted(set(MUTATIONS) - set(FOUND_BY) - set(NOT_VISIBLE)))
def test_what_is_broken_on_purpose_is_found_in_many_cases(name: str):
    assert first_found(name, range(20_000)) is not None


@pytest.mark.nightly
@pytest.mark.timeout(4 * 3600)
def test_many_more_cases():
    run_seeds(range(FULL_CASES, FULL_CASES + NIGHTLY_CASES))


def test_a_seed_does_the_same_every_time():
    for seed in range(10):
        first, second = run_case(seed), run_case(seed)
        assert first.trace == second.trace
        assert first.host.fs.calls == second.host.fs.calls


@pytest.mark.full
def test_every_module_that_reaches_the_system_is_simulated():
    """What runs in a case and imports os, fcntl or secrets is replaced there; nothing else is."""
    # In a process of its own: other tests have imported what no case runs.
    code = f"from {__name__} import check_modules, simulated\nwith simulated(): check_modules()"
    subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parents[2], check=True, timeout=120
    )


def check_modules() -> None:
    run_case(1)
    not_run = {
        # Sockets, processes, the start of an agent: the agent's shell, which the simulation is.
        "tieredckpt.agent.host.runtime", "tieredckpt.rpc.agent_client", "tieredckpt.rpc.fd_passing",
        "tieredckpt.rpc.http1",
        # Other hosts: a case is one host.
        "tieredckpt.agent.host.addresses", "tieredckpt.agent.host.listeners",
        "tieredckpt.agent.peering.failure_detector", "tieredckpt.agent.tables",
        *(name for name in sys.modules if name.startswith("tieredckpt.rpc.peer_")),
        "tieredckpt.rpc.auth", "tieredckpt.rpc.bulk", "tieredckpt.rpc.agent_server",
        # No case has a loader of data.
        "tieredckpt.agent.data_cache",
        # Reads tiers without an agent, for a process that only looks.
        "tieredckpt.recovery.folders",
        # Maps memory; only the trainer's ring and its destinations.
        "tieredckpt.storage.memory.mapping",
        # Replaced as a whole.
        "tieredckpt.storage.headroom",
        # Only reads the environment, or YAML.
        "tieredckpt.failpoints", "tieredckpt.config.schema", "tieredckpt.config.reader",
    }  # fmt: skip
    parts = ("agent", "storage", "recovery", "config", "policy", "format", "rpc")
    for name, module in list(sys.modules.items()):
        if not name.startswith(tuple(f"tieredckpt.{part}." for part in parts)) or name in not_run:
            continue
        tree = ast.parse(Path(str(module.__file__)).read_text("utf-8"))
        imported = {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
        reaches = imported & {"os", "fcntl", "secrets", "shutil", "tempfile", "io", "socket"}
        assert reaches == set(MODULES.get(name, ())), f"{name}: {reaches}"
    for name, attributes in MODULES.items():
        module = importlib.import_module(name)
        assert all(type(getattr(module, each)).__name__ == "SimpleNamespace" for each in attributes)
