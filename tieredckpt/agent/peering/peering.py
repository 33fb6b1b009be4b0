"""One namespace across hosts: the parts that make several agents one memory tier, put together.

On an agent that knows no other host all of it does nothing: no thread, no port, no file.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence

import msgspec

from tieredckpt.agent.cluster.in_doubt import Fates
from tieredckpt.agent.cluster.members import Peers
from tieredckpt.agent.host.events import Hooks
from tieredckpt.agent.host.listeners import Listeners
from tieredckpt.agent.host.runtime import RuntimeDir
from tieredckpt.agent.peering.attempts import Attempts
from tieredckpt.agent.peering.broadcast import AntiEntropy, Exchange
from tieredckpt.agent.peering.failure_detector import PeerWatch
from tieredckpt.agent.peering.memory_retention import MemoryRetention
from tieredckpt.agent.peering.merge import Ingest
from tieredckpt.agent.tiers.worker import TierWorker
from tieredckpt.errors import CapacityError, RemoteProtocolError, UsageError
from tieredckpt.format.manifest import Manifest, SegmentRef
from tieredckpt.rpc.messages import agent as m
from tieredckpt.rpc.messages.peer import ForwardAttempt, Pressure, Push, Pushed, Vouch, WholeReply
from tieredckpt.storage.catalog import Catalog
from tieredckpt.storage.memory.pool import SlotPool

SILENT_SHOWN = 8
"""Hosts that one message names."""


class Across:
    """See the module.

    Args:
        namespace: Its name.
        runtime: The runtime folder.
        host_id: This host.
        listeners: How this host is reached.
        lock: The node's lock.
        pool: The host's slots.
        catalog: Of the memory tier.
        workers: The tiers at this moment.
        retention: Of the memory tier.
        committing: Segments of commits under way; guarded by ``lock``.
        freed: Called after slots may have become free; with the lock not held.
        is_live: Whether a session's process still holds its lease.
        attempts: Of the namespace.
    """

    def __init__(
        self,
        namespace: str,
        runtime: RuntimeDir,
        host_id: str,
        listeners: Listeners,
        lock: threading.RLock,
        pool: SlotPool,
        catalog: Catalog,
        workers: Callable[[], dict[str, TierWorker]],
        retention: MemoryRetention,
        committing: set[str],
        freed: Callable[[str], None],
        is_live: Callable[[str], bool],
        attempts: Attempts,
    ) -> None:
        self._host_id = host_id
        self._listeners = listeners
        self._lock = lock
        self._is_live = is_live
        self.attempts = attempts
        self.namespace = namespace
        self.hooks = Hooks()
        self.peers = Peers(
            namespace, host_id, listeners, self.hooks, runtime.peers / f"{namespace}.hosts"
        )
        self.fates = Fates(namespace, pool, catalog, self.peers)
        self.ingest = Ingest(
            namespace, host_id, lock, self.peers, pool, catalog, workers, retention, self.fates,
            self.hooks, committing, freed, attempts,
        )  # fmt: skip
        self.on_pressure: Callable[[tuple[Pressure, ...]], tuple[bytes, ...]] = lambda reports: ()
        """On the leader: a host has no room; returns records of what is given up."""
        self.on_vouched: Callable[[tuple[Vouch, ...]], tuple[WholeReply, ...]] = lambda vouched: ()
        """On the leader: a host holds checkpoints in a tier of its own; returns what is whole."""
        self.exchange = Exchange(namespace, self.peers, catalog, self.ingest)
        self.anti_entropy = AntiEntropy(self.peers, catalog, self.ingest, self.exchange)
        self.watch = PeerWatch(
            namespace, self.peers, self.exchange, self.anti_entropy, catalog.manifests
        )

    # --- life -------------------------------------------------------------------------------------

    def start(self) -> None:
        """Serve other hosts and watch them, if the agent before this one did."""
        self._listeners.restore(self.namespace)
        self.watch.start(moved=True)

    def stop(self) -> None:
        """Say nothing any more; nothing is forgotten. Idempotent."""
        self.watch.stop()
        self.exchange.stop()
        self.peers.lines.stop()

    def forget(self) -> None:
        """The namespace was purged: the token and the known hosts go."""
        self._listeners.forget(self.namespace)
        self.peers.forget()

    def listen(self, request: m.Listen) -> m.Listening:
        """See :class:`tieredckpt.rpc.messages.agent.Listen`."""
        before = self.peers.own()
        entry = self._listeners.listen(self.namespace, request)
        self.peers.reset_clients()
        if entry != before:
            self.peers.tell_all()
            self.watch.start(moved=True)
        return m.Listening(host=entry)

    def set_peers(self, request: m.SetPeers, *, later: bool) -> None:
        """See :class:`tieredckpt.rpc.messages.agent.SetPeers`; ``later``: when that run saves."""
        before = self.peers.run
        try:
            self.peers.set(request, later=later)
        except ValueError as error:
            raise RemoteProtocolError(str(error)) from error
        if request.run != before:
            with self._lock:
                self.fates.run_began(request.run, self._is_live)
        self.watch.start()

    # --- saving -----------------------------------------------------------------------------------

    def check_member(self, ref: SegmentRef) -> None:
        """Whether the host of a segment belongs to the job: its receipt is trusted then.

        Raises:
            UsageError: It does not.
        """
        if ref.host not in self.peers.members():
            raise UsageError(
                f"segment {ref.id} is stored on host {ref.host}, which agent {self._host_id} does "
                "not know as a host of this job: nothing was committed. Ranks on several hosts "
                "open their engines together (Engine.open is collective)"
            )

    def own(self, manifest: Manifest) -> tuple[SegmentRef, ...]:
        """The segments that this host's ranks wrote: all of them if there never was another one,
        for it may have been given another name.
        """
        if not self.peers.active:
            return manifest.segments
        return tuple(ref for ref in manifest.segments if ref.host == self._host_id)

    def committed(
        self, manifest: Manifest, data: bytes, plan: bytes | None, *, begins: bool
    ) -> None:
        """A checkpoint was committed here: others are told.

        ``begins``: it is the first that is known here of its attempt.
        """
        for call in self.hooks.on_manifest:
            call(manifest)
        record = self.attempts.record_of(manifest)
        self.exchange.committed(manifest, data, plan, record, begins=begins)

    def check_gathering(self, world_size: int, local_world_size: int) -> None:
        """Raise UsageError if ranks that save without collectives are on several hosts, and none is
        said to decide.
        """
        if world_size > local_world_size and self.peers.others():
            raise UsageError(
                f"{world_size} ranks save without collectives, {local_world_size} of them are on "
                "this host, and no host is named to commit: open the engines of all ranks together"
            )

    # --- attempts ---------------------------------------------------------------------------------

    def open_attempt(self, request: m.OpenAttempt) -> bytes:
        """The leader opens it, knowing what all members know that answer; others ask the leader."""
        if not self.peers.is_leader:
            self.attempts.check_owner(request)
            # If the leader does not answer nobody else may open one.
            data = self.peers.ask(self.peers.leader, ForwardAttempt(request=request))
            self.attempts.note(data)
            return data
        if self.peers.active:
            self.anti_entropy.sync_all(request.silent)
        return self.attempts.open(request)

    # --- what other hosts say ---------------------------------------------------------------------

    def take(self, push: Push) -> Pushed:
        """See :class:`tieredckpt.rpc.messages.peer.Push`."""
        answer = self.ingest.take(push)
        if not answer.need_plans:  # else it comes again, with the plans
            self.exchange.forward(push)
        if push.pressure:
            answer = msgspec.structs.replace(answer, records=self.on_pressure(push.pressure))
        if push.vouched:
            answer = msgspec.structs.replace(answer, whole=self.on_vouched(push.vouched))
        return answer

    def make_room(self, request: m.Reserve, keep_last: int) -> bool:
        """Give back a segment that something newer has overtaken; False: there is none."""
        with self._lock:
            return self.fates.give_overtaken(request.session_id, request.before, keep_last)

    def explained(
        self, error: CapacityError, session_id: str, branches: Sequence[Manifest]
    ) -> CapacityError:
        """Why a session has no room, with what only a person or other hosts can make room of."""
        with self._lock:
            waiting = list(self.fates.undecided().values()).count(session_id)
        if branches:
            error = CapacityError(
                f"{error.message}. {len(branches)} checkpoints are on a branch, which no rule "
                "deletes (docs/understand/timeline.md): `tieredckpt ls` lists them, and "
                f"`tieredckpt unpin --save-id {branches[-1].save_id[:8]}` releases one that is not "
                "needed",
                **error.fields,
            )
        if not waiting:
            return error
        silent = [each.host.host_id for each in self.peers.states() if each.reachable is False]
        hosts = f" ({', '.join(silent[:SILENT_SHOWN])} do not answer)" if silent else ""
        return CapacityError(
            f"{error.message}. {waiting} of this rank's slots hold parts of saves of which host "
            f"{self._host_id} does not know whether they were committed: they are kept until the "
            f"host that coordinated them answers{hosts}, a newer checkpoint is known here, or the "
            "job is restarted: repair the network between the agents, or raise memory.capacity",
            **error.fields,
        )

    def give_up(self, segments: Iterable[str]) -> None:
        """These were sealed for a save that failed, at this host or at others: all are told."""
        if gone := self.ingest.fail(tuple(segments)):
            self.exchange.publish(Push(failed_segments=tuple(gone)))
