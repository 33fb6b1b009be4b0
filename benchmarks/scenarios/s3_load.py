"""How fast a checkpoint comes back from a bucket, verified, and how much of it a part needs."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from benchmarks import buckets, engines
from benchmarks import state as states
from benchmarks.measure import Report, Row, Samples, explore, interleave, ratio_row, summary, timed
from benchmarks.object_limits import Bytes, Plain, obstore_gets
from benchmarks.processes import Setup, Spawner
from benchmarks.shapes import MIB
from tieredckpt import Engine

SHARDS = 8
SHARD = 3
"""The one of them that is loaded: neither the first nor the last."""
LIMIT_NAME = f"{buckets.AT_ONCE} ranges of a part at once into warm memory"


def _leave_in_bucket(where: buckets.Bucket, setup: Setup, state: states.State) -> None:
    """Save, and lose everything else."""
    with buckets.opened(where, setup) as engine:
        engines.save(engine, state, 0)
        engine.wait(0, buckets.TIER, buckets.WAIT_S)
    lose_all_but_bucket(setup)


def lose_all_but_bucket(setup: Setup) -> None:
    """End the agent and remove its slots and all that it knew, as a host that is given back."""
    engines.stop_agents(engines.runtime_dir(setup))
    shutil.rmtree(engines.runtime_dir(setup))


def load_process(setup: Setup, report: Report, *, bucket: str) -> Samples:
    """Raw ranges, load, raw ranges, load, ...: the same segment."""
    where = buckets.told(bucket)
    state = states.filled(setup.shape)
    digest = states.digest(state)
    _leave_in_bucket(where, setup, state)
    at, size = where.raw_segment()
    data = Bytes(size, sent=False)
    acts = obstore_gets(at, data) | Plain(at).gets(data)
    variants = {name: partial(timed, act) for name, act in acts.items()}
    best, tried = explore(variants, rounds=min(2, setup.repeat_slow))
    with buckets.opened(where, setup) as engine:

        def load(_number: int) -> float:
            states.spoil(state)
            seconds = engines.load(engine, state)
            assert states.digest(state) == digest, "loaded something else than was saved"
            return seconds

        first = [load(0)]
        samples = interleave(
            setup.repeat_slow + 2,
            report,
            {"raw": lambda _number: variants[best](), "load": load},
        )
        _check_source(engine, state)
    lose_all_but_bucket(setup)
    return samples | tried | {"first": first} | _parts(where, setup, state)


def _check_source(engine: Engine, state: states.State) -> None:
    """Raise if a load does not come from the bucket."""
    engine.load(state)
    report = engine.last_restore
    assert report is not None
    assert report.bytes_by_source.keys() == {buckets.TIER}, report


def load(spawn: Spawner) -> list[Row]:
    """Recovery by a host that has nothing, of everything and of a part."""
    samples = spawn.one(load_process, bucket=spawn.bucket)
    tried = tuple(name for name in samples if name.startswith("get "))
    best = min(tried, key=lambda name: min(samples[name]))
    return [
        ratio_row(
            "s3-load",
            what,
            samples,
            ours=ours,
            limit="raw",
            limit_name=f"{best}: {LIMIT_NAME}",
            work_bytes=spawn.setup.work_bytes,
            target=target,
            note=note,
            detail=detail,
        )
        for what, ours, target, note, detail in (
            (
                "dcp.load from S3, verified",
                "load",
                0.85,
                "tensors resident; every other tier was removed before",
                tried,
            ),
            (
                "the first dcp.load from S3 of a process",
                "first",
                None,
                "imports the client, finds credentials and connects as well",
                (),
            ),
        )
    ] + _rows_of_parts(samples)


# --- parts of a checkpoint ------------------------------------------------------------------------


@contextmanager
def _mesh() -> Iterator[DeviceMesh]:
    """Gives the mesh of one of eight ranks, without the seven others: nothing is communicated."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=SHARD, world_size=SHARDS)
    try:
        yield init_device_mesh("cpu", (SHARDS,))
    finally:
        dist.destroy_process_group()


def _shard_of(state: states.State, dim: int) -> tuple[states.State, int]:
    """One of eight shards of each tensor along ``dim`` (0, where it has no more); its bytes."""
    found: states.State = {}
    size = 0
    with _mesh() as mesh:
        for name, tensor in state.items():
            along = min(dim, tensor.dim() - 1)
            local = tensor.chunk(SHARDS, along)[SHARD].clone().contiguous()
            size += local.nbytes
            found[name] = DTensor.from_local(local, mesh, [Shard(along)], run_check=False)
    return found, size


def _parts(where: buckets.Bucket, setup: Setup, state: states.State) -> Samples:
    """Bytes that come over the wire: the whole state, the weights, a shard by rows, by columns."""
    weights = {name: tensor for name, tensor in state.items() if name.startswith("model.")}
    rows, columns = _shard_of(state, 0), _shard_of(state, 1)
    wanted: dict[str, tuple[states.State, int]] = {
        "whole": (state, states.size_bytes(state)),
        "weights": (weights, states.size_bytes(weights)),
        "rows": rows,
        "columns": columns,
    }
    proxy = buckets.CountingProxy(where.endpoint)
    samples: Samples = {}
    try:
        with buckets.opened(where, setup, endpoint=proxy.endpoint) as engine:
            for name, (part, size) in wanted.items():
                before = proxy.received_bytes
                state_dict_loader.load(part, storage_reader=engine.reader(), no_dist=True)
                samples[name] = [float(proxy.received_bytes - before)]
                samples[f"{name} wanted"] = [float(size)]
    finally:
        proxy.close()
    return samples


def _rows_of_parts(samples: Samples) -> list[Row]:
    """What a part of a checkpoint costs, as a multiple of its share of the whole load's bytes."""
    whole, all_bytes = samples["whole"][0], samples["whole wanted"][0]
    rows = []
    for name, what, target, note in (
        ("weights", "bytes for the weights alone", 1.2, "they lie together in the segment"),
        (
            "rows",
            f"bytes for one of {SHARDS} shards by rows",
            1.2,
            "saved by one rank; whole blocks are read and verified, whose size follows from that "
            "of the tensors: see docs/understand/benchmarks.md",
        ),
        ("columns", f"bytes for one of {SHARDS} shards by columns", None, "saved by one rank"),
    ):
        share = samples[f"{name} wanted"][0] / all_bytes
        got = samples[name][0]
        rows.append(
            Row(
                scenario="s3-load",
                what=what,
                kind="report" if target is None else "at_most",
                value=got / (whole * share),
                unit="times",
                ours=summary([got / MIB]),
                ours_unit="MiB",
                target=target,
                limit_name=f"{share:.3f} of the {whole / MIB:.1f} MiB that a whole load receives",
                note=note,
            )
        )
    return rows
