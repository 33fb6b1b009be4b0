"""The trainer's side of a save in DCP's process executor.

The executor's thread pickles the staged state and the writer, which is where this learns that a
save goes to another process, and then waits for the answer; so the save in flight is this thread's,
and over when it is. What is raised while pickling would leave the other ranks' processes waiting
in a collective: it is sent instead, and raised there.

The process works in this one's session with the agent, with its history, and in its slot: the
descriptor that it is sent is of the same open file description, so both have the same lock. It is
given up by whoever is done with the slot; this process does not touch it until the save is over.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from dataclasses import replace
from multiprocessing.reduction import DupFd
from typing import TYPE_CHECKING, Any

from tieredckpt.dcp import lent
from tieredckpt.dcp.in_flight import Flight, in_process_executor_thread, superseded
from tieredckpt.dcp.lent import LentState, Loan, Outcome
from tieredckpt.dcp.staged_pickle import dumps, portable
from tieredckpt.dcp.stager import Stage, StagedState, StageLayout
from tieredckpt.errors import TieredCkptError, WaitError

if TYPE_CHECKING:
    from tieredckpt.dcp.session import Session
    from tieredckpt.dcp.writer import Writer


class Lender:
    """Lends the session of one engine to the process executor's process, for one save at a time.

    Args:
        session: Of the engine.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._loan: Loan | None = None
        """The last one, until its outcome is known."""
        self._flight: Flight | None = None
        self._stage: Stage | None = None
        self._begun_s = 0.0

    def lend_state(self, staged: StagedState) -> Any:
        """What the executor's thread pickles instead of a staged state."""
        _check_thread()
        stage = staged.stage
        stage.token = secrets.token_hex(16)
        layout = replace(stage.layout, signature=[]) if stage.layout is not None else None
        bare = replace(stage, slot=None, locals=[], signature=[], layout=layout)
        try:
            if stage.error is not None:
                raise stage.error
            if stage.flight.superseded:
                raise superseded(stage.flight)
            return lent.take_state, (self._sent(staged, bare),)
        except Exception as error:  # noqa: BLE001  (raised by the save, on all ranks)
            bare.error = portable(error)
            return lent.take_state, (LentState(stage=bare),)

    def _sent(self, staged: StagedState, bare: Stage) -> LentState:
        stage, slot = staged.stage, staged.stage.slot
        private = [
            tensor
            for tensor in stage.locals
            if not tensor.is_meta and (slot is None or not slot.contains(tensor.data_ptr()))
        ]
        data, fd, size = dumps((dict(staged), stage.locals), slot, private)
        try:
            shared = (DupFd(fd), size) if fd >= 0 else None
        finally:
            if fd >= 0:
                os.close(fd)
        sent_slot = None
        if slot is not None:
            slot_fd = self._session.ring.descriptor(slot)
            sent_slot = (DupFd(slot_fd), slot.slot_id, slot.segment_id, slot.capacity_bytes)
        return LentState(stage=bare, data=data, slot=sent_slot, shared=shared)

    def lend_writer(self, writer: Writer) -> Any:
        """What the executor's thread pickles instead of a writer; after its staged state."""
        _check_thread()
        session, in_flight = self._session, self._session.in_flight
        stage, made_for, last = writer.lend()
        flight = stage.flight if stage is not None else in_flight.begin(*writer.what())
        in_flight.take_up(flight)
        error: Exception | None = None
        history_error: Exception | None = None
        try:
            session.check()
            self._wait(flight)
            in_flight.supersede(flight)
        except TieredCkptError as found:
            error = found
        try:
            # The process cannot open the session again, should the agent be another one now.
            session.client.save_failed((), session.skipped_saves)
            self.settle()
        except (TieredCkptError, OSError) as found:
            history_error = found
        loan = Loan(
            token=secrets.token_hex(16),
            staged=stage.token if stage is not None else None,
            session_id="" if session.closed else session.client.session_id,
            runtime_dir=str(session.client.runtime_dir),
            run_id=session.run_id,
            hosts=session.hosts,
            peers=session.peers,
            session={
                "config": session.config,
                "namespace": session.namespace,
                "ranks": replace(session.ranks, group=None),
                "host_id": session.host_id,
                "unsafe_pickle": session.unsafe_pickle,
            },
            history=session.history.lend(),
            failures=session.failures,
            made_for=made_for,
            last=last,
            error=error,
            history_error=portable(history_error) if history_error is not None else None,
            missed=in_flight.take_missed(),
            apart=session.leaves_on_signals,
        )
        if history_error is None:
            self._loan, self._flight = loan, flight
        self._stage, self._begun_s = stage, time.perf_counter()
        for token in [key for key, each in lent.loans_out.items() if each is self]:
            del lent.loans_out[token]
        lent.loans_out[loan.token] = self
        return lent.take_writer, (loan,)

    def _wait(self, flight: Flight) -> None:
        """Wait for the saves before; one in the process would be given our answer, and we its."""
        in_flight, save = self._session.in_flight, self._session.config.save
        try:
            in_flight.wait_idle(save.wait_timeout_s, before=flight)
        except WaitError:
            with contextlib.suppress(WaitError):  # raised below, and now it can do no harm
                in_flight.wait_idle(save.timeout_s, before=flight)
            raise

    def settle(self) -> None:
        """Learn what became of the last loan, if it was never told: before a save or a loan.

        Raises:
            AgentError, TierUnavailableError, StaleAttemptError: It cannot be learnt.
        """
        if self._loan is None:
            return
        steps = self._session.history.settle_loan(self._loan.history)
        flight = self._flight
        if flight is not None and (flight.step in steps if flight.step is not None else steps):
            self._session.in_flight.told(flight)
        self._loan = self._flight = None

    def take_back(self, outcome: Outcome, token: str) -> None:
        """The save has ended without an exception. Called in the executor's thread."""
        session, stage, mine = self._session, self._stage, outcome.receipts[token]
        report, stream, size = outcome.report, mine.stream, mine.size
        self._stage = None
        if self._flight is not None:
            session.in_flight.told(self._flight)
        if token == outcome.coordinator:
            session.history.take(outcome.history)
            session.failures = outcome.failures
        else:
            why = None if mine.refusal is None else str(mine.refusal)
            report = replace(report, save_id=None, skipped=why, not_replicated=None)
            if mine.refusal is not None:
                session.failures.count(stream)
        self._loan = self._flight = None
        if mine.segment_id is not None:
            session.fates.begin(mine.segment_id, stream, outcome.fate)
        if stage is not None:
            if stage.slot is not None:
                session.ring.abandon(stage.slot)  # it was sealed there, or given up
            if mine.refusal is None:
                layout = stage.layout
                if mine.places is not None:
                    layout = StageLayout(stage.signature, list(mine.places), size)
                if layout is not None:
                    session.stager.learned(stream, layout)
        stall_s = time.perf_counter() - self._begun_s if stage is None else stage.seconds
        session.last_save = replace(report, stall_s=stall_s, bytes_written=size, cold=mine.cold)
        if size and not session.closed:
            # This process stages into the next ones. RuntimeError: the interpreter is ending.
            with contextlib.suppress(RuntimeError):
                session.prepare_ring(size)


def _check_thread() -> None:
    if not in_process_executor_thread():
        raise TypeError("writers and staged states cannot be sent to another process")
