"""Caches batches on each host, so that they outlive the process that loaded them.

``tieredckpt.data.cached(loader, engine)`` wraps a loader; see docs/use/data.md. Workers with
``worker_init_fn=tieredckpt.data.ignore_preemption`` outlive the signal of a preemption; see
docs/use/preemption.md.
"""

from tieredckpt.data.batches import Cached, cached
from tieredckpt.dcp.loader_workers import ignore_preemption

__all__ = ["Cached", "cached", "ignore_preemption"]
