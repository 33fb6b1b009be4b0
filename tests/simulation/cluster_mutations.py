"""The policy, broken on purpose: each of these must be found, or the simulation checks nothing.

``python -m tests.simulation.cluster_mutations`` says for each one how many seeds it took.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterator
from types import MappingProxyType
from typing import Any

from tests.simulation import cluster_leader
from tests.simulation.cluster_case import CaseFailed, run_case, small
from tieredckpt.policy import history, placement, replication

_repair, _jobs_of, _progress = replication.repair, replication.jobs_of, replication.progress
_place, _split, _next = placement.place, replication.split, replication.next_of_streams
_about, _must_stay = replication._about, replication.must_stay


def _release_at_order(line: Any, records: Any, stream: Any = None) -> set[str]:
    records = tuple(records)
    being = replication.ordered_and_open(line, records)
    return {being[0].save_id} if being else _must_stay(line, records, stream)


def _only_the_replicated(line: Any, records: Any, stream: Any = None) -> set[str]:
    newest = replication.newest_replicated(line, tuple(records))
    return {newest.save_id} if newest is not None else set()


def _any_life(records: Any, incarnations: Any) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for record in records:
        if record.kind == "ack" and record.host in incarnations:
            for segment_id in record.segments:
                found.setdefault(segment_id, set()).add(record.host)
    return found


def _choose_themselves(host: str, life: str, manifest: Any, records: Any, lost: Any = ()) -> Any:
    order = replication.SaveRecord(
        namespace=manifest.namespace, stream=manifest.stream, save_id=manifest.save_id,
        kind="order", id="f" * 32, host=host, incarnation=life,
    )  # fmt: skip
    return _jobs_of(host, life, manifest, [*records, order], lost)


def _everything_is_wanted(line: Any, records: Any, stream: Any = None) -> set[str]:
    return {line[0].save_id} | _must_stay(line, records, stream) if line else set()


def _forgets_one(*args: Any) -> Any:
    return _repair(*args)[:-1]


def _scarce_is_nothing(*args: Any) -> tuple[str, ...]:
    return ()


def _one_is_enough(manifest: Any, records: Any, incarnations: Any) -> Any:
    copies = _progress(manifest, records, incarnations)
    enough = copies.done >= copies.wanted - 1
    return dataclasses.replace(copies, done=copies.wanted) if enough else copies


def _without_the_owner(manifest: Any, records: Any, incarnations: Any) -> Any:
    copies = _progress(manifest, records, incarnations)
    if all(owner == holder for _, owner, holder in copies.missing):
        return dataclasses.replace(copies, done=copies.wanted)
    return copies


def _at_home(*args: Any) -> Any:
    placed = _place(*args)
    holders = {host: (host, *held[1:]) for host, held in placed.holders.items()}
    return dataclasses.replace(placed, holders=MappingProxyType(holders))


def _star(hosts: Any, degree: int = 0) -> Any:
    return _split(hosts, max(len(hosts), 1))


def _loses_one(hosts: Any, degree: int = replication.DEGREE) -> Any:
    return [(child, rest[:-1]) for child, rest in _split(hosts, degree)]


def _always_the_newest(lines: Any, records: Any, last: Any = None, lives: Any = None) -> Any:
    heads = [line[0] for line in lines.values() if line and line[0].replicas]
    records = tuple(records)
    new = [m.save_id for m in heads if not replication.is_ordered(m, records)]
    return new[0] if new else None


MUTATIONS: dict[str, list[tuple[object, str, Any]]] = {
    "the replicated one is let go when the next is ordered": [
        (replication, "must_stay", _release_at_order)
    ],
    "what is being replicated may be let go": [(replication, "must_stay", _only_the_replicated)],
    "acknowledgements of an old incarnation count": [(replication, "_acknowledged", _any_life)],
    "holders choose themselves what they pull": [
        (replication, "jobs_of", _choose_themselves),
        (replication, "must_stay", _everything_is_wanted),
    ],
    "repair forgets one owner": [
        (replication, "repair", _forgets_one), (cluster_leader, "scarce", _scarce_is_nothing),
    ],
    "replicated is said one copy too early": [(replication, "progress", _one_is_enough)],
    "owners need not acknowledge": [(replication, "progress", _without_the_owner)],
    "a copy on the own host counts": [(placement, "place", _at_home)],
    "one host sends to all": [(replication, "split", _star)],
    "the tree leaves hosts out": [(replication, "split", _loses_one)],
    "a child that does not answer takes its branch along": [
        (replication, "promote", lambda branch: None)
    ],
    "what is newest is ordered though another is being copied": [
        (replication, "next_of_streams", _always_the_newest)
    ],
    "what was opened counts, though it has saved nothing": [
        (history, "with_saves", lambda attempts, saved: tuple(attempts))
    ],
    "only the first stream is ever ordered": [
        (replication, "next_of_streams",
         lambda lines, *rest: _next(dict(list(lines.items())[:1]), *rest))
    ],
}  # fmt: skip
"""By what is wrong: (module, attribute, replacement)."""

NOT_VISIBLE = {
    "a child that does not answer takes its branch along":
        "anti-entropy brings the rest, later",
    "owners need not acknowledge":
        "orders travel with every manifest, and who lost its memory pulls its own back first",
}  # fmt: skip


@contextlib.contextmanager
def mutated(name: str) -> Iterator[None]:
    """The policy has this fault in here."""
    with contextlib.ExitStack() as stack:
        for place, attribute, value in MUTATIONS[name]:
            old = getattr(place, attribute)
            setattr(place, attribute, value)
            stack.callback(setattr, place, attribute, old)
        yield


def seeds_until_found(name: str, *, most: int, first: int = 0) -> tuple[int, str]:
    """How many seeds it takes until a case fails, and how it fails; 0: it was not found.

    ``first``: a seed that is tried before the others.
    """
    with mutated(name):
        for count, seed in enumerate(dict.fromkeys((first, *range(most))), 1):
            try:
                run_case(small(seed))
            except CaseFailed as failure:
                return count, str(failure).partition(" s: ")[2].partition("\n")[0]
    return 0, "not found"


def main() -> None:
    tell: Callable[[str], object] = sys.stdout.write
    for name in MUTATIONS:
        if len(sys.argv) > 1 and sys.argv[1] not in name:
            continue
        count, how = seeds_until_found(name, most=200)
        tell(f"{name}: {count or 'NOT FOUND'} {how[:150]}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
