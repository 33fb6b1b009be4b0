"""What cannot pass with this torch, through no fault of ours: prints pytest options to skip it."""

from __future__ import annotations

import importlib
import sys

import torch

USED = {
    "accelerate": ("frameworks_accelerate",),
    "lightning.pytorch": ("frameworks_lightning", "examples_frameworks"),
    "torchao.optim": ("wrappers",),
    "torchdata.stateful_dataloader": ("data_cache", "data_faults", "loader_workers"),
    "torchtitan.components.checkpointer": ("frameworks_torchtitan",),
    "transformers": ("examples_frameworks",),
}
"""The test files that run each framework's code."""
FAULTS = {
    "2.11": (
        "its DefaultStager cannot copy an OrderedDict (KeyError: <class 'type'>)",
        "conformance/test_dcp.py::TestMemory::test_scenario[async-save-with-the-default-stager]",
        "integration/test_async_save.py::test_all_stagers",
    ),
}
"""Faults of a release of torch: the reason, and the tests that meet it."""


def main() -> None:
    """Import each framework in this process; what is left out is named on stderr."""
    for name, files in USED.items():
        try:
            importlib.import_module(name)
        except Exception as error:  # of a framework with a torch that it does not know
            text = f"{name} does not import with torch {torch.__version__} ({error!r}): skipped are"
            print(text, ", ".join(files), file=sys.stderr)
            print(*(f"--ignore=tests/integration/test_{each}.py" for each in files))
    why, *tests = FAULTS.get(".".join(torch.__version__.split(".")[:2]), ("",))
    if tests:
        print(f"torch {torch.__version__}: {why}: skipped are", *tests, sep="\n  ", file=sys.stderr)
        print(*(f"--deselect=tests/{each}" for each in tests))


if __name__ == "__main__":
    main()
