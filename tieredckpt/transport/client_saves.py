"""The requests of :class:`tieredckpt.transport.client.AgentClient` that a save is made of."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Literal

from tieredckpt.format.manifest import Followed
from tieredckpt.transport import messages as m
from tieredckpt.transport.client_requests import Requests


class SaveRequests(Requests):
    """See the module."""

    fates: Callable[[], tuple[m.SealedBefore, ...]] = tuple
    """What this process has sealed so far, and what became of it."""

    def prepare(self, segment_bytes: int) -> m.Prepared:
        """Make this session's ring for segments of up to ``segment_bytes``.

        Raises CapacityError if the ring cannot fit; nothing was allocated then.
        """
        request = m.Prepare(session_id=self.session_id, segment_bytes=segment_bytes)
        return self._post("prepare", request, m.Prepared)

    def reserve(self, segment_bytes: int) -> m.Grant:
        """A slot to write one segment into; says how the saves before ended (:attr:`fates`).

        Raises CapacityError if no slot became free within ``memory.wait``.
        """
        request = m.Reserve(
            session_id=self.session_id,
            segment_bytes=segment_bytes,
            asked_at_ns=time.monotonic_ns(),
            before=self.fates(),
        )
        return self._post("reserve", request, m.Grant)

    def seal(self, segment_id: str, slot_id: str, segment_bytes: int, root: str) -> m.Sealed:
        """Declare a written segment complete: it is handed out no more for writing.

        Raises:
            IntegrityError: The slot's trailer does not say what the arguments say.
            NotFoundError: The slot is not reserved for this segment any more.
        """
        request = m.Seal(
            session_id=self.session_id,
            segment_id=segment_id,
            slot_id=slot_id,
            segment_bytes=segment_bytes,
            root=root,
        )
        return self._post("seal", request, m.Sealed)

    def commit(self, manifest: bytes, plan: bytes | None = None, *, attempt: bytes) -> m.Committed:
        """Make a checkpoint exist in memory. See :class:`tieredckpt.transport.messages.Commit`.

        Raises:
            StaleAttemptError: A newer attempt was opened; nothing was committed. Field
                ``same_run``: by other ranks of this run, so it may be adopted.
            UsageError: Another live session of this run saves into the stream.
            NotFoundError, IntegrityError: A segment is not sealed here as the manifest says.
            AgentError: With ``outcome="unknown"`` the checkpoint may exist.
        """
        request = m.Commit(
            session_id=self.session_id, run=self.run_id, manifest=manifest, plan=plan,
            attempt=attempt,
        )  # fmt: skip
        return self._pack("commit", request, m.Committed)

    def save_failed(self, segments: Sequence[str], skipped: int) -> None:
        """Say that these sealed segments belong to no checkpoint and never will.

        ``skipped``: saves that this process has skipped so far.
        """
        request = m.SaveFailed(
            session_id=self.session_id, segments=tuple(segments), skipped=skipped
        )
        self._tell("failed", request)

    def contribute(self, request: m.Contribute) -> m.Gathered:
        """This rank's part of a save without collectives; see the message."""
        return self._pack("contribute", request, m.Gathered)

    def ask_gathering(
        self,
        key: m.GatheringKey,
        rank: int | None = None,
        give_up: m.ErrorReply | None = None,
    ) -> m.Gathered:
        """What has become of a save without collectives; ``give_up`` fails it if it is open."""
        request = m.AskGathering(session_id=self.session_id, key=key, rank=rank, give_up=give_up)
        return self._post("gathering", request, m.Gathered)

    def open_attempt(
        self,
        attempt_id: str,
        bases: tuple[m.BaseSpec, ...] = (),
        *,
        followed: tuple[Followed, ...] = (),
        cause: Literal["load", "save"] = "load",
        silent: tuple[str, ...] = (),
    ) -> bytes:
        """Open a new attempt; returns the encoded AttemptRecord.

        See :class:`tieredckpt.transport.messages.OpenAttempt`.

        Raises:
            StaleAttemptError: Another run has taken over from this one.
            NotFoundError: A checkpoint to go on from does not exist any more.
            UsageError: It is of another stream, or another live session saves into the stream.
        """
        request = m.OpenAttempt(
            session_id=self.session_id, attempt_id=attempt_id, run=self.run_id,
            followed=followed, cause=cause, bases=bases, silent=silent,
        )  # fmt: skip
        return self._tell("attempts", request)
