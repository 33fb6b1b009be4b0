"""Reading the records of one tier: what is bad is a result, not an error."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from tieredckpt.errors import FormatVersionError, IntegrityError, NotFoundError
from tieredckpt.format.envelope import ENVELOPE_BYTES
from tieredckpt.format.manifest import (
    ATTEMPT_LIMIT_BYTES,
    MANIFEST_LIMIT_BYTES,
    decode_attempt,
    decode_manifest,
)
from tieredckpt.tiers.base import Tier, unavailable
from tieredckpt.tiers.contents import StoredAttempt, StoredManifest
from tieredckpt.tiers.keys import attempt_key, save_of

MAX_MANIFESTS = 1 << 16
"""More in one tier and namespace is not a checkpoint store but a mistake."""

T = TypeVar("T")


def read_manifests(tier: Tier) -> list[StoredManifest]:
    """All manifests of ``tier``. Raises TierUnavailableError."""
    found = []
    for info in tier.list("manifests/"):
        if (named := save_of(info.key)) is None or named[1]:
            continue
        stream, name = named[0]
        data, manifest, error = read_one(tier, info.key, MANIFEST_LIMIT_BYTES, decode_manifest)
        if manifest is not None and (manifest.stream, manifest.save_id) != (stream, name):
            manifest, error = None, f"{info.key} is the manifest of another checkpoint"
        if data is None and error is None:
            continue
        found.append(
            StoredManifest(stream=stream, save_id=name, data=data, manifest=manifest, error=error)
        )
        if len(found) > MAX_MANIFESTS:
            raise unavailable(
                tier.name,
                f"tier {tier.name} holds over {MAX_MANIFESTS} manifests of one namespace",
            )
    return found


def read_attempts(tier: Tier) -> list[StoredAttempt]:
    """All attempt records of ``tier``. Raises TierUnavailableError."""
    found = []
    for info in tier.list("attempts/"):
        data, record, error = read_one(tier, info.key, ATTEMPT_LIMIT_BYTES, decode_attempt)
        if record is not None and attempt_key(record.number, record.id) != info.key:
            record, error = None, f"{info.key} is the record of another attempt"
        if data is not None or error is not None:
            found.append(StoredAttempt(key=info.key, data=data, record=record, error=error))
    return found


def read_one(
    tier: Tier, key: str, limit: int, decode: Callable[[bytes], T]
) -> tuple[bytes | None, T | None, str | None]:
    """Bytes, value and error of one record; all None if it was deleted meanwhile."""
    data = None
    try:
        data = tier.get(key, limit=limit + ENVELOPE_BYTES)
        return data, decode(data), None
    except NotFoundError:
        return None, None, None
    except IntegrityError as error:
        return data, None, str(error)


def is_newer(data: bytes, decode: Callable[[bytes], object]) -> bool:
    """Whether ``data`` is intact but of a later release: then it is nobody's to replace."""
    try:
        decode(data)
    except FormatVersionError:
        return True
    except IntegrityError:
        return False
    return False
