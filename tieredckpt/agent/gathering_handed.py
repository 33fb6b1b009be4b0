"""What one host knows of a save without collectives that another host decides on."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from tieredckpt.transport import messages as m
from tieredckpt.transport.gathering_messages import RankSegment

ASK_S_MIN = 0.01
ASK_S_MAX = 0.5
"""How often the other host is asked; of what is committed its manifest tells."""
TELLS_MAX = 3
"""How often it is told that this host has left a save; if it does not hear, it asks in vain."""


@dataclass(slots=True)
class Handed:
    """One save, as far as it is this host's. Guarded by the namespace's lock."""

    key: m.GatheringKey
    step: int
    world_size: int
    group: str
    decider: str
    here: int
    """Ranks of the group on this host."""
    parts: dict[int, m.Contribute] = field(default_factory=dict)
    members: dict[int, tuple[str, str | None]] = field(default_factory=dict)
    fresh: set[int] = field(default_factory=set)
    """Ranks whose part was never sent."""
    wanted: set[int] = field(default_factory=set)
    """Ranks whose part the other side lacks, as far as is known."""
    gone: set[int] = field(default_factory=set)
    """Ranks whose process has ended."""
    state: Literal["open", "committed", "failed"] = "open"
    promised: bool = False
    """The other side was told, by this agent or may be by one before, that this host stands by it.
    """
    save_id: str | None = None
    error: m.ErrorReply | None = None
    missing: tuple[int, ...] = ()
    leaving: m.ErrorReply | None = None
    """To be told to the other side: it fails, if it is open there."""
    tells: int = 0
    asking: bool = False
    next_s: float = 0.0
    pause_s: float = ASK_S_MIN
    trouble: str = ""
    """Why the other side was asked in vain the last time."""

    @property
    def in_doubt(self) -> bool:
        """Whether it may be committed without asking this host again. If its ranks had nothing to
        write, an agent before this one may have promised that and left no trace.
        """
        parts = self.parts.values()
        return self.promised or (bool(parts) and all(each.part is None for each in parts))

    @property
    def have(self) -> tuple[RankSegment, ...]:
        """Also when it is over: who is told late that this host left must see what that is of."""
        return tuple(
            RankSegment(rank=r, segment_id=self.members[r][1]) for r in sorted(self.members)
        )

    def fail(self, error: m.ErrorReply) -> None:
        self.state, self.error = "failed", error
        self.parts.clear()

    def end(self, error: m.ErrorReply) -> None:
        """A rank here has left it. Nothing is committed without asking this host once more, unless
        it has promised: then only the other side knows.
        """
        if self.state == "open":
            self.leaving = self.leaving or error
            if not self.in_doubt:
                self.fail(error)

    def commit(self, save_id: str | None) -> None:
        self.state, self.save_id, self.leaving = "committed", save_id, None
        self.parts.clear()

    def outcome(self) -> m.Gathered:
        if self.state == "committed":
            return m.Gathered(state="committed", save_id=self.save_id)
        if self.state == "failed":
            return m.Gathered(state="failed", error=self.error)
        return m.Gathered(state="open", missing=self.missing)

    def is_due(self, now_s: float) -> bool:
        """Whether to ask the other side now."""
        if self.leaving is not None and self.tells < (1 if self.state == "open" else TELLS_MAX):
            return True
        complete = bool(self.fresh) and len(self.parts) >= self.here
        return self.state == "open" and (complete or now_s >= self.next_s)
