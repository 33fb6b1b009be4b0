"""From a configuration to a session with this host's agent."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tieredckpt import failpoints
from tieredckpt.agent.launch import find_or_start
from tieredckpt.agent.runtime import default_runtime_dir
from tieredckpt.agent.spec_of_config import tier_spec
from tieredckpt.dcp.copying import default_copy_threads
from tieredckpt.dcp.group import Ranks
from tieredckpt.dcp.lending import Lender
from tieredckpt.dcp.opening import make_session
from tieredckpt.dcp.session import Session
from tieredckpt.dcp.staging import SlotRing
from tieredckpt.errors import ConfigError
from tieredckpt.policy.config import Config, load_config, resolve_namespace
from tieredckpt.tiers.object_check import complaints
from tieredckpt.transport.client import AgentClient
from tieredckpt.transport.messages import NamespaceSpec


def open_session(
    source: str | os.PathLike[str] | Mapping[str, Any] | None,
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
    session = make_session(
        config, namespace, client, ring, ranks, reply.host_id, unsafe_pickle=unsafe_pickle
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
        tiers=tuple(tier_spec(tier) for tier in config.tiers),
    )
