"""How fast a checkpoint comes back from memory, verified."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from benchmarks import engines, limits
from benchmarks import state as states
from benchmarks.measure import Report, Row, Samples, explore, interleave, ratio_row
from benchmarks.processes import Setup, Spawner
from benchmarks.scenarios.raw import raw_process
from benchmarks.scenarios.save import MEMCPY


def warm_process(setup: Setup, report: Report) -> Samples:
    """Load in the process that saved: slots mapped, tensors resident."""
    state = states.filled(setup.shape)
    sources = [states.octets(tensor) for tensor in state.values()]
    targets = states.resident_copy(state)
    with engines.opened(setup) as engine:
        saved = states.digest(state)
        engines.save(engine, state, 0)
        engines.wait_prefaulted(engine)

        def load(_number: int) -> float:
            states.spoil(state)
            seconds = engines.load(engine, state)
            assert states.digest(state) == saved, "loaded something else than was saved"
            return seconds

        return interleave(
            max(setup.repeat // 2, 2),
            report,
            {"memcpy": lambda _number: limits.memcpy(sources, targets), "load": load},
        )


def warm(spawn: Spawner) -> list[Row]:
    """Roll-back without a restart."""
    return [
        ratio_row(
            "load",
            "dcp.load from memory, verified, in the process that saved",
            spawn.one(warm_process),
            ours="load",
            limit="memcpy",
            limit_name=MEMCPY,
            work_bytes=spawn.setup.work_bytes,
            target=0.6,
        )
    ]


def saver_process(setup: Setup, report: Report) -> Samples:
    """Leave one checkpoint in memory, its digest beside it; and measure the memcpy."""
    state = states.filled(setup.shape)
    digest_file(setup).write_text(states.digest(state))
    with engines.opened(setup) as engine:
        engines.save(engine, state, 0)
    report(1, 2)
    sources = [states.octets(tensor) for tensor in state.values()]
    targets = states.resident_copy(state)
    return {"memcpy": [limits.memcpy(sources, targets) for _ in range(max(setup.repeat // 4, 2))]}


def fresh_process(setup: Setup, _report: Report, *, resident: bool) -> Samples:
    """What a restarted trainer does: a new process, new tensors, one load.

    ``resident``: the tensors were written to before, as by a model that initialises itself.
    """
    state = states.filled(setup.shape, seed=1) if resident else states.empty(setup.shape)
    # Before the engine is opened: what it prefaults behind must not be done when the load begins,
    # as it is not in a trainer that opens and loads.
    if not resident:
        limits.back_free_memory(setup.work_bytes)
    with engines.opened(setup) as engine:
        load_s = engines.load(engine, state)
    check_digest(setup, state)
    return {"load": [load_s]}


def fresh(spawn: Spawner) -> list[Row]:
    """Recovery from memory: every sample is a process of its own."""
    setup = spawn.setup
    samples = spawn.one(saver_process)
    slot = str(engines.newest_slot(setup))

    def raw(method: str, threads: int) -> float:
        return spawn.one(raw_process, slot=slot, method=method, threads=threads)["raw"][0]

    variants = {
        f"{method}, {threads} thread(s)": partial(raw, method, threads)
        for threads in (1, 2)
        for method in limits.READ_METHODS
    }
    best, tried = explore(variants, rounds=min(2, setup.repeat_slow))
    samples |= {"load": [], "raw": [], "resident": []}
    for number in range(setup.repeat_slow):
        samples["raw"].append(variants[best]())
        samples["load"] += spawn.one(fresh_process, resident=False)["load"]
        if 0 < number <= 2:
            samples["resident"] += spawn.one(fresh_process, resident=True)["load"]
    what = "dcp.load from memory, verified, fresh process, against"
    return [
        ratio_row(
            "fresh",
            f"{what} the best raw read",
            samples | tried,
            ours="load",
            limit="raw",
            limit_name=f"raw read of the same slot: {best}",
            work_bytes=setup.work_bytes,
            target=0.9,
            note=WOULD_WARM,
            detail=tuple(tried),
        ),
        *(
            ratio_row(
                "fresh",
                f"{what} a memcpy{which}",
                samples,
                ours=ours,
                limit="memcpy",
                limit_name=MEMCPY,
                work_bytes=setup.work_bytes,
            )
            for ours, which in (("load", ""), ("resident", "; tensors resident"))
            if samples[ours]
        ),
    ]


WOULD_WARM = (
    "The page faults of a new process dominate. Huge pages for the tensors spare most of them "
    "(transparent_hugepage/enabled madvise or always), tensors that were initialised before the "
    "load spare those of the target (last row), and huge pages in tmpfs those of a mapped slot."
)


def digest_file(setup: Setup) -> Path:
    """Where the digest of what was saved is kept."""
    return Path(setup.disk) / "saved.digest"


def check_digest(setup: Setup, state: states.State) -> None:
    """Raise if ``state`` is not what was saved."""
    if states.digest(state) != digest_file(setup).read_text():
        raise AssertionError("loaded something else than was saved")
