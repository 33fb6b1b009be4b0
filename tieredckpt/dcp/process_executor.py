"""Saves in DCP's process executor: what is sent to its process, and what both sides do there.

The executor's thread pickles the staged state and the writer, which is where this learns that a
save goes to another process, and then waits for the answer; so the save in flight is this thread's,
and over when it is. What is raised while pickling would leave the other ranks' processes waiting
in a collective: it is sent instead, and raised there. Nor may unpickling raise, which would end the
process: that is kept until the save's first call inside of DCP's collectives.

The process plans, copies and digests. All else it asks of the trainer over a pipe, where a thread
beside the executor's has the trainer's own writer do it: begin the save, acquire a slot, seal,
commit. So the session, the time line and the failures are in one place, and without the trainer
nothing is committed.

The descriptor of a slot that is sent is of the same open file description as the trainer's: both
have one lock, and should the trainer die, nobody else gets the slot before both are gone. It is
never unlocked in the process, whose share of it goes with the mapping.

A staged state travels with its tensors by reference. Torch's own way sends each storage by a
descriptor of its own, and copies into shared memory what does not lie there yet, by which tensors
in a slot would cease to lie in the slot. Here a tensor in the slot is sent as its place, and all
others together in one piece of shared memory. What is not plain memory (sparse tensors,
accelerators, empty ones) goes torch's way.
"""

from __future__ import annotations

import io
import mmap
import os
import pickle
import threading
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.reduction import DupFd, ForkingPickler
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from tieredckpt import failpoints
from tieredckpt.dcp.job.session import Writing
from tieredckpt.dcp.save.collective import encode_save, stored_items
from tieredckpt.dcp.save.failures import WRITING, portable
from tieredckpt.dcp.save.part import receipts_in, write_part, written
from tieredckpt.dcp.save.receipt import Receipt, Refusal
from tieredckpt.dcp.slots.background_saves import BackgroundSave, in_process_executor_thread
from tieredckpt.dcp.slots.copy import default_copy_threads, goes_by_bytes
from tieredckpt.dcp.slots.leaves import WithoutData, without_data
from tieredckpt.dcp.slots.slot_ring import WritableSlot
from tieredckpt.dcp.slots.stager import Stage, StagedState
from tieredckpt.dcp.state.checkpoint_id import Named
from tieredckpt.dcp.state.plan_caches import put_back
from tieredckpt.errors import ProtocolError, TieredCkptError, TierUnavailableError, UsageError
from tieredckpt.storage.file_io import CopyPool
from tieredckpt.storage.memory.mapping import Mapping

if TYPE_CHECKING:
    from tieredckpt.dcp.job.ranks import Ranks
    from tieredckpt.dcp.job.session import Session
    from tieredckpt.dcp.save.writer import Writer
    from tieredckpt.dcp.state.metadata import EncodedPlan
    from tieredckpt.format.segment import Item

POLL_S = 1.0
"""How soon the thread beside notices that the executor's has ended, if the process says nothing."""

ANSWER_S = 1800.0
"""Longest wait for the trainer, which may wait for slots and copies; as long as DCP's groups do."""

_SentSlot = tuple[Any, str, str, int, bool]
"""Descriptor (to be detached), segment id, slot id, capacity, cold."""


@dataclass(frozen=True, slots=True)
class _SentState:
    """A staged state.

    Attributes:
        data: See :mod:`tieredckpt.dcp.process_executor`.
        slot: Where some of it lies.
        shared: The rest; None: nothing.
        without_data: As the stage has it.
    """

    data: bytes
    slot: _SentSlot | None
    shared: Shared | None
    without_data: list[int]


# --- in the trainer -------------------------------------------------------------------------------


class Lender:
    """Sends the saves of one engine to the process executor's process.

    Args:
        session: Of the engine.
    """

    def __init__(self, session: Session) -> None:
        self._session = session

    def reduce_state(self, staged: StagedState) -> Any:
        """What the executor's thread pickles instead of a staged state."""
        _check_thread()
        stage, sent = staged.stage, None
        if stage.error is None:
            try:
                sent = self._sent(staged)
            except Exception as error:  # noqa: BLE001  (raised by the save, on all ranks)
                stage.error = error
        return take_state, (sent,)

    def _sent(self, staged: StagedState) -> _SentState:
        stage, slot = staged.stage, staged.stage.slot
        data, shared = dumps((dict(staged), stage.locals), slot, stage.locals)
        return _SentState(
            data=data,
            slot=_sent_slot(self._session, slot) if slot is not None else None,
            shared=shared,
            without_data=stage.without_data,
        )

    def reduce_writer(self, writer: Writer) -> Any:
        """What the executor's thread pickles instead of a writer; after its staged state."""
        _check_thread()
        session, staged, line = self._session, False, None
        error: Exception | None = None
        try:
            session.check()
            # Until the saves before have ended: one in the process would be given our answer.
            flight, stage = writer.start(in_background=True)
            assert flight is not None
            staged, line = stage is not None, _Desk(session, writer, flight, stage).open()
        except (TieredCkptError, OSError, RuntimeError) as found:
            error = portable(found)
        ranks, unsafe, apart = session.ranks, session.unsafe_pickle, session.handles_signals
        bare = replace(ranks, group=None)
        return take_writer, (line or error, session.run_id, bare, unsafe, staged, apart)


class _Desk:
    """Does what the process asks for, for one save: each public method is a request."""

    def __init__(
        self, session: Session, writer: Writer, flight: BackgroundSave, stage: Stage | None
    ) -> None:
        self._session, self._writer, self._flight = session, writer, flight
        self._executor = threading.current_thread()
        slot = stage.slot if stage is not None else None
        self._slots = {slot.segment_id: slot} if slot is not None else {}
        self._stream = ""

    def open(self) -> Any:
        """Begin; the descriptor that the process asks by, to be detached."""
        here, there = Pipe()
        with there:
            sent = DupFd(there.fileno())
        name = "tieredckpt-lending"
        thread = threading.Thread(target=self._serve, args=(here,), name=name, daemon=True)
        self._flight.helper = thread
        thread.start()
        return sent

    def _serve(self, line: Connection) -> None:
        try:
            while self._executor.is_alive():
                if line.poll(POLL_S):
                    name, args = line.recv()
                    line.send(self._answer(name, args))
        except (EOFError, OSError):
            pass  # the process is gone, which DCP tells its thread
        finally:
            line.close()
            for slot in self._slots.values():
                self._session.ring.abandon(slot)  # nothing, if it was sealed

    def _answer(self, name: str, args: tuple[Any, ...]) -> tuple[bool, Any]:
        try:
            return True, getattr(self, name)(*args)
        except Exception as error:  # noqa: BLE001  (raised in the process)
            return False, portable(error)

    def set_up(self, checkpoint_id: Any, is_coordinator: bool, kwargs: dict[str, Any]) -> Receipt:
        """Begin the save; this rank's blank receipt."""
        if checkpoint_id is not None:
            self._writer.reset(checkpoint_id)
        self._writer.set_up_storage_writer(is_coordinator, **kwargs)
        receipt = self._writer.save.blank_receipt()
        self._stream = receipt.stream
        return receipt

    def abandon(self, segment_id: str) -> None:
        """What was staged does not fit."""
        self._session.ring.abandon(self._slots.pop(segment_id))

    def acquire(self, segment_bytes: int) -> _SentSlot:
        """A slot for what was not staged in one."""
        session = self._session
        with session.saving:
            slot = session.ring.acquire(segment_bytes)
            session.ring.hold(slot, self._flight.is_done_with_slot)
        self._slots[slot.segment_id] = slot
        return _sent_slot(session, slot)

    def seal(self, segment_id: str, segment_bytes: int, root: bytes) -> None:
        """Seal what was written."""
        session = self._session
        session.unreported.begin(
            segment_id, self._stream, "failed"
        )  # if it is not known to be sealed
        with session.saving:
            session.ring.seal(self._slots[segment_id], segment_bytes, root)
        session.unreported.begin(segment_id, self._stream)

    def wrote(self, receipt: Receipt, places: list[int] | None) -> None:
        """Record what the process wrote."""
        self._writer.save.wrote(receipt, places)

    def stored_items(self, receipt: Receipt) -> Sequence[Item]:
        """What is in a segment."""
        return stored_items(self._session, receipt)

    def finish(self, receipts: Sequence[Receipt], encoded: EncodedPlan | None) -> Any:
        """Commit, on the coordinator; what its ``Metadata`` brings to all ranks."""
        metadata = Metadata({})
        self._writer.save.finish(metadata, receipts, encoded)
        return metadata.storage_data


def _sent_slot(session: Session, slot: WritableSlot) -> _SentSlot:
    fd = DupFd(session.ring.descriptor(slot))
    return fd, slot.segment_id, slot.slot_id, slot.capacity_bytes, slot.cold


def _check_thread() -> None:
    if not in_process_executor_thread():
        raise TypeError("writers and staged states cannot be sent to another process")


# --- in the process -------------------------------------------------------------------------------

_owns: dict[str, Writing] = {}
"""By run, of the trainer's engine that saved last."""
_staged: Stage | None = None
"""The state that arrived last, until its writer takes it."""


def take_state(sent: _SentState | None) -> StagedState:
    """The staged state in this process; what goes wrong is in its stage."""
    global _staged
    _staged = stage = Stage(background_save=BackgroundSave("another process"))
    content: dict[str, Any] = {}
    if sent is not None:
        stage.without_data = sent.without_data
        try:
            memory = map_shared(sent.shared)
            stage.slot = _mapped(sent.slot) if sent.slot is not None else None
            content, stage.locals = loads(sent.data, stage.slot, memory)
        except Exception as error:  # noqa: BLE001  (raised by the save, on all ranks)
            stage.error = error
    return StagedState(content, stage)


def _mapped(sent: _SentSlot) -> WritableSlot:
    """The slot in this process, populated."""
    shared_fd, segment_id, slot_id, capacity_bytes, cold = sent
    fd = shared_fd.detach()
    try:
        mapping = Mapping(fd, capacity_bytes)
    finally:
        os.close(fd)
    mapping.populate(0, capacity_bytes)
    return WritableSlot(segment_id, slot_id, capacity_bytes, mapping.view, mapping.address, cold)


def take_writer(
    line: Any, run_id: str, ranks: Ranks, unsafe_pickle: bool, staged: bool, apart: bool
) -> LentWriter:
    """The writer in this process, with the state that arrived before it.

    Args:
        line: Descriptor (to be detached) of the pipe to the trainer, or why the save must fail.
        run_id: Of the engine.
        ranks, unsafe_pickle: As its session has them.
        staged: Whether our stager made the state.
        apart: The trainer takes notice of signals, which the process is not to die of when they
            are sent to the whole process group (torchrun and Slurm do so, and a terminal).
    """
    global _staged
    if apart and os.getpgrp() != os.getpid():
        os.setpgid(0, 0)
    stage, _staged = _staged, None
    if run_id not in _owns:
        _owns.clear()
        _owns[run_id] = Writing(ranks=ranks, unsafe_pickle=unsafe_pickle)
    return LentWriter(line, _owns[run_id], stage if staged else None)


class LentWriter(Named, StorageWriter):
    """A trainer's writer, for one save in this process; also the slots that it writes in."""

    pool: CopyPool

    def __init__(self, line: Any, own: Writing, stage: Stage | None) -> None:
        super().__init__()
        self._line, self._own, self._stage = line, own, stage
        self._checkpoint_id: Any = None
        self._plans: Sequence[SavePlan] = ()

    def _ask(self, name: str, *args: Any) -> Any:
        """Have the trainer do something; raises what that raises."""
        try:
            self._line.send((name, args))
            if not self._line.poll(ANSWER_S):
                raise TimeoutError(f"no answer within {ANSWER_S:g} s")
            fine, answer = self._line.recv()
        except (OSError, EOFError) as error:
            self._line.close()  # a late answer would be taken for that of the next question
            raise TierUnavailableError(
                f"the trainer that this process saves for is gone, or does not answer: {error!r}",
                tier="memory",
                outcome="unknown",
            ) from error
        if not fine:
            raise answer
        return answer

    # --- slots ------------------------------------------------------------------------------------

    def acquire(self, segment_bytes: int) -> WritableSlot:
        """A slot of the trainer's."""
        return _mapped(self._ask("acquire", segment_bytes))

    def seal(self, slot: WritableSlot, segment_bytes: int, root: bytes) -> None:
        """Have the trainer hand the written segment to the agent."""
        failpoints.reach("save.seal.before")
        self._ask("seal", slot.segment_id, segment_bytes, root)

    def abandon(self, slot: WritableSlot) -> None:
        """Have the trainer take it back: the agent may need its room for a larger one."""
        self._ask("abandon", slot.segment_id)

    # --- what dcp.save calls, in this order -------------------------------------------------------

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        self._checkpoint_id = checkpoint_id

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        failpoints.reach("save.lent.before")
        if not kwargs.get("use_collectives", True):
            raise UsageError(
                "use_collectives=False does not work with the process executor: use the thread one"
            )
        if isinstance(self._line, Exception):
            raise self._line
        self._line = Connection(self._line.detach())
        self._receipt: Receipt = self._ask("set_up", self._checkpoint_id, is_coordinator, kwargs)
        if self._stage is not None and self._stage.error is not None:
            raise self._stage.error
        self._own.dcp_plans.use(self._receipt.stream)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        self._local_plan = plan
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        self._plans = plans
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        self.pool = CopyPool(default_copy_threads(self._own.ranks.local_world_size))
        try:
            receipt, places = write_part(
                self._own, self, self._receipt, self._stage, plan, planner, self._local_plan
            )
        finally:
            self.pool.close()
            put_back()
        self._ask("wrote", receipt, places)
        return written(receipt)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        receipts, encoded = receipts_in(results), None
        if all(each.refusal is None for each in receipts):
            try:
                encoded = encode_save(self._own, metadata, receipts, self._plans, self._stored)
            except WRITING as error:
                refusal = Refusal.of(self._receipt.rank, error)
                receipts[0] = replace(receipts[0], refusal=refusal)
        metadata.storage_data = self._ask("finish", receipts, encoded)

    def _stored(self, receipt: Receipt) -> Sequence[Item]:
        items: Sequence[Item] = self._ask("stored_items", receipt)
        return items


# --- a staged state as bytes ----------------------------------------------------------------------


_ALIGNMENT = 64

_Ref = tuple[str, Any, torch.dtype, torch.Size, bool]
"""Where it lies: "slot", "shared" or "nowhere"; offset, dtype, shape, whether it requires grad."""

Shared = tuple[Any, int]
"""Shared memory on its way: a descriptor, to be detached, and the size."""


class _Pickler(ForkingPickler):
    def __init__(self, file: io.BytesIO, slot: WritableSlot | None) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self._slot = slot
        self.shared: list[tuple[int, torch.Tensor]] = []
        """What goes into shared memory, and where; this also keeps ids from being used again."""
        self.shared_bytes = 0
        self._refs: dict[int, _Ref] = {}

    def persistent_id(self, obj: Any) -> _Ref | None:
        if type(obj) is WithoutData:
            return ("nowhere", obj.sample, obj.dtype, obj.shape, False)
        if type(obj) is not torch.Tensor:
            return None
        known = self._refs.get(id(obj))
        if known is not None or not (goes_by_bytes(obj) and obj.numel()) or obj.is_quantized:
            return known
        where, offset = "slot", self._offset_in_slot(obj)
        if offset is None:
            where, offset = "shared", self.shared_bytes
            self.shared.append((offset, obj))
            self.shared_bytes += -(-obj.nbytes // _ALIGNMENT) * _ALIGNMENT
            self._refs[id(obj)] = (where, offset, obj.dtype, obj.shape, obj.requires_grad)
        return (where, offset, obj.dtype, obj.shape, obj.requires_grad)

    def _offset_in_slot(self, tensor: torch.Tensor) -> int | None:
        if self._slot is None:
            return None
        offset = tensor.data_ptr() - self._slot.address
        return offset if 0 <= offset <= self._slot.capacity_bytes - tensor.nbytes else None


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes, memories: dict[str, Any]) -> None:
        super().__init__(io.BytesIO(data))
        self._memories = memories

    def persistent_load(self, ref: _Ref) -> torch.Tensor:
        where, offset, dtype, shape, requires_grad = ref
        if where == "nowhere":
            left: Any = without_data(torch.empty(shape, dtype=dtype, device="meta"))
            left.sample = offset
            return left  # type: ignore[no-any-return]
        memory = self._memories[where]
        if memory is None:
            raise ProtocolError(f"a tensor lies in {where}, which was not sent")
        size = shape.numel() * dtype.itemsize
        flat = torch.frombuffer(memory, dtype=torch.uint8, count=size, offset=offset)
        return flat.view(dtype).view(shape).requires_grad_(requires_grad)


def dumps(
    value: Any, slot: WritableSlot | None, expendable: Collection[torch.Tensor]
) -> tuple[bytes, Shared | None]:
    """``value`` for :func:`loads`.

    Args:
        value: Anything that pickles. The slot must stay as it is until it is used no more.
        slot: Where some of its tensors lie.
        expendable: Tensors in it whose memory is freed as soon as it is copied.

    Returns:
        The bytes, and the shared memory; None: there is none.

    Raises:
        OSError: There is no room for the shared memory.
        Exception: What pickling raises.
    """
    file = io.BytesIO()
    pickler = _Pickler(file, slot)
    pickler.dump(value)
    if not pickler.shared_bytes:
        return file.getvalue(), None
    mine = {id(each) for each in expendable}
    fd = os.memfd_create("tieredckpt-staged", os.MFD_CLOEXEC)
    try:
        os.posix_fallocate(fd, 0, pickler.shared_bytes)  # or writing to it could be SIGBUS
        memory = mmap.mmap(fd, pickler.shared_bytes)
        for offset, tensor in pickler.shared:
            target = torch.frombuffer(memory, dtype=torch.uint8, count=tensor.nbytes, offset=offset)
            with torch.no_grad():
                target.view(tensor.dtype).view(tensor.shape).copy_(tensor)
            if id(tensor) in mine:
                tensor.untyped_storage().resize_(0)
        return file.getvalue(), (DupFd(fd), pickler.shared_bytes)
    finally:
        os.close(fd)


def map_shared(shared: Shared | None) -> mmap.mmap | None:
    """The shared memory of :func:`dumps` in another process."""
    if shared is None:
        return None
    fd = shared[0].detach()
    try:
        return mmap.mmap(fd, shared[1])
    finally:
        os.close(fd)


def loads(data: bytes, slot: WritableSlot | None, shared: mmap.mmap | None) -> Any:
    """The value of :func:`dumps` in another process; its tensors lie where they lay there.

    Args:
        data: From a process that is trusted: it is unpickled.
        slot: The same slot, as it is mapped here.
        shared: Of :func:`map_shared`.
    """
    memories = {"slot": slot.view if slot is not None else None, "shared": shared}
    return _Unpickler(data, memories).load()
