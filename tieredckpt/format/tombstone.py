"""The tombstone: what lies in a manifest's place where a checkpoint of a shared tier was deleted.

It is found under the manifest's own key, so that whoever is late to commit the checkpoint, or to
delete it, meets it there. It holds the manifest, and so the names of all that is to be cleaned up.
docs/format/manifest.md is normative.
"""

from __future__ import annotations

from typing import Literal, get_args

import msgspec

from tieredckpt.format.envelope import open_record, seal_record
from tieredckpt.format.manifest import (
    MANIFEST_LIMIT_BYTES,
    check_host,
    check_id,
    check_name,
    decode_manifest,
)
from tieredckpt.format.packing import unpack_struct

TOMBSTONE_LIMIT_BYTES = MANIFEST_LIMIT_BYTES + (1 << 16)

Cause = Literal["retention", "unfinished", "emptied"]

_CAUSES = get_args(Cause)
_TOMBSTONE = b"TCKTOMBS"
_VERSION = 1


class Tombstone(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """That one checkpoint was deleted from a tier, or will never be finished there."""

    namespace: str
    stream: str
    save_id: str
    cause: Cause
    """retention: it was committed, and is not kept. unfinished: it was never committed in time.
    emptied: after a deletion by retention, its segments go; nobody can take it back any more."""
    host: str
    """Who deleted it. Informative."""
    manifest: bytes = b""
    """Encoded; empty if what was to become the manifest could not be read."""


_encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(Tombstone)


def is_tombstone(data: bytes) -> bool:
    """Whether ``data`` claims to be a tombstone; it may be a damaged one."""
    return data.startswith(_TOMBSTONE)


def encode_tombstone(tombstone: Tombstone) -> bytes:
    """The tombstone as bytes. Raises ValueError if it is not a valid one."""
    _check(tombstone)
    payload = _encode(tombstone)
    if len(payload) > TOMBSTONE_LIMIT_BYTES:
        raise ValueError(f"a tombstone of {len(payload)} bytes")
    # As it is: what is large in it is compressed already, and so a tombstone is always longer than
    # the manifest that it replaces, and a listing shows the difference.
    return seal_record(_TOMBSTONE, _VERSION, payload, compress=False)


def decode_tombstone(data: bytes) -> Tombstone:
    """The tombstone in ``data``.

    Raises:
        IntegrityError: Damaged, or not a valid tombstone.
        FormatVersionError: Of a newer version.
    """
    payload = open_record(data, _TOMBSTONE, max_version=_VERSION, limit_bytes=TOMBSTONE_LIMIT_BYTES)
    return unpack_struct(_decoder, payload, "tombstone", _check)


def _check(tombstone: Tombstone) -> None:
    check_name(tombstone.namespace, "namespace")
    check_name(tombstone.stream, "stream")
    check_id(tombstone.save_id, "save id")
    check_host(tombstone.host, "the host of a tombstone")
    if tombstone.cause not in _CAUSES:
        raise ValueError(f"nothing is deleted because of {tombstone.cause[:200]!r}")
    if tombstone.manifest:
        manifest = decode_manifest(tombstone.manifest)
        if (manifest.stream, manifest.save_id) != (tombstone.stream, tombstone.save_id):
            raise ValueError("the manifest in it is that of another checkpoint")
