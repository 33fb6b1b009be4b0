"""Makes obstore's stores from our settings, and translates its errors to ours.

It also finds settings that certainly fail on this machine, by installed packages, files and values.
That sends no request: credentials are not looked up, since that may ask a metadata service.
"""

from __future__ import annotations

import contextlib
import importlib.util
import ssl
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Unpack

import msgspec

from tieredckpt.errors import ConfigError, TierUnavailableError, how_to_install
from tieredckpt.storage.folder import Known
from tieredckpt.storage.object.credentials import Credentials
from tieredckpt.storage.object.errors import (
    SCHEMES,
    ObjectSettings,
    ObjectUrl,
    Refusal,
    error_of,
    parse_object_url,
    refusal_of,
    without_body,
)

if TYPE_CHECKING:
    from obstore.store import ObjectStore

_CONNECT_S = 10
_RETRIES_MAX = 1000
_BACKOFF_MAX_S = 20
_CA_BYTES_MAX = 1 << 20


def make_store(
    at: ObjectUrl, settings: ObjectSettings, credentials: Credentials | None, *, tier: str
) -> ObjectStore:
    """The store at ``scheme://bucket``; ``credentials`` only for S3.

    Raises:
        ConfigError: obstore is not installed, or refuses a setting.
    """
    try:
        from obstore import store
        from obstore.exceptions import BaseError
    except ImportError as error:
        raise ConfigError(
            f"tier {tier} needs the extra s3: {how_to_install('s3')}", key="url"
        ) from error
    if at.scheme == "memory":
        return store.MemoryStore()
    client: dict[str, Any] = {
        "allow_http": settings.allow_http,
        "connect_timeout": timedelta(seconds=_CONNECT_S),
        # Objects here are small, or ranges of a part: the complete request must end by then.
        "timeout": timedelta(seconds=2 * settings.timeout_s),
        "read_timeout": timedelta(seconds=settings.timeout_s),
        "user_agent": "tieredckpt",
    }
    if settings.ca is not None:
        try:
            client["root_certificate"] = read_authorities(settings.ca)
        except ConfigError as error:
            raise ConfigError(f"tier {tier}: ca: {error.message}", **error.fields) from error
    retry: dict[str, Any] = {
        "max_retries": _RETRIES_MAX,  # limited by retry_timeout
        "retry_timeout": timedelta(seconds=settings.retry_for_s),
        "backoff": {
            "init_backoff": timedelta(milliseconds=100),
            "max_backoff": timedelta(seconds=_BACKOFF_MAX_S),
            "base": 2,
        },
    }
    common: dict[str, Any] = {"client_options": client, "retry_config": retry}
    try:
        if at.scheme == "s3":
            assert credentials is not None
            return _s3(store.S3Store, at, settings, credentials, common)
        if settings.anonymous:
            common["skip_signature"] = True
        if at.scheme == "gs":
            return store.GCSStore(at.bucket, **common)
        if settings.endpoint is not None:
            common["endpoint"] = settings.endpoint
        return store.AzureStore(at.bucket, **common)
    except (BaseError, ValueError, TypeError) as error:
        short = str(error).partition("\n\nDebug source:")[0]
        raise ConfigError(
            f"tier {tier}: the object store's client refuses its settings: {short}", key="url"
        ) from error


def _s3(
    make: Any,
    at: ObjectUrl,
    settings: ObjectSettings,
    credentials: Credentials,
    common: dict[str, Any],
) -> ObjectStore:
    from tieredckpt.storage.object.s3_http import endpoint_of

    origin, path = endpoint_of(at, settings, credentials.region)
    if settings.endpoint is not None:
        common["endpoint"] = origin
    if not path:
        common["virtual_hosted_style_request"] = True
    if settings.anonymous:
        common["skip_signature"] = True
    else:
        common["credential_provider"] = credentials.for_obstore
    if settings.sse_type is not None:
        common["server_side_encryption"] = "AES256" if settings.sse_type == "s3" else "aws:kms"
    if settings.sse_key is not None:
        common["sse_kms_key_id"] = settings.sse_key
    found: ObjectStore = make(
        at.bucket, region=credentials.region, checksum_algorithm="sha256", **common
    )
    return found


def read_authorities(path: str) -> bytes:
    """The file of the setting ``ca``. Raises ConfigError: it is missing or not a PEM file."""
    try:
        with open(path, "rb") as file:
            data = file.read(_CA_BYTES_MAX)
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(path)
    except ssl.SSLError as error:
        raise ConfigError(f"{path} is no PEM file of certificates ({error})", key="ca") from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}", key="ca") from error
    return data


class ExistsError(Exception):
    """A conditional request found that the key is taken, or has other bytes than before."""


@contextlib.contextmanager
def store_call(tier: str, doing: str, **known: Unpack[Known]) -> Iterator[None]:
    """Run a call of obstore; ``doing`` completes "cannot ...". See :func:`error_of`.

    Raises:
        NotFoundError, CapacityError, TierUnavailableError: In place of obstore's errors.
        ExistsError: A condition did not hold.
    """
    from obstore.exceptions import AlreadyExistsError, BaseError, PreconditionError

    try:
        yield
    except (AlreadyExistsError, PreconditionError) as error:
        raise ExistsError from error
    except (BaseError, OSError, ValueError) as error:
        refusal = refusal_of(str(error))
        if isinstance(error, FileNotFoundError):
            refusal = replace(refusal, status=404)
        cause = BaseError(without_body(str(error)))  # a traceback shows it
        raise error_of(refusal, tier=tier, doing=doing, **known) from cause


def may_pass(error: TierUnavailableError) -> bool:
    """Whether :func:`store_call` raised it for a failure that obstore repeats, and did for as long
    as it may: by its status, a request that was not sent, or obstore's count of its retries.
    """
    status, text = error.fields.get("status", 0), str(error.__cause__)
    passing = Refusal(status, error.fields.get("code", ""), "").passing
    return passing and ("error sending request" in text or "retries, max_retries" in text)


# --- settings that certainly fail here --------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Complaint:
    """A setting that will not work here, or not well."""

    key: str
    """Dotted; from :func:`complaints` a key of the tier."""
    message: str
    fatal: bool = True
    """Whether it certainly fails as things are now; else it is a warning."""


def complaints(name: str, url: str, settings: ObjectSettings) -> Iterator[Complaint]:
    """All problems of a tier at ``url``, which is not a folder."""
    scheme = url.partition("://")[0]
    extra, packages = "fsspec", ["fsspec"]
    if scheme in SCHEMES:
        extra, packages = "s3", ["obstore", "botocore"] if scheme == "s3" else ["obstore"]
    missing = [each for each in packages if importlib.util.find_spec(each) is None]
    if missing:
        yield Complaint(
            "url",
            f"{scheme}:// needs {' and '.join(missing)}, not installed here: where it runs, "
            f"{how_to_install(extra)}",
        )
    if settings.ca is not None:
        try:
            read_authorities(settings.ca)
        except ConfigError as error:
            yield Complaint("ca", error.message)
    if missing:
        return
    if extra == "fsspec":
        from tieredckpt.storage.object.fsspec import UNREAD, unread, why_refused

        if (why := why_refused(url)) is not None:
            yield Complaint("url", why)
        if (key := unread(settings)) is not None:
            yield Complaint(key, UNREAD)
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
        # Google's key file and Azure's account are set in the environment.
        yield Complaint(str(error.key), message, fatal=at.scheme == "s3")


def _why_no_profile(profile: str | None) -> str | None:
    if profile is None:
        return None
    import botocore.exceptions
    import botocore.session

    try:
        known = botocore.session.Session().available_profiles
    except botocore.exceptions.BotoCoreError as error:
        return f"the files with the profiles cannot be read: {error}"
    if profile in known:
        return None
    there = f"there are {', '.join(known[:20])}" if known else "there is none at all"
    return (
        f'there is no profile "{profile}" for this user here ({there}): add it to ~/.aws/config '
        "or ~/.aws/credentials"
    )
