"""Carries out one case of the fault matrix with real processes, and judges what comes back.

The ledger knows what was reported as committed, and where; contents are computed from (step, seed).
From that alone it says which checkpoints a restart may bring: the newest one that was committed, or
a save of unknown outcome after it. Files that were damaged are left to :mod:`tests.support.damage`.
"""

from __future__ import annotations

import random
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.damage import Damage
from tests.support.faults import (
    MIB,
    Died,
    ForkedAgent,
    NoAnswerError,
    Site,
    Trainer,
    eventually,
    new_runtime_dir,
    ranks,
    remove_runtime_dir,
    small_tmpfs,
    state_of,
)
from tests.support.matrix import Case
from tieredckpt.errors import (
    BackgroundSaveError,
    NamespaceInUseError,
    NoRecoverableCheckpointError,
    NotFoundError,
    StaleAttemptError,
    TieredCkptError,
    TierUnavailableError,
    UsageError,
    WaitError,
)
from tieredckpt.rpc.agent_client import AgentClient

DAY_S = 86400.0
NEVER_COMMITTED = (StaleAttemptError, UsageError, NamespaceInUseError)
BEFORE_COMMIT = frozenset(
    (
        "save.stage.before", "save.stage.copy", "save.stage.after",
        "save.reserve.before", "save.reserve.after", "save.copy", "save.seal.before",
        "save.seal.after", "save.commit.before", "agent.reserve.after_label",
        "agent.seal.before_label", "agent.seal.after_label", "agent.commit.before_plan",
        "agent.commit.before_manifest",
    )
)  # fmt: skip
"""Who dies here has committed nothing."""


# --- the oracle ----------------------------------------------------------------------------------


@dataclass
class Saved:
    """A checkpoint that may exist."""

    step: int
    seed: int
    save_id: str | None
    certain: bool
    on_disk: bool = False


@dataclass
class Ledger:
    """The time line as its owner may believe it, oldest first."""

    line: list[Saved] = field(default_factory=list)
    keep: int = 1

    def add(self, step: int, seed: int, save_id: str | None, *, certain: bool) -> None:
        self.line = [each for each in self.line if each.step != step]
        self.line.append(Saved(step, seed, save_id, certain))

    def reached_disk(self, step: int) -> None:
        next(each for each in self.line if each.step == step).on_disk = True

    def went_on_from(self, step: int | None) -> None:
        """Training restored ``step``: what came after it is abandoned, unless it never was."""
        steps = [each.step for each in self.line]
        self.line = self.line[: steps.index(step) + 1] if step is not None else []
        if self.line:
            self.line[-1].certain = True

    def seeds(self) -> dict[int, int]:
        return {each.step: each.seed for each in self.line}

    def allowed(self, *, disk_only: bool = False) -> list[Saved]:
        """What a restart may bring, newest first; the last one must be had, if it is certain."""
        found = []
        for each in reversed(self.line):
            found.append(each)
            if each.certain and (each.on_disk or not disk_only):
                break
        return found

    def must(self, *, disk_only: bool = False) -> Saved | None:
        found = self.allowed(disk_only=disk_only)
        sure = bool(found) and found[-1].certain and (found[-1].on_disk or not disk_only)
        return found[-1] if sure else None


# --- a job ---------------------------------------------------------------------------------------


class Job:
    """One start of training: one trainer, or two ranks with a group."""

    def __init__(self, world: int, *, seed: int, mib: float, saved_by: int) -> None:
        self._stack = ExitStack()
        self.seed = seed
        self.world = world
        if world == 1:
            one = self._stack.enter_context(Trainer(seed=seed, mib=mib, saved_by=saved_by))
            self.trainers = [one]
        else:
            self.trainers = self._stack.enter_context(ranks(world, seed=seed, mib=mib))

    def start(self, command: str, *args: Any, **options: Any) -> None:
        for each in self.trainers:
            each.start(command, *args, **options)

    def outcomes(self, deadline_s: float = 60.0) -> list[Any]:
        """What each rank returned, or what it raised; ``Died`` if it did."""
        found: list[Any] = []
        for each in self.trainers:
            try:
                found.append(each.result(deadline_s=deadline_s))
            except NoAnswerError:
                raise
            except Exception as error:
                found.append(error)
        return found

    def all(self, command: str, *args: Any, **options: Any) -> list[Any]:
        self.start(command, *args, **options)
        return self.outcomes()

    def must(self, command: str, *args: Any, **options: Any) -> Any:
        """Rank 0's answer; what any rank raises is raised."""
        for each in (found := self.all(command, *args, **options)):
            if isinstance(each, BaseException):
                raise each
        return found[0]

    def end(self) -> None:
        self._stack.close()


# --- the bench -----------------------------------------------------------------------------------


class Bench:
    """A host for one case: a runtime folder, a disk, an agent, a job."""

    def __init__(self, case: Case, folder: Path) -> None:
        self.case = case
        self.chance = chance = random.Random(str(case))
        self.stack = ExitStack()
        self.folder = folder
        self.ledger = Ledger()
        self.agent: ForkedAgent | None = None
        self.jobs: list[Job] = []
        self.damage: Damage | None = None
        self.log: list[str] = []
        group_works = case.fault in ("kill", "slow") or case.victim in ("files", "agent")
        self.world = 2 if group_works and chance.random() < 0.08 else 1
        self.mib = chance.choice((0.1, 0.5, 1.0, 1.0, 9.0)) if self.world == 1 else 1.0
        self.keep = chance.choice((1, 2, 2, 3))
        self.disk_keep = chance.choice((1, 2, 3))
        self.before = chance.randrange(1, 5)
        self.seed = chance.randrange(1 << 30)
        self.long = case.fault == "stop" and chance.random() < 0.15
        needs_disk = case.operation in ("spill", "retention") or "disk" in case.stage
        self.has_disk = needs_disk or case.victim == "files" or chance.random() < 0.6
        self.auto = case.fault == "kill" and chance.random() < 0.1
        """Trainers start an agent where none runs, instead of a service manager."""
        self.on_error = chance.choice(("raise", "skip"))
        self.step = 0

    def __str__(self) -> str:
        return (
            f"{self.case}: world {self.world}, {self.mib} MiB, keep {self.keep}/"
            f"{self.disk_keep if self.has_disk else '-'}, {self.before} saves before, "
            f"on_error {self.on_error}; {'; '.join(self.log)}"
            + (f"; damage: {self.damage}" if self.damage else "")
        )

    def note(self, what: str) -> None:
        self.log.append(what)

    # --- life ----------------------------------------------------------------------------------

    def __enter__(self) -> Bench:
        disk = self.folder / "disk"
        disk.mkdir(parents=True)
        self.runtime_dir = new_runtime_dir()
        self.stack.callback(remove_runtime_dir, self.runtime_dir)
        if self.case.stage == "memory.full":
            self.stack.enter_context(small_tmpfs(self.runtime_dir, 96 * MIB))
        if self.case.stage in ("disk.full", "disk.remounted"):
            self.stack.enter_context(small_tmpfs(disk, 160 * MIB))
        (self.folder / "shm").symlink_to(self.runtime_dir)
        self.site = Site(
            self.runtime_dir, disk if self.has_disk else None, keep=self.keep,
            disk_keep=self.disk_keep, capacity="80MiB" if self.mib < 9 else "256MiB",
            timeout="2s" if self.long else "30s",
        )  # fmt: skip
        self.site.config["save"]["on_error"] = self.on_error
        self.site.config["agent"]["start"] = "auto" if self.auto else "never"
        if self.case.fault.startswith("clock") and self.chance.random() < 0.5:
            for tier in self.site.config["tiers"]:
                tier["every"] = "10 min"
        self.ledger.keep = self.keep
        return self

    def __exit__(self, *exc: object) -> None:
        for job in self.jobs:
            job.end()
        if self.agent is not None:
            self.agent.kill()
        self.stack.close()

    def new_agent(self, armed: str = "") -> ForkedAgent:
        self.kill_agent()
        self.agent = ForkedAgent(self.runtime_dir, armed)
        return self.agent

    def kill_agent(self) -> None:
        """SIGKILL, also for one that a trainer has started."""
        if self.agent is not None:
            self.agent.kill()
        if self.auto:
            self.site.kill_agent()

    def revive_agent(self) -> None:
        """What a service manager does: a new one where the old one died."""
        if self.agent is None or not state_of(self.agent.pid):
            self.new_agent()

    def new_job(self, *, seed: int | None = None, world: int | None = None) -> Job:
        job = Job(
            world or self.world, seed=self.seed if seed is None else seed, mib=self.mib,
            saved_by=self.world,
        )  # fmt: skip
        self.jobs.append(job)
        return job

    def opened_job(self, **options: Any) -> Job:
        job = self.new_job(**options)
        job.must("open", self.site.config)
        return job

    def end_job(self, job: Job) -> None:
        job.end()
        self.jobs.remove(job)

    @property
    def job(self) -> Job:
        return self.jobs[0]

    # --- saving and loading, with the ledger -----------------------------------------------------

    def begin_save(self, job: Job, how: str = "save") -> int:
        self.step += 1
        job.start(how, self.step)
        return self.step

    def settle_save(self, job: Job, step: int, *, died: bool | None = None) -> Any:
        """Enter a save's outcome; ``died``: whether one that takes the trainer was committed."""
        outcome = job.outcomes()[0]
        self.note(f"save {step}: {outcome!r:.200}")
        if isinstance(outcome, str):
            self.ledger.add(step, job.seed, outcome, certain=True)
        elif isinstance(outcome, BackgroundSaveError):
            self.ledger.add(step, job.seed, None, certain=True)
        elif isinstance(outcome, Died):
            if died is not False:
                self.ledger.add(step, job.seed, None, certain=bool(died))
        elif not isinstance(outcome, NEVER_COMMITTED):
            self.ledger.add(step, job.seed, None, certain=False)
        return outcome

    def save(self, job: Job) -> Any:
        return self.settle_save(job, self.begin_save(job))

    def must_save(self, job: Job) -> int:
        """A save that has no reason to fail."""
        outcome = self.save(job)
        if isinstance(outcome, BackgroundSaveError):
            return self.step  # it is committed, and tells of the one before
        assert isinstance(outcome, str), f"a save failed without reason: {self}"
        return self.step

    def wait_disk(self, job: Job) -> None:
        """The newest checkpoint reaches the disk."""
        newest = self.ledger.line[-1]
        try:
            job.trainers[0].wait(newest.step, "disk")
        except WaitError as error:
            if error.reason != "not_scheduled":
                raise
        else:
            self.ledger.reached_disk(newest.step)

    def load(self, job: Job) -> Any:
        """Rank 0's outcome; all ranks agree."""
        found = job.all("load", seeds=self.ledger.seeds())
        assert len({getattr(each, "step", type(each)) for each in found}) == 1, f"{found} {self}"
        self.note(f"load: {found[0]!r:.300}")
        return found[0]

    def prepare(self) -> None:
        """A run of two starts that has saved some checkpoints."""
        self.new_agent()
        job = self.opened_job()
        for i in range(self.before):
            self.must_save(job)
            if i == self.before // 2 and self.before > 2:
                if self.has_disk:
                    self.wait_disk(job)
                self.end_job(job)
                job = self.opened_job()
                assert self.load(job).step == self.step, str(self)
        if self.has_disk and (self.case.victim == "files" or self.chance.random() < 0.7):
            self.wait_disk(job)

    # --- judging ---------------------------------------------------------------------------------

    def judge(self, loaded: Any, *, lenient: bool = False, disk_only: bool = False) -> None:
        """The invariant. ``lenient``: the fault is still there, an error may say so."""
        if self.damage is not None:
            self._judge_damaged(loaded)
            return
        allowed = self.ledger.allowed(disk_only=disk_only)
        must = self.ledger.must(disk_only=disk_only)
        if isinstance(loaded, BaseException):
            assert lenient, f"{loaded!r} instead of {must}: {self}"
            assert isinstance(loaded, TieredCkptError), f"{loaded!r}: {self}"
            assert str(loaded), str(self)
            return
        assert loaded.wrong == [], f"{loaded.wrong}: {self}"
        if lenient:
            allowed = [*reversed(self.ledger.line)]
            newer = [e for e in allowed if must and e.step <= must.step]
            skipped = {e.step for e in newer if e.certain and e.step > (loaded.step or 0)}
            assert skipped <= {step for _, step, _ in loaded.refused}, f"{loaded}: {self}"
        elif must is None and loaded.step is None:
            return
        by_step = {each.step: each for each in allowed}
        assert loaded.step in by_step, f"step {loaded.step}, not one of {list(by_step)}: {self}"
        saved = by_step[loaded.step]
        assert saved.save_id in (None, loaded.save_id), f"another checkpoint: {self}"

    def judge_listed(self, job: Job) -> None:
        """Everything that memory should have kept is listed, nothing else, and all is good."""
        listed = job.trainers[0].checkpoints()
        steps = [step for step, _, _ in listed]
        known = {each.step: each for each in self.ledger.line}
        assert steps == sorted(steps, reverse=True), f"{steps}: {self}"
        assert set(steps) <= set(known), f"{steps} of {list(known)}: {self}"
        if self.damage is not None:
            return
        for step in [s for s in known if known[s].certain][-self.keep :]:
            room = sum(s > step for s in steps)
            assert step in steps or room >= self.keep, f"step {step} is lost, {steps}: {self}"
        if self.world == 1:
            for step, save_id, _ in listed[1:3]:
                try:
                    found = job.trainers[0].load_save(save_id, step, self.ledger.seeds())
                except (NotFoundError, TierUnavailableError) as error:
                    # A tier that was still deleting what it need not keep.
                    gone = isinstance(error, NotFoundError) or "has no segments/" in str(error)
                    if not gone or sum(s > step for s in steps) < min(self.keep, self.disk_keep):
                        error.add_note(str(self))
                        raise
                else:
                    assert found.wrong == [], f"step {step} {found.wrong}: {self}"

    def _judge_damaged(self, loaded: Any) -> None:
        damage = self.damage
        assert damage is not None
        must = next((s for s in reversed(self.ledger.line) if self._must_load(s)), None)
        if isinstance(loaded, BaseException):
            assert must is None, f"{must} was to be had, {loaded!r}: {self}"
            assert isinstance(loaded, NoRecoverableCheckpointError), f"{loaded!r}: {self}"
            refused = {save_id for save_id, _, _ in loaded.refused}
            reasons = [reason for _, _, reason in loaded.refused]
            named = {s.save_id for s in self.ledger.line if self._has_manifest(s.step)}
            assert named <= refused, f"{named - refused} not named: {self}"
            assert all(reasons), str(self)
            return
        assert loaded.step is not None, f"a fresh start was offered: {self}"
        assert loaded.wrong == [], f"{loaded.wrong}: {self}"
        by_step = {each.step: each for each in self.ledger.line}
        assert loaded.step in by_step, f"step {loaded.step}: {self}"
        assert by_step[loaded.step].save_id in (None, loaded.save_id), str(self)
        assert must is None or loaded.step >= must.step, f"{must} was to be had: {self}"
        skipped = {
            s.step for s in self.ledger.line
            if s.step > loaded.step and s.certain and self._has_manifest(s.step)
        }  # fmt: skip
        named = {step for _, step, _ in loaded.refused}
        assert skipped <= named, f"{skipped - named} not named: {self}"

    def _kept(self, step: int) -> dict[str, bool]:
        """Which tiers certainly still have what they held of a step."""
        newer = sum(each.step > step for each in self.ledger.line)
        return {"memory": newer < self.keep, "disk": newer < self.disk_keep}

    def _has_manifest(self, step: int) -> bool:
        assert self.damage is not None
        records = [r for r in self.damage.inventory.records if r.step == step]
        kept = self._kept(step)
        return any(kept[r.tier] and r.path not in self.damage.gone for r in records)

    def _must_load(self, saved: Saved) -> bool:
        damage = self.damage
        assert damage is not None
        if saved.step not in damage.inventory.line:
            return saved.certain  # it was saved after the damage
        kept = self._kept(saved.step)
        lost = {r.path for r in damage.inventory.records
                if r.kind == "manifest" and r.step == saved.step and not kept[r.tier]}  # fmt: skip
        return saved.certain and damage.must_load(saved.step, lost)

    # --- what comes after the fault --------------------------------------------------------------

    def restart_and_judge(self) -> None:
        """New processes (which ones is drawn) find the newest checkpoint; then the run goes on."""
        for job in list(self.jobs):
            self.end_job(job)
        aftermath = self.chance.choice(("trainer", "trainer", "agent", "reboot"))
        # Damage has been reckoned with both copies; memory that is lost is another fault.
        if aftermath == "reboot" and (not self.has_disk or self.damage is not None):
            aftermath = "agent"
        self.note(f"restart of {aftermath}")
        if aftermath != "trainer":
            self.kill_agent()
        if aftermath == "reboot":
            self.site.lose_memory()
        self.revive_agent()
        world = 1 if self.chance.random() < 0.5 else self.world
        job = self.opened_job(world=world)
        loaded = self.load(job)
        self.judge(loaded, disk_only=aftermath == "reboot")
        if isinstance(loaded, BaseException):
            return
        self.ledger.went_on_from(loaded.step)
        if loaded.step is not None and aftermath != "reboot":
            self.judge_listed(job)
        self.go_on(job)

    def go_on(self, job: Job) -> None:
        """Two more saves, and a last restart of everything that finds them."""
        if job.world != self.world:
            self.end_job(job)
            job = self.opened_job()
            assert (
                self.load(job).step == (self.ledger.line or [Saved(None, 0, None, True)])[-1].step
            )
        self.damage = None
        for _ in range(2):
            self.must_save(job)
        if self.has_disk:
            self.wait_disk(job)
            if self.case.fault not in ("clock back", "clock ahead"):
                assert list((self.folder / "disk/run/tmp").iterdir()) == [], str(self)
        self.end_job(job)
        self.new_agent()
        at_once = self.chance.random() < 0.5
        self.note(f"a last job opens {'at once' if at_once else 'when all is tidy'}")
        with AgentClient(self.runtime_dir) as client:

            def no_slot_is_lost(granted: int = 0) -> None:
                (status,) = client.status().namespaces
                most = min(self.keep, len(self.ledger.line)) * self.world + granted
                assert status.slots - status.free_slots <= most, f"{status}: {self}"

            if not at_once:
                # Before the last job is there: beside it nothing is deleted until it saves.
                eventually(no_slot_is_lost)
            job = self.opened_job()
            self.judge(self.load(job))
            if at_once:
                # What stayed beside the job, for it came while the agent tidied, goes now.
                self.must_save(job)
                eventually(lambda: no_slot_is_lost(self.world))  # each rank has its next one
                self.end_job(job)
            eventually(no_slot_is_lost)
