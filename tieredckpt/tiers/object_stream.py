"""One large object to a store of which we know no more than obstore does: streamed, not resumed."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from tieredckpt.tiers.base import ByteSource
from tieredckpt.tiers.object_pace import Pace
from tieredckpt.tiers.object_store import ExistsError, store_call

if TYPE_CHECKING:
    from obstore.store import ObjectStore


def put_stream(
    store: ObjectStore,
    path: str,
    source: ByteSource,
    *,
    tier: str,
    part_bytes: int,
    concurrency: int,
    pace: Pace,
    attributes: dict[str, str],
) -> bool:
    """Store the object; False if the key is taken. In memory: ``concurrency`` parts and two more.

    An object of several parts is not put under a condition, which these stores' clients do not
    offer: two uploads of one segment are the same bytes.

    Raises:
        TieredCkptError: What the source raised; CapacityError, TierUnavailableError.
    """
    import obstore

    never = threading.Event()

    def filled(offset: int) -> bytearray:
        # A new one each time: the client keeps what it is given until it has sent it.
        run = bytearray(min(part_bytes, source.size - offset))
        if run:
            source.read_into(offset, memoryview(run))
            pace.send(len(run), never)
        return run

    doing = f"upload {path}"
    if source.size <= part_bytes:
        run = filled(0)
        try:
            with store_call(tier, doing, outcome="unknown", needed_bytes=source.size):
                obstore.put(store, path, run, mode="create", attributes=attributes)
        except ExistsError:
            return False
        return True
    with store_call(tier, doing, needed_bytes=source.size):
        writer = obstore.open_writer(
            store,
            path,
            attributes=attributes,
            buffer_size=part_bytes,
            max_concurrency=concurrency,
        )
    # Without close() nothing becomes visible; the parts that were sent are left to a rule of the
    # bucket. The source is read in this thread, not from inside the client, which allows no calls
    # of its own there: the source may be an object in a store, too.
    for offset in range(0, source.size, part_bytes):
        run = filled(offset)
        with store_call(tier, doing, needed_bytes=source.size):
            writer.write(run)
    with store_call(tier, doing, outcome="unknown", needed_bytes=source.size):
        writer.close()
    return True
