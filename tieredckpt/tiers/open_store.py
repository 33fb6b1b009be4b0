"""Opens the tier of a URL that is no folder."""

from __future__ import annotations

from tieredckpt.tiers.base import Tier
from tieredckpt.tiers.object_settings import ObjectSettings


def open_store(name: str, url: str, namespace: str, settings: ObjectSettings) -> Tier:
    """The part of the store that belongs to a namespace; the store is first asked when it is used.

    Raises:
        ConfigError: The URL, a setting, or a package that is not installed.
        TierUnavailableError: No credentials.
    """
    # Only here: jobs without such a tier need none of its packages.
    from tieredckpt.tiers.object import open_object_tier

    return open_object_tier(name, f"{url.rstrip('/')}/{namespace}", settings)
