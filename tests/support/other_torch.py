"""Frameworks that do not import with this torch: prints pytest's options that leave them out."""

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


def main() -> None:
    """Import each in this process; what fails is named on stderr."""
    for name, files in USED.items():
        try:
            importlib.import_module(name)
        except Exception as error:  # of a framework with a torch that it does not know
            text = f"{name} does not import with torch {torch.__version__} ({error!r}): skipped are"
            print(text, ", ".join(files), file=sys.stderr)
            print(*(f"--ignore=tests/integration/test_{each}.py" for each in files))


if __name__ == "__main__":
    main()
