"""Hosts are lost, cut off and slowed down in every operation; see tests/support/host_cases.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import host_cases
from tests.support.choice import parametrize
from tests.support.counts import of
from tests.support.host_bench import HostCase


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    parametrize(metafunc, *host_cases.chosen())


def test_hosts(case: HostCase, tmp_path: Path):
    """The newest checkpoint that was reported as replicated, or a newer one, on all ranks."""
    of("hosts")[case.operation, case.fault] += 1
    host_cases.run_case(case, tmp_path)
