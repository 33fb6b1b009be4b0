"""What is replicated next, what is complete, what must stay, what to repair. Pure.

What is known of a checkpoint is its manifest and records, which are never changed and come in any
order (format/records.py). So nothing here asks which record is newer; each question has one answer
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

Laws: tests/property/policy/test_replication.py and tests/simulation/cluster*.py.

One message reaches many hosts although no host sends it to more than a few (:func:`split`). The
sender divides the hosts into at most ``degree`` branches. The first host of a branch, the
*child*, gets the message with the rest of its branch, which it divides in the same way. A child
that does not answer is skipped: the next host of its branch takes its place (:func:`promote`), so a
dead host costs only itself. Anti-entropy brings skipped hosts up to date.

Laws (tests/property/policy/test_fanout.py): every host is reached exactly once, nobody sends to
more than ``degree`` at a time, the depth is logarithmic.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from itertools import chain
from typing import TypeVar

from tieredckpt.format.manifest import MAX_REPLICAS, Holders, Manifest, SegmentRef
from tieredckpt.format.records import SaveRecord
from tieredckpt.policy.placement import Loads, PlacementHost, Sites

DEGREE = 8
"""Hosts that one host sends a message to. With it 10,000 hosts are five hops away, and a sender's
work is the same however many there are."""

Branch = tuple[str, tuple[str, ...]]
"""A child, and the hosts that it is to reach."""


def split(hosts: Sequence[str], degree: int = DEGREE) -> list[Branch]:
    """Whom to send to, and which hosts each of them forwards to.

    Args:
        hosts: All that are to be reached, without the sender; each once. Neighbours stay together,
            so hosts that are near each other should stand near each other.
        degree: At least 1.

    Returns:
        At most ``degree`` branches whose sizes differ by at most 1; together exactly ``hosts``.
    """
    assert degree >= 1
    count = min(degree, len(hosts))
    bounds = [len(hosts) * number // count for number in range(count + 1)] if count else []
    return [
        (hosts[start], tuple(hosts[start + 1 : stop])) for start, stop in itertools.pairwise(bounds)
    ]


def promote(branch: Branch) -> Branch | None:
    """What to send instead, if the branch's child did not answer; None if it was the last."""
    _, rest = branch
    return (rest[0], rest[1:]) if rest else None


_T = TypeVar("_T")
_ANY_LOAD = 1 << 40

# --- what the records of one checkpoint say ---------------------------------------------------


def placement_of(manifest: Manifest, records: Iterable[SaveRecord]) -> dict[str, tuple[str, ...]]:
    """By owner, the hosts that are to keep copies of its segments: those of the manifest first.

    Only hosts that wrote segments are in it, and none is its own holder. No holders at all: ().
    """
    found: dict[str, dict[str, None]] = {ref.host: {} for ref in manifest.segments}
    orders = sorted(
        (record for record in _about(manifest, records) if record.kind == "order"),
        key=lambda record: record.id,  # the same on every host, whatever came first
    )
    for holders in (manifest.replicas, *(order.placement for order in orders)):
        for each in holders:
            if each.host in found:
                found[each.host] |= dict.fromkeys(each.holders)
    for owner, holders_of in found.items():
        holders_of.pop(owner, None)
    return {owner: tuple(them)[: 2 * MAX_REPLICAS] for owner, them in found.items()}


def is_ordered(manifest: Manifest, records: Iterable[SaveRecord]) -> bool:
    """Whether it was decided that this checkpoint is replicated."""
    return any(record.kind == "order" for record in _about(manifest, records))


def was_replicated(manifest: Manifest, records: Iterable[SaveRecord]) -> bool:
    """Whether the leader has said, at some time, that all copies are there.

    Only of what was ordered: a word without an order is somebody's mistake, and to believe it would
    release the copies of the checkpoint before.
    """
    kinds = {record.kind for record in _about(manifest, records)}
    return {"order", "replicated"} <= kinds


def is_replicated(
    manifest: Manifest, records: Iterable[SaveRecord], incarnations: Mapping[str, str]
) -> bool:
    """Whether all copies are there: the leader has said so, and each memory that it counted is
    still the one that it was.

    Args:
        manifest: Of the checkpoint.
        records: Those of this checkpoint; others are passed over.
        incarnations: By host, the present one. A host that is not in it is lost.
    """
    records = tuple(_about(manifest, records))
    present = set(incarnations.values())
    return is_ordered(manifest, records) and any(
        record.segments and present.issuperset(record.segments)
        for record in records
        if record.kind == "replicated"
    )


def is_failed(manifest: Manifest, records: Iterable[SaveRecord]) -> bool:
    """Whether a holder, or the leader, has said that what was ordered cannot be completed.

    It holds up nothing from then on, and nobody needs to keep anything for it.
    """
    return any(record.kind == "failed" for record in _about(manifest, records))


def _copies_wanted(manifest: Manifest, records: Iterable[SaveRecord]) -> dict[str, int]:
    """By owner, how many holders were to keep a copy; at least 1, or it would be "replicated" with
    none.
    """
    found: dict[str, int] = {}
    for record in records:
        for each in record.placement if record.kind == "order" else ():
            found[each.host] = max(found.get(each.host, 1), _others(each))
    # What the coordinator decided stands, if it did: orders after a loss name replacements only.
    return found | {each.host: count for each in manifest.replicas if (count := _others(each))}


def _others(each: Holders) -> int:
    return len(set(each.holders) - {each.host})


def _acknowledged(
    records: Iterable[SaveRecord], incarnations: Mapping[str, str]
) -> dict[str, set[str]]:
    """By segment, the hosts that have acknowledged it since they live."""
    found: dict[str, set[str]] = {}
    for record in records:
        if record.kind == "ack" and incarnations.get(record.host) == record.incarnation:
            for segment_id in record.segments:
                found.setdefault(segment_id, set()).add(record.host)
    return found


def _about(manifest: Manifest, records: Iterable[SaveRecord]) -> Iterator[SaveRecord]:
    """The records of this checkpoint. One that names another stream for it is not of it."""
    for record in records:
        if (
            record.save_id == manifest.save_id
            and record.stream == manifest.stream
            and record.namespace == manifest.namespace
        ):
            yield record


def _by_save(records: Iterable[SaveRecord]) -> dict[str, list[SaveRecord]]:
    """By save id."""
    found: dict[str, list[SaveRecord]] = {}
    for record in records:
        found.setdefault(record.save_id, []).append(record)
    return found


# --- what is complete, what is next, what must stay -------------------------------------------


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


# --- what a host has to fetch -----------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Pull:
    """One segment that a host has to fetch."""

    ref: SegmentRef
    sources: tuple[str, ...]
    """Hosts that should have it, in the order to try; never the host that pulls."""
    own: bool = False
    """The host wrote it itself: nearly always it is there, and only has to be acknowledged."""


def jobs_of(
    host_id: str,
    incarnation: str,
    manifest: Manifest,
    records: Iterable[SaveRecord],
    lost: AbstractSet[str] = frozenset(),
) -> tuple[Pull, ...]:
    """What ``host_id`` has to have of this checkpoint, in the order to pull what it has not.

    Its own segments first: it acknowledges them, or pulls them back if it has lost them. Nothing
    unless it was ordered; nothing that it has acknowledged in this incarnation. The owner is asked
    first, then hosts that have acknowledged a copy, then others that were told to keep one; those
    that are ``lost`` last. Holders of one owner begin at different segments and ask different
    hosts, so that they do not all wait for the same one.
    """
    records = tuple(_about(manifest, records))
    if not is_ordered(manifest, records):
        return ()
    placement = placement_of(manifest, records)
    mine = {owner: them.index(host_id) for owner, them in placement.items() if host_id in them}
    if host_id in placement:
        mine[host_id] = 0
    if not mine:
        return ()
    has: set[str] = set()
    others: dict[str, set[str]] = {}
    for record in records:
        if record.kind == "ack" and record.host == host_id and record.incarnation == incarnation:
            has |= set(record.segments)
        elif record.kind == "ack" and record.host != host_id:
            for segment_id in record.segments:
                others.setdefault(segment_id, set()).add(record.host)
    by_owner: dict[str, list[Pull]] = {owner: [] for owner in mine}
    for ref in manifest.segments:
        if ref.host in mine and ref.id not in has:
            having = sorted(others.get(ref.id, set()) - {ref.host})
            # Acknowledgements may not have come here, and a holder may have it without one.
            hoping = [h for h in placement[ref.host] if h != host_id and h not in having]
            turn = mine[ref.host]
            asked = (ref.host, *_rotated(having, turn), *_rotated(hoping, turn))
            sources = sorted((h for h in asked if h != host_id), key=lost.__contains__)
            own = ref.host == host_id
            by_owner[ref.host].append(Pull(ref=ref, sources=tuple(sources), own=own))
    # Owners after the host's own place in the order of ids: not everybody begins with the first.
    owners = sorted(by_owner, key=lambda owner: (owner < host_id, owner))
    jobs: list[Pull] = []
    for owner in owners:
        pulls = by_owner[owner]
        begin = mine[owner] * len(pulls) // max(len(placement[owner]), 1)
        jobs += _rotated(pulls, begin)
    return tuple(jobs)


def _rotated(values: Sequence[_T], by: int) -> Sequence[_T]:
    by = by % len(values) if values else 0
    return (*values[by:], *values[:by])


# --- who makes up for copies that were lost ---------------------------------------------------


def repair(
    manifest: Manifest,
    records: Iterable[SaveRecord],
    members: Sequence[PlacementHost],
    replicas: int,
    incarnations: Mapping[str, str],
) -> tuple[Holders, ...]:
    """The holders to add, so that every segment is on ``1 + replicas`` members again.

    What counts is the owner, if it lives, and the holders that live and were told to keep it: they
    have it, or will pull it. A host that has acknowledged it without having been told (it wrote it
    itself, as a draft) is told first: that costs nothing. Then come hosts in other failure domains
    than those that have it, as far as there are any, the least loaded first. A segment that no
    member has acknowledged is passed over: nobody may be able to copy it.

    Args:
        manifest: The newest replicated checkpoint, or the one that was loaded.
        records: Those of this checkpoint, the orders that came of earlier repairs included, else
            everything is ordered again; others are passed over.
        members: The hosts that live.
        replicas: Copies wanted beside the first.
        incarnations: By host, the present one.
    """
    records = tuple(_about(manifest, records))
    alive = {member.host_id for member in members}
    ordered = placement_of(manifest, records)
    short = sorted(o for o, them in ordered.items() if len(alive & {o, *them}) <= replicas)
    if not short:
        return ()
    choice = _Repair(members, _acknowledged(records, incarnations))
    by_owner: dict[str, list[str]] = {}
    for ref in manifest.segments:
        by_owner.setdefault(ref.host, []).append(ref.id)
    added = []
    for owner in short:
        found = choice.holders_for(owner, by_owner[owner], replicas, ordered[owner])
        if found:
            added.append(Holders(owner, found))
    return tuple(added)


class _Repair:
    """Chooses further holders; remembers whom it has given how much."""

    def __init__(
        self, members: Sequence[PlacementHost], having: Mapping[str, AbstractSet[str]]
    ) -> None:
        self._sites = Sites({member.host_id: member for member in members}.values())
        self._loads = Loads(len(self._sites.ids))
        self._where: dict[str, set[int]] = {}
        position = self._sites.position
        for segment_id, hosts in having.items():
            self._where[segment_id] = {position[host] for host in hosts if host in position}
        for site, count in Counter(chain.from_iterable(self._where.values())).items():
            self._loads.add(site, count)

    def holders_for(
        self, owner: str, segments: Sequence[str], replicas: int, ordered: Iterable[str]
    ) -> tuple[str, ...]:
        position = self._sites.position
        itself = {position[owner]} if owner in position else set()
        told = {position[holder] for holder in ordered if holder in position} | itself
        alive = [where for each in segments if (where := self._where.get(each))]
        added: list[str] = []
        while alive and len(told) <= replicas:
            having = set.union(*alive) - told
            best = min(having) if having else self._apart(set.union(*alive) | told)
            if best is None:
                break
            added.append(self._sites.ids[best])
            told.add(best)
            self._loads.add(best, sum(best not in where for where in alive))
        return tuple(added)

    def _apart(self, near: AbstractSet[int]) -> int | None:
        """The host that shares the fewest domains with ``near``, then the least loaded."""
        levels = max((len(self._sites.spans[site]) for site in near), default=1)
        for level in range(levels):
            found = self._loads.least([self._sites.span(site, level) for site in near], _ANY_LOAD)
            if found is not None:
                return found
        return None
