"""The product, broken on purpose: each of these must be found, or the simulation checks nothing.

``python -m tests.simulation.mutations`` says for each one which seed finds it first.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from tests.simulation.case import CaseFailed, run_case
from tests.simulation.system import simulated
from tieredckpt.agent import namespace
from tieredckpt.agent import namespaces as namespaces_module
from tieredckpt.agent.peering import attempts, memory_retention
from tieredckpt.agent.tiers import worker
from tieredckpt.agent.tiers.interface import Outcome
from tieredckpt.agent.tiers.source import VerifiedSource
from tieredckpt.errors import IntegrityError
from tieredckpt.format.manifest import encode_attempt
from tieredckpt.policy import history as history_module
from tieredckpt.policy import retention
from tieredckpt.recovery import copies
from tieredckpt.storage import catalog, file_io, folder
from tieredckpt.storage.backends import file
from tieredckpt.storage.base import segment_key
from tieredckpt.storage.memory import slot, slot_file
from tieredckpt.storage.stored import Swept

SEEDS_MAX = 5000


def _nothing(*args: object, **kwargs: object) -> None:
    pass


def _name_before_sync(self: Any, key: str, source: Any) -> bool:
    buffers: list[memoryview] = []
    with self.unpublished() as (fd, path):
        output = file_io.Output(fd, direct=False)
        linked = self.link(path, self.path(key))
        file_io.write_from(source, output, buffers)
        self.sync(fd)
        return bool(linked)


def _put_in_place(self: Any, key: str, data: bytes) -> None:
    final = self.path(key)
    self._make_folder(final.parent)
    fd = folder.os.open(final, os.O_WRONLY | os.O_CREAT)
    try:
        left = memoryview(data)
        while left:
            left = left[folder.os.write(fd, left) :]
        self.sync(fd)
    finally:
        folder.os.close(fd)
    self.publish(key)


def _segments_first(self: Any, manifest: Any, *, keep: Any = ()) -> Swept:
    with self._changing:
        segments = self._needed(m for m in self.manifests() if m is not manifest)[0]
        names = [ref.id for ref in manifest.segments if ref.id not in segments]
        for name in names:
            self.tier.delete(segment_key(name))
        self._delete_manifest(manifest.stream, manifest.save_id)
        return self._delete([], [])


def _manifest_first(self: Any, tier_catalog: Any, job: Any) -> Outcome:
    for record in self._host.known_attempts():
        tier_catalog.put_attempt(encode_attempt(record))
    tier_catalog.commit(self._host.read_manifest(job))
    for ref in job.segments:
        with self._host.open_memory(ref.id) as opened:
            source = VerifiedSource(opened, ref, lambda: False)
            tier_catalog.tier.put_from(segment_key(ref.id), source)
    tier_catalog.put_plan(job.plan, self._host.read_plan(job.plan))
    return Outcome("done")


def _believes(
    copy: Any, task: Any, expected: bytes, scratch: Any, land: Any = copies.Copy.land
) -> bytes:
    land(copy, task, expected, scratch)
    return expected


def _newest_by_number(history: Any, manifests: Any) -> tuple[Any, ...]:
    of = {m.save_id: m for m in manifests if m.stream == history.stream}.values()
    return tuple(sorted(of, key=lambda m: (m.attempt.number, m.seq), reverse=True))


def _adopt_blindly(path: Path) -> tuple[int, Any, str | None]:
    capacity = 0
    try:
        with slot_file.opened(path, os.O_RDONLY) as fd:
            capacity = slot.slot_capacity_of(fd)
            return capacity, slot.read_label(fd, capacity), None
    except (IntegrityError, OSError) as error:
        return capacity, None, str(error)


def _lock_kept(self: Any) -> None:
    """FileTier.close as it was of no use to a tier that failed to open."""


def _sweep_all(self: Any, *, keep: Any = (), keep_segments: Any = ()) -> Swept:
    with self._changing:
        segments, plans = self._needed(())
        return self._delete(
            [name for name, _ in self._named("segments/") if name not in segments],
            [name for name, _ in self._named("plans/") if name not in plans],
        )


def _take_unlocked(path: Path, capacity: int, label: Any) -> int | None:
    fd = slot_file.open_file(path, os.O_RDWR)
    slot.write_label(fd, capacity, label)
    return fd


def _one_less(candidates: Any, abandoned: Any, keep: Any, times: Any) -> Any:
    yield "kept", candidates[: max(1, keep.last - 1)]


def _plan_is_there(self: Any, plan_id: str) -> bool:
    self._plans |= {plan_id}
    return True


MUTATIONS: dict[str, list[tuple[object, str, object]]] = {
    "a folder is never synced": [(folder.ObjectFolder, "_sync_folder", _nothing)],
    "a file is named without being synced": [(folder.ObjectFolder, "sync", _nothing)],
    "a segment is named before it is written and synced": [
        (file.FileTier, "_write", _name_before_sync)
    ],
    "small objects are written in place": [(folder.ObjectFolder, "put", _put_in_place)],
    "the folder is not synced after a name (publish)": [(folder.ObjectFolder, "publish", _nothing)],
    "segments are deleted before their manifest": [(catalog.Catalog, "remove", _segments_first)],
    "the manifest is spilled before the segments": [
        (worker.TierWorker, "_copy", _manifest_first),
        (catalog.Catalog, "_check_complete", _nothing),
    ],
    "blocks are not compared with their digests": [(copies.Copy, "land", _believes)],
    "commits of an older attempt are accepted": [(attempts.Attempts, "check", _nothing)],
    "a commit does not look whether its segments are sealed": [
        (namespace.Namespace, "_check_sealed", _nothing),
        (catalog.Catalog, "_check_complete", _nothing),
    ],
    "a commit does not look whether the plan is there": [
        (catalog.Catalog, "has_plan", _plan_is_there),
        (catalog.Catalog, "_check_complete", _nothing),
    ],
    "retention forgets that a spill needs its source": [
        (memory_retention.MemoryRetention, "_protected", lambda self, *args, **options: {})
    ],
    "retention leaves one checkpoint less": [(retention, "_rules", _one_less)],
    "abandoned checkpoints are candidates": [(history_module, "on_line", _newest_by_number)],
    "a sweep ignores unreadable manifests and what is on its way": [
        (catalog.Catalog, "sweep_orphans", _sweep_all)
    ],
    "a slot is taken though somebody has it locked": [
        (slot_file, "lock_and_label", _take_unlocked)
    ],
    "a slot that cannot be opened is taken for empty": [(slot_file, "adopt", _adopt_blindly)],
    "slots without a label are removed": [
        (namespaces_module, "take_up_lost", lambda pool, namespaces, *, complete: frozenset())
    ],
    "names found at the start are taken for durable": [
        (folder.ObjectFolder, "sync_names", _nothing)
    ],
    "a tier that failed to open keeps its lock": [(file.FileTier, "close", _lock_kept)],
}
"""By what is wrong: (object, attribute, replacement)."""

NOT_VISIBLE = {
    "a slot is taken though somebody has it locked":
        "what is being spilled is never freed, so no case has a locked slot that is free",
    "a commit does not look whether its segments are sealed":
        "the trainer commits only what the agent has said to be sealed",
}  # fmt: skip
"""Not found, and why: another rule of the product keeps these from doing harm."""


@contextlib.contextmanager
def mutated(name: str) -> Iterator[None]:
    """The product has this fault in here."""
    with contextlib.ExitStack() as stack:
        for place, attribute, value in MUTATIONS[name]:
            old = getattr(place, attribute)
            setattr(place, attribute, value)
            stack.callback(setattr, place, attribute, old)
        yield


def first_found(name: str, seeds: Iterable[int]) -> tuple[int, str] | None:
    """The first of these seeds with which a case fails, and how it fails."""
    with simulated(), mutated(name):
        for seed in seeds:
            try:
                run_case(seed)
            except CaseFailed as failure:
                return seed, str(failure).partition("): ")[2].partition("\n")[0]
    return None


def main() -> None:
    tell: Callable[[str], object] = sys.stdout.write
    for name in MUTATIONS:
        if len(sys.argv) > 1 and sys.argv[1] not in name:
            continue
        began_s = time.monotonic()
        found = first_found(name, range(int(os.environ.get("SEEDS", SEEDS_MAX))))
        seed, how = found or ("NOT FOUND", "")
        tell(f"{name}: {seed} ({time.monotonic() - began_s:.0f} s) {how[:150]}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
