"""Pins and marks: what retention leaves alone, and restarts pass over, because somebody said so.

Until it is taken back.
"""

from __future__ import annotations

from collections.abc import Iterable

from tieredckpt.format.record import SaveRecord

PINNING = ("pin", "unpin")
MARKING = ("bad", "good")
SAID = (*PINNING, *MARKING)
"""Kinds of records of what a person said; they lie in every tier that holds the checkpoint, so they
outlive hosts."""
DESTINING = ("dropped", "spill")
"""Kinds of records that say where a checkpoint goes. They lie there, too: a tier below may be
filled from there after memory was lost."""
LASTING = (*SAID, *DESTINING)


def open_pins(records: Iterable[SaveRecord]) -> tuple[SaveRecord, ...]:
    """The pins of one checkpoint that no ``unpin`` has ended, in the order of their ids.

    Depends on the set of records only. An ``unpin`` ends the pins that it names, which are those
    that were known to who said it: of two people who pin at the same time on two hosts that cannot
    reach each other, one cannot end what the other one said.
    """
    about = {record.id: record for record in records if record.kind in PINNING}
    ended = {old for each in about.values() if each.kind == "unpin" for old in each.segments}
    left = [about[i] for i in sorted(about) if about[i].kind == "pin" and i not in ended]
    return tuple(left)


def pin_reason(records: Iterable[SaveRecord]) -> str | None:
    """Why a checkpoint is pinned; None: it is not."""
    pins = open_pins(records)
    if not pins:
        return None
    return "; ".join(dict.fromkeys(pin.text or "no reason given" for pin in pins))


def let_go(records: Iterable[SaveRecord]) -> frozenset[str]:
    """Save ids of the checkpoints on a branch of which somebody said that nobody needs them: an
    ``unpin`` that ends no pin. Whoever ended a pin did not say so, and a pin that is open holds.
    """
    about: dict[str, list[SaveRecord]] = {}
    for record in records:
        if record.kind in PINNING:
            about.setdefault(record.save_id, []).append(record)
    return frozenset(
        save_id
        for save_id, said in about.items()
        if any(each.kind == "unpin" and not each.segments for each in said) and not open_pins(said)
    )


def standing_marks(records: Iterable[SaveRecord]) -> tuple[SaveRecord, ...]:
    """The ``bad`` records that no ``good`` one has taken back, in the order of their ids.

    Depends on the set of records only, which hosts merge by union, so all of them come to the same
    marks in whatever order they hear of them. There is no clock that could say which of two records
    is newer; a ``good`` one takes back those that it names, which are those that were known to who
    said it. Whoever marks a checkpoint meanwhile, or again, is not overruled: the doubt stands.
    """
    about = {record.id: record for record in records if record.kind in MARKING}
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
