"""Spilling: verified, bounded, retried; a failing tier hurts nothing but itself."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec
import pytest

from tests.support.agent import FakeTrainer, spec_of, wait_until
from tests.unit.agent.test_node import Host, steps
from tieredckpt import failpoints
from tieredckpt.agent import status
from tieredckpt.agent.peering import attempts
from tieredckpt.agent.tiers import place, scanner
from tieredckpt.agent.tiers import worker as worker_module
from tieredckpt.agent.tiers.worker import TierWorker
from tieredckpt.config.tiers import Keep
from tieredckpt.config.units import Every
from tieredckpt.errors import CapacityError, TierUnavailableError
from tieredckpt.format.manifest import Manifest, decode_attempt
from tieredckpt.format.plan_record import encoded_plan_id
from tieredckpt.rpc.messages import agent as m
from tieredckpt.storage.backends.file import FileTier
from tieredckpt.storage.holdings import TierFacts
from tieredckpt.storage.stored import Contents


@pytest.fixture
def host(runtime_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    monkeypatch.setattr(worker_module, "BACKOFF_S_MAX", 0.05)
    monkeypatch.setattr(worker_module, "BACKOFF_S", 0.05)
    host = Host(runtime_dir)
    yield host
    host.close()
    failpoints.arm("")


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    return tmp_path / "disk"


def level(trainer: FakeTrainer, save_id: str) -> str:
    return trainer.client.progress(save_id).levels["disk"]


def waits_for(trainer: FakeTrainer, save_id: str) -> str:
    """Why it waits; nothing while it is tried, which a tier that fails does again and again."""
    found = trainer.client.progress(save_id)
    return found.errors.get("disk", "") if found.levels["disk"] == "waiting" else ""


def worker(host: Host) -> TierWorker:
    return host.node._registry.namespace("run").workers["disk"]


def test_spilled_bytes_are_the_same(host: Host, disk: Path):
    trainer = host.trainer(spec_of(tiers={"disk": disk}), size=9 << 20)
    saved = trainer.save(1, tiers=("disk",))
    wait_until(lambda: level(trainer, saved.save_id) == "done")
    ref = saved.segments[0]
    assert (disk / "run" / "segments" / ref.id).read_bytes() == trainer.read(ref)
    catalog = worker(host).catalog
    assert catalog is not None
    assert [record.number for record in catalog.attempts()] == [1]


def test_a_tier_keeps_its_own_number(host: Host, disk: Path):
    trainer = host.trainer(spec_of(tiers={"disk": disk}, tier_keep_last=3, keep_last=1))
    for step in range(1, 7):
        saved = trainer.save(step, tiers=("disk",))
        wait_until(lambda s=saved: level(trainer, s.save_id) == "done")
    wait_until(worker(host).is_idle)
    assert steps(trainer, "disk") == [4, 5, 6]
    assert steps(trainer) == [6]
    assert len(list((disk / "run" / "segments").iterdir())) == 3


def test_a_spill_is_reported_before_old_files_go_and_the_tier_is_busy_until_then(
    host: Host, disk: Path, monkeypatch: pytest.MonkeyPatch
):
    deleting, go_on = threading.Event(), threading.Event()
    delete = FileTier.delete

    def held(self: FileTier, key: str) -> None:
        if key.startswith("manifests/"):
            deleting.set()
            assert go_on.wait(60)
        delete(self, key)

    trainer = host.trainer(spec_of(tiers={"disk": disk}, tier_keep_last=1))
    monkeypatch.setattr(FileTier, "delete", held)
    try:
        first = trainer.save(1, tiers=("disk",))
        wait_until(lambda: level(trainer, first.save_id) == "done")
        wait_until(worker(host).is_idle)  # nothing to delete yet
        second = trainer.save(2, tiers=("disk",))
        assert deleting.wait(60)
        assert level(trainer, second.save_id) == "done"
        assert not worker(host).is_idle()  # or an agent that is not used would end in the middle
        assert trainer.client.status().namespaces[0].tiers[0].retaining
    finally:
        go_on.set()
    wait_until(worker(host).is_idle)
    assert steps(trainer, "disk") == [2]


def test_what_memory_has_no_room_for_is_given_up_the_oldest_first(host: Host, disk: Path):
    disk.write_text("in the way")
    trainer = host.trainer(spec_of(tiers={"disk": disk}))
    trainer.prepare()
    slots = sum(host.slots().values())
    saves = [trainer.save(step, tiers=("disk",)) for step in range(1, 7)]
    (told,) = host.node.status().namespaces[0].tiers
    assert (told.queued, told.dropped_total, told.memory_full) == (3, 3, True)
    assert told.lag_steps == 5  # from the first one, which it never had
    assert told.lag_bytes == 3 * trainer.segment_bytes
    assert [level(trainer, each.save_id) for each in saves[:3]] == ["superseded"] * 3
    assert "was shed" in trainer.client.progress(saves[2].save_id).errors["disk"]
    assert steps(trainer) == [4, 5, 6]
    assert sum(host.slots().values()) == slots  # the ring is large enough, as it was before
    wait_until(lambda: str(disk) in waits_for(trainer, saves[3].save_id))
    disk.unlink()
    # All three go there in turn; the tier keeps two, memory too.
    wait_until(lambda: level(trainer, saves[5].save_id) == "done")
    wait_until(lambda: steps(trainer, "disk") == [5, 6])


def test_the_lag_of_a_broken_tier_counts_from_what_it_had_whatever_was_dropped(
    host: Host, disk: Path
):
    spec = spec_of(tiers={"disk": disk})
    tier = msgspec.structs.replace(spec.tiers[0], lag_alarm=Every(steps=12))
    trainer = host.trainer(msgspec.structs.replace(spec, tiers=(tier,)))

    def told(step: int) -> m.TierStatus:
        trainer.save(step, tiers=("disk",))
        return host.node.status().namespaces[0].tiers[0]

    told(5)
    wait_until(worker(host).is_idle)
    shutil.rmtree(disk)
    disk.write_text("in the way")
    lags = [(found.lag_steps, found.alarm) for found in map(told, range(10, 40, 5))]
    assert lags == [(step, step >= 12) for step in range(5, 35, 5)]
    wait_until(lambda: worker(host).catalog is None)
    found = told(40)
    assert (found.newest_step, found.lag_steps, found.available) == (5, 35, False)
    assert found.dropped_total > 2
    disk.unlink()
    wait_until(lambda: worker(host).catalog is not None and worker(host).is_idle())
    found = told(41)
    assert found.available
    assert (found.lag_steps or 0) <= 1


def test_nothing_is_given_up_without_need_and_the_newest_never(host: Host, disk: Path):
    disk.write_text("in the way")
    trainer = host.trainer(spec_of(tiers={"disk": disk}, keep_last=1))
    first = trainer.save(1, tiers=("disk",))
    second = trainer.save(2, tiers=("disk",))
    assert level(trainer, first.save_id) in ("queued", "waiting")
    third = trainer.save(3, tiers=("disk",))
    assert level(trainer, first.save_id) == "superseded"
    disk.unlink()
    for each in (second, third):
        wait_until(lambda s=each: level(trainer, s.save_id) == "done")


def test_with_keep_saves_fail_instead_and_all_that_waits_gets_there(
    host: Host, disk: Path, caplog: pytest.LogCaptureFixture
):
    disk.write_text("in the way")
    spec = spec_of(tiers={"disk": disk}, keep_last=1, capacity_bytes=5 << 20, wait_s=0)
    (tier,) = spec.tiers
    keep = msgspec.structs.replace(tier, on_pressure="keep", keep=Keep(last=9))
    trainer = host.trainer(msgspec.structs.replace(spec, tiers=(keep,)))
    saves = [trainer.save(step, tiers=("disk",)) for step in range(1, 5)]
    with pytest.raises(CapacityError, match="A slow tier holds slots"):
        trainer.save(5, tiers=("disk",))
    assert [level(trainer, each.save_id) for each in saves].count("superseded") == 0
    said = [each for each in caplog.messages if "slower than the saves" in each]
    assert len(said) == 1  # once, not per save
    disk.unlink()
    for each in saves:
        wait_until(lambda s=each: level(trainer, s.save_id) == "done")
    assert steps(trainer, "disk") == [each.step for each in saves]
    trainer.save(9, tiers=("disk",))


def test_a_tier_that_cannot_be_read_is_reported(host: Host, disk: Path):
    disk.write_text("in the way")
    trainer = host.trainer(spec_of(tiers={"disk": disk}))
    facts = trainer.tier("disk")
    assert not facts.available
    assert facts.error is not None
    assert trainer.open_attempt().number == 1
    trainer.save(1)
    assert host.node.status().namespaces[0].attempt == 1
    (tier,) = host.node.status().namespaces[0].tiers
    assert (tier.available, tier.error is not None) == (False, True)


def test_a_waiting_spill_keeps_its_source_while_the_ring_has_room(host: Host, disk: Path):
    disk.write_text("in the way")
    trainer = host.trainer(spec_of(tiers={"disk": disk}, keep_last=1))
    trainer.prepare()
    waiting = trainer.save(1, tiers=("disk",))
    for step in range(2, 6):
        trainer.save(step)
    assert steps(trainer) == [1, 5]
    assert sum(host.slots().values()) == 3
    disk.unlink()
    wait_until(lambda: level(trainer, waiting.save_id) == "done")
    wait_until(lambda: steps(trainer) == [5])


@pytest.fixture
def patient(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tier that failed rests for ten minutes, unless somebody asks for it."""
    monkeypatch.setattr(worker_module, "BACKOFF_S_MAX", 600.0)
    monkeypatch.setattr(worker_module, "BACKOFF_S", 600.0)
    monkeypatch.setattr(attempts, "ATTACH_WAIT_S", 0.1)


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize(
    "how", ["wait", *(pytest.param(each, marks=pytest.mark.full) for each in ("save", "flush"))]
)
def test_who_wants_a_tier_that_failed_does_not_wait_for_its_pause(host: Host, disk: Path, how: str):
    disk.write_text("in the way")
    trainer = host.trainer(spec_of(tiers={"disk": disk}))
    first = trainer.save(1, tiers=("disk",))
    wait_until(lambda: worker(host)._failures >= 2)  # by itself, and for this save
    disk.unlink()
    if how == "save":
        trainer.save(2, tiers=("disk",))
    if how == "flush":
        assert host.node.flush("run", m.Flush(tier="disk", left_s=120)).tiers == ("disk",)
    awaited = "disk" if how == "wait" else ""

    def reached() -> bool:
        return host.node.progress("run", first.save_id, awaited).levels["disk"] == "done"

    wait_until(reached, deadline_s=120)


@pytest.mark.usefixtures("patient")
def test_a_tier_that_failed_is_not_tried_faster_than_its_limit(
    host: Host, disk: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(worker_module, "NUDGE_S", 600.0)
    disk.write_text("in the way")
    trainer = host.trainer(spec_of(tiers={"disk": disk}))
    # Without a look at the tiers, which would wait for this one.
    trainer.attempt = decode_attempt(trainer.client.open_attempt("a" * 32))
    saved = trainer.save(1, tiers=("disk",))
    wait_until(lambda: worker(host)._failures >= 1)
    for _ in range(100):
        found = host.node.progress("run", saved.save_id, "disk")
        assert found.levels["disk"] == "waiting"
    assert worker(host)._failures == 1


def test_a_look_at_another_place_lifts_no_mark(host: Host, disk: Path):
    """A reader of a bucket has its own configuration, with perhaps another bucket of that name."""
    spec = spec_of(tiers={"disk": disk})
    trainer = host.trainer(spec)
    saved = trainer.save(1, tiers=("disk",))
    trainer.spilled(saved.save_id)
    (mine,), segment_id = spec.tiers, saved.segments[0].id
    other = msgspec.structs.replace(mine, url="s3://another/place")
    damage = m.ReportDamage(tier="disk", segment_id=segment_id, blocks=(0,), reason="a test")
    trainer.client.request(damage)
    for at, left in ((other, 1), (msgspec.structs.replace(mine, name="else"), 0)):
        look = m.ReportIntact(
            tier="disk", segment_id=segment_id, began_ns=time.monotonic_ns() + 1, read_at=at
        )
        trainer.client.request(look)
        assert host.node.status().namespaces[0].tiers[0].quarantined == left


def test_a_damaged_source_is_quarantined_and_never_spilled(host: Host, disk: Path):
    disk.write_text("in the way")
    trainer = host.trainer(spec_of(tiers={"disk": disk}), size=9 << 20)
    saved = trainer.save(1, tiers=("disk",))
    slot = host.node._pool.find(saved.segments[0].id)
    assert slot is not None
    with (host.runtime.slots / slot.slot_id).open("r+b") as file:
        file.seek(5 << 20)
        file.write(b"flip")
    disk.unlink()
    wait_until(lambda: level(trainer, saved.save_id) == "failed")
    assert "block 1" in trainer.client.progress(saved.save_id).errors["disk"]
    assert steps(trainer, "disk") == []
    (fact,) = trainer.tier().segments
    assert fact.bad_blocks == (1,)
    healthy = trainer.save(2, tiers=("disk",))
    wait_until(lambda: level(trainer, healthy.save_id) == "done")


@pytest.mark.parametrize("where", ["trailer", "index"])
def test_a_damaged_footer_is_found_before_anything_is_written(host: Host, disk: Path, where: str):
    disk.write_text("in the way")
    trainer = host.trainer(spec_of(tiers={"disk": disk}))
    saved = trainer.save(1, tiers=("disk",))
    ref = saved.segments[0]
    slot = host.node._pool.find(ref.id)
    assert slot is not None
    with (host.runtime.slots / slot.slot_id).open("r+b") as file:
        file.seek(ref.size - 100 if where == "trailer" else trainer.layout.data_bytes + 10)
        file.write(b"flip")
    disk.unlink()
    wait_until(lambda: level(trainer, saved.save_id) == "failed")
    assert not list(disk.glob("run/segments/*"))


def test_what_a_tier_lacks_is_taken_up_after_a_restart(host: Host, disk: Path):
    disk.write_text("in the way")
    trainer = host.trainer(spec_of(tiers={"disk": disk}))
    saves = [trainer.save(step, tiers=("disk",)) for step in range(1, 5)]
    host.node.stop()
    disk.unlink()
    host.restart()
    for each in saves[2:]:
        wait_until(lambda s=each: level(trainer, s.save_id) == "done")
    # The tier keeps two: what it would delete at once is not brought there.
    assert steps(trainer, "disk") == [3, 4]


def test_leftovers_of_an_unfinished_spill_are_swept(host: Host, disk: Path):
    segments = disk / "run" / "segments"
    segments.mkdir(parents=True)
    (segments / ("ab" * 16)).write_bytes(bytes(4096))
    trainer = host.trainer(spec_of(tiers={"disk": disk}))
    wait_until(lambda: worker(host).catalog is not None)
    assert list(segments.iterdir()), "who has not saved deletes nothing"
    trainer.save(1)
    wait_until(lambda: not list(segments.iterdir()))
    trainer.close()


def test_two_streams_do_not_supersede_each_other(host: Host, disk: Path):
    disk.write_text("in the way")
    trainer = host.trainer(spec_of(tiers={"disk": disk}))
    saves = [trainer.save(1, stream=name, tiers=("disk",)) for name in ("actor", "critic")]
    disk.unlink()
    for saved in saves:
        wait_until(lambda s=saved: level(trainer, s.save_id) == "done")


def test_a_changed_spec_moves_to_the_new_folder(host: Host, disk: Path, tmp_path: Path):
    trainer = host.trainer(spec_of(tiers={"disk": disk}))
    first = trainer.save(1, tiers=("disk",))
    wait_until(lambda: level(trainer, first.save_id) == "done")
    trainer.close()
    again = host.trainer(spec_of(tiers={"disk": tmp_path / "other"}))
    again.open_attempt({"default": first.save_id})
    again.save(2)
    # One in memory is destined for a tier of this name, and the new folder lacks it.
    wait_until(lambda: level(again, first.save_id) == "done")
    assert (tmp_path / "other" / "run" / "manifests").exists()
    again.close()
    back = host.trainer(spec_of(tiers={"disk": disk}))
    assert steps(back, "disk") == [1]


def test_an_unexpected_failure_is_retried_and_holds_nothing(
    host: Host, disk: Path, monkeypatch: pytest.MonkeyPatch
):
    def broken(self: FileTier, key: str, source: object) -> None:
        raise ValueError("a bug")

    monkeypatch.setattr(FileTier, "put_from", broken)
    trainer = host.trainer(spec_of(tiers={"disk": disk}))
    saved = trainer.save(1, tiers=("disk",))
    wait_until(lambda: "unexpected" in waits_for(trainer, saved.save_id))
    newer = trainer.save(2, tiers=("disk",))
    monkeypatch.undo()
    for each in (saved, newer):
        wait_until(lambda s=each: level(trainer, s.save_id) == "done")
    wait_until(lambda: worker(host).is_idle())


def test_a_tier_that_hangs_is_reported_and_takes_one_thread(
    host: Host, disk: Path, monkeypatch: pytest.MonkeyPatch
):
    trainer = host.trainer(spec_of(tiers={"disk": disk}))
    saved = trainer.save(1, tiers=("disk",))
    wait_until(lambda: level(trainer, saved.save_id) == "done")
    for module in (scanner, status):
        monkeypatch.setattr(module, "LOOK_WAIT_S", 0.05)
    monkeypatch.setattr(scanner, "STUCK_WAIT_S", 0.01)
    catalog = worker(host).catalog
    assert catalog is not None
    answers = threading.Event()
    load = catalog.load

    def hanging() -> Contents:
        answers.wait(30)
        return load()

    monkeypatch.setattr(catalog, "load", hanging)
    for _ in range(5):
        facts = trainer.tier("disk")
        assert (facts.available, facts.error) == (False, "no answer within 0.05 s")
        assert steps(trainer) == [1]
    assert sum(each.name == "tck-look-disk" for each in threading.enumerate()) == 1
    answers.set()
    wait_until(lambda: steps(trainer, "disk") == [1])  # 0.05 s may be too short for a busy machine


def test_whoever_waits_gets_an_answer_that_began_after_the_question():
    """Or a load would not see what was committed before it."""
    began: list[int] = []
    go_on = threading.Semaphore(0)

    def ask() -> TierFacts:
        began.append(len(began) + 1)
        assert go_on.acquire(timeout=20)
        name = f"t{len(began)}"
        return TierFacts(tier=name, scope="host", kind="file", available=True, error=None)

    shared = scanner.TierLook("look")
    first, second, third = shared.ask(ask), shared.ask(ask), shared.ask(ask)
    until_s = time.monotonic() + 20
    for number, answers in ((first, "t1"), (second, "t2"), (third, "t2")):
        go_on.release()
        facts = shared.wait(number, ask, until_s)
        assert facts is not None
        assert facts.tier == answers
    assert began == [1, 2]


def damage_plan(host: Host) -> Path:
    (path,) = (host.runtime.namespaces / "run" / "plans").iterdir()
    path.write_bytes(b"damaged")
    return path


def test_a_damaged_plan_is_taken_from_another_tier(host: Host, disk: Path, tmp_path: Path):
    other = tmp_path / "other"
    other.write_text("in the way")
    trainer = host.trainer(spec_of(tiers={"disk": disk, "other": other}))
    saved = trainer.save(1, tiers=("disk", "other"))
    wait_until(lambda: level(trainer, saved.save_id) == "done")
    plan = damage_plan(host)
    other.unlink()
    wait_until(lambda: trainer.client.progress(saved.save_id).levels["other"] == "done")
    assert steps(trainer, "other") == [1]
    assert encoded_plan_id(plan.read_bytes()) == saved.plan


def test_a_damaged_plan_that_no_tier_has_is_waited_for(host: Host, disk: Path):
    disk.write_text("in the way")
    trainer = host.trainer(spec_of(tiers={"disk": disk}))
    saved = trainer.save(1, tiers=("disk",))
    damage_plan(host)
    disk.unlink()
    wait_until(lambda: "plan" in waits_for(trainer, saved.save_id))
    trainer.save(2)
    wait_until(lambda: level(trainer, saved.save_id) == "done")
    assert steps(trainer, "disk") == [1]


def test_a_manifest_that_was_damaged_in_the_tier_is_written_again(host: Host, disk: Path):
    trainer = host.trainer(spec_of(tiers={"disk": disk}))
    saved = trainer.save(1, tiers=("disk",))
    wait_until(lambda: level(trainer, saved.save_id) == "done")
    (path,) = (disk / "run" / "manifests" / "default").iterdir()
    path.write_bytes(b"damaged")
    host.restart()
    wait_until(lambda: level(trainer, saved.save_id) == "done")
    assert steps(trainer, "disk") == [1]


@pytest.mark.parametrize("gone", ["", "run", "run/segments", "run/plans", "run/manifests"])
def test_a_folder_that_was_deleted_is_made_again(host: Host, disk: Path, gone: str):
    trainer = host.trainer(spec_of(tiers={"disk": disk}))
    saved = trainer.save(1, tiers=("disk",))
    wait_until(lambda: level(trainer, saved.save_id) == "done")
    shutil.rmtree(disk / gone)
    saved = trainer.save(2, tiers=("disk",))
    wait_until(lambda: level(trainer, saved.save_id) == "done")
    assert 2 in steps(trainer, "disk")
    trainer.check(saved, "disk")


@pytest.mark.parametrize("scope", ["host", "shared"])
def test_what_looks_old_in_a_tier_is_written_again_after_it_was_purged(
    host: Host, disk: Path, scope: Literal["host", "shared"]
):
    """A plan and an attempt are written once and used for as long as a run lives."""
    spec = spec_of(tiers={"disk": disk})
    tier = msgspec.structs.replace(spec.tiers[0], scope=scope)
    trainer = host.trainer(msgspec.structs.replace(spec, tiers=(tier,)))
    saved = trainer.save(1, tiers=("disk",))
    wait_until(lambda: level(trainer, saved.save_id) == "done")
    for folder in ("plans", "attempts", "claims"):
        for path in (disk / "run").glob(f"{folder}/*"):
            path.unlink()
    saved = trainer.save(2, tiers=("disk",))
    wait_until(lambda: level(trainer, saved.save_id) not in ("queued", "active"))
    assert level(trainer, saved.save_id) == "done"
    assert trainer.tier("disk").plans == (saved.plan,)
    assert [each.id for each in worker(host).catalog.attempts()] == [saved.attempt.id]


def test_a_folder_is_not_made_again_on_another_file_system(
    host: Host, disk: Path, monkeypatch: pytest.MonkeyPatch
):
    trainer = host.trainer(spec_of(tiers={"disk": disk}))
    saved = trainer.save(1, tiers=("disk",))
    wait_until(lambda: level(trainer, saved.save_id) == "done")
    shutil.rmtree(disk)
    monkeypatch.setattr(place, "device_of", lambda folder: -1)
    saved = trainer.save(2, tiers=("disk",))
    wait_until(lambda: "mounted" in trainer.client.progress(saved.save_id).errors.get("disk", ""))
    assert not disk.exists()
    assert not trainer.tier("disk").available
    monkeypatch.undo()
    wait_until(lambda: level(trainer, saved.save_id) == "done")


def test_a_spill_that_hangs_gives_the_folder_up_when_it_ends(
    host: Host, disk: Path, monkeypatch: pytest.MonkeyPatch
):
    hangs, go_on = threading.Event(), threading.Event()

    def hanging(self: FileTier, key: str, source: object) -> None:
        hangs.set()
        go_on.wait(30)
        raise TierUnavailableError("it hung", tier="disk", outcome="unknown")

    monkeypatch.setattr(FileTier, "put_from", hanging)
    monkeypatch.setattr(worker_module, "STOP_WAIT_S", 0.01)
    trainer = host.trainer(spec_of(tiers={"disk": disk}))
    trainer.save(1, tiers=("disk",))
    assert hangs.wait(20)
    worker(host).stop()
    with pytest.raises(TierUnavailableError, match="another agent uses"):
        FileTier("disk", disk, "run")
    go_on.set()

    def is_free() -> bool:
        try:
            FileTier("disk", disk, "run").close()
        except TierUnavailableError:
            return False
        return True

    wait_until(is_free)


def limited(monkeypatch: pytest.MonkeyPatch, disk: Path, checkpoints: float, size: int) -> None:
    """The disk below has room for so many segments of ``size`` bytes."""
    check = FileTier._check_space

    def small(self: FileTier, key: str, needed: int) -> None:
        check(self, key, needed)
        held = sum(path.stat().st_size for path in disk.rglob("segments/*"))
        if self.name == "disk" and held + needed > checkpoints * size:
            raise CapacityError("the disk is full", tier=self.name, limit="file system")

    monkeypatch.setattr(FileTier, "_check_space", small)


def test_a_disk_with_room_for_what_it_keeps_gets_the_next_one(
    host: Host, disk: Path, monkeypatch: pytest.MonkeyPatch
):
    trainer = host.trainer(spec_of(tiers={"disk": disk}, tier_keep_last=2))
    limited(monkeypatch, disk, 2, trainer.segment_bytes)
    for step in range(1, 6):
        saved = trainer.save(step, tiers=("disk",))
        wait_until(lambda s=saved: level(trainer, s.save_id) == "done")
    wait_until(worker(host).is_idle)
    assert steps(trainer, "disk") == [4, 5]


def test_the_newest_one_on_a_full_disk_stays_until_the_next_one_is_there(
    host: Host, disk: Path, monkeypatch: pytest.MonkeyPatch
):
    trainer = host.trainer(spec_of(tiers={"disk": disk}, tier_keep_last=1))
    limited(monkeypatch, disk, 1, trainer.segment_bytes)
    first = trainer.save(1, tiers=("disk",))
    wait_until(lambda: level(trainer, first.save_id) == "done")
    second = trainer.save(2, tiers=("disk",))
    wait_until(lambda: "space for two" in waits_for(trainer, second.save_id))
    assert steps(trainer, "disk") == [1]


def test_what_another_tier_waits_for_makes_room_on_a_full_disk(
    host: Host, disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    far = tmp_path / "far"
    far.write_text("in the way")
    spec = spec_of(tiers={"disk": disk, "far": far}, tier_keep_last=1, keep_last=1)
    near, below = spec.tiers
    below = msgspec.structs.replace(below, source="disk", keep=Keep(last=9))
    trainer = host.trainer(msgspec.structs.replace(spec, tiers=(near, below)))
    limited(monkeypatch, disk, 3, trainer.segment_bytes)
    saves = []
    for step in range(1, 7):
        saves.append(trainer.save(step, tiers=("disk", "far")))
        wait_until(lambda: level(trainer, saves[-1].save_id) == "done")
    assert steps(trainer, "disk") == [4, 5, 6]
    told = {tier.name: tier for tier in host.node.status().namespaces[0].tiers}
    assert (told["far"].dropped_total, told["far"].memory_full) == (3, True)
    far.unlink()
    for each in saves[3:]:
        wait_until(lambda s=each: trainer.client.progress(s.save_id).levels["far"] == "done")
    wait_until(lambda: steps(trainer, "disk") == [6])


def test_what_was_left_behind_makes_room_on_a_full_disk(
    host: Host, disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Also what another tier waits for, and is to be kept; what is on the line does not."""
    far = tmp_path / "far"
    far.write_text("in the way")
    spec = spec_of(tiers={"disk": disk, "far": far}, tier_keep_last=2, keep_last=2)
    near, below = spec.tiers
    below = msgspec.structs.replace(below, source="disk", keep=Keep(last=9), on_pressure="keep")
    spec = msgspec.structs.replace(spec, tiers=(near, below))

    def save(trainer: FakeTrainer, step: int) -> Manifest:
        saved = trainer.save(step, tiers=("disk", "far"))
        wait_until(lambda: level(trainer, saved.save_id) == "done")
        return saved

    with host.trainer(spec) as trainer:
        trainer.open_attempt()
        base, *_ = [save(trainer, step) for step in (20, 30, 40)]
    trainer = host.trainer(spec)
    limited(monkeypatch, disk, 4, trainer.segment_bytes)
    trainer.open_attempt({"default": base.save_id}, in_silence=True)
    for step in (21, 22, 23):
        save(trainer, step)
    assert sorted(steps(trainer, "disk")) == [20, 21, 22, 23]
    trainer.save(24, tiers=("disk", "far"))
    wait_until(lambda: worker(host).error is not None)
    assert sorted(steps(trainer, "disk")) == [20, 21, 22, 23]
    far.unlink()
    wait_until(lambda: 24 in steps(trainer, "far"))
    assert {20, 21, 22, 23, 24} <= set(steps(trainer, "far"))


def test_a_delete_that_failed_after_the_manifest_is_finished(
    host: Host, disk: Path, monkeypatch: pytest.MonkeyPatch
):
    delete, refused = FileTier.delete, []

    def refusing(self: FileTier, key: str) -> None:
        if key.startswith("segments/") and len(refused) < 2:
            refused.append(key)
            raise TierUnavailableError("an error of the disk", tier=self.name)
        delete(self, key)

    monkeypatch.setattr(FileTier, "delete", refusing)
    trainer = host.trainer(spec_of(tiers={"disk": disk}, tier_keep_last=1))
    for step in (1, 2):
        saved = trainer.save(step, tiers=("disk",))
        wait_until(lambda s=saved: level(trainer, s.save_id) == "done")
    wait_until(lambda: len(list((disk / "run" / "segments").iterdir())) == 1)
    assert steps(trainer, "disk") == [2]
    wait_until(lambda: worker(host).error is None)
