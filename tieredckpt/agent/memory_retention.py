"""What the memory tier keeps: retention, what spills protect, and making room after a restart.

Every call expects the node's lock to be held.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import msgspec

from tieredckpt.agent.spill import TierWorker
from tieredckpt.format.manifest import Manifest
from tieredckpt.policy.retention import Keep, retain
from tieredckpt.policy.timeline import abandoned, candidates
from tieredckpt.tiers.catalog import Catalog
from tieredckpt.tiers.quarantine import QuarantineMarks

MEMORY = "memory"
_COMING = "f" * 32
"""Stands for the save that is about to be committed."""

log = logging.getLogger(__name__)


class MemoryRetention:
    """See the module.

    Args:
        namespace: Its name.
        catalog: Of the memory tier.
        marks: Quarantine marks, forgotten with what they mark.
        workers: The tiers at this moment.
        keep_last: ``memory.keep.last`` at this moment; None while no spec is known.
    """

    def __init__(
        self,
        namespace: str,
        catalog: Catalog,
        marks: QuarantineMarks,
        workers: Callable[[], tuple[TierWorker, ...]],
        keep_last: Callable[[], int | None],
    ) -> None:
        self._namespace = namespace
        self._catalog = catalog
        self._marks = marks
        self._workers = workers
        self._keep_last = keep_last

    def _protected(self, stream: str) -> frozenset[str]:
        """What retention must leave for the spills' sake.

        A transfer that has started always keeps its source; one that waits only as long as the
        ring has room for it beside ``keep_last``, one in flight and the active sources.
        """
        active = {a for w in self._workers() if (a := w.active_save()) is not None}
        waiting = {s for w in self._workers() for s in w.waiting_saves()} - active
        room = len(self._workers()) - len(active)
        line = candidates(self._catalog.manifests(), self._catalog.attempts(), stream)
        keep_last = self._keep_last()
        keep = keep_last if keep_last is not None else len(line)
        extra = [each.save_id for each in line[keep:] if each.save_id in waiting]
        return frozenset(active | set(extra[: max(0, room)]))

    def apply(self, stream: str) -> None:
        """Delete what memory need not keep of ``stream``."""
        keep_last = self._keep_last()
        if keep_last is None:
            return
        manifests, attempts = self._catalog.manifests(), self._catalog.attempts()
        plan = retain(
            candidates(manifests, attempts, stream),
            abandoned(manifests, attempts, stream),
            Keep(last=keep_last),
            self._protected(stream),
        )
        by_id = {manifest.save_id: manifest for manifest in manifests}
        for save_id in plan.delete:
            self._delete(by_id[save_id])

    def predict_free(self, owned: Sequence[str]) -> str | None:
        """Which of the segments ``owned`` the next commit will free, as far as can be known."""
        keep_last = self._keep_last()
        if keep_last is None:
            return None
        manifests, attempts = self._catalog.manifests(), self._catalog.attempts()
        for stream in sorted({manifest.stream for manifest in manifests}):
            line = candidates(manifests, attempts, stream)
            if not line:
                continue
            coming = msgspec.structs.replace(line[0], save_id=_COMING)
            going = retain(
                (coming, *line),
                abandoned(manifests, attempts, stream),
                Keep(last=keep_last),
                self._protected(stream),
            ).delete
            by_id = {manifest.save_id: manifest for manifest in manifests}
            for save_id in going:
                mine = {ref.id for ref in by_id[save_id].segments}
                found = next((each for each in owned if each in mine), None)
                if found is not None:
                    return found
        return None

    def evict_leftover(self, is_spare: Callable[[str], bool]) -> bool:
        """Delete the least useful checkpoint of an earlier run, so that this one gets its room.

        That is an abandoned one before any candidate, and the oldest first of each.
        Only what lies wholly in spare slots, is not being spilled and is not the newest candidate
        of its stream. False: there is none.
        """
        manifests, attempts = self._catalog.manifests(), self._catalog.attempts()
        active = {w.active_save() for w in self._workers()}
        for stream in sorted({manifest.stream for manifest in manifests}):
            line = candidates(manifests, attempts, stream)
            off = abandoned(manifests, attempts, stream)[len(line) == 0 :]
            for manifest in (*reversed(off), *reversed(line[1:])):
                spare = all(is_spare(ref.id) for ref in manifest.segments)
                if spare and manifest.save_id not in active:
                    self._delete(manifest)
                    log.info(
                        "namespace %s: step %d of an earlier run made room",
                        self._namespace,
                        manifest.step,
                    )
                    return True
        return False

    def _delete(self, manifest: Manifest) -> None:
        for worker in self._workers():
            worker.drop(manifest.save_id)
        self._catalog.remove(manifest)
        for ref in manifest.segments:
            self._marks.forget(MEMORY, ref.id)
