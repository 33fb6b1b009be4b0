"""One case: a schedule drawn from a seed, carried out with faults, and what must hold after it.

``python -m tests.simulation.case SEED [LENGTH]`` runs one with its trace; LENGTH cuts the schedule
(the end is checked all the same), which is how a failing one is made small.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections import Counter
from dataclasses import dataclass, field
from random import Random

from tests.simulation import damage
from tests.simulation.filesystem import Died
from tests.simulation.host import NAMESPACE, SIZES, Fault, Host, Loaded, Settings, Trainer
from tests.simulation.oracle import MEMORY_ROOT, Save
from tests.simulation.system import simulated
from tieredckpt.agent.tiers.worker import TierWorker
from tieredckpt.errors import (
    IntegrityError,
    NotFoundError,
    StaleAttemptError,
    TieredCkptError,
)

OPERATIONS = {
    "save": 30, "spill": 26, "save during a spill": 8, "restart trainer": 10, "roll back": 6,
    "restart agent": 9, "stop agent": 3, "reap": 3, "damage": 8, "power cut": 4, "zombie": 5,
    "full": 2, "clock": 2, "kill trainer": 2,
}  # fmt: skip
FAULTS = {
    "": 60, "kill agent": 12, "power": 8, "kill trainer": 6, "eio": 8, "enospc": 6, "emfile": 6,
    "short": 4,
}  # fmt: skip
TYPICAL_CALLS = {
    "save": 130, "spill": 120, "save during a spill": 100, "restart trainer": 300,
    "roll back": 300, "restart agent": 120, "stop agent": 120, "reap": 10, "zombie": 300,
}  # fmt: skip
"""A fault comes at a call up to this one, if the operation makes so many."""
SPILLS_MAX = 12
"""After so many steps of its worker a tier that works has what waited: a few checkpoints, each
tried again once after a failure."""


@dataclass(frozen=True, slots=True)
class Step:
    """One operation of a schedule, with random numbers of its own."""

    operation: str
    fault: str
    at: float
    seed: int


def schedule(seed: int) -> list[Step]:
    """The steps of a case; a prefix of it is carried out in the same way."""
    rng = Random(f"schedule {seed}")
    names, weights = list(OPERATIONS), list(OPERATIONS.values())
    steps = []
    first = rng.choice((("save", "spill"), ("save", "save", "spill"), ("save",), ()))
    for at in range(rng.randint(3, 9)):
        operation = first[at] if at < len(first) else rng.choices(names, weights)[0]
        fault = rng.choices(list(FAULTS), list(FAULTS.values()))[0]
        steps.append(Step(operation, fault, rng.random(), rng.getrandbits(32)))
    return steps


def waiting_in(worker: TierWorker) -> frozenset[str]:
    """The checkpoints that wait for a tier, for a copy or for other hosts."""
    return worker.awaited().union(each.save_id for each in worker.queued()[0])


class CaseFailed(AssertionError):
    """An invariant does not hold; the text has seed and trace."""


@dataclass(slots=True)
class Case:
    """See the module."""

    seed: int
    host: Host
    counts: Counter[tuple[str, str]]
    trainer: Trainer | None = None
    zombies: list[Trainer] = field(default_factory=list)
    ready: set[str] = field(default_factory=set)
    """Streams that the trainer has taken up."""
    step: int = 0
    trainers: int = 0
    harmed: set[str] = field(default_factory=set)
    attempts_harmed: bool = False
    bad_slots: int = 0
    """Damaged ones that no save has failed for yet."""
    trace: list[str] = field(default_factory=list)

    # --- carrying out -----------------------------------------------------------------------------

    def carry_out(self, step: Step) -> None:
        """One step: the operation, the fault, and what follows from who died."""
        host, rng = self.host, Random(step.seed)
        operation = step.operation
        host.fs.calls = 0
        at = 1 + int(step.at * TYPICAL_CALLS.get(operation, 100))
        host.fault = Fault(step.fault, at) if step.fault else None
        note = ""
        try:
            note = self._do(operation, rng) or ""
        except Died as died:
            note = f"died: {died.args[0]}"
        except StaleAttemptError:
            raise
        except (TieredCkptError, OSError) as error:
            note = f"{type(error).__name__}: {error}"
            if not self.disturbed:
                raise
        fault, host.fault, host.at_call = host.fault, None, None
        fired = fault.kind if fault is not None and fault.fired else ""
        # What the agent could not read of a slot when it started, it takes for damaged.
        self.bad_slots += fired in ("eio", "emfile", "enospc", "short")
        if fired == "enospc":
            host.oracle.crowded()
        self._bury()
        host.fs.process = "test"
        where = f" [{fired} at call {fault.at}, {fault.fired}]" if fired and fault else ""
        self.trace.append(f"{operation}{where}: {note}")
        self.counts[operation, fired or "no fault"] += 1
        host.oracle.check(self.harmed)

    @property
    def disturbed(self) -> bool:
        """Whether an operation may fail."""
        fault = self.host.fault
        fired = fault is not None and bool(fault.fired) and fault.kind != "nested"
        return fired or any(mount.full for mount in self.host.fs.mounts)

    def _bury(self) -> None:
        host = self.host
        if host.dying == "power":
            self._power_gone()
        if "kill trainer" in (host.dying, host.doomed) and self.trainer is not None:
            self._trainer_gone()
        host.dying = host.doomed = ""

    def _power_gone(self) -> None:
        self.host.power_gone()
        self.host.oracle.power_gone()
        self.trainer = None
        self.zombies.clear()
        self.ready.clear()

    def _trainer_gone(self) -> None:
        if self.trainer is not None:
            self.trainer.die()
        self.trainer = None
        self.ready.clear()

    def _do(self, operation: str, rng: Random) -> str | None:
        return getattr(self, "_" + operation.replace(" ", "_"))(rng)

    # --- operations -------------------------------------------------------------------------------

    def _save(self, rng: Random) -> str:
        if self.trainer is None:
            self._restart_trainer(rng)
        assert self.trainer is not None
        stream = rng.choice(self.host.settings.streams)
        self.step += rng.choice((1, 1, 2, 5))
        self.host.wall_s += rng.random() * 100
        waiting = self._waiting()
        try:
            saved = self._saved(self.trainer, stream, rng.choice(SIZES))
        except StaleAttemptError as error:
            if not self.trainer.blind:
                raise
            self._trainer_gone()
            return f"it did not load what it could not read, and has to load again: {error}"
        self.ready.add(stream)
        if len(self.host.settings.tiers) == len(self.host.settings.streams) == 1:
            gone = waiting - self._waiting()
            # One is given up for room only where several wait.
            assert saved.tiers or self.disturbed or not gone or len(waiting) > 1, (
                f"{gone} gave up its spill for nothing"
            )
        return f"step {saved.step} of {stream} is {saved.save_id[:6]}"

    def _waiting(self) -> set[str]:
        return {s for worker in self.host.workers().values() for s in waiting_in(worker)}

    def _saved(self, trainer: Trainer, stream: str, size: int) -> Save:
        """Save; one that meets a slot that was damaged may fail, but not the one after it."""
        while True:
            try:
                return trainer.save(stream, self.step, size)
            except (NotFoundError, IntegrityError) as error:
                if self.disturbed or not self.bad_slots:
                    raise
                self.bad_slots -= 1
                self.trace.append(f"  (skipped: {error})")

    def _spill(self, rng: Random) -> str:
        if not self.host.settings.tiers:
            return "no tier"
        tier = rng.choice(self.host.settings.tiers)
        worker = None
        for _ in range(3):
            self.host.spill(tier)
            worker = self.host.workers().get(tier)
            if worker is None or worker.error or (worker.catalog is not None and worker.is_idle()):
                break
        if worker is not None and not self.disturbed and not self.harmed:
            failed = [s for s, o in worker._history.items() if o.level == "failed"]
            assert not failed, f"the spill of {failed} failed for good"
        return f"{tier}: {worker.error if worker is not None else 'nobody has a spec'}"

    def _save_during_a_spill(self, rng: Random) -> str:
        workers = self.host.workers()
        if not workers or self.trainer is None or not self.ready or self.disturbed:
            return "not now"
        tier = rng.choice(sorted(workers))
        if workers[tier].catalog is None:
            return "not attached"
        stream = rng.choice(sorted(self.ready))
        told: list[str] = []
        trainer, self.step = self.trainer, self.step + 1

        def nested() -> None:
            saved = self._saved(trainer, stream, rng.choice(SIZES))
            told.append(f"step {saved.step} of {stream} is {saved.save_id[:6]}")

        self.host.at_call = nested
        self.host.fault = Fault("nested", rng.randint(1, 100))
        self.host.spill(tier)
        return f"{tier}, meanwhile {told}"

    def _restart_trainer(self, rng: Random) -> str:
        return self._start(rng, back=False)

    def _roll_back(self, rng: Random) -> str:
        return self._start(rng, back=True)

    def _start(self, rng: Random, *, back: bool) -> str:
        if self.trainer is not None and rng.random() < 0.3:
            self.zombies.append(self.trainer)
            self.trainer = None
        self._trainer_gone()
        self.trainers += 1
        trainer = Trainer(self.host, self.trainers)
        trainer.loaded_at = self.host.oracle.newest_attempt()
        before = self._lines()
        try:
            told = [
                self._load(trainer, stream, rng, back=back) for stream in self.host.settings.streams
            ]
        except (TieredCkptError, OSError):
            trainer.die()  # engine.load raised
            raise
        assert self.disturbed or self._lines() == before, "a load has changed a line"
        self.trainer = trainer
        return ", ".join(told)

    def _lines(self) -> list[list[str]]:
        return [self.host.oracle.line(stream) for stream in self.host.settings.streams]

    def _load(self, trainer: Trainer, stream: str, rng: Random, *, back: bool) -> str:
        step = None
        if back and (line := self.host.oracle.line(stream)):
            step = self.host.oracle.saves[rng.choice(line)].step
        least, most, line = self.host.oracle.bounds(stream)
        loaded = trainer.load(stream, step=step)
        if step is not None and loaded.save is None:
            step, loaded = None, trainer.load(stream)
        if not self.disturbed and step is None:
            self._check_loaded(loaded, least, most, line)
        trainer.blind |= bool(loaded.refused or loaded.plan.incomplete)
        trainer.blind |= bool(loaded.save is None and self.host.oracle.saves)
        if loaded.save is None:
            return f"{stream}: nothing"
        assert loaded.save.save_id in line, "it is not on the time line"
        assert step is None or loaded.save.step == step
        self.ready.add(stream)
        self.step = max(0, loaded.save.step) if back else self.step
        return f"{stream}: step {loaded.save.step} ({loaded.save.save_id[:6]})"

    def _restart_agent(self, rng: Random) -> None:
        self.host.agent_gone()
        self._boot(rng)

    def _stop_agent(self, rng: Random) -> None:
        self.host.stop_agent()
        self._boot(rng)

    def _boot(self, rng: Random) -> None:
        self.host.as_agent(lambda node: None)
        if rng.random() < 0.7:
            for tier in self.host.settings.tiers:
                self.host.spill(tier)

    def _reap(self, rng: Random) -> None:
        self.host.as_agent(lambda node: node.reap())

    def _damage(self, rng: Random) -> str:
        done = damage.strike(self.host.fs, self.host.oracle, rng, self.harmed)
        self.bad_slots += "/slots/" in done
        self.attempts_harmed = self.attempts_harmed or "attempts/" in done
        self.counts["damage", done.partition(" ")[0]] += 1
        if done.startswith(f"delete {MEMORY_ROOT}/") and self.host.node is not None:
            with contextlib.suppress(TieredCkptError):  # what the agent knows is written again
                self.host.node.holdings(NAMESPACE, 0.0)
        return done

    def _power_cut(self, rng: Random) -> None:
        self._power_gone()

    def _kill_trainer(self, rng: Random) -> None:
        self._trainer_gone()

    def _zombie(self, rng: Random) -> str:
        oracle = self.host.oracle
        if self.trainer is not None and rng.random() < 0.7:
            self.zombies.append(self.trainer)
            self.trainer = None
            self._start(rng, back=rng.random() < 0.5)
            self._save(rng)  # else it has taken nothing over
        if not self.zombies:
            return "none"
        zombie = rng.choice(self.zombies)
        newest = oracle.newest_attempt()
        if newest in ("", zombie.history.attempt_id or zombie.loaded_at):
            return "not surpassed"
        try:
            saved = zombie.save(rng.choice(self.host.settings.streams), 999, SIZES[0])
        except StaleAttemptError:
            return "refused"
        except TieredCkptError as error:
            if self.disturbed or self.bad_slots:
                return f"failed: {error}"
            raise
        if self.trainer is not None and self.trainer.blind:
            return "accepted: who began anew did not know what it goes on from"
        assert self.attempts_harmed, f"a zombie committed {saved.save_id}"
        return "accepted: no record of a newer attempt is left"

    def _full(self, rng: Random) -> str:
        mount = rng.choice(self.host.fs.mounts)
        mount.full = not mount.full
        if mount.volatile:
            self.host.oracle.crowded()
        else:
            self.host.oracle.filled(mount.path.rpartition("/")[2])
        return f"{mount.path} is {'full' if mount.full else 'not full any more'}"

    def _clock(self, rng: Random) -> None:
        self.host.now_s += rng.choice((0.5, 11.0, 5000.0))
        self.host.wall_s = max(0.0, self.host.wall_s + rng.choice((-1e6, 1e6, 3600.0)))

    # --- what must hold ---------------------------------------------------------------------------

    def _check_loaded(self, loaded: Loaded, least: int, most: int, line: list[str]) -> None:
        """The newest intact checkpoint was restored, or what there is was refused by name."""
        saves = self.host.oracle.saves
        steps = [f"{saves[each].step}:{each[:6]}" for each in line]
        at = line.index(loaded.save.save_id) if loaded.save is not None else -1
        where = f"line {steps}, intact up to {least}, at most {most}, restored {at}; "
        where += f"refused {loaded.refused}; {loaded.plan.incomplete} {loaded.plan.warnings}"
        if loaded.plan.incomplete:
            assert self.disturbed, f"a tier does not answer: {where}"
            return
        assert at >= least, f"a newer intact checkpoint was passed over: {where}"
        assert at <= most, f"something was restored that lies nowhere: {where}"

    def finish(self) -> None:
        """Everything is repaired; then nothing may be lost, and all must go on."""
        host, rng = self.host, Random(f"finish {self.seed}")
        host.fault = None
        for mount in host.fs.mounts:
            mount.full = False
        how = rng.choice(("as it is", "agent killed", "power cut"))
        self.trace.append(f"--- finish: {how}")
        if how == "agent killed":
            host.agent_gone()
        elif how == "power cut":
            self._power_gone()
        self._trainer_gone()
        for zombie in self.zombies:
            zombie.die()
        self._settle()
        for stream in host.settings.streams:
            least, _, line = host.oracle.bounds(stream)
            guaranteed = host.oracle.guaranteed(stream)
            saves = host.oracle.saves
            assert guaranteed <= least, (
                f"lost: step {saves[line[guaranteed]].step} of {stream} was committed and unharmed "
                f"({host.oracle.kept}), intact is only {line[: least + 1][-1:]}"
            )
        self.trace.append("load: " + self._start(rng, back=False))
        if rng.random() < 0.5:
            self._go_on(rng)

    def _settle(self) -> None:
        """All tiers are attached, and have copied what they miss."""
        for tier in self.host.settings.tiers:
            for _ in range(SPILLS_MAX):
                self.host.spill(tier)
                worker = self.host.workers().get(tier)
                if worker is None or (worker.catalog is not None and worker.is_idle()):
                    break

    def _go_on(self, rng: Random) -> None:
        """A save of each stream works, arrives everywhere, and is what the next start restores."""
        host = self.host
        assert self.trainer is not None
        last = {}
        for stream in host.settings.streams:
            self.step += host.settings.every
            self.step -= self.step % host.settings.every
            last[stream] = self._saved(self.trainer, stream, SIZES[0])
            for tier in last[stream].tiers:
                for _ in range(SPILLS_MAX):
                    if not waiting_in(host.workers()[tier]):
                        break
                    host.spill(tier)
                outcome = host.workers()[tier].outcome(last[stream].save_id)
                assert outcome.level == "done", f"{stream} does not reach {tier}: {outcome}"
        self._trainer_gone()
        host.agent_gone()
        self._settle()
        host.as_agent(lambda node: node.reap())
        self._check_leaks()
        self._start(rng, back=False)
        if rng.random() < 0.5 and all(set(s.tiers) for s in last.values()):
            self._power_gone()
            self.trace.append("--- power cut at last")
            self._settle()
        self.trainers += 1
        trainer = Trainer(host, self.trainers)
        for stream, save in last.items():
            loaded = trainer.load(stream)
            assert loaded.save is save, (
                f"the last save of {stream}, step {save.step}, is not restored: "
                f"{loaded.save and loaded.save.step}, {loaded.refused}"
            )

    def _check_leaks(self) -> None:
        """No slot is taken for nothing, nothing unfinished lies in a tier."""
        host = self.host
        assert host.node is not None
        namespace = host.node._registry.namespace("run")
        kept = namespace.kept_segments()
        for label, _ in host.oracle.slots().values():
            if label is not None and label.state != "free" and label.segment_id not in kept:
                raise AssertionError(f"slot of nobody: {label}")
        for tier in host.settings.tiers:
            files = host.fs.files(f"/sim/{tier}/run")
            left = [name for name in files if name.startswith("tmp/")]
            assert not left, f"left in {tier}: {left}"


class _Bugs(logging.Handler):
    """What the agent's top-level handlers caught: for a user a log line, here a failure."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.found: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info:
            self.found.append(record)


def run_case(
    seed: int, counts: Counter[tuple[str, str]] | None = None, *, length: int | None = None
) -> Case:
    """Run one case; use it inside :func:`~tests.simulation.system.simulated`.

    Raises:
        CaseFailed: An invariant does not hold, or the product raised what it must not.
    """
    settings = Settings.draw(Random(f"settings {seed}"))
    case = Case(seed, Host(seed, settings), Counter() if counts is None else counts)
    bugs = _Bugs()
    logger = logging.getLogger("tieredckpt")
    level = logger.level
    logger.addHandler(bugs)
    logger.setLevel(logging.ERROR)
    steps = schedule(seed)[:length]
    try:
        for step in steps:
            case.trace.append(f"> {step.operation}")
            case.carry_out(step)
        case.finish()
        for record in bugs.found:
            raise AssertionError(record.getMessage()) from record.exc_info[1]  # type: ignore[index]
    except Exception as error:
        trace = "\n  ".join(case.trace)
        raise CaseFailed(
            f"seed {seed} (length {len(steps)}): {error}\n  {settings}\n  {trace}"
        ) from error
    finally:
        logger.removeHandler(bugs)
        logger.setLevel(level)
    return case


def shrink(seed: int) -> int:
    """The shortest schedule of a failing seed that still fails."""
    for length in range(len(schedule(seed)) + 1):
        try:
            run_case(seed, length=length)
        except CaseFailed:
            return length
    raise ValueError(f"seed {seed} does not fail")


def main() -> None:
    with simulated():
        seed = int(sys.argv[1])
        length = int(sys.argv[2]) if len(sys.argv) > 2 else None
        case = run_case(seed, length=length)
        print(case.host.settings)
        print("\n".join(case.trace))


if __name__ == "__main__":
    main()
