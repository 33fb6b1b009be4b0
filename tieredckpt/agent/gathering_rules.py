"""What both sides of a save without collectives do alike, the agent that decides and the others.

Which parts fit together, what becomes of a save whose ranks fail, and what is said of it.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Generic, Literal, TypeVar

from tieredckpt.errors import CapacityError, TierUnavailableError, UsageError
from tieredckpt.format.manifest import Manifest
from tieredckpt.transport import messages as m
from tieredckpt.transport.gathering_messages import RankSegment
from tieredckpt.transport.replies import describe_error

NAMES_SHOWN = 100
RANKS_SHOWN = 16
MISSING_SHOWN = 16

OPEN_MAX = 64
"""Open saves of one namespace: one per stream is what a job that works has."""
KEPT_MAX = 256
"""Saves remembered, so that each rank hears of the outcome; the oldest go first."""
PLANS_BYTES_MAX = 1 << 30
"""Plans of the parts of all open saves of a namespace."""


@dataclass(slots=True)
class GatheredSave:
    """One save, as far as one host knows it. Guarded by the namespace's lock."""

    key: m.GatheringKey
    step: int
    world_size: int
    group: str
    """Digest of the ranks that it is of."""
    parts: dict[int, m.Contribute] = field(default_factory=dict)
    members: dict[int, tuple[str, str | None]] = field(default_factory=dict)
    """By rank, the session and the segment that it came with; stays when it is over."""
    state: Literal["open", "committing", "committed", "failed"] = "open"
    save_id: str | None = None
    differing: dict[str, list[list[int]]] = field(default_factory=dict)
    error: m.ErrorReply | None = None

    def commit(self, save_id: str | None) -> None:
        """It is a checkpoint."""
        self.state, self.save_id = "committed", save_id
        self.parts.clear()

    def fail(self, error: m.ErrorReply) -> None:
        """It never becomes a checkpoint; its segments are free again."""
        self.state, self.error = "failed", error
        self.parts.clear()

    def end(self, error: m.ErrorReply) -> None:
        """Somebody has left it: it fails, if it is open."""
        if self.state == "open":
            self.fail(error)

    def missing_ranks(self) -> tuple[int, ...]:
        """Ranks that have not contributed, the first of them."""
        missing = (rank for rank in range(self.world_size) if rank not in self.parts)
        return tuple(itertools.islice(missing, MISSING_SHOWN))

    def outcome(self) -> m.Gathered:
        """What ranks are told."""
        if self.state == "committed":
            return m.Gathered(state="committed", save_id=self.save_id, differing=self.differing)
        if self.state == "failed":
            return m.Gathered(state="failed", error=self.error)
        return m.Gathered(state="open", missing=self.missing_ranks())


Save = TypeVar("Save", bound=GatheredSave)


class GatheredSaves(Generic[Save]):
    """Those of one namespace that one side knows. Thread-safe.

    Args:
        lock: The node's lock.
        manifests: What is committed in memory.
    """

    def __init__(
        self, lock: threading.RLock, manifests: Callable[[], tuple[Manifest, ...]]
    ) -> None:
        self._lock = lock
        self._manifests = manifests
        self._known: dict[m.GatheringKey, Save] = {}

    def ask(self, request: m.AskGathering) -> m.Gathered:
        """See :class:`tieredckpt.transport.messages.AskGathering`."""
        with self._lock:
            found = self._known.get(request.key)
            if found is None:
                return m.Gathered(state="unknown")
            lost = request.rank is not None and request.rank not in found.parts
            if lost and found.state == "open" and request.give_up is None:
                return m.Gathered(state="unknown")  # an agent before this one had that part
            if request.give_up is not None:
                found.end(request.give_up)
            return found.outcome()

    def segments(self) -> set[str]:
        """Segments whose save is not decided. The caller holds the lock."""
        return {
            each.part.segment_id
            for found in self._known.values()
            for each in found.parts.values()
            if each.part is not None
        }

    def num_open(self) -> int:
        """Saves that wait for a part, or for the outcome. The caller holds the lock."""
        return sum(found.state == "open" for found in self._known.values())

    def drop_session(self, session_id: str) -> None:
        """A process ended: what it contributed to cannot become a checkpoint any more.

        It could, but nobody would be there to say that the ranks went on from it.
        """
        with self._lock:
            for found in self._known.values():
                ended = [r for r, each in found.parts.items() if each.session_id == session_id]
                if ended:
                    why = not_applied(
                        f"rank {ended[0]}'s process ended before all ranks had sealed step "
                        f"{found.step} of stream {found.key.stream!r}"
                    )
                    self._left(found, ended, describe_error(why))

    def _left(self, found: Save, ranks: Sequence[int], why: m.ErrorReply) -> None:
        """The processes of these ranks have ended. The caller holds the lock."""
        found.end(why)

    def _keep(self, made: Save) -> Save:
        """Remember a new save, in the place of the oldest that is over. The caller holds the lock.

        Raises:
            UsageError: Too many are open.
        """
        if self.num_open() >= OPEN_MAX:
            raise UsageError(
                f"{OPEN_MAX} saves without collectives are waiting for ranks already: call "
                "dcp.save on all ranks of the group"
            )
        for key in [k for k, each in self._known.items() if each.state in ("committed", "failed")]:
            if len(self._known) < KEPT_MAX:
                break
            del self._known[key]
        self._known[made.key] = made
        return made

    def _take(self, found: Save, request: m.Contribute) -> bool:
        """Add a part to an open save. If it does not fit the others the save ends; then False.

        The caller holds the lock.
        """
        stream, rank = request.key.stream, request.rank
        if (wrong := self._why_not(found, request)) is not None:
            found.end(wrong)
            return False
        # A rank that saves anew has left its earlier saves.
        for other in self._known.values():
            same = (other.key.stream, other.key.epoch) == (stream, request.key.epoch)
            if same and other is not found and other.state == "open" and rank in other.parts:
                why = superseded(other.step, stream, f"rank {rank} has gone on")
                other.end(describe_error(why))
        held = sum(len(p.plan) for each in self._known.values() for p in each.parts.values())
        if held + len(request.plan) > PLANS_BYTES_MAX:
            too_many = CapacityError(
                f"the plans of the ranks are over {PLANS_BYTES_MAX >> 20} MiB together: save with "
                "collectives, where each piece is planned once",
                needed_bytes=held + len(request.plan),
                available_bytes=PLANS_BYTES_MAX,
                limit="plans of one save",
            )
            found.end(describe_error(too_many))
            return False
        found.parts[rank], found.members[rank] = request, member(request)
        return True

    def _why_not(self, found: Save, request: m.Contribute) -> m.ErrorReply | None:
        """Why a save fails with this part: it is of another save, or its rank has none."""
        stream, rank = request.key.stream, request.rank
        if found.group != request.members:
            return describe_error(two_groups(stream))
        if (found.step, found.world_size) != (request.step, request.world_size):
            return describe_error(
                UsageError(
                    f"the ranks save different things into stream {stream!r}: step {found.step} by "
                    f"{found.world_size} ranks, and rank {rank} step {request.step} by "
                    f"{request.world_size} ranks. Call dcp.save the same number of times on all "
                    "ranks since the last engine.load, and give each group its own stream"
                )
            )
        before = found.parts.get(rank)
        if request.error is None and before is not None and before.session_id != request.session_id:
            return describe_error(two_processes(rank, stream))
        return request.error


def member(request: m.Contribute) -> tuple[str, str | None]:
    """Who contributes what: the session and the segment."""
    part = request.part
    return request.session_id, part.segment_id if part is not None else None


def committed_with(manifests: Iterable[Manifest], request: m.Contribute) -> str | None:
    """The checkpoint that this very part is in already; an agent that died knew."""
    return committed_as(manifests, (RankSegment(rank=request.rank, segment_id=member(request)[1]),))


def committed_as(manifests: Iterable[Manifest], have: Iterable[RankSegment]) -> str | None:
    """The checkpoint that one of these segments is in, and so all of them."""
    wanted = {each.segment_id for each in have} - {None}
    for manifest in manifests if wanted else ():
        if any(ref.id in wanted for ref in manifest.segments):
            return manifest.save_id
    return None


def differing_values(parts: Sequence[m.Contribute]) -> dict[str, list[list[int]]]:
    """Names under which ranks have different values, the first of them.

    Raises:
        UsageError: One of them must be the same on all.
    """
    groups: dict[str, dict[bytes, list[int]]] = {}
    strict: set[str] = set()
    for part in parts:
        for value in part.values:
            ranks = groups.setdefault(value.name, {}).setdefault(value.digest, [])
            ranks.append(part.rank)
            if value.must_agree:
                strict.add(value.name)
    found = {name: list(each.values()) for name, each in groups.items() if len(each) > 1}
    for name in found:
        if name in strict:
            ranks = [each[0] for each in found[name]]
            raise UsageError(
                f"ranks with one per-rank coordinate have different values: {name[:200]!r} (rank "
                f"{ranks[0]} differs from rank {ranks[1]}); give per_rank a coordinate= that tells "
                "them apart",
                keys=[name[:200]],
            )
    return {
        name: [ranks[:RANKS_SHOWN] for ranks in found[name][:RANKS_SHOWN]]
        for name in list(found)[:NAMES_SHOWN]
    }


def two_processes(rank: int, stream: str) -> UsageError:
    """They say that they are the same rank."""
    return UsageError(
        f"two processes save as rank {rank} into stream {stream!r}: give each group its own "
        "stream, and no_dist=True only to a group of one (engine.writer(step, group=[rank]))"
    )


def two_groups(stream: str) -> UsageError:
    """Their parts never become one checkpoint."""
    return UsageError(
        f"two groups of ranks save into stream {stream!r} at once: give each its own stream"
    )


def superseded(step: int, stream: str, why: str) -> TierUnavailableError:
    """Somebody has left the save behind."""
    return not_applied(f"step {step} of stream {stream!r} never came together: {why}")


def host_lost(host: str, step: int, stream: str) -> TierUnavailableError:
    """A host with ranks of the group is no more."""
    return not_applied(
        f"host {host} does not answer, and not all ranks had sealed step {step} of stream "
        f"{stream!r}"
    )


def not_applied(text: str) -> TierUnavailableError:
    """A failure after which nothing is committed, for certain."""
    return TierUnavailableError(text, tier="memory", outcome="not_applied")
