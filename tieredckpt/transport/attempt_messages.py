"""How a process opens an attempt: what it goes on from, and what it knows."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from tieredckpt.format.manifest import MAX_FOLLOWED, MAX_LINEAGE, Ancestor, Followed
from tieredckpt.transport.message_base import Message


class BaseSpec(Message, frozen=True):
    """Where a stream goes on from."""

    stream: str
    save_id: str | None
    """The checkpoint that was loaded; None: the stream begins anew."""
    manifest: bytes = b""
    """Its encoded manifest: it may have been evicted since, or lie on other hosts only."""
    newest: Annotated[tuple[Ancestor, ...], msgspec.Meta(max_length=MAX_LINEAGE)] = ()
    """The line up to the newest checkpoint that was known when this one was chosen."""
    in_silence: bool = False
    """Not everybody could be asked for what is newer: it is left behind, and not abandoned."""


class OpenAttempt(Message, frozen=True):
    """POST /v1/namespaces/{ns}/attempts -> the encoded AttemptRecord. Idempotent by ``attempt_id``.

    Sent before the first save of a run, and when its line changes. Streams that are not named go on
    as the attempt left them that it follows. Nothing is on disk before the save itself.
    """

    session_id: str
    attempt_id: str
    run: str
    """The caller's run, as in Commit. A run that another one has taken over from is refused."""
    cause: Literal["load", "save"]
    """A load may take a stream over from the session that saved into it last, a save may not."""
    bases: tuple[BaseSpec, ...]
    followed: Annotated[tuple[Followed, ...], msgspec.Meta(max_length=MAX_FOLLOWED)] = ()
    """The attempts that the caller goes on from, first, and knows of: see ``timeline.Chain``."""
    silent: Annotated[tuple[str, ...], msgspec.Meta(max_length=1 << 16)] = ()
    """Hosts that have just not answered the caller: they are asked again, but not waited for."""
