"""Prints pytest's arguments for the test files that are named, less what this torch cannot pass."""

from __future__ import annotations

import importlib
import sys

import torch

from tieredckpt.dcp.torch_release import LIVE, changed

USED = {
    "accelerate": ("frameworks_accelerate",),
    "lightning.pytorch": ("frameworks_lightning", "examples_frameworks"),
    "torchao.optim": ("wrappers",),
    "torchdata.stateful_dataloader": ("data_cache", "data_faults", "loader_workers"),
    "torchtitan.components.checkpointer": ("frameworks_torchtitan",),
    "transformers": ("examples_frameworks",),
}
"""The test files that run each framework's code."""
_PLAN_CACHING = "its plan caching raises TypeError after a save that failed while it was planned"
LIVE_TESTS = (
    "integration/test_live", "unit/live",
    "integration/test_data_cache.py::test_live_recovery_goes_on_with_the_rows_of_the_step",
    "unit/dcp/test_torch_release.py::test_this_torch_has_the_private_parts",
)  # fmt: skip
"""Beginnings of names, of a torch that live recovery refuses."""
FAULTS = {
    "2.10": {"integration/test_plan_caching.py::test_failed_saves_leave_no_false_plan":
             _PLAN_CACHING},
    "2.11": {
        "conformance/test_dcp.py::TestMemory::test_scenario[async-save-with-the-default-stager]":
            "its DefaultStager cannot copy an OrderedDict",
        "integration/test_async_save.py::test_all_stagers":
            "its DefaultStager cannot copy an OrderedDict",
        "integration/test_plan_caching.py::test_failed_saves_leave_no_false_plan":
            _PLAN_CACHING,
    }
}  # fmt: skip
"""By release of torch: the tests that meet a fault of it, and the fault."""


def main() -> None:
    """Import each framework in this process; what is left out is named on stderr."""
    files = dict.fromkeys(sys.argv[1:])
    for name, names in USED.items():
        try:
            importlib.import_module(name)
        except Exception as error:  # of a framework with a torch that it does not know
            text = f"{name} does not import with torch {torch.__version__} ({error!r}): skipped are"
            print(text, ", ".join(names), file=sys.stderr)
            for each in names:  # pytest ignores none that it is given
                files.pop(f"tests/integration/test_{each}.py", None)
    if lacks := changed(LIVE):
        print(f"live recovery refuses torch {torch.__version__}: skipped are its tests", lacks,
              file=sys.stderr)  # fmt: skip
        for each in LIVE_TESTS:
            print(f"--deselect=tests/{each}")
    for test, fault in FAULTS.get(".".join(torch.__version__.split(".")[:2]), {}).items():
        print(f"torch {torch.__version__}: {fault}: skipped is {test}", file=sys.stderr)
        print(f"--deselect=tests/{test}")
    print(*files)


if __name__ == "__main__":
    main()
