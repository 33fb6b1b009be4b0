"""How a process opens an attempt: what it goes on from, and what it knows."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from tieredckpt.transport.message_base import Message


class BaseSpec(Message, frozen=True):
    """Where a stream goes on from."""

    stream: str
    save_id: str | None
    """The checkpoint that was loaded; None: the stream begins anew."""
    manifest: bytes = b""
    """Its encoded manifest, if it was loaded from other hosts: the agent may not have it."""


class OpenAttempt(Message, frozen=True):
    """POST /v1/namespaces/{ns}/attempts -> the encoded AttemptRecord. Idempotent by ``attempt_id``.

    Streams that are not named go on as the newest attempt left them.
    """

    session_id: str
    attempt_id: str
    run: str
    """The caller's run, as in Commit. A run that another one has taken over from is refused."""
    known: Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
    """Number of the newest attempt of its run that the caller knows of; 0: none."""
    cause: Literal["load", "save"]
    """A load may take a stream over from the session that saved into it last, a save may not."""
    bases: tuple[BaseSpec, ...]
    seen: Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)] | None = None
    """Number of the newest attempt of all when the caller chose what to load: a newer one of
    another run has gone on from there meanwhile, and is not abandoned. None: it chose nothing."""
    silent: Annotated[tuple[str, ...], msgspec.Meta(max_length=1 << 16)] = ()
    """Hosts that have just not answered the caller: they are asked again, but not waited for."""
