"""Logs in training what tiers do not store: people watch that log, and not the agent's.

The first rank of each host asks its agent every :data:`POLL_S`, in a thread of its own, since the
next save may be an hour away. It starts no agent, and a failure to ask is left to the next save.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable

from tieredckpt.dcp.job.credentials import CredentialsFeed
from tieredckpt.errors import TieredCkptError
from tieredckpt.rpc.agent_client import AgentClient
from tieredckpt.rpc.messages.agent import AskTroubles, TierTrouble
from tieredckpt.storage.object.supplied import Supplied

POLL_S = 1.5
ASK_S = 5.0
"""Longest wait for an answer."""
AGAIN_S = 600.0
"""An alert that lasts is logged again after this time."""
NEXT_S = 60.0
"""And another outage of the same tier after this time, so that one that comes and goes does not
fill the log."""
QUIET_S = 120.0
"""An alert that returns sooner was not over: a tier almost keeps up, an agent was restarted."""
_OVER = {"failing": "it works again", "full": "it keeps up again"}

log = logging.getLogger("tieredckpt.dcp.troubles")  # users filter by this name


class TierAlerts:
    """The tier alerts that this process has logged. Thread-safe.

    Args:
        clock: Monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._logged_s: dict[tuple[str, str], float] = {}
        """By tier and kind, when it was logged."""
        self._since_s: dict[tuple[str, str], float] = {}
        """Of which outage, by when it began."""
        self._reported_s: dict[tuple[str, str], float] = {}
        """When the agent reported it last."""

    def log(self, reported: dict[str, TierTrouble]) -> None:
        """Log alerts that are new among those that the agent reports, by tier, or are over."""
        with self._lock:
            now_s = self._clock()
            for tier, alert in reported.items():
                key = (tier, alert.kind)
                self._reported_s[key] = now_s
                is_same = alert.since_s in (0.0, self._since_s.get(key))
                again_s = AGAIN_S if is_same else NEXT_S
                if key not in self._logged_s or now_s - self._logged_s[key] >= again_s:
                    self._logged_s[key], self._since_s[key] = now_s, alert.since_s
                    log.warning("tier %s: %s", tier, alert.text)
            for tier, kind in [k for k in self._logged_s if now_s - self._reported_s[k] >= QUIET_S]:
                del self._logged_s[tier, kind], self._reported_s[tier, kind]
                if all(tier != other for other, _ in self._logged_s):
                    log.warning("tier %s: %s", tier, _OVER[kind])


class TierWatch:
    """The thread that asks the agent. It ends with :meth:`close`, or with the process.

    Args:
        client: The agent, with an open session.
        script: Credentials of the training script, which the agent is given from there.

    Raises:
        UsageError: The script supplies none.
        AgentError: The agent cannot be given them.
    """

    def __init__(self, client: AgentClient, script: Supplied | None = None) -> None:
        self._client = client
        self._feed = None if script is None else CredentialsFeed(client, script)
        if self._feed is not None:
            self._feed.begin()
        self._alerts = TierAlerts()
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tieredckpt-alerts", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._ending.wait(POLL_S):
            # The others: this process has no descriptors or threads left; it may have some later.
            with contextlib.suppress(TieredCkptError, OSError, RuntimeError):
                found = self._client.call(AskTroubles(), within_s=ASK_S, revive=False)
                self._alerts.log(found.tiers)
                if self._feed is not None:
                    self._feed.go_on(wanted=found.wants_credentials)

    def close(self) -> None:
        """End the thread, before its client is closed. Idempotent."""
        self._ending.set()
        self._thread.join(ASK_S)
