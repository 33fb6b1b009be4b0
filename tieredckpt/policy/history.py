"""Which checkpoints are the history of the newest start of training, and which were left.

Each run of training that saves opens an *attempt* with its first save, and names the attempts that
it *followed*: first the one it goes on from, then those that it knew of and left aside. So attempts
form a chain; nothing wins by a number. An attempt that none follows is a *head*. Two heads are a
*fork*: two sides that did not know of each other. It ends when an attempt follows both. A link to
an attempt of which no checkpoint was known is cut by the first one that is known: a fork, too.

Within one attempt the saves of a stream are numbered by ``seq``; an attempt takes each stream up at
one earlier save, its *base*. The history of an attempt is its own saves and, for each attempt
before, the saves up to where it was left: one :class:`~tieredckpt.format.manifest.Ancestor` each,
the *lineage*. Every manifest and every attempt record carries the whole lineage, so ancestry is
decided without the checkpoints in between, which retention may have deleted.

What a roll-back passes over is *abandoned* if the record of an attempt on the line says so, or
*left behind* if it says that somebody was silent: that goes where its room is needed. All else off
the line is a *branch*, which no rule ever deletes. See docs/understand/timeline.md.

Laws (tests/property/policy/test_history.py): the candidates of a stream are exactly the head's
ancestors that still exist, newest first; neither clocks nor steps nor numbers decide; what a zombie
of an earlier attempt adds is never a candidate, and never abandoned.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from tieredckpt.errors import NotFoundError, UsageError
from tieredckpt.format.envelope import INT_MAX
from tieredckpt.format.manifest import (
    Ancestor,
    AttemptId,
    AttemptRecord,
    Followed,
    Manifest,
    StreamBase,
)

LINEAGE_MAX = 2048
"""Longest lineage that a new attempt is given. Older ancestors are forgotten, so that manifests
stay small in a run that was restarted (and saved in between) thousands of times."""

NUMBER_MAX = 1 << 32
"""No namespace is begun so often: a larger number is somebody's mistake, and is not counted on.

So no run makes a larger one, and a claim that has one ends nobody."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """The history that one head sees of one stream."""

    stream: str
    head: AttemptId | None
    """The head whose history this is; None: there is no attempt."""
    attempt: AttemptId | None
    """The attempt whose own saves are all on the line; None: none saved into this stream."""
    lineage: tuple[Ancestor, ...]
    """What is on the line of earlier attempts, oldest first."""

    def positions(self, manifests: Iterable[Manifest]) -> dict[str, tuple[int, int, str]]:
        """By save id, what orders the saves on the line, oldest first; no others are in it."""
        bounds = {
            (ancestor.number, ancestor.id): (index, ancestor.last_seq)
            for index, ancestor in enumerate(self.lineage)
        }
        if self.attempt is not None:
            # Its own saves are all on the line: a chain has no branch before it is taken up again.
            bounds[self.attempt.number, self.attempt.id] = (len(self.lineage), INT_MAX)
        found: dict[str, tuple[int, int, str]] = {}
        for manifest in manifests:
            bound = bounds.get((manifest.attempt.number, manifest.attempt.id))
            if manifest.stream == self.stream and bound is not None and manifest.seq <= bound[1]:
                found[manifest.save_id] = (bound[0], manifest.seq, manifest.save_id)
        return found


class Chain:
    """How the known attempts follow each other. Immutable.

    Args:
        manifests: Of any streams; each tells of its attempt, and by its lineage of earlier ones.
        attempts: Records; see :func:`with_saves` for which ones count.
    """

    def __init__(self, manifests: Iterable[Manifest], attempts: Iterable[AttemptRecord]) -> None:
        self.records = {record.id: record for record in attempts}
        self._ids: dict[str, AttemptId] = {}
        self._followed: dict[str, dict[str, None]] = {}
        self._lineages: dict[tuple[str, str], tuple[Ancestor, ...]] = {}
        """By attempt and stream, as its saves say."""
        self._linked: set[tuple[str, str]] = set()
        manifests = tuple(manifests)
        saved = saved_by(manifests)
        for record in self.records.values():
            self._ids[record.id] = AttemptId(record.number, record.id)
            links = self._followed.setdefault(record.id, {})
            known = (each.id for each in record.followed if each.saved or each.id not in saved)
            links.update(dict.fromkeys(known))
            for base in record.bases:
                self._link(record.id, base.stream, base.lineage)
        for manifest in manifests:
            key = (manifest.attempt.id, manifest.stream)
            if key not in self._lineages:
                self._ids[manifest.attempt.id] = manifest.attempt
                self._lineages[key] = manifest.lineage
                self._link(*key, manifest.lineage)

    def _link(self, attempt: str, stream: str, lineage: Sequence[Ancestor]) -> None:
        # Each took the stream up from the one before, and only once: what is linked stays so.
        for earlier in reversed(lineage):
            self._followed.setdefault(attempt, {})[earlier.id] = None
            attempt = earlier.id
            if (attempt, stream) in self._linked:
                break
            self._linked.add((attempt, stream))

    @property
    def heads(self) -> tuple[AttemptId, ...]:
        """The attempts that none follows; two or more are a fork."""
        behind = {each for links in self._followed.values() for each in links}
        found = [each for key, each in self._ids.items() if key not in behind]
        return tuple(sorted(found or self._ids.values(), key=_age))

    def knows(self, attempt: str) -> bool:
        """Whether its record or a checkpoint of it is among what this was made of."""
        return attempt in self._ids

    def ancestors(self, attempts: Iterable[str]) -> set[str]:
        """Ids of these attempts, and of all that they followed."""
        found: set[str] = set()
        waiting = list(attempts)
        while waiting:
            if (attempt := waiting.pop()) not in found:
                found.add(attempt)
                waiting += self._followed.get(attempt, ())
        return found

    def beside(self, attempts: Iterable[str]) -> tuple[AttemptId, ...]:
        """The heads that these attempts neither are nor followed."""
        known = self.ancestors(attempts)
        return tuple(each for each in self.heads if each.id not in known)

    def after(self, attempt: str) -> tuple[AttemptId, ...]:
        """The heads that followed ``attempt``."""
        found = (each for each in self.heads if each.id != attempt)
        return tuple(each for each in found if attempt in self.ancestors([each.id]))

    def of_run(self, run: str) -> AttemptRecord | None:
        """The newest attempt of one run."""
        mine = {record.id: record for record in self.records.values() if record.run == run}
        behind = {each for key in mine for each in self.ancestors([key]) - {key}}
        left = [record for key, record in mine.items() if key not in behind]
        return max(left or mine.values(), key=lambda each: (each.number, each.id), default=None)

    def main_line(self, head: AttemptId) -> list[str]:
        """Ids from ``head`` backwards: each the one that the one before went on from."""
        found: dict[str, None] = {}
        at: str | None = head.id
        while at is not None and at not in found:
            found[at] = None
            at = self._before(at)
        return list(found)

    def _before(self, attempt: str) -> str | None:
        record = self.records.get(attempt)
        if record is not None and record.followed:
            first = record.followed[0].id
            return first if first in self._followed[attempt] else None
        lineages = [base.lineage for base in record.bases] if record is not None else []
        lineages += [each for (of, _), each in self._lineages.items() if of == attempt]
        last = (lineage[-1] for lineage in lineages if lineage)
        newest = max(last, key=lambda each: (each.number, each.id), default=None)
        return newest.id if newest is not None else None

    def line(self, head: AttemptId | None, stream: str) -> Line:
        """The history that ``head`` sees of ``stream``.

        A stream that it neither took up nor saved into goes on as the attempt before left it.
        """
        for attempt in self.main_line(head) if head is not None else ():
            base = stated_base(self.records.get(attempt), stream)
            lineage = base.lineage if base is not None else self._lineages.get((attempt, stream))
            if lineage is not None:
                of = self._ids[attempt]
                return Line(stream=stream, head=head, attempt=of, lineage=lineage)
        return Line(stream=stream, head=head, attempt=None, lineage=())

    def sides(self, manifests: Sequence[Manifest], stream: str) -> tuple[Line, ...]:
        """One line for each head that sees other candidates than the others; at least one."""
        heads = self.heads
        if len(heads) < 2:
            return (self.line(heads[0] if heads else None, stream),)
        by_saves: dict[frozenset[str], Line] = {}
        for head in heads:
            line = self.line(head, stream)
            by_saves.setdefault(frozenset(line.positions(manifests)), line)
        # Who has nothing there has nothing to choose from.
        some = {saves: line for saves, line in by_saves.items() if saves}
        return tuple((some or by_saves).values())

    def lived_on(
        self, line: Line, manifests: Iterable[Manifest]
    ) -> dict[AttemptId, tuple[Manifest, ...]]:
        """What attempts saved that the line went on from, and that no record of it knew of; newest
        first. Nothing tells such an attempt, after a cut, from a trainer that slept.
        """
        head, *before = self.main_line(line.head) if line.head is not None else [""]
        stated = (stated_base(self.records.get(each), line.stream) for each in (head, *before))
        known = (each for base in stated if base for each in (*base.lineage, *base.abandons))
        bounds: dict[str, int] = {}
        for each in (*line.lineage, *known):
            bounds[each.id] = max(each.last_seq, bounds.get(each.id, -1))
        main = set(before)
        found: dict[AttemptId, dict[str, Manifest]] = {}
        for save in manifests:
            of, unknown = save.attempt, save.seq > bounds.get(save.attempt.id, -1)
            if unknown and save.stream == line.stream and of.id in main and of != line.attempt:
                found.setdefault(of, {})[save.save_id] = save
        return {
            of: tuple(sorted(saves.values(), key=age, reverse=True)) for of, saves in found.items()
        }

    def left(self, line: Line, *, in_silence: bool = False) -> dict[str, int]:
        """By attempt, up to which ``seq`` its saves were passed over, as records say: knowingly, or
        while somebody was silent.
        """
        found: dict[str, int] = {}
        for attempt in self.main_line(line.head) if line.head is not None else ():
            record = self.records.get(attempt)
            base = stated_base(record, line.stream)
            if record is None or base is None or (line.stream in record.in_silence) != in_silence:
                continue
            for each in base.abandons:
                found[each.id] = max(each.last_seq, found.get(each.id, 0))
        return found


def with_saves(
    attempts: Iterable[AttemptRecord], saved: Collection[str]
) -> tuple[AttemptRecord, ...]:
    """The records that count: of attempts that have saved, or that such a one followed.

    Args:
        attempts: All that are known.
        saved: Ids of the attempts of which a checkpoint is known anywhere.
    """
    attempts = tuple(attempts)
    chain = Chain((), attempts)
    known = chain.ancestors(saved)
    return tuple(record for record in attempts if record.id in known)


def proven(stored: Iterable[AttemptRecord]) -> set[str]:
    """Ids of attempts that have saved, or that such a one followed, by their records in a tier that
    gets them with checkpoints alone. Those of version 1, which follow nobody, came with a load.
    """
    return {record.id for record in stored if record.followed or record.number == 1}


def saved_by(manifests: Iterable[Manifest]) -> set[str]:
    """Ids of the attempts that made these."""
    return {manifest.attempt.id for manifest in manifests}


def line(
    manifests: Iterable[Manifest], attempts: Iterable[AttemptRecord], stream: str
) -> Line | None:
    """The history of ``stream``; None: there is a fork, and nothing tells which side goes on."""
    manifests = tuple(manifests)
    sides = Chain(manifests, attempts).sides(manifests, stream)
    return sides[0] if len(sides) == 1 else None


def candidates(
    manifests: Iterable[Manifest], attempts: Iterable[AttemptRecord], stream: str
) -> tuple[Manifest, ...]:
    """The checkpoints of ``stream`` that a restart may go on from, newest first; none at a fork.

    Manifests of other streams may, and should, be passed too: they tell of attempts. A checkpoint
    that is passed twice (once per tier) is returned once.
    """
    manifests = tuple(manifests)
    found = line(manifests, attempts, stream)
    return on_line(found, manifests) if found is not None else ()


def abandoned(
    manifests: Iterable[Manifest],
    attempts: Iterable[AttemptRecord],
    stream: str,
    given_up: Collection[str] = (),
) -> tuple[Manifest, ...]:
    """The checkpoints of ``stream`` that somebody knowingly went back behind, newest first.

    Of branches only those that were ``given_up`` (save ids, also of others) are among them; at a
    fork nothing is.
    """
    return _passed_over(manifests, attempts, stream, given_up, in_silence=False)


def left_behind(
    manifests: Iterable[Manifest], attempts: Iterable[AttemptRecord], stream: str
) -> tuple[Manifest, ...]:
    """Of :func:`branches` those that a run of the line passed over while somebody was silent,
    newest first. What another side, or a trainer that did not know it was over, saved is not.
    """
    return _passed_over(manifests, attempts, stream, (), in_silence=True)


def _passed_over(
    manifests: Iterable[Manifest],
    attempts: Iterable[AttemptRecord],
    stream: str,
    also: Collection[str],
    *,
    in_silence: bool,
) -> tuple[Manifest, ...]:
    manifests = tuple(manifests)
    chain = Chain(manifests, attempts)
    heads = chain.heads
    if len(heads) > 1:  # also where they see the same: each may have left something else behind
        return ()
    history = chain.line(heads[0] if heads else None, stream)
    on, left = history.positions(manifests), chain.left(history, in_silence=in_silence)
    off = {
        manifest.save_id: manifest
        for manifest in manifests
        if manifest.stream == stream
        and manifest.save_id not in on
        and (manifest.seq <= left.get(manifest.attempt.id, -1) or manifest.save_id in also)
    }
    return tuple(sorted(off.values(), key=age, reverse=True))


def branches(
    manifests: Iterable[Manifest],
    attempts: Iterable[AttemptRecord],
    stream: str,
    given_up: Collection[str] = (),
) -> tuple[Manifest, ...]:
    """The checkpoints of ``stream`` that another side saved, which no rule deletes, newest first.

    At a fork all are among them: nothing tells which side goes on.
    """
    manifests, attempts = tuple(manifests), tuple(attempts)
    found = {each.save_id: each for each in manifests if each.stream == stream}
    for each in candidates(manifests, attempts, stream):
        del found[each.save_id]
    for each in abandoned(manifests, attempts, stream, given_up):
        del found[each.save_id]
    return tuple(sorted(found.values(), key=age, reverse=True))


def head(
    manifests: Iterable[Manifest], attempts: Iterable[AttemptRecord], stream: str
) -> Manifest | None:
    """The newest candidate of ``stream``; None if there is none."""
    return next(iter(candidates(manifests, attempts, stream)), None)


def ancestry_of(manifest: Manifest) -> tuple[Ancestor, ...]:
    """The lineage of an attempt that goes on from ``manifest``: its own, and itself."""
    itself = Ancestor(manifest.attempt.number, manifest.attempt.id, manifest.seq)
    return (*manifest.lineage, itself)[-LINEAGE_MAX:]


def base_of(record: AttemptRecord, stream: str) -> StreamBase:
    """Where the attempt took ``stream`` up: what its saves give as parent and lineage.

    A stream that nobody knew when the attempt was opened begins anew.
    """
    base = stated_base(record, stream)
    return base or StreamBase(stream=stream, parent=None, parent_step=None, lineage=())


@dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    """Where a new attempt takes one stream up."""

    save_id: str | None
    """Any that exists; None: the stream begins anew."""
    newest: tuple[Ancestor, ...] = ()
    """:func:`ancestry_of` the newest candidate that was known when that was chosen: what is not
    ``save_id`` or before it is abandoned."""
    in_silence: bool = False
    """Somebody could not be asked for it: what is newer is only left behind."""


def next_attempt(
    attempts: Iterable[AttemptRecord],
    manifests: Iterable[Manifest],
    attempt_id: str,
    bases: Mapping[str, Base],
    followed: Sequence[Followed],
    now_s: float,
    *,
    namespace: str,
    run: str,
    taken: Iterable[int] = (),
) -> AttemptRecord:
    """The record of a new attempt, which follows ``followed``.

    Every known stream gets a base, those that ``bases`` does not name the one that lets them go on
    as they are: the record then decides alone, whatever else is lost later, and a save that a
    zombie of an older attempt adds afterwards lies outside of it.

    Args:
        attempts: All known records of the namespace.
        manifests: All known manifests of the namespace, of every stream and tier.
        attempt_id: Random, 32 hex digits.
        bases: By stream.
        followed: First the attempt that it goes on from, then what it leaves aside; () begins the
            namespace anew.
        now_s: Seconds since 1970, for people.
        namespace: Of the run.
        run: Who opens it, 32 hex digits.
        taken: Numbers that are, nobody can tell by whom.

    Raises:
        NotFoundError: A base is not among the manifests. Field ``key``: its save id.
        UsageError: A base is a checkpoint of another stream.
    """
    attempts, manifests = tuple(attempts), tuple(manifests)
    chain = Chain(manifests, attempts)
    by_id = {manifest.save_id: manifest for manifest in manifests}
    stated = {stream: _chosen_base(stream, base, by_id) for stream, base in bases.items()}
    streams = {manifest.stream for manifest in manifests}
    streams |= {base.stream for record in attempts for base in record.bases}
    for stream in streams - stated.keys() if followed else ():
        inherited = _inherited_base(chain, followed[0], manifests, stream, run)
        if inherited is not None:
            stated[stream] = inherited
    numbers = (each for each in (*taken, *(f.number for f in followed)) if each < NUMBER_MAX)
    return AttemptRecord(
        namespace=namespace,
        number=1 + max(numbers, default=0),
        id=attempt_id,
        run=run,
        bases=tuple(stated[stream] for stream in sorted(stated)),
        created_at_s=now_s,
        followed=tuple(followed),
        in_silence=tuple(sorted(stream for stream, base in bases.items() if base.in_silence)),
    )


def _chosen_base(stream: str, base: Base, by_id: Mapping[str, Manifest]) -> StreamBase:
    if base.save_id is None:
        return StreamBase(
            stream=stream, parent=None, parent_step=None, lineage=(), abandons=base.newest
        )
    parent = by_id.get(base.save_id)
    if parent is None:
        raise NotFoundError(
            f"the checkpoint {base.save_id} of stream {stream!r} does not exist any more; load "
            "again",
            key=base.save_id,
        )
    if parent.stream != stream:
        raise UsageError(
            f"the checkpoint {base.save_id} belongs to stream {parent.stream!r}, not {stream!r}"
        )
    lineage = ancestry_of(parent)
    return StreamBase(
        stream=stream,
        parent=base.save_id,
        parent_step=parent.step,
        lineage=lineage,
        abandons=base.newest if base.newest != lineage else (),
    )


def _inherited_base(
    chain: Chain, followed: AttemptId, manifests: Sequence[Manifest], stream: str, run: str
) -> StreamBase | None:
    """The base that leaves the stream as it is; None: nobody knows it on this line.

    Other ranks of the same run may just be saving into it: all that they do is on the line.
    """
    history = chain.line(followed, stream)
    if history.attempt is None:
        return None
    record = chain.records.get(history.attempt.id)
    newest = next(iter(on_line(history, manifests)), None)
    parent: str | None
    step: int | None
    if newest is not None and newest.attempt == history.attempt:
        parent, step, before, last_seq = newest.save_id, newest.step, newest.lineage, newest.seq
    else:
        # The line's last attempt has not saved here, so its own base goes on being the base.
        found = stated_base(record, stream)
        if found is None:
            return None
        parent, step, before, last_seq = found.parent, found.parent_step, found.lineage, -1
    if record is not None and record.run == run:
        last_seq = INT_MAX
    itself = Ancestor(history.attempt.number, history.attempt.id, last_seq)
    lineage = (*before, itself)[-LINEAGE_MAX:] if last_seq >= 0 else before
    return StreamBase(stream=stream, parent=parent, parent_step=step, lineage=lineage)


def on_line(history: Line, manifests: Iterable[Manifest]) -> tuple[Manifest, ...]:
    """The manifests on the line, each once, newest first."""
    manifests = tuple(manifests)
    order = history.positions(manifests)
    on = {manifest.save_id: manifest for manifest in manifests if manifest.save_id in order}
    return tuple(on[save_id] for save_id in sorted(on, key=order.__getitem__, reverse=True))


def stated_base(record: AttemptRecord | None, stream: str) -> StreamBase | None:
    """What the record says of ``stream``, if anything."""
    bases = record.bases if record is not None else ()
    return next((base for base in bases if base.stream == stream), None)


def age(manifest: Manifest) -> tuple[int, str, int, str]:
    """What checkpoints are listed by, where no line orders them."""
    return manifest.attempt.number, manifest.attempt.id, manifest.seq, manifest.save_id


def _age(attempt: AttemptId) -> tuple[int, str]:
    return attempt.number, attempt.id
