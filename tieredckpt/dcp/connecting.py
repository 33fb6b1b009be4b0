"""From a configuration to a session with this host's agent, or to one that only reads."""

from __future__ import annotations

import contextlib
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
from tieredckpt.tiers.object_store import complaints
from tieredckpt.transport.client import AgentClient
from tieredckpt.transport.messages import NamespaceSpec, SessionOpened

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
            expected = _open(
                source, ranks, run_id, opened, unsafe_pickle=unsafe_pickle, read_only=read_only
            )
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


def _open(
    source: Source,
    ranks: Ranks,
    run_id: str,
    opened: list[Session],
    *,
    unsafe_pickle: bool,
    read_only: bool,
) -> int:
    """Puts the session into ``opened``; returns how large a segment it is expected to save.

    Raises ConfigError, AgentError.
    """
    config = load_config(source, os.environ)
    _refuse_impossible(config)
    namespace = resolve_namespace(config.namespace, os.environ)
    wanted = config.agent.runtime_dir
    runtime_dir = Path(wanted) if wanted is not None else default_runtime_dir(os.environ)
    if read_only:
        client, host = _reading(config, namespace, runtime_dir, run_id)
        expected = 0
    else:
        client, reply = _attached(config, namespace, runtime_dir, ranks, run_id)
        host, expected = reply.host_id, reply.expected_segment_bytes
    session = Session(
        config=config,
        namespace=namespace,
        client=client,
        ring=SlotRing(client, default_copy_threads(ranks.local_world_size)),
        ranks=ranks,
        host_id=host,
        unsafe_pickle=unsafe_pickle,
        read_only=read_only,
    )
    opened.append(session)
    if not read_only:
        session.lender = Lender(session)
        return expected
    with contextlib.suppress(NotFoundError):
        table = client.peers()
        if table.peers or table.unmet:
            session.peers = table
    return expected


def _reading(
    config: Config, namespace: str, runtime_dir: Path, run_id: str
) -> tuple[AgentClient, str]:
    """A client that starts no agent, and changes nothing at one that runs; and this host."""
    readable: Path | None = None
    if os.path.exists(runtime_dir):
        try:
            readable = prepare_runtime_dir(runtime_dir).path
        except AgentError as error:
            log.warning("the memory of this host is not read: %s", error)
    folders = Folders(config.tiers, readable, namespace, host_id(os.environ))
    return ReadOnlyClient(runtime_dir, folders, run_id), folders.host_id


def _attached(
    config: Config, namespace: str, runtime_dir: Path, ranks: Ranks, run_id: str
) -> tuple[AgentClient, SessionOpened]:
    """A client with an open session, and what the agent says of it."""

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
    return client, reply


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
