"""What of a store's settings certainly fails on this machine, found without asking the store.

Looks at installed packages, at files and at values. Credentials are not looked for: that may ask a
machine's metadata service.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from tieredckpt.errors import ConfigError, how_to_install
from tieredckpt.tiers.object_credentials import Credentials
from tieredckpt.tiers.object_settings import ObjectSettings, parse_object_url
from tieredckpt.tiers.object_store import make_store, read_authorities

EXTRAS = {
    "s3": ("s3", ("obstore", "botocore")),
    "gs": ("s3", ("obstore",)),
    "az": ("s3", ("obstore",)),
}
"""Schemes of our own client: the extra, and what of it is needed. All others are fsspec's."""


@dataclass(frozen=True, slots=True)
class Complaint:
    """What is wrong with one key of a tier."""

    key: str
    message: str
    fatal: bool = True
    """False: it depends on variables that the job's environment may have and this one lacks."""


def complaints(name: str, url: str, settings: ObjectSettings) -> Iterator[Complaint]:
    """All that is wrong with a tier at ``url``, which is no folder."""
    scheme = url.partition("://")[0]
    extra, needs = EXTRAS.get(scheme, ("fsspec", ("fsspec",)))
    lacking = [each for each in needs if importlib.util.find_spec(each) is None]
    if lacking:
        yield Complaint(
            "url",
            f"{scheme}:// needs {' and '.join(lacking)}, not installed here: where it runs, "
            f"{how_to_install(extra)}",
        )
    if settings.ca is not None:
        try:
            read_authorities(settings.ca)
        except ConfigError as error:
            yield Complaint("ca", error.message)
    if lacking:
        return
    if extra == "fsspec":
        from tieredckpt.tiers.fsspec_tier import why_unknown

        if (why := why_unknown(url)) is not None:
            yield Complaint("url", why)
    else:
        yield from _of_client(name, url, settings)


def _of_client(name: str, url: str, settings: ObjectSettings) -> Iterator[Complaint]:
    at = parse_object_url(url)
    if at.scheme == "s3" and (why := _why_no_profile(settings.profile)) is not None:
        yield Complaint("profile", why)
    try:
        anyone = Credentials(name, "us-east-1", None)
        make_store(at, msgspec.structs.replace(settings, ca=None), anyone, tier=name)
    except ConfigError as error:
        message = error.message.removeprefix(f"tier {name}: ")
        # The account and the key file of the other two stand in the environment.
        yield Complaint(str(error.key), message, fatal=at.scheme == "s3")


def _why_no_profile(profile: str | None) -> str | None:
    if profile is None:
        return None
    import botocore.exceptions
    import botocore.session

    try:
        known = botocore.session.Session().available_profiles
    except botocore.exceptions.BotoCoreError as error:
        return f"the files that profiles stand in cannot be read: {error}"
    if profile in known:
        return None
    there = f"there are {', '.join(known[:20])}" if known else "there is none at all"
    return (
        f'there is no profile "{profile}" for this user here ({there}): add it to ~/.aws/config '
        "or ~/.aws/credentials"
    )
