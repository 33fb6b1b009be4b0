"""Scenarios ``hosts``: from the loss of a host to the first new update, and the bits after many.

Two hosts with two ranks each, and a standby host, on loopback addresses. A host that is lost loses
all its processes, its agent and its memory at once. Under torchrun a manager that knows of the loss
at once ends the other host's ranks, too, and starts both on the hosts that are left: a rendezvous
that finds out by itself takes longer.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from benchmarks import engines
from benchmarks.live.bench import Bench
from benchmarks.live.journal import (
    Event,
    Restart,
    compared,
    events_of,
    recoveries_of,
    restart_after,
)
from benchmarks.live.runs import TAIL_CHARS, Job, RunError, environment
from benchmarks.measure import percentile
from benchmarks.processes import ROOT

NAMES = ("first", "second", "third")
PER_HOST = 2
SLEEP_S = 0.05
SAVE_EVERY = 5
LOST_STEP, STEPS = 13, 24
ROUNDS = 3
LOSSES, SEED = 20, 31
UNTIL_S = 120.0
POLL_S = 0.01
LIVE, TORCHRUN = "live, standby host ready", "torchrun + engine.load"


@dataclass
class Hosts:
    """One training on several hosts. A context manager that ends and removes everything."""

    folder: Path
    loop: str
    steps: int
    sleep_s: float = SLEEP_S
    exact: bool = False
    running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    _starts: int = 0

    def __enter__(self) -> Hosts:
        self.folder.mkdir(mode=0o700)
        token = self.folder / "token"
        token.write_text(secrets.token_hex(32))
        token.chmod(0o600)
        return self

    def __exit__(self, *exc: object) -> None:
        for name in list(self.running):
            self.destroy(name)

    # --- hosts ------------------------------------------------------------------------------------

    def start(self, name: str, *, stands_by: bool) -> None:
        """Start a host with an empty memory under ``tieredckpt run``."""
        command = ["tieredckpt", "run", "--nnodes", "2", "--rdzv-id", "bench", "--standby", "0"]
        command += ["--config", str(self._config(name)), "--unwind", "10", "--max-restarts", "1000"]
        self._start(name, [*command, *(["--standby-host"] if stands_by else [])])

    def launch(self, names: tuple[str, ...]) -> None:
        """Start all under torchrun."""
        self._starts += 1
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        for number, name in enumerate(names):
            command = ["torch.distributed.run", "--nnodes", str(len(names)), "--master-addr"]
            command += ["127.0.0.1", "--master-port", str(port), "--node-rank", str(number)]
            self._config(name)
            self._start(name, command)

    def _config(self, name: str) -> Path:
        runtime = self.folder / f"rt-{name}"
        runtime.mkdir(mode=0o700, exist_ok=True)
        addresses = [f"127.80.0.{number + 1}" for number in range(len(NAMES))]
        config: dict[str, object] = {
            "namespace": "benchmark-hosts",
            "memory": {"capacity": "512MiB", "keep": {"last": 2}, "replicas": 1},
            "agent": {"runtime_dir": str(runtime), "idle_timeout": "2 min"},
            "network": {"cidr": f"{addresses[NAMES.index(name)]}/32"},
        }
        if self.loop == "live":  # under torchrun the process group finds hosts, and makes a token
            config["discovery"] = {"static": addresses}
            config["security"] = {"token_file": str(self.folder / "token")}
        path = self.folder / f"{name}.yaml"
        path.write_text(json.dumps(config))
        return path

    def _start(self, name: str, command: list[str]) -> None:
        script = ["-m", "benchmarks.live.train", "--folder", str(self.folder)]
        script += ["--config", str(self.folder / f"{name}.yaml"), "--disk", str(self.folder)]
        script += ["--loop", self.loop, "--steps", str(self.steps), "--sleep", str(self.sleep_s)]
        script += ["--save-every", str(SAVE_EVERY), "--first-generation", str(self._starts or 1)]
        script += ["--exact"] if self.exact else []
        with (self.folder / f"{name}.log").open("ab") as output:
            self.running[name] = subprocess.Popen(
                [sys.executable, "-m", *command, "--nproc-per-node", str(PER_HOST), *script],
                cwd=ROOT,
                env={
                    **environment(self.folder),
                    "TIEREDCKPT_NODE_NAME": name,
                    "GLOO_SOCKET_IFNAME": "lo",
                },
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )

    def destroy(self, name: str) -> None:
        """End all processes of a host and its agent at once, and remove its memory."""
        self._kill(name, agent=True)
        shutil.rmtree(self.folder / f"rt-{name}", ignore_errors=True)

    def stop(self, name: str) -> None:
        """End the launcher and ranks of a host; its agent and memory stay."""
        self._kill(name, agent=False)

    def _kill(self, name: str, *, agent: bool) -> None:
        marks = [self.mark(name)]
        marks += [os.fsencode(self.folder / f"rt-{name}")] if agent else []
        process = self.running.pop(name)
        for pid in [process.pid, *_processes(marks)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()

    # --- the training -----------------------------------------------------------------------------

    def output(self) -> list[str]:
        """The lines of all hosts, one host after the other."""
        texts = [path.read_text(errors="replace") for path in sorted(self.folder.glob("*.log"))]
        return [line for text in texts for line in text.splitlines()]

    def wait(self, until: Callable[[], bool]) -> None:
        """Read the journal until then. Raises RunError: a host has failed, or it is too late."""
        limit_s = time.monotonic() + UNTIL_S
        journal = self.folder / "journal"
        while True:
            if journal.exists():
                self.events = events_of(journal.read_text())
            if until():
                return
            codes = {name: process.poll() for name, process in self.running.items()}
            if any(codes.values()) or time.monotonic() > limit_s:
                tail = "\n".join(self.output())[-TAIL_CHARS:]
                raise RunError(f"{self.loop}: {codes}\n{tail}")
            time.sleep(POLL_S)

    def has_started(self, count: int) -> bool:
        """Whether so many processes have imported everything."""
        return len(list(self.folder.glob("started-*"))) >= count

    def mark(self, name: str) -> bytes:
        """What the command lines of all processes of a host contain, but for its agent's."""
        return os.fsencode(self.folder / f"{name}.yaml")

    def pid_of(self, rank: int) -> int:
        """The process of a rank in the newest generation."""
        return int([e["pid"] for e in self.events if e["rank"] == rank][-1])

    @property
    def step(self) -> int:
        """The newest update of any rank."""
        return max((e["step"] for e in self.events if e["kind"] == "update"), default=0)

    @property
    def generation(self) -> int:
        """The newest one in which a rank has made an update."""
        return max((e["generation"] for e in self.events if e["kind"] == "update"), default=0)

    def is_done(self) -> bool:
        """Whether all hosts have ended well."""
        return all(process.poll() == 0 for process in self.running.values())


def _processes(marks: list[bytes]) -> Iterator[int]:
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                line = (entry / "cmdline").read_bytes()
                if any(mark in line for mark in marks):
                    yield int(entry.name)


def host_lost(bench: Bench) -> None:
    """Each host in turn. The one that leads has a row of its own: its loss is noticed later."""
    steps: dict[str, list[float]] = {LIVE: [], TORCHRUN: []}
    rows: list[list[str]] = []
    for lost, what in ((NAMES[1], "a host"), (NAMES[0], "the host that leads")):
        updated: dict[str, list[float]] = {LIVE: [], TORCHRUN: []}
        for number in range(1 if bench.quick else ROUNDS):
            for name, run in ((LIVE, _live), (TORCHRUN, _torchrun)):
                bench.report(f"{name}, {what} lost", number, ROUNDS)
                restart = run(bench.shm / f"{len(rows)}", lost)
                updated[name].append(restart.updated)
                steps[name].append(float(restart.lost))
                seconds = (restart.begun, restart.loaded, restart.updated)
                rows.append([name, what, *(f"{each:.2f}" for each in seconds), str(restart.lost)])
        bench.ratio(
            f"loss of {what} to first update, standby host ready", updated[LIVE],
            updated[TORCHRUN], target=0.35,
            limit_name="torchrun, all ranks restarted at once, engine.load from peers' memory",
        )  # fmt: skip
    bench.at_most(
        "steps lost with a host", steps[LIVE], value=max(steps[LIVE]), unit="steps", target=0,
        note=f"torchrun lost {percentile(steps[TORCHRUN], 0.5):g}.",
    )  # fmt: skip
    bench.table(
        "Seconds since the loss of a host until all ranks ...",
        ("run", "lost", "are in train", "have their state", "have made an update", "steps lost"),
        rows,
    )


def _fault(hosts: Hosts) -> Event:
    return {"at": time.time(), "step": hosts.step, "generation": hosts.generation}


def _live(folder: Path, lost: str) -> Restart:
    with Hosts(folder, "live", STEPS) as hosts:
        for name in NAMES:
            hosts.start(name, stands_by=name == NAMES[2])
        hosts.wait(lambda: hosts.has_started(3 * PER_HOST) and hosts.step >= LOST_STEP)
        fault = _fault(hosts)
        hosts.destroy(lost)
        hosts.wait(hosts.is_done)
        return restart_after(hosts.events, fault)


def _torchrun(folder: Path, lost: str) -> Restart:
    with Hosts(folder, "engine", STEPS) as hosts:
        hosts.launch(NAMES[:2])
        hosts.wait(lambda: hosts.step >= LOST_STEP)
        fault = _fault(hosts)
        hosts.destroy(lost)
        (left,) = hosts.running
        hosts.stop(left)
        hosts.launch((left, NAMES[2]))
        hosts.wait(hosts.is_done)
        engines.stop_agents(folder)
        return restart_after(hosts.events, fault)


def hosts_identical(bench: Bench) -> None:
    """Losses of ranks and of their hosts, drawn at random; a lost host comes back and stands by."""
    losses, random = 3 if bench.quick else LOSSES, Random(SEED)
    drawn: list[str] = []
    with Hosts(bench.shm / "hosts", "live", 10**6, exact=True) as hosts:
        for name in NAMES:
            hosts.start(name, stands_by=name == NAMES[2])
        started = PER_HOST * len(NAMES)
        for number in range(losses):
            bench.report("random losses", number, losses)
            hosts.wait(lambda count=started: hosts.has_started(count))  # type: ignore[misc]
            step, generation = hosts.step + random.randrange(2, 8), hosts.generation
            hosts.wait(lambda at=step: hosts.step >= at)  # type: ignore[misc]
            pid = hosts.pid_of(random.randrange(2 * PER_HOST))
            name = next(each for each in NAMES if pid in _processes([hosts.mark(each)]))
            if random.random() < 0.5:
                os.kill(pid, signal.SIGKILL)
                drawn.append("rank")
                started += 1
            else:
                hosts.destroy(name)
                drawn.append(name)
                started += PER_HOST
            hosts.wait(lambda last=generation: hosts.generation > last)  # type: ignore[misc]
            if drawn[-1] == name:
                hosts.start(name, stands_by=True)
        last = hosts.step
        hosts.wait(lambda: hosts.step >= last + 3)
        events, output = hosts.events, hosts.output()
    steps = max(each["step"] for each in events if each["kind"] == "update")
    reference = bench.run("undisturbed", Job(loop="live", steps=steps, exact=True))
    found = compared(reference.events, events, steps)
    lost = sum(each.lost for each in recoveries_of(output))
    bench.at_most(
        f"{losses} random losses of ranks and hosts: updates whose bits differ",
        [float(len(found.differing))], target=0,
        note=f"{found.rows} updates: loss, sample ids, buffers, scale. Lost: {', '.join(drawn)}.",
    )  # fmt: skip
    bench.at_most(
        f"{losses} random losses of ranks and hosts: steps lost",
        [float(lost)], unit="steps", target=0,
        note=f"{found.executed} executed of {steps}.",
    )  # fmt: skip
