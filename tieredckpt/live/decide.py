"""The decisions of a job's supervisors: pure functions of what they know about their processes.

One supervisor leads: it knows the processes of all hosts (:class:`View`) and makes decisions
(:func:`decide`), which all others adopt. Each supervisor applies the newest decision on its own
host (:func:`apply_here`). A job of one host is a job whose only supervisor leads.

A generation is one world of ranks. It ends when a rank dies, raises, makes no progress, or when all
are done. The next one begins as soon as enough processes are ready. Two worlds never train at the
same time, also if the network splits: a world needs ranks on more than half of the voters, so that
any two worlds share a host, and a host has ranks in one generation at a time. docs/design/008.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec

from tieredckpt.live.messages import (
    WITH_RANKS,
    Decision,
    Failure,
    Order,
    ProcessFacts,
    Term,
    View,
    Where,
)
from tieredckpt.policy.elastic import largest_world, worlds
from tieredckpt.policy.ranks import Candidate, Member, assign

FAILURES_MAX = 3
"""Failures of a script at one step after which it is considered broken."""
REFILL_UPDATES = 100
"""Updates in a row that refill the budget of restarts."""
ARMED_AFTER = 3
"""Updates of a generation before its hangs are detected: compilation and cold files come first."""
START_S_MAX = 1800.0
"""Longest time for a process to reach ``live.run``."""
LISTED_S = 30.0
"""The first generation waits for so long for hosts that are listed, such as standby hosts."""
SHRUNK_MAX = 7
HANG_FACTOR = 5.0
HANG_S_MIN = 60.0
EXIT_RESTART_HOST = 3
"""Exit code of a supervisor that cannot go on: its host should start it again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """The options of the command line.

    Attributes:
        per_host: Ranks of one host.
        hosts: Hosts with ranks.
        hosts_min: The same once processes are lost; 0: ``hosts``.
        group: Ranks that hold one whole state together; a world of fewer hosts has a multiple.
        standby: Processes of a host beyond its ranks.
        hang_s: Seconds without progress that are a hang; None: derived from the steps; 0: never.
        unwind_s: Time that a rank has to leave ``train`` before it is killed.
        wait_s: Longest wait for hosts and processes that are missing.
        allow_split: Also a half or less of the voters may form a world.
        stable_s: A world grows once what it grows by has been ready for so long; twice as long
            after each world that soon lost processes, up to 2 ** SHRUNK_MAX times.
    """

    per_host: int
    hosts: int = 1
    hosts_min: int = 0
    group: int = 1
    standby: int = 0
    hang_s: float | None = None
    unwind_s: float = 30.0
    wait_s: float = 0.0
    allow_split: bool = False
    stable_s: float = 5.0

    @property
    def hosts_to_begin(self) -> int:
        """Hosts that begin the job.

        Two parts of a network cannot both have as many, nor one part while ``hosts_min`` train.
        """
        if not self.hosts_min or self.allow_split:
            return self.hosts_min or self.hosts
        return max(self.hosts // 2 + 1, self.hosts - self.hosts_min + 1)

    @property
    def size(self) -> int:
        """Ranks of a generation, unless a user has ordered another number."""
        return self.per_host * self.hosts

    @property
    def sizes(self) -> str:
        """The flags that must be the same on all hosts."""
        nodes = f"{self.hosts_min}:{self.hosts}" if self.hosts_min else f"{self.hosts}"
        group = f" --sharding-group {self.group}" if self.hosts_min else ""
        return f"--nnodes {nodes} --nproc-per-node {self.per_host}{group}"

    def target(self, known: Decision) -> int:
        """Ranks of a generation if no process is missing."""
        return known.order.size or self.size

    def size_after(self, known: Decision) -> int:
        """Ranks of the next generation."""
        return known.wanted or self.target(known)

    def largest(self, known: Decision, available: int) -> int:
        """Ranks of the largest world of so many processes; 0: there is none."""
        target = self.target(known)
        smaller = worlds(self.per_host * self.hosts_min, target, self.group)
        return largest_world([*(smaller if self.hosts_min else ()), target], available)

    def is_changing(self, known: Decision) -> bool:
        """Whether the ranks of the generation are to leave for one of other hosts or size."""
        if not known.members or known.saves_only:
            return False
        is_left = any(each.host in known.leaving for each in known.members)
        return is_left or self.size_after(known) != known.size


# --- what the leader decides ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """All that the leader's decision depends on.

    Attributes:
        leader: This host.
        known: The newest decision.
        views: By host, of those that answer, this one among them.
        awaited: Hosts that may answer a leader that is new.
        waited_s: Since something changed.
        stable_s: Since hosts, or the numbers of their processes that are ready, changed.
        listed: Hosts that may come, as far as it is known.
        start: Id of this host's start, and of a run that it begins.
        term: The leader's, which all hosts of ``views`` have acknowledged.
    """

    leader: str
    known: Decision
    views: Mapping[str, View]
    awaited: frozenset[str] = frozenset()
    waited_s: float = 0.0
    stable_s: float = 0.0
    listed: int = 0
    start: str = ""
    term: Term = (0, "", "")

    def process(self, member: Member) -> ProcessFacts | None:
        """The process of a rank; None: it, or its host, is lost."""
        view = self.views.get(member.host)
        found = view.processes if view is not None else ()
        return next((each for each in found if each.pid == member.pid), None)

    def member_views(self) -> list[View]:
        """Of the hosts that have ranks, once they know the generation."""
        hosts = dict.fromkeys(each.host for each in self.known.members)
        found = [self.views[host] for host in hosts if host in self.views]
        return [each for each in found if each.began == self.known.began]


def leader_of(known: Decision, host: str, answering: Collection[str]) -> str:
    """The leader as ``host`` sees it; "": none of the hosts that may lead answers.

    That is the lowest host of the last generation that answers, then the other voters; before the
    first generation the lowest of all.
    """
    candidates = order_of(known) or sorted({host, *answering})
    return next((each for each in candidates if each == host or each in answering), "")


def order_of(known: Decision) -> list[str]:
    """The hosts that may lead, the first one that answers does; []: any host may."""
    hosts = (each.host for each in known.members)
    found = dict.fromkeys([*hosts, *known.voters, *known.old_voters])
    return sorted(found, key=known.leaving.__contains__)  # those that leave come last


def adopt_newest(known: Decision, views: Mapping[str, View]) -> Decision:
    """The newest decision that this host or one of its followers knows."""
    newer = [view.newer for view in views.values() if view.newer is not None]
    return max([known, *newer], key=lambda each: each.place)


def may_lead(policy: Policy, now: Situation) -> bool:
    """Whether enough hosts follow this one for it to make decisions."""
    if not now.known.voters:
        return sum(not view.is_standby for view in now.views.values()) >= policy.hosts_to_begin
    if policy.allow_split:
        return True
    return _is_majority(now.known, now.views) and (_remembers(now) or _has_forgotten(now))


def _is_majority(known: Decision, hosts: Collection[str]) -> bool:
    """Whether hosts are more than half of the voters, and of those before."""
    sides = (known.voters, known.old_voters)
    return all(2 * sum(each in hosts for each in side) > len(side) for side in sides if side)


def decide(policy: Policy, now: Situation) -> Decision | None:
    """The next decision of the leader; None: it waits. The caller checks :func:`may_lead`."""
    known = now.known
    if known.exit is not None or any(view.place > known.place for view in now.views.values()):
        return None  # a newer decision is on its way
    if _has_forgotten(now) and not policy.allow_split:
        return _exit(policy, now, EXIT_RESTART_HOST, "too many hosts were started anew at a time")
    if known.generation and known.term != now.term:
        return _next(now)  # hosts that have acknowledged this term adopt none of an older one
    views, (order, leaving) = now.views, _wanted(policy, now)
    if known.generation and (order, leaving) != (known.order, known.leaving):
        left_s = [views[host].left_s for host in leaving if host in views]
        known_s = [each for each in left_s if each is not None]
        if order.host in leaving:
            known_s.append(order.deadline_s)
        least_s = min(known_s, default=known.left_s) if leaving else None
        wanted = _fitting(policy, now, order, leaving)
        return _next(now, order=order, leaving=leaving, left_s=least_s, wanted=wanted)
    inside = [rank for rank, member in enumerate(known.members) if _is_inside(now, member)]
    if inside and known.ended:
        return _other_voters(policy, now, known.members)
    if inside:
        reason = _fault(policy, now, inside)
        if reason:
            return _next(now, ended=reason, is_outside=_has_lost_host(now))
        if len(inside) < known.size:
            return None
        # Those of an order that was adopted vote already.
        hosts = () if policy.is_changing(known) else known.members
        return _growth(policy, now) or _other_voters(policy, now, hosts)
    if is_over(now) and not known.saves_only and _all_done(now):
        return _exit(policy, now, 0, "training is done")
    return _between(policy, now)


def _remembers(now: Situation) -> bool:
    """Whether half of the voters answer that know what they have acknowledged and adopted.

    Any majority that has adopted a decision has one of these. A host that was started anew forgot.
    """
    starts = {(host, view.start) for host, view in now.views.items()}
    sides = (now.known.voters, now.known.old_voters)
    return all(2 * len(starts & side.items()) >= len(side) for side in sides)


def _has_forgotten(now: Situation) -> bool:
    """Whether so many voters were started anew that half of them cannot answer any more."""
    starts = {host: view.start for host, view in now.views.items()}
    return any(
        2 * sum(starts.get(host, start) != start for host, start in side.items()) > len(side)
        for side in (now.known.voters, now.known.old_voters)
    )


def _wanted(
    policy: Policy, now: Situation, *, by_any: bool = False
) -> tuple[Order, tuple[str, ...]]:
    """The newest order that can be applied, and the hosts that are to have no ranks.

    A host that is lost, or was started anew, does not leave any more. ``by_any``: with any voters.
    """
    known, views = now.known, now.views
    if by_any:
        now = replace(now, known=msgspec.structs.replace(known, voters={}, old_voters={}))
    order = known.order
    leaving = [
        host
        for host in known.leaving
        if host in now.awaited
        or (host in views and (views[host].left_s is not None or views[host].place < known.place))
    ]
    asked = [host for host, view in sorted(views.items()) if view.left_s is not None]
    newer = sorted((v.order for v in views.values() if v.order > order), reverse=True)
    asked += [each.host for each in newer if each.host in views]
    for host in asked:
        if host not in leaving and _has_world(policy, now, order, (*leaving, host)):
            leaving.append(host)
    for each in newer:
        if each.host in leaving:
            order = msgspec.structs.replace(each, size=order.size, before=order.before)
        elif not each.host and _has_world(policy, now, each, tuple(leaving), each.size):
            order = msgspec.structs.replace(each, before=known.size)
        if order != known.order:
            break
    return order, tuple(leaving)


def _has_world(
    policy: Policy, now: Situation, order: Order, leaving: tuple[str, ...], least: int = 1
) -> bool:
    """Whether the ranks can form a world, of ``least`` ranks, once all have left the generation."""
    members = _world(policy, now, order, leaving)
    return len(members) >= least and _may_begin(policy, now.known, members)


def _world(
    policy: Policy, now: Situation, order: Order, leaving: tuple[str, ...]
) -> tuple[Member, ...]:
    """The members of the largest world once all have left the generation; (): there is none."""
    known = msgspec.structs.replace(now.known, order=order, leaving=leaving)
    ready = _candidates(now, known, WITH_RANKS)
    return assign(ready, policy.largest(known, len(ready)), policy.per_host, known.members)


def _other_voters(policy: Policy, now: Situation, members: tuple[Member, ...]) -> Decision | None:
    """Voters that follow the hosts: of these members, or of a world that an order waits for.

    Until most of the old voters, and of the new ones, have adopted the change, both vote.
    """
    known, views = now.known, now.views
    lost = {each.host for each in known.members} - views.keys() - now.awaited
    if known.old_voters:
        adopted = {host for host, view in views.items() if view.place >= known.place}
        return _next(now, old_voters={}) if _is_majority(known, adopted) else None
    if not members:
        return None
    order, leaving = _wanted(policy, now, by_any=True)
    if (order, leaving) != (known.order, known.leaving):
        members = _world(policy, now, order, leaving)
    hosts = [host for host in dict.fromkeys(e.host for e in members) if host not in lost]
    voters = _voters(policy, now, hosts, leaving)
    if not voters or voters == known.voters:
        return None
    return _next(now, voters=voters, old_voters=known.voters)


def _fitting(policy: Policy, now: Situation, order: Order, leaving: tuple[str, ...]) -> int:
    """``Decision.wanted`` for an order, and hosts that leave."""
    wanted = now.known.wanted if order.size == now.known.order.size else 0
    known = msgspec.structs.replace(now.known, order=order, leaving=leaving, wanted=wanted)
    size = policy.largest(known, len(_candidates(now, known, WITH_RANKS)))
    return size if 0 < size < policy.size_after(known) else wanted


def _growth(policy: Policy, now: Situation) -> Decision | None:
    """A larger world, once its processes have been ready for long."""
    known = now.known
    wait_s = policy.stable_s * 2 ** min(known.shrunk, SHRUNK_MAX)
    if now.stable_s < wait_s or policy.is_changing(known) or not has_trained(now):
        return None
    size = policy.largest(known, len(_candidates(now, known, WITH_RANKS)))
    return _next(now, wanted=size) if size > known.size and not known.saves_only else None


def _undone(order: Order) -> Order:
    """The size before it."""
    return msgspec.structs.replace(order, size=order.before, before=0)


def _next(now: Situation, **changes: object) -> Decision:
    """The decision after the known one, in this leader's term."""
    known = now.known
    return msgspec.structs.replace(known, term=now.term, number=known.number + 1, **changes)


def _exit(policy: Policy, now: Situation, code: int, reason: str) -> Decision:
    ended = reason_of(policy, now) if code and now.known.generation else now.known.ended
    return _next(now, exit=code, reason=reason, ended=ended)


def _is_inside(now: Situation, member: Member) -> bool:
    """Whether a rank is in its generation, or may still enter it."""
    process = now.process(member)
    if process is None:
        return member.host in now.awaited
    if process.where == "in" or process.began >= now.known.began:
        return process.where == "in"
    return not now.known.ended or now.views[member.host].place < now.known.place


def _all_done(now: Situation) -> bool:
    found = [now.process(member) for member in now.known.members]
    return all(
        each is not None and each.where == "done" and each.began == now.known.began
        for each in found
    )


def _fault(policy: Policy, now: Situation, inside: Sequence[int]) -> str:
    """Why the generation that runs must end; "": it need not."""
    known = now.known
    for rank, member in enumerate(known.members):
        if member.host in now.awaited:
            continue
        if member.host not in now.views:
            return f"host {member.host} is lost"
        process = now.process(member)
        if process is None:
            return next(_texts(now), f"rank {rank} died")
        may_leave = known.saves_only or process.is_changing
        has_left = process.began > known.began or (process.began == known.began and not may_leave)
        if process.where == "ready" and has_left:
            return next(_texts(now), f"rank {rank} has left for another generation")
    if text := next(_texts(now), ""):
        return text
    begun = [each.begun for rank in inside if (each := now.process(known.members[rank]))]
    for rank, member in enumerate(known.members):
        process = now.process(member)
        if process is not None and process.where == "done":
            last = process.version or 0
            if any(each is not None and each >= last for each in begun):
                return f"rank {rank} returned from train after step {last}"
    views = now.member_views()
    updates = max((each.updates for each in views), default=0)
    limit_s = hang_s(policy, updates, max((each.step_s for each in views), default=0.0))
    idle_s = min((each.idle_s for each in views), default=0.0)
    if limit_s is not None and idle_s >= limit_s and not any(each.quiet_s > 0 for each in views):
        return f"no rank made progress for {idle_s:.0f} s"
    return ""


def _texts(now: Situation) -> Iterator[str]:
    """Deaths first: the error of a rank whose peer died often arrives before the death."""
    found = [each for view in now.member_views() for each in view.failures]
    yield from (each.text for each in sorted(found, key=lambda each: not each.is_death))


def hang_s(policy: Policy, updates: int, step_s: float) -> float | None:
    """Seconds without progress that are a hang; None: hangs are not detected now."""
    if policy.hang_s == 0 or updates < ARMED_AFTER:
        return None
    return policy.hang_s if policy.hang_s is not None else max(HANG_S_MIN, HANG_FACTOR * step_s)


def _between(policy: Policy, now: Situation) -> Decision | None:
    """No rank is in a generation: begin the next one, wait, or end the job."""
    known, views = now.known, now.member_views()
    failures = [each for view in views for each in view.failures]
    has_saved = known.saves_only and not known.ended and not failures
    ended = "" if has_saved or not known.generation else reason_of(policy, now)
    updated = max((each.updated for each in views), default=known.updated)
    count, failed_at = known.failures, known.failed_at
    if ended and not _is_outside_fault(policy, now, failures):
        count, failed_at = (count + 1 if updated == failed_at else 1), updated
    code = ([1] + [each.code for each in failures if each.is_death])[-1]
    if any(each.is_final for each in failures):
        return _exit(policy, now, code, "another generation would fail, too")
    if count >= FAILURES_MAX and known.order.before:
        return _next(now, order=_undone(known.order), wanted=0, failures=0)
    if count >= FAILURES_MAX:
        return _exit(policy, now, code, f"the script failed {count} times at the same step")
    left = _left(now)
    is_short = left < policy.size_after(known)
    members, saves_only = _members(policy, now, is_short=is_short)
    may_begin = saves_only or _may_begin(policy, known, members)
    if members and may_begin:
        hosts = tuple(dict.fromkeys(each.host for each in members))
        entries = tuple(entry for host in hosts if (entry := now.views[host].entry) is not None)
        is_full = len(members) == policy.target(known)
        shrunk = known.shrunk
        if is_short and known.generation and not known.saves_only:
            shrunk = shrunk + 1 if updated - known.updated < REFILL_UPDATES else 0
        decision = _next(
            now,
            voters=known.voters or _voters(policy, now, hosts, ()),
            run=known.run or now.start,
            generation=known.generation + 1,
            members=members,
            hosts=entries,
            saves_only=saves_only,
            wanted=known.wanted if saves_only else 0 if is_full else len(members),
            shrunk=shrunk,
            ended="",
            is_outside=False,
            reason=ended or known.reason,
            updated=updated,
            failures=count,
            failed_at=failed_at,
        )
        return msgspec.structs.replace(decision, began=decision.place)
    has_failed = not known.generation and not left  # on all hosts, before it began
    if is_short and 0 < known.order.before < policy.size_after(known):
        return _next(now, order=_undone(known.order), wanted=0)
    waits = now.waited_s < policy.wait_s and not has_failed
    size = policy.size_after(known)
    if waits or (left >= size and may_begin):
        return _other_voters(policy, now, members or known.members) if known.generation else None
    reason = f"{left} of {size} processes are left, and no restarts"
    if left >= size:
        reason = f"too few of the hosts {', '.join(known.voters)} can have ranks"
    last = max(each.code for each in now.views.values())
    return _exit(policy, now, EXIT_RESTART_HOST if known.generation else last, reason)


def _left(now: Situation) -> int:
    """Processes that the next generation may have, also those that are still started."""
    stay = [view for host, view in now.views.items() if host not in now.known.leaving]
    return sum(len(each.processes) + each.to_start for each in stay)


def _members(policy: Policy, now: Situation, *, is_short: bool) -> tuple[tuple[Member, ...], bool]:
    """The members of the next generation, () if there are too few; and whether it only saves.

    ``is_short``: there will not be as many processes as are wanted.
    """
    size = policy.size_after(now.known)
    ready = _candidates(now, now.known, ("ready", "done"))
    if not now.known.generation and now.waited_s < policy.wait_s:
        # Later ones take what is ready, anywhere.
        if len(now.views) < now.listed and now.waited_s < LISTED_S:
            return (), False  # they would not vote
        hosts = [host for host, view in sorted(now.views.items()) if not view.is_standby]
        sides = [[e for e in ready if e.host == host][: policy.per_host] for host in hosts]
        ready = [e for side in sides if len(side) == policy.per_host for e in side]
        if len(ready) < size and now.waited_s < LISTED_S:
            return (), False
        is_short = True
    fits = policy.largest(now.known, len(ready))
    if fits > size or (is_short and fits):
        size = fits
    with_state = [each for each in ready if each.version is not None]
    if len(ready) >= size >= len(with_state):
        return assign(ready, size, policy.per_host, now.known.members), False
    # Others still start, or none will, or fewer ranks are wanted: the state is in all of these.
    ready = _candidates(now, msgspec.structs.replace(now.known, leaving=()), ("ready",))
    with_state = [each for each in ready if each.version is not None]
    return assign(with_state, len(with_state), policy.per_host, now.known.members), True


def is_over(now: Situation) -> bool:
    """Whether a generation has begun, and no rank is in it."""
    return bool(now.known.generation) and not any(_is_inside(now, m) for m in now.known.members)


def reason_of(policy: Policy, now: Situation) -> str:
    """Why the generation ended, now that all its ranks are out."""
    failures = [each for view in now.member_views() for each in view.failures]
    lost = [each.host for each in now.known.members if each.host not in now.views]
    deaths = [each.text for each in failures if each.is_death]
    if lost or deaths:
        return deaths[0] if not lost else f"host {lost[0]} is lost"
    texts = [each.text for each in failures]
    if not texts and _has_changed(now):
        left = [each.host for each in now.known.members if each.host in now.known.leaving]
        resized = f"resize from {now.known.size} to {policy.size_after(now.known)} ranks"
        texts = [f"host {left[0]} leaves" if left else resized]
    return now.known.ended or (texts or ["a rank was done before the others"])[0]


def _is_outside_fault(policy: Policy, now: Situation, failures: Sequence[Failure]) -> bool:
    if _has_changed(now) and not failures:
        return True
    lost = any(each.host not in now.views for each in now.known.members)
    return lost or now.known.is_outside or any(each.by_signal for each in failures)


def _has_lost_host(now: Situation) -> bool:
    """Whether one is lost now, or was: a supervisor that is new has not seen its rank's death."""
    for member in now.known.members:
        view = now.views.get(member.host)
        if view is None and member.host not in now.awaited:
            return True
        if view is not None and now.process(member) is None and not view.failures:
            return True
    return False


def _has_changed(now: Situation) -> bool:
    """Whether ranks have left the generation together, as they were asked to."""
    found = [now.process(member) for member in now.known.members]
    began = now.known.began
    return any(e is not None and e.is_changing and e.began == began for e in found)


def has_trained(now: Situation) -> bool:
    """Whether the ranks of all hosts have made an update in the generation."""
    hosts = {each.host for each in now.known.members}
    views = now.member_views()
    return len(views) == len(hosts) and all(each.updates for each in views)


def _may_begin(policy: Policy, known: Decision, members: Sequence[Member]) -> bool:
    """Whether no other part of a split job can form a world at the same time."""
    if not members or not known.voters or policy.allow_split:
        return True
    return _is_majority(known, {each.host for each in members})


def _voters(
    policy: Policy, now: Situation, hosts: Sequence[str], leaving: Collection[str]
) -> dict[str, str]:
    """Voters for a world on these hosts; {}: there are none.

    More than half of them have ranks in that world, so that its hosts can go on. At least half of
    them have ranks in the world that is: then each majority has one that knows whether it goes on.
    Those that are left are too few to begin the job: all at most 2 * ``hosts_to_begin`` - 1.
    """
    known, views = now.known, now.views
    inside = {each.host for each in known.members} or {*hosts}
    found = [*hosts]
    others = views.keys() - {*hosts, *leaving}
    for host in sorted(others, key=lambda each: (each not in known.voters, each)):
        is_most = 2 * len(hosts) > len(found) + 1
        if is_most and 2 * len(inside.intersection([*found, host])) > len(found):
            found.append(host)
    knows = 2 * len(inside.intersection(found)) >= len(found) and views.keys() >= {*found}
    begin = sum(not views[host].is_standby for host in found if host in views)
    is_enough = len(found) >= policy.hosts_to_begin or begin >= max(1, policy.hosts_min)
    return {host: views[host].start for host in found} if knows and is_enough else {}


def _candidates(now: Situation, known: Decision, where: Sequence[Where]) -> list[Candidate]:
    """In the order of hosts, and of their start; none of hosts that leave."""
    return [
        Candidate(
            host=host,
            pid=each.pid,
            version=each.version if each.where == "ready" else None,
            is_standby=view.is_standby,
        )
        for host, view in sorted(now.views.items())
        for each in view.processes
        if each.where in where and host not in known.leaving
    ]


# --- what each host does --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Start:
    """Start so many processes."""

    count: int


@dataclass(frozen=True, slots=True)
class Stop:
    """Have processes leave a generation that has ended."""

    pids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Change:
    """Have processes save together with all ranks, and leave."""

    pids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Kill:
    """Kill processes that did not leave ``train``, or reach ``live.run``, in time."""

    pids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Enter:
    """Have processes enter the generation, each with its rank."""

    ranks: Mapping[int, int]


Action = Start | Stop | Change | Kill | Enter | None


def apply_here(
    policy: Policy,
    known: Decision,
    host: str,
    processes: Sequence[ProcessFacts],
    *,
    budget: int,
    now_s: float,
) -> Action:
    """The next thing to do on a host for the decision that it knows; None: wait."""
    old = [
        each
        for each in processes
        if each.where == "in" and (each.began != known.began or known.ended)
    ]
    if stop := tuple(each.pid for each in old if each.stopped_s is None):
        return Stop(stop)
    late = [each for each in old if now_s - (each.stopped_s or now_s) >= policy.unwind_s]
    late += [e for e in processes if e.where == "starting" and now_s - e.started_s >= START_S_MAX]
    if late:
        return Kill(tuple(each.pid for each in late))
    if old:
        return None  # a host has ranks in one generation at a time
    ranks = known.ranks_on(host) if not known.ended else {}
    enter = {
        each.pid: ranks[each.pid]
        for each in processes
        if each.pid in ranks and each.began < known.began and each.where != "starting"
    }
    if enter:
        return Enter(enter)
    asked = [each.pid for each in processes if each.where == "in" and not each.is_changing]
    if asked and policy.is_changing(known):
        return Change(tuple(asked))
    count = to_start(policy, processes, budget)
    return Start(count) if count else None


def to_start(policy: Policy, processes: Sequence[ProcessFacts], budget: int) -> int:
    """Processes that a host starts in place of others."""
    return max(0, min(policy.per_host + policy.standby - len(processes), budget))
