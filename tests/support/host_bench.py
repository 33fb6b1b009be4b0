"""Carries out one case of losing, cutting and slowing hosts, and judges what comes back.

The ledger knows which saves were reported as committed and which as replicated. From that alone
it says what a restart must bring: the newest one that was reported as replicated, or a newer one;
every byte of it as it was saved, on every rank. Contents are computed from (step, seed).
"""

from __future__ import annotations

import os
import random
import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.faults import ForkedAgent, Trainer, eventually, state_of
from tests.support.hosts import Cluster, Host, HostJob
from tieredckpt.errors import TieredCkptError

DEADLINE_S = 120.0
SILENT = 0.3
"""How often a lost host does not even refuse connections: who asks it waits seconds for that."""


@dataclass(frozen=True)
class HostCase:
    """One case; its text brings it back.

    Attributes:
        operation: What the job is doing.
        fault: What happens.
        stage: Where: a failpoint at which a process is stopped, or a word.
        seed: Of everything that is left open.
    """

    operation: str
    fault: str
    stage: str
    seed: int

    def __str__(self) -> str:
        return f"{self.operation}/{self.fault}/{self.stage}/seed={self.seed}"

    @classmethod
    def parse(cls, text: str) -> HostCase:
        """The inverse of ``str``. Raises ValueError."""
        operation, fault, stage, seed = text.split("/")
        return cls(operation, fault, stage, int(seed.removeprefix("seed=")))


@dataclass
class Saved:
    """A checkpoint that may exist."""

    step: int
    seed: int
    save_id: str | None
    """None: it was not reported as committed."""
    replicated: bool = False
    """It was reported as replicated."""


@dataclass
class HostLedger:
    """The time line as its owner may believe it, oldest first."""

    line: list[Saved] = field(default_factory=list)

    def add(self, step: int, seed: int, save_id: str | None) -> None:
        self.line = [each for each in self.line if each.step != step]
        self.line.append(Saved(step, seed, save_id))

    def replicated(self, step: int) -> None:
        """A step was reported as replicated."""
        next(each for each in self.line if each.step == step).replicated = True

    def went_on_from(self, step: int) -> None:
        """Training restored ``step``: what came after it is abandoned."""
        self.line = [each for each in self.line if each.step <= step]

    def seeds(self) -> dict[int, int]:
        return {each.step: each.seed for each in self.line}

    def least(self) -> int:
        """The oldest step that a restart may bring; 0: it may find nothing."""
        return max((each.step for each in self.line if each.replicated), default=0)


class HostBench:
    """Hosts and a job for one case.

    Args:
        case: Its seed draws sizes, the number of saves, who is lost and how the job starts again.
        folder: For disks.
        racks: Given to the cluster.
        replicas: Copies on other hosts.
        proxied: The last host's agent is behind a proxy.
    """

    def __init__(
        self,
        case: HostCase,
        folder: Path,
        *,
        racks: int = 0,
        replicas: int = 1,
        proxied: bool = False,
    ) -> None:
        self.case = case
        self.chance = random.Random(str(case))
        self.replicas = replicas
        self.mib = self.chance.choice((0.5, 0.5, 0.5, 2.0, 2.0, 2.0, 20.0))
        self.before = self.chance.randrange(1, 4)
        self.keep = self.chance.choice((1, 2))
        self.seed = self.chance.randrange(1 << 30)
        self.cluster = Cluster(folder, 4, racks=racks)
        self.proxy = self.cluster.hosts[-1].behind_proxy(seed=case.seed) if proxied else None
        self.ledger = HostLedger()
        self.lost: list[Host] = []
        self.starts = 0
        self.step = 0
        self.world = 4
        self.bandwidth: str | None = None
        self.log: list[str] = []
        self.job: HostJob

    def __str__(self) -> str:
        return (
            f"{self.case}: {self.mib} MiB, keep {self.keep}, replicas {self.replicas}, "
            f"{'; '.join(self.log)}"
        )

    def note(self, what: str) -> None:
        self.log.append(what)

    def __enter__(self) -> HostBench:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            error.add_note(str(self))
        self.cluster.__exit__(kind, error, trace)

    # --- the job ---------------------------------------------------------------------------------

    def start(self, hosts: list[Host] | None = None, *, wait_s: float = 2.0) -> HostJob:
        """A new start of the job, with contents of its own; the engines are open."""
        self.starts += 1
        used = hosts or self.cluster.hosts
        self.cluster.start_agents(used)
        self.job = HostJob(
            self.cluster, used, seed=self.seed + self.starts, mib=self.mib, saved_by=self.world
        )
        memory: dict[str, Any] = {"replicas": self.replicas, "keep": {"last": self.keep}}
        if self.bandwidth is not None:
            memory["replication_bandwidth"] = self.bandwidth
        self.job.open(memory=memory, recovery={"wait": f"{wait_s}s"})
        return self.job

    def begin_save(self) -> int:
        self.step += 1
        self.job.start("save", self.step)
        return self.step

    def end_save(self, step: int) -> list[Any]:
        """Enter what has become of a save; what each rank returned or raised."""
        found = self.job.outcomes(DEADLINE_S)
        failed = [each for each in found if isinstance(each, BaseException)]
        # The coordinator learns the id; that all ranks returned says that it is a checkpoint.
        self.ledger.add(step, self.job.seed, None if failed else found[0])
        self.note(f"save {step}: {found[0]!r:.100}")
        return found

    def save(self, *, replicated: bool = False) -> int:
        """A save that has no reason to fail; ``replicated``: its copies have none either."""
        found = self.end_save(self.begin_save())
        for each in found:
            assert not isinstance(each, BaseException), f"{each!r}: {self}"
        if replicated:
            self.replicate(self.step)
        return self.step

    def replicate(self, step: int) -> None:
        """Wait until a step is replicated; every rank hears it."""
        self.must("wait", step, "replicated", DEADLINE_S)
        self.ledger.replicated(step)
        self.note(f"{step} is replicated")

    def repaired(self, step: int) -> None:
        """Wait until a step is replicated *again*: each segment lies in the memory of enough hosts
        when that is said, whatever was said before hosts were lost.
        """
        self.replicate(step)
        found = self.must("copies", step)
        wanted = next((segments for segments, _ in found if segments), [])
        held = [set(here) for _, here in found]
        assert wanted, str(self)
        for each in wanted:
            assert sum(each in here for here in held) > self.replicas, f"{each}: {self}"

    def must(self, command: str, *arguments: Any) -> list[Any]:
        self.job.start(command, *arguments)
        found = self.job.outcomes(DEADLINE_S)
        for each in found:
            if isinstance(each, BaseException):
                raise each
        return found

    def prepare(self, saves: int | None = None) -> None:
        """A job that has saved some checkpoints, the last of them replicated."""
        self.start()
        found = self.must("load")
        assert [each.step for each in found] == [None] * self.world, str(self)
        for i in range(count := self.before if saves is None else saves):
            self.save(replicated=i == count - 1)

    # --- what happens ----------------------------------------------------------------------------

    def lose(self, *hosts: Host) -> None:
        """Hosts are gone; the job, which hangs, is ended as a scheduler does."""
        for host in hosts:
            silent = self.chance.random() < SILENT
            host.kill(silent=silent)
            self.lost.append(host)
            self.note(f"{host.name} is lost{', silently' if silent else ''}")
        self.job.end()

    def hold(self, process: Trainer | ForkedAgent, stage: str) -> int:
        """Arm a failpoint that stops a process; its id."""
        process.arm(f"{stage}=stop")
        return process.pid

    def wait_stopped(self, pid: int) -> None:
        """Until a process is at the stage where it stops."""
        eventually(lambda: state_of(pid) == "T", deadline_s=DEADLINE_S)

    def let_go(self, pid: int) -> None:
        os.kill(pid, signal.SIGCONT)

    # --- afterwards ------------------------------------------------------------------------------

    def restart(self, how: str = "") -> Any:
        """A new start, with fresh hosts for lost ones or without; what it loads is judged."""
        self.job.end()
        how = how or self.chance.choice(("replaced", "replaced", "fewer", "more", "others"))
        hosts = self.cluster.hosts
        for host in self.lost:
            if how == "fewer":
                hosts.remove(host)
            else:
                self.cluster.replace(host)
        self.lost.clear()
        if how == "more":
            self.cluster.add()
        if how == "others":
            shift = self.chance.randrange(1, len(hosts))
            hosts[:] = hosts[shift:] + hosts[:shift]
        self.note(f"restart, {how}: {', '.join(host.name for host in hosts)}")
        self.start()
        return self.load()

    def load(self) -> Any:
        """``engine.load`` on all ranks, judged; rank 0's answer."""
        self.job.start("load", seeds=self.ledger.seeds())
        found = self.job.outcomes(DEADLINE_S)
        self.note(f"load: {found[0]!r:.300}")
        least = self.ledger.least()
        if any(isinstance(each, BaseException) for each in found):
            assert least == 0, f"{found[0]!r}, but step {least} was replicated: {self}"
            for each in found:
                assert isinstance(each, TieredCkptError), f"{each!r}: {self}"
            return found[0]
        assert len({(each.step, each.save_id) for each in found}) == 1, f"{found}: {self}"
        loaded = found[0]
        for each in found:
            assert each.wrong == [], f"{each.wrong}: {self}"
        if loaded.step is None:
            assert least == 0, f"nothing was found, but step {least} was replicated: {self}"
            return loaded
        assert loaded.step >= least, f"step {loaded.step}, not {least}: {self}"
        by_step = {each.step: each for each in self.ledger.line}
        assert loaded.step in by_step, f"step {loaded.step} of {list(by_step)}: {self}"
        assert by_step[loaded.step].save_id in (None, loaded.save_id), f"{loaded}: {self}"
        self.ledger.went_on_from(loaded.step)
        self.step = loaded.step
        return loaded

    def go_on(self) -> None:
        """Two more saves, copied; then any host is lost, and what was copied comes back."""
        self.save()
        self.save(replicated=True)
        if self.chance.random() < 0.35:
            self.lose(self.chance.choice(self.job.hosts))
            self.restart("replaced")
