"""What forked children have imported: see ``forked`` in :mod:`benchmarks.processes`."""

from __future__ import annotations

import contextlib
import importlib

for _name in (
    "torch.distributed.checkpoint",
    # What torch and numpy import at the first DTensor, the first save and the first load: a second
    # of processor time for every rank.
    "torch._dynamo",
    "torch.onnx",
    "torch._functorch.deprecated",
    "torch.utils.serialization.config",
    "numpy.random",
    "numpy.fft",
    "benchmarks.registry",
):
    with contextlib.suppress(ImportError):  # another version of torch has other modules
        importlib.import_module(_name)
