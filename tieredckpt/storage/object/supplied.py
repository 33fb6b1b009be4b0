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
"""And not more often after a failure, or after a refusal of what it returned; then the pauses grow
as long as it returns the same."""
CALL_S = 60.0
"""Longest wait for the source where there are no credentials without it."""
REFUSED_S = 10.0
"""Longest wait for other credentials after a refusal."""
RUNS_MAX = 4
"""Most runs whose credentials an agent keeps for one namespace, beside the one that rules."""
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
    """In an agent: the credentials that training scripts of a namespace sent. Thread-safe.

    The agent uses those of the run whose rules hold, while that run has sessions on this host, else
    those that came last. They stay in use after the script's end, until they expire.

    Args:
        ruler: The run whose rules hold and that has sessions here; None: there is none.
        clock: Unix time.
    """

    def __init__(self, ruler: Callable[[], str | None], clock: Clock = time.time) -> None:
        self._ruler, self._clock = ruler, clock
        self._lock = threading.Lock()
        self._keys: dict[str, Keys] = {}
        """By run, in the order in which the runs sent some last."""
        self._refused: Keys | None = None

    def give(self, run: str, keys: Keys) -> bool:
        """Keep the credentials of ``run``; whether they are others than it sent before.

        Expired ones never replace valid ones. Expired ones of other runs are dropped.
        """
        now_s, ruler = self._clock(), self._ruler()
        with self._lock:
            before = self._keys.pop(run, None)
            if before is not None and keys.have_expired(now_s) > before.have_expired(now_s):
                keys = before  # of a script that slept
            others = [r for r, k in self._keys.items() if not k.have_expired(now_s)]
            kept = {ruler, *others[1 - RUNS_MAX :]}
            self._keys = {r: k for r, k in self._keys.items() if r in kept} | {run: keys}
            return keys != before

    def _chosen(self) -> Keys | None:
        ruler = self._ruler()
        with self._lock:
            last = next(reversed(self._keys.values()), None)
            return self._keys.get(ruler, last) if ruler is not None else last

    def get_frozen_credentials(self) -> Keys:
        """Raises NotSuppliedError: none were sent, or they have expired."""
        keys = self._chosen()
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
        keys = self._chosen()
        return keys is not None and keys != used

    def find_anew(self) -> bool:
        """False: the script is asked for others (:meth:`are_wanted`)."""
        self._refused = self._chosen()
        return False

    def are_wanted(self) -> bool:
        """Whether there are none, or they have expired or were refused."""
        keys = self._chosen()
        return keys is None or keys == self._refused or keys.have_expired(self._clock())


class Supplied:
    """In a process of the training script: what its source returns. Thread-safe.

    The source is called in a thread of its own, and its last answer is used meanwhile: it may send
    requests, wait for others, or hang.

    Args:
        source: A ``boto3.Session``, or a function that returns one, botocore's credentials, or a
            mapping with AccessKeyId, SecretAccessKey, SessionToken and Expiration.
        clock: Unix time.
        timer: Monotonic seconds.
    """

    def __init__(
        self, source: Any, clock: Clock = time.time, timer: Clock = time.monotonic
    ) -> None:
        self._source, self._clock, self._timer = source, clock, timer
        self._lock = threading.Lock()
        self._call: threading.Thread | None = None
        self._keys: Keys | None = None
        self._next_s = self._failed_until_s = self._refused_until_s = -math.inf
        """By ``timer``: when the source is to be called next, and before when it is not, after a
        failure and after a refusal of what it returned."""
        self._pause_s = RENEW_S_MIN
        self._problem = "it was not called yet"

    def get_frozen_credentials(self, *, wait_s: float = CALL_S) -> Keys:
        """What the source returned last; it is called if that is old or expires soon.

        Only if there are none that are valid, the answer is waited for, at most ``wait_s``.

        Raises:
            NotSuppliedError: There are none, or they have expired.
        """
        with self._lock:
            keys = self._valid()
            call = self._calling(self._next_s if keys is not None else self._failed_until_s)
        if keys is None:
            if call is not None:
                call.join(wait_s)
            with self._lock:
                keys = self._valid()
        if keys is None:
            is_late = call is not None and call.is_alive()
            why = f"its function has not returned for {wait_s:.3g} s" if is_late else self._problem
            raise NotSuppliedError(f"the training script supplies none: {why}")
        return keys

    def _valid(self) -> Keys | None:
        keys = self._keys
        return None if keys is None or keys.have_expired(self._clock()) else keys

    def differs_from(self, used: Any) -> bool:
        """Whether the source returned others than ``used``."""
        with self._lock:
            return self._keys is not None and self._keys != used

    def find_anew(self, *, wait_s: float = REFUSED_S) -> bool:
        """Call the source, unless that was just done; whether it returned others in time."""
        with self._lock:
            before, call = self._keys, self._calling(self._refused_until_s)
        if call is not None:
            call.join(wait_s)
        return self.differs_from(before)

    def _calling(self, from_s: float) -> threading.Thread | None:
        """The running call; if there is none, one begins from ``from_s`` on. The lock is held."""
        call = self._call
        if call is not None and call.is_alive():
            return call
        if self._timer() < from_s:
            return None
        self._call = call = threading.Thread(
            target=self._ask, name="tieredckpt-credentials", daemon=True
        )
        call.start()
        return call

    def _ask(self) -> None:
        """Call the source. If that fails, what it returned before stays until it expires."""
        keys, problem = None, ""
        try:
            keys = _keys_of(self._source)
            if keys.have_expired(self._clock()):
                raise ValueError("what it returned has expired")
        except (Exception, SystemExit) as error:  # noqa: BLE001  (of a function of the user)
            keys, problem = None, f"{type(error).__name__}: {error}"
        with self._lock:
            now_s = self._timer()
            if problem and not self._problem:
                log.warning("the training script supplies no credentials: %s", problem)
            self._problem = problem
            is_new = keys is not None and keys != self._keys
            self._pause_s = RENEW_S_MIN if is_new else min(RENEW_S, 2 * self._pause_s)
            self._refused_until_s = now_s + self._pause_s
            if keys is None:
                self._failed_until_s = self._next_s = now_s + RENEW_S_MIN
                return
            self._keys, left_s = keys, math.inf
            if keys.expires_at_s is not None:
                left_s = keys.expires_at_s - self._clock()
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
    named = {"access key": access_key, "secret key": secret_key, "session token": token or None}
    for name, value in named.items():
        if name == "session token" and value is None:
            continue
        if not (isinstance(value, str) and value and value.isascii() and value.isprintable()):
            raise TypeError(f"the {name} is no text of printable ASCII characters, or empty")
    if isinstance(expires, str):
        expires = datetime.fromisoformat(expires)
    if expires is not None and (not isinstance(expires, datetime) or expires.tzinfo is None):
        raise TypeError("the time of expiration is no datetime with a time zone")
    expires_at_s = None if expires is None else expires.timestamp()
    return Keys(access_key, secret_key, token or None, expires_at_s)
