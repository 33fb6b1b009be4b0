"""``live.run``: calls ``train`` once per generation, in one process."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import logging
import os
import queue
import signal
import socket
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from tieredckpt.dcp.torch_release import warn_of_release
from tieredckpt.errors import IntegrityError, StaleAttemptError
from tieredckpt.live import messages as m
from tieredckpt.live import torch_private as private
from tieredckpt.live.survivor import SAVED, Kept, StateChangedError, modules_with_buffers
from tieredckpt.live.world import ChangeEvent, World

EXIT_NO_SUPERVISOR = 17
"""Exit code of a process whose supervisor is gone: without it the process cannot be stopped."""
EXIT_UNHEALTHY = 18
"""Exit code of a process whose health check failed; the supervisor starts another one."""
GROUPS_S = 5.0
"""Longest wait for the threads of groups whose ranks are all done, which end at once."""
EXPLAIN_S = 1.0
"""Longest time from the error of a collective to the end of the generation that explains it."""
_ERROR_CHARS_MAX = 300

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """What hooks get; the names are those of nvidia-resiliency-ext's in-process wrapper."""

    rank: int
    world_size: int
    active_rank: int
    active_world_size: int
    initial_rank: int
    initial_world_size: int
    iteration: int
    fn_exception: BaseException | None


Hook = Callable[[State], Any]


def run(
    train: Callable[[World], Any],
    config: str | os.PathLike[str] | dict[str, Any] | None = None,
    *,
    health_check: Hook | None = None,
    abort: Hook | None = None,
    finalize: Hook | None = None,
    on_event: Callable[[ChangeEvent], Any] | None = None,
    resize: Literal["auto", "manual"] = "auto",
    credentials: object = None,
) -> Any:
    """Call ``train(world)`` once per generation until all ranks are done.

    Under ``tieredckpt run`` a generation ends when a rank dies, raises or hangs, and the others go
    on in the next one. Without it there is one generation, and errors are raised as they are.

    Args:
        train: Makes its process group by ``world.init_process_group``, builds the state, loads it
            by ``world.load`` and trains.
        config: As for ``Engine.open``.
        health_check: Called between generations; if it raises, this process is replaced, as it is
            if its CUDA context is broken.
        abort: Called when a generation ends, in another thread, before its collectives are ended.
        finalize: Called once ``train`` is out, in the main thread.
        on_event: Called on all ranks at the same step, before they leave for another world.
        resize: "auto": ``world.begin`` saves and leaves. "manual": the script calls
            ``world.leave()`` once ``world.change`` is not None, at the same step on all ranks.
        credentials: As for ``Engine.open``.

    Returns:
        What ``train`` returned.

    Raises:
        UsageError: This release of torch is without a part that live recovery needs, or fails its
            self-test.
    """
    hooks = _Hooks(health_check, abort, finalize, on_event, resize == "auto", credentials)
    warn_of_release()
    descriptor = os.environ.pop(m.SOCKET_VARIABLE, None)
    if descriptor is None:
        return _run_once(train, config, hooks)
    private.check_release()  # in one generation, as above, no process changes its rank
    return _Process(train, config, hooks, int(descriptor)).run()


@dataclass(frozen=True, slots=True)
class _Hooks:
    health_check: Hook | None
    abort: Hook | None
    finalize: Hook | None
    on_event: Callable[[ChangeEvent], Any] | None
    leaves: bool
    """``world.begin`` leaves by itself."""
    credentials: object


def _run_once(train: Callable[[World], Any], config: Any, hooks: _Hooks) -> Any:
    size, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    with (
        tempfile.TemporaryDirectory(prefix="tieredckpt-") as folder,
        private.refusals() as init,
    ):
        store = str(Path(folder) / "store") if size == 1 else ""  # else the launcher's
        order = m.Train(
            generation=1, rank=rank, size=size, local_rank=rank, local_size=size, store=store
        )
        world = World(order, config, None, lambda _: None, init, credentials=hooks.credentials)
        try:
            return train(world)
        finally:
            world.close(keep=False)
            _call(hooks.finalize, _state_of(order, order, None))
            if dist.is_initialized():
                dist.destroy_process_group()


def _state_of(order: m.Train, first: m.Train, error: BaseException | None) -> State:
    return State(
        rank=order.rank,
        world_size=order.size,
        active_rank=order.rank,
        active_world_size=order.size,
        initial_rank=first.rank,
        initial_world_size=first.size,
        iteration=order.generation - 1,
        fn_exception=error,
    )


def _call(hook: Hook | None, state: State) -> None:
    """Call an optional hook, whose failure must not keep a rank from leaving."""
    if hook is None:
        return
    try:
        hook(state)
    except Exception:
        log.exception("a hook failed: %r", hook)


class Link:
    """A process's connection to its supervisor.

    Receives instructions in a thread, and sends reports. Thread-safe.

    Args:
        descriptor: This process's end of the socket pair.
        on_stop: Called in that thread with the generation that ends; 0: none does.
        on_change: The same with the order to leave; None: none is to.
    """

    def __init__(
        self,
        descriptor: int,
        on_stop: Callable[[int], None],
        on_change: Callable[[m.Change | None], None],
    ) -> None:
        self._socket = socket.socket(fileno=descriptor)
        self._socket.set_inheritable(False)
        self._on_stop, self._on_change = on_stop, on_change
        self._lock = threading.Lock()
        self._received: queue.SimpleQueue[m.Train | m.Leave] = queue.SimpleQueue()
        threading.Thread(target=self._listen, name="tck-live-link", daemon=True).start()

    def send(self, message: m.FromProcess) -> None:
        """Report; a supervisor that is gone ends this process in the listening thread."""
        with self._lock:
            try:
                self._socket.sendall(m.encode(message))
            except OSError as error:
                log.debug("the supervisor is gone: %s", error)

    def wait(self) -> m.Train | m.Leave:
        """The next instruction."""
        return self._received.get()

    def _listen(self) -> None:
        try:
            while data := self._socket.recv(m.MESSAGE_BYTES_MAX):
                order = m.decode_to_process(data)
                if isinstance(order, m.Stop):
                    self._on_stop(order.generation)
                elif isinstance(order, m.Change):
                    self._on_change(order)
                else:
                    self._on_stop(0)  # one before was for another one, also of the same number
                    self._on_change(None)
                    self._received.put(order)
        except (OSError, IntegrityError):
            log.exception("the supervisor's message cannot be read")
        finally:
            os._exit(EXIT_NO_SUPERVISOR)


class _Process:
    """This process under a supervisor: a standby until its first generation."""

    def __init__(
        self, train: Callable[[World], Any], config: Any, hooks: _Hooks, descriptor: int
    ) -> None:
        self._train = train
        self._config = config
        self._hooks = hooks
        self._first: m.Train | None = None
        self._now: tuple[m.Train, World] | None = None
        self._stopped = 0
        """The newest generation that the supervisor has ended."""
        self._kept: Kept | None = None
        self._value: Any = None
        self._is_done = False
        """``train`` has returned in the last generation that this process was in."""
        self._changed: m.Change | None = None
        """The order to leave together with all ranks of a generation."""
        self._link = Link(descriptor, self._stop, self._change)

    def run(self) -> Any:
        faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
        gc.collect()
        if not modules_with_buffers():  # which are searched for in each generation
            gc.freeze()  # or each collection walks all of torch
        self._link.send(m.Ready())
        while True:
            order = self._link.wait()
            # Those of a rank that was done: other ranks may have needed them until now.
            private.drop_groups(wait_s=GROUPS_S)
            if isinstance(order, m.Leave):
                if order.code or not self._is_done:
                    sys.exit(order.code)  # a standby must not run what follows live.run
                return self._value
            self._first = self._first or order
            self._generation(order)

    def _stop(self, generation: int) -> None:
        """In the link's thread, also before the main thread has entered the generation."""
        self._stopped = generation
        now = self._now
        if now is not None and now[0].generation == generation:
            order, world = now
            world.end(lambda: _call(self._hooks.abort, self._state(order, None)))

    def _change(self, change: m.Change | None) -> None:
        """In the link's thread, also before the main thread has entered the generation."""
        self._changed, now = change, self._now
        if change is not None and now is not None and now[0].generation == change.generation:
            now[1].ask_to_change(change)

    def _generation(self, order: m.Train) -> None:
        with private.refusals() as init, _environment(order):
            world = World(
                order, self._config, self._kept, self._link.send, init,
                on_event=self._hooks.on_event, leaves=self._hooks.leaves,
                credentials=self._hooks.credentials,
            )  # fmt: skip
            self._kept, self._now = None, (order, world)
            if self._stopped >= order.generation:
                self._stop(order.generation)
            if self._changed is not None:
                self._change(self._changed)
            # Until the engine is closed, as its saves in the background wait in collectives, too.
            with private.SlicedWaits(world.check):
                error = self._call_train(order, world)
                is_done = error is None and not world.is_ending and not world.has_left
                keep = not is_done and not world.has_left
                self._kept = self._end(order, world, error, keep=keep)
            if not is_done:
                private.drop_groups()
                private.free_device_memory()
                self._check_health(order, error)
        self._is_done = is_done and not order.saves_only
        if self._is_done:
            self._link.send(m.Done(generation=order.generation, version=world.version))
        else:
            version = self._kept.offer.version if self._kept is not None else SAVED
            kept = None if version == SAVED else version
            self._link.send(m.Ready(generation=order.generation, version=kept))

    def _call_train(self, order: m.Train, world: World) -> BaseException | None:
        """Call ``train``; the error that is a fault of this rank's own."""
        try:
            if order.saves_only:
                world.init_process_group("gloo")  # it saves
            else:
                self._value = self._train(world)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            if isinstance(error, RuntimeError) and not world.has_left:
                world.wait_ended(EXPLAIN_S)  # a lost connection is seen before the death
                log.debug("rank %d: an error of train", world.rank, exc_info=error)
            is_own = not world.is_ending and not world.has_left
            if is_own:
                self._report(world, error)
            if not world.has_left:
                self._check_device(world)
            if is_own:
                return error
            _forget_frames(error)
        return None

    def _check_device(self, world: World) -> None:
        """End this process if its device has failed, while the frames of the error still exist.

        Once they are forgotten, the first tensor that is freed would abort the process.
        """
        world.wait_ended()  # kernels of NCCL may wait for dead peers until then
        try:
            private.check_device()
        except RuntimeError:
            log.exception("the device has failed: this process is replaced")
            os._exit(EXIT_UNHEALTHY)

    def _report(self, world: World, error: BaseException) -> None:
        """Report a fault of this rank."""
        traceback.print_exception(error)
        # The first line: those of CUDA's errors explain where to look.
        text = traceback.format_exception_only(error)[-1].strip().split("\n")[0]
        text = text[:_ERROR_CHARS_MAX].encode(errors="replace").decode()
        causes = [error]
        if isinstance(error, dcp.CheckpointException):
            causes += [cause for cause, _ in error.failures.values()]
        is_final = any(isinstance(each, StateChangedError | StaleAttemptError) for each in causes)
        self._link.send(m.Fault(generation=world.generation, error=text, is_final=is_final))

    def _end(
        self, order: m.Train, world: World, error: BaseException | None, *, keep: bool
    ) -> Kept | None:
        kept = None
        try:
            kept = world.close(keep=keep)
        except BaseException as failed:
            # Not keep: the last save in the background failed.
            if not keep or isinstance(failed, KeyboardInterrupt | SystemExit):
                raise
            log.error("rank %d keeps no state: %s", world.rank, failed)  # noqa: TRY400
        _call(self._hooks.finalize, self._state(order, error))
        self._now = None
        _forget_frames(error)
        gc.collect()
        return kept

    def _check_health(self, order: m.Train, error: BaseException | None) -> None:
        check = self._hooks.health_check
        if check is None:
            return
        try:
            check(self._state(order, error))
        except Exception:
            log.exception("the health check failed: this process is replaced")
            os._exit(EXIT_UNHEALTHY)

    def _state(self, order: m.Train, error: BaseException | None) -> State:
        return _state_of(order, self._first or order, error)


def _forget_frames(error: BaseException | None) -> None:
    """Drop the frames of an error and of its causes, which hold the groups of the ended world.

    Else a collection of garbage would join the threads of these groups, for minutes.
    """
    pending, seen = [error], set[int]()
    while pending:
        each = pending.pop()
        if each is not None and id(each) not in seen:  # ``raise error from error`` is a circle
            seen.add(id(each))
            each.__traceback__ = None
            pending += [each.__context__, each.__cause__]


@contextlib.contextmanager
def _environment(order: m.Train) -> Iterator[None]:
    """The variables of torchrun but for an address: there is no server."""
    names = {
        "RANK": str(order.rank),
        "LOCAL_RANK": str(order.local_rank),
        "WORLD_SIZE": str(order.size),
        "LOCAL_WORLD_SIZE": str(order.local_size),
        "GROUP_RANK": str(order.host_rank),
        "NODE_RANK": str(order.host_rank),
        "TORCHELASTIC_RUN_ID": order.job,
        "TORCHELASTIC_RESTART_COUNT": str(order.generation - 1),
    }
    os.environ.update(names)
    try:
        yield
    finally:
        for name in names:
            os.environ.pop(name, None)
