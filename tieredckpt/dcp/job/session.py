"""What an open engine shares with its writers and readers."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tieredckpt.dcp.job.history import History
from tieredckpt.dcp.job.hosts import JobHosts
from tieredckpt.dcp.job.stores import Stores
from tieredckpt.dcp.job.unreported import UnreportedSegments
from tieredckpt.dcp.slots.background_saves import BackgroundSaves
from tieredckpt.dcp.slots.stager import Stager
from tieredckpt.dcp.state.plan_caches import PlanCaches
from tieredckpt.errors import TieredCkptError, UsageError, WaitError
from tieredckpt.recovery.flush import (
    FlushReport,
    Terminated,
    flush_and_wait,
    raises_on_sigterm,
)
from tieredckpt.recovery.folders import READ_ONLY
from tieredckpt.recovery.other_hosts import OtherHosts

if TYPE_CHECKING:
    from tieredckpt.config.schema import Config
    from tieredckpt.dcp.job.ranks import Ranks
    from tieredckpt.dcp.job.tier_alerts import TierWatch
    from tieredckpt.dcp.slots.slot_ring import SlotRing
    from tieredckpt.dcp.state.consistency import NamesSeen
    from tieredckpt.dcp.state.items import LayoutCache
    from tieredckpt.dcp.state.metadata import PlanCache
    from tieredckpt.rpc.agent_client import AgentClient
    from tieredckpt.rpc.messages.agent import PeerTable
    from tieredckpt.storage.object.supplied import Supplied

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveReport:
    """One rank's part in a save.

    Attributes:
        save_id: The checkpoint; None on all ranks but the coordinator.
        stall_s: From the writer's first call until the rank's part was done: sealed, and on the
            coordinator committed. Waiting for other ranks in between counts. Of a save in the
            background: how long ``stage()`` held up training.
        bytes_written: Size of the rank's segment, 0 if it had nothing to write.
        cold: The slot was not mapped and prefaulted, so the copy paid for page faults.
        skipped: Why there is no checkpoint of this save (see docs/understand/failures.md); None:
            there is one, or it is not the coordinator's report and this rank itself did not fail.
        not_replicated: With ``save.ack: replicated``, on the coordinator: why the checkpoint, which
            exists in memory, was not replicated in time.
    """

    save_id: str | None
    stream: str
    step: int
    stall_s: float
    bytes_written: int
    cold: bool
    skipped: str | None = None
    not_replicated: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreReport:
    """One rank's part in a restore.

    Attributes:
        bytes_by_tier: Bytes of verified blocks that this rank read, by tier.
        repaired_blocks: Blocks that were damaged in one copy and read from another one.
        seconds: From the first question to the last byte, on this rank.
        refused: Checkpoints that were newer and could not be restored: (save id, step, reason).
        save_ids: By stream; one, unless several streams were loaded together. Then ``stream`` has
            all their names, and ``save_id`` is the first one's.
        bytes_by_source: The same bytes by place, for example ``"memory on node-3"``.
        segments: The same for each segment that this rank read something of: (segment id, bytes by
            place).
    """

    save_id: str
    stream: str
    step: int
    bytes_by_tier: dict[str, int]
    repaired_blocks: int
    seconds: float
    refused: tuple[tuple[str, int | None, str], ...] = ()
    save_ids: dict[str, str] = field(default_factory=dict)
    bytes_by_source: dict[str, int] = field(default_factory=dict)
    segments: tuple[tuple[str, dict[str, int]], ...] = ()


@dataclass(slots=True, kw_only=True)
class Writing:
    """What a rank writes its part of a save with, in a trainer or in DCP's process executor."""

    ranks: Ranks
    unsafe_pickle: bool = False
    dcp_plans: PlanCaches = field(default_factory=PlanCaches)
    plans: dict[str, PlanCache] = field(default_factory=dict)
    layouts: dict[str, LayoutCache] = field(default_factory=dict)
    checked_keys: set[str] = field(default_factory=set)
    """Keys of bytes items whose value is known to load again, or was warned of."""
    names_seen: dict[str, NamesSeen] = field(default_factory=dict)
    """Per stream: of which names the values were compared between ranks."""
    unreported: UnreportedSegments = field(default_factory=UnreportedSegments)


@dataclass(slots=True, kw_only=True)
class Session(Writing):
    """An open engine's parts. Valid in the process that opened it, until it is closed."""

    config: Config
    namespace: str
    client: AgentClient
    """With an open session."""
    ring: SlotRing
    """Of that client."""
    host_id: str
    """This host, as the agent named it."""
    run_id: str = field(init=False)
    """Agreed by all ranks that opened their engines together."""
    hosts: JobHosts = field(init=False)
    """This host alone, until others are found."""
    history: History = field(init=False)
    read_only: bool = False
    """Nothing is saved or changed: ``client`` is a :class:`ReadOnlyClient`."""
    peers: PeerTable | None = field(default=None, repr=False)
    """The other hosts when the engine was opened, with the token (hence no repr); None: the agent
    does not listen."""
    other_hosts: OtherHosts | None = None
    """Connections to them, opened when first needed."""
    members_only: bool = False
    """Hosts without ranks are not asked for checkpoints."""
    stores: Stores = field(init=False)
    handles_signals: bool = False
    """``engine.leave_on`` was called with signals."""
    tier_watch: TierWatch | None = None
    """Of the first rank of a host that saves."""
    script: Supplied | None = None
    """Credentials of the training script."""
    closed: bool = False
    last_save: SaveReport | None = None
    last_restore: RestoreReport | None = None
    pid: int = field(default_factory=os.getpid)
    saving: threading.Lock = field(default_factory=threading.Lock)
    """Held while a rank writes: a ring has slots for one save at a time."""
    background_saves: BackgroundSaves = field(default_factory=BackgroundSaves)
    stager: Stager = field(init=False)

    def __post_init__(self) -> None:
        config, client = self.config, self.client
        self.run_id = client.run_id
        self.hosts = JobHosts(by_rank=(self.host_id,) * self.ranks.world_size)
        self.history = History(client, config.tiers)
        self.history.others = self._others
        self.stager = Stager(self.ring)
        self.stores = Stores(config.tiers, self.namespace, config.recovery.wait_s, self.script)
        client.unreported_segments = self.unreported.report

    def _others(self) -> OtherHosts | None:
        if self.peers is None:
            return None  # the agent does not listen
        if self.other_hosts is None:
            self.other_hosts = OtherHosts(self.client, self.peers)
        self.other_hosts.only = frozenset(self.hosts.hosts) if self.members_only else None
        return self.other_hosts

    def check(self) -> None:
        """Raises UsageError if the engine was closed, or opened before this process forked."""
        if self.pid != os.getpid():
            raise UsageError(
                "this engine was opened before the process forked; engines, writers and readers "
                "are valid only in the process that opened them: open the engine after the fork"
            )
        if self.closed:
            raise UsageError("this engine is closed")

    def check_saves(self) -> None:
        """As :meth:`check`; raises UsageError also if the engine only reads."""
        self.check()
        if self.read_only:
            raise UsageError(READ_ONLY)

    def resumed_at(self, streams: Iterable[str], load_id: str) -> None:
        """A load has moved ``streams``: their next saves are others than those before it."""

    def prepare_ring(self, segment_bytes: int) -> None:
        """Have slots for segments of this size made ready, if there may be saves."""
        if not self.read_only:
            self.ring.prepare(segment_bytes)

    def bring_newest(self, limit_s: float) -> None:
        """Copy the newest checkpoint to all tiers, if this process has saved, and log a warning of
        what is not there in time. The first rank of each host does; it never raises for a tier.

        A SIGTERM that would end the process ends it after the warning, not in the middle.
        """
        flush_s = self.config.close.flush_s
        saved = self.last_save
        if saved is None or self.ranks.local_rank != 0 or not (self.config.tiers and flush_s):
            return
        if sys.exc_info()[0] is not None:
            # It unwinds: its report must not wait, and a restart follows.
            log.warning(
                "step %d, saved last, is not brought to the tiers, as an exception is being handled"
                " (engine.finish() outside of it does)",
                saved.step,
            )
            return
        reports: deque[FlushReport] = deque(maxlen=1)
        missing, terminated = [], False
        try:
            with raises_on_sigterm():
                flush_and_wait(
                    self.client, None, min(limit_s, flush_s), on_report=reports.append,
                    while_moving=True,
                )  # fmt: skip
        except (TieredCkptError, OSError) as error:
            missing = [str(error)]
        except Terminated:
            missing, terminated = ["SIGTERM ended the wait for the rest"], True
        for last in reports:
            missing = [*(f"tier {tier}: {why}" for tier, why in last.errors.items()), *missing]
        if missing:
            there = [tier for last in reports for tier in last.tiers if tier not in last.errors]
            places = "".join(f" and in tier {tier}" for tier in there)
            log.warning(
                "the newest checkpoint (last saved: step %d) is in the memory of host %s%s, but "
                "not in every tier: %s. A running agent goes on copying (close.flush)",
                saved.step, self.host_id, places, "; ".join(missing),
            )  # fmt: skip
        if terminated:
            signal.raise_signal(signal.SIGTERM)

    def close(self, *, until_s: float | None = None) -> None:
        """End the session with the agent. Idempotent; never raises for a dead agent.

        ``until_s``: monotonic time until which :meth:`bring_newest` may take, which comes before;
        None: it does not.
        """
        try:
            landed = not self.closed and self.pid == os.getpid() and self._land()
            if landed and until_s is not None:
                self.bring_newest(max(0.0, until_s - time.monotonic()))
        finally:
            self._end()

    def _end(self) -> None:
        if not self.closed:
            self.closed = True
            if self.tier_watch is not None and self.pid == os.getpid():
                self.tier_watch.close()
            self.ring.close()
            if self.other_hosts is not None:
                self.other_hosts.close()
            self.stores.close()
            self.client.close()

    def _land(self) -> bool:
        """Let a save in the background come to its end, for which it needs the agent; whether it
        has.
        """
        try:
            self.background_saves.wait_idle(self.config.save.wait_timeout_s)
            self.ring.release_holds()
        except WaitError as error:
            # It fails when it wants to seal or commit; its slot stays locked until then.
            log.warning("the engine is closed all the same: %s", error)
            return False
        return True
