"""What the suite for tiers stores: valid segments, a source that is watched, bad keys."""

from __future__ import annotations

import random
from collections.abc import Callable

from tieredckpt.errors import IntegrityError
from tieredckpt.format.digest import digest
from tieredckpt.format.segment import BLOCK_BYTES, ItemSpec, encode_footer, lay_out

HOSTILE_KEYS = (
    "", "/", ".", "..", "plans", "plans/", "/plans/x", "plans//x", "plans/../x", "../x", "plans/.x",
    "plans/x/../../../y", "plans/x\0", "plans/x\n", "plans/é", "plans/a b", "tmp/x",
    "plans/" + "x" * 129, "a/b/c/d/e", "plans/..", "plans\\x", "plans/x/",
)  # fmt: skip


def sample_segment(segment_id: str, data_bytes: int, seed: int = 0) -> bytes:
    """A valid segment with one tensor of ``data_bytes`` bytes of noise."""
    spec = ItemSpec("noise", "tensor", data_bytes, "uint8", (data_bytes,), (0,), (data_bytes,))
    layout = lay_out([spec])
    data = random.Random(seed).randbytes(data_bytes).ljust(layout.data_bytes, b"\0")
    blocks = (data[at : at + BLOCK_BYTES] for at in range(0, len(data), BLOCK_BYTES))
    digests = b"".join(map(digest, blocks))
    return data + encode_footer(layout, digests, bytes.fromhex(segment_id))


def segment_name(number: int) -> str:
    """Segment id number so-and-so, 32 hex digits."""
    return f"{number:032x}"


class SampleSource:
    """A byte source over ``data`` that checks how it is read.

    Args:
        data: What it gives.
        fail_at: Raise IntegrityError when this offset is asked for; None never does.
        during: Called at each read.
    """

    def __init__(
        self,
        data: bytes,
        *,
        fail_at: int | None = None,
        during: Callable[[], None] = lambda: None,
    ) -> None:
        self.data = data
        self.size = len(data)
        self.reached = 0
        """Bytes given so far."""
        self._fail_at = fail_at
        self._during = during

    def read_into(self, offset: int, into: memoryview) -> None:
        """See :class:`tieredckpt.storage.base.ByteSource`."""
        assert offset == self.reached, "a source is read once, in ascending order"
        assert offset % BLOCK_BYTES == 0, "runs start on a block boundary"
        assert 0 < len(into) <= self.size - offset
        self._during()
        if self._fail_at is not None and offset <= self._fail_at < offset + len(into):
            raise IntegrityError("the source is damaged", key="source")
        into[:] = self.data[offset : offset + len(into)]
        self.reached += len(into)
