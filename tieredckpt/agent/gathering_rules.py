"""Which parts of a save without collectives fit together, and what is said of others. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from tieredckpt.errors import (
    CapacityError,
    TierUnavailableError,
    UsageError,
)
from tieredckpt.format.manifest import Manifest
from tieredckpt.transport import messages as m
from tieredckpt.transport.gathering_messages import RankSegment
from tieredckpt.transport.replies import describe_error

NAMES_SHOWN = 100
RANKS_SHOWN = 16

Key = tuple[str, str, int]


class Header(Protocol):
    """What all parts of one save say alike."""

    @property
    def step(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    @property
    def group(self) -> str: ...


def key_of(key: m.GatheringKey) -> Key:
    """To look a gathering up by."""
    return key.stream, key.epoch, key.ordinal


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


def why_not(found: Header, request: m.Contribute) -> m.ErrorReply | None:
    """Why a gathering fails with this part: it is of another save, or its rank has none."""
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
    return request.error


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


def process_ended(rank: int, step: int, stream: str) -> TierUnavailableError:
    """A rank is no more."""
    return not_applied(
        f"rank {rank}'s process ended before all ranks had sealed step {step} of stream {stream!r}"
    )


def host_lost(host: str, step: int, stream: str) -> TierUnavailableError:
    """A host with ranks of the group is no more."""
    return not_applied(
        f"host {host} does not answer, and not all ranks had sealed step {step} of stream "
        f"{stream!r}"
    )


def too_many_plans(needed: int, limit: int) -> CapacityError:
    """The parts' plans would take too much memory."""
    return CapacityError(
        f"the plans of the ranks are over {limit >> 20} MiB together: save with collectives, where "
        "each piece is planned once",
        needed_bytes=needed,
        available_bytes=limit,
        limit="plans of one save",
    )


def not_applied(text: str) -> TierUnavailableError:
    """A failure after which nothing is committed, for certain."""
    return TierUnavailableError(text, tier="memory", outcome="not_applied")
