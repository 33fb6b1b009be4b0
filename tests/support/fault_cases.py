"""What each kind of case of the fault matrix does to a bench."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.support.damage import Damage, take_inventory
from tests.support.fault_bench import BEFORE_COMMIT, DAY_S, Bench, Job
from tests.support.faults import Died, Loaded, Trainer, eventually, state_of
from tests.support.matrix import Case
from tieredckpt.errors import (
    NamespaceInUseError,
    StaleAttemptError,
    TieredCkptError,
    UsageError,
    WaitError,
)

WAIT_S = 60.0
SAVING = ("save", "async", "spill", "retention")


def run_case(case: Case, folder: Path) -> None:
    """Carry out a case below ``folder``. Raises AssertionError with all that was drawn."""
    with Bench(case, folder) as bench:
        try:
            if case.fault in ("kill", "stop"):
                _process(bench)
            elif case.victim == "files":
                _files(bench)
            elif case.fault == "slow":
                _slow(bench)
            elif case.stage == "rival":
                _rival(bench)
            elif case.stage == "clock":
                _clock(bench)
            elif case.stage.partition(".")[2] in ("once", "lasting", "read"):
                _broken_os(bench)
            else:
                _host(bench)
            bench.restart_and_judge()
        except BaseException as error:
            error.add_note(f"--- {bench}\n--- once more: FAULT_CASE='{case}' make test "
                           "PYTEST_ARGS=tests/integration/test_fault_matrix.py")  # fmt: skip
            raise


# --- the operation -------------------------------------------------------------------------------


class Operation:
    """What is under way when the fault strikes: from :meth:`begin` to :meth:`end`."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.name = bench.case.operation
        self.step = 0
        self.armed = ""
        self.victim: Trainer | None = None
        """Of an open, whose engine does not exist yet: who is ``armed`` when it begins."""
        if self.name in ("load", "open"):
            if self.name == "load":
                bench.end_job(bench.job)
                self.job = bench.opened_job()
            else:
                self.job = bench.new_job()
        else:
            self.job = bench.job
            if bench.case.stage == "agent.reserve.after_label":
                # In steady use a slot is granted with the last seal: a new start asks for one.
                bench.end_job(bench.job)
                self.job = bench.opened_job()
                assert bench.load(self.job).step == bench.step
            elif self.name == "async" and ".stage" in bench.case.stage:
                # The first one does not know yet how the next slot is laid out.
                self.step = bench.begin_save(self.job, "async_save")
                assert isinstance(self.end(), str), str(bench)

    @classmethod
    def of(cls, bench: Bench, job: Job, *, name: str = "open") -> Operation:
        """``name`` by a job that is there already."""
        found = cls.__new__(cls)
        found.bench, found.name, found.step, found.job = bench, name, 0, job
        found.armed, found.victim = "", None
        return found

    def begin(self) -> None:
        if self.name == "load":
            self.job.start("load", seeds=self.bench.ledger.seeds())
        elif self.name == "open":
            for each in self.job.trainers:
                armed = self.armed if each is self.victim else ""
                each.start("open", self.bench.site.config, armed)
        else:
            how = "async_save" if self.name == "async" else "save"
            self.step = self.bench.begin_save(self.job, how)

    def end(self, *, died: bool | None = None) -> Any:
        """Its outcome: of a save it is in the ledger, a load goes on from what it restored."""
        if self.step:
            return self.bench.settle_save(self.job, self.step, died=died)
        outcome = self.job.outcomes()[0]
        self.bench.note(f"{self.name}: {outcome!r:.300}")
        return outcome

    def check_load(self, outcome: Any, *, lenient: bool) -> None:
        """What a load under a fault may bring."""
        if self.name == "load" and not isinstance(outcome, Died):
            self.bench.judge(outcome, lenient=lenient)
            if isinstance(outcome, Loaded):
                self.bench.ledger.went_on_from(outcome.step)
        elif isinstance(outcome, BaseException) and not isinstance(outcome, Died):
            assert isinstance(outcome, TieredCkptError), f"{outcome!r}: {self.bench}"


def _make_reachable(bench: Bench) -> None:
    """Retention has something to do, in the tier that is drawn, when the next save comes."""
    if bench.case.operation == "retention":
        while bench.step < bench.keep:
            bench.must_save(bench.job)
        bench.wait_disk(bench.job)


# --- processes that are killed or stopped --------------------------------------------------------


def _process(bench: Bench) -> None:
    case = bench.case
    bench.prepare()
    if "adopt" in case.stage:
        _adoption(bench)
        return
    _make_reachable(bench)
    operation = Operation(bench)
    in_agent = case.stage.startswith(("agent.", "tier."))
    at = "agent" if in_agent else "trainer"
    hit = {"trainer", "agent"} if case.victim == "both" else {case.victim}
    spec = f"{case.stage}={case.fault if at in hit else 'stop'}"
    victim = bench.chance.choice(operation.job.trainers)
    if "commit" in case.stage or case.stage.startswith("load.attempt"):
        victim = operation.job.trainers[0]
    if in_agent:
        bench.agent.arm(spec)
    else:
        victim.arm(spec)
        operation.armed, operation.victim = spec, victim
    operation.begin()
    pids = {"agent": bench.agent.pid, "trainer": victim.pid}
    wanted = "" if case.fault == "kill" and at in hit else "T"

    try:
        _reaches(pids[at], wanted)
    except AssertionError as error:
        raise AssertionError(f"{case.stage} was not reached: {bench}") from error
    number = signal.SIGKILL if case.fault == "kill" else signal.SIGSTOP
    for other in hit - {at}:
        os.kill(pids[other], number)
        _reaches(pids[other], "" if case.fault == "kill" else "T")
    if case.fault == "kill":
        _after_kill(bench, operation, at, hit, pids)
    else:
        _after_stop(bench, operation, at, hit, pids)


def _reaches(pid: int, letter: str) -> None:
    eventually(lambda: state_of(pid) == letter, deadline_s=WAIT_S)


def _adoption(bench: Bench) -> None:
    """A new agent that dies or stands still before it serves; the next one does."""
    job = bench.job
    bench.agent.kill()
    from tests.support.faults import ForkedAgent

    bench.agent = ForkedAgent(
        bench.runtime_dir, f"{bench.case.stage}={bench.case.fault}", wait=False
    )
    wanted = "" if bench.case.fault == "kill" else "T"
    eventually(lambda: state_of(bench.agent.pid) == wanted, deadline_s=WAIT_S)
    if bench.case.fault == "kill":
        bench.new_agent()
    else:
        bench.agent.signal(signal.SIGCONT)
        bench.agent.wait_ready()
    bench.must_save(job)


def _after_kill(
    bench: Bench, operation: Operation, at: str, hit: set[str], pids: dict[str, int]
) -> None:
    if at not in hit:  # it was stopped at its stage when the other one was killed
        os.kill(pids[at], signal.SIGCONT)
    if "agent" in hit and "trainer" not in hit and not bench.auto:
        bench.revive_agent()
    died: bool | None = None
    if hit == {"trainer", "agent"} or (at == "trainer" and hit == {"trainer"}):
        # A tier may be busy with what was saved before: its stages say nothing of this commit.
        elsewhere = bench.case.stage.startswith(("tier.", "agent.spill", "agent.retention"))
        died = None if elsewhere else bench.case.stage not in BEFORE_COMMIT
    outcome = operation.end(died=died)
    if "trainer" in hit:
        if at == "trainer" and bench.world == 1:
            assert isinstance(outcome, Died), f"{outcome!r}: {bench}"
        bench.end_job(operation.job)
        return
    operation.check_load(outcome, lenient=True)
    if operation.name in SAVING:
        bench.must_save(operation.job)  # the trainer goes on as if nothing had been


def _after_stop(
    bench: Bench, operation: Operation, at: str, hit: set[str], pids: dict[str, int]
) -> None:
    if at not in hit:
        os.kill(pids[at], signal.SIGCONT)
    if hit == {"trainer"}:
        _zombie(bench, operation, pids["trainer"])
        return
    if bench.long and hit == {"agent"}:
        # Nobody answers until the deadline; then both go on.
        operation.job.trainers[0]._pipe.poll(WAIT_S)
    order = sorted(hit)
    bench.chance.shuffle(order)
    for each in order:
        os.kill(pids[each], signal.SIGCONT)
    outcome = operation.end()
    operation.check_load(outcome, lenient=True)
    if operation.name in SAVING:
        bench.must_save(operation.job)


def _zombie(bench: Bench, operation: Operation, pid: int) -> None:
    """The trainer stands still, another start takes over, and then the first one goes on."""
    at_rest = not bench.case.stage.startswith(("agent.", "tier."))
    before = [each.step for each in bench.ledger.line]
    if operation.step:
        bench.ledger.add(operation.step, operation.job.seed, None, certain=False)
    new = bench.opened_job(seed=bench.seed + 1)
    if at_rest and bench.chance.random() < 0.4:
        bench.note("a new agent")
        bench.new_agent()
    loaded = bench.load(new)
    bench.judge(loaded)
    bench.ledger.went_on_from(loaded.step)
    bench.must_save(new)
    os.kill(pid, signal.SIGCONT)
    outcome = operation.job.outcomes()[0]
    bench.note(f"zombie: {outcome!r:.300}")
    if operation.step:
        if isinstance(outcome, str):
            assert loaded.step == operation.step, f"a zombie committed: {bench}"
        elif operation.step not in before and loaded.step != operation.step:
            assert isinstance(outcome, StaleAttemptError), f"{outcome!r}: {bench}"
        late = operation.job.all("save", bench.step + 100)[0]
        assert isinstance(late, StaleAttemptError), f"{late!r}: {bench}"
    elif operation.name == "load":
        # It may not abandon what was saved while it stood still: it chose afterwards, or is told,
        # or had opened its attempt before the other one, and is told at its next save.
        assert isinstance(outcome, Loaded | StaleAttemptError), f"{outcome!r}: {bench}"
        if isinstance(outcome, Loaded) and outcome.step == bench.step:
            bench.end_job(operation.job)  # contents that it could not know when it was asked
            return
        assert isinstance(outcome, StaleAttemptError) or outcome.wrong == [], f"{outcome}: {bench}"
        late = operation.job.all("save", bench.step + 100)[0]
        assert isinstance(late, StaleAttemptError), f"{late!r}: {bench}"
        bench.end_job(operation.job)
    bench.judge_listed(new)
    if operation.name != "open":
        bench.must_save(new)


# --- an agent that is slow to answer -------------------------------------------------------------


def _slow(bench: Bench) -> None:
    case = bench.case
    bench.prepare()
    if "adopt" in case.stage:
        bench.new_agent(f"{case.stage}=slow")
        bench.must_save(bench.job)
        return
    _make_reachable(bench)
    operation = Operation(bench)
    bench.agent.arm(f"{case.stage}=slow")
    begun_s = time.monotonic()
    operation.begin()
    outcome = operation.end()
    assert not isinstance(outcome, BaseException), f"{outcome!r}: {bench}"
    operation.check_load(outcome, lenient=False)
    if operation.step and bench.has_disk:
        bench.wait_disk(bench.job)
    assert time.monotonic() - begun_s < WAIT_S


# --- damaged files -------------------------------------------------------------------------------

SPILLING = ("agent.spill.segment", "agent.spill.before_plan", "agent.spill.before_manifest")
RETAINING = ("agent.retention.before_manifest_delete", "agent.retention.after_manifest_delete")


def _files(bench: Bench) -> None:
    """Damage before, under or beside the operation; the oracle takes away what it cost."""
    case = bench.case
    bench.prepare()
    _make_reachable(bench)
    if case.operation == "open":
        bench.end_job(bench.job)
        bench.agent.kill()
        _damage(bench)
    elif case.operation == "load":
        bench.end_job(bench.job)
        _damage(bench)
    elif case.operation == "save":
        _damage(bench)
        bench.save(bench.job)
    else:
        stage = bench.chance.choice(SPILLING if case.operation == "spill" else RETAINING)
        bench.note(f"at {stage}")
        bench.agent.arm(f"{stage}=stop")
        step = bench.begin_save(bench.job)
        eventually(lambda: state_of(bench.agent.pid) == "T", deadline_s=WAIT_S)
        if case.operation == "retention":
            # The save is under way as well: whether it is committed shows later.
            bench.ledger.add(step, bench.seed, None, certain=False)
        else:
            bench.settle_save(bench.job, step)
        _damage(bench)
        bench.agent.signal(signal.SIGCONT)
        if case.operation == "retention":
            bench.ledger.line.pop()
            bench.settle_save(bench.job, step)
        # The spill ends, well or with a reason.
        try:
            bench.job.trainers[0].wait(step, "disk", 10.0)
        except (WaitError, TieredCkptError) as error:
            bench.note(f"wait: {error}")


def _damage(bench: Bench) -> None:
    case, chance = bench.case, bench.chance
    kind, _, tier = case.stage.partition(".")
    steps = [each.step for each in reversed(bench.ledger.line)]
    inventory = take_inventory(bench.folder, steps)
    present = {c.step for c in inventory.copies}
    inventory.line = [step for step in steps if step in present]
    damage = bench.damage = Damage(
        inventory, {"shm": bench.runtime_dir, "disk": bench.folder / "disk"}
    )
    fault = {"older": "swap"}.get(case.fault, case.fault)
    if kind == "segment":
        mine = [c for c in inventory.copies if c.tier == tier]
        newest = [c for c in mine if c.step == max(c.step for c in mine)]
        copy = chance.choice(newest if chance.random() < 0.7 else mine)
        others = [c.path for c in mine if c.step < copy.step]
        if fault == "swap" and not others:
            bench.note("no older version")
            return
        damage.segment(copy, fault, chance.randrange(copy.size), other=others[-1] if others else "")
        return
    mine = [r for r in inventory.records if (r.kind, r.tier) == (kind, tier)]
    if kind == "manifest":
        mine.sort(key=lambda r: r.step)
        if chance.random() < 0.7:
            mine = mine[-2:]
    record = mine[-1]
    others = [r.path for r in mine[:-1]]
    if fault == "swap" and not others:
        bench.note("no older version")
        return
    size = damage.path(record.path).stat().st_size
    damage.record(record, fault, chance.randrange(size), other=others[-1] if others else "")


# --- an operating system that refuses ------------------------------------------------------------


def _folders(bench: Bench, medium: str) -> list[str]:
    if medium == "disk":
        return [f"{bench.folder}/disk/"]
    return [f"{bench.runtime_dir}/{each}" for each in ("ns", "slots", "sessions", "specs")]


def _broken_os(bench: Bench) -> None:
    case, chance = bench.case, bench.chance
    medium, _, how = case.stage.partition(".")
    bench.prepare()
    _make_reachable(bench)
    if case.operation == "open":
        _broken_start(bench, medium, lasting=how == "lasting")
        return
    operation = Operation(bench)
    nth = chance.randrange(1, 4)

    def call(name: str, *args: Any) -> Any:
        if case.victim == "agent":
            return bench.agent.call(name, *args)
        return operation.job.trainers[0].call(name, *args)

    call("break_os", _folders(bench, medium), case.fault, nth, how != "once")
    for _ in range(4):
        operation.begin()
        outcome = operation.end()
        operation.check_load(outcome, lenient=True)
        if case.operation in ("spill", "retention"):
            _until(lambda: call("failed_calls") > 0, 1.0)
        if call("failed_calls"):
            break
    reached = call("failed_calls")
    bench.note(f"{reached} calls failed")
    assert reached or nth > 1 or bench.case.operation in ("load", "retention"), (
        f"not reached: {bench}"
    )
    call("mend_os")
    if operation.name != "load" and bench.has_disk:
        bench.must_save(bench.job)
        bench.wait_disk(bench.job)


def _broken_start(bench: Bench, medium: str, *, lasting: bool) -> None:
    """An agent that starts while a medium fails: it serves what it can, or dies saying why."""
    bench.end_job(bench.job)
    bench.agent.kill()
    nth = bench.chance.randrange(1, 8)
    rule = (_folders(bench, medium), bench.case.fault, nth, lasting)
    from tests.support.faults import ForkedAgent

    bench.agent = ForkedAgent(bench.runtime_dir, broken=rule, wait=False)
    if bench.agent.wait_ready():
        job = bench.new_job()
        opened = job.all("open", bench.site.config)[0]
        bench.note(f"open: {opened!r:.200}")
        if isinstance(opened, BaseException):
            assert isinstance(opened, TieredCkptError), f"{opened!r}: {bench}"
        else:
            loaded = bench.load(job)
            bench.judge(loaded, lenient=True)
            if isinstance(loaded, Loaded):
                bench.ledger.went_on_from(loaded.step)
        bench.agent.call("mend_os")
        bench.end_job(job)
    else:
        bench.note("the agent did not start")
        bench.new_agent()


def _until(check: Callable[[], bool], patience_s: float) -> None:
    until_s = time.monotonic() + patience_s
    while not check() and time.monotonic() < until_s:
        time.sleep(0.01)


# --- a host that is full, read-only or out of descriptors ----------------------------------------


def _fill(folder: Path) -> Path:
    ballast = folder / "ballast"
    until_s = time.monotonic() + WAIT_S
    with ballast.open("wb") as file:
        while True:
            space = os.statvfs(folder)
            try:
                os.posix_fallocate(file.fileno(), 0, max(4096, space.f_bavail * space.f_frsize))
            except OSError as error:
                # A spill took some of it since it was measured; then the kernel gives back all.
                if error.errno != errno.ENOSPC or time.monotonic() > until_s:
                    raise
            else:
                return ballast


def _host(bench: Bench) -> None:
    case = bench.case
    bench.prepare()
    _make_reachable(bench)
    operation = Operation(bench)
    if case.operation == "open":
        bench.end_job(bench.job)
    undo = _exhaust(bench, operation)
    operation.begin()
    outcome = operation.end()
    operation.check_load(outcome, lenient=True)
    undo()
    if operation.name in SAVING:
        bench.must_save(bench.job)
        if bench.has_disk:
            bench.wait_disk(bench.job)


def _exhaust(bench: Bench, operation: Operation) -> Callable[[], object]:
    """Take the host what the case says; the answer gives it back."""
    stage, disk = bench.case.stage, bench.folder / "disk"
    if stage == "limit":
        end = bench.agent if bench.case.victim == "agent" else operation.job.trainers[0]
        limits = end.call("limit_fds", bench.chance.randrange(3))
        return lambda: end.call("unlimit_fds", limits)
    if bench.case.operation == "open" and bench.chance.random() < 0.5:
        bench.new_agent()
    if stage == "disk.remounted":
        mounts = bench.stack.enter_context(contextlib.ExitStack())  # also if the case fails
        mounts.enter_context(_read_only(bench, disk))
        return mounts.close
    return _fill(bench.runtime_dir if stage == "memory.full" else disk).unlink


@contextlib.contextmanager
def _read_only(bench: Bench, folder: Path) -> Iterator[None]:
    """Read-only over its path: the file system itself is busy with what the agent has open.

    The kernel counts who has a file open for writing per mount, and refuses to make a mount
    read-only while there is one (EBUSY, the command's status 32). A mount over ``folder`` may
    have a writer, a spill, as soon as it is there. So it is made read-only where nobody looks, and
    bound over ``folder`` then: a bind mount has the flags of the mount that it is made of from its
    first moment. Files that are open already go on belonging to the mount below.
    """
    aside = bench.folder / "read-only"
    aside.mkdir()
    with contextlib.ExitStack() as mounts:
        for what, where in ((folder, aside), (aside, folder)):
            subprocess.run(["mount", "--bind", str(what), str(where)], check=True)
            mounts.callback(subprocess.run, ["umount", "-l", str(where)], check=True)
            if where is aside:
                subprocess.run(["mount", "-o", "remount,bind,ro", str(where)], check=True)
        assert os.statvfs(folder).f_flag & os.ST_RDONLY
        yield


# --- two jobs, and clocks ------------------------------------------------------------------------


def _rival(bench: Bench) -> None:
    """A second job opens the same namespace while the first one is at work."""
    bench.prepare()
    _make_reachable(bench)
    operation = Operation(bench)
    if operation.name in ("load", "open"):
        for other in [job for job in bench.jobs if job is not operation.job]:
            bench.end_job(other)
        if operation.name == "open":
            operation.job.must("open", bench.site.config)
            operation = Operation.of(bench, operation.job, name="load")
    config = dict(bench.site.config)
    if bench.case.fault == "other config":
        config["memory"] = {**config["memory"], "keep": {"last": bench.keep + 1}}
    rival = bench.new_job(seed=bench.seed + 1)
    operation.begin()
    opened = rival.all("open", config)[0]
    if bench.case.fault == "other config":
        if operation.step:
            assert isinstance(opened, NamespaceInUseError), f"{opened!r}: {bench}"
            assert "keep" in str(opened), f"{opened}: {bench}"
        else:  # who has saved nothing stands in nobody's way
            assert not isinstance(opened, BaseException), f"{opened!r}: {bench}"
        outcome = operation.end()
        assert not isinstance(outcome, BaseException), f"{outcome!r}: {bench}"
        operation.check_load(outcome, lenient=False)
        bench.must_save(operation.job)
        return
    assert not isinstance(opened, BaseException), f"{opened!r}: {bench}"
    without = rival.all("save", bench.step + 50)[0]
    assert isinstance(without, UsageError), f"it saved without a load, {without!r}: {bench}"
    outcome = operation.end()
    if operation.step:
        assert isinstance(outcome, str), f"{outcome!r}: {bench}"
    else:
        operation.check_load(outcome, lenient=False)
    loaded = bench.load(rival)
    bench.judge(loaded)
    bench.ledger.went_on_from(loaded.step)
    for _ in range(bench.chance.randrange(1, 3)):
        bench.must_save(rival)
    late = operation.job.all("save", bench.step + 1)[0]
    assert isinstance(late, StaleAttemptError), f"the first job still saves, {late!r}: {bench}"
    bench.judge_listed(rival)


def _clock(bench: Bench) -> None:
    """Wall clocks jump; nothing but a schedule in minutes looks at them."""
    case, chance = bench.case, bench.chance
    bench.prepare()
    _make_reachable(bench)
    jump_s = chance.choice((3600.0, 400 * DAY_S)) * (-1 if case.fault == "clock back" else 1)

    def jump(job: Job) -> None:
        if case.victim != "agent":
            for each in job.trainers:
                each.call("jump_clock", jump_s)
        if case.victim != "trainer":
            bench.agent.call("jump_clock", jump_s)

    operation = Operation(bench)
    jump(operation.job)
    operation.begin()
    outcome = operation.end()
    assert not isinstance(outcome, BaseException), f"{outcome!r}: {bench}"
    operation.check_load(outcome, lenient=False)
    if operation.step:
        bench.must_save(operation.job)
        if chance.random() < 0.5:
            jump(operation.job)
            bench.must_save(operation.job)
