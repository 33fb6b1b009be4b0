"""Which names a bucket can have, so that a wrong one is found before anything is started."""

from __future__ import annotations

import re

from tieredckpt.policy.units import show

_S3 = re.compile(r"[a-z0-9](?:[a-z0-9.-]{1,61})[a-z0-9]")
_S3_ELSEWHERE = re.compile(r"[A-Za-z0-9._-]{1,255}")
"""What other stores than Amazon's take, old buckets included."""
_ADDRESS = re.compile(r"\d+\.\d+\.\d+\.\d+")
_OTHERS = {
    "gs": (
        re.compile(r"[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]"),
        "Google's have 3 to 63 lower-case letters, digits, dots, underscores and hyphens, the "
        "first and the last a letter or digit",
    ),
    "az": (
        re.compile(r"[a-z0-9](?:-?[a-z0-9]){2,62}|\$(?:root|web|logs)"),
        "a container's has 3 to 63 lower-case letters, digits and single hyphens, the first and "
        "the last a letter or digit",
    ),
}
"""What a name looks like, and what to say if it does not."""
_PART_MAX = 63
"""Characters between two dots; a container's name has no dots."""
_UNUSABLE = frozenset("?#@ ")
WITH_BUCKET = ("s3", *_OTHERS)


def check_bucket(url: str, *, own_endpoint: bool) -> None:
    """Refuse a URL whose bucket no such store can have; other schemes are not looked at.

    Args:
        url: ``scheme://bucket/path``.
        own_endpoint: The store is not the scheme's own: only the characters count.

    Raises:
        ValueError: There is no such bucket, and there cannot be one.
    """
    scheme, _, rest = url.partition("://")
    if scheme not in WITH_BUCKET:
        return
    bucket = rest.partition("/")[0]
    why = _why_not_s3(bucket, own_endpoint) if scheme == "s3" else _why_not(bucket, scheme)
    if why is not None:
        raise ValueError(f"{show(bucket)} is not the name of a bucket: {why}")
    if not rest.isascii() or set(rest) & _UNUSABLE:
        raise ValueError(f"{show(url)} is not a usable URL: no spaces, no @, ASCII only")


def _why_not_s3(bucket: str, own_endpoint: bool) -> str | None:
    if own_endpoint:
        good = _S3_ELSEWHERE.fullmatch(bucket)
        return None if good else "use letters, digits, dots, underscores and hyphens"
    if not _S3.fullmatch(bucket):
        return (
            "Amazon's have 3 to 63 lower-case letters, digits, dots and hyphens, the first and the "
            "last a letter or digit (for another store set its endpoint)"
        )
    if ".." in bucket or _ADDRESS.fullmatch(bucket):
        return "no two dots side by side, and no address"
    return None


def _why_not(bucket: str, scheme: str) -> str | None:
    pattern, why = _OTHERS[scheme]
    in_parts = all(1 <= len(part) <= _PART_MAX for part in bucket.split("."))
    return None if pattern.fullmatch(bucket) and in_parts else why
