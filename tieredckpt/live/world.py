"""One generation of a job: its ranks, its process group, its engine, and its updates.

A change of the world leaves ``train`` by :class:`WorldChanged`. In the next world all ranks save
together what the survivors kept, and load it: DCP picks among replicas, and refuses a save of which
a shard is missing. So live recovery has no transport, format or verification of its own.
"""

from __future__ import annotations

import contextlib
import logging
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import xxhash

from tieredckpt.agent.host.addresses import with_port
from tieredckpt.dcp.state.checkpoint_id import DEFAULT_STREAM
from tieredckpt.engine import Engine
from tieredckpt.errors import TieredCkptError, UsageError, WaitError
from tieredckpt.format.manifest import LIVE_TAGS, is_capture
from tieredckpt.live import messages as m
from tieredckpt.live import torch_private as private
from tieredckpt.live.store import AgentStore, GenerationStore
from tieredckpt.live.survivor import SAVED, Kept, Offer, SurvivorState, to_save
from tieredckpt.policy.elastic import Share, share

TIMEOUT = timedelta(minutes=10)
"""Default of collectives; the supervisor detects hangs much sooner."""
SAVE_S = 600.0
"""A save that is waited for, and the one of a change of the world, are no hang for so long."""
RETRY_S = 30.0
"""Between two attempts to save for a change of the world."""
NAMED_MAX = 3
"""Names of missing keys in a message."""

log = logging.getLogger(__name__)


def _store_of(order: m.Train, check: Callable[[], None]) -> AgentStore | GenerationStore | None:
    keys = order.keys
    if keys is not None:
        return AgentStore(Path(keys.runtime_dir), keys.namespace, keys.table, keys.hosts, check)
    return GenerationStore(order.store, order.size, check) if order.store else None


class WorldChanged(BaseException):
    """The generation ends. Raised by ``begin``, ``steps``, ``update``, ``load`` and collectives.

    It is no Exception, so that a script does not catch it by accident. Let it leave ``train``:
    ``finally`` clauses run, and code after the loop does not.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """How a generation got its state.

    Attributes:
        step: The restored step; 0: training began anew.
        captured: Whether surviving ranks had kept it; False: ``train`` has saved it.
        steps_lost: Updates of the generation before that are done once more.
        source: Bytes that this rank read, by place, for example ``"memory on node-3"``.
        seconds: Duration of each stage on this rank: "init", "open", "save", "load".
    """

    step: int
    captured: bool
    steps_lost: int
    source: Mapping[str, int]
    seconds: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangeEvent:
    """The ranks leave for another world.

    Attributes:
        step: The last update of this one.
        old_size, new_size: Ranks; equal if only hosts change.
        deadline_s: Seconds that a host has which leaves, about; None: no limit.
    """

    step: int
    old_size: int
    new_size: int
    deadline_s: float | None


class World:
    """What ``train`` gets. Valid until ``train`` returns or raises.

    Attributes:
        rank, local_rank: Of this process in the generation, and on its host.
        size: Ranks of the generation.
        generation: 1 for the first; counts changes of the world.
        reason: Why the generation before ended; "" in the first.
        restored: After :meth:`load`.
        change: Once the ranks are to leave, on all ranks from the same :meth:`begin` on.
    """

    def __init__(
        self,
        order: m.Train,
        config: Any,
        kept: Kept | None,
        send: Callable[[m.FromProcess], None],
        init: Callable[..., None],
        *,
        on_event: Callable[[ChangeEvent], Any] | None = None,
        leaves: bool = True,
        credentials: object = None,
    ) -> None:
        self.rank, self.local_rank = order.rank, order.local_rank
        self.size = order.size
        self.generation = order.generation
        self.reason = order.reason
        self.restored: Restored | None = None
        self.change: ChangeEvent | None = None
        self._on_event, self._leaves = on_event, leaves
        self._run_id = order.run or None
        self._updated = order.updated
        self._order = order
        self._store: AgentStore | GenerationStore | None = None
        """Kept: once the Python object is gone, torch's groups cannot use it any more."""
        self._agents = order.keys.hosts if order.keys is not None else ()
        self._config, self._credentials = config, credentials
        self._kept = kept
        self._send = send
        self._init = init
        self._engine: Engine | None = None
        self._survivor: SurvivorState | None = None
        self._before: frozenset[int] | None = None
        """Connections that are older than this world."""
        self._peers: frozenset[str] | None = None
        """Addresses of the hosts to which its process group is connected."""
        self._version = 0
        self._loaded: str | None = None
        """Save id of the restored checkpoint."""
        self._torn = False
        self._asked: m.Change | None = None
        """The order that all leave together, if this rank has it."""
        self._not_before_s = 0.0
        """When to try again."""
        self._agreed = False
        self.has_left = False
        """The ranks have saved their state together, and leave."""
        self._event: torch.cuda.Event | None = None
        self._fenced = False
        self._ended = threading.Event()
        self._seconds: dict[str, float] = {}

    @property
    def engine(self) -> Engine:
        """The engine of this generation, to save with ``world.engine.writer(step)``.

        Raises:
            UsageError: Before :meth:`init_process_group`.
        """
        if self._engine is None:
            raise UsageError("call world.init_process_group(backend) first")
        return self._engine

    # --- a generation begins ---------------------------------------------------------------------

    def init_process_group(
        self,
        backend: str | None = None,
        *,
        timeout: timedelta = TIMEOUT,
        device_id: torch.device | None = None,
    ) -> None:
        """Make the default process group and open the engine; in place of torch's. Collective.

        If ranks kept a state, all ranks save it here.

        Args:
            backend, timeout, device_id: As for ``torch.distributed.init_process_group``.

        Raises:
            WorldChanged: The generation ended meanwhile.
            TieredCkptError: As ``Engine.open``.
        """
        self.check()
        with self._timed("init"):
            self._store = _store_of(self._order, self.check)
            self._before = frozenset(private.connections())
            self._init(
                backend,
                rank=self.rank,
                world_size=self.size,
                timeout=timeout,
                device_id=device_id,
                store=self._store,
            )
            self._peers = frozenset(each.address for each in self._connections())
        if self._order.generation > 1:
            private.forget_last_world()
        with self._timed("open"):
            self._engine = Engine.open(
                self._config, run_id=self._run_id, credentials=self._credentials
            )
        with self._timed("save"):
            self._save_kept(self._engine)

    def _save_kept(self, engine: Engine) -> None:
        """Save the newest state that survivors kept and of which nothing is missing."""
        kept = self._kept
        found = engine.gather(None if kept is None else kept.offer)
        offers = [offer for offer in found if offer is not None]
        whole = [version for version, missing in to_save(offers, saved=-1) if not missing]
        # Not if it is older: a host that was cut off may still keep what it had then.
        is_newest = max(whole, default=-1) >= self._updated
        engine.ask_members_only(is_newest)
        versions = to_save(offers, saved=self._newest(engine)) if offers else []
        if versions or any(each.version == SAVED for each in offers):
            engine.resume_newest(loaded=next(each.loaded for each in offers))
        for version, missing in versions:
            if missing and self.rank == 0:
                some = ", ".join(missing[:NAMED_MAX])
                log.warning("no rank is left that has all of update %d: %s", version, some)
            if not missing:
                state = kept.state if kept is not None and kept.offer.version == version else {}
                dcp.save(state, storage_writer=engine.writer(version, tags=LIVE_TAGS))
                break
        if is_newest and self._newest(engine) < max(whole):
            engine.ask_members_only(False)  # the save was skipped
        # A death until here must lose nothing: the state is dropped once all ranks are past it.
        engine.gather(None)
        self._kept = None

    @staticmethod
    def _newest(engine: Engine) -> int:
        """The newest step as rank 0 knows it; -1: there is none. Collective."""
        newest = engine.latest()
        return int(engine.gather(-1 if newest is None else newest.step)[0])

    def load(self, state: dict[str, Any]) -> int:
        """Restore the newest state, and keep what survives a fault from now on. Collective.

        Args:
            state: As for ``Engine.load``: everything that an update changes, and everything that
                a step changes.

        Returns:
            The restored step; 0: there is no checkpoint, and training begins.

        Raises:
            WorldChanged: The generation ended meanwhile.
            TieredCkptError, CheckpointException: As ``Engine.load``.
        """
        self.check()
        if self._survivor is not None:
            raise UsageError("world.load(state) was called before: load all of the state at once")
        with self._timed("load"):
            self._version = self.engine.load(state) or 0
            self.check()
            self._survivor = SurvivorState(state)
        report, newest = self.engine.last_restore, self.engine.latest()
        self.engine.ask_members_only(False)
        if report is not None and report.stream != DEFAULT_STREAM:
            raise UsageError(f"live recovery follows stream {DEFAULT_STREAM!r} only")
        self._loaded = report.save_id if report is not None and self._version else None
        newest_tags = newest.tags if newest is not None and newest.step == self._version else {}
        self.restored = Restored(
            step=self._version,
            captured=is_capture(newest_tags),
            steps_lost=max(0, self._updated - self._version),
            source=dict(report.bytes_by_source) if report is not None and self._version else {},
            seconds=dict(self._seconds),
        )
        self._progress("load", restored=self._described(self.restored) if self.rank == 0 else "")
        return self._version

    @staticmethod
    def _described(found: Restored) -> str:
        if not found.step:
            lost = f", {found.steps_lost} steps lost" if found.steps_lost else ""
            return f"training begins{lost}"
        stages = ", ".join(f"{name} {value:.2f} s" for name, value in found.seconds.items())
        source = "state of the surviving ranks" if found.captured else "newest checkpoint"
        lost = f"{found.steps_lost} steps lost" if found.steps_lost else "no step lost"
        return f"resumed at step {found.step} from the {source}, {lost} ({stages})"

    # --- steps -----------------------------------------------------------------------------------

    def steps(self, last: int) -> Iterator[int]:
        """The steps after the restored one, up to and including ``last``; each by :meth:`begin`."""
        for step in range(self._version + 1, last + 1):
            self.begin(step)
            yield step

    def begin(self, step: int) -> None:
        """Begin a step: reset the generators of Python, NumPy and torch by step and rank.

        Raises:
            WorldChanged: The generation ends.
            UsageError: As :meth:`update`.
        """
        self.check()
        if self._survivor is not None:
            self._survivor.check_unchanged(heavy=False)
        self._change_if_agreed()
        number = xxhash.xxh3_64_intdigest(f"{step},{self.rank}".encode()) & 0x7FFFFFFF
        random.seed(number)
        np.random.seed(number)
        if private.uses_cuda():
            torch.manual_seed(number)
        else:  # manual_seed would take a stack trace for a later use of CUDA: 0.4 ms
            torch.default_generator.manual_seed(number)
        self._progress("begin")

    @contextlib.contextmanager
    def update(self, step: int) -> Iterator[None]:
        """Around the only place where parameters and optimizer change. Collective.

        All ranks run the body, or none. It must not communicate: clip gradients before it.

        Raises:
            WorldChanged: The generation ends; the body is not run.
            UsageError: The ranks update different steps, no state was loaded, or a part of it has
                changed outside of updates (watched after the first three and every 1,000th).
        """
        self.check()
        if self._survivor is None:
            raise UsageError("call world.load(state) before world.update(step)")
        if self._torn:
            raise UsageError("the update before has raised: let its error leave train")
        self._survivor.check_unchanged(heavy=True)
        self._change_if_agreed()
        if private.uses_cuda():
            torch.cuda.current_stream().synchronize()  # or queued collectives outlive the vote
        self._vote(step)
        self._torn = True  # unless the body returns
        yield
        if not self._survivor.needed:  # not before: a state_dict() may begin a loader's epoch
            names = self.engine.gather(self._survivor.names())
            self._survivor.needed = frozenset().union(*names)
        self._survivor.record(step)
        if private.uses_cuda():
            self._event = torch.cuda.current_stream().record_event()
        self._torn, self._version = False, step
        self._progress("update")

    def _vote(self, step: int) -> None:
        asked = self._asked is not None and time.monotonic() >= self._not_before_s
        found = torch.tensor([step, -step, int(asked)])
        # Once it returns, every rank is there, and the others go on: this one does, too, even if
        # the generation has ended meanwhile. Else ranks would keep states one update apart.
        dist.all_reduce(found, dist.ReduceOp.MAX, group=self.engine.control_group)
        highest, lowest, self._agreed = int(found[0]), -int(found[1]), bool(found[2])
        if highest != lowest:
            raise UsageError(f"the ranks update different steps, from {lowest} to {highest}")

    def _change_if_agreed(self) -> None:
        """Let the script know, and leave, if the last update's vote was for it."""
        self._check_left()  # a script may have swallowed it
        if self._agreed and self.change is None:
            found = [each for each in self.engine.gather(self._asked) if each is not None]
            self.change = ChangeEvent(
                step=self._version, old_size=self.size, new_size=found[0].size,
                deadline_s=found[0].left_s,
            )  # fmt: skip
            if self._on_event is not None:
                self._on_event(self.change)
        if self.change is not None and self._leaves:
            self.leave()

    def leave(self) -> None:
        """Save with all ranks unless this step is saved, and leave the world. Collective.

        Returns if the state could not be saved: the world stays, and leaves later.

        Raises:
            WorldChanged: The state is saved.
            UsageError: The ranks are not to leave, or no state was loaded.
        """
        if self.change is None or self._survivor is None:
            raise UsageError("call world.leave() only if world.change is not None")
        self._survivor.check_unchanged(heavy=True)
        self._progress("ping", quiet_s=SAVE_S)
        failed = ""
        try:
            self.engine.wait_background()  # perhaps it saves this step
        except WaitError as error:
            failed = error.message
        reasons = [each for each in self.engine.gather(failed) if each]
        if not reasons and self._newest(self.engine) < self._version:
            reasons = ["memory is full"]
            try:
                writer = self.engine.writer(self._version, tags=LIVE_TAGS)
                dcp.save(self._survivor.read(), storage_writer=writer)
            except (TieredCkptError, dcp.CheckpointException) as error:
                self.check()  # the better reason
                reasons = [str(error)]
        self.has_left = self._newest(self.engine) >= self._version
        self._agreed, self.change = False, None
        self._check_left()
        self._not_before_s = time.monotonic() + RETRY_S
        log.warning("step %d is not saved, so the world stays: %s", self._version, reasons[0])

    def _check_left(self) -> None:
        if self.has_left:
            raise WorldChanged("the ranks leave to change the world")

    def ping(self) -> None:
        """Report progress, in work that neither begins nor updates a step."""
        self.check()
        self._progress("ping")

    def pause(self, limit: float) -> None:
        """Announce long work such as an evaluation: it is no hang for ``limit`` seconds."""
        self.check()
        self._progress("ping", quiet_s=limit)

    def check(self) -> None:
        """Raises WorldChanged once the generation ends."""
        if self._fenced:
            raise WorldChanged("the generation has ended")

    def _progress(self, what: str, *, quiet_s: float = 0.0, restored: str = "") -> None:
        self._send(
            m.Progress(
                generation=self.generation,
                what=what,
                version=self._version,
                quiet_s=quiet_s,
                restored=restored,
            )
        )

    @contextlib.contextmanager
    def _timed(self, stage: str) -> Iterator[None]:
        started_s = time.perf_counter()
        yield
        self._seconds[stage] = round(time.perf_counter() - started_s, 3)

    # --- a generation ends -----------------------------------------------------------------------

    @property
    def version(self) -> int:
        """The last finished update; at first the restored step."""
        return self._version

    @property
    def is_ending(self) -> bool:
        """Whether the supervisor has ended the generation."""
        return self._fenced

    def ask_to_change(self, change: m.Change) -> None:
        """Have all ranks leave together after the next update. Called in the link's thread."""
        self._asked = change

    def share(self, global_batch: int, micro: int | None = None) -> Share:
        """This rank's rows of a global batch; see :func:`tieredckpt.policy.elastic.share`."""
        return share(global_batch, self.size, self.rank, micro)

    def end(self, abort: Callable[[], None]) -> None:
        """Wake this rank from collectives; at most once.

        Called in the link's thread, or before ``train`` in the main thread.
        """
        if self._fenced:
            return
        self._fenced = True
        try:
            self._close_store()
            abort()
            private.abort_nccl()
            private.cut([each.descriptor for each in self._connections()])
        finally:
            self._ended.set()

    def wait_ended(self, within_s: float | None = None) -> None:
        """Wait until the supervisor has ended the generation, and collectives are ended."""
        self._ended.wait(within_s)

    def _connections(self) -> list[private.Connection]:
        """Of the process groups: those made since then to the hosts of the ranks.

        Connections of the script to a store or a tracker elsewhere are not among them.
        """
        if self._before is None:
            return []
        agents = {address for entry in self._agents for address in entry.addresses}
        return [
            each
            for inode, each in private.connections().items()
            if inode not in self._before
            and (self._peers is None or each.address in self._peers)
            and with_port(each.address, each.port) not in agents
        ]

    def close(self, *, keep: bool) -> Kept | None:
        """Close the engine; the state that this rank keeps, if it is complete.

        Raises:
            UsageError: A ``state_dict()`` failed, for example because it communicates.
            BaseException: Not ``keep``, and the last save in the background failed.
        """
        try:
            if self.has_left:
                offer = Offer(version=SAVED, parts={}, needed=frozenset(), loaded=self._loaded)
                return Kept(offer, {})
            if not keep:
                return None
            self.wait_ended()
            if self._kept is not None:
                return self._kept  # of the world before; this one did not save it
            survivor = self._survivor
            if survivor is None or survivor.version is None or self._is_torn():
                return None
            survivor.check_unchanged(heavy=True)
            state = survivor.read()
            offer = Offer(
                version=survivor.version,
                parts=private.parts(state),
                needed=survivor.needed,
                loaded=self._loaded,
            )
            return Kept(offer, state)
        finally:
            self._close_engine(ended=keep or self.has_left)
            self._close_store()
            self._survivor = self._kept = None

    def _close_store(self) -> None:
        if isinstance(self._store, AgentStore):
            self._store.close()

    def _close_engine(self, *, ended: bool) -> None:
        """Close it. A save in the background that the end of the generation broke is no error."""
        engine, self._engine = self._engine, None
        if engine is None:
            return
        try:
            engine.close(flush=False)  # the end of a generation is not that of the job
        except BaseException as error:
            if not ended or isinstance(error, KeyboardInterrupt | SystemExit):
                raise
            log.warning("a save in the background ended with its world: %s", error)

    def _is_torn(self) -> bool:
        if self._event is not None:
            try:
                self._event.synchronize()
            except RuntimeError as error:
                log.warning("the device failed in the last update: %s", error)
                return True
        return self._torn
