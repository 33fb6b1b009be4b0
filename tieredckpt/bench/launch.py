"""Starts the ranks with torchrun; kills one of them, and sees what a recovery takes."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from tieredckpt.agent.host.runtime import default_runtime_dir
from tieredckpt.bench.clean import clean, empty_tier, end_agent, tiers
from tieredckpt.bench.settings import STAGES, Recovery, Result, Settings, Times
from tieredckpt.config.schema import load_config
from tieredckpt.errors import TieredCkptError, UsageError, WaitError

GENERATION_S = 1800.0
"""Longest wait for all ranks of a generation to have loaded, saved and flushed."""
END_S = 30.0
POLL_S = 0.01


def named(settings: Settings) -> Settings:
    """With a namespace and a runtime folder that no other job has."""
    name = f"bench-{secrets.token_hex(4)}"
    configured = load_config(settings.config or None, os.environ).agent.runtime_dir
    beside = Path(configured or default_runtime_dir(os.environ))
    runtime_dir = str(beside.with_name(f"tieredckpt-{name}"))
    return msgspec.structs.replace(settings, namespace=name, runtime_dir=runtime_dir)


def run(settings: Settings, ranks: int) -> Result:
    """Run a benchmark on ranks of this host, or, below torchrun, as one of its ranks.

    Returns:
        The result; below torchrun this does not return, and rank 0 prints it.

    Raises:
        TieredCkptError: The ranks failed; they have printed why.
    """
    if "RANK" in os.environ:
        command = [sys.executable, "-m", "tieredckpt.bench", _json(settings)]
        os.execv(sys.executable, command)  # noqa: S606  this process is the rank
    with tempfile.TemporaryDirectory(prefix="tieredckpt-bench-") as folder:
        settings = msgspec.structs.replace(settings, result=f"{folder}/result")
        try:
            with torchrun(settings, ranks, 0, None) as process:
                if code := process.wait():
                    raise TieredCkptError(f"the ranks ended with {code}: see above")
        except BaseException:
            clean(settings)
            raise
        return msgspec.json.decode(Path(settings.result).read_bytes(), type=Result)


def _json(settings: Settings) -> str:
    return msgspec.json.encode(settings).decode()


@contextlib.contextmanager
def torchrun(
    settings: Settings, ranks: int, restarts: int, log: Path | None
) -> Iterator[subprocess.Popen[bytes]]:
    """The ranks below torchrun; they are gone at the end."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone",
        f"--nproc-per-node={ranks}", f"--max-restarts={restarts}", "--monitor-interval=0.1",
        "-m", "tieredckpt.bench", _json(settings),
    ]  # fmt: skip
    # The second: else ranks that are started again may find the addresses of those before.
    environ = {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", **os.environ}
    with contextlib.ExitStack() as stack:
        output = stack.enter_context(log.open("wb")) if log is not None else None
        process = subprocess.Popen(command, env=environ, stdout=output, stderr=output)
        before = signal.signal(signal.SIGTERM, _exit)
        try:
            yield process
        finally:
            signal.signal(signal.SIGTERM, before)
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(END_S)
            process.kill()
            process.wait()


def _exit(signum: int, _frame: object) -> None:
    sys.exit(128 + signum)


def recover(
    settings: Settings, ranks: int, sources: tuple[str, ...], on_progress: Callable[[str], None]
) -> Result:
    """Kill one rank again and again, with the checkpoint only in one source and those beyond it.

    Args:
        settings: Of the benchmark; ``count`` recoveries from each source.
        ranks: On this host.
        sources: "memory" and names of tiers; empty: all of them.
        on_progress: Called with a line of progress.

    Raises:
        UsageError: A source is not configured, or this runs below torchrun.
        WaitError: A generation takes too long.
        TieredCkptError: The ranks failed; the message ends with what they printed last.
    """
    if "RANK" in os.environ:
        raise UsageError("bench recover starts torchrun itself, on one host: call it directly")
    places = ["memory", *tiers(settings)]
    if unknown := sorted(set(sources) - set(places)):
        raise UsageError(f"no such source: {', '.join(unknown)}; there are {', '.join(places)}")
    wanted = [name for name in places if name in sources or not sources]
    with tempfile.TemporaryDirectory(prefix="tieredckpt-bench-") as name:
        folder = Path(name)
        settings = msgspec.structs.replace(settings, events=name, parent=os.getpid())
        found: list[Recovery] = []
        try:
            with torchrun(settings, ranks, settings.count * len(wanted), folder / "log") as process:
                generations = Generations(folder, process, ranks)
                on_progress("saving the first checkpoint")
                result = generations.ready(0)
                for number in range(settings.count * len(wanted)):
                    source = wanted[number % len(wanted)]
                    on_progress(
                        f"recovery {number + 1} of {settings.count * len(wanted)}: {source}"
                    )
                    delete_nearer(settings, places, source)
                    found.append(generations.kill(number, source))
                    generations.ready(number + 1)
        finally:
            clean(settings)
        return msgspec.structs.replace(result, recoveries=found)


def delete_nearer(settings: Settings, places: list[str], source: str) -> None:
    """Delete the checkpoint from all places nearer than the source; no engine is open."""
    if source != places[0]:
        end_agent(settings)  # and with it memory, as if the host were lost
    for nearer in places[1 : places.index(source)]:
        empty_tier(settings, nearer)


class Generations:
    """What the ranks of each generation leave in the folder."""

    def __init__(self, folder: Path, process: subprocess.Popen[bytes], ranks: int) -> None:
        self._folder, self._process, self._ranks = folder, process, ranks

    def ready(self, generation: int) -> Result:
        """Wait until the generation's checkpoint is everywhere."""
        content = self._read(f"{generation}.ready")
        return msgspec.json.decode(content, type=Result)

    def kill(self, generation: int, source: str) -> Recovery:
        """Kill one rank of a generation; the recovery of the next one.

        Raises TieredCkptError: It did not load from the source.
        """
        victim = self._times(generation)[-1].pid
        killed_s = time.monotonic()
        os.kill(victim, signal.SIGKILL)
        times = self._times(generation + 1)
        ends_s = [max(column) for column in zip(*(each.ends_s for each in times), strict=True)]
        begins_s = [killed_s, *ends_s]
        stages = {
            name: max(0.0, end - begin)
            for name, begin, end in zip(STAGES, begins_s, ends_s, strict=False)
        }
        read: dict[str, int] = {}
        for each in times:
            for tier, num_bytes in each.bytes_by_tier.items():
                read[tier] = read.get(tier, 0) + num_bytes
        if set(read) != {source}:
            raise TieredCkptError(f"not all was read from {source}: bytes by tier are {read}")
        return Recovery(
            source=source, total_s=ends_s[-1] - killed_s, stages=stages, bytes_by_tier=read
        )

    def _times(self, generation: int) -> list[Times]:
        files = [self._read(f"{generation}.{rank}.json") for rank in range(self._ranks)]
        return [msgspec.json.decode(each, type=Times) for each in files]

    def _read(self, name: str) -> bytes:
        until_s, path = time.monotonic() + GENERATION_S, self._folder / name
        while not path.exists():
            if (code := self._process.poll()) is not None:
                log = (self._folder / "log").read_text(errors="replace")[-4000:]
                raise TieredCkptError(f"torchrun ended with {code}; it printed last:\n{log}")
            if time.monotonic() > until_s:
                raise WaitError(f"no {name} after {GENERATION_S:.0f} s", reason="timeout")
            time.sleep(POLL_S)
        return path.read_bytes()


def state_bytes(settings: Settings) -> int:
    """Bytes of the state, all ranks together.

    Raises:
        UsageError, TieredCkptError: ``like`` names nothing that can be read.
    """
    if not settings.like:
        return settings.size_bytes
    from tieredckpt.bench import state  # with torch

    return state.total_bytes(state.specs(settings))


MEMORY_FACTOR = 5
"""The state, the ring of slots and what async_save of stock DCP copies, as a multiple."""


def check_memory(state_bytes: int) -> None:
    """Raises UsageError: the benchmark would take more memory than is available."""
    rows = Path("/proc/meminfo").read_text().splitlines()
    fields = {row.split(":")[0]: row.split()[1] for row in rows}
    available, needed = int(fields["MemAvailable"]) << 10, MEMORY_FACTOR * state_bytes
    if needed > available:
        raise UsageError(
            f"{available / 2**30:.1f} GiB of memory are available, and a state of "
            f"{state_bytes / 2**30:.1f} GiB takes about {needed / 2**30:.1f}: give a smaller --size"
        )


def check_space(folders: dict[str, str], needed_bytes: int) -> None:
    """Raises UsageError: a folder has not enough space."""
    for name, folder in folders.items():
        at = next(each for each in (Path(folder), *Path(folder).parents) if each.exists())
        free = shutil.disk_usage(at).free
        if free < needed_bytes:
            raise UsageError(
                f"{name} ({at}) has {free / 2**30:.1f} GiB free, and a checkpoint has "
                f"{needed_bytes / 2**30:.1f}: give a smaller --size, or --folder"
            )
