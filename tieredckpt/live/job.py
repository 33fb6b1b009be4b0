"""How the supervisor of one host joins a job of several hosts: checks, its agent, its board."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tieredckpt.agent.host.attach import attach, listen_to_hosts
from tieredckpt.config.schema import Config, resolve_namespace
from tieredckpt.config.secrets import read_token
from tieredckpt.errors import ConfigError, TieredCkptError, UsageError
from tieredckpt.live import messages as m
from tieredckpt.live.board import Board
from tieredckpt.live.decide import Policy
from tieredckpt.recovery.flush import flush_and_wait
from tieredckpt.rpc.agent_client import AgentClient
from tieredckpt.rpc.auth import Secret
from tieredckpt.rpc.messages.agent import TlsSpec
from tieredckpt.storage.memory.slot import try_lock_exclusive

ASK_S = 1.0
DEADLINE_S = 30.0
"""Of a request to the own agent, its start included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One host's part in a job of several hosts.

    Attributes:
        board: Exchanges views and decisions with other hosts.
        keys: How ranks of this host reach the tables of their agent, but for the generation.
        is_standby: This host has no ranks until it replaces a lost one.
        name: ``--rdzv-id``.
        agent: Of this host.
    """

    board: Board
    keys: m.Keys
    is_standby: bool
    name: str
    agent: AgentClient

    def flush(self, left_s: float) -> str:
        """Copy the newest checkpoint to the tiers before this host ends; what is where.

        The answer names what was there when it was asked, and takes at most ``ASK_S`` longer.
        """
        try:
            report = flush_and_wait(self.agent, None, max(0.0, left_s))
            found = [
                f"step {report.steps[stream]} of stream {stream!r} in {report.tier}: {level}"
                for stream, level in report.levels.items()
            ]
            found += [f"tier {tier}: {why}" for tier, why in report.errors.items()]
        except TieredCkptError as error:
            found = [f"no tier has its checkpoints: {error.message}"]
        return "; ".join([*found, self._copies()])

    def _copies(self) -> str:
        """Of which checkpoint other hosts have copies of this host's segments."""
        try:
            spaces = self.agent.status(within_s=ASK_S).namespaces
        except TieredCkptError as error:
            return f"copies on other hosts: unknown, {error.message}"
        here = [each.replication for each in spaces if each.name == self.agent.namespace]
        steps = [each.newest_replicated_step for each in here if each is not None]
        step = steps[0] if steps else None
        return f"copies on other hosts: {'none' if step is None else f'step {step}'}"


def joiner(
    policy: Policy,
    config: Config | None,
    runtime_dir: Path,
    name: str,
    *,
    is_standby: bool,
    environ: Mapping[str, str] = os.environ,
) -> Callable[[Callable[[], None]], Job]:
    """Check the configuration, and return what joins the job, given what wakes the supervisor.

    Raises:
        ConfigError: The configuration is missing, or hosts could not find and trust each other.
        UsageError: By ``join``: another supervisor of the job runs on this host.
    """
    if config is None:
        raise ConfigError("--nnodes needs the script's configuration: --config FILE", key="")
    discovery, security = config.discovery, config.security
    if discovery.kind == "torch":
        raise ConfigError(
            "discovery: torch finds hosts by a process group, and there is none yet: write "
            "discovery: {static: [host-a, host-b]} or {dns: name}",
            key="discovery",
        )
    token = read_token(security, environ)
    begin = policy.hosts_to_begin
    if 2 * begin <= len(discovery.addresses) and not policy.allow_split:
        raise ConfigError(
            f"the job begins with {begin} hosts, half of the {len(discovery.addresses)} addresses "
            "of discovery.static or less, so that two parts of the network could both train: list "
            f"at most {2 * begin - 1}, or give --allow-split",
            key="discovery.static",
        )
    found = resolve_namespace(config.namespace, {**environ, "TORCHELASTIC_RUN_ID": name})
    tls = security.tls
    spec = None if tls is None else TlsSpec(cert=tls.cert, key=tls.key, ca=tls.ca)
    secret = Secret(token or "", spec)

    def join(wake: Callable[[], None]) -> Job:
        agent, opened = attach(config, found, runtime_dir, deadline_s=DEADLINE_S)
        lock = agent.runtime_dir / f"run-{name}.lock"
        # Held until this process ends.
        if not try_lock_exclusive(os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)):
            raise UsageError(
                f"a supervisor of job {name!r} runs on this host already: one is started per host"
            )
        entry = listen_to_hosts(agent, config, secret.token, opened.host_id)
        keys = m.Keys(
            runtime_dir=os.fspath(agent.runtime_dir), namespace=found, table=name, hosts=(entry,)
        )
        board = Board(agent, entry, secret, discovery, name, wake)
        return Job(board=board, keys=keys, is_standby=is_standby, name=name, agent=agent)

    return join
