"""Folders of the conformance suite lie where a run of the tests removes them."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from tests.support.leftovers import shm


@pytest.fixture(scope="session", autouse=True)
def _folders_of_the_run() -> Iterator[None]:
    # Not imported here: most tests of this folder need no torch.
    suite = sys.modules.get("tieredckpt.testing.dcp.suite")
    with pytest.MonkeyPatch.context() as patch:
        if suite is not None:
            patch.setattr(suite, "SHM", shm())
        yield
