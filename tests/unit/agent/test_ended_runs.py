"""A run that does not fit into the host's memory gets the room of ended runs, if that is safe."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.agent import FakeTrainer, spec_of, wait_until
from tests.unit.agent.test_node import Host
from tieredckpt.agent import ended_runs
from tieredckpt.agent.slots import allocator, owners
from tieredckpt.errors import CapacityError
from tieredckpt.format.manifest import Manifest
from tieredckpt.policy.capacity import ENDED_AFTER_S
from tieredckpt.rpc.messages import agent as m
from tieredckpt.storage.headroom import Headroom

SLOTS = 5
"""So many fit into the host: three of the old run have checkpoints, and the new one needs three."""


@pytest.fixture
def host(runtime_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    host = Host(runtime_dir)

    def headroom(folder: Path) -> Headroom:
        slots = host.node._pool.slots()
        room = SLOTS * max((slot.file_bytes for slot in slots), default=1 << 30)
        return Headroom(room - host.node._pool.total_bytes(), "file system", "keep less")

    for module in (allocator, owners):
        monkeypatch.setattr(module, "headroom_of", headroom)
    monkeypatch.setattr(ended_runs, "AGAIN_S", 0.0)
    yield host
    host.close()


def old_run(host: Host, tmp_path: Path) -> tuple[FakeTrainer, list[Manifest]]:
    """Three checkpoints in memory, of which the first two are on the disk; it has ended."""
    spec = spec_of(tiers={"disk": tmp_path / "disk"}, keep_last=3, tier_keep_last=5)
    trainer = host.trainer(spec, namespace="old")
    trainer.prepare()
    made = [trainer.save(step, tiers=("disk",) * (step < 3)) for step in (1, 2, 3)]
    for each in made[:2]:
        trainer.spilled(each.save_id)
    return trainer, made


def ends(host: Host, trainer: FakeTrainer, after_s: float = ENDED_AFTER_S) -> None:
    trainer.client.drop_lease()
    host.node.reap()
    host.clock.now_s += after_s


def new_run(host: Host) -> int:
    """How many slots it got."""
    trainer = host.trainer(spec_of(keep_last=2, wait_s=0.0), namespace="new")
    got = trainer.prepare()
    trainer.save(1)
    return got


def held(host: Host) -> list[int]:
    return sorted(x.step for x in host.node._registry.namespace("old").catalog.manifests())


def test_what_the_disk_has_makes_room_and_the_newest_that_is_nowhere_else_stays(
    host: Host, tmp_path: Path
):
    trainer, made = old_run(host, tmp_path)
    ends(host, trainer)
    assert new_run(host) == 3
    assert held(host) == [2, 3], "no more went than was needed"
    # What went is loaded from the disk.
    again = host.trainer(spec_of(tiers={"disk": tmp_path / "disk"}), namespace="old")
    again.check(made[0], "disk")
    again.check(made[2])


def refused(host: Host) -> str:
    with pytest.raises(CapacityError) as caught:
        new_run(host)
    assert held(host) == [1, 2, 3]
    return caught.value.message


def test_the_newest_stays_and_nothing_goes_for_a_run_that_would_not_fit(
    host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Blocks on the disk were not read: they may be damaged."""
    trainer, made = old_run(host, tmp_path)
    trainer.client.drop_lease()
    host.node.reap()
    again = host.trainer(
        spec_of(tiers={"disk": tmp_path / "disk"}, keep_last=3, tier_keep_last=5), namespace="old"
    )
    host.node.flush("old", m.Flush(tier="disk", left_s=0.0))
    again.spilled(made[2].save_id)
    ends(host, again)
    monkeypatch.setattr(sys.modules[__name__], "SLOTS", 3)
    assert "also in disk" in refused(host)
    monkeypatch.setattr(sys.modules[__name__], "SLOTS", 4)
    assert new_run(host) == 3
    assert held(host) == [3]


def test_a_run_that_may_go_on_keeps_all_of_it(host: Host, tmp_path: Path):
    trainer, _ = old_run(host, tmp_path)
    host.clock.now_s += 10 * ENDED_AFTER_S
    assert "old" not in refused(host), "it has a process"
    ends(host, trainer, ENDED_AFTER_S / 2)
    message = refused(host)  # it may be restarting
    assert "held by runs without a process here: old" in message
    assert "(newest step 3, in no tier below memory)" in message
    assert "`tieredckpt agent purge --namespace old`" in message
    host.clock.now_s += ENDED_AFTER_S
    host.restart()  # how long it has been gone is not known any more
    wait_until(lambda: host.node._registry.namespace("old").workers["disk"].catalog is not None)
    refused(host)


def test_a_run_of_several_hosts_keeps_all_of_it(host: Host, tmp_path: Path):
    """This host was perhaps only cut off, and the others go on."""
    trainer, _ = old_run(host, tmp_path)
    entry = m.HostEntry(host_id="host-b", incarnation="1" * 32, addresses=("127.0.0.1:1",))
    host.node._registry.namespace("old").peers.learn([entry])
    ends(host, trainer)
    assert "other hosts may go on with it" in refused(host)


def test_what_the_disk_has_lost_meanwhile_stays(host: Host, tmp_path: Path):
    trainer, made = old_run(host, tmp_path)
    ends(host, trainer)
    for each in made[:2]:
        (tmp_path / "disk" / "old" / "segments" / each.segments[0].id).unlink()
    refused(host)


def test_a_pinned_one_stays(host: Host, tmp_path: Path):
    trainer, made = old_run(host, tmp_path)
    for each in made[:2]:
        host.node.add_record(
            "old", m.AddRecord(stream="default", save_id=each.save_id, kind="pin", text="good")
        )
    ends(host, trainer)
    refused(host)


def test_one_that_is_being_read_stays(host: Host, tmp_path: Path):
    trainer, made = old_run(host, tmp_path)
    readers = [trainer.read(each.segments[0]) for each in made[:2]]
    assert all(readers)
    ends(host, trainer)
    refused(host)
