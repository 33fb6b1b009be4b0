"""How an object tier talks to its store: plain values, and where its URL points to."""

from __future__ import annotations

from dataclasses import dataclass

from tieredckpt.errors import ConfigError
from tieredckpt.policy.config_tiers import ObjectOptions

ObjectSettings = ObjectOptions
"""Of one tier."""
SCHEMES = ("s3", "gs", "az", "memory")
"""What :func:`tieredckpt.tiers.open_store.open_store` opens through obstore; any other scheme is
fsspec's. (``memory`` forgets everything with the process: for tests.)"""


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
