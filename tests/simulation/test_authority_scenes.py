"""Scenes with the real agents of several hosts, each told as it was first seen to go wrong.

As test_authority.py, whose seeds do not come by them: more than one rank on a host, memory with
little room, a plan that a host does not have.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from tests.simulation import authority_adapter as product
from tests.simulation.authority_adapter import Rules, simulated
from tests.simulation.authority_scene import RULES, Scene
from tests.simulation.shared_world import PLANS
from tieredckpt.errors import NamespaceInUseError, TierUnavailableError
from tieredckpt.format.manifest import (
    AttemptId,
    AttemptRecord,
    Followed,
    Manifest,
    SegmentRef,
    StreamBase,
    encode_attempt,
    encode_manifest,
)
from tieredckpt.format.segment import slot_capacity
from tieredckpt.policy.history import ancestry_of
from tieredckpt.rpc.messages.peer import Push
from tieredckpt.storage.memory.slot import LABEL_BYTES


@pytest.fixture(autouse=True)
def _on_simulated_hosts() -> Iterator[None]:
    with simulated():
        yield


@pytest.mark.parametrize("who", ["a looker", "the restart"])
def test_opening_an_engine_beside_a_session_frees_no_part(who: str):
    """A host has not heard of the newest checkpoint, one of its two ranks is dead, the other one
    is not yet. Whoever opens there has no word about what the dead one sealed.
    """
    scene = Scene(2)
    first, second = scene.hosts
    job = scene.run([first, second, second])
    job.load()
    scene.save(job, 10)
    scene.pass_time()
    scene.cut(second)
    newest = scene.save(job, 20)
    scene.pass_time()
    dead = [job.ranks[2]] if who == "a looker" else [job.ranks[0], job.ranks[2]]
    for rank in dead:
        job.end_rank(rank)
    scene.pass_time(2.0)
    again = scene.run([second] if who == "a looker" else [first, second])
    scene.pass_time(4.0)
    assert scene.has_parts(newest) == [True] * 3
    if who == "the restart":
        job.end()
        scene.pass_time(2.0)
    scene.cut(second, off=False)
    if who == "the restart":
        assert again.load() == newest
    scene.pass_time(40.0, 6)
    assert scene.has_parts(newest) == [True] * 3
    assert newest in scene.held(second)


@pytest.mark.parametrize("hears", ["by comparing", "by a commit"])
def test_the_host_that_was_silent_keeps_its_part_of_what_was_left_behind(hears: str):
    """It hears of the run that passed the checkpoint over before it hears of the checkpoint."""
    scene = Scene(3)
    rules = dataclasses.replace(RULES, keep=6, replicas=1)
    job = scene.run(scene.hosts, rules)
    job.load()
    base = scene.save(job, 10)
    scene.pass_time()
    scene.cut(scene.hosts[2])
    unheard = scene.save(job, 20)
    scene.pass_time()
    job.end()
    scene.pass_time(1.0)
    job = scene.run(scene.hosts, rules)
    assert job.load() == base
    scene.save(job, 21)
    scene.pass_time()
    scene.cut(scene.hosts[2], off=False)
    if hears == "by a commit":
        scene.save(job, 22)
    scene.pass_time(3.0)
    scene.pass_time(80.0, 12)
    scene.save(job, 23)
    scene.pass_time(40.0, 6)
    assert scene.has_parts(unheard) == [True] * 3
    assert all(unheard in scene.held(host) for host in scene.hosts)


@pytest.mark.parametrize(("slots", "pressure"), [(8, "drop_oldest_queued"), (9, "keep")])
def test_what_was_left_behind_holds_no_save_up_while_a_tier_is_away(
    slots: int, pressure: str, monkeypatch: pytest.MonkeyPatch
):
    """It waits for that tier, and goes before uploads of the line are given up."""
    capacity = slots * (slot_capacity(4096) + LABEL_BYTES)
    spec = Rules.spec

    def small(rules: Rules) -> Any:
        return msgspec.structs.replace(spec(rules), capacity_bytes=capacity)

    monkeypatch.setattr(Rules, "spec", small)
    scene = Scene(3)
    rules = Rules(keep=2, bucket_keep=4, on_pressure=pressure, replicas=1)
    job = scene.run(scene.hosts, rules)
    job.load()
    base = scene.save(job, 10)
    for _ in range(2):
        scene.pass_time()
    scene.cut(scene.hosts[2])
    for host in scene.hosts:
        host.reaches_bucket = False
    behind = []
    for step in (20, 21):
        behind.append(scene.save(job, step))
        scene.pass_time(tiers=False)
    job.end()
    scene.pass_time(1.0, tiers=False)
    job = scene.run(scene.hosts[:2], rules)
    assert job.load() == base
    saved = []
    for step in range(30, 36):
        saved.append(scene.save(job, step))
        scene.pass_time(10.0)
    held = scene.held(scene.hosts[0])
    assert behind[0] not in held
    if pressure == "keep":
        assert held.issuperset(saved), "none of the line may be given up"
    else:
        assert held.issuperset(saved[-2:])


@pytest.mark.parametrize("plan", ["known", "new", "lost"])
def test_what_is_older_does_not_come_before_what_it_is_older_than(plan: str):
    """A host that missed a roll-back is told of what was rolled back, too; the first save after it
    has a plan that it does not know, as after a restart on other ranks.
    """
    scene = Scene(2)
    job = scene.run(scene.hosts)
    job.load()
    scene.save(job, 80)
    scene.pass_time()
    namespace = product._namespace(scene.hosts[1])
    (base,) = namespace.catalog.manifests()
    (begun,) = namespace.catalog.attempts()
    plans = dict(PLANS)
    new_id, new_plan = next((i, data) for i, data in plans.items() if i != base.plan)

    def made(step: int, **other: Any) -> Manifest:
        segments = tuple(
            SegmentRef(scene.world.token_hex(16), 4096, scene.world.token_hex(16), "h0")
            for _ in base.segments
        )
        return msgspec.structs.replace(
            base, save_id=scene.world.token_hex(16), step=step, segments=segments, **other
        )

    later = [made(step, seq=base.seq + n, parent=base.save_id) for n, step in ((1, 90), (2, 100))]
    record = AttemptRecord(
        namespace=base.namespace, number=begun.number + 1, id=scene.world.token_hex(16),
        run=scene.world.token_hex(16), created_at_s=1.0,
        bases=(
            StreamBase(
                stream=base.stream, parent=base.save_id, parent_step=80, lineage=ancestry_of(base),
                abandons=ancestry_of(later[-1]),
            ),
        ),
        followed=(Followed(begun.number, begun.id),),
    )  # fmt: skip
    newest = made(
        85, seq=0, attempt=AttemptId(record.number, record.id), lineage=ancestry_of(base),
        parent=base.save_id, plan=base.plan if plan == "known" else new_id,
    )  # fmt: skip
    push = Push(
        attempts=(encode_attempt(record),),
        manifests=tuple(encode_manifest(each) for each in (newest, *reversed(later))),
    )
    scene.world.running.append(scene.hosts[1].life)
    if plan == "lost":  # the host that said so does not have it any more
        namespace.across.ingest.take(push, complete=True)
        scene.world.running.pop()
        assert scene.held(scene.hosts[1]) >= {each.save_id for each in later}
        return
    answer = namespace.across.ingest.take(push)
    assert answer.need_plans == ((new_id,) if plan == "new" else ())
    if answer.need_plans:
        assert scene.held(scene.hosts[1]) == {base.save_id}
        again = msgspec.structs.replace(push, plans=(new_plan,))
        assert namespace.across.ingest.take(again).need_plans == ()
    scene.world.running.pop()
    assert scene.held(scene.hosts[1]) >= {base.save_id, newest.save_id}


def test_a_lease_that_was_not_seen_refuses_once():
    """A run dies between its claim and its first save, and its agent with it. The next one loads
    while the bucket is silent: whose lease it then finds it cannot know. Its restart has seen it.
    """
    scene = Scene(1)
    (host,) = scene.hosts
    rules = dataclasses.replace(RULES, bucket_keep=2)
    job = scene.run([host], rules)
    job.load()
    base = scene.save(job, 10)
    job.end()

    def dies(save_id: str) -> None:
        raise TierUnavailableError("the trainer dies")

    job = scene.run([host], rules)
    assert job.load() == base
    with pytest.raises(TierUnavailableError, match="the trainer dies"):
        job.commit(job.seal(), 20, dies)
    job.end()
    assert len([key for key in scene.world.store.objects if key.startswith("claims/")]) == 2
    scene.world.kill_agent(host)
    product.boot(scene.world, host)
    host.reaches_bucket = False
    job = scene.run([host], rules)
    assert job.load() == base
    host.reaches_bucket = True
    with pytest.raises(NamespaceInUseError, match="start this one again"):
        scene.save(job, 20)
    job.end()
    job = scene.run([host], rules)
    assert job.load() == base
    newest = scene.save(job, 20)
    assert scene.held(host) == {base, newest}
