"""Who in this agent wants to hear what happens to one namespace."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tieredckpt.format.manifest import Manifest
from tieredckpt.format.records import SaveRecord


@dataclass(slots=True)
class Hooks:
    """Lists to append to. What is in them is called without any lock held, in whatever thread it
    happened in, must not raise and must not wait: it notes, and wakes a thread of its own.
    """

    on_attempt: list[Callable[[], None]] = field(default_factory=list)
    """An attempt of another host is known here that was not."""
    on_manifest: list[Callable[[Manifest], None]] = field(default_factory=list)
    """A checkpoint exists in this host's memory now: committed here, or taken over."""
    on_refilled: list[Callable[[Manifest], None]] = field(default_factory=list)
    """This host's own segments of a checkpoint, which it had lost, were pulled back."""
    on_records: list[Callable[[Sequence[SaveRecord]], None]] = field(default_factory=list)
    """Records that were not known here before, and are now."""
    on_members: list[Callable[[], None]] = field(default_factory=list)
    """Members, leader, replicas or a member's incarnation are other ones than before."""
    on_lost: list[Callable[[str], None]] = field(default_factory=list)
    """A member (host id) has not answered for so long that its copies count no more."""
    on_found: list[Callable[[str], None]] = field(default_factory=list)
    """A host (host id) that was lost, or never asked, answers."""
