"""What is replicated next, what is complete, what must stay, what to repair. Pure.

What is known of a checkpoint is its manifest and records, which are never changed and come in any
order (format/record.py). So nothing here asks which record is newer; each question has one answer
for one set of records, and more records never make a copy count that is not there.

* The manifest says for each *owner* (a host that wrote segments) which holders were to keep copies,
  and thereby how many copies are wanted. An ``order``, given by the leader alone, sets holders to
  work: those of the manifest and those that the orders add. Where the manifest names none for an
  owner, the largest order says how many are wanted.
* A copy counts if the owner, or a holder that was told to keep it, has acknowledged it in its
  present incarnation. So a holder that is lost counts through the one that a later order put in its
  place. Owners acknowledge what they wrote like everybody else: one that had let go of it before it
  heard of the order, or that lost its memory, must not be counted on. It pulls it back.
* ``replicated`` is said by the leader, when every segment has as many copies as are wanted
  (:func:`progress`). Everybody else takes its word: acknowledgements go to the leader only. The
  word names the incarnations of the memories that the copies are in (:func:`vouchers`), so that all
  see when it holds no more, since one of them was lost (:func:`is_replicated`). When the copies
  have been made again the leader says it anew (:func:`said_anew`). That it was said once still
  counts for what must stay, and for what is ordered (:func:`was_replicated`).
* ``failed`` is said by a holder that found no intact copy of a segment anywhere, or by the leader
  when hosts that were needed are lost and something newer can be ordered (:func:`given_up`).

Laws: tests/property/test_policy_replication.py and tests/simulation/cluster*.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tieredckpt.format.manifest import Manifest
from tieredckpt.format.record import SaveRecord
from tieredckpt.policy.pulls import Pull, jobs_of
from tieredckpt.policy.repair import repair, scarce
from tieredckpt.policy.words import about as _about
from tieredckpt.policy.words import acknowledged as _acknowledged
from tieredckpt.policy.words import by_save as _by_save
from tieredckpt.policy.words import copies_wanted as _copies_wanted
from tieredckpt.policy.words import (
    is_failed,
    is_ordered,
    is_replicated,
    placement_of,
    was_replicated,
)

__all__ = [
    "Copies", "Pull", "can_complete", "given_up", "is_failed", "is_ordered",
    "is_replicated", "jobs_of", "must_stay",
    "newest_replicated", "next_of_streams", "next_order", "ordered_and_open", "placement_of",
    "progress", "repair", "said_anew", "scarce", "vouchers", "was_replicated",
]  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Copies:
    """How far the replication of one checkpoint is."""

    done: int
    """Copies of segments that count, beside one of each; at most as many as are wanted."""
    wanted: int
    missing: tuple[tuple[str, str, str], ...]
    """(segment id, owner, holder) of each copy that is waited for. With lost holders that have no
    successor yet; "" stands for holders that nobody was told to be."""

    @property
    def complete(self) -> bool:
        """Every segment has all its copies (and there is something that has any)."""
        return self.done == self.wanted > 0


def progress(
    manifest: Manifest, records: Iterable[SaveRecord], incarnations: Mapping[str, str]
) -> Copies:
    """How many copies there are, and which are missing. Linear in segments and acknowledgements.

    Args:
        manifest: Of the checkpoint.
        records: Those of this checkpoint; others are passed over.
        incarnations: By host, the present one. A host that is not in it is lost: what it
            acknowledged does not count.
    """
    records = tuple(_about(manifest, records))
    placement = placement_of(manifest, records)
    counts = _copies_wanted(manifest, records)
    acknowledged = _acknowledged(records, incarnations)
    done = wanted = 0
    missing = []
    for ref in manifest.segments:
        told = (ref.host, *placement[ref.host])
        count = counts.get(ref.host, 1)
        having = acknowledged.get(ref.id, set())
        good = min(sum(host in having for host in told), 1 + count)
        done += max(good - 1, 0)
        wanted += count
        waiting = [host for host in told if host not in having]
        waiting.sort(key=lambda host: host not in incarnations)
        short = 1 + count - good
        missing += [(ref.id, ref.host, host) for host in waiting[:short]]
        missing += [(ref.id, ref.host, "")] * (short > len(waiting))
    return Copies(done=done, wanted=wanted, missing=tuple(missing))


def vouchers(
    manifest: Manifest, records: Iterable[SaveRecord], incarnations: Mapping[str, str]
) -> tuple[str, ...]:
    """The incarnations that the word ``replicated`` rests on; () unless all copies are there.

    Of each segment as many as are wanted, the owner's and those that were placed first before
    others: who loses a copy beyond that takes nothing away from the word.
    """
    records = tuple(_about(manifest, records))
    if not progress(manifest, records, incarnations).complete:
        return ()
    placement = placement_of(manifest, records)
    counts = _copies_wanted(manifest, records)
    acknowledged = _acknowledged(records, incarnations)
    found: set[str] = set()
    for ref in manifest.segments:
        told = dict.fromkeys((ref.host, *placement[ref.host]))
        having = [host for host in told if host in acknowledged.get(ref.id, ())]
        found.update(incarnations[host] for host in having[: 1 + counts.get(ref.host, 1)])
    return tuple(sorted(found))


def can_complete(
    manifest: Manifest, records: Iterable[SaveRecord], incarnations: Mapping[str, str]
) -> bool:
    """Whether what was ordered can still be completed by the hosts that live.

    Not if a segment is nowhere any more (its owner is lost and no live holder has it), nor if there
    are fewer hosts than copies.
    """
    records = tuple(_about(manifest, records))
    counts = _copies_wanted(manifest, records)
    acknowledged = _acknowledged(records, incarnations)
    for ref in manifest.segments:
        lives = ref.host in incarnations
        if not lives and not acknowledged.get(ref.id):
            return False
        if counts.get(ref.host, 1) >= len(incarnations):
            return False
    return True


def next_order(
    line: Sequence[Manifest],
    records: Iterable[SaveRecord],
    incarnations: Mapping[str, str] | None = None,
) -> str | None:
    """The save id that the leader orders now; None if there is nothing to order.

    While one is ordered and not complete, nothing is. Else it is the newest one, if it is newer
    than the newest replicated one; those in between are overtaken.

    Args:
        line: The candidates of one stream, newest first (``timeline.candidates``).
        records: Of all of them.
        incarnations: If given, what cannot be completed (see :func:`can_complete`) is not ordered,
            and holds up nothing if it was.
    """
    records = tuple(records)
    by_save = _by_save(records)
    if ordered_and_open(line, records, incarnations):
        return None
    for manifest in line:
        about = by_save.get(manifest.save_id, ())
        if was_replicated(manifest, about):
            return None
        if not manifest.replicas or is_ordered(manifest, about):
            continue
        if incarnations is None or can_complete(manifest, about, incarnations):
            return manifest.save_id
    return None


def next_of_streams(
    lines: Mapping[str, Sequence[Manifest]],
    records: Iterable[SaveRecord],
    last: str | None = None,
    incarnations: Mapping[str, str] | None = None,
) -> str | None:
    """The save id that the leader orders now, of all streams; one at a time, and in turns.

    Args:
        lines: By stream, as for :func:`next_order`.
        records: Of all of them.
        last: The stream that was ordered last: the others come before it.
        incarnations: As for :func:`next_order`.
    """
    records = tuple(records)
    found = {}
    for stream, line in lines.items():
        if ordered_and_open(line, records, incarnations):
            return None
        found[stream] = next_order(line, records, incarnations)
    waiting = sorted(stream for stream, save_id in found.items() if save_id is not None)
    after = [stream for stream in waiting if last is not None and stream > last]
    return found[(after or waiting)[0]] if waiting else None


def ordered_and_open(
    line: Sequence[Manifest],
    records: Iterable[SaveRecord],
    incarnations: Mapping[str, str] | None = None,
) -> tuple[Manifest, ...]:
    """What is being replicated: ordered, not complete, not overtaken. Newest first.

    One at most, unless several leaders have ordered. With ``incarnations`` without those that
    cannot be completed any more.
    """
    by_save = _by_save(records)
    found = []
    for manifest in line:
        about = by_save.get(manifest.save_id, ())
        if was_replicated(manifest, about):
            break
        if _is_open(manifest, about, incarnations):
            found.append(manifest)
    return tuple(found)


def _is_open(
    manifest: Manifest,
    records: Sequence[SaveRecord],
    incarnations: Mapping[str, str] | None,
) -> bool:
    """Of one that is not replicated: it was ordered, and may still be completed."""
    if not is_ordered(manifest, records) or is_failed(manifest, records):
        return False
    return incarnations is None or can_complete(manifest, records, incarnations)


def given_up(
    line: Sequence[Manifest], records: Iterable[SaveRecord], incarnations: Mapping[str, str]
) -> tuple[Manifest, ...]:
    """The orders of which the leader should say ``failed``: they cannot be completed, and something
    newer can, whether it was ordered or not. Until then the hosts that they wait for may come back.
    """
    records = tuple(records)
    can = [manifest.save_id for manifest in ordered_and_open(line, records, incarnations)]
    newer = can[0] if can else next_order(line, records, incarnations)
    if newer is None:
        return ()
    saves = [manifest.save_id for manifest in line]
    older = (m for m in ordered_and_open(line, records) if m.save_id not in can)
    return tuple(m for m in older if saves.index(newer) < saves.index(m.save_id))


def newest_replicated(
    line: Sequence[Manifest],
    records: Iterable[SaveRecord],
    incarnations: Mapping[str, str] | None = None,
) -> Manifest | None:
    """The newest of ``line`` (newest first) of which the leader has said so; with ``incarnations``,
    of which that still holds.
    """
    by_save = _by_save(records)
    for manifest in line:
        about = by_save.get(manifest.save_id, ())
        said = was_replicated(manifest, about)
        if said and (incarnations is None or is_replicated(manifest, about, incarnations)):
            return manifest
    return None


def said_anew(
    line: Sequence[Manifest], records: Iterable[SaveRecord], incarnations: Mapping[str, str]
) -> Manifest | None:
    """The checkpoint of which the leader should say ``replicated`` once more: the newest one of
    which it has, if that held no more since memories were lost, and all copies are there again.
    """
    records = tuple(records)
    newest = newest_replicated(line, records)
    if newest is None or is_replicated(newest, records, incarnations):
        return None
    return newest if progress(newest, records, incarnations).complete else None


def must_stay(
    line: Sequence[Manifest],
    records: Iterable[SaveRecord],
    stream: str | None = None,
    incarnations: Mapping[str, str] | None = None,
) -> set[str]:
    """The save ids of which no host may let go of anything it has, own or copied.

    The newest replicated one, and what is newer and being replicated. Before the first
    one is replicated that is what is being replicated; retention keeps the newest. If copies of the
    newest replicated one were lost, the newest one stays, too, that still has all of its own.

    Args:
        line: The candidates, newest first (``timeline.candidates``).
        records: Of all of them.
        stream: If given, manifests of other streams are passed over.
        incarnations: By host that lives, the present one, as far as this host knows.
    """
    if stream is not None:
        line = [manifest for manifest in line if manifest.stream == stream]
    records = tuple(records)
    stay = {manifest.save_id for manifest in ordered_and_open(line, records)}
    newest = newest_replicated(line, records)
    whole = newest_replicated(line, records, incarnations)
    return stay | {manifest.save_id for manifest in (newest, whole) if manifest is not None}
