"""What a training script holds: open, load, writer, reader, wait, status."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlanner, SavePlanner

from tieredckpt import failpoints
from tieredckpt.agent.launch import find_or_start
from tieredckpt.agent.runtime import default_runtime_dir
from tieredckpt.dcp.background import Background
from tieredckpt.dcp.checkpoint_id import DEFAULT_STREAM
from tieredckpt.dcp.choosing import LoadRequest
from tieredckpt.dcp.copying import default_copy_threads
from tieredckpt.dcp.group import Ranks
from tieredckpt.dcp.lending import Lender
from tieredckpt.dcp.looking import CheckpointInfo, list_checkpoints, wait_for
from tieredckpt.dcp.opening import make_session
from tieredckpt.dcp.reader import Reader
from tieredckpt.dcp.restore import restore
from tieredckpt.dcp.session import RestoreReport, SaveReport, Session
from tieredckpt.dcp.staging import SlotRing
from tieredckpt.dcp.writer import Writer
from tieredckpt.policy.config import Config, load_config, resolve_namespace
from tieredckpt.transport.client import AgentClient
from tieredckpt.transport.messages import NamespaceSpec, Status, TierSpec

__all__ = ["CheckpointInfo", "Engine", "Reader", "RestoreReport", "SaveReport", "Writer"]


class Engine:
    """One process's checkpoints: in host memory first, in the configured tiers soon after.

    Make it with :meth:`open`; close it, or use it as a context manager. An engine, its writers and
    its readers are valid only in the process that opened it, not after a fork.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._background = Background(session)

    @classmethod
    def open(
        cls,
        config: str | os.PathLike[str] | Mapping[str, Any] | None = None,
        *,
        process_group: dist.ProcessGroup | None = None,
        unsafe_pickle: bool = False,
    ) -> Engine:
        """Connect to this host's agent; starts one, detached, where none runs.

        Collective if a process group is initialised: call it on all ranks, after
        ``init_process_group``.

        Args:
            config: A YAML file or the same as a dict; ``TIEREDCKPT_*`` environment variables
                override it.
            process_group: A group of all ranks with a CPU backend, for small control values; by
                default the default group, or a gloo group made here if that has none.
            unsafe_pickle: Let :meth:`load` unpickle anything that a checkpoint contains.

        Raises:
            ConfigError: The configuration is wrong; the message names the key.
            AgentError: The agent cannot be started or used; the message says what to do.
            NotImplementedError: The ranks are on several hosts.
            UsageError: The group is not of all ranks.
            RankError: It failed on another rank; on that one the error itself is raised.
        """
        ranks = Ranks.find(process_group)
        opened: list[Session] = []
        complete = False
        try:
            run_id = ranks.from_coordinator(lambda: secrets.token_hex(16))
            ranks.run(lambda: opened.append(_open_session(config, ranks, run_id, unsafe_pickle)))
            hosts = ranks.gather(lambda: opened[0].host_id)
            if len(set(hosts)) > 1:
                raise NotImplementedError(
                    f"the ranks run on {len(set(hosts))} hosts; this release works on one host only"
                )
            complete = True
        finally:
            if not complete:
                for session in opened:
                    session.close()
        return cls(opened[0])

    # --- saving and loading ----------------------------------------------------------------------

    def writer(
        self,
        step: int | None = None,
        stream: str = DEFAULT_STREAM,
        *,
        group: dist.ProcessGroup | Sequence[int] | None = None,
    ) -> Writer:
        """A ``StorageWriter`` for ``dcp.save`` and ``dcp.async_save``.

        Args:
            step: The step; None: each save's ``checkpoint_id`` names it (its last component is a
                number or like ``step-100``, its folder names the stream).
            stream: The sequence of checkpoints that it belongs to.
            group: With ``use_collectives=False`` in a sub-group: the process group, or the ranks
                in it, of which DCP does not tell its storage. None: all of the engine's.

        Raises:
            UsageError: The engine is closed, or step or stream are not valid.
        """
        self._session.check()
        members = None if group is None else self._session.ranks.members(group)
        return Writer(self._session, step, stream, members)

    def async_save(
        self,
        state: dict[str, Any],
        step: int,
        *,
        stream: str = DEFAULT_STREAM,
        planner: SavePlanner | None = None,
        process_group: dist.ProcessGroup | None = None,
        executor: Literal["thread", "process"] = "thread",
    ) -> Future[Metadata]:
        """Save ``state`` in the background; training may change it when this returns. Collective.

        Waits first for an earlier one, at most ``save.wait_timeout``. The future need not be kept:
        a failure that nobody looked at is raised by the next call of this method, by :meth:`wait`
        or by :meth:`close`. ``docs/async_save.md`` says what is copied where.

        Args:
            state: As for ``dcp.save``.
            step: The step.
            stream: The sequence of checkpoints that it belongs to.
            planner: As for ``dcp.save``. It plans in the background.
            process_group: Instead of :meth:`background_group`; nothing else may use it meanwhile.
            executor: Where the rest of the work is done: in a thread of this process, or in a
                process of its own, which DCP starts at the first such save and keeps.

        Returns:
            Done when the checkpoint is committed in memory on all ranks. Fails with DCP's
            ``CheckpointException``.

        Raises:
            WaitError: The earlier save is still under way, on this rank or another one.
            CheckpointException: The failure of the earlier save, if nobody looked at it.
            UsageError: The engine is closed, or an argument is not valid.
        """
        self._session.check()
        return self._background.save(state, step, stream, planner, process_group, executor)

    def background_group(self) -> dist.ProcessGroup | None:
        """A gloo group of all ranks for ``dcp.async_save(process_group=...)``.

        DCP plans in the background, with collectives that would mix with those of training in any
        group that both use. Collective at the first call; None without a process group.
        """
        self._session.check()
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
    ) -> int | None:
        """Restore the newest recoverable checkpoint on all ranks, and go on from it. Collective.

        If every failure is a damaged or unavailable copy, all ranks walk back together to the next
        older candidate. What is saved afterwards has the restored checkpoint as its parent.

        Args:
            state: As for ``dcp.load``; may hold Stateful objects, which see ``load_state_dict``
                only after all ranks have read everything.
            step: Only this step, without walking back; newer ones are abandoned then.
            stream: The sequence of checkpoints. Several of them are restored together, at the
                newest step that all of them have, or not at all: ``state`` has one entry per
                stream then, named like it (a dict as saved into it, or a Stateful; a rank may
                leave out what it has nothing of). The same happens if none is named, the stream
                "default" holds nothing, and each key of ``state`` is the name of one that does.
            strict: Raise if the checkpoint holds keys that no rank asked for, or lacks one that
                was; False warns, and leaves alone what the checkpoint lacks.
            planner: Instead of :class:`~tieredckpt.dcp.planner.SafeLoadPlanner`.
            process_group: Instead of the engine's; it may be a sub-group, whose ranks alone call
                this then. Each sub-group that loads and saves by itself has its own stream.
            fresh_start: Begin anew even if a tier cannot say whether it holds checkpoints, or if
                the streams have no step in common. It never overrides a checkpoint that was found
                damaged, nor one that can be restored.

        Returns:
            The step; None if there certainly is no checkpoint.

        Raises:
            NoRecoverableCheckpointError: No candidate can be restored; says why for each. After
                any failure the contents of the tensors are undefined if the message says so.
            NotFoundError: There is no checkpoint of ``step``.
            TieredCkptError: An error of ours that says nothing about the checkpoint.
            CheckpointException: DCP's, with the failures of the planner or of the state.
        """
        request = LoadRequest(
            step=step,
            stream=stream,
            strict=strict,
            planner=planner,
            process_group=process_group,
            fresh_start=fresh_start,
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
            level: "memory", or the name of a tier.
            timeout: In seconds; None: the configuration's ``save.timeout``.
            stream: The sequence of checkpoints.

        Raises:
            WaitError: It will not get there, or not in time; field ``reason``.
            CheckpointException: The last :meth:`async_save` failed, and nobody looked at it.
            NotImplementedError: ``level`` is "replicated".
        """
        self._session.check()
        limit_s = self._session.config.save.timeout_s if timeout is None else timeout
        begun_s = time.monotonic()
        self._session.in_flight.wait_step(step, limit_s)
        self._background.raise_missed()
        left_s = max(0.0, limit_s - (time.monotonic() - begun_s))
        wait_for(self._session, step, level, left_s, stream)

    def latest(self, stream: str = DEFAULT_STREAM) -> CheckpointInfo | None:
        """The newest checkpoint that :meth:`load` would try, as far as this host can tell."""
        return next(iter(self.checkpoints(stream)), None)

    def checkpoints(self, stream: str = DEFAULT_STREAM) -> list[CheckpointInfo]:
        """The restorable checkpoints of the time line, newest first."""
        self._session.check()
        return list_checkpoints(self._session, stream)

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
        self._session.close()
        self._background.raise_missed()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __reduce__(self) -> Any:
        raise TypeError("an engine cannot be sent to another process: open one there")


def _open_session(
    source: str | os.PathLike[str] | Mapping[str, Any] | None,
    ranks: Ranks,
    run_id: str,
    unsafe_pickle: bool,
) -> Session:
    config = load_config(source, os.environ)
    namespace = resolve_namespace(config.namespace, os.environ)
    wanted = config.agent.runtime_dir
    runtime_dir = Path(wanted) if wanted is not None else default_runtime_dir(os.environ)

    def start() -> Path:
        return find_or_start(
            runtime_dir,
            start=config.agent.start,
            start_timeout_s=config.agent.start_timeout_s,
            idle_timeout_s=config.agent.idle_timeout_s,
            log_level=config.agent.log_level,
        )

    runtime_dir = start()
    client = AgentClient(runtime_dir, deadline_s=config.save.timeout_s, revive=start)
    complete = False
    try:
        failpoints.reach("open.session.before")
        opened = client.open_session(
            namespace,
            _spec(config, runtime_dir),
            local_rank=ranks.local_rank,
            local_world_size=ranks.local_world_size,
            run_id=run_id,
        )
        failpoints.reach("open.session.after")
        complete = True
    finally:
        if not complete:
            client.close()
    ring = SlotRing(client, default_copy_threads(ranks.local_world_size))
    session = make_session(
        config, namespace, client, ring, ranks, opened.host_id, unsafe_pickle=unsafe_pickle
    )
    session.lender = Lender(session)
    session.prepare_ring(opened.expected_segment_bytes)
    return session


def _spec(config: Config, runtime_dir: Path) -> NamespaceSpec:
    capacity_bytes = config.memory.capacity_bytes
    if capacity_bytes is None:
        # Half, as Linux gives a tmpfs half of the memory: the other half stays for data loaders.
        stat = os.statvfs(runtime_dir)
        capacity_bytes = stat.f_blocks * stat.f_frsize // 2
    return NamespaceSpec(
        capacity_bytes=capacity_bytes,
        keep_last=config.memory.keep.last,
        wait_s=config.memory.wait_s,
        tiers=tuple(
            TierSpec(name=tier.name, url=tier.url, scope=tier.scope, keep_last=tier.keep.last)
            for tier in config.tiers
        ),
    )
