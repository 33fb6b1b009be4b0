"""What must be restored: a dictionary of everything that was saved, held against what lies there.

The oracle remembers each save's bytes and what it went on from, and looks into the simulated files
itself. It knows the product's rule of the time line (docs/understand/timeline.md) but none of its
code: only the places of files, and the label that says which segment a slot holds.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass, field

from tests.simulation.filesystem import FileSystem, Inode
from tests.simulation.system import BLOCK
from tieredckpt.errors import IntegrityError
from tieredckpt.format.manifest import decode_attempt
from tieredckpt.format.plan_record import encoded_plan_id
from tieredckpt.storage.memory.slot import LABEL_BYTES, Label, decode_label

MEMORY = "memory"
MEMORY_ROOT = "/sim/shm/run/ns/run"
SLOTS = "/sim/shm/run/slots"
SLOT_SIZES: set[int] = set()
"""Sizes that whole slots have; whoever makes segments adds them."""


@dataclass(frozen=True, slots=True)
class Save:
    """One save, as its trainer made it."""

    save_id: str
    stream: str
    step: int
    number: int
    attempt: str
    tiers: tuple[str, ...]
    manifest: bytes
    plan: str
    segments: tuple[tuple[str, bytes], ...]
    data_bytes: int
    """Of each segment; the footer follows."""


@dataclass(slots=True)
class Attempt:
    """One start of training: by stream, what it went on from and what it saved."""

    key: str
    before: str
    """The attempt that it goes on from."""
    bases: dict[str, str | None]
    own: dict[str, list[str]] = field(default_factory=dict)


@dataclass(slots=True)
class Copies:
    """The segments that lie in one place, by segment id."""

    root: str
    segments: dict[str, bytes]
    damaged_labels: list[bytes] = field(default_factory=list)


_record = functools.lru_cache(4096)(decode_attempt)


class Oracle:
    """See the module."""

    def __init__(self, fs: FileSystem, keep_last: dict[str, int]) -> None:
        self._fs = fs
        self.keep_last = keep_last
        self.tiers = tuple(tier for tier in keep_last if tier != MEMORY)
        self.saves: dict[str, Save] = {}
        self.attempts: dict[str, Attempt] = {}
        self.kept: dict[tuple[str, str], list[str]] = {}
        """By tier and stream, what retention has to leave there and nothing has harmed."""
        self._harmed: set[tuple[str, str]] = set()
        self._numbers = 0
        self._unlabelled: set[str] = set()
        """Segments in slots whose label was damaged, and nothing else."""

    # --- what trainers tell -----------------------------------------------------------------------

    def next_number(self) -> int:
        self._numbers += 1
        return self._numbers

    def opened(self, attempt_id: str, asked: dict[str, str | None], data: bytes) -> None:
        """A trainer was given this record. Nothing comes of it before a save."""
        record = _record(data)
        bases = {base.stream: base.parent for base in record.bases}
        for stream, save_id in asked.items():
            assert bases.get(stream) == save_id, "an attempt with another base"
        before = record.followed[0].id if record.followed else ""
        key = f"{record.number:08}-{attempt_id}"
        self.attempts[attempt_id] = Attempt(key, before, bases)

    def committing(self, save: Save) -> None:
        self.saves[save.save_id] = save
        attempt = self.attempts[save.attempt]
        attempt.own.setdefault(save.stream, []).append(save.save_id)

    def refused(self, save: Save) -> None:
        """The agent refused the commit, so there is no such save."""
        self.attempts[save.attempt].own[save.stream].remove(save.save_id)
        del self.saves[save.save_id]

    def holds(self, tier: str, save: Save) -> None:
        """The agent said that ``save`` is in ``tier``."""
        line = self.line(save.stream)
        kept = [each for each in self.kept.get((tier, save.stream), []) if each in line]
        if save.save_id not in kept and save.save_id in line:
            kept.append(save.save_id)
        kept.sort(key=line.index)
        self.kept[tier, save.stream] = kept[-self.keep_last[tier] :]

    def waiting(self, tier: str) -> Iterator[Save]:
        """Saves that are destined for ``tier``, and not known to be kept there."""
        for save in list(self.saves.values()):
            if tier in save.tiers and save.save_id not in self.kept.get((tier, save.stream), []):
                yield save

    def crowded(self) -> None:
        """Memory had no room: of an earlier run only the newest checkpoint is certain to stay."""
        self.keep_last[MEMORY] = 1
        for (tier, _), kept in self.kept.items():
            if tier == MEMORY:
                del kept[:-1]

    def filled(self, tier: str) -> None:
        """A disk is full: what a newer checkpoint replaces may go before that one is there."""
        self.keep_last[tier] = max(1, self.keep_last[tier] - 1)
        for (where, _), kept in self.kept.items():
            if where == tier:
                del kept[: -self.keep_last[tier]]

    def label_harmed(self, segment_id: str) -> None:
        self._unlabelled.add(segment_id)

    def harmed(self, tier: str, save_id: str | None) -> None:
        """A copy was damaged from outside; None: anything may be."""
        if save_id is not None:
            self._harmed.add((tier, save_id))
            return  # it goes on counting: whoever decides what to delete need not know
        for kept in self.kept.values():
            kept.clear()

    def power_gone(self) -> None:
        """Memory is empty."""
        for (where, _), kept in self.kept.items():
            if where == MEMORY:
                kept.clear()

    # --- the time line ----------------------------------------------------------------------------

    def roots(self) -> list[tuple[str, str]]:
        return [(MEMORY, MEMORY_ROOT), *((name, f"/sim/{name}/run") for name in self.tiers)]

    def _intact_record(self, attempt: Attempt) -> bool:
        for _, root in self.roots():
            inode = self._fs.files(f"{root}/attempts").get(attempt.key)
            if inode is not None:
                try:
                    _record(bytes(inode.data))
                except IntegrityError:
                    continue
                return True
        return False

    def line(self, stream: str) -> list[str]:
        """Save ids on the time line, oldest first, as far as records and manifests tell."""
        found = self._intact_manifests()
        at = self._newest(found)
        while at:
            attempt = self._attempt(at)
            if attempt is None:
                break
            saved = any(each in found for each in attempt.own.get(stream, []))
            if saved or (stream in attempt.bases and self._intact_record(attempt)):
                return self._line_of(at, stream)
            at = attempt.before
        return []

    def _attempt(self, identity: str) -> Attempt | None:
        """Also one whose trainer died before it had the answer; None: then nobody knows it."""
        known = self.attempts.get(identity)
        for _, root in self.roots() if known is None else ():
            for key, inode in self._fs.files(f"{root}/attempts").items():
                if key.endswith(identity):
                    with contextlib.suppress(IntegrityError):
                        record = _record(bytes(inode.data))
                        bases = {base.stream: base.parent for base in record.bases}
                        return Attempt(key, record.followed[0].id if record.followed else "", bases)
        return known

    def _newest(self, found: set[str]) -> str:
        """Of the attempts that have saved what exists, the one that was opened last; or ""."""
        saved = self.attempts.items()
        ids = [i for i, a in saved if any(map(found.intersection, a.own.values()))]
        return ids[-1] if ids else ""

    def _line_of(self, identity: str, stream: str) -> list[str]:
        attempt = self.attempts[identity]
        own = attempt.own.get(stream, [])
        base = attempt.bases.get(stream)
        if base is None:
            return list(own)
        before = self._line_of(self.saves[base].attempt, stream)
        return [*before[: before.index(base) + 1], *own]

    def newest_attempt(self) -> str:
        """Id of the newest attempt that has saved what exists anywhere; "" if there is none."""
        return self._newest(self._intact_manifests())

    # --- what lies there --------------------------------------------------------------------------

    def _intact_manifests(self) -> set[str]:
        return {
            save.save_id
            for save in self.saves.values()
            if any(self._has_manifest(root, save) for _, root in self.roots())
        }

    def _has_manifest(self, root: str, save: Save) -> bool:
        try:
            inode = self._fs.find(f"{root}/manifests/{save.stream}/{save.save_id}")
        except OSError:
            return False
        return not inode.folder and bytes(inode.data) == save.manifest

    def slots(self) -> dict[str, tuple[Label | None, bytearray]]:
        """Label, if it can be read, and all bytes of each slot."""
        found: dict[str, tuple[Label | None, bytearray]] = {}
        for name, inode in self._fs.files(SLOTS).items():
            label, capacity = None, len(inode.data) - LABEL_BYTES
            if capacity > 0:
                try:
                    label = decode_label(bytes(inode.data[capacity:]), capacity)
                except IntegrityError:
                    pass
            found[name] = (label, inode.data)
        return found

    def _images(
        self, tier: str, root: str, save: Save, segment_id: str, *, strict: bool
    ) -> list[bytes]:
        """What lies where this segment should; with ``strict`` only what says that it is it.

        A slot whose label is lost is found by its trailer, if memory has the manifest.
        """
        if tier != MEMORY:
            try:
                return [bytes(self._fs.find(f"{root}/segments/{segment_id}").data)]
            except OSError:
                return []
        return [
            bytes(data)
            for label, data in self._slots
            if not strict
            or (label is None and save.save_id in self._in_memory and len(data) in SLOT_SIZES)
            or (label is not None and label.state == "sealed" and label.segment_id == segment_id)
        ]

    def _whole(self, save: Save, *, strict: bool) -> bool:
        for segment_id, image in save.segments:
            images = [
                found
                for tier, root in self.roots()
                for found in self._images(tier, root, save, segment_id, strict=strict)
            ]
            footer = save.data_bytes
            vouching = [each for each in images if each[footer : len(image)] == image[footer:]]
            if strict:
                images = [each for each in images if len(each) >= len(image)]
            if not vouching or not all(
                any(
                    each[at : min(at + BLOCK, footer)] == image[at : min(at + BLOCK, footer)]
                    for each in images
                )
                for at in range(0, footer, BLOCK)
            ):
                return False
        return True

    def bounds(self, stream: str) -> tuple[int, int, list[str]]:
        """Positions on the line (-1: none) between which what is restored must lie, and the line.

        The lower is the newest checkpoint with a good copy of everything; the upper is what might
        be pieced together, or found without its label.
        """
        line = self.line(stream)
        self._slots = list(self.slots().values())
        self._in_memory = {
            each for each, save in self.saves.items() if self._has_manifest(MEMORY_ROOT, save)
        }
        manifests = self._intact_manifests()
        least = most = -1
        for at in reversed(range(len(line))):
            save = self.saves[line[at]]
            if save.save_id not in manifests:
                continue
            if most < 0 and self._whole(save, strict=False):
                most = at
            if self._whole(save, strict=True):
                least = at
                break
        return least, most, line

    def guaranteed(self, stream: str) -> int:
        """Position on the line of the newest checkpoint that nothing may have lost."""
        line = self.line(stream)
        kept = [
            line.index(save_id)
            for (tier, of), saves in self.kept.items()
            for save_id in saves
            if of == stream and save_id in line and (tier, save_id) not in self._harmed
        ]
        return max(kept, default=-1)

    def check(self, harmed: set[str]) -> None:
        """What must be true of the files at any moment, whatever died.

        An object with a name is whole; a manifest in a lower tier has its segments and its plan;
        what retention must leave is there. ``harmed``: paths that were damaged from outside.
        """
        images = {name: image for save in self.saves.values() for name, image in save.segments}
        for tier, root in self.roots():
            files = self._fs.files(root)
            for name, inode in files.items():
                kind, _, key = name.partition("/")
                if f"{root}/{name}" in harmed:
                    continue
                data = bytes(inode.data)
                if kind == "manifests":
                    save = self.saves.get(key.partition("/")[2])
                    assert save is not None, f"{tier}: {name} is of a save that was refused"
                    assert save.manifest == data, f"{tier}: {name} is not whole"
                elif kind == "segments" and tier != MEMORY:
                    assert images.get(key, data) == data, f"{tier}: {name} is not whole"
                elif kind == "plans":
                    assert encoded_plan_id(data) == key, f"{tier}: {name} is not whole"
                elif kind == "attempts":
                    _record(data)
            if tier != MEMORY:
                self._check_complete(tier, root, files, harmed)
        self._check_kept()

    def _check_complete(
        self, tier: str, root: str, files: dict[str, Inode], harmed: set[str]
    ) -> None:
        for save in self.saves.values():
            if f"manifests/{save.stream}/{save.save_id}" not in files:
                continue
            wanted = [f"segments/{name}" for name, _ in save.segments] + [f"plans/{save.plan}"]
            for name in wanted:
                assert name in files or f"{root}/{name}" in harmed, (
                    f"{tier}: step {save.step} of {save.stream} dangles: no {name}"
                )

    def _check_kept(self) -> None:
        sealed = {
            label.segment_id
            for label, _ in self.slots().values()
            if label is not None and label.state == "sealed"
        }
        lines = {stream: self.line(stream) for _, stream in self.kept}
        for (tier, stream), kept in self.kept.items():
            root = dict(self.roots())[tier]
            segments = {n.partition("/")[2] for n in self._fs.files(root) if n[:9] == "segments/"}
            line = lines[stream]
            there = [s for s in line if self._has_manifest(root, self.saves[s])]
            for save_id in list(kept):
                save = self.saves[save_id]
                if save_id not in line or (tier, save_id) in self._harmed:
                    continue
                newer = sum(line.index(each) > line.index(save_id) for each in there)
                if newer >= self.keep_last[tier]:
                    kept.remove(save_id)  # for one whose trainer never heard of its success
                    continue
                whole = {name for name, _ in save.segments} <= (
                    sealed | self._unlabelled if tier == MEMORY else segments
                )
                text = f"lost: step {save.step} of {stream} has to be in {tier}"
                assert whole, f"{text}: a segment is gone"
                assert save_id in there, f"{text}: its manifest is gone"
