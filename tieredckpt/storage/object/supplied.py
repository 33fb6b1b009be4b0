"""Credentials of a training script: it supplies them, and its agent is given them.

The script's own processes call its source (:class:`Supplied`). An agent cannot, so the first rank
of each host sends its agent what the source returned, over the local socket
(:class:`Handed`). Neither writes them anywhere.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Protocol

log = logging.getLogger(__name__)

RENEW_S = 300.0
"""The source is called at least this often, as what it returned may have been revoked."""
RENEW_S_MIN = 5.0
"""And not more often, also after a failure, or if a store refused what it returned."""
_ROLE_KEYS = ("AccessKeyId", "SecretAccessKey", "SessionToken", "Expiration")
"""As in STS's answers: ``client.assume_role(...)["Credentials"]``."""

Clock = Callable[[], float]


class NotSuppliedError(ValueError):
    """There are no credentials now; becomes TierUnavailableError with the tier's name."""


@dataclass(frozen=True, slots=True)
class Keys:
    """Credentials as botocore's signers take them; they print without secrets."""

    access_key: str = field(repr=False)
    secret_key: str = field(repr=False)
    token: str | None = field(default=None, repr=False)
    expires_at_s: float | None = None
    """Unix time; None: unknown, or never."""

    def have_expired(self, now_s: float) -> bool:
        """Whether they may not be used any more at Unix time ``now_s``."""
        return self.expires_at_s is not None and self.expires_at_s <= now_s


class KeySource(Protocol):
    """What :class:`~tieredckpt.storage.object.credentials.Credentials` signs with. Thread-safe."""

    def get_frozen_credentials(self) -> Any:
        """Those to use now, with access_key, secret_key and token. Raises as botocore, or
        NotSuppliedError.
        """

    def differs_from(self, used: Any) -> bool:
        """Whether there are credentials other than ``used``."""

    def find_anew(self) -> bool:
        """The store refused them: look them up again; whether there are other ones now."""


class Handed:
    """In an agent: the credentials that a namespace's training script sent last. Thread-safe.

    They stay in use after the script's end, until they expire.

    Args:
        clock: Unix time.
    """

    def __init__(self, clock: Clock = time.time) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._keys: Keys | None = None
        self._refused: Keys | None = None

    def give(self, keys: Keys) -> None:
        """Use these from now on, unless they have expired and the others have not.

        A script that slept for a day sends what it had.
        """
        now_s = self._clock()
        with self._lock:
            if self._keys is None or self._keys.have_expired(now_s) or not keys.have_expired(now_s):
                self._keys, self._refused = keys, None

    def get_frozen_credentials(self) -> Keys:
        """Raises NotSuppliedError: none were sent, or they have expired."""
        with self._lock:
            keys = self._keys
        if keys is None:
            raise NotSuppliedError(
                "it waits for those of the training script, which has sent none to this agent "
                "(Engine.open(credentials=...))"
            )
        if keys.have_expired(self._clock()):
            at = datetime.fromtimestamp(keys.expires_at_s or 0.0, UTC)
            raise NotSuppliedError(
                f"those that the training script sent expired at {at:%Y-%m-%d %H:%M:%S} UTC, and "
                "it waits for others: start the script again, or name a profile in the tier"
            )
        return keys

    def differs_from(self, used: Any) -> bool:
        """Whether others than ``used`` were sent."""
        with self._lock:
            return self._keys is not None and self._keys != used

    def find_anew(self) -> bool:
        """False: the script is asked for others (:meth:`are_wanted`)."""
        with self._lock:
            self._refused = self._keys
        return False

    def are_wanted(self) -> bool:
        """Whether there are none, or they have expired or were refused."""
        with self._lock:
            keys, refused = self._keys, self._refused
        return keys is None or keys == refused or keys.have_expired(self._clock())


class Supplied:
    """In a process of the training script: what its source returns. Thread-safe.

    Args:
        source: A ``boto3.Session``, or a function that returns one, botocore's credentials, or a
            mapping with AccessKeyId, SecretAccessKey, SessionToken and Expiration.
        clock: Unix time.
    """

    def __init__(self, source: Any, clock: Clock = time.time) -> None:
        self._source, self._clock = source, clock
        self._lock = threading.Lock()
        self._keys: Keys | None = None
        self._next_s = -math.inf
        """Unix time of the next call."""
        self._called_s = -math.inf
        self._problem: Exception | None = None
        """Of the last call."""

    def get_frozen_credentials(self) -> Keys:
        """What the source returned last; it is called if that is old or expires soon.

        Raises NotSuppliedError: it failed, and what it returned before has expired.
        """
        with self._lock:
            if self._clock() >= self._next_s:
                self._call()
            keys = self._keys
            if keys is None or keys.have_expired(self._clock()):
                why = self._problem
                raise NotSuppliedError(
                    f"the training script supplies none: {type(why).__name__}: {why}"
                ) from why
            return keys

    def differs_from(self, used: Any) -> bool:
        """Whether the source returned others than ``used``."""
        with self._lock:
            return self._keys is not None and self._keys != used

    def find_anew(self) -> bool:
        """Call the source, unless that was just done; whether it returned others."""
        with self._lock:
            before = self._keys
            if self._clock() - self._called_s >= RENEW_S_MIN:
                self._call()
            return self._keys != before

    def _call(self) -> None:
        """Call the source; if that fails, what it returned before stays until it expires."""
        now_s = self._called_s = self._clock()
        self._next_s = now_s + RENEW_S_MIN
        try:
            keys = _keys_of(self._source)
            if keys.have_expired(now_s):
                raise ValueError("what it returned has expired")
        except Exception as error:  # noqa: BLE001  (of a function of the user)
            if str(error) != str(self._problem):
                log.warning(
                    "the training script supplies no credentials: %s: %s",
                    type(error).__name__, error,
                )  # fmt: skip
            self._problem = error
            return
        self._problem = None
        left_s = math.inf if keys.expires_at_s is None else keys.expires_at_s - now_s
        self._keys = keys
        self._next_s = now_s + min(RENEW_S, max(RENEW_S_MIN, left_s / 2))


def _keys_of(source: Any) -> Keys:
    """The source's present credentials. Raises TypeError or ValueError: it has none of a known
    form, and what the source raises.
    """
    found = source
    if callable(found) and not hasattr(found, "get_credentials"):
        found = found()
    if hasattr(found, "get_credentials"):  # a boto3.Session, or one of botocore
        found = found.get_credentials()
        if found is None:
            raise ValueError("the session finds no credentials")
    if hasattr(found, "get_frozen_credentials"):
        frozen = found.get_frozen_credentials()
        # botocore has no public name for it; without it they are used until they are refused.
        expires = getattr(found, "_expiry_time", None)
        values = frozen.access_key, frozen.secret_key, frozen.token, expires
    elif isinstance(found, Mapping):
        values = tuple(found.get(key) for key in _ROLE_KEYS)  # type: ignore[assignment]
    else:
        raise TypeError(
            f"want a boto3.Session or a mapping with {', '.join(_ROLE_KEYS)}, and not "
            f"{type(found).__name__}"
        )
    return _checked(*values)


def _checked(access_key: Any, secret_key: Any, token: Any, expires: Any) -> Keys:
    for name, value in (("access key", access_key), ("secret key", secret_key)):
        if not isinstance(value, str) or not value:
            raise TypeError(f"the {name} is {'empty' if value == '' else 'no string'}")
    if token is not None and not isinstance(token, str):
        raise TypeError("the session token is no string")
    if isinstance(expires, str):
        expires = datetime.fromisoformat(expires)
    if expires is not None and (not isinstance(expires, datetime) or expires.tzinfo is None):
        raise TypeError("the time of expiration is no datetime with a time zone")
    expires_at_s = None if expires is None else expires.timestamp()
    return Keys(access_key, secret_key, token or None, expires_at_s)
