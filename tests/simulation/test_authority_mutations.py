"""Whether the simulation of authority, and scenes told by hand, find a protocol that is broken.

Each scene shows one promise, by what callers are told and by what lies where; it is kept by the
product, and broken by the mutation that the scene is listed with.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from tests.simulation import authority_adapter as product
from tests.simulation.authority_adapter import Rules, Run, simulated
from tests.simulation.authority_mutations import (
    MUTATIONS,
    NOT_VISIBLE,
    SEEDS,
    first_found,
)
from tests.simulation.authority_scene import RULES, Broken, Scene, promise, said
from tests.simulation.authority_world import run_case
from tests.simulation.known_seeds import check_known_seed
from tieredckpt.errors import (
    NamespaceInUseError,
    NoRecoverableCheckpointError,
    StaleAttemptError,
    TierUnavailableError,
)

COPIES = dataclasses.replace(RULES, keep=6, replicas=2)
"""Each of three hosts has everything."""
BUCKET = dataclasses.replace(RULES, bucket_keep=4)


# --- who may rule ---------------------------------------------------------------------------------


def a_host_that_was_left_keeps_what_the_job_needs() -> None:
    """A job moves away from a host, and is to keep more: one part lies on that host alone."""
    scene = Scene(2)
    job = scene.run(scene.hosts, dataclasses.replace(RULES, keep=1))
    job.load()
    base = scene.save(job, 10)
    scene.pass_time()
    job.end()
    job = scene.run(scene.hosts[1:])
    assert job.load() == base
    newest = scene.save(job, 20)
    scene.pass_time(200.0, 8)
    assert newest in scene.held(scene.hosts[0]), "else it would have nothing to delete for"
    promise(scene.has_parts(base) == [True, True], "a former leader deletes what the job keeps")


def _moves_with_a_bucket(*, cut: bool) -> None:
    scene = Scene(3)
    job = scene.run(scene.hosts[:2], dataclasses.replace(BUCKET, bucket_keep=1))
    job.load()
    saved = [scene.save(job, 10)]
    scene.pass_time()
    job.end()
    scene.pass_time(2.0)
    if cut:
        scene.cut(scene.hosts[0])
    job = scene.run(scene.hosts[1:], BUCKET)
    assert job.load() == saved[0]
    for step in (20, 30, 40):
        saved.append(scene.save(job, step))
        scene.pass_time()
    scene.pass_time(40.0, 6)
    promise(all(map(scene.in_bucket, saved)), "a former leader deletes what the job keeps")


def a_former_leader_leaves_the_bucket_alone() -> None:
    """A job moves away from its leader, and is to keep more."""
    _moves_with_a_bucket(cut=False)


def a_former_leader_that_hears_nothing_leaves_the_bucket_alone() -> None:
    """Likewise, and no other host reaches the former leader: only the bucket tells it."""
    _moves_with_a_bucket(cut=True)


def who_looks_deletes_nothing() -> None:
    """Somebody with a configuration that keeps less opens, loads and leaves."""
    scene = Scene(1)
    job = scene.run(scene.hosts, BUCKET)
    job.load()
    saved = []
    for step in (10, 20):
        saved.append(scene.save(job, step))
        scene.pass_time(20.0)
    job.end()
    assert all(map(scene.in_bucket, saved))
    looker = scene.run(scene.hosts, dataclasses.replace(BUCKET, keep=1, bucket_keep=1))
    assert looker.load() == saved[-1]
    scene.pass_time(40.0, 4)
    looker.end()
    scene.pass_time(40.0, 4)
    promise(all(map(scene.in_bucket, saved)), "who only looked has the bucket pruned")
    promise(all(map(all, map(scene.has_parts, saved))), "who only looked has memory pruned")


def who_looks_changes_no_members() -> None:
    """Somebody looks at the namespace from one of the job's hosts."""
    scene = Scene(3)
    rules = dataclasses.replace(RULES, replicas=1)
    job = scene.run(scene.hosts, rules)
    job.load()
    scene.save(job, 10)
    scene.pass_time()
    looker = scene.run(scene.hosts[:1], rules)
    looker.load()
    looker.end()
    saved: list[str] = []
    told = said(lambda: saved.append(scene.save(job, 20)))
    promise(told is None, f"the job's next save says {told}")
    for _ in range(2):
        scene.pass_time()
    promise(product.said_replicated(scene.hosts[0], saved[0]), "it is not copied any more")


# --- who may win ----------------------------------------------------------------------------------


def _copied_everywhere(rules: Rules = COPIES) -> tuple[Scene, Run, str]:
    """Three hosts, the job on them, and its checkpoint."""
    scene = Scene(3)
    job = scene.run(scene.hosts, rules)
    job.load()
    base = scene.save(job, 10)
    for _ in range(3):
        scene.pass_time()
    return scene, job, base


def _two_sides(rules: Rules = COPIES) -> tuple[Scene, Run, str, Run, str]:
    """The first host was cut off, and both sides go on from the same checkpoint. What the job on
    the other two has saved last, and then that on the first one, which was started twice.
    """
    scene, job, base = _copied_everywhere(rules)
    job.end()
    scene.cut(scene.hosts[0])
    main = scene.run(scene.hosts[1:], rules)
    assert main.load() == base
    of_main = scene.save(main, 20)
    scene.pass_time()
    found = base
    for step in (30, 40):
        side = scene.run(scene.hosts[:1], rules)
        assert side.load() == found
        found = scene.save(side, step)
        scene.pass_time()
        if step == 30:
            side.end()
    return scene, main, of_main, side, found


def a_load_stops_at_a_fork() -> None:
    """Both sides have saved, and all meet when nobody runs."""
    scene, main, of_main, side, of_side = _two_sides()
    main.end()
    side.end()
    scene.cut(scene.hosts[0], off=False)
    scene.pass_time(20.0)
    told = said(scene.run(scene.hosts, COPIES).load)
    promise(isinstance(told, NoRecoverableCheckpointError), f"the load of a fork says {told}")
    assert told is not None
    promise(set(told.fields["sides"]) == {of_main, of_side}, "the load does not name both sides")


def of_two_sides_that_meet_the_second_one_stops() -> None:
    """Both run when links are mended: who saves first leaves the other one aside."""
    scene, main, _, side, _ = _two_sides()
    scene.cut(scene.hosts[0], off=False)
    scene.pass_time(200.0, 8)
    newest = scene.save(main, 50)
    scene.pass_time(200.0, 8)
    told = said(lambda: scene.save(side, 60))
    promise(isinstance(told, StaleAttemptError), f"a save of the second side says {told}")
    main.end()
    side.end()
    promise(scene.run(scene.hosts, COPIES).load() == newest, "the fork did not end")


def who_has_loaded_too_long_ago_does_not_begin() -> None:
    """A side's first save was not answered, and before it tries again another run has saved."""
    scene, job, base = _copied_everywhere()
    job.end()
    scene.cut(scene.hosts[0])
    side = scene.run(scene.hosts[:1], COPIES)
    assert side.load() == base
    _does_not_answer(side)
    main = scene.run(scene.hosts[1:], COPIES)
    assert main.load() == base
    scene.save(main, 30)
    scene.pass_time()
    scene.cut(scene.hosts[0], off=False)
    scene.pass_time(200.0, 8)
    told = said(lambda: scene.save(side, 20))
    promise(isinstance(told, StaleAttemptError), f"the side's first save says {told}")
    told = said(lambda: scene.save(main, 40))
    promise(told is None, f"the next save of who had saved says {told}")


def _does_not_answer(run: Run) -> None:
    """A first save for which the run opens its attempt, and gets no further."""

    def fails(save_id: str) -> None:
        raise TierUnavailableError("the agent does not answer")

    with pytest.raises(TierUnavailableError, match="the agent does not answer"):
        run.commit(run.seal(), 20, fails)


def who_was_followed_does_not_save() -> None:
    """The coordinator of a save was cut off after all ranks had written their parts. The job is
    restarted without it, and saves.
    """
    scene, old, base = _copied_everywhere()
    parts = old.seal()
    scene.cut(scene.hosts[0])
    for rank in old.ranks[1:]:
        old.end_rank(rank)
    scene.pass_time(2.0)
    new = scene.run(scene.hosts[1:], COPIES)
    assert new.load() == base
    newest = scene.save(new, 20)
    scene.pass_time()
    scene.cut(scene.hosts[0], off=False)
    scene.pass_time(12.0)
    late: list[str] = []
    told = said(lambda: old.commit(parts, 30, late.append))
    promise(isinstance(told, StaleAttemptError), f"the late save says {told}")
    promise(all(late[0] not in scene.held(each) for each in scene.hosts), "the late save is there")
    new.end()
    old.end()
    promise(scene.run(scene.hosts[1:], COPIES).load() == newest, "the late save is loaded")


def what_was_opened_and_saved_nothing_is_nothing() -> None:
    """A host that was cut off begins the job, which dies in its first save."""
    scene, job, base = _copied_everywhere()
    job.end()
    scene.cut(scene.hosts[0])
    side = scene.run(scene.hosts[:1], COPIES)
    assert side.load() == base
    _does_not_answer(side)
    side.end()
    main = scene.run(scene.hosts[1:], COPIES)
    assert main.load() == base
    scene.save(main, 20)
    scene.pass_time()
    scene.cut(scene.hosts[0], off=False)
    scene.pass_time(20.0)
    newest = scene.save(main, 30)
    scene.pass_time(20.0)
    main.end()
    again = scene.run(scene.hosts, COPIES)
    found: list[str | None] = []
    told = said(lambda: found.append(again.load()))
    promise(found == [newest], f"the load restores {found}, says {told}")
    told = said(lambda: scene.save(again, 40))
    promise(told is None, f"a save says {told}")


def the_second_one_at_a_bucket_is_refused_its_first_save() -> None:
    """Two runs that do not know of each other have loaded the same, and both reach the bucket."""
    scene = Scene(2)
    job = scene.run(scene.hosts, BUCKET)
    job.load()
    base = scene.save(job, 10)
    scene.pass_time(20.0)
    job.end()
    assert scene.in_bucket(base)
    scene.cut(scene.hosts[1])
    one, other = (scene.run([host], BUCKET) for host in scene.hosts)
    assert one.load() == other.load() == base
    scene.save(one, 20)
    told = said(lambda: scene.save(other, 30))
    promise(isinstance(told, NamespaceInUseError), f"the second one is told {told}")


# --- what may go ----------------------------------------------------------------------------------


def what_another_side_saved_stays() -> None:
    """Two sides have met, one of them went on, and the job is restarted on all hosts. It keeps one
    checkpoint.
    """
    rules = dataclasses.replace(COPIES, keep=1)
    scene, main, _, side, of_side = _two_sides(rules)
    side.end()
    scene.cut(scene.hosts[0], off=False)
    scene.pass_time(200.0, 8)
    newest = scene.save(main, 50)
    scene.pass_time(200.0, 8)
    main.end()
    main = scene.run(scene.hosts, rules)
    assert main.load() == newest
    for step in (60, 70):
        scene.save(main, step)
        scene.pass_time(20.0)
    promise(of_side in scene.held(scene.hosts[0]), "the other side's checkpoint is deleted")
    promise(scene.has_parts(of_side) == [True], "the other side's part is given back")


def what_was_passed_over_in_silence_stays() -> None:
    """The restart of a job does not reach a host that has a part of the newest checkpoint."""
    scene = Scene(3)
    rules = dataclasses.replace(RULES, replicas=1)
    job = scene.run(scene.hosts, rules)
    job.load()
    base = scene.save(job, 10)
    scene.pass_time()
    scene.cut(scene.hosts[2])
    unread = scene.save(job, 20)
    scene.pass_time()
    job.end()
    scene.pass_time(1.0)
    job = scene.run(scene.hosts[:2], rules)
    assert job.load() == base
    scene.save(job, 21)
    scene.pass_time()
    scene.cut(scene.hosts[2], off=False)
    scene.pass_time(80.0, 12)
    for step in (22, 23):
        scene.save(job, step)
        scene.pass_time(40.0, 6)
    promise(scene.has_parts(unread) == [True] * 3, "what could not be read is deleted")


# --- who may vouch and free -----------------------------------------------------------------------


def who_is_dead_is_noticed_whoever_answers() -> None:
    """Another member of the job answers at the address of a host that has died."""
    scene = Scene(3)
    first, second, third = scene.hosts
    job = scene.run(scene.hosts, dataclasses.replace(RULES, replicas=1))
    job.load()
    scene.save(job, 10)
    scene.pass_time()
    scene.world.kill_agent(third)
    third.lose_memory()
    scene.world.owners[third.address] = second.name
    for _ in range(8):
        scene.pass_time(20.0)
    promise(product.believed_alive(first) == {second.name}, "who is dead is taken for alive")


def a_part_stays_on_a_host_that_has_not_heard_of_its_checkpoint() -> None:
    """The newest checkpoint was committed while one of its hosts was not reached, nor is it when
    the next run begins there.
    """
    scene = Scene(2)
    job = scene.run(scene.hosts)
    job.load()
    scene.save(job, 10)
    scene.pass_time()
    scene.cut(scene.hosts[1])
    newest = scene.save(job, 20)
    scene.pass_time()
    job.end()
    scene.pass_time(2.0)
    scene.run(scene.hosts)
    scene.pass_time(4.0)
    promise(scene.has_parts(newest) == [True] * 2, "a part of what was acknowledged is given back")


def what_was_committed_has_not_failed() -> None:
    """A trainer that did not hear that its save was committed says that it failed."""
    scene = Scene(2)
    job = scene.run(scene.hosts)
    job.load()
    newest = scene.save(job, 10)
    scene.pass_time()
    job.failed(scene.parts[newest])
    scene.pass_time()
    promise(scene.has_parts(newest) == [True, True], "a part of what was committed is given back")


SCENES: dict[str, Callable[[], None]] = {
    "a term never ends": a_host_that_was_left_keeps_what_the_job_needs,
    "who deletes from a bucket asks for no claim":
        a_former_leader_that_hears_nothing_leaves_the_bucket_alone,
    "a former leader prunes the bucket": a_former_leader_leaves_the_bucket_alone,
    "who opens rules": who_looks_deletes_nothing,
    "members of who opens take over": who_looks_changes_no_members,
    "the highest number wins": a_load_stops_at_a_fork,
    "forks are not seen": of_two_sides_that_meet_the_second_one_stops,
    "a second side may begin": who_has_loaded_too_long_ago_does_not_begin,
    "who was followed saves on": who_was_followed_does_not_save,
    "an agent does not look whether a run is over": who_was_followed_does_not_save,
    "an attempt without saves outranks": what_was_opened_and_saved_nothing_is_nothing,
    "nobody claims before a save": the_second_one_at_a_bucket_is_refused_its_first_save,
    "what another side saved goes": what_another_side_saved_stays,
    "what was passed over in silence goes": what_was_passed_over_in_silence_stays,
    "whoever answers is meant": who_is_dead_is_noticed_whoever_answers,
    "what nobody here has heard of failed":
        a_part_stays_on_a_host_that_has_not_heard_of_its_checkpoint,
    "who says that a save failed is believed": what_was_committed_has_not_failed,
}  # fmt: skip
"""By mutation."""


@pytest.mark.parametrize("play", dict.fromkeys(SCENES.values()), ids=lambda play: play.__name__)
def test_a_promise_is_kept(play: Callable[[], None]):
    with simulated():
        play()


@pytest.mark.parametrize("name", sorted(set(MUTATIONS) - set(NOT_VISIBLE)))
def test_what_is_broken_on_purpose_is_found_by_a_scene(name: str):
    with MUTATIONS[name](), simulated(), pytest.raises(Broken):
        SCENES[name]()


@pytest.mark.parametrize("name", sorted(NOT_VISIBLE))
def test_what_cannot_be_seen_is_not_seen(name: str):
    with MUTATIONS[name](), simulated():
        for play in dict.fromkeys(SCENES.values()):
            play()


@pytest.mark.parametrize("name", sorted(SEEDS))
def test_what_is_broken_on_purpose_is_found_by_seeds(name: str):
    theme, seed = SEEDS[name]
    check_known_seed(seed, lambda seeds: first_found(name, theme, seeds), "SEEDS")
    with simulated():
        run_case(seed, theme=theme)
