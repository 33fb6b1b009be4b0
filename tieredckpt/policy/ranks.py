"""Which process has which rank in the next world: pure functions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec


class Member(msgspec.Struct, frozen=True, array_like=True):
    """One rank."""

    host: str
    pid: int
    local_rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A process that may enter the next generation."""

    host: str
    pid: int
    version: int | None = None
    is_standby: bool = False


def assign(
    ready: Sequence[Candidate], size: int, per_host: int, before: Sequence[Member]
) -> tuple[Member, ...]:
    """The process of each rank; () if there are too few.

    Processes that keep the newest state keep their ranks first, then others that had one: a process
    that changes its rank recompiles. Of the rest, those of hosts with fewer than ``per_host`` come
    first, then those of standby hosts. A host gets ranks of different places on their hosts if it
    can: those of the same place are replicas of one shard if the replicas span hosts.
    """
    if len(ready) < size or not size:
        return ()
    old = {(each.host, each.pid): rank for rank, each in enumerate(before)}
    known = [each for each in ready if each.version is not None or (each.host, each.pid) in old]
    # If fewer are wanted, of all hosts alike: a world needs ranks on more than half of the voters.
    on_host: Counter[str] = Counter()
    order = {}
    for each in known:
        order[each] = (1 if each.version is None else -each.version, on_host[each.host])
        on_host[each.host] += 1
    known.sort(key=order.__getitem__)
    rest, chosen = [each for each in ready if each not in known], known[:size]
    counts = Counter(each.host for each in chosen)
    while len(chosen) < size:
        best = min(rest, key=lambda each: (counts[each.host] >= per_host, each.is_standby))
        rest.remove(best)
        chosen.append(best)
        counts[best.host] += 1
    ranks: dict[int, Candidate] = {}
    others = []
    for each in chosen:
        rank = old.get((each.host, each.pid), size)
        if rank < size and rank not in ranks:
            ranks[rank] = each
        else:
            others.append(each)
    places = Counter((each.host, rank % per_host) for rank, each in ranks.items())
    for rank in sorted(set(range(size)) - ranks.keys()):
        ranks[rank] = min(others, key=lambda each: places[each.host, rank % per_host])
        others.remove(ranks[rank])
        places[ranks[rank].host, rank % per_host] += 1
    return _with_local_ranks([ranks[rank] for rank in range(size)], before)


def _with_local_ranks(ordered: Sequence[Candidate], before: Sequence[Member]) -> tuple[Member, ...]:
    """Members with local ranks; a process keeps its own, which names its device."""
    old = {(each.host, each.pid): each.local_rank for each in before}
    wanted = {(each.host, each.pid) for each in ordered} & old.keys()
    used = {(host, old[host, pid]) for host, pid in wanted}
    members = []
    for each in ordered:
        local = old.get((each.host, each.pid))
        if local is None:
            local = next(n for n in range(len(ordered)) if (each.host, n) not in used)
            used.add((each.host, local))
        members.append(Member(each.host, each.pid, local))
    return tuple(members)
