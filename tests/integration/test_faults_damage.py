"""Damaged slots, segment files and records: the newest intact checkpoint, or a reasoned error."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.damage import (
    Copy,
    Damage,
    Inventory,
    Record,
    at_random,
    clone,
    take_inventory,
)
from tests.support.faults import (
    Loaded,
    Site,
    new_runtime_dir,
    on_all,
    ranks,
    remove_runtime_dir,
)
from tieredckpt.errors import NoRecoverableCheckpointError, TieredCkptError

MIB = 12.0  # four blocks, the last one short
OPTIONS = {"seed": 3, "mib": MIB}
TWO = {"seed": 4, "mib": 16.0, "saved_by": 2}


def make(folder: Path, steps: Callable[[Site], list[int]]) -> Inventory:
    """Let a run happen, end it, and keep what it leaves."""
    runtime_dir = new_runtime_dir()
    site = Site(runtime_dir, folder / "disk")
    try:
        line = steps(site)
        site.kill_agent()
        (folder / "shm").symlink_to(runtime_dir)
        return take_inventory(folder, line)
    except BaseException:
        remove_runtime_dir(runtime_dir)
        raise


def _keep(inventory: Inventory) -> Iterator[Inventory]:
    try:
        yield inventory
    finally:
        remove_runtime_dir((inventory.folder / "shm").resolve())


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Inventory]:
    """Steps 1 to 5 over two attempts: 5 and 4 in memory, 5, 4 and 3 on disk."""

    def steps(site: Site) -> list[int]:
        for part in ((1, 2, 3), (4, 5)):
            with site.opened(**OPTIONS) as trainer:
                trainer.load()
                for step in part:
                    trainer.save(step)
                    trainer.wait(step, "disk")
        return [5, 4, 3]

    yield from _keep(make(tmp_path_factory.mktemp("plain"), steps))


@pytest.fixture(scope="module")
def rolled_back(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Inventory]:
    """10, 20 and 30 saved, back to 10, then 11: 20 and 30 are abandoned."""

    def steps(site: Site) -> list[int]:
        site.config["tiers"][0]["keep"]["last"] = 9
        with site.opened(**OPTIONS) as trainer:
            for step in (10, 20, 30):
                trainer.save(step)
                trainer.wait(step, "disk")
        with site.opened(**OPTIONS) as trainer:
            assert trainer.load(step=10, abandon_newer=True).step == 10
            trainer.save(11)
            trainer.wait(11, "disk")
        return [11, 10]

    yield from _keep(make(tmp_path_factory.mktemp("rolled"), steps))


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Inventory]:
    """Steps 1 to 3 of two ranks: 3 and 2 in memory, all on disk."""

    def steps(site: Site) -> list[int]:
        with ranks(2, seed=TWO["seed"], mib=TWO["mib"]) as group:
            on_all(group, lambda rank: ("open", site.config))
            for step in (1, 2, 3):
                on_all(group, lambda rank, step=step: ("save", step))
                group[0].wait(step, "disk")
        return [3, 2, 1]

    yield from _keep(make(tmp_path_factory.mktemp("sharded"), steps))


@pytest.fixture
def site(runtime_dir: Path, tmp_path: Path) -> Iterator[Site]:
    found = Site(runtime_dir, tmp_path / "disk", disk_keep=9)
    yield found
    found.kill_agent()


def check_outcome(damage: Damage, outcome: Loaded | BaseException) -> None:
    """The one law of this file. ``str(damage)`` is in every message."""
    must = damage.newest()
    line = damage.inventory.line
    what = f"{damage} -> {outcome!r}"
    if isinstance(outcome, Loaded):
        assert outcome.step is not None, f"a fresh start was offered: {what}"
        assert outcome.wrong == [], what
        assert outcome.step in line, what
        assert outcome.save_id == damage.inventory.save_ids[outcome.step], what
        if must is not None:
            assert outcome.step >= must, f"step {must} was to be had: {what}"
        skipped = {step for step in line if step > outcome.step}
        named = {step for _, step, _ in outcome.refused}
        unreadable = {
            step for step in skipped
            if all(r.path in damage.gone for r in damage.inventory.records
                   if r.kind == "manifest" and r.step == step)
        }  # fmt: skip
        assert skipped - unreadable <= named, what
        assert all(reason for _, _, reason in outcome.refused), what
        return
    assert must is None, f"step {must} was to be had: {what}"
    assert isinstance(outcome, NoRecoverableCheckpointError), what
    text = str(outcome)
    for step in line:
        readable = any(
            r.path not in damage.gone for r in damage.inventory.records
            if r.kind == "manifest" and r.step == step
        )  # fmt: skip
        if readable:
            save_id = damage.inventory.save_ids[step]
            reasons = [reason for i, _, reason in outcome.refused if i == save_id]
            assert reasons, what
            assert reasons[0], what
            assert f"step {step}" in text, what


def restart(site: Site, damage: Damage, **options: float) -> None:
    """A new agent and a new trainer on damaged ground; then the run goes on if it can."""
    with ExitStack() as stack:
        if not site.agents():
            stack.enter_context(site.forked_agent())
        trainer = stack.enter_context(site.opened(**options))
        try:
            outcome: Loaded | BaseException = trainer.load()
        except TieredCkptError as error:
            outcome = error
        check_outcome(damage, outcome)
        if isinstance(outcome, Loaded):
            # What went on from it is found by the next restart, damage or not.
            step = damage.inventory.line[0] + 1
            trainer.save(step)
            again = trainer.load()
            assert (again.step, again.wrong) == (step, []), str(damage)
            trainer.wait(step, "disk")


def copy_of(inventory: Inventory, tier: str, step: int, ordinal: int = 0) -> Copy:
    return next(c for c in inventory.copies if (c.tier, c.step, c.ordinal) == (tier, step, ordinal))


def records_of(inventory: Inventory, kind: str, tier: str, step: int | None = None) -> list[Record]:
    return [
        r for r in inventory.records
        if (r.kind, r.tier) == (kind, tier) and step in (None, r.step)
    ]  # fmt: skip


full = pytest.mark.full


def some(gate: int, depth: int, nightly: int) -> list[object]:
    """Seeds: so many for each of the three levels."""
    marks = [()] * gate + [full] * depth + [pytest.mark.nightly] * nightly
    return [pytest.param(seed, marks=mark) for seed, mark in enumerate(marks)]


def cases(gate: list[tuple[str, str]], depth: list[tuple[str, str]]) -> list[object]:
    return [*gate, *(pytest.param(*each, marks=full) for each in depth)]


# --- one damage at a time ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tier", "kind"),
    cases(
        [("memory", "flip"), ("disk", "truncate")],
        [("memory", "delete"), ("memory", "swap"), ("disk", "flip"), ("disk", "swap")],
    ),
)
def test_one_copy_of_the_newest_segment(plain: Inventory, site: Site, tier: str, kind: str):
    """The other copy serves: wholly, or for the bad block alone."""
    damage = clone(plain, site)
    copy = copy_of(plain, tier, 5)
    chance = random.Random(f"{tier} {kind}")
    at = chance.randrange(copy.block_bytes, 2 * copy.block_bytes - 4096)
    damage.segment(copy, kind, at, other=copy_of(plain, tier, 4).path)
    assert damage.newest() == 5
    with site.forked_agent(), site.opened(**OPTIONS) as trainer:
        loaded = trainer.load()
        assert (loaded.step, loaded.wrong, loaded.refused) == (5, [], ()), str(damage)
        if (tier, kind) == ("memory", "flip"):
            # One block of four from the disk, the others from memory.
            assert loaded.repaired_blocks == 1
            assert loaded.bytes_by_tier["disk"] == copy.block_bytes
            assert loaded.bytes_by_tier["memory"] > 2 * copy.block_bytes
        elif tier == "memory":
            assert set(loaded.bytes_by_tier) == {"disk"}
        else:
            assert set(loaded.bytes_by_tier) == {"memory"}


@pytest.mark.parametrize(
    ("what", "kind"),
    cases(
        [("manifest", "flip"), ("plan", "delete"), ("attempt", "empty")],
        [("manifest", "swap"), ("manifest", "delete"), ("plan", "truncate"), ("attempt", "swap")],
    ),
)
def test_records(plain: Inventory, site: Site, what: str, kind: str):
    """All plans or attempt records, or the newest checkpoint's manifests, in both tiers.

    In one tier: test_fault_matrix.py.
    """
    damage = clone(plain, site)
    for tier in ("memory", "disk"):
        chosen = records_of(plain, what, tier, 5 if what == "manifest" else None)
        all_records = records_of(plain, what, tier)
        contents = {r.path: damage.path(r.path).read_bytes() for r in all_records}
        for record in chosen:
            size = len(contents[record.path])
            at = random.Random(f"{record.tier} {kind}").randrange(size)
            other = next((r.path for r in all_records if r != record), "")
            damage.record(record, kind, at, other=other)
            if kind == "swap":
                damage.path(record.path).write_bytes(contents[other])
    # A lost plan is rebuilt from the segments, a lost attempt record is made good by manifests.
    assert damage.newest() == (4 if what == "manifest" else 5)
    restart(site, damage, **OPTIONS)


# --- both copies ---------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", some(1, 1, 18))
def test_different_blocks_in_memory_and_on_disk(plain: Inventory, site: Site, seed: int):
    chance = random.Random(seed)
    damage = clone(plain, site)
    memory, disk = copy_of(plain, "memory", 5), copy_of(plain, "disk", 5)
    blocks = list(memory.blocks)
    chance.shuffle(blocks)
    half = chance.randrange(1, len(blocks))
    for copy, mine in ((memory, blocks[:half]), (disk, blocks[half:])):
        for block in mine:
            damage.segment(copy, "flip", chance.randrange(*copy.span(block)))
    assert damage.newest() == 5
    with site.forked_agent(), site.opened(**OPTIONS) as trainer:
        loaded = trainer.load()
        assert (loaded.step, loaded.wrong, loaded.refused) == (5, [], ()), str(damage)
        assert loaded.repaired_blocks >= half
        assert set(loaded.bytes_by_tier) == {"memory", "disk"}


@pytest.mark.parametrize("seed", some(1, 0, 19))
def test_the_same_block_in_both(plain: Inventory, site: Site, seed: int):
    """No copy of that block is left: all walk back, and the report says why."""
    chance = random.Random(seed)
    damage = clone(plain, site)
    block = chance.choice(list(copy_of(plain, "memory", 5).blocks))
    for tier in ("memory", "disk"):
        copy = copy_of(plain, tier, 5)
        damage.segment(copy, "flip", chance.randrange(*copy.span(block)))
    assert damage.newest() == 4
    with site.forked_agent(), site.opened(**OPTIONS) as trainer:
        loaded = trainer.load()
        assert (loaded.step, loaded.wrong) == (4, []), str(damage)
        ((save_id, step, reason),) = loaded.refused
        assert (save_id, step) == (plain.save_ids[5], 5)
        assert f"block {block}" in reason
        assert "memory" in reason
        assert "disk" in reason
        with pytest.raises(NoRecoverableCheckpointError, match="5"):
            trainer.load(step=5)


@pytest.mark.parametrize("kind", ["flip", pytest.param("swap", marks=full)])
def test_nothing_is_left(plain: Inventory, site: Site, kind: str):
    """Every segment is damaged everywhere: an error that names all three, never a fresh start."""
    damage = clone(plain, site)
    contents = {c.path: damage.path(c.path).read_bytes() for c in plain.copies}
    for copy in plain.copies:
        other = next(
            c.path for c in plain.copies
            if c.tier == copy.tier and c.step != copy.step
        )  # fmt: skip
        if kind == "swap" and copy.tier == "memory":
            # Two whole slots exchanged are no damage: what a slot holds stands in its label.
            damage.segment(copy, "empty", 0)
        else:
            damage.segment(copy, kind, 100, other=other)
            if kind == "swap":
                damage.path(copy.path).write_bytes(contents[other])
    assert damage.newest() is None
    with site.forked_agent(), site.opened(**OPTIONS) as trainer:
        with pytest.raises(NoRecoverableCheckpointError) as caught:
            trainer.load()
        check_outcome(damage, caught.value)
        # Asked again, it says the same: the error did not make a fresh start of it.
        with pytest.raises(NoRecoverableCheckpointError):
            trainer.load()


def test_no_manifest_can_be_read(plain: Inventory, site: Site):
    """An error that names them all, never a fresh start."""
    damage = clone(plain, site)
    for record in plain.records:
        if record.kind == "manifest":
            damage.record(record, "flip", 40)
    with site.forked_agent(), site.opened(**OPTIONS) as trainer:
        with pytest.raises(NoRecoverableCheckpointError) as caught:
            trainer.load()
        refused = {save_id for save_id, _, _ in caught.value.refused}
        assert refused >= set(plain.save_ids.values())


# --- at random -----------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", some(1, 5, 394))
def test_seeded(plain: Inventory, site: Site, seed: int):
    chance = random.Random(seed)
    damage = clone(plain, site)
    for _ in range(chance.choice((1, 2, 3, 5, 8))):
        at_random(damage, chance)
    restart(site, damage, **OPTIONS)


@pytest.mark.parametrize("seed", some(0, 3, 57))
def test_seeded_after_a_roll_back(rolled_back: Inventory, site: Site, seed: int):
    """However bad the new line is, the abandoned one is no way out."""
    chance = random.Random(seed)
    damage = clone(rolled_back, site)
    for _ in range(chance.choice((2, 4, 6))):
        at_random(damage, chance, records=False)
    restart(site, damage, **OPTIONS)


@full
def test_the_new_line_is_lost_after_a_roll_back(rolled_back: Inventory, site: Site):
    damage = clone(rolled_back, site)
    for copy in rolled_back.copies:
        damage.segment(copy, "flip", 100)
    with site.forked_agent(), site.opened(**OPTIONS) as trainer:
        with pytest.raises(NoRecoverableCheckpointError) as caught:
            trainer.load()
        check_outcome(damage, caught.value)


@pytest.mark.parametrize("seed", some(0, 2, 78))
def test_seeded_of_two_ranks(sharded: Inventory, site: Site, seed: int):
    """Both ranks restore the same one, or both raise."""
    chance = random.Random(1000 + seed)
    damage = clone(sharded, site)
    for _ in range(chance.choice((3, 6, 9))):
        at_random(damage, chance)
    with site.forked_agent(), ranks(2, seed=TWO["seed"], mib=TWO["mib"]) as group:
        on_all(group, lambda rank: ("open", site.config))
        for each in group:
            each.start("load")
        outcomes: list[Loaded | BaseException] = []
        for each in group:
            try:
                outcomes.append(each.result())
            except TieredCkptError as error:
                outcomes.append(error)
        for outcome in outcomes:
            check_outcome(damage, outcome)
        assert len({type(o) for o in outcomes}) == 1
        if all(isinstance(o, Loaded) for o in outcomes):
            assert len({o.save_id for o in outcomes}) == 1  # type: ignore[union-attr]


# --- while the agent runs ------------------------------------------------------------------------


@pytest.mark.parametrize("seed", some(1, 2, 97))
def test_seeded_under_a_running_agent(plain: Inventory, site: Site, seed: int):
    """Damage that no restart of the agent could notice: found at read."""
    chance = random.Random(seed)
    damage = clone(plain, site)
    with ExitStack() as stack:
        stack.enter_context(site.forked_agent())
        looker = stack.enter_context(site.opened(**OPTIONS))
        assert [step for step, _, _ in looker.checkpoints()] == [5, 4, 3]
        looker.kill()
        for _ in range(chance.choice((1, 2, 4))):
            at_random(damage, chance)
        restart(site, damage, **OPTIONS)
