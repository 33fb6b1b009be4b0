"""How fast the agent brings a rank's segment into a bucket, and the memory that it takes for it."""

from __future__ import annotations

from functools import partial

from benchmarks import buckets, engines
from benchmarks import state as states
from benchmarks.machine import Watch, resident_bytes
from benchmarks.measure import (
    Report,
    Row,
    Samples,
    explore,
    interleave,
    memory_row,
    ratio_row,
    timed,
)
from benchmarks.object_limits import Bytes, Plain, obstore_puts
from benchmarks.processes import Setup, Spawner
from benchmarks.shapes import MIB

PARTS = 2
"""Of the state's rows one half: 1 GiB."""
SPARE_MIB = 64
"""What an upload may take besides its parts."""
NOT_TRIED = "sha256"
"""A way of obstore's that does what another one does, and more."""


class PeakMemory(Watch):
    """Samples the private resident memory of a process while the context lasts."""

    PERIOD_S = 0.02

    def __init__(self, pid: int) -> None:
        super().__init__()
        self.peak_bytes = 0
        self._pid = pid

    def look(self) -> None:
        """One sample."""
        self.peak_bytes = max(self.peak_bytes, resident_bytes(self._pid))


def upload_process(setup: Setup, report: Report, *, bucket: str) -> Samples:
    """Raw upload, spill, raw upload, spill, ...: same server, size, part size and concurrency."""
    where = buckets.told(bucket)
    state = states.filled(setup.shape, parts=PARTS)
    data = Bytes(states.size_bytes(state), received=False)
    at = where.raw("raw")
    acts = obstore_puts(at, data) | Plain(at).puts(data)
    variants = {name: partial(timed, act) for name, act in acts.items() if NOT_TRIED not in name}
    best, tried = explore(variants, rounds=min(2, setup.repeat_slow))
    counted: list[float] = []
    peaks: list[float] = []
    with buckets.opened(where, setup) as engine:
        counters = engines.spill_counters(engine)
        (pid,) = engines.agents(engines.runtime_dir(setup))

        def spill(number: int) -> float:
            nonlocal counters
            states.touch(state, number)
            engines.save(engine, state, number)
            with PeakMemory(pid) as memory:
                wall_s = timed(lambda: engine.wait(number, buckets.TIER, buckets.WAIT_S))
            buckets.wait_idle(engine)
            before, counters = counters, engines.spill_counters(engine)
            seconds, moved = counters[1] - before[1], counters[0] - before[0]
            counted.append(seconds * data.size / moved)
            peaks.append(memory.peak_bytes / MIB)
            if number:
                where.wait_pruned()  # what was begun before would be in the next sample
            return wall_s

        spill(0)  # makes the slots, the connections and the threads
        counted.clear()
        samples = interleave(
            setup.repeat_slow,
            report,
            {"raw": lambda _number: variants[best](), "wall": lambda number: spill(number + 1)},
        )
    return samples | tried | {"counted": counted, "peak": peaks, "bytes": [float(data.size)]}


def upload(spawn: Spawner) -> list[Row]:
    """The spill of 1 GiB, and the agent's memory meanwhile."""
    samples = spawn.one(upload_process, bucket=spawn.bucket)
    where = buckets.told(spawn.bucket)
    tried = tuple(name for name in samples if name.startswith("put "))
    best = min(tried, key=lambda name: min(samples[name]))
    size = int(samples["bytes"][0])
    common = f"{buckets.AT_ONCE} parts of {where.part_bytes // MIB} MiB at once"
    rows = [
        ratio_row(
            "s3-upload",
            what,
            samples,
            ours=ours,
            limit="raw",
            limit_name=f"{best}, {common}",
            work_bytes=size,
            target=target,
            note=note,
            detail=detail,
        )
        for what, ours, target, note, detail in (
            ("spill to S3, by the agent's counters", "counted", 0.9, "", tried),
            (
                "spill to S3, engine.wait",
                "wall",
                None,
                "from the end of dcp.save until the manifest is in the bucket",
                (),
            ),
        )
    ]
    what = "agent's own resident memory during an upload"
    target = float(buckets.AT_ONCE * where.part_bytes // MIB + SPARE_MIB)
    note = f"slots not counted; {common}, and {SPARE_MIB} MiB for all else that the agent is"
    return [*rows, memory_row("s3-upload", what, samples["peak"], "MiB", target, note)]
