"""One value of each format, the targets that hostile bytes are fed to, and how they mutate them.

Shared by the golden files, the property tests and the fuzz runner. Nothing here is random unless
a ``random.Random`` is passed in. A changed value changes a golden file: add samples, keep these.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import get_args

import msgspec

from tieredckpt.agent.cluster.authority import RULES, Rule
from tieredckpt.agent.host.sessions import LEASES, SessionRecord
from tieredckpt.config.tiers import Best, Keep, ObjectOptions, TierSpec
from tieredckpt.config.units import Every
from tieredckpt.format import envelope, manifest, nested, plain, plan, plan_record, records, segment
from tieredckpt.format.digest import digest
from tieredckpt.rpc.messages.agent import NamespaceSpec


def hex_id(number: int) -> str:
    return digest(b"id %d" % number).hex()


# --- segments ---------------------------------------------------------------------------------


def small_specs() -> list[segment.ItemSpec]:
    return [
        segment.ItemSpec("layers.0.weight", "tensor", 840, "float32", (60, 7), (30, 0), (30, 7)),
        segment.ItemSpec("scale", "tensor", 2, "bfloat16", (), (), ()),
        segment.ItemSpec("empty", "tensor", 0, "int64", (0, 5), (0, 0), (0, 5)),
        segment.ItemSpec("größe/重み", "tensor", 3000, "float8_e4m3fn", (3000,), (0,), (3000,)),
        segment.ItemSpec("of a later torch", "tensor", 5, "float2_x4", (9,), (3,), (3,)),
        segment.ItemSpec("rng/0", "bytes", 100),
        segment.ItemSpec("step", "bytes", 0),
    ]  # fmt: skip


def plan_id(made: plan.Plan | bytes) -> str:
    """The id of a plan, or of an encoded one."""
    data = made if isinstance(made, bytes) else plan.encode_plan(made)
    return plan_record.encoded_plan_id(data)


def gaps(layout: segment.SegmentLayout) -> list[tuple[int, int]]:
    """The byte ranges (start, stop) of the data that no item fills: they must be zeros."""
    found = []
    end = 0
    for item in layout.items:
        if item.offset > end:
            found.append((end, item.offset))
        end = item.offset + item.size_bytes
    if layout.data_bytes > end:
        found.append((end, layout.data_bytes))
    return found


def many_specs() -> list[segment.ItemSpec]:
    return [
        segment.ItemSpec(
            f"model.layers.{i // 4}.attention.{'qkvo'[i % 4]}.weight",
            "tensor",
            2 * 4 * 3,
            "bfloat16",
            (8, 3),
            (4 * (i % 2), 0),
            (4, 3),
        )
        for i in range(300)
    ]


def fill(layout: segment.SegmentLayout) -> bytes:
    """Data for a layout: each item holds bytes made from its name, gaps are zeros."""
    data = bytearray(layout.data_bytes)
    for item in layout.items:
        seed = digest(item.name.encode())
        content = (seed * (item.size_bytes // len(seed) + 1))[: item.size_bytes]
        data[item.offset : item.offset + item.size_bytes] = content
    return bytes(data)


def make_segment(specs: list[segment.ItemSpec], block_bytes: int = 4096) -> bytes:
    layout = segment.lay_out(specs, block_bytes)
    data = fill(layout)
    digests = b"".join(
        digest(data[at : at + block_bytes]) for at in range(0, len(data), block_bytes)
    )
    return data + segment.encode_footer(layout, digests, bytes(range(16)))


def read_segment(data: bytes) -> segment.Footer:
    trailer = segment.decode_trailer(data[-segment.TRAILER_BYTES :])
    return segment.decode_footer(trailer, data[-trailer.footer_bytes :])


# --- records ----------------------------------------------------------------------------------


def small_manifest() -> manifest.Manifest:
    return manifest.Manifest(
        save_id=hex_id(1),
        namespace="gpt-run-7",
        stream="default",
        step=1200,
        attempt=manifest.AttemptId(3, hex_id(2)),
        seq=11,
        parent=hex_id(3),
        lineage=(manifest.Ancestor(1, hex_id(4), 80), manifest.Ancestor(2, hex_id(5), 0)),
        plan=hex_id(6),
        tiers=("nvme",),
        segments=(
            manifest.SegmentRef(hex_id(7), 8192, hex_id(8), "d5f1c9b0-boot"),
            manifest.SegmentRef(hex_id(9), 1 << 31, hex_id(10), "node-2"),
        ),
        world_size=2,
        tags={"note": "größer"},
        created_at_s=1_790_000_000.25,
    )


def large_manifest(num_segments: int = 200) -> manifest.Manifest:
    base = small_manifest()
    segments = tuple(
        manifest.SegmentRef(hex_id(100 + i), 4096 * (i + 1), hex_id(5000 + i), f"node-{i // 8}")
        for i in range(num_segments)
    )
    return manifest.Manifest(
        **{name: getattr(base, name) for name in base.__struct_fields__ if name != "segments"},
        segments=segments,
    )


def small_attempt() -> manifest.AttemptRecord:
    lineage = (manifest.Ancestor(1, hex_id(4), 80),)
    return manifest.AttemptRecord(
        namespace="gpt-run-7",
        number=2,
        id=hex_id(5),
        run=hex_id(6),
        bases=(
            manifest.StreamBase("default", hex_id(3), 80, lineage),
            manifest.StreamBase("critic", None, None, ()),
        ),
        created_at_s=1_790_000_000.0,
    )


def chained_attempt() -> manifest.AttemptRecord:
    """It went back to save 60 of attempt 1, knowing of 80, and left another attempt 2 aside."""
    was = (manifest.Ancestor(1, hex_id(4), 80),)
    return msgspec.structs.replace(
        small_attempt(),
        number=3,
        id=hex_id(11),
        bases=(
            manifest.StreamBase(
                "default", hex_id(3), 60, (manifest.Ancestor(1, hex_id(4), 60),), was
            ),
            manifest.StreamBase("critic", None, None, (), was),
        ),
        followed=(manifest.Followed(2, hex_id(5)), manifest.Followed(2, hex_id(12), saved=False)),
    )


def placement(num_hosts: int, replicas: int) -> tuple[manifest.Holders, ...]:
    """A ring."""
    return tuple(
        manifest.Holders(
            f"node-{i}", tuple(f"node-{(i + 1 + j) % num_hosts}" for j in range(replicas))
        )
        for i in range(num_hosts)
    )


def replicated_manifest() -> manifest.Manifest:
    return msgspec.structs.replace(
        small_manifest(),
        replicas=(
            manifest.Holders("d5f1c9b0-boot", ("node-2", "größe 3")),
            manifest.Holders("node-2", ("d5f1c9b0-boot",)),
            manifest.Holders("node-4", ()),
        ),
    )


def large_replicated_manifest() -> manifest.Manifest:
    return msgspec.structs.replace(large_manifest(), replicas=placement(25, 2))


KINDS: tuple[records.RecordKind, ...] = get_args(records.RecordKind)


def save_record(kind: records.RecordKind) -> records.SaveRecord:
    """One of each kind, with the fields that the kind has."""
    bare = records.SaveRecord(
        namespace="gpt-run-7",
        stream="default",
        save_id=hex_id(1),
        kind=kind,
        id=hex_id(40 + KINDS.index(kind)),
        host="node-2",
        incarnation=hex_id(30),
    )
    fields: dict[records.RecordKind, dict[str, object]] = {
        "order": {"placement": placement(3, 2)},
        "ack": {"segments": (hex_id(7), hex_id(9))},
        "restored": {"text": f"3 {hex_id(2)}"},
        "bad": {"text": "größer als vorher: loss 1e9"},
        "good": {"text": "it was the data", "segments": (hex_id(40 + KINDS.index("bad")),)},
        "pin": {"text": "for the paper"},
        "failed": {"text": "no intact copy of segment 4 is left"},
        "unpin": {"segments": (hex_id(40 + KINDS.index("pin")),)},
        "dropped": {"text": "s3"},
        "spill": {"text": "s3", "segments": (hex_id(40 + KINDS.index("dropped")),)},
    }
    return msgspec.structs.replace(bare, **fields.get(kind, {}))


def large_save_record(num_hosts: int = 300) -> records.SaveRecord:
    return msgspec.structs.replace(save_record("order"), placement=placement(num_hosts, 2))


def small_tombstone() -> records.Tombstone:
    """Of a checkpoint that was committed and is not kept."""
    gone = small_manifest()
    return records.Tombstone(
        namespace=gone.namespace,
        stream=gone.stream,
        save_id=gone.save_id,
        cause="retention",
        host="node-2",
        manifest=manifest.encode_manifest(gone),
    )


def small_notice() -> records.DeletionIntent:
    """That two checkpoints are about to be deleted."""
    return records.DeletionIntent(saves=(("default", hex_id(7)), ("ema", hex_id(8))), host="node-2")


def notice_again() -> records.DeletionIntent:
    """The same, and one of them was taken back twice."""
    return msgspec.structs.replace(small_notice(), deletions=(0, 2))


def small_verdict() -> records.DeletionDecision:
    """That they are."""
    return records.DeletionDecision(notice="0123456789abcdef", goes=True)


def emptied_tombstone() -> records.Tombstone:
    """That it cannot be taken back."""
    return msgspec.structs.replace(small_tombstone(), cause="emptied", manifest=b"")


def bare_tombstone() -> records.Tombstone:
    """Of one whose manifest could not be read."""
    return msgspec.structs.replace(small_tombstone(), cause="unfinished", manifest=b"")


def configuration() -> Rule:
    """The file ``specs/<namespace>.json``."""
    disk = TierSpec(name="nvme", url="file:///mnt/größe", every=Every(steps=100), keep=Keep(last=2))
    bucket = TierSpec(
        name="s3",
        url="s3://bucket/runs",
        scope="shared",
        source="nvme",
        keep=Keep(
            last=3, max_age_s=3600.5, max_bytes=1 << 50, best=Best(metric="loss", mode="min")
        ),
        lag_alarm=Every(seconds=600.0),
        object=ObjectOptions(region="eu-south-2", sse_type="kms", sse_key="arn:aws:kms:1"),
    )
    spec = NamespaceSpec(capacity_bytes=1 << 38, keep_last=2, wait_s=30.0, tiers=(disk, bucket))
    return Rule(run=hex_id(6), spec=spec)


def lease() -> SessionRecord:
    """The file ``sessions/<id>``."""
    return SessionRecord(namespace="gpt-run-7", run=hex_id(6), local_rank=3, local_world_size=8)


def plain_value() -> object:
    return {
        "none": None,
        "flags": [True, False],
        "ints": (0, -1, 127, 128, -32, -33, 2**63, -(2**63), 2**64 - 1, 2**64, -(2**200)),
        "floats": [0.5, -0.0, 1e308, float("inf"), complex(1.5, -2.0)],
        "text": ["", "größe", "x" * 40, "y" * 300],
        "bytes": [b"", b"\x00\xff", b"z" * 300],
        "sets": [{3, 1, 2}, frozenset({"a", frozenset()}), set()],
        ("layers", 0): {1: "int key", 2.5: "float key", None: "none", b"b": [], True and "t": ()},
        "long": list(range(20)),
    }


def small_plan() -> plan.Plan:
    def tensor(
        name: str, dtype: str, shape: tuple[int, ...], *chunks: plan.Chunk
    ) -> plan.TensorEntry:
        trained = dtype == "float32"
        return plan.TensorEntry(
            name, dtype, "strided", trained, "contiguous_format", False, shape, chunks
        )

    return plan.build_plan(
        [
            tensor(
                "layers.0.weight",
                "float32",
                (60, 7),
                plan.Chunk((0, 0), (30, 7), 1, 0),
                plan.Chunk((30, 0), (30, 7), 0, 0),
            ),
            plan.BytesEntry("rng/0", 0, 5),
            tensor("scale", "bfloat16", (), plan.Chunk((), (), 0, 1)),
            tensor("empty", "int64", (0, 5), plan.Chunk((0, 0), (0, 5), 0, 2)),
            tensor("größe/重み", "float8_e4m3fn", (3000,), plan.Chunk((0,), (3000,), 0, 3)),
            tensor("huge", "float32", (1 << 40, 300), plan.Chunk((1 << 35, 0), (1, 300), 1, 1)),
            tensor("nowhere", "float32", (4,)),
            plan.BytesEntry("step", 0, 6),
        ],
        structures=(digest(b"structure 0"), digest(b"structure 1")),
        planner_data=plain.encode_plain({"layers.0.weight": ("layers", 0, "weight")}),
        extras=plain.encode_plain({"mcore_data": {"a": 1}}),
        metadata_version="1.0.0",
        storage_meta=plain.encode_plain(("/path", None)),
    )


def nested_state() -> dict[object, object]:
    return {
        "optim": {"state": {}, "param_groups": [{"lr": 0.1}, {}]},
        "schedule": {"milestones": {30: 1, 80: 2}},
        "by": {None: 1, True: 2, 0.5: 3, ("a", 7): 4, "text": 5},
        "layers": {"0": 1, "1": 2},
    }


def nested_plan() -> plan.Plan:
    """Of a state with keys that are no text."""
    return dataclasses.replace(small_plan(), nested=nested.nested_of(nested_state()))


def _encoded_record(kind: records.RecordKind) -> Callable[[], bytes]:
    return lambda: records.encode_save_record(save_record(kind))


GOLDEN: dict[str, Callable[[], bytes]] = {
    "segment-small": lambda: make_segment(small_specs()),
    "segment-blocks-4mib": lambda: make_segment(small_specs(), 4 << 20),
    "segment-blocks-128kib": lambda: make_segment(small_specs(), 128 << 10),
    "segment-many": lambda: make_segment(many_specs()),
    "segment-empty": lambda: make_segment([]),
    "manifest-small": lambda: manifest.encode_manifest(small_manifest()),
    "manifest-large": lambda: manifest.encode_manifest(large_manifest()),
    "manifest-replicas": lambda: manifest.encode_manifest(replicated_manifest()),
    "manifest-replicas-large": lambda: manifest.encode_manifest(large_replicated_manifest()),
    "attempt": lambda: manifest.encode_attempt(chained_attempt()),
    **{f"record-{kind}": _encoded_record(kind) for kind in KINDS},
    "record-large": lambda: records.encode_save_record(large_save_record()),
    "tombstone": lambda: records.encode_tombstone(small_tombstone()),
    "tombstone-bare": lambda: records.encode_tombstone(bare_tombstone()),
    "tombstone-emptied": lambda: records.encode_tombstone(emptied_tombstone()),
    "notice": lambda: records.encode_intent(small_notice()),
    "notice-again": lambda: records.encode_intent(notice_again()),
    "verdict": lambda: records.encode_decision(small_verdict()),
    "configuration": lambda: RULES.encode(configuration()),
    "lease": lambda: LEASES.encode(lease()),
    "plan": lambda: plan.encode_plan(small_plan()),
    "plan-nested": lambda: plan.encode_plan(nested_plan()),
    "plain": lambda: plain.encode_plain(plain_value()),
}
"""What each golden file holds, made by today's encoders."""

VERSIONS = {
    "manifest-replicas": 2, "manifest-replicas-large": 2, "attempt": 2, "plan-nested": 2
}  # fmt: skip
"""Of those that are not version 1."""

NOT_WRITTEN_ANY_MORE = {"attempt": 1}
"""Golden files of versions that encoders make no more, and that are read for ever."""


# --- targets of hostile bytes -----------------------------------------------------------------


@dataclass(frozen=True)
class Target:
    """A decoder, valid inputs of it, and what makes a mutated input pass the outer digests."""

    name: str
    samples: tuple[bytes, ...]
    decode: Callable[[bytes], object]
    memory_factor: int = 40
    """Allowed peak of memory per byte of input, besides 32 KiB."""


def _record(
    kind: bytes, decode: Callable[[bytes], object], version: int = 1
) -> Callable[[bytes], object]:
    """``decode``, fed with a payload that is put in an intact envelope first."""
    return lambda payload: decode(envelope.seal_record(kind, version, payload, compress=False))


def _reseal(data: bytes) -> bytes:
    return data + digest(data)


def _open_any(data: bytes) -> bytes:
    return envelope.open_record(_reseal(data), b"TCKTEST!", max_version=2, limit_bytes=1 << 20)


def _resealed_trailer(data: bytes) -> object:
    return segment.decode_trailer(_reseal(data[:112]))


def _resealed_footer(data: bytes) -> object:
    """Index bytes under a trailer that vouches for them."""
    layout = segment.SegmentLayout((), 64 * 200, envelope.CODEC_RAW, len(data), data, 1 << 20)
    return read_segment(segment.encode_footer(layout, bytes(16), bytes(16)))


def _index(codec: int, raw_bytes: int) -> Callable[[bytes], object]:
    return lambda data: segment.decode_index(
        data, codec=codec, raw_bytes=raw_bytes or len(data), data_bytes=64 * 400
    )


def _whole_plan(data: bytes) -> object:
    return list(plan.decode_plan(data).entries())


def _footer_or_nothing(data: bytes) -> object:
    return read_segment(data) if len(data) >= segment.TRAILER_BYTES else data


def _raw_index(specs: list[segment.ItemSpec]) -> bytes:
    codec, raw_bytes, stored = segment.encode_index(segment.lay_out(specs).items)
    return envelope.decompress_bytes(codec, stored, raw_bytes, "sample")


def targets() -> list[Target]:
    """All decoders: as they are used, and with the digests around them made to fit."""
    made = {name: make() for name, make in GOLDEN.items()}
    man = [
        envelope.open_record(made[n], b"TCKMANIF", max_version=1, limit_bytes=1 << 24)
        for n in ("manifest-small", "manifest-large")
    ]
    man2 = [
        envelope.open_record(made[n], b"TCKMANIF", max_version=2, limit_bytes=1 << 24)
        for n in ("manifest-replicas", "manifest-replicas-large")
    ]
    rec = [
        envelope.open_record(made[f"record-{n}"], b"TCKRECRD", max_version=1, limit_bytes=1 << 24)
        for n in (*KINDS, "large")
    ]
    att = envelope.open_record(made["attempt"], b"TCKATTMT", max_version=2, limit_bytes=1 << 22)
    tomb = [
        envelope.open_record(made[n], b"TCKTOMBS", max_version=1, limit_bytes=1 << 24)
        for n in ("tombstone", "tombstone-bare", "tombstone-emptied")
    ]
    note = envelope.open_record(made["notice"], b"TCKNOTCE", max_version=1, limit_bytes=1 << 16)
    verdict = envelope.open_record(made["verdict"], b"TCKVERDT", max_version=1, limit_bytes=1 << 16)
    rule = envelope.open_record(
        made["configuration"], b"TCKRULES", max_version=1, limit_bytes=1 << 16
    )
    held = envelope.open_record(made["lease"], b"TCKLEASE", max_version=1, limit_bytes=1 << 16)
    of_old = [msgspec.json.encode(each) for each in (configuration(), lease())]
    pay = plan_record.open_plan(made["plan"])
    stored = segment.encode_index(segment.lay_out(many_specs()).items)
    sealed = [
        envelope.seal_record(b"TCKTEST!", 1, bytes(3000), compress=c)[:-16] for c in (False, True)
    ]
    return [
        Target("segment", (made["segment-small"], made["segment-many"]), _footer_or_nothing),
        Target("trailer", (made["segment-small"][-128:],), segment.decode_trailer),
        Target("trailer, resealed", (made["segment-small"][-128:-16],), _resealed_trailer),
        Target("footer, resealed", (_raw_index(small_specs()),), _resealed_footer),
        Target("index", (_raw_index(small_specs()), _raw_index(many_specs())), _index(0, 0)),
        # Its input stands for twelve times as many bytes.
        Target("index, zstd", (stored[2],), _index(1, stored[1]), memory_factor=12 * 40),
        Target("envelope, resealed", tuple(sealed), _open_any),
        Target("manifest", (made["manifest-small"],), manifest.decode_manifest),
        Target(
            "manifest, resealed", tuple(man), _record(b"TCKMANIF", manifest.decode_manifest)
        ),
        Target("manifest v2", (made["manifest-replicas"],), manifest.decode_manifest),
        Target("manifest v2, resealed", tuple(man2),
               _record(b"TCKMANIF", manifest.decode_manifest, version=2)),
        Target("record", tuple(made[f"record-{kind}"] for kind in KINDS),
               records.decode_save_record),
        Target("record, resealed", tuple(rec), _record(b"TCKRECRD", records.decode_save_record)),
        Target("attempt", (made["attempt"],), manifest.decode_attempt),
        Target("attempt, resealed", (att,), _record(b"TCKATTMT", manifest.decode_attempt)),
        Target("attempt v2, resealed", (att,),
               _record(b"TCKATTMT", manifest.decode_attempt, version=2)),
        Target("tombstone", (made["tombstone"], made["tombstone-bare"]),
               records.decode_tombstone),
        Target("tombstone, resealed", tuple(tomb),
               _record(b"TCKTOMBS", records.decode_tombstone)),
        Target("notice", (made["notice"], made["notice-again"]), records.decode_intent),
        Target("notice, resealed", (note,), _record(b"TCKNOTCE", records.decode_intent)),
        Target("verdict", (made["verdict"],), records.decode_decision),
        Target("verdict, resealed", (verdict,), _record(b"TCKVERDT", records.decode_decision)),
        Target("configuration", (made["configuration"], of_old[0]), RULES.decode_either),
        Target("configuration, resealed", (rule,), _record(b"TCKRULES", RULES.decode)),
        Target("lease", (made["lease"], of_old[1]), LEASES.decode_either),
        Target("lease, resealed", (held,), _record(b"TCKLEASE", LEASES.decode)),
        Target("plan", (made["plan"], made["plan-nested"]), _whole_plan),
        Target("plan, resealed", (pay,), _record(b"TCKPPLAN", _whole_plan)),
        Target("plan v2, resealed", (plan_record.open_plan(made["plan-nested"]),),
               _record(b"TCKPPLAN", _whole_plan, version=2)),
        Target("nested keys", (nested_plan().nested,), nested.decode_nested),
        Target("plan id", (made["plan"],), plan_record.encoded_plan_id),
        Target(
            "plain",
            (made["plain"], plan.decode_plan(made["plan"]).planner_data),
            lambda data: plain.decode_plain(data, max(len(data), 1)),
        ),
    ]  # fmt: skip


# --- mutations --------------------------------------------------------------------------------

_INTERESTING = (0, 1, 0x7F, 0x80, 0x90, 0x91, 0x9F, 0xC0, 0xC1, 0xC6, 0xDB, 0xDD, 0xDF, 0xFE, 0xFF)
_EDGES = (0, 1, 2**16 - 1, 2**31, 2**32 - 1, 2**53, 2**63 - 1, 2**63, 2**64 - 1)


def mutate(data: bytes, other: bytes, rng: random.Random) -> bytes:
    """``data`` with one to eight mutations; ``other`` is what pieces are spliced in from."""
    out = bytearray(data)
    for _ in range(1 << rng.randrange(4)):
        at = rng.randrange(len(out) + 1)
        size = min(rng.randrange(1, 1 << rng.randrange(1, 10)), 256)
        kind = rng.randrange(9)
        if kind == 0 and out:
            out[at % len(out)] ^= 1 << rng.randrange(8)
        elif kind == 1 and out:
            out[at % len(out)] = rng.choice(_INTERESTING)
        elif kind == 2:
            width = rng.choice((1, 2, 4, 8))
            value = rng.choice(_EDGES) & ((1 << 8 * width) - 1)
            out[at : at + width] = value.to_bytes(width, rng.choice(("little", "big")))
        elif kind == 3:
            del out[at:]
        elif kind == 4:
            del out[at : at + size]
        elif kind == 5:
            out[at:at] = rng.randbytes(size)
        elif kind == 6:
            out[at:at] = out[at : at + size] * rng.randrange(1, 4)
        elif kind == 7 and other:
            start = rng.randrange(len(other))
            out[at : at + size] = other[start : start + size]
        else:
            out[at : at + size] = bytes(size)
    return bytes(out)
