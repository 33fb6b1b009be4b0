"""Credentials for S3: AWS's own chain (environment, profile, web identity, container, machine),
or those of the training script.

botocore finds and renews them, for obstore and for the requests that are signed here. obstore's own
chain has no profiles, and does not expose its credentials for other requests.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from tieredckpt.errors import ConfigError, how_to_install
from tieredckpt.storage.base import unavailable
from tieredckpt.storage.object.errors import STALE, ObjectSettings, Refusal
from tieredckpt.storage.object.supplied import Handed, KeySource, Supplied

log = logging.getLogger(__name__)

SIGNED_BYTES_MAX = 64 << 10
"""A larger body is not digested for the signature: that takes three times as long as sending it,
and parts have a checksum of their own."""

_UNEXPLAINED = frozenset({400, 401, 403})
"""Statuses of a HEAD with stale credentials; its response has no body with a code."""

_RENEW_EVERY_S = 5.0
"""Shortest time between two look-ups after a refusal: one may start a process or send a request to
a service that all hosts share."""


@dataclass(frozen=True, slots=True)
class Credentials:
    """Credentials for signatures, and their region. Thread-safe.

    ``source`` is None if requests are not signed (anonymous).
    """

    tier: str
    region: str
    source: KeySource | None

    def now(self) -> Any:
        """Frozen credentials; None: requests are not signed.

        Raises:
            TierUnavailableError: They have expired, and there are no others.
        """
        if self.source is None:
            return None
        try:
            return self.source.get_frozen_credentials()
        except _failures() as error:
            raise unavailable(
                self.tier, f"tier {self.tier} gets no credentials: {error}"
            ) from error

    def for_obstore(self) -> dict[str, Any]:
        """The credentials in the form of obstore's credential provider.

        They expire at once, so that obstore calls this before each request. From a cache it would
        use refused credentials for another 100 ms.
        """
        now = self.now()
        return {
            "access_key_id": now.access_key,
            "secret_access_key": now.secret_key,
            "token": now.token,
            "expires_at": datetime.now(UTC),
        }

    def sign(
        self, used: Any, method: str, url: str, headers: Mapping[str, str], body: memoryview
    ) -> Mapping[str, str]:
        """``headers`` with a signature of this request by ``used`` (of :meth:`now`).

        In headers, since proxies and stores log URLs: a reader of a signed URL could repeat it.
        """
        if used is None:
            return headers
        from botocore.auth import S3SigV4Auth
        from botocore.awsrequest import AWSRequest

        signed = len(body) <= SIGNED_BYTES_MAX
        request = AWSRequest(method, url, dict(headers), bytes(body) if signed else None)
        if not signed:
            request.context["client_config"] = _unsigned_body()
        S3SigV4Auth(used, "s3", self.region).add_auth(request)
        return dict(request.headers.items())

    def renewed(self, refusal: Refusal, used: Any = None) -> bool:
        """After a refusal of the credentials ``used``, whether there are other ones now.

        botocore renews them when they expire. The store may refuse them earlier: they were revoked,
        this host's clock is wrong, or they have no known expiry.
        """
        unexplained = not refusal.code and refusal.status in _UNEXPLAINED
        if self.source is None or not (unexplained or refusal.code in STALE):
            return False
        if used is not None and self.source.differs_from(used):
            return True  # another thread was first
        return self.source.find_anew()


class Chain:
    """botocore's credentials, looked up anew when a file changes or the store refuses them.

    botocore renews credentials with a known expiry. It reads keys in a file only once, but an
    operator or a tool with short-lived tokens may renew them. Thread-safe.

    Args:
        found: The first credentials.
        files: Files that may contain credentials.
        find: Looks them up again; returns None, or raises, if there are none.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        found: Any,
        files: tuple[str, ...],
        find: Callable[[], Any],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._found, self._files, self._find, self._clock = found, files, find, clock
        self._lock = threading.Lock()
        self._seen = self._stamps()
        self._asked_s = -_RENEW_EVERY_S

    def _stamps(self) -> tuple[tuple[int, int, int] | None, ...]:
        return tuple(_stamp(each) for each in self._files)

    def get_frozen_credentials(self) -> Any:
        """As botocore's."""
        with self._lock:
            if (seen := self._stamps()) != self._seen:
                # Before the look-up: files that change meanwhile are read the next time.
                self._seen = seen
                self._find_anew()
            found = self._found
        return found.get_frozen_credentials()

    def differs_from(self, used: Any) -> bool:
        """Whether there are credentials other than ``used``."""
        try:
            return bool(self.get_frozen_credentials() != used)
        except _failures():
            return False

    def find_anew(self) -> bool:
        """Look them up again, unless that was just done; whether there are other ones now."""
        try:
            before = self.get_frozen_credentials()
        except _failures():
            before = None
        with self._lock:
            if self._clock() - self._asked_s >= _RENEW_EVERY_S:
                self._asked_s = self._clock()
                self._find_anew()
        return self.differs_from(before)  # also if another thread found them meanwhile

    def _find_anew(self) -> None:
        try:
            self._found = self._find() or self._found
        except _failures() as error:
            log.warning("no new credentials were found, the old ones are kept: %s", error)


@functools.cache
def _unsigned_body() -> Any:
    """A configuration of botocore for bodies that only TLS and a checksum protect."""
    from botocore.config import Config

    return Config(s3={"payload_signing_enabled": False})


def _failures() -> tuple[type[Exception], ...]:
    """The errors of botocore when it looks up credentials in files, processes and services.

    A service's refusal is not a BotoCoreError; a process may not start, or print no JSON.
    """
    from botocore.exceptions import BotoCoreError, ClientError
    from botocore.parsers import ResponseParserError

    return BotoCoreError, ClientError, ResponseParserError, OSError, ValueError


def _stamp(path: str) -> tuple[int, int, int] | None:
    try:
        found = os.stat(os.path.expanduser(path))
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ino, found.st_size


def find_credentials(
    settings: ObjectSettings, *, tier: str, script: Handed | Supplied | None = None
) -> Credentials:
    """Look up credentials as AWS's tools do. May send a request to the metadata service.

    If the settings want those of the ``script``, they are used instead, and no profile is read.

    Raises:
        ConfigError: botocore is not installed, or there is no such profile.
        TierUnavailableError: There are none, or the look-up failed.
    """
    try:
        import botocore.exceptions
        import botocore.session
    except ImportError as error:
        raise ConfigError(
            f"tier {tier} needs the extra s3: {how_to_install('s3')}", key="url"
        ) from error

    region = settings.region or os.environ.get("AWS_REGION")
    if settings.of_script:
        if script is None:
            raise unavailable(tier, f"tier {tier} has only the training script's credentials")
        region = region or os.environ.get("AWS_DEFAULT_REGION")
        return Credentials(tier, region or "us-east-1", script)
    new_session = functools.partial(botocore.session.Session, profile=settings.profile)
    session = new_session()
    source: KeySource | None = None
    try:
        region = region or session.get_config_variable("region") or "us-east-1"
        if not settings.anonymous and (found := session.get_credentials()) is not None:
            names = ("credentials_file", "config_file")
            files = tuple(str(session.get_config_variable(name)) for name in names)
            source = Chain(found, files, lambda: new_session().get_credentials())
            source.get_frozen_credentials()
    except botocore.exceptions.ProfileNotFound as error:
        raise ConfigError(f"{error}; correct the profile of tier {tier}", key="profile") from error
    except _failures() as error:
        raise unavailable(tier, f"tier {tier} gets no credentials: {error}") from error
    if source is None and not settings.anonymous:
        raise unavailable(
            tier,
            f"tier {tier} finds no credentials; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, "
            "or name a profile, or give this machine or pod a role (or write anonymous: true, if "
            "the bucket is public). An agent has the environment of the job that started it: if "
            "that had none, `tieredckpt agent stop` ends it, and its checkpoints stay in memory",
        )
    return Credentials(tier, region, source)
