"""Settings of an object tier, and the translation of object stores' errors to ours."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Unpack

from tieredckpt.config.tiers import ObjectOptions
from tieredckpt.errors import CapacityError, ConfigError, NotFoundError, TieredCkptError
from tieredckpt.errors import TierUnavailableError as Unavailable
from tieredckpt.storage.folder import Known

ObjectSettings = ObjectOptions
"""The settings of one tier."""
SCHEMES = ("s3", "gs", "az", "memory")
"""Schemes that :func:`tieredckpt.storage.backends.open.open_store` opens through obstore; others
are fsspec's. (``memory`` ends with the process: for tests.)"""


@dataclass(frozen=True, slots=True)
class ObjectUrl:
    """The parts of ``scheme://bucket/prefix``; ``prefix`` has no slash at either end."""

    scheme: str
    bucket: str
    prefix: str

    def path(self, key: str) -> str:
        """The key in the bucket."""
        return f"{self.prefix}/{key}" if self.prefix else key


def parse_object_url(url: str) -> ObjectUrl:
    """The parts of a URL.

    Raises:
        ConfigError: It names no bucket, or has parts that such URLs do not have.
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


STALE = frozenset({"ExpiredToken", "ExpiredTokenException", "InvalidAccessKeyId", "InvalidToken",
                    "SignatureDoesNotMatch", "TokenRefreshRequired"})  # fmt: skip
"""Codes for credentials that may be renewed."""
_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>([A-Za-z0-9.]{1,80})</Code>")
_CODE_OF_KEY = re.compile(r"\(code: ([A-Za-z0-9.]{1,80})\)")
"""As obstore quotes the error of one key of many, in a response of 200."""
_MESSAGE = re.compile(r"<Message>([^<]{1,400})</Message>")

_ADVICE = {
    "InvalidAccessKeyId": "the store does not know this access key: check the credentials "
    "(AWS_ACCESS_KEY_ID, the profile, or the role of this machine)",
    "SignatureDoesNotMatch": "the secret does not belong to the access key: check the credentials "
    "(AWS_SECRET_ACCESS_KEY, the profile), and that no proxy changes requests",
    "ExpiredToken": "the credentials have expired: renew them, or use a role that renews itself",
    "InvalidToken": "the session token does not belong to the access key: check AWS_SESSION_TOKEN",
    "RequestTimeTooSkewed": "the clock of this host is off by more than the store allows: set it",
    "AccessDenied": "these credentials may not do that: allow it in the policy of the bucket or of "
    "the role (docs/operate/object-stores.md has the policy)",
    "NoSuchBucket": "there is no such bucket: create it, or correct the tier's url",
    "PermanentRedirect": "the bucket is in another region: set the tier's region",
    "AuthorizationHeaderMalformed": "the bucket is in another region: set the tier's region",
    "InvalidStorageClass": "the store does not have this storage class: correct storage_class",
    "KMS.NotFoundException": "the store does not find this key: correct sse.key",
}
NO_BUCKET = "404 NoSuchBucket"
"""In errors of a store. It is final: nobody waits for the bucket."""
NO_ANSWER = (
    "nothing answered, so check the tier's url and endpoint, and that this host may reach it"
)
"""Advice for a store that did not answer."""
_UNSENT = "error sending request"
_WHY = re.compile(r'(?:message|error): "([^"\n]{1,120})"')
"""As obstore quotes the system's error, after its own text."""
_TRIES = re.compile(
    r"Generic \S+ error: (?:Error performing [a-z ]+: )?Error performing ([A-Z]+) ([^\s?]+)\S* "
    r"in \S+, after \d+ retries, max_retries: \d+, retry_timeout: \S+ +- (?:HTTP error: )?"
)
"""How obstore begins: with durations and counts, so that each error would be another one."""
_BODY = re.compile(r"(status code: \d{3}[^:]*): .*", re.DOTALL)
"""The body of a response as obstore quotes it, up to the end: it may repeat the request."""
_PROOF = re.compile(
    r"authorization|security-token|(token|signature|credential)\W*[:=]|bearer |AWS4|[a-z0-9+=]{40}",
    re.IGNORECASE,
)
"""Of a request: names of what proves it, and values that are as long; not those of buckets."""
_CERTIFICATE = re.compile(r"InvalidCertificate\(\s*(\w{1,40})")
_FULL = frozenset({"InsufficientStorage", "QuotaExceeded", "XMinioStorageFull", "DiskFull"})
_THROTTLED = frozenset({"SlowDown", "Throttling", "ThrottlingException", "TooManyRequests",
                        "RequestLimitExceeded", "BandwidthLimitExceeded"})  # fmt: skip
_PASSING = frozenset({"RequestTimeout", "OperationAborted", "ConditionalRequestConflict",
                      "InternalError", "ServiceUnavailable", "BadDigest",
                      "XAmzContentChecksumMismatch"})  # fmt: skip


@dataclass(frozen=True, slots=True)
class Refusal:
    """A store's error response; ``status`` 0: there was no response."""

    status: int
    code: str
    text: str

    @property
    def throttled(self) -> bool:
        """Whether the store asks for fewer requests."""
        return self.status in (429, 503) or self.code in _THROTTLED

    @property
    def passing(self) -> bool:
        """Whether the same request may succeed a little later."""
        lasting = self.status in (501, 505, 507) or self.code in _FULL
        passing = self.status in (0, 408, 429) or self.status >= 500 or self.code in _PASSING
        return (passing or self.throttled) and not lasting


def refusal_of(text: str, status: int = 0) -> Refusal:
    """The status, code and message in the body of a response, or in an error that quotes one.

    Of a body, whose ``status`` is given, nothing else is shown: it may repeat the request.
    """
    known = "" if status else without_body(text).partition("\n\nDebug source:")[0][:4000]
    if not status and (found := _STATUS.search(text)):
        status = int(found[1])
    code, message = _CODE.search(text), _MESSAGE.search(text)
    if code is None and (code := _CODE_OF_KEY.search(text)) and code[1] == "AccessDenied":
        status = status or 403
    quoted = _TRIES.sub(r"\1 \2: ", known)[:400].strip()
    short = message[1] if message else quoted
    if short.endswith(_UNSENT):
        short += _why_unsent(text)
    return Refusal(status, code[1] if code else "", short)


def without_body(text: str) -> str:
    """An error of obstore without the response that it quotes."""
    return _BODY.sub(r"\1", text)


def shown(text: str) -> str:
    """What a store sent, unless it may repeat what proves a request: logs and pages show it."""
    return "its message is not shown: it repeats the request" if _PROOF.search(text) else text


def _why_unsent(text: str) -> str:
    if found := _CERTIFICATE.search(text):
        return f": its certificate is not accepted ({found[1]}), see the tier's ca"
    if "InvalidContentType" in text:
        return ": it does not speak https"
    return f": {found[1]}" if (found := _WHY.search(text)) else ""


def error_of(refusal: Refusal, *, tier: str, doing: str, **known: Unpack[Known]) -> TieredCkptError:
    """The error to raise.

    Args:
        refusal: The store's response.
        tier: The tier's name.
        doing: Completes "cannot ...".
        known: Fields of the error; ``outcome`` applies if the store failed, but did not refuse, and
            ``missing_key`` to status 404.
    """
    code, status, missing_key = refusal.code, refusal.status, known.get("missing_key")
    text = shown(refusal.text)
    if status == 404 and missing_key is not None and code != "NoSuchBucket":
        return NotFoundError(f"tier {tier} has no {missing_key}", key=missing_key)
    if status == 507 or code in _FULL:
        return CapacityError(
            f"cannot {doing}: the store is full or over its quota ({code or status}); free space "
            f"there, or keep fewer checkpoints in tier {tier} (tiers[].keep)",
            tier=tier,
            needed_bytes=known.get("needed_bytes", 0),
            available_bytes=0,
            limit="object store",
        )
    advice = _ADVICE.get(code) or (_ADVICE["AccessDenied"] if status in (401, 403) else "")
    if refusal.throttled:
        advice = "the store asks for fewer requests: lower the tier's concurrency, or wait"
    if not (advice or status) and _UNSENT in refusal.text:
        advice = NO_ANSWER
    problem = f"{status} {code}".strip() if status else text
    problem += f" ({text})" if status and text and not advice else ""
    refused = 400 <= status < 500 and status != 408
    return Unavailable(
        f"cannot {doing}: {problem}{'; ' if advice else ''}{advice}",
        tier=tier,
        outcome="not_applied" if refused else known.get("outcome", "not_applied"),
        status=status,
        code=code,
    )
