"""Caches batches on each host, so that they outlive the process that loaded them.

``tieredckpt.data.cached(loader, engine)`` wraps a loader; see docs/use/data.md.
"""

from tieredckpt.data.batches import Cached, cached

__all__ = ["Cached", "cached"]
