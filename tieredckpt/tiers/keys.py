"""The keys of everything that a tier holds, built here and nowhere else."""

from __future__ import annotations

import re

from tieredckpt.format.manifest import ID_PATTERN, NAME_PATTERN, check_id, check_name

_DELETIONS = re.compile(r"[1-9][0-9]{0,5}")


def manifest_key(stream: str, save_id: str, deletions: int = 0) -> str:
    """``manifests/<stream>/<save id>``. Like the next three: ValueError on an impossible name.

    ``.<deletions>`` follows, in shared tiers, for what is there after so many deletions.
    """
    key = f"manifests/{check_name(stream, 'stream')}/{check_id(save_id, 'save id')}"
    return f"{key}.{deletions}" if deletions else key


def save_of(key: str) -> tuple[tuple[str, str], int] | None:
    """Stream and save id that a key of a commit names, and after how many deletions; or None."""
    _, stream, name = key.split("/") if key.count("/") == 2 else ("", "", "")
    save_id, dot, deletions = name.partition(".")
    valid = NAME_PATTERN.fullmatch(stream) and ID_PATTERN.fullmatch(save_id)
    if not valid or (dot and not _DELETIONS.fullmatch(deletions)):
        return None
    return (stream, save_id), int(deletions or 0)


def plan_key(plan_id: str) -> str:
    """``plans/<plan id>``."""
    return f"plans/{check_id(plan_id, 'plan id')}"


def segment_key(segment_id: str) -> str:
    """``segments/<segment id>``."""
    return f"segments/{check_id(segment_id, 'segment id')}"


def attempt_key(number: int, attempt_id: str) -> str:
    """``attempts/<number, at least 8 digits>-<attempt id>``."""
    if not 0 <= number < 1 << 63:
        raise ValueError(f"attempt number {number}")
    return f"attempts/{number:08d}-{check_id(attempt_id, 'attempt id')}"


def record_key(save_id: str, record_id: str) -> str:
    """``records/<save id>/<record id>``."""
    return f"records/{check_id(save_id, 'save id')}/{check_id(record_id, 'record id')}"


def claim_key(number: int) -> str:
    """``claims/<attempt number, at least 8 digits>``, in shared tiers."""
    if not 0 <= number < 1 << 63:
        raise ValueError(f"attempt number {number}")
    return f"claims/{number:08d}"


def pending_key(stream: str, save_id: str) -> str:
    """``pending/<stream>/<save id>``, in shared tiers."""
    return f"pending/{check_name(stream, 'stream')}/{check_id(save_id, 'save id')}"


def plan_copy_key(plan_id: str, nonce: str) -> str:
    """``plans/<plan id>.<nonce>``, in shared tiers: each copy is written once."""
    return f"plans/{check_id(plan_id, 'plan id')}.{check_name(nonce, 'nonce')}"


def notice_key(notice: str) -> str:
    """``notices/<nonce>``, in shared tiers: what somebody is about to delete."""
    return f"notices/{check_name(notice, 'notice')}"


def verdict_key(notice: str) -> str:
    """``verdicts/<nonce of the notice>``, in shared tiers: whether it is deleted."""
    return f"verdicts/{check_name(notice, 'notice')}"
