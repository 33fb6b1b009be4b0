"""Which of a file's cases are made into tests: the nightly ones only where they may be run."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def parametrize(
    metafunc: pytest.Metafunc, gate: Iterable[Any], full: Iterable[Any], nightly: Iterable[Any]
) -> None:
    """Give the argument ``case`` of a test all cases of the gate, and the others marked.

    Each worker would make thousands of nightly cases only to leave them out: so a run that leaves
    them out does not make them.
    """
    if "case" not in metafunc.fixturenames:
        return
    cases = [pytest.param(case, id=str(case)) for case in gate]
    cases += [pytest.param(case, id=str(case), marks=pytest.mark.full) for case in full]
    if "not nightly" not in metafunc.config.option.markexpr:
        cases += [pytest.param(c, id=str(c), marks=pytest.mark.nightly) for c in nightly]
    metafunc.parametrize("case", cases)
