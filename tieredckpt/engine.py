"""What a training script holds: open, load, writer, reader, wait, status."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Literal

import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlanner, SavePlanner

from tieredckpt.dcp.async_save import Background
from tieredckpt.dcp.job.checkpoints import CheckpointInfo, list_checkpoints, pin, wait_for
from tieredckpt.dcp.job.session import RestoreReport, SaveReport
from tieredckpt.dcp.load.choose import LoadRequest
from tieredckpt.dcp.load.load import restore
from tieredckpt.dcp.load.reader import Reader
from tieredckpt.dcp.open import open_together
from tieredckpt.dcp.preemption import Leaving
from tieredckpt.dcp.save.state import SaveState
from tieredckpt.dcp.save.writer import Writer
from tieredckpt.dcp.state.checkpoint_id import DEFAULT_STREAM
from tieredckpt.recovery.flush import FlushReport, flush_and_wait
from tieredckpt.rpc.messages.agent import Status

__all__ = [
    "CheckpointInfo",
    "Engine",
    "FlushReport",
    "Leaving",
    "Reader",
    "RestoreReport",
    "SaveReport",
    "Writer",
]


class Engine:
    """One process's checkpoints: in host memory first, in the configured tiers soon after.

    Make it with :meth:`open`; close it, or use it as a context manager. An engine, its writers and
    its readers are valid only in the process that opened it, not after a fork.
    """

    def __init__(self, session: SaveState) -> None:
        self._session = session
        self._background = Background(session)
        self._leaving = Leaving(session)

    @classmethod
    def open(
        cls,
        config: str | os.PathLike[str] | Mapping[str, Any] | None = None,
        *,
        process_group: dist.ProcessGroup | None = None,
        unsafe_pickle: bool = False,
        read_only: bool = False,
    ) -> Engine:
        """Connect to this host's agent; starts one, detached, where none runs.

        Collective if a process group is initialised: call it on all ranks, after
        ``init_process_group``. With ranks on several hosts it makes their agents known to each
        other (docs/operate/hosts.md); with all on one host no agent opens a port.

        Args:
            config: A YAML file or the same as a dict; ``TIEREDCKPT_*`` environment variables
                override it.
            process_group: A group of all ranks with a CPU backend, for small control values; by
                default the default group, or a gloo group made here if that has none.
            unsafe_pickle: Let :meth:`load` unpickle anything that a checkpoint contains.
            read_only: To look at checkpoints, also beside a live job: nothing is started, claimed
                or written anywhere, and what would save raises UsageError. The tiers are read from
                here; memory, and other hosts, through this host's agent if one runs.

        Raises:
            ConfigError: The configuration is wrong, or names what cannot work here (a scheme that
                nothing installed knows, a profile or a file that is not there); the message names
                the key.
            AgentError: The agent cannot be started or used; the message says what to do.
            UsageError: The group is not of all ranks, or they name different namespaces. Or the
                launcher started several ranks (``WORLD_SIZE``), and there is no process group.
            RankError: It failed on another rank; on that one the error itself is raised.
        """
        session = open_together(
            config, process_group, unsafe_pickle=unsafe_pickle, read_only=read_only
        )
        return cls(session)

    # --- saving and loading ----------------------------------------------------------------------

    def writer(
        self,
        step: int | None = None,
        stream: str = DEFAULT_STREAM,
        *,
        group: dist.ProcessGroup | Sequence[int] | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> Writer:
        """A ``StorageWriter`` for ``dcp.save`` and ``dcp.async_save``.

        Args:
            step: The step; None: each save's ``checkpoint_id`` names it (its last component is a
                number or like ``step-100``, its folder names the stream).
            stream: The sequence of checkpoints that it belongs to.
            group: With ``use_collectives=False`` in a sub-group: the process group, or the ranks
                in it, of which DCP does not tell its storage. None: all of the engine's.
            tags: What is to be known of the checkpoint, as ``{"loss": "0.31"}``; those that rank 0
                gives count. ``keep: {best: ...}`` of a tier looks at them.

        Raises:
            UsageError: The engine is closed, or step, stream or tags are not valid.
        """
        self._session.check_saves()
        members = None if group is None else self._session.ranks.members(group)
        return Writer(self._session, step, stream, members, tags)

    def async_save(
        self,
        state: dict[str, Any],
        step: int,
        *,
        stream: str = DEFAULT_STREAM,
        planner: SavePlanner | None = None,
        process_group: dist.ProcessGroup | None = None,
        executor: Literal["thread", "process"] = "thread",
        tags: Mapping[str, str] | None = None,
    ) -> Future[Metadata]:
        """Save ``state`` in the background; training may change it when this returns. Collective.

        Waits first for an earlier one, at most ``save.wait_timeout``. The future need not be kept:
        a failure that nobody looked at is raised by the next call of this method, by :meth:`wait`
        or by :meth:`close`. ``docs/use/async_save.md`` says what is copied where.

        Args:
            state: As for ``dcp.save``.
            step: The step.
            stream: The sequence of checkpoints that it belongs to.
            planner: As for ``dcp.save``. It plans in the background.
            process_group: Instead of :meth:`background_group`; nothing else may use it meanwhile.
            executor: Where the rest of the work is done: in a thread of this process, or in a
                process of its own, which DCP starts at the first such save and keeps; that needs
                a process group, if only of one rank.
            tags: As for :meth:`writer`.

        Returns:
            Done when the checkpoint is committed in memory on all ranks. Fails with DCP's
            ``CheckpointException``, also if ``state_dict()`` of an object in ``state`` raises.

        Raises:
            WaitError: The earlier save is still under way, on this rank or another one.
            CheckpointException: The failure of the earlier save, if nobody looked at it.
            UsageError: The engine is closed, or an argument is not valid.
            RankError: Another rank failed before anything was copied, with an error not of ours.
        """
        self._session.check_saves()
        return self._background.save(state, step, stream, planner, process_group, executor, tags)

    def background_group(self) -> dist.ProcessGroup | None:
        """A gloo group of all ranks for ``dcp.async_save(process_group=...)``.

        DCP plans in the background, with collectives that would mix with those of training in any
        group that both use. Collective at the first call; None without a process group.
        """
        self._session.check_saves()
        return self._background.group()

    def reader(
        self, step: int | None = None, stream: str = DEFAULT_STREAM, save_id: str | None = None
    ) -> Reader:
        """A ``StorageReader`` for ``dcp.load``; never walks back to another checkpoint.

        Args:
            step: Only this step; None: the newest that can be restored.
            stream: The sequence of checkpoints.
            save_id: Only this checkpoint, also one that a roll-back abandoned.

        Raises:
            UsageError: The engine is closed, or step or stream are not valid.
        """
        self._session.check()
        return Reader(self._session, step, stream, save_id)

    def load(
        self,
        state: dict[str, Any],
        *,
        step: int | None = None,
        stream: str | Sequence[str] = DEFAULT_STREAM,
        strict: bool = True,
        planner: LoadPlanner | None = None,
        process_group: dist.ProcessGroup | None = None,
        fresh_start: bool = False,
        save_id: str | None = None,
        abandon_newer: bool = False,
    ) -> int | None:
        """Restore the newest recoverable checkpoint on all ranks, and go on from it. Collective.

        If every failure is a damaged or unavailable copy, all ranks walk back together to the next
        older candidate. A load changes nothing. What is saved afterwards has the restored
        checkpoint as its parent, and the first such save takes the namespace over from other runs.

        Args:
            state: As for ``dcp.load``; may hold Stateful objects, which see ``load_state_dict``
                only after all ranks have read everything.
            step: Only this step, without walking back. If there are newer ones a warning says so,
                and the next save raises UsageError unless ``abandon_newer``.
            stream: The sequence of checkpoints. Several of them are restored together, at the
                newest step that all of them have, or not at all: ``state`` has one entry per
                stream then, named like it (a dict as saved into it, or a Stateful; a rank may
                leave out what it has nothing of). The same happens if none is named, the stream
                "default" holds nothing, and each key of ``state`` is the name of one that does.
            strict: Raise if the checkpoint holds keys that no rank asked for, or lacks one that
                was, or a value that does not survive the cast to its tensor's type; False warns,
                and leaves alone what the checkpoint lacks. Both raise if the state holds tensors
                and none would be restored.
            planner: Instead of :class:`~tieredckpt.dcp.state.planner.SafeLoadPlanner`.
            process_group: Instead of the engine's; it may be a sub-group, whose ranks alone call
                this then. Each sub-group that loads and saves by itself has its own stream.
            fresh_start: Begin anew even if a tier cannot say whether it holds checkpoints, or if
                the streams have no step in common. It never overrides a checkpoint that was found
                damaged, nor one that can be restored.
            save_id: Only this checkpoint, also one that is off the time line; of one stream.
            abandon_newer: The next save may abandon what is newer than ``step`` or ``save_id``.

        Returns:
            The step; None if there certainly is no checkpoint, on the time line or off it.

        Raises:
            NoRecoverableCheckpointError: No candidate can be restored; says why for each. Or two
                sides went on without knowing of each other: names both, and how to choose. After
                any failure the contents of the tensors are undefined if the message says so.
            NotFoundError: There is no checkpoint of ``step``.
            TieredCkptError: An error of ours that says nothing about the checkpoint.
            CheckpointException: DCP's, with the failures of the planner or of the state.
        """
        request = LoadRequest(
            step=step,
            save_id=save_id,
            stream=stream,
            strict=strict,
            planner=planner,
            process_group=process_group,
            fresh_start=fresh_start,
            abandon_newer=abandon_newer,
        )
        return restore(self._session, state, request)

    # --- looking, without collectives ------------------------------------------------------------

    def wait(
        self,
        step: int,
        level: str,
        timeout: float | None = None,
        *,
        stream: str = DEFAULT_STREAM,
    ) -> None:
        """Wait until the whole checkpoint of ``step`` has reached ``level``.

        A save of this step that is under way in the background is waited for, too.

        Args:
            step: The newest checkpoint of this step is meant.
            level: "memory", "replicated" (all its copies on other hosts are there), or the name of
                a tier.
            timeout: In seconds; None: the configuration's ``save.timeout``.
            stream: The sequence of checkpoints.

        Raises:
            WaitError: It will not get there, or not in time; field ``reason``.
            CheckpointException: The last :meth:`async_save` failed, and nobody looked at it.
        """
        self._session.check_saves()
        limit_s = self._session.config.save.timeout_s if timeout is None else timeout
        begun_s = time.monotonic()
        self._session.background_saves.wait_step(step, limit_s)
        self._background.raise_missed()
        left_s = max(0.0, limit_s - (time.monotonic() - begun_s))
        wait_for(self._session, step, level, left_s, stream)

    def flush(self, tier: str | None = None, deadline_s: float | None = None) -> FlushReport:
        """Bring the newest committed checkpoint of each stream to a tier now, on all hosts.

        No collective: call it on one rank, or on all. The agents do it, before everything that
        waits there, and go on after the deadline, also if this process ends.

        Args:
            tier: None: the nearest one that outlives this host and can be reached in time.
            deadline_s: How many seconds are left; None: as long as it takes.

        Returns:
            Which tier it was, and how far it came on this host.

        Raises:
            NotFoundError: There is no such tier, or no checkpoint yet.
            UsageError: No tier is configured.
            TierUnavailableError: None answers.
        """
        self._session.check_saves()
        return flush_and_wait(self._session.client, tier, deadline_s)

    def leave_on(self, *signals: int, deadline_s: float | None = None) -> Leaving:
        """On each of these signals, have the agent flush, and :meth:`should_leave` be true.

        The handler saves nothing, takes no lock, and calls the one that was there before; a second
        signal of the same kind does what it would have done without this. docs/use/preemption.md.

        Raises UsageError: Not the main thread, or the signal is taken or cannot be handled.
        """
        self._session.check_saves()
        return self._leaving.on(signals, deadline_s)

    def should_leave(self) -> bool:
        """Whether any rank was asked to leave: the same on all. Collective, cheap, for each step.

        Raises RankError: One is gone, or did not ask within the process group's timeout.
        """
        self._session.check_saves()
        return self._leaving.should_leave()

    def latest(self, stream: str = DEFAULT_STREAM) -> CheckpointInfo | None:
        """The newest checkpoint that :meth:`load` would try, as far as this host can tell."""
        return next(iter(self.checkpoints(stream)), None)

    def checkpoints(self, stream: str = DEFAULT_STREAM) -> list[CheckpointInfo]:
        """The restorable checkpoints of the time line, newest first."""
        self._session.check()
        return list_checkpoints(self._session, stream)

    def pin(
        self, step: int, reason: str, stream: str = DEFAULT_STREAM, *, timeout: float = 30.0
    ) -> str:
        """Keep the newest checkpoint of ``step`` in every tier that holds it, until it is unpinned.

        No collective: call it on one rank. It is written into the tiers, so it outlives the job.
        What is in memory only, and goes to no tier by itself, is brought to one.

        Args:
            step: Which one.
            reason: For those who wonder later.
            stream: The sequence of checkpoints.
            timeout: Seconds to wait for the tiers, at most 600. One that has not noted it by then
                gets it later: the pin counts already, and a warning is logged.

        Returns:
            Its save id.

        Raises:
            NotFoundError: There is no such checkpoint.
            UsageError: It is in memory only, and no tier is configured.
        """
        self._session.check_saves()
        return pin(self._session, "pin", step, stream, timeout, reason)

    def unpin(self, step: int, stream: str = DEFAULT_STREAM, *, timeout: float = 30.0) -> str:
        """End all pins of the newest checkpoint of ``step``; retention decides again.

        Returns its save id. Raises NotFoundError: no such checkpoint, or it is not pinned.
        """
        self._session.check_saves()
        return pin(self._session, "unpin", step, stream, timeout)

    def status(self) -> Status:
        """What this host's agent holds and does."""
        self._session.check()
        return self._session.client.status()

    @property
    def last_save(self) -> SaveReport | None:
        """This rank's part in its last save."""
        return self._session.last_save

    @property
    def skipped_saves(self) -> int:
        """Saves without a checkpoint since the engine was opened; see ``save.on_error``.

        The coordinator counts all, another rank those in which it could not write itself, and
        with ``use_collectives=False`` all.
        """
        return self._session.skipped_saves

    @property
    def last_restore(self) -> RestoreReport | None:
        """This rank's part in the last successful :meth:`load`."""
        return self._session.last_restore

    @property
    def namespace(self) -> str:
        """The run's name, under which a restart finds its checkpoints."""
        return self._session.namespace

    @property
    def host_id(self) -> str:
        """This host, as manifests name it."""
        return self._session.host_id

    # --- the end ---------------------------------------------------------------------------------

    def close(self) -> None:
        """End the session with the agent, which goes on spilling. Idempotent.

        Waits for a save in the background, at most ``save.wait_timeout``.

        Raises:
            CheckpointException: The last :meth:`async_save` failed, and nobody looked at it. The
                engine is closed then, too.
        """
        self._leaving.close()
        self._session.close()
        self._background.raise_missed()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __reduce__(self) -> Any:
        raise TypeError("an engine cannot be sent to another process: open one there")
