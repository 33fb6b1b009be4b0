"""Opens the tier of a URL that is no folder."""

from __future__ import annotations

from tieredckpt.errors import ConfigError
from tieredckpt.storage.base import Tier
from tieredckpt.storage.object.errors import SCHEMES, ObjectSettings, parse_object_url
from tieredckpt.storage.object.supplied import Handed, Supplied


def open_store(
    name: str,
    url: str,
    namespace: str,
    settings: ObjectSettings,
    script: Handed | Supplied | None = None,
) -> Tier:
    """Open the part of the store at ``url`` that belongs to a namespace.

    ``script``: credentials of the training script, for settings that want those.

    Only credentials are looked up; the first request is sent when the tier is used or checked
    (:meth:`Tier.check`).

    Raises:
        ConfigError: The URL, a setting, or a package that is not installed.
        TierUnavailableError: No credentials.
    """
    # Imported here: jobs without such a tier need none of its packages.
    at = f"{url.rstrip('/')}/{namespace}"
    if url.partition("://")[0] in SCHEMES:
        from tieredckpt.storage.object.tier import ObjectTier

        return ObjectTier(name, parse_object_url(at), settings, script)
    from tieredckpt.storage.object.fsspec import FsspecTier, fsspec_call, why_refused

    with fsspec_call(name, f"open {at[:200]}"):  # a package that is installed may not work
        why = why_refused(at)
    if why is not None:
        raise ConfigError(f"tier {name}: {why}", key="url")
    return FsspecTier(name, at, settings)
