"""What :mod:`tieredckpt.dcp.history` consists of, in a form for other processes of the run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tieredckpt.format.manifest import (
    Ancestor,
    AttemptId,
    AttemptRecord,
    Followed,
)
from tieredckpt.policy.schedule import LastSpill
from tieredckpt.transport.messages import BaseSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class SavePlace:
    """Where a save stands on the time line, and where it goes."""

    save_id: str
    attempt: AttemptId
    seq: int
    parent: str | None
    lineage: tuple[Ancestor, ...]
    tiers: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TakenUp:
    """How these ranks took a stream up, until an attempt says so: nothing is changed by it."""

    manifest: bytes = b""
    """The encoded manifest of what was loaded; b"": the stream begins anew, or goes on as it is."""
    newest: tuple[Ancestor, ...] = ()
    """The line up to the newest checkpoint when that was chosen."""
    in_silence: bool = False
    """Newer ones were passed over while somebody did not answer, and nobody agreed to that."""
    followed: tuple[Followed, ...] = ()
    """The attempts that were known then; see ``RecoveryPlan.followed``."""
    load_id: str = ""
    """Of the load in which all ranks of the group did; "": it goes on as it is."""
    refusal: str = ""
    """Why nothing may be saved after it without consent; "": it may."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamState:
    """Where one stream stands, as this process knows it."""

    head: str | None
    """The newest checkpoint that these ranks restored or committed."""
    taken_up: TakenUp | None = None
    """None: an attempt of this run says where the stream goes on."""
    lineage: tuple[Ancestor, ...] = ()
    next_seq: int = 0
    moved_to: str | None = None
    """Where the newest attempt takes the stream up, if that is not ``head``."""
    in_doubt: bytes | None = None
    """The manifest of a commit of unknown outcome."""
    spilled: Mapping[str, LastSpill] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryState:
    """A :class:`History`, or a part of it, for another process of the same run. Pickles."""

    run_id: str
    attempt: bytes | None
    """The encoded record of the attempt that it stands in; None: none was opened yet."""
    streams: tuple[tuple[str, StreamState], ...]
    load_id: str
    """Of the last load; random."""


def age(record: AttemptRecord | None) -> tuple[int, str]:
    """What attempts are sorted by; None is older than all."""
    return (record.number, record.id) if record is not None else (0, "")


def base_spec(stream: str, state: StreamState, taken: TakenUp) -> BaseSpec:
    """Where an attempt takes up ``stream``."""
    return BaseSpec(
        stream=stream,
        save_id=state.head,
        manifest=taken.manifest,
        newest=taken.newest,
        in_silence=taken.in_silence,
    )
