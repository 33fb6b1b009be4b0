"""Conformance suite for DCP plug-ins: any ``StorageWriter`` and ``StorageReader``.

For pytest, in a module that can be imported by its name::

    from tieredckpt.testing.dcp_suite import DcpSuite, Storage

    class MyStorage(Storage):
        def writer(self, step, stream="main"):
            return MyWriter(self.folder / stream / f"step-{step}")

        def reader(self, step, stream="main"):
            return MyReader(self.folder / stream / f"step-{step}")

    class TestMine(DcpSuite):
        storage = MyStorage

On the command line, with the name of such a class, or of a function that takes a checkpoint's path
and returns (writer, reader)::

    python -m tieredckpt.testing.dcp_suite --factory my_package.module:MyStorage
"""

from __future__ import annotations

import sys
from typing import Any, ClassVar

from tieredckpt.testing.dcp.storage import PairStorage, StockStorage, Storage
from tieredckpt.testing.dcp.suite import Outcome, Suite, select

__all__ = ["DcpSuite", "Outcome", "PairStorage", "StockStorage", "Storage", "Suite", "select"]


class DcpSuite:
    """All scenarios as one parametrised test; subclass it and set ``storage``.

    A scenario that is in ``known_failures`` must fail: when it passes, the test fails, so that the
    list stays true.
    """

    storage: ClassVar[Any] = None
    """A subclass of :class:`Storage`, or a function from a path to (writer, reader)."""

    known_failures: ClassVar[dict[str, str]] = {}
    """Scenario -> why the plug-in cannot do it."""

    only: ClassVar[str | None] = None
    """Run only scenarios that contain this in ``subject/name``; several with `` or `` between."""

    _suite: ClassVar[Suite]

    @classmethod
    def setup_class(cls) -> None:
        """Start the plug-in; pytest calls it."""
        storage = vars(cls).get("storage", cls.storage)
        # A plain function in a class body would otherwise have become a method.
        storage = storage.__func__ if isinstance(storage, staticmethod) else storage
        cls._suite = Suite(storage)
        cls._suite.__enter__()

    @classmethod
    def teardown_class(cls) -> None:
        """Stop it, and leave nothing behind; pytest calls it."""
        cls._suite.__exit__(None, None, None)

    def pytest_generate_tests(self, metafunc: Any) -> None:
        """One test for each scenario; pytest calls it."""
        if "scenario" in metafunc.fixturenames:
            metafunc.parametrize("scenario", select(type(self).only))

    def test_known_failures_exist(self) -> None:
        """Every declared failure is the name of a scenario."""
        assert set(self.known_failures) <= set(select())

    def test_scenario(self, scenario: str) -> None:
        """One scenario."""
        outcome = self._suite.run(scenario)
        known = self.known_failures.get(scenario)
        if known is None:
            assert outcome.passed, f"{outcome.scenario.title}: {outcome.reason}\n{outcome.details}"
        else:
            assert not outcome.passed, f"declared as a failure, and passes: {known}"


if __name__ == "__main__":
    from tieredckpt.testing.dcp.command import main

    sys.exit(main())
