"""The fault matrix: every operation, every stage, every fault; see tests/support/matrix.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import matrix
from tests.support.counts import of
from tests.support.fault_cases import run_case

_QUICK, _NIGHTLY = matrix.chosen_cases()


@pytest.mark.parametrize(
    "case",
    [
        *(pytest.param(case, id=str(case)) for case in _QUICK),
        *(pytest.param(case, id=str(case), marks=pytest.mark.nightly) for case in _NIGHTLY),
    ],
)
def test_fault(case: matrix.Case, tmp_path: Path):
    """The newest intact checkpoint is restored bit-exact, or an error names what was refused."""
    of("processes")[case.operation, case.fault] += 1
    run_case(case, tmp_path)
