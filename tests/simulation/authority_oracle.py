"""What users were promised about authority, checked from what trainers were told and did.

The oracle knows jobs (whose ranks hold sessions, since when), what each load returned, what the
caller of each save was told, what the user asked for, and what lies in memories and in the bucket.
It knows nothing of attempt numbers, leaders, records or terms, so it cannot share their beliefs.

A job is *main* (the user's one job, started again and again), a *side* (the launcher of a host that
is cut off starts it there alone) or a *looker* (it opens, loads and never saves). A *line* is what
one job's weights came from: its own saves, the checkpoint that it had loaded, and so on backwards.
A *head* is a job with saves from which no later job with saves has gone on.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

Kind = Literal["main", "side", "looker"]
Told = Literal["begun", "acked", "unknown", "refused"]


class Violation(BaseException):
    """A promise was not kept. Not an Exception: the product's threads survive those.

    Args:
        promise: P1 to P6.
        finding: The finding of issue 11 that it looks like, by who did what: "3 in memory" is the
            agent of a former member that deletes in its own memory by its old rules, "branch" the
            deletion of what another side with saves was told of; "?": none.
        text: What happened.
    """

    def __init__(self, promise: str, finding: str, text: str) -> None:
        super().__init__(f"{promise} (finding {finding}): {text}")
        self.promise, self.finding, self.text = promise, finding, text
        self.trace: list[str] = []

    def __reduce__(self) -> tuple[Any, ...]:  # for who looks for seeds in several processes
        return type(self), (self.promise, self.finding, self.text), vars(self)


@dataclass(eq=False)
class Save:
    """One checkpoint, as its caller knows it."""

    save_id: str
    step: int
    job: Job
    parent: Save | None
    parts: dict[str, str]
    """Host by segment."""
    told: Told = "begun"
    in_bucket: bool = False
    decided: bool = False
    """That it goes from the bucket: whoever comes later can only bring it to an end."""

    def __str__(self) -> str:
        return f"step {self.step} of {self.job} ({self.save_id[:6]})"


@dataclass(eq=False)
class Job:
    """One start of ranks together."""

    number: int
    kind: Kind
    hosts: tuple[str, ...]
    keep: int
    bucket_keep: int
    epoch: int
    pred: Job | None
    started_s: float
    boots: dict[str, int]
    seen_lease: Job | None = None
    """Who had the bucket when this one loaded, if its first host reached the bucket."""
    base: Save | None = None
    saves: list[Save] = field(default_factory=list)
    ended_s: float | None = None

    @property
    def alive(self) -> bool:
        return self.ended_s is None

    @property
    def acked(self) -> list[Save]:
        return [each for each in self.saves if each.told == "acked"]

    def tip(self) -> Save | None:
        """What its ranks' weights are of."""
        return next((s for s in reversed(self.saves) if s.told != "refused"), self.base)

    def line(self) -> list[Save]:
        """Newest first."""
        found, at = [], self.tip()
        while at is not None:
            if at.told != "refused":
                found.append(at)
            at = at.parent
        return found

    def __str__(self) -> str:
        return f"{self.kind} job {self.number}"


@dataclass(frozen=True, slots=True)
class Sight:
    """What one host can read for certain, from memories and the bucket; newest first."""

    whole: list[Save]
    """Acknowledged checkpoints of which the manifest and every segment can be had."""
    named: list[Save]
    """Of which the manifest can be had."""


class Oracle:
    """See the module."""

    def __init__(self) -> None:
        self.jobs: list[Job] = []
        self.saves: dict[str, Save] = {}
        self.of_segment: dict[str, Save] = {}
        self.epoch = 0
        self.purging = False
        self.freed_early: dict[str, str] = {}
        """Segments of saves that nobody had been told of, given back, and by which host."""
        self.lease: Job | None = None
        """Who has put the newest claim into the bucket."""
        self.deleted_at: set[tuple[str, str]] = set()
        """Place and save id of what was deleted already, and judged then."""

    # --- what happens -----------------------------------------------------------------------------

    def started(self, job: Job) -> None:
        self.jobs.append(job)

    def loaded(self, job: Job, found: Save | None) -> None:
        job.base = found
        if found is not None:  # an old host that went on from what the new run saved is of that
            job.epoch = max(job.epoch, found.job.epoch)

    def begun(self, job: Job, save_id: str, step: int, parts: dict[str, str]) -> Save:
        save = Save(save_id, step, job, job.tip(), parts)
        job.saves.append(save)
        self.saves[save_id] = save
        for segment in parts:
            self.of_segment[segment] = save
        return save

    def acked(self, save: Save) -> None:
        save.told = "acked"
        for segment, host in save.parts.items():
            if segment in self.freed_early:
                raise Violation(
                    "P4", "5",
                    f"{save} is acknowledged, and host {host} has given its part back before",
                )  # fmt: skip

    def claimed(self, job: Job) -> None:
        """A new claim of ``job`` is in the bucket."""
        self.lease = job

    # --- who rules --------------------------------------------------------------------------------

    def main(self) -> Job | None:
        """The newest main job of this epoch."""
        return next((j for j in reversed(self.jobs) if j.kind == "main"), None)

    def heads(self) -> list[Job]:
        """Jobs with acknowledged saves that nobody with saves has gone on from."""
        found = []
        for job in self.jobs:
            if job.epoch != self.epoch or not job.acked:
                continue
            own = set(map(id, job.saves))
            line = set(map(id, job.line()))
            later = [j for j in self.jobs if j.number > job.number and j.acked]
            if any(
                j.base is not None
                and (id(j.base) in own or (self._before(j) is job and id(j.base) in line))
                for j in later
            ):
                continue
            found.append(job)
        return found

    def _before(self, job: Job) -> Job | None:
        """The job with saves that the user meant to go on from."""
        at = job.pred
        while at is not None and not at.acked:
            at = at.pred
        return at

    def ruling_main(self) -> Job | None:
        """The newest main job that was told of a save."""
        mains = [j for j in self.jobs if j.kind == "main" and j.epoch == self.epoch and j.acked]
        return mains[-1] if mains else None

    def _kept_by(self, job: Job, save: Save, *, bucket: bool) -> bool:
        """Whether the rules of ``job`` keep ``save``, which is on its line."""
        line = [each for each in job.line() if not bucket or each.in_bucket or each is save]
        if save not in line:
            return False
        return line.index(save) < (job.bucket_keep if bucket else job.keep)

    def _coming(self, job: Job) -> list[Job]:
        """Jobs that go on from ``job`` and are committing their first save: they may rule."""
        line = set(map(id, job.line()))
        return [
            j for j in self.jobs
            if j.number > job.number and j.saves and not j.acked and j.kind != "looker"
            and j.base is not None and id(j.base) in line
        ]  # fmt: skip

    # --- P3, P4 -----------------------------------------------------------------------------------

    def bucket_deleted(self, save_id: str, by: str) -> None:
        """Somebody put a tombstone in a manifest's place."""
        save = self.saves.get(save_id)
        if save is not None and save.in_bucket:
            if not save.decided:
                self.bucket_decided(save_id, by)
            save.in_bucket = save.decided = False

    def bucket_decided(self, save_id: str, by: str) -> None:
        """Somebody decided for good that a checkpoint goes: the rules count as they are now."""
        save = self.saves.get(save_id)
        if save is None or not save.in_bucket:
            return
        save.decided = True
        if save.told != "acked" or save.job.epoch != self.epoch:
            return
        for head in self.heads():
            if not self._keeps(head, save, bucket=True) or self._by_lease(head, save, by):
                continue
            raise Violation(
                "P3", self._why_deleted(head, by),
                f"host {by} deletes {save} from the bucket; the rules of {head} (last "
                f"{head.bucket_keep}) keep it",
            )  # fmt: skip

    def _by_lease(self, head: Job, save: Save, by: str) -> bool:
        """Whether ``by`` deletes what is on its own side's line, too, which has the lease."""
        own = self.ruler_of(by)
        if own is None or own is head or own is not self.lease or save not in own.line():
            return False
        return not self._keeps_here(own, save, bucket=True)

    def _keeps(self, head: Job, save: Save, *, bucket: bool) -> bool:
        main = self.ruling_main()
        if head is not main and main is not None and save in main.line():
            return False  # what both sides have is the main job's
        if not self._kept_by(head, save, bucket=bucket):
            return False
        return all(self._kept_by(each, save, bucket=bucket) for each in self._coming(head))

    def memory_deleted(self, host: str, save_id: str, *, holds: bool) -> None:
        """A host let go of a manifest; ``holds``: and so of parts that lie in its memory, of a
        checkpoint that is whole.
        """
        save = self.saves.get(save_id)
        self.deleted_at.add((host, save_id))
        if self.purging or not holds or save is None or save.told != "acked":
            return
        if save.job.epoch != self.epoch:
            return
        own, main = self.ruler_of(host), self.ruling_main()
        mine = own is not None and save in own.line()
        if own is not None and mine and not self._keeps_here(own, save):
            return  # by its own rules; it may not have heard of others
        # What is on the main job's line, whoever has heard of that job may go by its rules.
        on_main = main is not None and save in main.line()
        keepers = [main] if main is not None and on_main else self.heads()
        for head in keepers:
            if self._keeps(head, save, bucket=False):
                raise Violation(
                    "P3", self._why_deleted(head, host, memory=True),
                    f"memory of {host} lets go of {save}, which {head} (last {head.keep}) keeps",
                )  # fmt: skip

    def _keeps_here(self, own: Job, save: Save, *, bucket: bool = False) -> bool:
        if not self._kept_by(own, save, bucket=bucket):
            return False
        return all(self._kept_by(each, save, bucket=bucket) for each in self._coming(own))

    def ruler_of(self, host: str) -> Job | None:
        """The job with saves whose ranks were last on this host."""
        mine = [j for j in self.jobs if host in j.hosts and j.saves and j.epoch == self.epoch]
        return mine[-1] if mine else None

    def segment_freed(self, host: str, segment: str, *, named: bool, whole: bool) -> None:
        """A host gave the slot back in which its own rank had sealed this.

        Args:
            host: Which.
            segment: What was in it.
            named: By a manifest that lies there.
            whole: All other parts of the checkpoint are somewhere.
        """
        save = self.of_segment.get(segment)
        if self.purging or save is None or save.parts.get(segment) != host:
            return
        if save.job.epoch != self.epoch or save.told == "refused":
            return
        if save.told != "acked":
            self.freed_early[segment] = host
            return
        if (host, save.save_id) in self.deleted_at:
            return
        keeper, main = self.ruler_of(host), self.ruling_main()
        if main is not None and save in main.line():
            keeper = main  # others may have let go of it by its rules, and say so
        if not named and any(
            host in j.hosts and j.acked and j.number > save.job.number for j in self.jobs
        ):
            return  # nobody vouched for it here: it waited until the next open, and its first save
        if whole and (named or (keeper is not None and self._keeps_here(keeper, save))):
            raise Violation(
                "P4", "5", f"{host} gives its part of {save} back, which {keeper} keeps"
            )  # fmt: skip

    def _why_deleted(self, head: Job, by: str, *, memory: bool = False) -> str:
        """Which finding it is, by who did it."""
        last = next(j for j in reversed(self.jobs) if by in j.hosts)
        if last.number < head.number:
            return "3 in memory" if memory else "3"
        if last.saves and head is not self.ruling_main():
            return "branch"
        if not last.saves:
            return "1" if last.kind == "side" else "14"
        return self._who_took_the_line(head)

    def _who_took_the_line(self, head: Job) -> str:
        """Of something done to the line of ``head``, for the sake of somebody without saves."""
        later = {j.kind for j in self.jobs if j is not head and not j.saves}
        return "14" if "looker" in later and "side" not in later else "1"

    # --- P1 ---------------------------------------------------------------------------------------

    def refused(
        self, job: Job, save: Save | None, error: Exception, *, denied: bool, blamed: list[Job]
    ) -> None:
        """The caller of a save was told that somebody else is right, or that a part is gone.

        Args:
            job: Whose save.
            save: If it had got so far.
            error: What was said.
            denied: It says that a part was given back.
            blamed: Jobs that it may speak of, to name the finding.
        """
        if save is not None:
            save.told = "refused"
        if job is not self.main() or job.epoch != self.epoch or not job.alive:
            return
        if denied:
            raise Violation("P1", "5", f"a save of {job} is denied: {error}")
        others_ever = [j for j in self.jobs if j is not job]
        others = [j for j in others_ever if j.epoch == job.epoch]
        if any(j.kind == "side" and j.alive and j.saves for j in others):
            return  # a fork whose both sides have saved: the second one stops
        if any(j.kind == "side" and j.acked and j is self.lease for j in others):
            return  # a fork of which the other side has the bucket, which is the lease
        if not job.acked and self._would_abandon(job):
            return  # it went on from what it could have, and its first save finds the rest
        if not job.acked and any(each.epoch < job.epoch and each.acked for each in others_ever):
            return  # what a purge did not reach came back: before its first save a run owns nothing
        lease = self.lease if self.lease is not job.seen_lease else None
        if not job.acked and lease is not None and not lease.acked and not lease.alive:
            return  # it claimed and died since this one looked: who can tell that from a live one
        kinds = {each.kind for each in blamed if each is not job}
        raise Violation(
            "P1", "14" if "looker" in kinds and "side" not in kinds else "1",
            f"a save of {job}, whose ranks alone hold sessions and save, is refused: {error}",
        )  # fmt: skip

    def _would_abandon(self, job: Job) -> bool:
        """Whether there are acknowledged saves that its line does not have: a fork."""
        line = set(map(id, job.line()))
        return any(
            id(save) not in line for head in self.heads() if head is not job for save in head.acked
        )

    # --- P2 ---------------------------------------------------------------------------------------

    def check_load(self, job: Job, found: str | None, sight: Sight, warned: str = "") -> None:
        """A load succeeded.

        Args:
            job: Whose.
            found: The save id that it restored; None: it said that there is nothing.
            sight: What its host could read for certain when it loaded.
            warned: What the load said of checkpoints off its line, by their save ids.
        """
        there = [each for each in sight.whole if each.job.epoch == job.epoch]
        if found is None:
            if there:
                raise Violation(
                    "P2", "6", f"load of {job} says that there is nothing, and {there[0]} is there"
                )
            return
        save = self.saves.get(found)
        if save is None:
            raise Violation("P2", "?", f"load of {job} restores {found}, which nobody saved")
        if save.job.epoch != job.epoch:
            if job.kind != "side" and any(each.job.epoch == job.epoch for each in sight.named):
                raise Violation("P2", "1", f"load of {job} restores {save}, of a deleted run")
            return  # nothing that it can see tells that the run was deleted
        if job.kind != "main":
            return
        right = self._acceptable(job)
        lines = [head.line() for head in right]
        if not any(each in line for each in sight.named for line in lines):
            return  # nothing that it can see tells of them
        if all(save not in line for line in lines):
            own = [save]
            while (parent := own[-1].parent) is not None:
                own.append(parent)
            if not any(each in line and each not in own for each in sight.named for line in lines):
                return  # all that it can see of them is what it goes on from itself
            if any(each.save_id in warned for line in lines for each in line):
                return  # it goes another way, and says so
            raise Violation(
                "P2", self._who_took_the_line(right[0]),
                f"load of {job} restores {save}, which is not on the line of {right[0]}",
            )  # fmt: skip
        newest = [next((s for s in line if s in there), None) for line in lines]
        if all(
            save not in line or (top is not None and line.index(top) < line.index(save))
            for line, top in zip(lines, newest, strict=True)
        ):
            raise Violation(
                "P2", self._who_took_the_line(right[0]),
                f"load of {job} restores {save} and not {newest[0]} of {right[0]}, which is there",
            )  # fmt: skip

    def _acceptable(self, job: Job) -> list[Job]:
        """The main job whose line it is, and sides with saves whose ranks were there later."""
        mains = [
            j for j in reversed(self.jobs)
            if j.kind == "main" and j.number < job.number and j.epoch == job.epoch
        ]  # fmt: skip
        main = next((j for j in mains if j.acked), None)
        # What a later one was not told of its save may be so.
        later = mains[: mains.index(main)] if main is not None else mains
        unknown = [j for j in later if any(each.told == "unknown" for each in j.saves)]
        last_s = main.ended_s if main is not None and main.ended_s is not None else 0.0
        sides = [
            j for j in self.heads()
            if j.kind == "side" and (
                j.ended_s is None or j.ended_s >= last_s
                # As after a restart: it went on from where the main job had got to.
                or (main is not None and j.base is main.tip())
            )
        ]  # fmt: skip
        return [*([main] if main is not None else []), *unknown, *sides]

    # --- P5 ---------------------------------------------------------------------------------------

    def check_lost(self, host: str, alive: Iterable[str], by: str) -> None:
        """``by`` leads a job that ``host``, long dead, was in."""
        if host in set(alive):
            raise Violation("P5", "4", f"{by} takes {host} for alive, which is dead for long")

    def check_copies(self, save: Save, by: str, lacking: Iterable[str]) -> None:
        """``by`` says that all copies are there, long after a host was lost."""
        if left := list(lacking):
            raise Violation(
                "P5", "4", f"{by} says that {save} is replicated, and copies of {left} are gone"
            )

    def check_given_up(self, save: Save, by: str) -> None:
        """``by`` holds that a save of the ruling job, whose rule is to keep, is given up."""
        raise Violation(
            "P3", "3", f"{by} has given up the upload of {save}, though on_pressure is keep"
        )


__all__ = ["Job", "Kind", "Oracle", "Save", "Sight", "Violation"]
