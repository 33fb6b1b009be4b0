"""Which of a file's cases are made into tests: the nightly ones only where they may be run."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def parametrize(metafunc: pytest.Metafunc, quick: Iterable[Any], nightly: Iterable[Any]) -> None:
    """Give the argument ``case`` of a test all ``quick`` cases, and the ``nightly`` ones marked.

    A run of `make test` makes thousands of nightly cases in each worker only to leave them out:
    so it does not make them.
    """
    if "case" not in metafunc.fixturenames:
        return
    cases = [pytest.param(case, id=str(case)) for case in quick]
    if metafunc.config.option.markexpr != "not nightly":
        cases += [pytest.param(c, id=str(c), marks=pytest.mark.nightly) for c in nightly]
    metafunc.parametrize("case", cases)
