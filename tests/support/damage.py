"""Copies of a finished run that are damaged on purpose, and what must still be restorable then.

The prediction is made of file positions and the promises of ``docs/`` alone: a checkpoint *must*
load if some tier has its manifest and each block of each segment is whole in some tier with a
manifest. Where the promise leaves it open whether a copy counts, the prediction takes it for lost.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.faults import Site
from tieredckpt.format.manifest import decode_manifest
from tieredckpt.format.segment import TRAILER_BYTES, decode_trailer
from tieredckpt.storage.memory.slot import LABEL_BYTES, read_label

KINDS = ("flip", "burst", "zeros", "truncate", "empty", "delete", "swap")
RECORDS = ("manifest", "plan", "attempt")


@dataclass(frozen=True)
class Copy:
    """One segment in one tier.

    Attributes:
        path: Relative to the run's folder.
        room: Size of the file; of a slot with its label.
    """

    tier: str
    step: int
    ordinal: int
    path: str
    size: int
    room: int
    block_bytes: int
    data_bytes: int

    @property
    def blocks(self) -> range:
        return range(-(-self.data_bytes // self.block_bytes))

    def span(self, block: int) -> tuple[int, int]:
        start = block * self.block_bytes
        return start, min(start + self.block_bytes, self.data_bytes)


@dataclass(frozen=True)
class Record:
    """A manifest, plan or attempt record in one tier; plans and attempts belong to many steps."""

    kind: str
    tier: str
    path: str
    step: int = -1


@dataclass
class Inventory:
    """What a run's folder holds: ``shm`` (runtime folder) and ``disk``."""

    folder: Path
    copies: list[Copy]
    records: list[Record]
    line: list[int]
    """Steps on the time line, newest first."""
    save_ids: dict[int, str]

    def clone(self, runtime_dir: Path, disk: Path) -> None:
        """The same in other folders, without sockets and locks."""
        names = shutil.ignore_patterns("*.sock", "*.lock", "agent.log*", "sessions")
        shutil.copytree(self.folder / "shm", runtime_dir, dirs_exist_ok=True, ignore=names)
        runtime_dir.chmod(0o700)
        shutil.copytree(self.folder / "disk", disk, dirs_exist_ok=True)


def take_inventory(folder: Path, line: list[int]) -> Inventory:
    """Read what a run has left below ``folder``/shm and ``folder``/disk, while nothing runs."""
    copies, records, save_ids = [], [], {}
    slots = {}
    for path in (folder / "shm" / "slots").iterdir():
        with path.open("rb") as file:
            label = read_label(file.fileno(), path.stat().st_size - LABEL_BYTES)
        if label.state == "sealed":
            slots[label.segment_id] = path
    for tier, root in (("memory", folder / "shm/ns/run"), ("disk", folder / "disk/run")):
        for path in sorted((root / "manifests").rglob("*")):
            if path.is_dir():
                continue
            manifest = decode_manifest(path.read_bytes())
            if manifest.step not in line:
                continue
            save_ids[manifest.step] = manifest.save_id
            name = str(path.relative_to(folder))
            records.append(Record("manifest", tier, name, manifest.step))
            for ordinal, ref in enumerate(manifest.segments):
                file_path = slots[ref.id] if tier == "memory" else root / "segments" / ref.id
                data = file_path.read_bytes()
                trailer = decode_trailer(data[ref.size - TRAILER_BYTES : ref.size])
                copies.append(
                    Copy(
                        tier, manifest.step, ordinal, str(file_path.relative_to(folder)),
                        ref.size, len(data), trailer.block_bytes, trailer.data_bytes,
                    )
                )  # fmt: skip
        for kind in ("plan", "attempt"):
            names = sorted(str(p.relative_to(folder)) for p in (root / f"{kind}s").iterdir())
            records += [Record(kind, tier, name) for name in names]
    return Inventory(folder, copies, records, line, save_ids)


@dataclass
class Damage:
    """Damage done to a clone of an inventory, and the blocks and records that it leaves whole."""

    inventory: Inventory
    places: dict[str, Path]
    log: list[str] = field(default_factory=list)
    bad: set[tuple[str, int, int, int]] = field(default_factory=set)
    """(tier, step, ordinal, block); block -1: the footer."""
    gone: set[str] = field(default_factory=set)
    """Paths of records that are damaged."""

    def __str__(self) -> str:
        return "; ".join(self.log)

    def path(self, relative: str) -> Path:
        place, _, rest = relative.partition("/")
        return self.places[place] / rest

    def segment(self, copy: Copy, kind: str, at: int, *, length: int = 1, other: str = "") -> None:
        """Damage a segment's file at byte ``at``, and note what it costs."""
        self.log.append(f"{kind} {copy.tier} segment {copy.ordinal} of step {copy.step} at {at}")
        _break(self.path(copy.path), kind, at, length, other and self.path(other))
        key = (copy.tier, copy.step, copy.ordinal)
        if kind in ("flip", "burst", "zeros"):
            # The last byte that changes lies before the file's end.
            for block in copy.blocks:
                start, stop = copy.span(block)
                if at < stop and at + length > start:
                    self.bad.add((*key, block))
            if at + length > copy.data_bytes and at < copy.size:
                self._lose_footer(copy)
            if copy.tier == "memory" and at + length > copy.room - LABEL_BYTES:
                self._lose(copy)
        elif kind == "truncate" and copy.tier == "disk":
            self._lose_footer(copy)
            self.bad |= {(*key, block) for block in copy.blocks if copy.span(block)[1] > at}
        else:
            self._lose(copy)

    def _lose_footer(self, copy: Copy) -> None:
        if copy.tier == "memory":
            self._lose(copy)  # the next agent need not adopt such a slot
        else:
            self.bad.add((copy.tier, copy.step, copy.ordinal, -1))

    def _lose(self, copy: Copy) -> None:
        self.bad |= {(copy.tier, copy.step, copy.ordinal, block) for block in (-1, *copy.blocks)}

    def record(self, record: Record, kind: str, at: int, *, other: str = "") -> None:
        """Damage a small record."""
        self.log.append(f"{kind} {record.tier} {record.kind} {record.step} at {at}")
        _break(self.path(record.path), kind, at, 1, other and self.path(other))
        self.gone.add(record.path)

    def must_load(self, step: int, lost: Collection[str] = ()) -> bool:
        """Whether the promises leave no way out; ``lost``: records that retention may delete."""
        gone = self.gone | set(lost)
        tiers = {
            record.tier
            for record in self.inventory.records
            if record.kind == "manifest" and record.step == step and record.path not in gone
        }
        copies = [c for c in self.inventory.copies if c.step == step and c.tier in tiers]
        if not copies:
            return False
        for ordinal in {c.ordinal for c in self.inventory.copies if c.step == step}:
            mine = [c for c in copies if c.ordinal == ordinal]
            for block in (-1, *mine[0].blocks) if mine else (-1,):
                if all((c.tier, step, ordinal, block) in self.bad for c in mine):
                    return False
        return True

    def newest(self) -> int | None:
        """The newest step that must load."""
        return next((step for step in self.inventory.line if self.must_load(step)), None)


def _break(path: Path, kind: str, at: int, length: int, other: Path | str) -> None:
    if kind == "delete":
        path.unlink()
        return
    if kind == "swap":
        assert isinstance(other, Path)
        path.write_bytes(other.read_bytes())
        return
    if kind in ("truncate", "empty"):
        os.truncate(path, at if kind == "truncate" else 0)
        return
    with path.open("r+b") as file:
        file.seek(at)
        data = file.read(length)
        assert data
        new = bytes(byte ^ (1 << (at + i) % 8) for i, byte in enumerate(data))
        if kind == "zeros":
            # What a lost write leaves; where there were zeros already nothing would be damaged.
            new = bytes(len(data)) if any(data) else b"\xff" * len(data)
        file.seek(at)
        file.write(new)


def at_random(damage: Damage, chance: random.Random, *, records: bool = True) -> None:
    """One seeded damage; files that an earlier one has deleted are left alone."""
    inventory = damage.inventory
    kind = chance.choice(KINDS)
    if records and chance.random() < 0.35:
        choice = [
            r for r in inventory.records
            if damage.path(r.path).exists() and (r.kind != "attempt" or kind != "delete")
        ]  # fmt: skip
        record = chance.choice(choice)
        size = damage.path(record.path).stat().st_size
        others = [r.path for r in inventory.records if r.kind == record.kind and r != record]
        others = [path for path in others if damage.path(path).exists()]
        if size == 0 or (kind == "swap" and not others):
            return
        plain = {"burst": "flip", "zeros": "flip"}.get(kind, kind)
        damage.record(record, plain, chance.randrange(size), other=chance.choice(others or [""]))
        return
    copy = chance.choice([c for c in inventory.copies if damage.path(c.path).exists()])
    if damage.path(copy.path).stat().st_size != copy.room:
        return
    places = {
        "data": (0, copy.data_bytes),
        "footer": (copy.data_bytes, copy.size),
        "trailer": (copy.size - TRAILER_BYTES, copy.size),
        "end": (copy.size - 1, copy.room),
    }
    start, stop = places[chance.choice(("data", "data", "data", "footer", "trailer", "end"))]
    at = chance.randrange(start, stop)
    length = {"flip": 1, "burst": chance.randrange(2, 64), "zeros": 4096}.get(kind, 1)
    length = min(length, copy.room - at)
    others = [
        c.path for c in inventory.copies
        if c != copy and c.tier == copy.tier and damage.path(c.path).exists()
    ]  # fmt: skip
    if kind == "swap" and not others:
        return
    damage.segment(copy, kind, at, length=length, other=chance.choice(others or [""]))


def clone(inventory: Inventory, site: Site) -> Damage:
    """A copy of the run for a site, to be damaged."""
    assert site.disk is not None
    inventory.clone(site.runtime_dir, site.disk)
    return Damage(inventory, {"shm": site.runtime_dir, "disk": site.disk})
