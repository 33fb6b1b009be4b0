"""Checkpoints outlive every host: they are spilled to a bucket and restored from it alone.

    make demo-s3

Starts a real S3 server on this machine (SeaweedFS; `make` installs it), and trains the GPT of
``train_gpt.py`` with memory, a disk and a bucket as tiers. In the middle of the training all
processes are killed, and memory and disk are deleted, as when a cluster is returned. A new start,
which has only the bucket, continues from there. At the end the loss of each step is compared, as
bits, with an undisturbed run.

The exit status is 0 only if every loss is identical and every byte came from the bucket; 77 if
there is no S3 server for this machine.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from starts import Start, compare, kill, processes_naming

from tieredckpt.errors import AgentError
from tieredckpt.rpc.agent_client import AgentClient
from tieredckpt.testing.s3_server import ACCESS_KEY, BUCKET, SECRET_KEY, S3Server, missing

HERE = Path(__file__).parent
SKIPPED = 77
SPILL_EVERY = 2
"""Saves."""
POLL_S = 0.05
PHASE_DEADLINE_S = 180.0
"""Longest that one start of training may take; on two quiet cores the longest takes 15 s."""

CONFIG = """\
namespace: {namespace}
memory: {{capacity: 512MiB, keep: {{last: 2}}}}
tiers:
  - {{name: disk, url: "file://{disk}", keep: {{last: 2}}}}
  - name: s3
    url: s3://{bucket}/demo
    endpoint: {endpoint}
    allow_http: true                # a server on this machine
    every: {every} steps
    keep: {{last: 2, every: {keep_every} steps}}
    delete_delay: 0 s               # so that the demo shows the deletes; normally 10 min
agent: {{runtime_dir: {runtime}, idle_timeout: 5 min}}
"""


@dataclass
class Result:
    """What came out."""

    stopped_after_step: int = 0
    spilled_step: int | None = None
    restored_step: int | None = None
    bytes_by_source: dict[str, int] = field(default_factory=dict)
    losses_compared: int = 0
    losses_different: list[tuple[str, int]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    seconds: float = 0.0


class Machine:
    """A host: memory, a disk, and what runs there; a context manager that ends and removes it.

    Args:
        name: Of its folders.
        folder: For its disk and its configuration.
        endpoint: Of the store.
        args: The command line.
        namespace: Of the run.
    """

    def __init__(
        self, name: str, folder: Path, endpoint: str, args: argparse.Namespace, namespace: str
    ) -> None:
        self.name, self.folder, self.args = name, folder, args
        self.memory = Path(f"/dev/shm/tieredckpt-s3-{os.getpid()}-{name}")
        self.disk = folder / f"disk-{name}"
        self.config = folder / f"{name}.yaml"
        self.endpoint, self.namespace = endpoint, namespace
        self.child: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Machine:
        self.memory.mkdir(mode=0o700)
        self.disk.mkdir()
        every = SPILL_EVERY * self.args.save_every
        text = CONFIG.format(
            namespace=self.namespace, disk=self.disk, bucket=BUCKET, endpoint=self.endpoint,
            every=every, keep_every=3 * every, runtime=self.memory,
        )  # fmt: skip
        self.config.write_text(text)
        return self

    def __exit__(self, *exc: object) -> None:
        self.destroy()

    def destroy(self) -> None:
        """Kill all processes, delete memory and disk. Idempotent."""
        if self.child is not None and self.child.poll() is None:
            self.child.kill()
            self.child.wait()
        for pid in processes_naming(self.memory):  # the agent
            kill(pid)
        for each in (self.memory, self.disk):
            shutil.rmtree(each, ignore_errors=True)

    def train(self, name: str, *, until: Callable[[Start], bool] = lambda start: False) -> Start:
        """Train to the end; or until told, then it stands still.

        Raises RuntimeError with the end of its output: it failed, or took too long.
        """
        start = Start(name, self.folder / f"{name}.jsonl")
        log = self.folder / f"{name}.log"
        args = self.args
        command = [sys.executable, str(HERE / "train_gpt.py"), f"--config={self.config}"]
        command += [f"--journal={start.journal}", f"--steps={args.steps}", "--batch=1"]
        command += [f"--save-every={args.save_every}", f"--layers={args.layers}"]
        command += [f"--width={args.width}", f"--context={args.context}"]
        with log.open("wb") as output:
            self.child = subprocess.Popen(
                command, stdout=output, stderr=output, stdin=subprocess.DEVNULL,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                start_new_session=True,  # Ctrl-C is for us alone
            )  # fmt: skip
        until_s = time.monotonic() + PHASE_DEADLINE_S
        while (code := self.child.poll()) is None:
            start.refresh()
            if until(start):
                self.child.send_signal(signal.SIGSTOP)
                break
            if time.monotonic() > until_s:
                raise RuntimeError(f"{name} took more than {PHASE_DEADLINE_S:g} s: {tail(log)}")
            time.sleep(POLL_S)
        if code:
            raise RuntimeError(f"{name} failed: {tail(log)}")
        start.refresh()
        return start

    def tool(self, *arguments: str) -> str:
        """What the command line says here."""
        done = subprocess.run(
            [sys.executable, "-m", "tieredckpt", *arguments],
            env={**os.environ, "TIEREDCKPT_CONFIG": str(self.config)},
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError(f"tieredckpt {' '.join(arguments)}: {done.stderr}")
        return done.stdout

    def spilled_step(self) -> int:
        """The newest step that the bucket holds, says the agent."""
        with contextlib.closing(AgentClient(self.memory, deadline_s=30)) as client:
            (found,) = client.status().namespaces
        return next(each.newest_step or 0 for each in found.tiers if each.name == "s3")

    def wait_spilled(self, step: int) -> None:
        """Until the bucket has what was saved at ``step``. Raises RuntimeError."""
        until_s = time.monotonic() + PHASE_DEADLINE_S
        while self.spilled_step() < step:
            if time.monotonic() > until_s:
                raise RuntimeError(f"step {step} does not get into the bucket")
            time.sleep(POLL_S)


def tail(log: Path) -> str:
    """The end of an output."""
    return log.read_text(errors="replace")[-2000:]


def run_story(args: argparse.Namespace, folder: Path, server: S3Server, console: Console) -> Result:
    """All starts of training, and the loss of everything in between."""
    result = Result()

    def say(text: str) -> None:
        console.print(text, highlight=False)

    def show(machine: Machine, *arguments: str) -> None:
        say(f"[bold]$ tieredckpt {' '.join(arguments)}[/]")
        console.print(
            machine.tool(*arguments).rstrip(), highlight=False, markup=False, soft_wrap=True
        )

    def ripe(start: Start) -> bool:
        """Two thirds of the training are done, and the last save was some steps ago."""
        at, every = start.last_step, args.save_every
        return bool(at >= args.steps * 2 // 3 and at % every)

    say(f"[bold]store[/]        SeaweedFS at {server.endpoint}, bucket {BUCKET}")
    say(f"[bold]reference[/]    {args.steps} steps, undisturbed")
    with Machine("calm", folder, server.endpoint, args, "calm") as calm:
        reference = calm.train("reference")
    with Machine("first", folder, server.endpoint, args, "spill-to-s3") as first:
        say("[bold]first start[/]  memory, disk and bucket")
        begun = first.train("first", until=ripe)
        every = SPILL_EVERY * args.save_every
        result.spilled_step = begun.last_step // every * every
        first.wait_spilled(result.spilled_step)
        show(first, "status")
        show(first, "ls")
        show(first, "retention", "plan")
    begun.refresh()
    result.stopped_after_step = begun.last_step
    say(f"             [red]all is lost after step {begun.last_step}[/]: processes killed, memory "
        f"and disk deleted; the bucket has step {result.spilled_step}")  # fmt: skip
    with Machine("second", folder, server.endpoint, args, "spill-to-s3") as second:
        say("[bold]second start[/] another runtime folder, an empty disk")
        show(second, "recovery", "plan")
        went_on = second.train("second")
    event = went_on.of("start")[0]
    result.restored_step, result.bytes_by_source = event["step"], event["bytes_by_source"]
    places = ", ".join(f"{n / 2**20:.1f} MiB from {p}" for p, n in event["bytes_by_source"].items())
    say(f"             restored step {event['step']} in {event['seconds']:.2f} s: {places}")
    result.losses_compared, result.losses_different = compare(reference, [begun, went_on])
    judge(result, reference, [begun, went_on])
    return result


def judge(result: Result, reference: Start, starts: list[Start]) -> None:
    """Fill in ``problems``."""
    problems, wrong = result.problems, result.losses_different
    if wrong:
        problems.append(f"{len(wrong)} of {result.losses_compared} losses differ: {wrong[:5]}")
    absent = reference.losses.keys() - set().union(*(start.losses for start in starts))
    if absent:
        problems.append(f"steps without a loss: {sorted(absent)[:5]}")
    if result.restored_step is None or result.restored_step < (result.spilled_step or 0):
        problems.append(
            f"step {result.restored_step} was restored, and {result.spilled_step} was in the bucket"
        )
    if set(result.bytes_by_source) != {"s3"}:
        problems.append(f"not everything came from the bucket: {result.bytes_by_source}")


def main() -> int:
    """Run the demo; see the exit status above."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add = parser.add_argument
    add("--steps", type=int, default=60, help="steps of a whole run (default 60)")
    add(
        "--save-every", type=int, default=3, metavar="STEPS", help="steps between saves (default 3)"
    )
    add("--keep", type=Path, metavar="FOLDER", help="keep journals and logs here")
    add("--json", action="store_true", help="print the result as JSON on standard output")
    add("--layers", type=int, default=4)
    add("--width", type=int, default=192)
    add("--context", type=int, default=96)
    args = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 150, stderr=args.json)
    if why := missing():
        console.print(f"skipped: {why}", highlight=False)
        return SKIPPED
    os.environ.update({"AWS_ACCESS_KEY_ID": ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": SECRET_KEY})
    os.environ.pop("AWS_SESSION_TOKEN", None)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that everything is cleaned up
    began_s = time.monotonic()
    with contextlib.ExitStack() as stack:
        if args.keep:
            folder = args.keep.absolute()
            folder.mkdir(parents=True, exist_ok=True)
        else:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tck-s3demo-")))
        store = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tck-s3demo-store-")))
        store.chmod(0o755)  # the server runs as nobody
        try:
            server = stack.enter_context(S3Server(store))
            result = run_story(args, folder, server, console)
        except KeyboardInterrupt:
            console.print("interrupted; all started processes are ended")
            return 130
        except (AgentError, RuntimeError, OSError) as error:
            console.print(f"[red bold]failed:[/] {error}", highlight=False)
            return 1
    result.seconds = time.monotonic() - began_s
    for each in result.problems:
        console.print(f"[red bold]{each}[/]")
    if not result.problems:
        lost = result.stopped_after_step - (result.restored_step or 0)
        console.print(
            f"[green bold]{result.losses_compared} losses, every one bit-identical to the "
            f"undisturbed run; lost: {lost} steps of work[/]   ({result.seconds:.0f} s)"
        )
    if args.json:
        print(json.dumps({**vars(result), "ok": not result.problems}, indent=1))
    return 1 if result.problems else 0


if __name__ == "__main__":
    sys.exit(main())
