"""From a configuration to a session with this host's agent, or to one that only reads."""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch.distributed as dist

from tieredckpt import failpoints
from tieredckpt.agent.launch import find_or_start
from tieredckpt.agent.runtime import default_runtime_dir, host_id, prepare_runtime_dir
from tieredckpt.dcp.copying import default_copy_threads
from tieredckpt.dcp.discovery import join_hosts
from tieredckpt.dcp.group import Ranks
from tieredckpt.dcp.lending import Lender
from tieredckpt.dcp.session import Session
from tieredckpt.dcp.staging import SlotRing
from tieredckpt.errors import AgentError, ConfigError, NotFoundError, UsageError
from tieredckpt.policy.config import Config, load_config, resolve_namespace
from tieredckpt.policy.config_tiers import EVERY_SAVE
from tieredckpt.recovery.folders import Folders
from tieredckpt.recovery.read_only import ReadOnlyClient
from tieredckpt.tiers.object_check import complaints
from tieredckpt.transport.client import AgentClient
from tieredckpt.transport.messages import NamespaceSpec

Source = str | os.PathLike[str] | Mapping[str, Any] | None

log = logging.getLogger(__name__)


def open_together(
    source: Source,
    process_group: dist.ProcessGroup | None,
    *,
    unsafe_pickle: bool,
    read_only: bool,
) -> Session:
    """Open this rank's session once all ranks can; see ``Engine.open``. Collective."""
    ranks = Ranks.find(process_group)
    opened: list[Session] = []
    complete = False
    try:
        run_id, reads = ranks.from_coordinator(lambda: (secrets.token_hex(16), read_only))

        def open_one() -> tuple[str, int]:
            if reads != read_only:
                raise UsageError("some ranks open their engine with read_only=True, others without")
            begin = _open_reading if read_only else _open_session
            expected = begin(source, ranks, run_id, unsafe_pickle, opened)
            return opened[0].namespace, expected

        told = ranks.gather(open_one)
        if not read_only:
            join_hosts(opened[0], ranks)
        elif len({name for name, _ in told}) > 1:
            names = ", ".join(repr(name) for name, _ in told)
            raise UsageError(f"the ranks name different namespaces: {names}")
        complete = True
    finally:
        if not complete:
            for session in opened:
                session.close()
    # Now the agent knows how many slots a ring has: more, if there are replicas.
    opened[0].prepare_ring(told[ranks.rank][1])
    return opened[0]


def _open_reading(
    source: Source, ranks: Ranks, run_id: str, unsafe_pickle: bool, opened: list[Session]
) -> int:
    """As :func:`_open_session`, but starts no agent, and changes nothing at one that runs."""
    config = load_config(source, os.environ)
    _refuse_impossible(config)
    namespace = resolve_namespace(config.namespace, os.environ)
    runtime_dir = _runtime_dir(config)
    readable: Path | None = None
    if os.path.exists(runtime_dir):
        try:
            readable = prepare_runtime_dir(runtime_dir).path
        except AgentError as error:
            log.warning("the memory of this host is not read: %s", error)
    folders = Folders(config.tiers, readable, namespace, host_id(os.environ))
    client = ReadOnlyClient(runtime_dir, folders, run_id)
    ring = SlotRing(client, default_copy_threads(ranks.local_world_size))
    session = Session(
        config=config,
        namespace=namespace,
        client=client,
        ring=ring,
        ranks=ranks,
        host_id=folders.host_id,
        unsafe_pickle=unsafe_pickle,
        read_only=True,
    )
    opened.append(session)
    try:
        table = client.peers()
    except NotFoundError:
        return 0
    if table.peers or table.unmet:
        session.peers = table
    return 0


def _runtime_dir(config: Config) -> Path:
    wanted = config.agent.runtime_dir
    return Path(wanted) if wanted is not None else default_runtime_dir(os.environ)


def _open_session(
    source: Source,
    ranks: Ranks,
    run_id: str,
    unsafe_pickle: bool,
    opened: list[Session],
) -> int:
    """Puts the session into ``opened``; returns how large a segment it is expected to save.

    Raises ConfigError, AgentError.
    """
    config = load_config(source, os.environ)
    _refuse_impossible(config)
    namespace = resolve_namespace(config.namespace, os.environ)
    runtime_dir = _runtime_dir(config)

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
        reply = client.open_session(
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
    session = Session(
        config=config,
        namespace=namespace,
        client=client,
        ring=ring,
        ranks=ranks,
        host_id=reply.host_id,
        unsafe_pickle=unsafe_pickle,
    )
    session.lender = Lender(session)
    opened.append(session)
    return reply.expected_segment_bytes


def _refuse_impossible(config: Config) -> None:
    """Raises ConfigError for a tier that can never work here, before anything is started.

    The agent would only say so in its status, and nothing would ever be stored there.
    """
    for number, tier in enumerate(config.tiers):
        if tier.is_file:
            continue  # its folder may be mounted later
        for each in complaints(tier.name, tier.url, tier.object):
            if each.fatal:
                key = f"tiers[{number}].{each.key}"
                raise ConfigError(f"{key}: {each.message}", key=key)


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
        # Schedules are asked by the coordinator alone: sessions that differ in them agree.
        tiers=tuple(msgspec.structs.replace(tier, every=EVERY_SAVE) for tier in config.tiers),
    )
