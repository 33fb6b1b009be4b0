"""Which checkpoints of one stream stay in one tier.

A further rule of :class:`Keep` is one more function that names what it
keeps, added to :func:`_kept`; a checkpoint stays if any rule keeps it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from tieredckpt.format.manifest import Manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class Keep:
    """What retention leaves in a tier, per stream."""

    last: int
    """The newest so many checkpoints of the time line; at least 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionPlan:
    """What to do, for the agent to carry out and the command line to print."""

    keep: tuple[str, ...]
    """Save ids that stay, candidates before abandoned ones, newest first."""
    delete: tuple[str, ...]
    """Save ids to delete, in this order: whoever stops in between has deleted the least useful."""
    reasons: Mapping[str, str]
    """By save id, why it stays or goes."""


def retain(
    candidates: Sequence[Manifest],
    abandoned: Sequence[Manifest],
    keep: Keep,
    protected: AbstractSet[str] = frozenset(),
) -> RetentionPlan:
    """Decide about the checkpoints of one stream that one tier holds.

    The newest ``keep.last`` stay, abandoned ones only in the room that candidates leave: they are
    evicted first, but not before they have to, so that who rolled back by mistake can still load
    them by save id. The newest candidate always stays, and without a candidate the newest
    abandoned one.

    Args:
        candidates: In this tier, newest first (:func:`~tieredckpt.policy.timeline.candidates`).
        abandoned: In this tier, newest first.
        keep: The rules.
        protected: Save ids that must stay whatever the rules say, since they are being copied or
            read, or are not yet replicated. They do not count as room.
    """
    assert keep.last >= 1
    kept = _kept(candidates, abandoned, keep)
    reasons = dict(kept)
    for manifest in (*candidates, *abandoned):
        if manifest.save_id in protected:
            reasons.setdefault(manifest.save_id, "protected: it is in use")
    stay = set(reasons)
    reasons |= {m.save_id: f"older than the newest {keep.last}" for m in candidates
                if m.save_id not in stay}  # fmt: skip
    reasons |= {m.save_id: "abandoned" for m in abandoned if m.save_id not in stay}
    return RetentionPlan(
        keep=tuple(m.save_id for m in (*candidates, *abandoned) if m.save_id in stay),
        delete=(*_oldest_first(abandoned, stay), *_oldest_first(candidates, stay)),
        reasons=reasons,
    )


def _kept(
    candidates: Sequence[Manifest], abandoned: Sequence[Manifest], keep: Keep
) -> dict[str, str]:
    """By save id, the reason why the rules keep it."""
    kept = {m.save_id: f"one of the newest {keep.last}" for m in candidates[: keep.last]}
    room = keep.last - len(kept)
    kept |= {m.save_id: f"abandoned, within the newest {keep.last}" for m in abandoned[:room]}
    if candidates:
        kept[candidates[0].save_id] = "the newest"
    return kept


def _oldest_first(manifests: Sequence[Manifest], stay: AbstractSet[str]) -> Iterable[str]:
    return (m.save_id for m in reversed(manifests) if m.save_id not in stay)
