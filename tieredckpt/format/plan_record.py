"""The envelope and the id of a plan, without its content: all that the agent needs.

Separate from :mod:`tieredckpt.format.plan`, which imports numpy; the agent must not.
"""

from __future__ import annotations

from tieredckpt.format.envelope import open_record, payload_digest, seal_record

PLAN_LIMIT_BYTES = 512 << 20
"""Largest plan before compression: about ten million pieces."""

VERSION = 2
"""The newest; with a table of nested keys. Plans without one are version 1."""
_MAGIC = b"TCKPPLAN"
_RATIO_MAX, _SLACK_BYTES = 4096, 256 << 10


def seal_plan(payload: bytes, version: int = 1) -> bytes:
    """``payload`` in its envelope, compressed. Raises ValueError if it is over the limit."""
    if len(payload) > PLAN_LIMIT_BYTES:
        raise ValueError(f"a plan of {len(payload)} bytes; the limit is {PLAN_LIMIT_BYTES}")
    sealed = seal_record(_MAGIC, version, payload, compress=True)
    fits = len(payload) <= _limit_bytes(sealed)
    return sealed if fits else seal_record(_MAGIC, version, payload, compress=False)


def _limit_bytes(data: bytes) -> int:
    """Of the payload in the record ``data``. The plan of a state on 1024 ranks is compressed to a
    1500th at most; a forged one to a 30,000th, and what is decoded from it is larger still.
    """
    return min(PLAN_LIMIT_BYTES, max(_SLACK_BYTES, _RATIO_MAX * len(data)))


def open_plan(data: bytes) -> bytes:
    """The payload of the encoded plan in ``data``, verified but not decoded.

    Raises:
        IntegrityError: Damaged, truncated, oversized or no plan.
        FormatVersionError: Of a newer version.
    """
    return open_record(data, _MAGIC, max_version=VERSION, limit_bytes=_limit_bytes(data))


def encoded_plan_id(data: bytes) -> str:
    """The id of the encoded plan in ``data``: 32 hex digits of its payload's digest.

    Compression does not change it. Uses a few MiB of memory for plans of any size. Raises as
    :func:`open_plan`.
    """
    found = payload_digest(data, _MAGIC, max_version=VERSION, limit_bytes=PLAN_LIMIT_BYTES)
    return found.hex()
