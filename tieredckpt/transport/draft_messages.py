"""What a trainer says of drafts: segments that other hosts' ranks write, written here as well."""

from __future__ import annotations

from typing import Annotated

import msgspec

from tieredckpt.transport.message_base import Count, HexId, Message, StreamName

DRAFTS_MAX = 1 << 14
"""Of one rank and save."""


class ReserveDraft(Message, frozen=True):
    """POST /v1/namespaces/{ns}/reserve-draft -> Grant: a slot for one draft, never waited for."""

    session_id: str
    segment_bytes: Annotated[int, msgspec.Meta(ge=1, lt=1 << 62)]
    stream: StreamName
    step: Count
    drafts: Annotated[int, msgspec.Meta(ge=1, le=DRAFTS_MAX)]
    """How many the session writes of each save."""


class SealDraft(Message, frozen=True):
    """POST /v1/namespaces/{ns}/seal-draft: the draft is whole. Idempotent by ``segment_id``.

    It is no copy of anything until the manifest of this stream and step names, as segment number
    ``ordinal``, one that is equal.
    """

    session_id: str
    segment_id: HexId
    slot_id: str
    segment_bytes: Annotated[int, msgspec.Meta(ge=4096, lt=1 << 62)]
    root: HexId
    stream: StreamName
    step: Count
    ordinal: Annotated[int, msgspec.Meta(ge=0, lt=1 << 17)]
