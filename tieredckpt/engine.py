"""The public API of a training script: open, load, writer, reader, wait, status."""

from __future__ import annotations

import logging
import math
import os
import secrets
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
from tieredckpt.recovery.flush import FlushReport, check_deadline, flush_and_wait
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

log = logging.getLogger(__name__)


class Engine:
    """One process's checkpoints: in host memory first, in the configured tiers soon after.

    Make it with :meth:`open`; close it, or use it as a context manager. An engine, its writers and
    its readers are valid only in the process that opened it, not after a fork.
    """

    def __init__(self, session: SaveState) -> None:
        self._session = session
        self._background = Background(session)
        self._preemption = Leaving(session)

    @classmethod
    def open(
        cls,
        config: str | os.PathLike[str] | Mapping[str, Any] | None = None,
        *,
        process_group: dist.ProcessGroup | None = None,
        unsafe_pickle: bool = False,
        read_only: bool = False,
        run_id: str | None = None,
        credentials: object = None,
    ) -> Engine:
        """Connect to this host's agent; starts one, detached, if none runs.

        Collective if a process group is initialised: call it on all ranks, after
        ``init_process_group``. With ranks on several hosts it makes their agents known to each
        other (docs/operate/hosts.md); with all on one host no agent opens a port.

        Args:
            config: A YAML file or the same as a dict; ``TIEREDCKPT_*`` environment variables
                override it.
            process_group: A group of all ranks with a CPU backend, for small control values; by
                default the default group, or a new gloo group if that has no CPU backend.
            unsafe_pickle: Let :meth:`load` unpickle anything that a checkpoint contains.
            read_only: To look at checkpoints, also during a live job: nothing is started, locked
                or written, and methods that save raise UsageError. Tiers are read from here;
                memory and other hosts are read through this host's agent if one runs.
            run_id: 32 hex digits of rank 0, for a launcher of several worlds that are one run; by
                default each ``open`` is a run of its own.
            credentials: For tiers at ``s3://`` without ``profile`` and ``anonymous``, instead of
                what the environment has: a ``boto3.Session``, or a function that returns one or
                STS's mapping (AccessKeyId, SecretAccessKey, SessionToken, Expiration). Called in
                another thread, at least every five minutes and before they expire. The first rank
                of each host sends them to its agent, which keeps them in its memory alone
                (docs/operate/object-stores.md).

        Raises:
            ConfigError: The configuration is wrong or cannot work here (no installed package
                supports a scheme; a profile or a file is missing); the message names the key.
            AgentError: The agent cannot be started or used; the message gives the remedy.
            NamespaceInUseError: A live process has another configuration of this namespace, or
                another job saves into it on this host (key ``take_over``).
            UsageError: The group does not include all ranks, or they have different namespaces. Or
                ``credentials`` supplies none, or no tier uses them. Or the launcher started several
                ranks (``WORLD_SIZE``) without a process group.
            RankError: Another rank failed; that rank raises the error itself.
        """
        session = open_together(
            config,
            process_group,
            unsafe_pickle=unsafe_pickle,
            read_only=read_only,
            run_id=run_id or secrets.token_hex(16),
            credentials=credentials,
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
            group: With ``use_collectives=False`` in a sub-group: the process group, or its ranks;
                DCP does not pass them to its storage. None: all of the engine's ranks.
            tags: Tags of the checkpoint, as ``{"loss": "0.31"}``; those of rank 0 are stored. A
                tier's ``keep: {best: ...}`` uses them. ``{"origin": "live"}`` alone is the mark of
                live recovery: such a checkpoint is due in no tier.

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
        a failure that was not retrieved is raised by the next call of this method, by :meth:`wait`
        or by :meth:`close`. See docs/use/async_save.md.

        Args:
            state: As for ``dcp.save``.
            step: The step.
            stream: The sequence of checkpoints that it belongs to.
            planner: As for ``dcp.save``. It plans in the background.
            process_group: Instead of :meth:`background_group`; nothing else may use it meanwhile.
            executor: "thread": a thread of this process does the rest of the work. "process": a
                process that DCP starts at the first such save and keeps; it needs a process group,
                even with one rank.
            tags: As for :meth:`writer`.

        Returns:
            Done when the checkpoint is committed in memory on all ranks. Fails with DCP's
            ``CheckpointException``, also if ``state_dict()`` of an object in ``state`` raises.

        Raises:
            WaitError: The earlier save is still running, on this rank or another one.
            CheckpointException: The failure of the earlier save, if it was not retrieved.
            UsageError: The engine is closed, or an argument is not valid.
            RankError: Another rank failed before the copy, with an error of another package.
        """
        self._session.check_saves()
        return self._background.save(state, step, stream, planner, process_group, executor, tags)

    def background_group(self) -> dist.ProcessGroup | None:
        """A gloo group of all ranks for ``dcp.async_save(process_group=...)``.

        DCP plans in the background with collectives, which would mix with those of training in a
        group that both use. Collective at the first call; None without a process group.
        """
        self._session.check_saves()
        return self._background.group()

    def reader(
        self, step: int | None = None, stream: str = DEFAULT_STREAM, save_id: str | None = None
    ) -> Reader:
        """A ``StorageReader`` for ``dcp.load``; never falls back to another checkpoint.

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
        again: bool = False,
    ) -> int | None:
        """Restore the newest recoverable checkpoint on all ranks, and resume at it. Collective.

        If all failures are damaged or unavailable copies, all ranks fall back together to the next
        older candidate. A load changes no checkpoint. Later saves have the restored checkpoint as
        their parent, and the first of them supersedes other runs of the namespace.

        Args:
            state: As for ``dcp.load``; may hold Stateful objects, which see ``load_state_dict``
                only after all ranks have read everything.
            step: Only this step, without a fall-back. If there are newer ones, UsageError is raised
                before anything is read, unless ``abandon_newer`` or the engine is read-only.
            stream: The sequence of checkpoints. Several streams are restored together, at the
                newest step that all of them have, or not at all. ``state`` then has one entry per
                stream under its name (a dict as it was saved, or a Stateful; a rank may leave out
                streams that it has no part of). The same happens if no stream is named, the stream
                "default" is empty, and each key of ``state`` is the name of a stream that is not.
            strict: Raise if the checkpoint has keys that no rank requested, if a requested key is
                missing, or if a value does not survive the cast to its tensor's type. False warns,
                and does not change values whose keys are missing. Both raise if the state has
                tensors and none would be restored.
            planner: Instead of :class:`~tieredckpt.dcp.state.planner.SafeLoadPlanner`.
            process_group: Instead of the engine's; it may be a sub-group, whose ranks alone call
                this then. Each sub-group that loads and saves by itself has its own stream.
            fresh_start: Start anew even if a tier is unreachable, or if the streams have no step in
                common. It never overrides a checkpoint that was found damaged, nor one that can be
                restored.
            save_id: Only this checkpoint, also one that is off the timeline; of one stream.
            abandon_newer: The next save may abandon checkpoints newer than ``step`` or ``save_id``;
                their number is logged. Refused if a run went back to the same checkpoint before and
                checkpoints were saved since, as in a script that is restarted.
            again: Abandon those, too.

        Returns:
            The step; None if there certainly is no checkpoint, on the timeline or off it.

        Raises:
            NoRecoverableCheckpointError: No candidate can be restored; the message has the reason
                for each. Or the timeline has a fork; the message names both sides, and how to
                choose. If the tensors' contents are undefined after a failure, the message states
                it.
            NotFoundError: There is no checkpoint of ``step``.
            UsageError: ``state`` is no dict, or see ``abandon_newer``.
            TieredCkptError: A failure that does not depend on the checkpoint.
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
            again=again,
        )
        return restore(self._session, state, request)

    def resume_newest(self, stream: str = DEFAULT_STREAM, *, loaded: str | None = None) -> None:
        """Resume at the newest recoverable checkpoint without reading it. Collective.

        For ranks that bring newer state themselves: their next save has it as its parent.

        Args:
            stream: The sequence of checkpoints.
            loaded: Save id of the checkpoint that these ranks' state began with.

        Raises:
            StaleAttemptError: The newest is neither that one nor of this run (``run_id``).
            RankError: It failed on the coordinator.
        """
        session = self._session
        session.ranks.from_coordinator(lambda: session.history.resume_newest(stream, loaded))

    def ask_members_only(self, only: bool) -> None:
        """Whether other hosts than those of the ranks are left out when checkpoints are looked for.

        For ranks that bring the state after the newest update: a lost host never answers.
        """
        self._session.members_only = only

    @property
    def session(self) -> SaveState:
        """What its writers and readers share, for other folders of this package.

        Raises:
            UsageError: The engine is closed, or opened with ``read_only=True``.
        """
        self._session.check_saves()
        return self._session

    @property
    def control_group(self) -> dist.ProcessGroup | None:
        """The group with a CPU backend that the engine uses for small values; None: the default."""
        return self._session.ranks.group

    def gather(self, value: Any) -> list[Any]:
        """``value`` of each rank, in rank order. Collective; for small values."""
        return self._session.ranks.gather(lambda: value)

    # --- looking, without collectives ------------------------------------------------------------

    def wait(
        self,
        step: int,
        level: str,
        timeout: float | None = None,
        *,
        stream: str = DEFAULT_STREAM,
    ) -> None:
        """Wait until the checkpoint of ``step`` has reached ``level`` completely.

        Also waits for a background save of this step.

        Args:
            step: The step, of which the newest checkpoint is taken.
            level: "memory", "replicated" (all its copies on other hosts are there), or the name of
                a tier.
            timeout: In seconds; None: the configuration's ``save.timeout``.
            stream: The sequence of checkpoints.

        Raises:
            WaitError: It will not get there, or not in time; field ``reason``.
            CheckpointException: The last :meth:`async_save` failed, and that was not retrieved.
        """
        self._session.check_saves()
        limit_s = self._session.config.save.timeout_s if timeout is None else timeout
        begun_s = time.monotonic()
        self._session.background_saves.wait_step(step, limit_s)
        self._background.raise_missed()
        left_s = max(0.0, limit_s - (time.monotonic() - begun_s))
        wait_for(self._session, step, level, left_s, stream)

    def wait_background(self) -> None:
        """Wait for a save in the background, if there is one, at most ``save.wait_timeout``.

        Raises WaitError: It takes longer, and goes on.
        """
        session = self._session
        session.background_saves.wait_idle(session.config.save.wait_timeout_s)

    def flush(self, tier: str | None = None, deadline_s: float | None = None) -> FlushReport:
        """Copy the newest committed checkpoint of each stream to tiers now, on all hosts.

        No collective: call it on one rank, or on all. The agents copy it before queued checkpoints,
        and continue after the deadline and after the end of this process. Waits first for a save in
        the background, at most half of the time and ``save.wait_timeout``.

        Args:
            tier: None: all in which it is due, or that are not too slow; one that fails is waited
                for only until its share of the time is over, once another one has it.
            deadline_s: Seconds to wait; None: no limit.

        Returns:
            The progress on this host, and by tier why it is not there.

        Raises:
            NotFoundError: There is no such tier, or no checkpoint yet.
            UsageError: No tier is configured.
            TierUnavailableError: No tier can be reached.
        """
        self._session.check_saves()
        check_deadline(deadline_s)
        began_s, session = time.monotonic(), self._session
        half_s = math.inf if deadline_s is None else deadline_s / 2
        until_s = began_s + min(half_s, session.config.save.wait_timeout_s)
        for save in session.background_saves.others():
            if not save.wait(until_s):
                log.warning("the flush goes without %s, which is still being saved", save.what)
        if deadline_s is not None:
            deadline_s = max(0.0, deadline_s - (time.monotonic() - began_s))
        return flush_and_wait(session.client, tier, deadline_s)

    def leave_on(self, *signals: int, deadline_s: float | None = None) -> Leaving:
        """On each of these signals, have the agent flush, and :meth:`should_leave` be true.

        The handler saves nothing, takes no lock, and calls the previous handler; a second signal of
        the same kind has its former effect. See docs/use/preemption.md.

        Raises UsageError: Not the main thread, or the signal is in use or cannot be handled.
        """
        self._session.check_saves()
        return self._preemption.on(signals, deadline_s)

    def should_leave(self) -> bool:
        """Whether any rank received a signal; the same on all. Collective, cheap, for each step.

        Raises RankError: A rank is gone, or did not call this within the process group's timeout.
        """
        self._session.check_saves()
        return self._preemption.agree()

    def latest(self, stream: str = DEFAULT_STREAM) -> CheckpointInfo | None:
        """The newest checkpoint that :meth:`load` would try, as far as this host knows."""
        return next(iter(self.checkpoints(stream)), None)

    def checkpoints(self, stream: str = DEFAULT_STREAM) -> list[CheckpointInfo]:
        """The restorable checkpoints of the timeline, newest first."""
        self._session.check()
        return list_checkpoints(self._session, stream)

    def pin(
        self, step: int, reason: str, stream: str = DEFAULT_STREAM, *, timeout: float = 30.0
    ) -> str:
        """Keep the newest checkpoint of ``step`` in every tier that holds it, until it is unpinned.

        No collective: call it on one rank. The pin is stored in the tiers, so it outlives the job.
        A checkpoint that is in memory only, and due in no tier, is copied to one.

        Args:
            step: The step.
            reason: A text for people, shown with the pin.
            stream: The sequence of checkpoints.
            timeout: Seconds to wait for the tiers, at most 600. A tier that is late stores the pin
                later; the pin is already in effect, and a warning is logged.

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
        """The state of this host's agent."""
        self._session.check()
        return self._session.client.status()

    @property
    def last_save(self) -> SaveReport | None:
        """Report of this rank's last save."""
        return self._session.last_save

    @property
    def skipped_saves(self) -> int:
        """Saves without a checkpoint since the engine was opened; see ``save.on_error``.

        The coordinator counts all of them. Another rank counts those in which it could not write
        itself; with ``use_collectives=False`` it counts all.
        """
        return self._session.skipped_saves

    @property
    def last_restore(self) -> RestoreReport | None:
        """Report of this rank's last successful :meth:`load`."""
        return self._session.last_restore

    @property
    def namespace(self) -> str:
        """The run's name, by which a restart finds its checkpoints."""
        return self._session.namespace

    @property
    def host_id(self) -> str:
        """This host's name in manifests."""
        return self._session.host_id

    # --- the end ---------------------------------------------------------------------------------

    def finish(self) -> None:
        """Bring the newest checkpoint of each stream to all tiers, at the end of training.

        Only if this process has saved, and no exception unwinds. No collective: the first rank of
        each host waits, while bytes move, and at most ``close.flush``. If something is not there
        then, it logs a warning, and the agent goes on. Waits first for a save in the background, at
        most ``save.wait_timeout``.

        Raises:
            UsageError: The engine is closed, or opened with ``read_only=True``.
            WaitError: The save in the background takes longer.
        """
        self._session.check_saves()
        self.wait_background()
        self._session.bring_newest(self._limit_s())

    def _limit_s(self) -> float:
        left_s = self._preemption.left_s
        return math.inf if left_s is None else left_s

    def close(self, *, flush: bool = True) -> None:
        """End the session with the agent, which continues to spill. Idempotent.

        Waits for a background save, at most ``save.wait_timeout``, and then as :meth:`finish` does,
        unless ``flush`` is False: this is not the end of training.

        Raises:
            CheckpointException: The last :meth:`async_save` failed, and that was not retrieved. The
                engine is closed all the same.
        """
        until_s = time.monotonic() + self._limit_s()
        self._preemption.close()  # the agent gets a signal that came just before
        self._session.close(until_s=until_s if flush else None)
        self._background.raise_missed()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __reduce__(self) -> Any:
        raise TypeError("an engine cannot be sent to another process: open one there")
