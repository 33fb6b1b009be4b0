"""How an object tier talks to its store: plain values, and where its URL points to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tieredckpt.errors import ConfigError

SCHEMES = ("s3", "gs", "az", "memory")
"""What :func:`tieredckpt.tiers.object.open_object_tier` opens through obstore; any other scheme is
fsspec's. (``memory`` forgets everything with the process: for tests.)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectSettings:
    """Of one tier; what has no meaning for its store is ignored."""

    endpoint: str | None = None
    """``http[s]://host[:port]``; None: the store's own."""
    region: str | None = None
    """None: that of the profile or of the environment, else us-east-1."""
    profile: str | None = None
    """Of the credentials; None: the usual chain (docs/tiers.md)."""
    anonymous: bool = False
    path_style: bool = False
    """``https://endpoint/bucket/key`` instead of ``https://bucket.endpoint/key``."""
    allow_http: bool = False
    ca: str | None = None
    """PEM file of authorities that are trusted besides the usual ones."""
    concurrency: int = 8
    """Requests at once that carry parts or ranges; as many parts are held in memory."""
    part_bytes: int = 16 << 20
    bandwidth_bytes_per_s: int | None = None
    """Most that this tier uploads; None: no limit."""
    storage_class: str | None = None
    sse_type: Literal["s3", "kms"] | None = None
    sse_key: str | None = None
    timeout_s: float = 30.0
    """Of a request in which no byte moves."""
    retry_for_s: float = 300.0
    """How long a failing request is repeated, before it is an error."""


@dataclass(frozen=True, slots=True)
class ObjectUrl:
    """``scheme://bucket/prefix``, taken apart; ``prefix`` has no slash at either end."""

    scheme: str
    bucket: str
    prefix: str

    def path(self, key: str) -> str:
        """The key in the bucket."""
        return f"{self.prefix}/{key}" if self.prefix else key


def parse_object_url(url: str) -> ObjectUrl:
    """Take a URL apart.

    Raises:
        ConfigError: It names no bucket, or has parts that no such URL has.
    """
    scheme, colon, rest = url.partition("://")
    bucket, _, prefix = rest.partition("/")
    parts = [part for part in prefix.split("/") if part]
    usable = rest.isascii() and rest.isprintable() and not set(rest) & set("?#@ ")
    if not colon or not (bucket or scheme == "memory") or not usable or {".", ".."} & set(parts):
        raise ConfigError(
            f"{url[:200]!r} is not the URL of a place in a bucket: write {scheme[:10] or 's3'}"
            "://bucket/folder",
            key="url",
        )
    return ObjectUrl(scheme, bucket, "/".join(parts))
