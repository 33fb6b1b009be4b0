"""``tieredckpt export`` of a whole state, from memory, disk and S3, against plain copies."""

from __future__ import annotations

import json
import mmap
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from benchmarks import buckets, engines
from benchmarks import state as states
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
from benchmarks.object_limits import Bytes, Plain, obstore_gets
from benchmarks.processes import Setup, Spawner
from benchmarks.scenarios.disk import keeper_process
from benchmarks.scenarios.load import check_digest, digest_file
from benchmarks.scenarios.s3_load import lose_all_but_bucket
from benchmarks.shapes import MIB
from tieredckpt.config.schema import load_config
from tieredckpt.export.export import Request, export_checkpoint
from tieredckpt.export.source import Which

PIECE_BYTES = 8 * MIB
TARGET = 0.7
MEMORY_MIB = 256.0
POLL_S = 0.005


# --- plain copies ---------------------------------------------------------------------------------


def _by_sendfile(source: int, target: int, size: int) -> None:
    at = 0
    while at < size:
        at += os.sendfile(target, source, at, size - at)


def _through_mapping(source: int, target: int, size: int) -> None:
    os.posix_fallocate(target, 0, size)
    with mmap.mmap(target, size) as mapped, memoryview(mapped) as view:
        for at in range(0, size, PIECE_BYTES):
            with view[at : at + PIECE_BYTES] as piece:
                os.preadv(source, [piece], at)


def _direct(source: int, target: int, size: int, *, threads: int) -> None:
    """O_DIRECT at both ends that are on a disk."""
    os.posix_fallocate(target, 0, size)

    def work(first: int) -> None:
        with mmap.mmap(-1, PIECE_BYTES) as buffer:
            for at in range(first * PIECE_BYTES, size, threads * PIECE_BYTES):
                with memoryview(buffer)[: min(PIECE_BYTES, size - at)] as piece:
                    os.preadv(source, [piece], at)
                    os.pwrite(target, piece, at)

    workers = [threading.Thread(target=work, args=(first,)) for first in range(threads)]
    for each in workers:
        each.start()
    for each in workers:
        each.join()


COPIES: Mapping[str, tuple[Callable[[int, int, int], None], int]] = {
    "copy by sendfile": (_by_sendfile, 0),
    "copy into a mapped file": (_through_mapping, 0),
    "copy O_DIRECT, 1 thread": (partial(_direct, threads=1), os.O_DIRECT),
    "copy O_DIRECT, 2 threads": (partial(_direct, threads=2), os.O_DIRECT),
}
"""All ends with fsync."""


def _durably(act: Callable[[int, int, int], None], source: int, target: int, size: int) -> None:
    act(source, target, size)
    os.fsync(target)


def _copy(source: Path, setup: Setup, name: str, size: int, *, memory: bool) -> float:
    """Seconds to copy ``size`` bytes of a file; the copy is removed."""
    act, flags = COPIES[name]
    target = Path(setup.disk) / "copy"
    reads = os.open(source, os.O_RDONLY | (0 if memory else flags))
    writes = os.open(target, os.O_RDWR | os.O_CREAT | flags, 0o600)
    try:
        return timed(partial(_durably, act, reads, writes, size))
    finally:
        os.close(reads)
        os.close(writes)
        target.unlink()


# --- ours -----------------------------------------------------------------------------------------


def _export(setup: Setup, config: Mapping[str, Any]) -> float:
    """Seconds to export as safetensors, and durable; the export is removed."""
    out = Path(setup.disk) / "export"
    request = Request(out=out, format="safetensors", shard_bytes=1 << 40)
    seconds = timed(lambda: export_checkpoint(load_config(config, {}), Which(), request))
    shutil.rmtree(out)
    return seconds


def _most_memory(setup: Setup, config: Mapping[str, Any]) -> float:
    """The most anonymous memory of the command, in MiB."""
    out, file = Path(setup.disk) / "export", Path(setup.disk) / "export.yaml"
    file.write_text(json.dumps(config))
    command = [sys.executable, "-m", "tieredckpt", "export", "latest", str(out)]
    seen = []
    with subprocess.Popen([*command, "--format", "safetensors", "--config", str(file)]) as process:
        while process.poll() is None:
            text = Path(f"/proc/{process.pid}/status").read_text()
            if "RssAnon:" in text:  # a process that has ended has none
                seen.append(int(text.partition("RssAnon:")[2].split()[0]) / 1024)
            time.sleep(POLL_S)
    assert process.returncode == 0
    shutil.rmtree(out)
    return max(seen)


def _check(setup: Setup, config: Mapping[str, Any]) -> None:
    """Raise if the export has something else than was saved."""
    out = Path(setup.disk) / "export"
    request = Request(out=out, format="safetensors", shard_bytes=1 << 40)
    export_checkpoint(load_config(config, {}), Which(), request)
    found = load_file(out / "model.safetensors")
    check_digest(setup, {spec.name: found[spec.name] for spec in setup.shape.tensors()})
    shutil.rmtree(out)


def _measure(
    setup: Setup, report: Report, config: Mapping[str, Any], raw: Mapping[str, Callable[[], float]]
) -> Samples:
    best, tried = explore(raw, rounds=min(2, setup.repeat_slow))
    samples = interleave(
        setup.repeat_slow + 2,
        report,
        {
            "raw": lambda _number: raw[best](),
            "export": lambda _number: _export(setup, config),
        },
    )
    _check(setup, config)
    return samples | tried | {"memory": [_most_memory(setup, config)]}


def export_process(setup: Setup, report: Report, *, memory: bool) -> Samples:
    """Copy, export, copy, export, ...: the same segment to the same disk."""
    config = engines.config(setup, spill=not memory)
    segment = engines.newest_slot(setup) if memory else engines.newest_segment(setup)
    size = setup.work_bytes // 4096 * 4096
    raw = {name: partial(_copy, segment, setup, name, size, memory=memory) for name in COPIES}
    return _measure(setup, report, config, raw)


def s3_process(setup: Setup, report: Report, *, bucket: str) -> Samples:
    """The same from a bucket: raw ranges straight into a mapped file."""
    where = buckets.told(bucket)
    config = where.config(setup)
    at, size = where.raw_segment()

    data = Bytes(size, sent=False, received=False)
    acts = obstore_gets(at, data) | Plain(at).gets(data)

    def into_file(name: str) -> float:
        target = Path(setup.disk) / "copy"
        fd = os.open(target, os.O_RDWR | os.O_CREAT, 0o600)
        try:

            def act() -> None:
                os.posix_fallocate(fd, 0, size)
                data.into = memoryview(mmap.mmap(fd, size))
                acts[name]()
                os.fsync(fd)

            return timed(act)
        finally:
            data.into = memoryview(b"")
            os.close(fd)
            target.unlink()

    return _measure(setup, report, config, {name: partial(into_file, name) for name in acts})


def _rows(spawn: Spawner, scenario: str, source: str, samples: Samples) -> list[Row]:
    tried = tuple(name for name in samples if name not in ("raw", "export", "memory"))
    best = min(tried, key=lambda name: min(samples[name]))
    return [
        ratio_row(
            scenario,
            f"export as safetensors from {source}, verified",
            samples,
            ours="export",
            limit="raw",
            limit_name=f"{best}, fsync",
            work_bytes=spawn.setup.work_bytes,
            target=TARGET,
            detail=tried,
        ),
        memory_row(
            scenario, f"anonymous memory of an export from {source}", samples["memory"], "MiB",
            MEMORY_MIB, "of the command, with Python and torch",
        ),
    ]  # fmt: skip


def export(spawn: Spawner) -> list[Row]:
    """From memory through its agent; then from the disk alone, after memory was lost."""
    spawn.one(keeper_process)
    rows = _rows(spawn, "export", "memory", spawn.one(export_process, memory=True))
    engines.stop_agents(engines.runtime_dir(spawn.setup))
    shutil.rmtree(engines.runtime_dir(spawn.setup))
    return rows + _rows(spawn, "export", "disk", spawn.one(export_process, memory=False))


def s3_keeper_process(setup: Setup, _report: Report, *, bucket: str) -> Samples:
    """Leave one checkpoint in the bucket, and nothing elsewhere."""
    where = buckets.told(bucket)
    state = states.filled(setup.shape)
    digest_file(setup).write_text(states.digest(state))
    with buckets.opened(where, setup) as engine:
        engines.save(engine, state, 0)
        engine.wait(0, buckets.TIER, buckets.WAIT_S)
    lose_all_but_bucket(setup)
    return {"saved": [0.0]}


def s3_export(spawn: Spawner) -> list[Row]:
    """On a machine that has nothing but the address of the bucket."""
    spawn.one(s3_keeper_process, bucket=spawn.bucket)
    return _rows(spawn, "s3-export", "S3", spawn.one(s3_process, bucket=spawn.bucket))
