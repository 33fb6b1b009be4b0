"""A process's session with the agent of its host, which is started if need be, and listens."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import msgspec

from tieredckpt import failpoints
from tieredckpt.agent.host.launch import find_or_start
from tieredckpt.config.schema import Config
from tieredckpt.config.tiers import EVERY_SAVE
from tieredckpt.errors import RemoteProtocolError
from tieredckpt.rpc.agent_client import AgentClient
from tieredckpt.rpc.messages.agent import (
    HostEntry,
    Listen,
    NamespaceSpec,
    SessionOpened,
    TlsSpec,
)


def attach(
    config: Config,
    namespace: str,
    runtime_dir: Path,
    *,
    local_rank: int = 0,
    local_world_size: int = 1,
    run_id: str | None = None,
    job: str = "",
    deadline_s: float | None = None,
) -> tuple[AgentClient, SessionOpened]:
    """A client with an open session, and the agent's reply.

    The client starts the agent again if it ends, or, where it may not, waits ``memory.wait`` for
    one, as for a slot. ``deadline_s``: of each request, by default ``save.timeout``. Raises as
    :func:`find_or_start` and :meth:`AgentClient.open_session`.
    """

    def start(wait_s: float = config.memory.wait_s) -> Path:
        return find_or_start(
            runtime_dir,
            start=config.agent.start,
            start_timeout_s=config.agent.start_timeout_s,
            idle_timeout_s=config.agent.idle_timeout_s,
            log_level=config.agent.log_level,
            wait_s=wait_s,
        )

    runtime_dir = start(wait_s=0.0)
    limit_s = config.save.timeout_s if deadline_s is None else deadline_s
    client = AgentClient(runtime_dir, deadline_s=limit_s, revive=start)
    with contextlib.ExitStack() as on_failure:
        on_failure.callback(client.close)
        failpoints.reach("open.session.before")
        reply = client.open_session(
            namespace,
            _spec(config, runtime_dir),
            local_rank=local_rank,
            local_world_size=local_world_size,
            run_id=run_id,
            job=job,
            take_over=config.take_over,
        )
        failpoints.reach("open.session.after")
        on_failure.pop_all()
    return client, reply


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
        # Only the coordinator evaluates schedules, so sessions may differ in them.
        tiers=tuple(msgspec.structs.replace(tier, every=EVERY_SAVE) for tier in config.tiers),
    )


def listen_to_hosts(client: AgentClient, config: Config, token: str, host_id: str) -> HostEntry:
    """Have the agent of ``host_id`` serve other hosts, as configured; how they reach it.

    Raises:
        ConfigError, NamespaceInUseError, AgentError: It cannot.
    """
    tls = config.security.tls
    listening = client.call(
        Listen(
            session_id=client.session_id,
            token=token,
            tls=None if tls is None else TlsSpec(cert=tls.cert, key=tls.key, ca=tls.ca),
            interfaces=config.network.interfaces,
            cidrs=config.network.cidrs,
            port=config.network.port,
            labels=dict(config.labels),
        )
    )
    if listening.host.host_id != host_id:
        raise RemoteProtocolError(
            f"the agent of host {host_id} calls itself {listening.host.host_id}"
        )
    return listening.host
