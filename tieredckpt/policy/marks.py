"""Marks: checkpoints that restarts pass over because somebody said so, until it is taken back."""

from __future__ import annotations

from collections.abc import Iterable

from tieredckpt.format.record import SaveRecord


def standing_marks(records: Iterable[SaveRecord]) -> tuple[SaveRecord, ...]:
    """The ``bad`` records that no ``good`` one has taken back, in the order of their ids.

    Depends on the set of records only, which hosts merge by union, so all of them come to the same
    marks in whatever order they hear of them. There is no clock that could say which of two records
    is newer; a ``good`` one takes back those that it names, which are those that were known to who
    said it. Whoever marks a checkpoint meanwhile, or again, is not overruled: the doubt stands.
    """
    about = {record.id: record for record in records if record.kind in ("bad", "good")}
    # Of its own checkpoint only: no record speaks of another one.
    taken_back = {
        (each.namespace, each.stream, each.save_id, mark)
        for each in about.values()
        if each.kind == "good"
        for mark in each.segments
    }
    return tuple(
        about[i]
        for i in sorted(about)
        if about[i].kind == "bad"
        and (about[i].namespace, about[i].stream, about[i].save_id, i) not in taken_back
    )
