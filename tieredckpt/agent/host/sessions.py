"""Sessions and their leases: a session lives as long as somebody holds its file's lock.

The file says whose session it is, so that an agent that starts anew knows which sessions still
run before they call again.
"""

from __future__ import annotations

import logging
import os
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import msgspec

from tieredckpt.errors import AgentError, TieredCkptError
from tieredckpt.format.envelope import RecordCodec
from tieredckpt.format.manifest import ID_PATTERN, HexId, Name, check_id
from tieredckpt.rpc.messages.agent import Grant, OpenSession
from tieredckpt.storage.folder import medium
from tieredckpt.storage.memory.slot import try_lock_exclusive

RECORD_BYTES_MAX = 4096

FULL_ADVICE = "free memory in the tmpfs of the runtime folder (agent.runtime_dir)"

log = logging.getLogger(__name__)


class Tickets(Protocol):
    """Where descriptors are offered; see :class:`tieredckpt.rpc.fd_passing.FdServer`."""

    def offer(self, fd: int) -> str:
        """Take ownership of ``fd``; returns its ticket."""

    def revoke(self, ticket: str) -> bool:
        """Close what was offered, unless it was fetched."""


class SessionRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of the lease file."""

    namespace: Name
    run: HexId
    local_rank: int
    local_world_size: int


LEASES = RecordCodec(b"TCKLEASE", SessionRecord, "lease", limit_bytes=RECORD_BYTES_MAX)


@dataclass(slots=True)
class Session:
    """One trainer process, as the agent knows it. Guarded by the node's lock."""

    session_id: str
    record: SessionRecord
    adopted: bool = False
    """An earlier agent knew it, and its process has not sent its configuration to this one."""
    lease_ticket: str = ""
    """The lease as offered; while nobody has fetched it the agent itself holds it."""
    slot_capacity: int = 0
    """Usable bytes of the slots that this session needs; 0 until it said so."""
    slots_coming: int = 0
    """Of its ring, which are just being made."""
    grant_ticket: str = ""
    """The slot granted last; revoked when another one is asked for."""
    reserve_asked_ns: int = 0
    """When it asked for a slot last, by its own clock."""
    next: Grant | None = None
    """The provisional grant that stands."""
    next_bytes: int = 0
    skipped_saves: int = 0
    opened: OpenSession | None = None
    """What its process has asked this agent."""
    sealed_s: float = float("-inf")
    """When it has sealed a segment, so saves, by the agent's clock."""
    promised: bool = field(default=False)
    """The slot of ``next`` still holds a segment that the next commit will free."""

    def asks(self, asked_at_ns: int) -> None:
        """It asked for a slot then, by its own clock. Raises AgentError: and again since."""
        if asked_at_ns < self.reserve_asked_ns:
            raise AgentError(
                "the save that asked for this slot was abandoned, and a later save has asked again",
                outcome="not_applied",
            )
        self.reserve_asked_ns = asked_at_ns

    @property
    def namespace(self) -> str:
        """The namespace that the session belongs to."""
        return self.record.namespace


class Leases:
    """The lease files in ``folder``. Thread-safe.

    Args:
        folder: ``<runtime dir>/sessions``; made if missing.
        tickets: Where leases are offered.
    """

    def __init__(self, folder: Path, tickets: Tickets) -> None:
        self._folder = folder
        self._tickets = tickets
        # Probing a lock takes it for a moment; nobody else may look at that moment.
        self._lock = threading.Lock()
        folder.mkdir(mode=0o700, exist_ok=True)

    def adopt(self) -> list[Session]:
        """The sessions whose lease somebody holds; files of ended ones are removed."""
        found = []
        for name in sorted(os.listdir(self._folder)):
            if not ID_PATTERN.fullmatch(name):
                continue
            record = self._read(name)
            if record is None or not self.is_held(name):
                self.end(name)
            else:
                found.append(Session(name, record, adopted=True))
        return found

    def _read(self, session_id: str) -> SessionRecord | None:
        try:
            with (self._folder / session_id).open("rb") as file:
                record, is_old = LEASES.decode_either(file.read(RECORD_BYTES_MAX))
            if is_old:
                with (self._folder / session_id).open("r+b") as file:
                    self._write(file.fileno(), record)
        except (OSError, TieredCkptError) as error:
            log.warning("lease file of session %s is unusable: %s", session_id, error)
            return None
        return record

    def _write(self, fd: int, record: SessionRecord) -> None:
        """In place: the file is what is locked. Raises CapacityError, TierUnavailableError."""
        data = LEASES.encode(record)
        with medium("memory", f"record a session in {self._folder}", advice=FULL_ADVICE):
            os.pwrite(fd, data, 0)
            os.ftruncate(fd, len(data))

    def open(self, session_id: str, record: SessionRecord) -> str:
        """A ticket for the locked lease file, or "" if the client holds it already.

        Raises:
            AgentError: The file cannot be made.
            CapacityError, TierUnavailableError: It cannot be written.
        """
        check_id(session_id, "session id")
        with self._lock:
            try:
                fd = os.open(
                    self._folder / session_id, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600
                )
            except OSError as error:
                raise AgentError(
                    f"cannot make the lease file of a session in {self._folder}: {error.strerror}",
                    outcome="not_applied",
                ) from error
            if not try_lock_exclusive(fd):
                os.close(fd)
                return ""
            try:
                self._write(fd, record)
            except TieredCkptError:
                os.close(fd)
                raise
            return self._tickets.offer(fd)

    def is_held(self, session_id: str) -> bool:
        """Whether somebody holds the lease (the agent itself, while it offers it)."""
        with self._lock:
            try:
                fd = os.open(self._folder / session_id, os.O_RDWR | os.O_CLOEXEC)
            except FileNotFoundError:
                return False
            try:
                return not try_lock_exclusive(fd)
            finally:
                os.close(fd)

    def end(self, session_id: str) -> None:
        """Remove the file. Idempotent."""
        (self._folder / session_id).unlink(missing_ok=True)
