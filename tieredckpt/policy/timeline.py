"""Which checkpoints are the history of the newest start of training, and which were abandoned.

Each start of training opens an *attempt*. Within one attempt the saves of a stream are a chain,
numbered by ``seq``; an attempt takes each stream up at one earlier save, its *base*. So all saves
ever made form a tree whose branches are attempts, and the history of an attempt is its own saves
and, for each attempt before the branching point, the saves up to it: one
:class:`~tieredckpt.format.manifest.Ancestor` each, the *lineage*. Every manifest and every attempt
record carries the whole lineage, so ancestry is decided without the checkpoints in between, which
retention may have deleted. See docs/timeline.md.

Laws (tests/property/test_policy_timeline.py): the candidates of a stream are exactly the newest
attempt's ancestors that still exist, newest first; neither clocks nor steps decide; what a zombie
of an older attempt adds is never a candidate.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tieredckpt.errors import NotFoundError, UsageError
from tieredckpt.format.manifest import Ancestor, AttemptId, AttemptRecord, Manifest, StreamBase
from tieredckpt.format.packing import INT_MAX

LINEAGE_MAX = 2048
"""Longest lineage that a new attempt is given. Older ancestors are forgotten, so that manifests
stay small in a run that was restarted (and saved in between) thousands of times."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """The history that the newest attempt sees of one stream."""

    stream: str
    attempt: AttemptId | None
    """The attempt whose own saves are all on the line; None: there has never been one."""
    lineage: tuple[Ancestor, ...]
    """What is on the line of earlier attempts, oldest first."""
    certain: bool
    """False if the newest attempt says nothing of this stream: it has no save there, and its record
    is lost, or was made when nobody knew of the stream (a tier did not answer). The line is then
    that of the attempt before, as the best guess."""

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


def newest_attempt(
    manifests: Iterable[Manifest], attempts: Iterable[AttemptRecord]
) -> AttemptId | None:
    """The newest attempt that a record or a save of any stream tells of; None if there is none."""
    known = _known_attempts(manifests, attempts)
    return _id(max(known)) if known else None


def line(manifests: Iterable[Manifest], attempts: Iterable[AttemptRecord], stream: str) -> Line:
    """The history of ``stream`` as the newest attempt sees it.

    A stream that the newest attempt neither took up nor saved into goes on as the attempt before
    it left it, and so on backwards.
    """
    manifests = tuple(manifests)
    records = {(record.number, record.id): record for record in attempts}
    saved = {
        (manifest.attempt.number, manifest.attempt.id): manifest.lineage
        for manifest in manifests
        if manifest.stream == stream
    }
    guessed = False
    for key in sorted(_known_attempts(manifests, records.values()), reverse=True):
        base = _stated_base(records.get(key), stream)
        lineage = base.lineage if base is not None else saved.get(key)
        if lineage is not None:
            return Line(stream=stream, attempt=_id(key), lineage=lineage, certain=not guessed)
        guessed = True
    # Nobody has ever saved into this stream, as far as anything tells: there is nothing to guess.
    return Line(stream=stream, attempt=None, lineage=(), certain=True)


def candidates(
    manifests: Iterable[Manifest], attempts: Iterable[AttemptRecord], stream: str
) -> tuple[Manifest, ...]:
    """The checkpoints of ``stream`` that a restart may go on from, newest first.

    Manifests of other streams may, and should, be passed too: they tell of attempts. A checkpoint
    that is passed twice (once per tier) is returned once.
    """
    manifests = tuple(manifests)
    return _on(line(manifests, attempts, stream), manifests)


def abandoned(
    manifests: Iterable[Manifest], attempts: Iterable[AttemptRecord], stream: str
) -> tuple[Manifest, ...]:
    """The checkpoints of ``stream`` that are certainly no candidates, newest first.

    Empty while the line is uncertain: what may be history must not be evicted first.
    """
    manifests = tuple(manifests)
    history = line(manifests, attempts, stream)
    if not history.certain:
        return ()
    on = history.positions(manifests)
    off = {
        manifest.save_id: manifest
        for manifest in manifests
        if manifest.stream == stream and manifest.save_id not in on
    }
    return tuple(sorted(off.values(), key=_age, reverse=True))


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
    base = _stated_base(record, stream)
    return base or StreamBase(stream=stream, parent=None, parent_step=None, lineage=())


def next_attempt(
    attempts: Iterable[AttemptRecord],
    manifests: Iterable[Manifest],
    attempt_id: str,
    bases: Mapping[str, str | None],
    now_s: float,
    *,
    namespace: str,
    run: str,
) -> AttemptRecord:
    """The record of a new attempt, newer than everything that is known.

    Every known stream gets a base, those that ``bases`` does not name the one that lets them go on
    as they are: the record then decides alone, whatever else is lost later, and a save that a
    zombie of an older attempt adds afterwards lies outside of it. (A stream whose line is uncertain
    is left out, so that it stays visibly so until somebody loads it.)

    Args:
        attempts: All known records of the namespace.
        manifests: All known manifests of the namespace, of every stream and tier.
        attempt_id: Random, 32 hex digits.
        bases: By stream, the save id that was loaded (any that exists, abandoned ones too), or
            None for a stream that begins anew.
        now_s: Seconds since 1970, for people.
        namespace: Of the run.
        run: Who opens it, 32 hex digits.

    Raises:
        NotFoundError: A base is not among the manifests. Field ``key``: its save id.
        UsageError: A base is a checkpoint of another stream.
    """
    attempts, manifests = tuple(attempts), tuple(manifests)
    known = _known_attempts(manifests, attempts)
    by_id = {manifest.save_id: manifest for manifest in manifests}
    stated = {stream: _chosen_base(stream, save_id, by_id) for stream, save_id in bases.items()}
    streams = {manifest.stream for manifest in manifests}
    streams |= {base.stream for record in attempts for base in record.bases}
    for stream in streams - stated.keys():
        inherited = _inherited_base(manifests, attempts, stream)
        if inherited is not None:
            stated[stream] = inherited
    return AttemptRecord(
        namespace=namespace,
        number=1 + (max(known)[0] if known else 0),
        id=attempt_id,
        run=run,
        bases=tuple(stated[stream] for stream in sorted(stated)),
        created_at_s=now_s,
    )


def _chosen_base(stream: str, save_id: str | None, by_id: Mapping[str, Manifest]) -> StreamBase:
    if save_id is None:
        return StreamBase(stream=stream, parent=None, parent_step=None, lineage=())
    parent = by_id.get(save_id)
    if parent is None:
        raise NotFoundError(
            f"the checkpoint {save_id} of stream {stream!r} does not exist any more; load again",
            key=save_id,
        )
    if parent.stream != stream:
        raise UsageError(
            f"the checkpoint {save_id} belongs to stream {parent.stream!r}, not {stream!r}"
        )
    return StreamBase(
        stream=stream, parent=save_id, parent_step=parent.step, lineage=ancestry_of(parent)
    )


def _inherited_base(
    manifests: Sequence[Manifest], attempts: Sequence[AttemptRecord], stream: str
) -> StreamBase | None:
    """The base that leaves the stream as it is; None if that is uncertain."""
    history = line(manifests, attempts, stream)
    if not history.certain or history.attempt is None:
        return None
    newest = next(iter(_on(history, manifests)), None)
    if newest is None or newest.attempt != history.attempt:
        # The line's last attempt has not saved here, so its own base goes on being the base.
        record = next((r for r in attempts if AttemptId(r.number, r.id) == history.attempt), None)
        return _stated_base(record, stream)
    return StreamBase(
        stream=stream,
        parent=newest.save_id,
        parent_step=newest.step,
        lineage=ancestry_of(newest),
    )


def _on(history: Line, manifests: Sequence[Manifest]) -> tuple[Manifest, ...]:
    """The manifests on the line, each once, newest first."""
    order = history.positions(manifests)
    on = {manifest.save_id: manifest for manifest in manifests if manifest.save_id in order}
    return tuple(on[save_id] for save_id in sorted(on, key=order.__getitem__, reverse=True))


def _known_attempts(
    manifests: Iterable[Manifest], attempts: Iterable[AttemptRecord]
) -> set[tuple[int, str]]:
    known = {(record.number, record.id) for record in attempts}
    return known | {(manifest.attempt.number, manifest.attempt.id) for manifest in manifests}


def _stated_base(record: AttemptRecord | None, stream: str) -> StreamBase | None:
    bases = record.bases if record is not None else ()
    return next((base for base in bases if base.stream == stream), None)


def _id(key: tuple[int, str]) -> AttemptId:
    return AttemptId(number=key[0], id=key[1])


def _age(manifest: Manifest) -> tuple[int, str, int, str]:
    return manifest.attempt.number, manifest.attempt.id, manifest.seq, manifest.save_id
