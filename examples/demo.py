"""The main job, shown: train, kill, damage, wipe, and recover, with every loss bit-identical.

    make demo

Trains the GPT of ``train_gpt.py`` (2 ranks, FSDP2) once without interruption for reference. Then
trains it again and (1) SIGKILLs it in the middle of a save, (2) SIGKILLs trainers and agent and
damages the copies in memory, (3) SIGKILLs everything and wipes memory. After each it starts
again and goes on from the newest recoverable checkpoint: from memory, block by block from memory
and disk, and from disk. At the end the loss of each step is compared with the reference, as bits.
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
import time
from collections.abc import Callable
from pathlib import Path

from demo_plot import write_plot
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from starts import Start, children_of, compare, wait_for_end

from tieredckpt.errors import AgentError
from tieredckpt.format.segment import TRAILER_BYTES, decode_trailer
from tieredckpt.rpc.agent_client import AgentClient
from tieredckpt.rpc.messages.agent import NamespaceStatus
from tieredckpt.storage.memory.slot import LABEL_BYTES, read_label

HERE = Path(__file__).parent
PART_BYTES = 4 << 20
"""What a save copies in one go; a whole number of blocks."""
SAVE_EVERY = 10
SPILL_EVERY = 20
POLL_S = 0.05
PHASE_DEADLINE_S = 150.0
"""Longest that one start of training may take; on two quiet cores the longest takes 30 s."""

CONFIG = """\
namespace: demo
memory: {{capacity: 512MiB, keep: {{last: 2}}}}
tiers:
  - {{name: disk, url: "file://{disk}", every: {spill_every} steps, keep: {{last: 2}}}}
agent: {{runtime_dir: {runtime}, idle_timeout: 2 min}}
"""


class Demo:
    """The folders, the processes and the progress bar."""

    def __init__(self, out: Path, steps: int, console: Console) -> None:
        self.out, self.steps, self.console = out, steps, console
        self.runtime = Path(f"/dev/shm/tieredckpt-demo-{os.getpid()}")
        self.disk = out / "disk"
        self.config = out / "tieredckpt.yaml"
        self.children: list[subprocess.Popen[bytes]] = []
        self.starts: list[Start] = []
        columns = (TextColumn("{task.description:<34}"), BarColumn(), MofNCompleteColumn())
        self.bar = Progress(*columns, TextColumn("steps"), TimeElapsedColumn(), console=console)
        # The reference, what the demo trains, and what it trains twice.
        self.task = self.bar.add_task("", total=2 * steps)
        self.done_steps = 0

    # --- folders ----------------------------------------------------------------------------------

    def __enter__(self) -> Demo:
        shutil.rmtree(self.out, ignore_errors=True)
        self.out.mkdir(parents=True)
        self.runtime.mkdir(mode=0o700)
        text = CONFIG.format(disk=self.disk, spill_every=SPILL_EVERY, runtime=self.runtime)
        self.config.write_text(text)
        self.bar.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.bar.stop()
        self.kill_trainers()
        self.kill_agent()
        shutil.rmtree(self.runtime, ignore_errors=True)
        shutil.rmtree(self.disk, ignore_errors=True)

    def say(self, text: str) -> None:
        """One line above the bar."""
        self.bar.console.print(text, highlight=False)

    # --- processes --------------------------------------------------------------------------------

    def train(
        self, name: str, *, until: Callable[[Start], bool] | None = None, **environment: str
    ) -> Start:
        """Start training and follow its journal until it ends, or ``until`` says stop.

        Raises RuntimeError with the end of its output: it failed, or took too long.
        """
        start = Start(name, self.out / f"{len(self.starts)}-{name}.jsonl")
        self.starts.append(start)
        log = self.out / f"{len(self.starts) - 1}-{name}.log"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node=2", str(HERE / "train_gpt.py"), "--config", str(self.config)]
        command += ["--steps", str(self.steps), "--save-every", str(SAVE_EVERY)]
        command += ["--journal", str(start.journal)]
        with log.open("wb") as output:
            child = subprocess.Popen(
                command,
                stdout=output,
                stderr=output,
                stdin=subprocess.DEVNULL,
                env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
            )
        self.children.append(child)
        until_s = time.monotonic() + PHASE_DEADLINE_S
        while True:
            ended = child.poll() is not None
            start.refresh()
            self.bar.update(
                self.task, description=name, completed=self.done_steps + len(start.losses)
            )
            if until is not None and until(start):
                return start
            if ended:
                break
            if time.monotonic() > until_s:
                raise RuntimeError(f"{name}: not done after {PHASE_DEADLINE_S:g} s, see {log}")
            time.sleep(POLL_S)
        self.done_steps += len(start.losses)
        if child.returncode != 0 and "TIEREDCKPT_FAILPOINTS" not in environment:
            raise RuntimeError(f"{name} failed, {log}:\n{log.read_text()[-3000:]}")
        return start

    def kill_trainers(self) -> None:
        """SIGKILL torchrun and its ranks, by process id."""
        for child in self.children:
            if child.poll() is None:
                # Its ranks first: they are its children as long as it lives, so the ids are sure.
                for pid in children_of(child.pid):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                child.kill()
            child.wait()
        self.children.clear()

    def agent(self) -> contextlib.closing[AgentClient]:
        """A line to the demo's agent."""
        return contextlib.closing(AgentClient(self.runtime, deadline_s=10))

    def kill_agent(self) -> None:
        """SIGKILL the demo's agent, if it runs, and wait until it is gone."""
        try:
            with self.agent() as client:
                handle = os.pidfd_open(client.health().pid)
        except (AgentError, ProcessLookupError):
            return
        try:
            signal.pidfd_send_signal(handle, signal.SIGKILL)
            wait_for_end(handle)
        finally:
            os.close(handle)

    def tool(self, *arguments: str, check: bool = True) -> str:
        """What ``tieredckpt ...`` prints."""
        done = subprocess.run(
            [sys.executable, "-m", "tieredckpt", *arguments],
            env={**os.environ, "TIEREDCKPT_CONFIG": str(self.config)},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        if check and done.returncode:
            raise RuntimeError(f"tieredckpt {' '.join(arguments)}: {done.stderr}")
        return done.stdout

    def namespace(self) -> NamespaceStatus | None:
        """What the agent says of the demo's namespace."""
        try:
            with self.agent() as client:
                found = [each for each in client.status().namespaces if each.name == "demo"]
        except AgentError:
            return None
        return found[0] if found else None

    def on_disk_too(self, least: int) -> Callable[[Start], bool]:
        """A test: the newest checkpoint in memory is ``least`` or newer, and whole on disk."""

        def reached(start: Start) -> bool:
            if not start.of("save") or start.last_step < least:
                return False
            status = self.namespace()
            if status is None or status.newest_step is None or status.newest_step < least:
                return False
            return status.tiers[0].newest_step == status.newest_step

        return reached

    # --- damage -----------------------------------------------------------------------------------

    def damage_memory(self) -> int:
        """Flip a bit in two blocks of the newest checkpoint's first segment, and clear half of the

        second one, in the slot files. Returns the number of blocks damaged.
        """
        newest = json.loads(self.tool("ls", "--json"))["checkpoints"][0]
        slots = {}
        for path in (self.runtime / "slots").iterdir():
            with path.open("rb") as file:
                capacity = path.stat().st_size - LABEL_BYTES
                slots[read_label(file.fileno(), capacity).segment_id] = path
        first, second = (slots[each["id"]] for each in newest["segments"])
        with first.open("r+b") as file:
            for offset in (PART_BYTES + 12_345, 3 * PART_BYTES + 7):
                file.seek(offset)
                byte = file.read(1)[0]
                file.seek(offset)
                file.write(bytes([byte ^ 4]))
        size = int(newest["segments"][1]["bytes"])
        cleared = size // PART_BYTES // 2 * PART_BYTES
        with second.open("r+b") as file:
            file.seek(PART_BYTES)
            file.write(bytes(cleared))
            file.seek(size - TRAILER_BYTES)
            block_bytes = decode_trailer(file.read(TRAILER_BYTES)).block_bytes
        return 2 + cleared // block_bytes


# --- the story ------------------------------------------------------------------------------------


def run_story(demo: Demo) -> None:
    """All starts of training, with what is done to them in between."""
    steps = demo.steps
    demo.say(f"[bold]reference[/]  {steps} steps, undisturbed")
    reference = demo.train("reference", TIEREDCKPT_NAMESPACE="reference")
    listed = json.loads(demo.tool("ls", "--namespace", "reference", "--json"))
    sizes = [segment["bytes"] for segment in listed["checkpoints"][0]["segments"]]
    parts = -(-max(sizes) // PART_BYTES)
    demo.tool("agent", "purge", "--namespace", "reference", "--yes")
    demo.say(f"           final loss {reference.of('step')[-1]['loss_approx']:.3f}")

    # The fourth save is cut in its middle: three whole ones, and half of one more.
    nth = 3 * parts + parts // 2
    demo.say(f"[bold]start 1[/]    SIGKILL in the save of step {4 * SAVE_EVERY}")
    first = demo.train("start 1", TIEREDCKPT_FAILPOINTS=f"save.copy=kill@{nth}")
    demo.kill_trainers()
    first.ended = "trainers killed in a save"
    demo.say(f"           died after step {first.last_step}, in part {parts // 2} of {parts}")

    second = demo.train("start 2", until=demo.on_disk_too(least=max(60, steps // 2)))
    report_restore(demo, second)
    demo.kill_trainers()
    demo.kill_agent()
    damaged = demo.damage_memory()
    second.ended = "all killed, memory damaged"
    demo.done_steps += len(second.losses)
    demo.say(f"           SIGKILL of trainers and agent; {damaged} blocks in memory damaged")

    third = demo.train("start 3", until=demo.on_disk_too(least=second.last_step + SPILL_EVERY // 2))
    report_restore(demo, third)
    demo.kill_trainers()
    demo.kill_agent()
    shutil.rmtree(demo.runtime)
    demo.runtime.mkdir(mode=0o700)
    third.ended = "all killed, memory wiped"
    demo.done_steps += len(third.losses)
    demo.say("           SIGKILL of everything, memory wiped")

    fourth = demo.train("start 4")
    report_restore(demo, fourth)
    demo.bar.update(demo.task, description="done", total=demo.done_steps, completed=demo.done_steps)


def report_restore(demo: Demo, start: Start) -> None:
    """One line: what was recovered from where, and how fast."""
    event = start.of("start")[0]
    if event["step"] is None:
        demo.say(f"[bold]{start.name}[/]    found nothing to recover")
        return
    total = sum(event["bytes_by_tier"].values())
    parts = " + ".join(
        f"{count / 2**20:.1f} MiB from {tier}" for tier, count in event["bytes_by_tier"].items()
    )
    bad = event["repaired_blocks"]
    demo.say(
        f"[bold]{start.name}[/]    recovered step {event['step']}: {parts}, in "
        f"{event['seconds']:.2f} s ({total / event['seconds'] / 1e9:.2f} GB/s)"
        + (f"; [yellow]{bad} times a bad block was found and read elsewhere[/]" if bad else "")
    )


def print_result(demo: Demo, wrong: list[tuple[str, int]], compared: int, began_s: float) -> None:
    """The table of starts and the verdict."""
    columns = (
        "",
        "steps",
        "recovered",
        "load",
        "saves",
        "stall p50",
        "in the writer",
        "max",
        "ended",
    )
    table = Table(*columns, box=None, header_style="bold", pad_edge=False)
    for start in demo.starts:
        event = start.of("start")[0]
        stalls = sorted(each["stall_s"] * 1e3 for each in start.of("save"))
        writer = sorted(each["writer_s"] * 1e3 for each in start.of("save"))
        tiers = "+".join(event["bytes_by_tier"])
        table.add_row(
            start.name,
            f"{min(start.losses)}-{start.last_step}",
            "-" if event["step"] is None else f"{event['step']} from {tiers}",
            "-" if event["step"] is None else f"{event['seconds'] * 1e3:.0f} ms",
            str(len(stalls)),
            f"{stalls[len(stalls) // 2]:.1f} ms" if stalls else "-",
            f"{writer[len(writer) // 2]:.1f} ms" if writer else "-",
            f"{stalls[-1]:.1f} ms" if stalls else "-",
            start.ended,
        )
    demo.console.print(table)
    demo.console.print(
        "\nstall: how long dcp.save held up training on rank 0; in the writer: from DCP's first "
        "call of\ntieredckpt to the commit, waiting for the other rank included. The first saves "
        "of a start are cold."
    )
    plot = demo.out / "demo.png"
    verdict = f"{len(wrong)} of {compared} losses differ" if wrong else "every loss bit-identical"
    write_plot(plot, demo.starts, verdict)
    demo.console.print(f"\nplot: {os.path.relpath(plot)}   journals: {os.path.relpath(demo.out)}")
    if wrong:
        demo.console.print(f"[red bold]{len(wrong)} of {compared} losses differ:[/] {wrong[:10]}")
    else:
        demo.console.print(
            f"[green bold]{compared} losses of four interrupted starts, every one bit-identical "
            f"to the uninterrupted run[/]   ({time.monotonic() - began_s:.0f} s)"
        )


def main() -> int:
    """Run the demo; the exit status is 0 only if every loss is identical."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=100, help="steps of a whole run (default 100)")
    parser.add_argument("--out", type=Path, default=HERE.parent / "out" / "demo")
    args = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 120)
    began_s = time.monotonic()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that everything is cleaned up
    with Demo(args.out.absolute(), args.steps, console) as demo:
        run_story(demo)
    reference, *others = demo.starts
    compared, wrong = compare(reference, others)
    print_result(demo, wrong, compared, began_s)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
