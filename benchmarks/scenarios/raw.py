"""The raw read of a slot as a measured process of its own: imports neither torch nor tieredckpt."""

from __future__ import annotations

from benchmarks import limits
from benchmarks.measure import Report, Samples
from benchmarks.processes import Setup


def raw_process(setup: Setup, _report: Report, *, slot: str, method: str, threads: int) -> Samples:
    """One raw read of the slot file, in a process that has done nothing else."""
    sizes = [tensor.size_bytes for tensor in setup.shape.tensors()]
    limits.back_free_memory(setup.work_bytes)
    return {"raw": [limits.raw_read(slot, sizes, method, threads)]}
