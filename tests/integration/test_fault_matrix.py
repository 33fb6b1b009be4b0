"""The fault matrix: every operation, every stage, every fault; see tests/support/matrix.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import matrix
from tests.support.choice import parametrize
from tests.support.counts import of
from tests.support.fault_cases import run_case


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    parametrize(metafunc, *matrix.chosen_cases())


def test_fault(case: matrix.Case, tmp_path: Path):
    """The newest intact checkpoint is restored bit-exact, or an error names what was refused."""
    of("processes")[case.operation, case.fault] += 1
    run_case(case, tmp_path)
