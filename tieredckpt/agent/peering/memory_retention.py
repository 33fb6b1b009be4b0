"""What the memory tier keeps: retention, what spills protect, and making room after a restart.

Every call expects the node's lock to be held.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence, Set
from typing import TYPE_CHECKING, Protocol

import msgspec

from tieredckpt.agent.tiers.worker import TierWorker
from tieredckpt.config.tiers import Keep
from tieredckpt.format.manifest import AttemptRecord, Manifest, is_capture
from tieredckpt.policy.history import abandoned, branches, candidates, left_behind
from tieredckpt.policy.retention import let_go, pin_reason, retain
from tieredckpt.storage.catalog import Catalog
from tieredckpt.storage.quarantine import QuarantineMarks

if TYPE_CHECKING:
    from tieredckpt.agent.cluster.authority import Ruling

MEMORY = "memory"
CAPTURES_KEPT = 2
"""A capture goes when so many newer checkpoints exist."""
_COMING = "f" * 32
"""Stands for the save that is about to be committed."""

log = logging.getLogger(__name__)


class Shedder(Protocol):
    """Decides which checkpoints no longer wait in memory for a slow tier."""

    def choose(self, tier: str, waiting: Sequence[Manifest]) -> str | None:
        """The save id that :meth:`ask` would shed at once; None: nothing."""

    def ask(self, tier: str, waiting: Sequence[Manifest]) -> str | None:
        """Shed one of ``waiting``, oldest first; its save id. None: nothing was shed yet."""


class MemoryRetention:
    """See the module.

    Args:
        namespace: Its name.
        catalog: Of the memory tier.
        marks: Quarantine marks, forgotten with what they mark.
        workers: The tiers at this moment.
        ruling: Whose ``memory.keep.last`` it is.
        must_stay: What replication needs of a stream.
        shedder: Of checkpoints that wait for tiers, if there is no room for them.
    """

    def __init__(
        self,
        namespace: str,
        catalog: Catalog,
        marks: QuarantineMarks,
        workers: Callable[[], tuple[TierWorker, ...]],
        ruling: Callable[[], Ruling],
        must_stay: Callable[[str], frozenset[str]],
        shedder: Callable[[], Shedder],
    ) -> None:
        self._namespace = namespace
        self._catalog = catalog
        self._marks = marks
        self._workers = workers
        self._ruling = ruling
        self._must_stay = must_stay
        self._shedder = shedder
        self.is_due = False
        """Something may be here that is too much, and was not deleted when it was its turn."""

    def _protected(
        self, stream: str, line: Sequence[Manifest], *, act: bool = False, room: int | None = None
    ) -> dict[str, str]:
        """What retention must leave for the sake of spills and of copies on other hosts, and why.

        A transfer that has started always keeps its source, and so does one that waits, until it is
        given up for all hosts: the ring has room for one per tier beside ``keep_last`` and one in
        flight. With more, the oldest are to be given up.

        Args:
            stream: Of the line.
            line: The candidates, newest first; the first one may be still to come.
            act: Give up what is too much; else find out what would be.
            room: For waiting ones beside those that are kept; None: as the ring has.
        """
        workers = [w for w in self._workers() if w.spec.source == MEMORY]
        active = {a for w in self._workers() if (a := w.active_save()) is not None}
        keep_last = self._ruling().keep_last()
        keep = keep_last if keep_last is not None else len(line)
        beyond = {each.save_id for each in line[keep:]} - active
        room = max(0, len(workers) - len(active)) if room is None else room
        waiting = self._waiting_for_tiers(line, beyond, room, act=act)
        found = dict.fromkeys(active | waiting, "it is being spilled")
        # Their part is in the tier; if there is room they stay for hosts that may not bring theirs.
        awaited = frozenset[str]().union(*(w.awaited() for w in self._workers())) - waiting
        left = max(0, room - len(waiting & beyond))
        late = [m.save_id for m in line[keep:] if m.save_id in awaited]
        found |= dict.fromkeys(late[:left], "it is being spilled")
        found |= dict.fromkeys(self._must_stay(stream), "other hosts need it")
        return found | self._pinned_here_only(stream)

    def _abandoned(
        self, manifests: Sequence[Manifest], attempts: Sequence[AttemptRecord], stream: str
    ) -> tuple[Manifest, ...]:
        return abandoned(manifests, attempts, stream, self._let_go(manifests))

    def branches(self) -> tuple[Manifest, ...]:
        """What memory holds and no rule deletes, since another side saved it."""
        manifests, attempts = self._catalog.manifests(), self._catalog.attempts()
        streams = sorted({manifest.stream for manifest in manifests})
        gone = self._let_go(manifests)
        return tuple(m for each in streams for m in branches(manifests, attempts, each, gone))

    def _let_go(self, manifests: Iterable[Manifest]) -> frozenset[str]:
        return let_go(r for m in manifests for r in self._catalog.records(m.save_id))

    def spared(self) -> dict[str, str]:
        """By save id, why a checkpoint of any stream would stay now whatever ``keep`` says."""
        manifests, attempts = self._catalog.manifests(), self._catalog.attempts()
        found: dict[str, str] = {}
        for stream in {manifest.stream for manifest in manifests}:
            found |= self._protected(stream, candidates(manifests, attempts, stream))
        return found

    def _waiting_for_tiers(
        self, line: Sequence[Manifest], beyond: Set[str], room: int, *, act: bool
    ) -> set[str]:
        """The save ids that wait in memory for a tier, after giving up what ``room`` is too small
        for.
        """
        shedder = self._shedder()
        of_line = {each.save_id for each in line}
        queues: dict[str, list[Manifest]] = {}
        unsure: set[str] = set()
        for worker in self._workers():
            queue, perhaps = worker.waiting()
            mine = [each for each in queue if each.save_id in of_line]
            queues[worker.spec.name] = [each for each in mine if each.save_id not in perhaps]
            if line[:1] and line[0].save_id == _COMING and worker.spec.name in line[0].tiers:
                queues[worker.spec.name].append(line[0])
            unsure |= {each.save_id for each in mine if each.save_id in perhaps}

        def waiting() -> set[str]:
            return {each.save_id for queue in queues.values() for each in queue}

        for tier, queue in queues.items():
            while len(waiting() & beyond) > room and queue and queue[0].save_id in beyond:
                gone = shedder.ask(tier, queue) if act else shedder.choose(tier, queue)
                if gone is None:
                    break
                queue[:] = [each for each in queue if each.save_id != gone]
        return waiting() | unsure

    def _pinned_here_only(self, stream: str) -> dict[str, str]:
        """A pin holds what a tier has. In memory it holds what no tier has yet: slots are few."""
        found = {}
        catalogs = [c for worker in self._workers() if (c := worker.catalog) is not None]
        for manifest in self._catalog.manifests():
            if manifest.stream != stream:
                continue
            why = pin_reason(self._catalog.records(manifest.save_id))
            if why is not None and not any(each.get(manifest.save_id) for each in catalogs):
                found[manifest.save_id] = f"pinned, and in no tier yet: {why}"
        return found

    def relieve(self) -> bool:
        """A save waits for a slot: what waits for tiers is to give up even the ring's room.

        Whether something went.
        """
        before = len(self._catalog.manifests())
        for stream in sorted({manifest.stream for manifest in self._catalog.manifests()}):
            self.apply(stream, room=0)
        return len(self._catalog.manifests()) < before

    def apply(self, stream: str, *, room: int | None = None) -> None:
        """Delete what memory need not keep of ``stream``; ``room``: a save waits for a slot."""
        ruling = self._ruling()
        keep_last = ruling.keep_last()
        if keep_last is None:
            return
        if room is None and not ruling.tidies():
            self.is_due = True
            return
        manifests = self._catalog.manifests()
        for manifest in self._going(stream, manifests, keep_last, act=True, room=room):
            self.delete(manifest)

    def _going(
        self,
        stream: str,
        manifests: Sequence[Manifest],
        keep_last: int,
        *,
        act: bool = False,
        room: int | None = None,
        coming: bool = False,
    ) -> list[Manifest]:
        """What of ``manifests`` memory need not keep, the least useful first.

        Captures are not counted by ``keep``; all go first if a save waits for room. ``coming``:
        once there is one more on the line. See :meth:`_protected` for the others.
        """
        attempts = self._catalog.attempts()
        line = candidates(manifests, attempts, stream)
        if coming:
            first = (msgspec.structs.replace(m, save_id=_COMING, tags={}) for m in line[:1])
            line = (*first, *line)
        captures = [m for m in line if is_capture(m.tags)]
        saved = [m for m in line if m not in captures]
        protected = self._protected(stream, saved, act=act, room=room)
        plan = retain(
            saved,
            self._abandoned(manifests, attempts, stream),
            Keep(last=keep_last),
            protected,
        )
        stays = line[:CAPTURES_KEPT] if room is None else line[: not saved]
        old = [m for m in reversed(captures) if m not in stays]
        by_id = {manifest.save_id: manifest for manifest in manifests}
        return [
            *(m for m in old if m.save_id not in protected),
            *(by_id[save_id] for save_id in plan.delete),
        ]

    def refuses(self, manifest: Manifest) -> bool:
        """Whether :meth:`apply` would delete a checkpoint at once that another host has, or will
        by the rules of who has not saved yet: that deletes nothing.
        """
        spec = self._ruling().spec
        if spec is None:
            return False
        manifests = (*self._catalog.manifests(), manifest)
        if manifest in left_behind(manifests, self._catalog.attempts(), manifest.stream):
            return True  # it stays where it is, and comes back to nobody who has let go of it
        return manifest in self._going(manifest.stream, manifests, spec.keep_last)

    def predict_free(self, owned: Sequence[str]) -> str | None:
        """Which of the segments ``owned`` the next commit will free, as far as can be known."""
        keep_last = self._ruling().keep_last()
        if keep_last is None:
            return None
        manifests = self._catalog.manifests()
        for stream in sorted({manifest.stream for manifest in manifests}):
            for manifest in self._going(stream, manifests, keep_last, coming=True):
                mine = {ref.id for ref in manifest.segments}
                found = next((each for each in owned if each in mine), None)
                if found is not None:
                    return found
        return None

    def evict_leftover(self, is_spare: Callable[[str], bool]) -> bool:
        """Delete the least useful checkpoint of an earlier run, so that this one gets its room.

        That is an abandoned one before any candidate, and the oldest first of each.
        Only what lies wholly in spare slots, no tier is to be given and is not the newest candidate
        of its stream. False: there is none.
        """
        manifests, attempts = self._catalog.manifests(), self._catalog.attempts()
        active = {w.active_save() for w in self._workers()}
        active |= {m.save_id for w in self._workers() for m in w.waiting()[0]}
        for stream in sorted({manifest.stream for manifest in manifests}):
            line = candidates(manifests, attempts, stream)
            off = self._abandoned(manifests, attempts, stream)[len(line) == 0 :]
            stay = active | self._must_stay(stream)
            for manifest in (*reversed(off), *reversed(line[1:])):
                spare = all(is_spare(ref.id) for ref in manifest.segments)
                if spare and manifest.save_id not in stay:
                    self.delete(manifest)
                    log.info(
                        "namespace %s: step %d of an earlier run is deleted to free a slot",
                        self._namespace,
                        manifest.step,
                    )
                    return True
        return False

    def drop_left_behind(self, makes_room: Callable[[str], bool]) -> bool:
        """Delete the oldest checkpoint that a run passed over in silence, for a save needs a slot.

        It holds a slot that ``makes_room`` (a segment), is not pinned, and not being copied into a
        tier: what only waits for one goes before anything on the line. False: there is none. What
        another side saved stays, whoever waits.
        """
        if self._ruling().keep_last() is None:
            return False
        if self._catalog.unreadable() or self._catalog.bad_attempts():
            return False  # what is not known may be the line
        manifests, attempts = self._catalog.manifests(), self._catalog.attempts()
        stay = {w.active_save() for w in self._workers()}
        for stream in sorted({manifest.stream for manifest in manifests}):
            stay |= self._pinned_here_only(stream).keys()
            for manifest in reversed(left_behind(manifests, attempts, stream)):
                helps = any(makes_room(ref.id) for ref in manifest.segments)
                if helps and manifest.save_id not in stay:
                    self.delete(manifest)
                    log.warning(
                        "namespace %s: step %d of stream %s (%s), skipped while hosts or tiers did "
                        "not answer, is deleted from memory: the ring needs its slot",
                        self._namespace, manifest.step, stream, manifest.save_id,
                    )  # fmt: skip
                    return True
        return False

    def delete(self, manifest: Manifest) -> None:
        """Delete a checkpoint from memory. Raises TierUnavailableError."""
        for worker in self._workers():
            worker.drop(manifest.save_id)
        self._catalog.remove(manifest)
        for ref in manifest.segments:
            self._marks.forget(MEMORY, ref.id)
