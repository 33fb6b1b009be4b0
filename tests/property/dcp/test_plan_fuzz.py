"""Forged plans behind a valid digest: read within memory, or refused by one of our errors.

``python -m tests.property.dcp.test_plan_fuzz SECONDS`` runs the fuzz for long, with a new seed.
"""

from __future__ import annotations

import random
import sys
import time
import traceback
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from torch.distributed.checkpoint.metadata import Metadata

from tests.format.samples import mutate
from tieredckpt.dcp.state.metadata import to_metadata
from tieredckpt.errors import IntegrityError, UsageError
from tieredckpt.export.selection import in_doubt, name_of, select
from tieredckpt.export.torch_files import Node
from tieredckpt.format import plan_record
from tieredckpt.format.nested import decode_nested, nested_of
from tieredckpt.format.parts import Kind, PartName
from tieredckpt.format.plain import encode_plain
from tieredckpt.format.plan import (
    BytesEntry,
    Chunk,
    Plan,
    TensorEntry,
    build_plan,
    decode_plan,
    encode_plan,
)
from tieredckpt.format.plan_record import open_plan, seal_plan

ROUNDS = 1000
ROUNDS_NIGHTLY = 1_000_000


def read(data: bytes) -> Metadata:
    """As ``show`` and ``export`` read a plan."""
    plan = decode_plan(data)
    metadata, _ = to_metadata(plan)
    nested = decode_nested(plan.nested)
    chosen = select(metadata, nested=nested)
    for path in in_doubt(metadata, (), nested)[1]:
        name_of(path)
    root = Node()
    for bare in chosen.empty:
        root.put(bare, Node())
    for key in (*chosen.tensors, *chosen.values):
        root.put(key.path, key.name)
    root.built()
    return metadata


def peak_of(data: bytes) -> int:
    """Most memory that it took to refuse a plan."""
    tracemalloc.start()
    try:
        with pytest.raises(IntegrityError):
            read(data)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def of_path(*path: Any) -> Plan:
    """A plan of one tensor with this path."""
    name = name_of(path)
    piece = Chunk((0,), (2,), 0, 0)
    entry = TensorEntry(
        name, "float32", "strided", False, "contiguous_format", False, (2,), (piece,)
    )
    return build_plan([entry], structures=[bytes(16)], planner_data=encode_plain({name: path}))


def empties(count: int) -> bytes:
    """A list of so many empty dicts."""
    return b"\xdd" + (count + 1).to_bytes(4, "big") + b"\1" + b"\x80" * count


def table(*path: Any) -> bytes:
    """Of nested keys: an empty dict at ``path``."""
    return encode_plain({path: {}})


FORGED = {
    "a deep path": of_path(*"a" * 20_000),
    "a place in a list": of_path("a", 10**12),
    "places in lists": of_path("a", *[1 << 20] * 60),
    "a name": replace(of_path("w"), names=("a" * 100_000,)),
    "empty dicts": replace(of_path("w"), planner_data=empties(2_000_000)),
    "a deep path of an empty dict": replace(of_path("w"), nested=table(*"a" * 20_000)),
    "a key of many digits": replace(of_path("w"), nested=table("w", 10**5000)),
}


def sealed(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> bytes:
    """As a forger compresses it, whatever the encoder would make of it."""
    with monkeypatch.context() as patch:
        patch.setattr(plan_record, "_limit_bytes", lambda _: 1 << 40)
        return encode_plan(plan)


@pytest.mark.parametrize("what", FORGED)
def test_a_forged_plan_takes_no_memory(what: str, monkeypatch: pytest.MonkeyPatch):
    data = sealed(FORGED[what], monkeypatch)
    assert len(data) < 2000
    assert peak_of(data) < 64 << 20


@pytest.mark.parametrize("attribute", ["dtype", "strides", "size", "chunks", "planner_data"])
def test_extra_attributes_replace_nothing(attribute: str):
    path = {"dtype": ("w", "properties"), "strides": ("w", "properties"), "planner_data": ()}
    extras = encode_plain({path.get(attribute, ("w",)): {attribute: None}})
    with pytest.raises(IntegrityError, match="has the name of another one"):
        read(encode_plan(replace(of_path("w"), extras=extras)))
    other = encode_plain({path.get(attribute, ("w",)): {f"{attribute}2": 7}})
    assert read(encode_plan(replace(of_path("w"), extras=other)))


def whole_plan() -> Plan:
    """With pieces, parts of a wrapper, a value, and all that is plain data."""
    kind = Kind("float32", (4,), ("Quantized", (4,), {"bits": 8}, {"data": None, "scale": None}))
    names = ("w", PartName("q", "data", (0,), kind.encode()), PartName("q", "scale", (0,)))
    entries: list[Any] = [
        TensorEntry(str(name), "float32", "strided", False, "contiguous_format", False, (4,), own)
        for name, own in zip(
            names,
            (
                (Chunk((0,), (3,), 0, 0), Chunk((3,), (1,), 1, 0)),
                (Chunk((0,), (4,), 0, 1),),
                (Chunk((0,), (4,), 0, 2),),
            ),
            strict=True,
        )
    ]
    return build_plan(
        [*entries, BytesEntry("l.0.x", 0, 3)],
        structures=[bytes(16)] * 2,
        planner_data=encode_plain({"w": ("w",), "l.0.x": ("l", 0, "x")}),
        extras=encode_plain({(): {"own": [1, {2}]}, ("w", "properties"): {"own": 7}}),
        storage_meta=encode_plain({"save_id": "text", "modules": []}),
    )


def fuzz(seed: int, rounds: int) -> Iterator[str]:
    """Yields, of each round, the outcome: "read", an error of ours, or what escaped."""
    rng = random.Random(seed)
    plans = [whole_plan(), replace(whole_plan(), nested=nested_of({1: {}, "l": [{2: {}}]}))]
    whole = [msgspec.msgpack.decode(open_plan(encode_plan(each))) for each in plans]
    others = [each for fields in whole for each in fields if isinstance(each, bytes)]
    for number in range(rounds):
        fields = list(whole[number % len(whole)])
        for _ in range(rng.choice((0, 1, 1, 1, 2, 3)) if number >= len(whole) else 0):
            at = rng.randrange(len(fields))
            if isinstance(fields[at], bytes):
                fields[at] = mutate(fields[at], rng.choice(others), rng)
        payload = msgspec.msgpack.encode(fields)
        try:
            read(seal_plan(payload, 2 if len(fields) > len(whole[0]) else 1))
            yield "read"
        except IntegrityError as error:
            yield "IntegrityError" if len(str(error)) < 5000 else f"round {number}: {error}"
        except UsageError as error:
            yield "UsageError" if len(str(error)) < 5000 else f"round {number}: {error}"
        except Exception:
            yield f"round {number} of seed {seed}: {payload!r}\n{traceback.format_exc()}"


def test_a_forged_plan_is_read_or_refused():
    outcomes = list(fuzz(1, ROUNDS))
    assert outcomes[:2] == ["read"] * 2
    assert set(outcomes) <= {"read", "IntegrityError", "UsageError"}


@pytest.mark.nightly
def test_a_forged_plan_is_read_or_refused_in_many_rounds():
    seed = random.SystemRandom().randrange(1 << 31)
    assert set(fuzz(seed, ROUNDS_NIGHTLY)) <= {"read", "IntegrityError", "UsageError"}


if __name__ == "__main__":
    until, counts = time.monotonic() + float(sys.argv[1]), dict[str, int]()
    for outcome in fuzz(random.SystemRandom().randrange(1 << 31), 1 << 40):
        counts[outcome] = counts.get(outcome, 0) + 1
        if outcome.startswith("round") and counts[outcome] == 1:
            print(outcome[:3000], flush=True)
        if time.monotonic() > until:
            break
    print({outcome[:60]: count for outcome, count in counts.items()})
