"""Tests the operations of a tier with two objects of 8 KiB that are deleted again.

They are a segment and a record of no checkpoint: if the probe is killed, a sweep deletes them.
Only the record is listed, in a folder that nothing else is put into: there may be a million
segments.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable

from tieredckpt.errors import (
    ConfigError,
    IntegrityError,
    NotFoundError,
    TieredCkptError,
    UsageError,
)
from tieredckpt.storage.base import Scope, Tier, record_key, segment_key

STEPS = (
    "list", "create", "listed", "read", "condition", "replace", "segment", "uploads", "clock",
    "delete",
)  # fmt: skip
"""The steps in their order: listing, creating a small object, whether a list shows it at once,
reading a range of it, refusing another one under its key, replacing it, storing a segment, listing
unfinished uploads, the store's time, deleting."""

_PAGE = 4096
_NO_SAVE = "0" * 32
FOLDERS = (f"records/{_NO_SAVE}", "records", "segments", "tmp")
"""What the probe of a folder makes below its root."""
_NOT_IMPLEMENTED = 501
_LONG_AGO_S = 1e11
"""Longer ago than any clock shows: unfinished uploads are listed, and none is aborted."""

Probed = dict[str, TieredCkptError | None]
"""By step, its error; None: it works. Steps that could not be tried are missing."""


def probe(tier: Tier, *, mint: Callable[[], str] = lambda: secrets.token_hex(16)) -> Probed:
    """Try all operations of a tier; no object is left if deleting works.

    Args:
        tier: An opened tier, which repeats failed requests as it always does. Of a folder,
            :data:`FOLDERS` stay.
        mint: Makes ids of 32 hex digits.
    """
    found: Probed = {}

    def step(name: str, call: Callable[[], object]) -> TieredCkptError | None:
        found[name] = None
        try:
            call()
        except TieredCkptError as error:
            found[name] = error
        return found[name]

    small, large = record_key(_NO_SAVE, mint()), segment_key(mint())
    first, other = secrets.token_bytes(2 * _PAGE), secrets.token_bytes(2 * _PAGE)
    error = step("list", lambda: _list(tier))
    if error is not None and not error.fields.get("status"):
        return found  # each other step would wait in vain, too
    try:
        error = step("create", lambda: tier.put(small, first))
        if error is None:
            step("listed", lambda: _is_listed(tier, small, expected=True))
            step("read", lambda: _read(tier, small, first))
            step("condition", lambda: _is_refused(tier, small, first, other))
            step("replace", lambda: tier.replace(small, other))
        elif (
            error.fields.get("status") == _NOT_IMPLEMENTED
            or error.fields.get("code") == "NotImplemented"
        ):
            found["condition"] = _no_condition(tier, "it does not know conditional requests")
        step("segment", lambda: _segment(tier, large, first))
        if tier.scope is Scope.SHARED:
            step("uploads", lambda: tier.sweep_unfinished(_LONG_AGO_S))
            step("clock", tier.now_s)
    finally:
        step("delete", lambda: _delete(tier, small, large))
    return found


def _list(tier: Tier) -> None:
    tier.check()
    for _ in tier.list("manifests/"):
        break


def _is_refused(tier: Tier, key: str, first: bytes, other: bytes) -> None:
    try:
        tier.put(key, other)
    except UsageError:
        if tier.get(key, limit=len(first)) == first:
            return
    raise _no_condition(tier, "it replaced an object instead of refusing a second one")


def _no_condition(tier: Tier, why: str) -> ConfigError:
    return ConfigError(
        f"this store cannot be used as a shared tier: {why}, so two jobs could overwrite each "
        "other's checkpoints; it needs creates with If-None-Match: * (docs/operate/tiers.md lists "
        "stores)"
        if tier.scope is Scope.SHARED
        else f"this folder cannot be used: {why}",
        key="url",
    )


def _read(tier: Tier, key: str, data: bytes) -> None:
    into = bytearray(_PAGE)
    with tier.open(key) as opened:
        opened.read_into(_PAGE, memoryview(into))
    if into != data[_PAGE:]:
        raise IntegrityError(
            f"what was read is not what was written: a range of {key}", tier=tier.name, key=key
        )


def _segment(tier: Tier, key: str, data: bytes) -> None:
    tier.put_from(key, _Source(data))
    if tier.info(key).size != len(data):
        raise IntegrityError(f"{key} has another size than was written", tier=tier.name, key=key)


class _Source:
    """Bytes in memory as a :class:`tieredckpt.storage.base.ByteSource`."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.size = len(data)

    def read_into(self, offset: int, into: memoryview) -> None:
        """Fill ``into`` from ``offset``."""
        into[:] = self._data[offset : offset + len(into)]


def _delete(tier: Tier, small: str, large: str) -> None:
    tier.delete_many((small, large))
    for key in (small, large):
        try:
            tier.info(key)
        except NotFoundError:
            continue
        raise IntegrityError(f"{key} is there after it was deleted", tier=tier.name, key=key)
    _is_listed(tier, small, expected=False)


def _is_listed(tier: Tier, key: str, *, expected: bool) -> None:
    folder = key.rpartition("/")[0]
    if any(info.key == key for info in tier.list(f"{folder}/")) != expected:
        what = "misses an object that was just created" if expected else "shows a deleted object"
        raise IntegrityError(
            f"a list {what}: this store cannot be a shared tier; lists must be strongly consistent "
            "(docs/operate/tiers.md), so use the store itself, and no cache or replica of it",
            tier=tier.name,
            key=key,
        )
