"""Manifests and records made from few words, for tests of what is decided about them."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence

from tieredckpt.format.manifest import AttemptId, Holders, Manifest, SegmentRef
from tieredckpt.format.records import RecordKind, SaveRecord
from tieredckpt.format.segment import PAGE_BYTES

NAMESPACE = "run"

_numbers = itertools.count()


def made(*parts: object) -> str:
    """An id that says nothing but is the same for the same parts."""
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()


def manifest_of(
    seq: int,
    owners: Sequence[str],
    replicas: tuple[Holders, ...] = (),
    *,
    stream: str = "default",
    attempt: int = 1,
) -> Manifest:
    """A checkpoint with one segment per entry of ``owners``, in the order of hosts as given."""
    save_id = made("save", stream, attempt, seq)
    return Manifest(
        save_id=save_id,
        namespace=NAMESPACE,
        stream=stream,
        step=seq,
        attempt=AttemptId(attempt, made("attempt", attempt)),
        seq=seq,
        parent=None,
        lineage=(),
        plan=made("plan"),
        tiers=(),
        segments=tuple(
            SegmentRef(
                id=made("segment", save_id, n), size=PAGE_BYTES, root=made("root", n), host=o
            )
            for n, o in enumerate(owners)
        ),
        world_size=len(owners),
        tags={},
        created_at_s=0.0,
        replicas=replicas,
    )


def record(
    manifest: Manifest,
    kind: RecordKind,
    *,
    host: str = "h0",
    incarnation: str | None = None,
    segments: tuple[str, ...] = (),
    placement: tuple[Holders, ...] = (),
    stream: str | None = None,
) -> SaveRecord:
    """A record about ``manifest``, with an id of its own."""
    return SaveRecord(
        namespace=manifest.namespace,
        stream=manifest.stream if stream is None else stream,
        save_id=manifest.save_id,
        kind=kind,
        id=made("record", next(_numbers)),
        host=host,
        incarnation=made("life", 0) if incarnation is None else incarnation,
        segments=segments,
        placement=placement,
    )


def order(manifest: Manifest, placement: tuple[Holders, ...] = ()) -> SaveRecord:
    """The leader orders it, with these holders beside those of the manifest."""
    return record(manifest, "order", placement=placement)


def ack(manifest: Manifest, holder: str, *owners: str) -> SaveRecord:
    """``holder`` has all segments of these owners."""
    segments = tuple(ref.id for ref in manifest.segments if ref.host in owners)
    return record(manifest, "ack", host=holder, segments=segments)
