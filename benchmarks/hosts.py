"""What the hosts of a large job hold, made up: the input of a recovery plan."""

from __future__ import annotations

from tieredckpt.format.manifest import (
    Ancestor,
    AttemptId,
    AttemptRecord,
    Holders,
    Manifest,
    SegmentRef,
    StreamBase,
    encode_attempt,
    encode_manifest,
)
from tieredckpt.storage.holdings import (
    Holdings,
    ManifestFact,
    SegmentFact,
    TierFacts,
    encode_holdings,
    manifest_digest,
    slimmed,
)

NAMESPACE = "run"
SEGMENT_BYTES = 1 << 30


def encoded_holdings(
    hosts: int, ranks_per_host: int, checkpoints: int, namespace: str = NAMESPACE
) -> list[bytes]:
    """The answers of all hosts to one that knows nothing: manifests in full once, else as digests.

    Each host holds its own segments and those of one other host, all in memory.
    """
    names = [f"host-{number:05d}" for number in range(hosts)]
    manifests = [
        _manifest(names, ranks_per_host, number, namespace) for number in range(checkpoints)
    ]
    encoded = [encode_manifest(each) for each in manifests]
    known = {manifest_digest(data) for data in encoded}
    record = encode_attempt(
        AttemptRecord(
            namespace=namespace, number=2, id=f"{2:032x}", run="ab" * 16, created_at_s=0.0,
            bases=(StreamBase("default", None, None, (Ancestor(1, f"{1:032x}", checkpoints),)),),
        )
    )  # fmt: skip
    facts = tuple(
        ManifestFact(stream="default", save_id=each.save_id, manifest=data, error=None)
        for each, data in zip(manifests, encoded, strict=True)
    )
    answers = []
    for number, name in enumerate(names):
        owners = {number, (number - 1) % hosts}
        segments = tuple(
            SegmentFact(id=ref.id, size=ref.size, root=ref.root, error=None)
            for each in manifests
            for owner in owners
            for ref in each.segments[owner * ranks_per_host : (owner + 1) * ranks_per_host]
        )
        tier = TierFacts(
            tier="memory", scope="host", kind="memory", available=True, error=None,
            manifests=facts, plans=(manifests[0].plan,), segments=segments,
        )  # fmt: skip
        held = Holdings(host_id=name, namespace=namespace, attempts=(record,), tiers=(tier,))
        answers.append(encode_holdings(slimmed(held, known if number else ())))
    return answers


def _manifest(names: list[str], ranks_per_host: int, number: int, namespace: str) -> Manifest:
    return Manifest(
        save_id=f"{number:032x}",
        namespace=namespace,
        stream="default",
        step=number,
        attempt=AttemptId(1, f"{1:032x}"),
        seq=number,
        parent=f"{number - 1:032x}" if number else None,
        lineage=(),
        plan="f" * 32,
        tiers=(),
        segments=tuple(
            SegmentRef(f"{number:08x}{host:016x}{rank:08x}", SEGMENT_BYTES, "e" * 32, name)
            for host, name in enumerate(names)
            for rank in range(ranks_per_host)
        ),
        world_size=len(names) * ranks_per_host,
        tags={},
        created_at_s=0.0,
        replicas=tuple(
            Holders(name, (names[(host + 1) % len(names)],)) for host, name in enumerate(names)
        ),
    )
