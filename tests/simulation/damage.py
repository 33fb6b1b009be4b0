"""Damage from outside to one stored object, and what it takes away from the oracle's guarantees."""

from __future__ import annotations

from random import Random

from tests.simulation.filesystem import FileSystem, Inode
from tests.simulation.oracle import MEMORY, SLOTS, Oracle

KINDS = ("flip", "truncate", "empty", "delete", "older")


def strike(fs: FileSystem, oracle: Oracle, rng: Random, harmed: set[str]) -> str:
    """Damage one object, chosen by kind of object first; says what was done."""
    groups: dict[str, list[tuple[str, str, Inode]]] = {}
    for tier, root in oracle.roots():
        for name, inode in sorted(fs.files(root).items()):
            kind = name.partition("/")[0]
            if kind != "tmp":
                groups.setdefault(f"{tier} {kind}", []).append((tier, f"{root}/{name}", inode))
    for name, inode in sorted(fs.files(SLOTS).items()):
        groups.setdefault("slots", []).append((MEMORY, f"{SLOTS}/{name}", inode))
    if not groups:
        return "nothing to damage"
    group = rng.choice(sorted(groups))
    tier, path, inode = rng.choice(groups[group])
    kind = rng.choice(KINDS)
    before = bytes(inode.data)
    others = [each for _, where, each in groups[group] if where != path]
    if kind == "older" and not others:
        kind = "flip"
    harmed.add(path)
    if kind == "delete":
        _tell(oracle, tier, path, group, before, b"")
        folder, _, name = path.rpartition("/")
        fs.forget(fs.find(folder), name)
        return f"delete {path}"
    _change(inode, kind, rng, others)
    inode.synced, inode.dirty = bytes(inode.data), False
    _tell(oracle, tier, path, group, before, inode.synced)
    return f"{kind} {path}"


def _change(inode: Inode, kind: str, rng: Random, others: list[Inode]) -> None:
    size = len(inode.data)
    if kind == "flip" and size:
        # Slots end in a label, which is worth as many strikes as all the rest.
        at = rng.randrange(size) if rng.random() < 0.7 else size - 1 - rng.randrange(min(size, 200))
        inode.data[at] ^= 1 << rng.randrange(8)
    elif kind == "truncate":
        inode.data[rng.randrange(size + 1) :] = b""
    elif kind == "empty":
        inode.data.clear()
    elif kind == "older":
        inode.data[:] = rng.choice(others).data


def _tell(oracle: Oracle, tier: str, path: str, group: str, before: bytes, after: bytes) -> None:
    name = path.rpartition("/")[2]
    for save in oracle.saves.values():
        if group == "slots":
            for segment_id, image in save.segments:
                if before[: len(image)] != image:
                    continue
                if len(after) == len(before) and after[: len(image)] == image:
                    oracle.label_harmed(segment_id)
                else:
                    oracle.harmed(MEMORY, save.save_id)
        elif name == save.save_id or any(name == each for each, _ in save.segments):
            oracle.harmed(tier, save.save_id)
    if group.endswith("attempts"):
        oracle.harmed(tier, None)
