"""An agent's client for who only looks: it needs no agent, and changes nothing anywhere."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

from tieredckpt.errors import AgentError, NotFoundError, RemoteProtocolError, UsageError
from tieredckpt.recovery.folders import Folders
from tieredckpt.tiers.facts import decode_holdings, encode_holdings
from tieredckpt.tiers.pool import TIER as MEMORY
from tieredckpt.transport.client import AgentClient
from tieredckpt.transport.messages import API_VERSION, OpenSegment, PeerTable, SegmentOpened

AGENT_S = 10.0
"""Memory of an agent that takes longer to answer is read without it."""
AWAY_S = 10.0
"""One that did not answer is not asked again for so long."""

READ_ONLY = (
    "this engine was opened with read_only=True and changes nothing: to save, wait, pin, flush or "
    "leave, open one without it, tieredckpt.Engine.open(config), in a process of the job"
)

log = logging.getLogger(__name__)
_Answer = TypeVar("_Answer")


class ReadOnlyClient(AgentClient):
    """Memory through this host's agent, or without it if none answers, and the tiers themselves.

    It has no session. Thread-safe, invalid after fork.

    Args:
        runtime_dir: The agent's folder, which need not exist.
        folders: The tiers of the namespace; closed with this.
        run_id: Agreed by the ranks that opened together.
    """

    def __init__(self, runtime_dir: Path, folders: Folders, run_id: str = "") -> None:
        super().__init__(runtime_dir, deadline_s=AGENT_S)
        self.run_id = run_id
        self._folders = folders
        self._asks_from_s = 0.0
        if (told := self._of_agent(super().health)) is not None:
            folders.host_id = told.host_id
            if told.api != API_VERSION:
                self._asks_from_s = math.inf

    @property
    def namespace(self) -> str:
        """The one that is read."""
        return self._folders.namespace

    def close(self) -> None:
        """Close all connections. Idempotent."""
        super().close()
        self._folders.close()

    def holdings(
        self, namespace: str | None = None, *, within_s: float | None = None, tiers: bool = True
    ) -> bytes:
        """What this host holds, as :meth:`AgentClient.holdings`; only configured tiers are in it.

        They are looked at from here: the agent's may be others, under the same names.
        """
        ask = partial(super().holdings, self.namespace, within_s=within_s, tiers=False)
        told = self._of_agent(ask)
        return encode_holdings(self._folders.holdings(decode_holdings(told) if told else None))

    def plan(self, plan_id: str, *, tier: str = MEMORY, namespace: str | None = None) -> bytes:
        """The encoded plan as ``tier`` holds it, unverified. Raises as :meth:`Folders.catalog`."""
        if tier == MEMORY:
            ask = partial(super().plan, plan_id, tier=tier, namespace=self.namespace)
            told = self._of_agent(ask)
            if told is not None:
                return told
        return self._folders.catalog(tier).read_plan(plan_id)

    def open_segment(
        self, tier: str, segment_id: str, *, namespace: str | None = None
    ) -> tuple[SegmentOpened, int]:
        """As :meth:`AgentClient.open_segment`. Raises as :meth:`Folders.open_segment`."""
        if tier == MEMORY:
            ask = partial(super().open_segment, tier, segment_id, namespace=self.namespace)
            told = self._of_agent(ask)
            if told is not None:
                return told
        with self._folders.open_segment(tier, segment_id) as opened:
            # The copy shares the open file description, and so the lease.
            fd = os.dup(opened.fileno())
            found = SegmentOpened(
                ticket="", size_bytes=opened.size, direct=opened.direct, slot_id=None
            )
            return found, fd

    def peers(self, namespace: str | None = None) -> PeerTable:
        """The other hosts, as the agent finds them. Raises NotFoundError if none answers."""
        told = self._of_agent(partial(super().peers, self.namespace))
        if told is None:
            raise NotFoundError("no agent of this host tells of other hosts")
        return told

    def _of_agent(self, ask: Callable[[], _Answer]) -> _Answer | None:
        """What the agent says; None: none answers, or it does not know the namespace.

        Raises NotFoundError if it has not what was asked for: nobody looks behind its back, since a
        reader's lock on a slot that it has just granted again would hold up the job's writer.
        """
        if not self._folders.has_memory() or time.monotonic() < self._asks_from_s:
            return None
        try:
            return ask()
        except NotFoundError as error:
            if error.fields.get("what") != "namespace":
                raise
        except (AgentError, RemoteProtocolError) as error:
            self._asks_from_s = time.monotonic() + AWAY_S
            log.info("memory is read without the agent: %s", error)
        return None

    def _call(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        *,
        more_s: float = 0.0,
        within_s: float | None = None,
    ) -> bytes:
        """Only what changes nothing at the agent. Raises UsageError for anything else."""
        if method != "GET" and not path.endswith(f"/{OpenSegment.verb()}"):
            raise UsageError(READ_ONLY)
        return super()._call(method, path, body, more_s=more_s, within_s=within_s)
