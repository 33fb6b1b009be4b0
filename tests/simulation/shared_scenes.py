"""Small worlds, each around one narrow window of the protocol of shared tiers.

Nothing goes wrong by chance here: a scene says which request of which agent waits for how long, is
lost or is the last one of its process. ``races`` tries two of them at every place. The promises are
those of shared_world.py, and what a scene adds.

    python -m tests.simulation.shared_scenes [NAME]
"""

from __future__ import annotations

import contextlib
import logging
import random
import sys
from collections.abc import Callable, Iterator, Sequence

from tests.simulation.shared_store import Hold
from tests.simulation.shared_world import SPEC, TOMBSTONE_S, Broken, SimHost, World

DECISION = "(PUT|REPLACE) manifests/"
A, B, C = "j0h0", "j0h1", "j0h2"
"""The second one is the leader."""


@contextlib.contextmanager
def scene(
    seed: int, *holds: Hold, hosts: int = 2, leaders: Sequence[int] = (1,)
) -> Iterator[World]:
    """A world of one job without accidents; all agents have attached the tier."""
    world = World(seed)
    world.clock.faults = False
    try:
        world.open_job(hosts, leaders)
        settle(world, 15.0 + 60.0 * world.rng.random())
        world.clock.holds.extend(holds)
        yield world
    finally:
        world.close()


def settle(world: World, for_s: float) -> None:
    world.drive(world.clock.now_s + for_s)


def pass_time(world: World, for_s: float) -> None:
    """Much time, of which nobody makes use but at its end."""
    world.clock.now_s += for_s
    settle(world, 100.0)


def finale(world: World, *, long: bool = False) -> None:
    """Everything is put right; see :meth:`World.end`."""
    for hold in world.clock.holds:
        hold.reached = True
    world.end(long=long)


def must_be_there(world: World, save_id: str | None, why: str) -> None:
    if save_id not in world.ever:
        raise Broken(f"{save_id} was never committed: {why}")


# --- one agent sleeps or dies at a chosen request -------------------------------------------------


def committer_sleeps(seed: int) -> None:
    """Meanwhile its checkpoint is finished, or not, and deleted, with the tombstone or without."""
    what = ("PUT pending", "PUT segments", "PUT plans", DECISION, "DELETE pending")[seed % 5]
    for_s = (40.0, 500.0, 250.0, 0.9 * TOMBSTONE_S)[seed // 5 % 4]
    with scene(seed, Hold(A, what, for_s)) as world:
        a, b = world.jobs[0].hosts
        world.save(world.jobs[0], [a])
        settle(world, 30.0)
        for _ in range(4):
            world.save(world.jobs[0], [b])
            settle(world, 30.0)
        while for_s > 1000.0 and world.clock.now_s < a_wakes(world) - 200.0:
            pass_time(world, min(TOMBSTONE_S / 3, a_wakes(world) - world.clock.now_s - 150.0))
        settle(world, for_s if for_s < 1000.0 else 300.0)
        finale(world, long=seed % 7 == 0)


def a_wakes(world: World) -> float:
    return max((each.wake_s for each in world.clock.actors if each.name == A), default=0.0)


def pruner_sleeps(seed: int) -> None:
    """Between what it has listed and what it does about it, others save and delete."""
    places = ("LIST segments", "LIST plans", "LIST pending", "LIST manifests", "DELETE segments",
              "DELETE plans", DECISION, "DELETE pending")  # fmt: skip
    for_s = (60.0, 400.0, 900.0)[seed // 8 % 3]
    hold = Hold(B, places[seed % 8], for_s, skip=seed // 24 % 3)
    with scene(seed, hold, leaders=(0, 1) if seed % 2 else (1,)) as world:
        a, b = world.jobs[0].hosts
        for step in range(5):
            world.save(world.jobs[0], [a] if step % 2 or seed % 3 else [a, b], copies=1.0, plan=0)
            settle(world, 30.0 + 90.0 * (step % 3))
        settle(world, for_s)
        finale(world, long=seed % 8 == 1)


def everybody_is_gone(seed: int) -> None:
    """The only host that has a checkpoint ends right before the manifest; it is committed."""
    with scene(seed, Hold(A, DECISION, then="killed")) as world:
        a, _ = world.jobs[0].hosts
        save_id = world.save(world.jobs[0], [a])
        settle(world, 2 * SPEC.sweep_after_s / 4 + SPEC.takeover_after_s + 30.0)
        must_be_there(world, save_id, "it was whole, and a pruner lives")
        world.jobs[0].hosts.remove(a)
        finale(world, long=seed % 4 == 0)


def owner_is_gone(seed: int) -> None:
    """One host ends before its segment is there; another one holds a copy, and brings it."""
    what = ("LIST claims", "PUT pending", "HEAD segments", "PUT segments")[seed % 4]
    with scene(seed, Hold(C, what, then="killed"), hosts=3) as world:
        a, _, c = world.jobs[0].hosts
        save_id = world.save(world.jobs[0], [a, c], copies=1.0)
        settle(world, SPEC.takeover_after_s + 40.0)
        must_be_there(world, save_id, "a live host holds all of its segments")
        finale(world)


def answer_is_lost(seed: int) -> None:
    """Of the manifest, the tombstone, or what comes before: it is found out what happened."""
    what = (DECISION, "PUT pending", "PUT segments", "PUT plans", "DELETE pending")[seed % 5]
    then = ("lost", "late", "failed")[seed // 5 % 3]
    with scene(seed, Hold((A, B)[seed // 15 % 2], what, then=then)) as world:
        for _ in range(4):
            save_id = world.save(world.jobs[0])
            settle(world, 60.0)
            must_be_there(world, save_id, "one request went wrong, once")
        settle(world, 300.0)
        finale(world)


def claim_is_lost(seed: int) -> None:
    """The answer to the first claim, or the claim itself; or whoever claimed dies of it."""
    then = ("lost", "late", "failed", "killed", "done")[seed % 5]
    with scene(seed, Hold(A, "PUT claims", then=then)) as world:
        job = world.jobs[0]
        save_id = world.save(job, copies=1.0)
        settle(world, 30.0)
        world.revive()
        settle(world, 100.0)
        must_be_there(world, save_id, "one request went wrong, once")
        if job.claimed != job.attempts[0].number:
            raise Broken("nobody holds the claim")
        finale(world, long=seed % 2 == 0)


def zombie_attaches(seed: int) -> None:
    """What an old job left whole is no more its to finish, once another one has claimed."""
    with scene(seed, Hold(A, DECISION, then="killed"), hosts=1, leaders=()) as world:
        (a,) = world.jobs[0].hosts
        new = world.open_job(1, ())  # it attaches while there is nothing to finish
        settle(world, 15.0)
        save_id = world.save(world.jobs[0], [a])
        settle(world, 30.0)
        if seed % 2:
            first = world.save(new)
            settle(world, 30.0)
            must_be_there(world, first, "nothing failed")
        world.revive()
        settle(world, 20.0)
        if (save_id in world.ever) == bool(seed % 2):
            raise Broken(f"{save_id}: finished by a job that another one took over from")
        finale(world)


def zombie_saves(seed: int) -> None:
    """After another job's first manifest none of the old one appears, and it deletes nothing."""
    with scene(seed, leaders=(0,)) as world:
        old = world.jobs[0]
        for _ in range(seed % 3):
            world.save(old)
            settle(world, 30.0)
        new = world.open_job(1, (0,))
        settle(world, 30.0)
        first = world.save(new)
        settle(world, 30.0)
        must_be_there(world, first, "nothing failed")
        for _ in range(4):
            late = world.save(old)
            settle(world, 60.0)
            if late in world.ever:
                raise Broken(f"{late} of the old job was committed after {first} of the new one")
        finale(world)


def gone_for_long(seed: int) -> None:
    """All segments were seen, the manifest failed; the agent sleeps until its tombstone is gone.

    It begins anew; what it saw is not there any more.
    """
    failed = Hold(A, DECISION, then="failed")
    asleep = Hold(A, "GET manifests/", 2.5 * TOMBSTONE_S, skip=1, after=failed)
    dead = Hold(C, "PUT segments", then="killed")
    with scene(seed, dead, failed, asleep, hosts=3) as world:
        a, b, c = world.jobs[0].hosts
        world.save(world.jobs[0], [a, c], copies=1.0)
        settle(world, 60.0)
        for _ in range(3):
            world.save(world.jobs[0], [b])
            settle(world, 50.0)
        while world.clock.now_s < a_wakes(world) - 300.0:
            pass_time(world, min(TOMBSTONE_S / 3, a_wakes(world) - world.clock.now_s - 200.0))
        settle(world, 500.0)
        finale(world)


def plan_comes_back(seed: int) -> None:
    """A pruner is about to delete an old plan, and somebody begins to use it again."""
    with scene(seed, Hold(B, "DELETE plans", 30.0, skip=seed % 2), leaders=()) as world:
        a, b = world.jobs[0].hosts
        b.leader = True
        while not world.clock.holds[0].reached and world.clock.now_s < 1_000_200.0:
            settle(world, 1.0)
        world.save(world.jobs[0], [a], plan=seed % 2)
        settle(world, 60.0)
        finale(world)


def until_reached(world: World, hold: Hold) -> None:
    limit_s = world.clock.now_s + 200.0
    while not hold.reached and world.clock.now_s < limit_s:
        settle(world, 0.5)


def given_up_while_it_comes(seed: int) -> None:
    """A pruner is about to give up what its host, which was away, completes. One of them is faster;
    the other one sees it.
    """
    dead = Hold(A, "PUT segments", then="killed")
    bury = Hold(B, DECISION, (20.0, 5.0)[seed % 2], after=dead)
    commit = Hold(A, DECISION, (0.0, 30.0)[seed % 2], after=dead)
    with scene(seed, dead, bury, commit, leaders=()) as world:
        a, b = world.jobs[0].hosts
        save_id = world.save(world.jobs[0], [a])
        settle(world, 5.0)
        world.clock.now_s += SPEC.sweep_after_s + 1.0
        world.clock.actors = [each for each in world.clock.actors if not each.over]
        b.leader = True
        until_reached(world, bury)
        a.start()
        settle(world, 60.0)
        if (save_id in world.ever) == bool(seed % 2):
            raise Broken(f"{save_id}: the slower one won")
        finale(world, long=seed >= 2)


def committed_while_it_is_listed(seed: int) -> None:
    """An upload of old segments is committed while a pruner lists: it is named all the time."""
    asleep = Hold(A, DECISION, SPEC.sweep_after_s + 100.0)
    with scene(seed, asleep, Hold(B, "LIST segments", 9.0), leaders=()) as world:
        a, b = world.jobs[0].hosts
        world.save(world.jobs[0], [a])
        until_reached(world, asleep)
        settle(world, a_wakes(world) - world.clock.now_s - 5.0)
        b.leader = True
        for actor in world.clock.actors:
            if actor.name == B:
                actor.wake_s = world.clock.now_s
        settle(world, 60.0)
        finale(world)


# --- a pruner is stopped in the middle of a delete ------------------------------------------------

PRUNING = ("LIST manifests", "LIST records", "PUT notices", "LIST claims", "LIST records",
           "PUT verdicts", "REPLACE manifests", "DELETE notices")  # fmt: skip
"""What a pruner does about one checkpoint, in order; the last two after it is decided."""
DECIDED = PRUNING.index("REPLACE manifests")


@contextlib.contextmanager
def stopped_pruner(seed: int, for_s: float = 150.0) -> Iterator[tuple[World, str]]:
    """The pruner sleeps at one of :data:`PRUNING`; the world, and what it is about to delete."""
    at = seed % len(PRUNING)
    began = Hold(B, "PUT notices")
    asleep = Hold(B, PRUNING[at], for_s, after=began if at > 2 else None)
    with scene(seed, leaders=()) as world:
        a, b = world.jobs[0].hosts
        for _ in range(3):
            world.save(world.jobs[0], [a])
            settle(world, 30.0)
        world.clock.holds += [asleep] if at == 2 else [began, asleep]
        b.leader = True
        until_reached(world, asleep)
        yield world, world.jobs[0].saved[0].save_id
        settle(world, for_s + 50.0)
        finale(world, long=seed % 5 == 0)


def pinned_while_pruned(seed: int) -> None:
    """Whoever pins is told the truth: it stays, or it is gone."""
    with stopped_pruner(seed) as (world, save_id):
        world.pin(world.jobs[0].hosts[0], save_id)
        settle(world, 20.0)
        undecided = seed % len(PRUNING) < DECIDED
        if (save_id in world.pinned) != undecided:
            raise Broken(f"{save_id} is said to be {'gone' if undecided else 'pinned'}")
    if (save_id in world.visible) != undecided:
        raise Broken(f"{save_id} was said to be {'pinned' if undecided else 'gone'}")


def zombie_prunes(seed: int) -> None:
    """Another job takes over while a pruner is in the middle of a delete."""
    with stopped_pruner(seed) as (world, save_id):
        new = world.open_job(1, (0,), base=save_id)
        settle(world, 10.0)
        world.save(new)
        settle(world, 30.0)
        if new.claimed < 0:
            raise Broken("nothing failed, and the new job has not claimed")
        was_there = save_id in world.visible
        if was_there != (seed % len(PRUNING) < DECIDED):
            raise Broken(f"{save_id} was decided to go, and is there after another job claimed")
        settle(world, 200.0)
        if was_there != (save_id in world.visible):
            raise Broken(f"{save_id}, which the new job began from, was deleted by the old one")


def rolled_back_while_pruned(seed: int) -> None:
    """The same job goes back to what is just being deleted."""
    with stopped_pruner(seed) as (world, save_id):
        job = world.jobs[0]
        number = world.begin_attempt(job, save_id, run=job.attempts[0].run)
        world.save(job, [job.hosts[0]])
        settle(world, 30.0)
        if job.claimed != number:
            raise Broken("nothing failed, and the attempt is not claimed")
        was_there = save_id in world.visible
        settle(world, 200.0)
        if was_there != (save_id in world.visible):
            raise Broken(f"{save_id} was deleted after the job went back to it")


def pruner_dies(seed: int) -> None:
    """In the middle of a delete; whoever prunes next comes to an end with it, or begins anew."""
    at = seed % len(PRUNING)
    then = ("killed", "done", "lost")[seed // len(PRUNING)]
    with scene(seed, leaders=()) as world:
        a, b = world.jobs[0].hosts
        for _ in range(3):
            world.save(world.jobs[0], [a])
            settle(world, 30.0)
        began = Hold(B, "PUT notices")
        world.clock.holds += [Hold(B, PRUNING[at], then=then, after=began if at > 2 else None)]
        world.clock.holds += [began] if at != 2 else []
        b.leader = True
        until_reached(world, world.clock.holds[-1 if at == 2 else -2])
        settle(world, 10.0)
        world.revive()
        settle(world, 100.0)
        if world.jobs[0].saved[0].save_id in world.visible:
            raise Broken("a pruner lives, and the oldest one is not deleted")
        finale(world, long=seed % 3 == 0)


EMPTYING = ("GET manifests", "PUT manifests", "DELETE segments")
"""What a pruner does about a tombstone that is old enough; after the second it is too late."""


@contextlib.contextmanager
def about_to_empty(seed: int, *holds: Hold) -> Iterator[tuple[World, str]]:
    """A pruner that has buried the oldest checkpoint; the world, and which one that is."""
    with scene(seed, leaders=()) as world:
        a, b = world.jobs[0].hosts
        for _ in range(3):
            world.save(world.jobs[0], [a])
            settle(world, 30.0)
        b.leader = True
        save_id = world.jobs[0].saved[0].save_id
        limit_s = world.clock.now_s + 300.0
        while save_id not in world.buried and world.clock.now_s < limit_s:
            settle(world, 0.5)
        settle(world, 1.0)
        world.clock.holds += holds
        yield world, save_id
        finale(world, long=seed % 3 == 0)


def taken_back_while_emptied(seed: int) -> None:
    """Whoever takes back is told the truth: it is there, or its segments are gone."""
    then = ("", "lost", "late", "failed", "killed", "done")[seed // 3 % 6]
    at = seed % len(EMPTYING)
    hold = Hold(B, EMPTYING[at], 0.0 if then else 150.0, then=then)
    with about_to_empty(seed, hold) as (world, save_id):
        (a, _) = world.jobs[0].hosts
        until_reached(world, hold)
        world.take_back(a, save_id)
        settle(world, 25.0)
        if not then and a.told.get(save_id) != (at < 2):
            raise Broken(f"{save_id} is said to be {a.told.get(save_id)}")
        settle(world, 200.0)
        if save_id not in a.told:
            raise Broken(f"nobody was told about {save_id}")
        if a.told[save_id] != (save_id in world.visible):
            raise Broken(f"{save_id} was said to be {a.told[save_id]}")


def taken_back_by_who_sleeps(seed: int) -> None:
    """Its request for the next key waits while a pruner empties, or its answer is lost."""
    for_s, then = ((150.0, ""), (5.0, ""), (0.0, "lost"), (0.0, "late"), (0.0, "failed"))[seed % 5]
    hold = Hold(A, "PUT manifests", for_s, then=then)
    with about_to_empty(seed, hold) as (world, save_id):
        a, _ = world.jobs[0].hosts
        world.take_back(a, save_id)
        until_reached(world, hold)
        settle(world, 300.0)
        if a.told.get(save_id) != (save_id in world.visible):
            raise Broken(f"{save_id} was said to be {a.told.get(save_id)}")
        if for_s < 100.0 and not a.told[save_id]:
            raise Broken(f"{save_id} was asked for in time")


def taken_back_and_buried_late(seed: int) -> None:
    """One pruner sleeps after its verdict, another one buries what that names, somebody takes it
    back; what the first one puts when it wakes is of a deletion that is over.
    """
    decided = Hold(B, "PUT verdicts")
    hold = Hold(B, "(GET|REPLACE) manifests/", (150.0, 400.0)[seed % 2], after=decided)
    with scene(seed, leaders=()) as world:
        a, b = world.jobs[0].hosts
        for _ in range(3):
            world.save(world.jobs[0], [a])
            settle(world, 30.0)
        save_id = world.jobs[0].saved[0].save_id
        world.clock.holds += [decided, hold]
        b.leader = True
        until_reached(world, hold)
        a.leader = True
        a.actor.wake_s = world.clock.now_s
        settle(world, 15.0)
        if save_id not in world.buried:
            raise Broken(f"{save_id} was decided to go, and nobody carries it out")
        world.take_back(a, save_id)
        settle(world, 15.0)
        if not a.told.get(save_id):
            raise Broken(f"{save_id} was deleted a moment ago, and cannot be taken back")
        settle(world, 500.0)
        if save_id not in world.visible:
            raise Broken(f"{save_id} was taken back, and is gone again")
        # Retention may delete it once more, when it is pinned no more.
        world.pin(a, save_id, "unpin")
        settle(world, 700.0)
        if save_id in world.visible or save_id not in world.closed:
            raise Broken(f"{save_id} is not kept, and is there")
        finale(world, long=True)


# --- two agents, each stopped at every place ------------------------------------------------------


def race(
    world: World,
    first: tuple[SimHost, int],
    second: tuple[SimHost, int],
    begin: Callable[[], None],
    waits: tuple[float, float] = (5.0, 9.0),
) -> None:
    """Begin; the first one goes on to its nth request, then the second one to its, then the first
    one to its end, then the second one. In time for a pruner to go on with its listing.
    """
    (one, at), (two, until) = first, second
    world.clock.holds += [Hold(one.host_id, "", waits[0], skip=at)]
    world.clock.holds += [Hold(two.host_id, "", waits[1], skip=until)]
    begin()
    settle(world, 100.0)


def commit_and_bury(at: int, until: int, *, pruner_first: bool) -> None:
    """A checkpoint is given up by a pruner while its host, which was away, completes it."""
    with scene(at * 97 + until, Hold(A, "PUT segments", then="killed"), leaders=()) as world:
        a, b = world.jobs[0].hosts
        world.save(world.jobs[0], [a])
        settle(world, 5.0)
        world.clock.now_s += SPEC.sweep_after_s + 1.0
        world.clock.actors = [each for each in world.clock.actors if not each.over]
        a.actor = None
        b.leader = True

        def begin() -> None:
            a.start()

        pair = ((b, at), (a, until)) if pruner_first else ((a, at), (b, until))
        race(world, *pair, begin)
        finale(world)


def plan_and_sweep(at: int, until: int, *, pruner_first: bool) -> None:
    """An old plan that nothing names comes back into use while a pruner deletes it."""
    with scene(at * 97 + until, leaders=()) as world:
        a, b = world.jobs[0].hosts

        def begin() -> None:
            b.leader = True
            b.actor.wake_s = world.clock.now_s
            world.save(world.jobs[0], [a], plan=0)

        pair = ((b, at), (a, until)) if pruner_first else ((a, at), (b, until))
        race(world, *pair, begin)
        finale(world)


def upload_and_sweep(at: int, until: int, *, pruner_first: bool) -> None:
    """An upload stops for longer than orphans live, and goes on while a pruner sweeps."""
    with scene(at * 97 + until, leaders=()) as world:
        a, b = world.jobs[0].hosts
        world.clock.holds.append(Hold(A, "", SPEC.sweep_after_s + 10.0, skip=until))
        world.save(world.jobs[0], [a])
        settle(world, SPEC.sweep_after_s + (1.0 if pruner_first else 11.0))

        def begin() -> None:
            b.leader = True

        race(world, (b, at), (a, 3), begin, (9.0, 3.0))
        finale(world)


def owner_and_takeover(at: int, until: int, *, pruner_first: bool) -> None:
    """The owner of a segment is slow, and another host uploads its copy at the same time."""
    with scene(at * 97 + until) as world:
        a, b = world.jobs[0].hosts
        pair = ((b, at), (a, until)) if pruner_first else ((a, at), (b, until))
        race(world, *pair, lambda: world.save(world.jobs[0], copies=1.0) and None)
        if world.jobs[0].saved[0].save_id not in world.ever:
            raise Broken("both hosts live, and hold everything")
        finale(world)


def pin_and_prune(at: int, until: int, *, pruner_first: bool) -> None:
    """Somebody pins what a pruner is about to delete."""
    with scene(at * 97 + until, leaders=()) as world:
        a, b = world.jobs[0].hosts
        for _ in range(3):
            world.save(world.jobs[0], [a])
            settle(world, 30.0)

        def begin() -> None:
            b.leader = True
            b.actor.wake_s = world.clock.now_s
            world.pin(a, world.jobs[0].saved[0].save_id)

        pair = ((b, at), (a, until)) if pruner_first else ((a, at), (b, until))
        race(world, *pair, begin)
        finale(world)


def take_back_and_empty(at: int, until: int, *, pruner_first: bool) -> None:
    """Somebody takes back what a pruner is about to empty."""
    with about_to_empty(at * 97 + until) as (world, save_id):
        a, b = world.jobs[0].hosts
        settle(world, SPEC.delete_delay_s - 4.0)

        def begin() -> None:
            b.actor.wake_s = world.clock.now_s
            world.take_back(a, save_id)

        pair = ((b, at), (a, until)) if pruner_first else ((a, at), (b, until))
        race(world, *pair, begin)
        if a.told.get(save_id) != (save_id in world.visible):
            raise Broken(f"{save_id} was said to be {a.told.get(save_id)}")


def two_pruners(at: int, until: int, *, pruner_first: bool) -> None:
    """Two hosts delete the same checkpoint: what one has listed, the other one replaces."""
    with scene(at * 97 + until) as world:
        a, b = world.jobs[0].hosts
        for _ in range(2):
            world.save(world.jobs[0], [a])
            settle(world, 60.0)
        a.leader = b.leader = True
        pair = ((b, at), (a, until)) if pruner_first else ((a, at), (b, until))
        race(world, *pair, lambda: world.save(world.jobs[0], [a, b]) and None)
        finale(world)


SCENES: dict[str, tuple[Callable[[int], None], int]] = {
    "a committer sleeps": (committer_sleeps, 20),
    "a pruner sleeps": (pruner_sleeps, 72),
    "everybody is gone": (everybody_is_gone, 4),
    "an owner is gone": (owner_is_gone, 8),
    "an answer is lost": (answer_is_lost, 30),
    "a zombie saves": (zombie_saves, 3),
    "given up while it comes": (given_up_while_it_comes, 4),
    "committed while it is listed": (committed_while_it_is_listed, 4),
    "a plan comes back": (plan_comes_back, 4),
    "a claim is lost": (claim_is_lost, 10),
    "a zombie attaches": (zombie_attaches, 4),
    "an agent is gone for long": (gone_for_long, 3),
    "pinned while a pruner sleeps": (pinned_while_pruned, 8),
    "a zombie prunes": (zombie_prunes, 8),
    "a job goes back while a pruner sleeps": (rolled_back_while_pruned, 8),
    "a pruner dies": (pruner_dies, 24),
    "taken back while a pruner empties": (taken_back_while_emptied, 18),
    "taken back by who sleeps": (taken_back_by_who_sleeps, 10),
    "taken back and buried late": (taken_back_and_buried_late, 4),
}
"""Each with its number of variants."""

RACES: dict[str, tuple[Callable[..., None], int, int]] = {
    "commit and bury": (commit_and_bury, 30, 40),
    "plan and sweep": (plan_and_sweep, 30, 30),
    "upload and sweep": (upload_and_sweep, 30, 20),
    "two pruners": (two_pruners, 30, 30),
    "pin and prune": (pin_and_prune, 30, 8),
    "take back and empty": (take_back_and_empty, 24, 24),
    "owner and takeover": (owner_and_takeover, 24, 24),
}
"""Each with the numbers of places at which the first and the second one are stopped."""


def cases(*, every: int = 1, only: str = "") -> Iterator[tuple[str, Callable[[], None]]]:
    """All scenes in turn, and one of ``every`` so many pairs of places of each race, well mixed."""
    for seed in range(max(variants for _, variants in SCENES.values())):
        for name, (play, variants) in SCENES.items():
            if seed < variants and only in name:
                yield f"{name} {seed}", lambda play=play, seed=seed: play(seed)
    for name, (run, first, second) in RACES.items():
        places = [(i, j, k) for i in range(first) for j in range(second) for k in (False, True)]
        random.Random(first).shuffle(places)
        for at, until, who in places[::every]:
            if only in name:
                yield (
                    f"{name} {at} {until} {who}",
                    lambda run=run, at=at, until=until, who=who: run(at, until, pruner_first=who),
                )


def main() -> None:
    logging.disable(logging.CRITICAL)
    count = 0
    for name, play in cases(only=sys.argv[1] if len(sys.argv) > 1 else ""):
        count += 1
        try:
            play()
        except Broken as error:
            print(f"{name}: {error}", flush=True)
    print(f"{count} scenes")


if __name__ == "__main__":
    main()
