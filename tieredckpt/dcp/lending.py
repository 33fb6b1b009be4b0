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
from multiprocessing.reduction import DupFd
from typing import TYPE_CHECKING, Any

from tieredckpt.dcp import lent
from tieredckpt.dcp.in_flight import Flight, in_process_executor_thread
from tieredckpt.dcp.loan import LentState, Loan, Outcome
from tieredckpt.dcp.loan import lent as loans_out
from tieredckpt.dcp.session import SaveReport
from tieredckpt.dcp.staged_pickle import dumps, portable
from tieredckpt.dcp.stager import Stage, StagedState, StageLayout
from tieredckpt.errors import TieredCkptError, WaitError

if TYPE_CHECKING:
    from tieredckpt.dcp.session import Session
    from tieredckpt.dcp.staging_writer import StagingWriter


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
        token, flight = secrets.token_hex(16), stage.flight
        stage.token = token
        facts: dict[str, Any] = {"token": token, "what": flight.what, "step": flight.step}
        try:
            if stage.error is not None:
                raise stage.error
            if flight.superseded:
                raise _superseded(flight)
            return lent.take_state, (self._sent(staged, facts),)
        except Exception as error:  # noqa: BLE001  (raised by the save, on all ranks)
            return lent.take_state, (LentState(**facts, error=portable(error)),)

    def _sent(self, staged: StagedState, facts: dict[str, Any]) -> LentState:
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
        return LentState(
            **facts,
            data=data,
            slot=sent_slot,
            shared=shared,
            refused=stage.refused,
            without_data=list(stage.without_data),
            places=stage.layout.places if stage.layout is not None else None,
            segment_bytes=stage.layout.segment_bytes if stage.layout is not None else 0,
        )

    def lend_writer(self, writer: StagingWriter) -> Any:
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
        ranks = session.ranks
        loan = Loan(
            token=secrets.token_hex(16),
            staged=stage.token if stage is not None else None,
            session_id="" if session.closed else session.client.session_id,
            runtime_dir=str(session.client.runtime_dir),
            namespace=session.namespace,
            run_id=session.run_id,
            host_id=session.host_id,
            hosts=session.hosts,
            peers=session.peers,
            config=session.config,
            ranks=(ranks.rank, ranks.world_size, ranks.local_rank, ranks.local_world_size),
            unsafe_pickle=session.unsafe_pickle,
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
        for token in [key for key, each in loans_out.items() if each is self]:
            del loans_out[token]
        loans_out[loan.token] = self
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
            self._session.in_flight.succeeded(flight)
        self._loan = self._flight = None

    def take_back(self, outcome: Outcome, token: str) -> None:
        """The save has ended without an exception. Called in the executor's thread."""
        session, stage, part = self._session, self._stage, outcome.parts[token]
        self._stage = None
        if self._flight is not None:
            session.in_flight.succeeded(self._flight)
        if token == outcome.coordinator:
            session.history.take(outcome.history)
            session.failures = outcome.failures
        elif part.refusal is not None:
            session.failures.count(outcome.stream)
        self._loan = self._flight = None
        if part.segment_id is not None:
            session.fates.begin(part.segment_id, outcome.stream, outcome.fate)
        if stage is not None:
            if stage.slot is not None:
                session.ring.abandon(stage.slot)  # it was sealed there, or given up
            if part.refusal is None:
                layout = stage.layout
                if part.places is not None:
                    layout = StageLayout(stage.signature, list(part.places), part.size)
                if layout is not None:
                    session.stager.learned(outcome.stream, layout)
        spent_s = time.perf_counter() - self._begun_s
        session.last_save = SaveReport(
            save_id=outcome.save_id if token == outcome.coordinator else None,
            stream=outcome.stream,
            step=outcome.step,
            stall_s=stage.seconds if stage is not None else spent_s,
            bytes_written=part.size,
            cold=part.cold,
            skipped=outcome.skipped if token == outcome.coordinator else part.refusal,
        )
        if part.size and not session.closed:
            # This process stages into the next ones. RuntimeError: the interpreter is ending.
            with contextlib.suppress(RuntimeError):
                session.prepare_ring(part.size)


def _superseded(flight: Flight) -> WaitError:
    return WaitError(
        f"the save of {flight.what} was staged, but another one began before it did",
        reason="superseded",
    )


def _check_thread() -> None:
    if not in_process_executor_thread():
        raise TypeError("writers and staged states cannot be sent to another process")
