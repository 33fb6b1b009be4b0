"""The other side of :mod:`tieredckpt.dcp.lending`: in the process of DCP's process executor.

What DCP's process unpickles is made here. Nothing may be raised by that, or the process ends: it is
kept until the save's first call inside of DCP's collectives.

DCP brings back only its ``Metadata``, or an exception. So an :class:`Outcome` travels in the
``Metadata``, through the processes of all ranks, and finds its way by itself when a trainer
unpickles it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from tieredckpt import failpoints
from tieredckpt.dcp.checkpoint_id import DEFAULT_STREAM, Target
from tieredckpt.dcp.commit import Receipt
from tieredckpt.dcp.copying import default_copy_threads
from tieredckpt.dcp.failure import SaveFailures
from tieredckpt.dcp.mapped import MappedSlot, WritableSlot
from tieredckpt.dcp.session import SaveReport, Session
from tieredckpt.dcp.staged_pickle import loads
from tieredckpt.dcp.stager import Stage, StagedState, StageLayout
from tieredckpt.dcp.staging import SlotRing
from tieredckpt.dcp.writer import Writer
from tieredckpt.errors import UsageError
from tieredckpt.transport.client import AgentClient

if TYPE_CHECKING:
    from tieredckpt.dcp.fates import Fate
    from tieredckpt.dcp.history_state import HistoryLoan
    from tieredckpt.dcp.job_hosts import JobHosts
    from tieredckpt.errors import BackgroundSaveError
    from tieredckpt.transport.messages import PeerTable


@dataclass(frozen=True, slots=True, kw_only=True)
class Loan:
    """One rank's session and writer, for one save.

    Attributes:
        token: Of this loan: 32 hex digits.
        staged: Of the state, if our stager made it.
        run_id: Of the session, as ``hosts`` and ``peers`` are.
        session: What a session is made of besides what works in one process only.
        made_for, last: As the writer has them.
        error: Why the save must fail, if it is known already.
        history_error: Why it is not known what there is to save on; matters to the coordinator.
        missed: The earlier saves in the background that failed.
        apart: The trainer takes notice of signals, which the process is not to die of when they
            are sent to the whole process group (torchrun and Slurm do so, and a terminal).
    """

    token: str
    staged: str | None
    session_id: str
    runtime_dir: str
    run_id: str
    hosts: JobHosts
    peers: PeerTable | None = field(repr=False)
    session: Mapping[str, Any]
    history: HistoryLoan
    failures: SaveFailures
    made_for: Target
    last: tuple[str, int] | None
    error: Exception | None
    history_error: Exception | None
    missed: BackgroundSaveError | None
    apart: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LentState:
    """A staged state.

    Attributes:
        stage: Without what lies in memory, and without signatures. Its token tells the writer
            which state is its own.
        data: See :mod:`tieredckpt.dcp.staged_pickle`.
        slot: Descriptor (to be detached), slot id, segment id, capacity; None: no slot.
        shared: Descriptor (to be detached) and size of shared memory; None: none is needed.
    """

    stage: Stage
    data: bytes = b""
    slot: tuple[Any, str, str, int] | None = None
    shared: tuple[Any, int] | None = None


class _Lender(Protocol):
    def take_back(self, outcome: Outcome, token: str) -> None:
        """The save has ended."""


loans_out: dict[str, _Lender] = {}
"""In a trainer, by token: the loans that are out."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a save that did not raise; reaches the trainers of all ranks.

    Attributes:
        report: The coordinator's; history and failures are that rank's too.
        coordinator: The token of its loan.
        fate: Whether the save was committed.
        receipts: By token, each rank's part.
    """

    report: SaveReport
    coordinator: str
    history: HistoryLoan
    failures: SaveFailures
    fate: Fate
    receipts: Mapping[str, Receipt]

    def __reduce__(self) -> Any:
        return _arrived, tuple(getattr(self, each.name) for each in fields(self))


def _arrived(*values: Any) -> Outcome:
    outcome = Outcome(*values)
    for token in outcome.receipts:
        # Once: the Metadata may be pickled and unpickled by anybody later on.
        lender = loans_out.pop(token, None)
        if lender is not None:
            lender.take_back(outcome, token)
    return outcome


class LentRing(SlotRing):
    """Slots of the trainer's session; none is kept mapped from one save to the next.

    The trainer's ring goes on with them, and a mapping here would keep the pages of a slot that
    the agent deleted.
    """

    def __init__(self, client: AgentClient, copy_threads: int) -> None:
        super().__init__(client, copy_threads)
        self._prepared_bytes = 1 << 62  # nothing is prepared ahead
        self._lent: list[MappedSlot] = []

    def enter(self, slot: MappedSlot, segment_id: str) -> None:
        """Write in a slot that the trainer has acquired."""
        with self._lock:
            self._lent.append(slot)
            self._writing[segment_id] = slot
            self._held[segment_id] = lambda: False  # until drop()
        self.pool.run(lambda _: slot.prefault.help(), self.pool.threads)

    def drop(self) -> None:
        """Keep nothing. Never unlocks a slot of the trainer, who may be writing in it again."""
        with self._lock:
            for lent in self._lent:
                fd, lent.fd = lent.fd, -1
                if fd >= 0:
                    os.close(fd)
            self._lent.clear()
            self._writing.clear()
            self._held.clear()
            self._next = None
            for slot in list(self._slots.values()):
                self._forget(slot)


_session: Session | None = None
"""Of the trainer's engine that saved last."""
_session_id = ""
_staged: tuple[Stage, MappedSlot | None] | None = None
"""The state that arrived last, until its writer takes it."""


def take_state(state: LentState) -> StagedState:
    """The staged state in this process; what goes wrong is in its stage."""
    global _staged
    stage = state.stage
    content: dict[str, Any] = {}
    mapped: MappedSlot | None = None
    try:
        mapped, content = _received(state)
    except Exception as error:  # noqa: BLE001  (raised by the save, on all ranks)
        stage.error = stage.error or error
    _staged = (stage, mapped)
    return StagedState(content, stage)


def _received(state: LentState) -> tuple[MappedSlot | None, dict[str, Any]]:
    stage = state.stage
    with contextlib.ExitStack() as stack, contextlib.ExitStack() as on_failure:
        slot_fd = shared_fd = -1
        shared_bytes = 0
        if state.slot is not None:
            slot_fd = state.slot[0].detach()
            on_failure.callback(os.close, slot_fd)
        if state.shared is not None:
            shared_fd, shared_bytes = state.shared[0].detach(), state.shared[1]
            stack.callback(os.close, shared_fd)
        if stage.error is not None or not state.data:
            return None, {}
        mapped: MappedSlot | None = None
        if state.slot is not None:
            _, slot_id, segment_id, capacity = state.slot
            mapped = MappedSlot(slot_id, slot_fd, capacity)
            mapping = mapped.mapping
            stage.slot = WritableSlot(
                segment_id, slot_id, capacity, mapping.view, mapping.address, cold=False
            )
        content, stage.locals = loads(state.data, stage.slot, shared_fd, shared_bytes)
        on_failure.pop_all()
        return mapped, content


def take_writer(loan: Loan) -> LentWriter:
    """The writer in this process, with the state that arrived before it."""
    global _staged
    if loan.apart and os.getpgrp() != os.getpid():
        os.setpgid(0, 0)
    session = _session_for(loan)
    assert isinstance(session.ring, LentRing)
    session.ring.drop()
    arrived, _staged = _staged, None
    stage: Stage | None = None
    if arrived is not None and arrived[0].token == loan.staged:
        stage, mapped = arrived
        if mapped is not None and stage.slot is not None:
            try:
                session.ring.enter(mapped, stage.slot.segment_id)
            except OSError as error:
                stage.error = error
    return LentWriter(session, loan, stage)


def _session_for(loan: Loan) -> Session:
    global _session, _session_id
    if _session is None or _session_id != loan.session_id:
        if _session is not None:
            _session.ring.close()
            _session.client.close()
        config, ranks = loan.session["config"], loan.session["ranks"]
        client = AgentClient(Path(loan.runtime_dir), deadline_s=config.save.timeout_s)
        client.attach(loan.session_id, loan.session["namespace"], loan.run_id)
        ring = LentRing(client, default_copy_threads(ranks.local_world_size))
        _session = Session(client=client, ring=ring, **loan.session)
        _session_id = loan.session_id
    _session.hosts, _session.peers = loan.hosts, loan.peers
    _session.history.take(loan.history)
    _session.failures = loan.failures
    return _session


class LentWriter(Writer):
    """A trainer's writer, for one save in this process."""

    _drafts_what_is_staged = False

    def __init__(self, session: Session, loan: Loan, stage: Stage | None) -> None:
        super().__init__(session, None, DEFAULT_STREAM)
        self._made_for, self._last = loan.made_for, loan.last
        self._staged = stage
        self._loan = loan
        self._places: Sequence[int] | None = None

    def storage_meta(self) -> StorageMeta | None:
        self._stage, self._staged = self._staged, None
        return None  # the trainer has waited for the save before

    def _set_up(self, is_coordinator: bool, kwargs: dict[str, Any]) -> None:
        failpoints.reach("save.lent.before")
        if not kwargs.get("use_collectives", True):
            raise UsageError(
                "use_collectives=False does not work with the process executor: use the thread one"
            )
        if self._loan.error is not None:
            raise self._loan.error
        super()._set_up(is_coordinator, kwargs)

    def _check_may_save(self, stream: str) -> None:
        if self._loan.history_error is not None:
            raise self._loan.history_error
        super()._check_may_save(stream)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        try:
            return super().write_data(plan, planner)
        finally:
            assert isinstance(self._session.ring, LentRing)
            self._session.ring.drop()

    def _write(self, plan: SavePlan, planner: SavePlanner) -> Receipt:
        receipt = super()._write(plan, planner)
        return replace(receipt, loan=self._loan.token, places=self._places)

    def _learned(self, layout: StageLayout) -> None:
        before = self._stage.layout if self._stage is not None else None
        known = None if before is None else (before.places, before.segment_bytes)
        if known != (layout.places, layout.segment_bytes):
            self._places = layout.places

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        super().finish(metadata, results)
        receipts: list[Receipt] = [result.storage_data for rank in results for result in rank]
        report = self._session.last_save
        assert report is not None
        metadata.storage_data = Outcome(
            report=report,
            coordinator=self._loan.token,
            history=self._session.history.lend(),
            failures=self._session.failures,
            fate=self._ending.fate,
            receipts={each.loan: replace(each, values=()) for each in receipts},
        )
        if self._loan.missed is not None:
            raise self._loan.missed
