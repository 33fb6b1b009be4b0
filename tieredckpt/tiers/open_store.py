"""Opens the tier of a URL that is no folder."""

from __future__ import annotations

from tieredckpt.tiers.base import Tier
from tieredckpt.tiers.object_settings import SCHEMES, ObjectSettings, parse_object_url


def open_store(name: str, url: str, namespace: str, settings: ObjectSettings) -> Tier:
    """Open the part of the store at ``url`` that belongs to a namespace.

    Only credentials are looked for; the store is first asked when the tier is used
    (:meth:`Tier.check` asks it).

    Raises:
        ConfigError: The URL, a setting, or a package that is not installed.
        TierUnavailableError: No credentials.
    """
    # Only here: jobs without such a tier need none of its packages.
    at = f"{url.rstrip('/')}/{namespace}"
    if url.partition("://")[0] in SCHEMES:
        from tieredckpt.tiers.object import ObjectTier

        return ObjectTier(name, parse_object_url(at), settings)
    from tieredckpt.tiers.fsspec_tier import FsspecTier

    return FsspecTier(name, at, settings)
