"""From a configuration to a session with this host's agent, or to one that only reads.

The ranks exchange the addresses of their hosts' agents at each ``Engine.open``, a collective. On
each host the lowest rank has its agent listen and sends it the list of all hosts. So each restart
adds hosts that are new and drops hosts that are lost. The agent of a job on one host that asks for
no others never opens a port.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import secrets
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist

from tieredckpt import failpoints
from tieredckpt.agent.host.attach import attach, listen_to_hosts
from tieredckpt.agent.host.runtime import default_runtime_dir, host_id, prepare_runtime_dir
from tieredckpt.config.schema import Config, load_config, resolve_namespace
from tieredckpt.config.secrets import read_token
from tieredckpt.dcp.job.credentials import with_script
from tieredckpt.dcp.job.hosts import (
    JobHosts,
    RankFacts,
    check_alike,
    earlier_hosts,
    job_hosts,
    shortage,
)
from tieredckpt.dcp.job.ranks import Ranks
from tieredckpt.dcp.job.session import Session
from tieredckpt.dcp.job.tier_alerts import TierWatch
from tieredckpt.dcp.loader_workers import end_workers_at_exit
from tieredckpt.dcp.process_executor import Lender
from tieredckpt.dcp.save.state import SaveState
from tieredckpt.dcp.slots.copy import default_copy_threads
from tieredckpt.dcp.slots.slot_ring import SlotRing
from tieredckpt.dcp.torch_release import warn_of_release
from tieredckpt.errors import (
    AgentError,
    ConfigError,
    NotFoundError,
    UsageError,
)
from tieredckpt.policy.replication import placement_of
from tieredckpt.recovery.evidence import read_records
from tieredckpt.recovery.folders import Folders, ReadOnlyClient
from tieredckpt.recovery.other_hosts import manifests_in, read_holdings
from tieredckpt.rpc.agent_client import AgentClient
from tieredckpt.rpc.messages.agent import (
    HostEntry,
    PeerState,
    SetPeers,
)
from tieredckpt.storage.object.client import complaints
from tieredckpt.storage.object.supplied import Supplied

Source = str | os.PathLike[str] | Mapping[str, Any] | Config | None

log = logging.getLogger(__name__)


def open_together(
    source: Source,
    process_group: dist.ProcessGroup | None,
    *,
    unsafe_pickle: bool,
    read_only: bool,
    run_id: str,
    credentials: object = None,
) -> SaveState:
    """Open this rank's session once all ranks can; see ``Engine.open``. Collective."""
    ranks = Ranks.find(process_group, read_only=read_only)
    if ranks.rank == 0:
        warn_of_release()
    with contextlib.ExitStack() as on_failure:
        run_id, reads, job = ranks.from_coordinator(lambda: (run_id, read_only, _job(os.environ)))

        def open_one() -> tuple[SaveState, int]:
            if reads != read_only:
                raise UsageError("some ranks open their engine with read_only=True, others without")
            return _open(
                source, ranks, run_id, on_failure, unsafe_pickle=unsafe_pickle,
                read_only=read_only, credentials=credentials, job=job,
            )  # fmt: skip

        session, expected = ranks.run(open_one)
        if not read_only:
            join_hosts(session, ranks)
        elif len(set(names := ranks.gather(lambda: session.namespace))) > 1:
            raise UsageError(f"the ranks name different namespaces: {', '.join(map(repr, names))}")
        on_failure.pop_all()
    # Only now, since the agent knows the number of slots: a ring has more if there are replicas.
    session.prepare_ring(expected)
    end_workers_at_exit(os.getpid())
    return session


def _job(environ: Mapping[str, str]) -> str:
    """Lines of which a restart by a launcher keeps one; without any, this process of rank 0."""
    names = ("SLURM_JOB_ID", "JOBSET_NAME", "TORCHELASTIC_RUN_ID")
    found = [f"{name}={environ[name][:256]}" for name in names
             if environ.get(name, "none") not in ("", "none")]  # fmt: skip
    return "\n".join(found) or f"pid {os.getpid()}"


def _open(
    source: Source,
    ranks: Ranks,
    run_id: str,
    on_failure: contextlib.ExitStack,
    *,
    unsafe_pickle: bool,
    read_only: bool,
    credentials: object,
    job: str,
) -> tuple[SaveState, int]:
    """The session, closed by ``on_failure``, and the expected bytes of its segments.

    Raises ConfigError, AgentError, UsageError.
    """
    config = source if isinstance(source, Config) else load_config(source, os.environ)
    script = None if credentials is None else Supplied(credentials)
    if script is not None:
        config = with_script(config, credentials)
    _refuse_impossible(config)
    namespace = resolve_namespace(config.namespace, os.environ)
    wanted = config.agent.runtime_dir
    runtime_dir = Path(wanted) if wanted is not None else default_runtime_dir(os.environ)
    if read_only:
        client, host = _reading(config, namespace, runtime_dir, run_id, script)
        expected = 0
    else:
        client, reply = attach(
            config,
            namespace,
            runtime_dir,
            local_rank=ranks.local_rank,
            local_world_size=ranks.local_world_size,
            run_id=run_id,
            job=job,
        )
        host, expected = reply.host_id, reply.expected_segment_bytes
    session = SaveState(
        config=config,
        namespace=namespace,
        client=client,
        ring=SlotRing(client, default_copy_threads(ranks.local_world_size)),
        ranks=ranks,
        host_id=host,
        unsafe_pickle=unsafe_pickle,
        read_only=read_only,
        script=script,
    )
    on_failure.callback(session.close)
    if not read_only:
        session.executor_bridge = Lender(session)
        if ranks.local_rank == 0:
            session.tier_watch = TierWatch(client, script)
        return session, expected
    with contextlib.suppress(NotFoundError):
        table = client.peers()
        if table.peers or table.unmet:
            session.peers = table
    return session, expected


def _reading(
    config: Config, namespace: str, runtime_dir: Path, run_id: str, script: Supplied | None
) -> tuple[AgentClient, str]:
    """A client that starts no agent and changes nothing in a running one; and this host's id."""
    readable: Path | None = None
    if os.path.exists(runtime_dir):
        try:
            readable = prepare_runtime_dir(runtime_dir).path
        except AgentError as error:
            log.warning("the memory of this host is not read: %s", error)
    folders = Folders(config.tiers, readable, namespace, host_id(os.environ), script)
    return ReadOnlyClient(runtime_dir, folders, run_id), folders.host_id


def _refuse_impossible(config: Config) -> None:
    """Raises ConfigError for a tier that can never work here, before an agent is started.

    The agent would only report it in its status, and never store a checkpoint there.
    """
    for number, tier in enumerate(config.tiers):
        if tier.is_file:
            continue  # its folder may be mounted later
        for each in complaints(tier.name, tier.url, tier.object):
            if each.fatal:
                key = f"tiers[{number}].{each.key}"
                raise ConfigError(f"{key}: {each.message}", key=key)


# --- the other hosts ------------------------------------------------------------------------------


TOKEN_BYTES = 32
REPORTERS_MAX = 16
"""Most hosts that report the hosts of earlier jobs: nearly all know the same."""
EARLIER_MAX = 1 << 16
"""Most hosts that fit one message."""
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True, repr=False)
class _Secret:
    """A token on its way between ranks: it prints as nothing."""

    token: str
    origin: Literal["configured", "known", "minted"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Joined:
    """The report of the lowest rank of a host."""

    entry: HostEntry
    age: tuple[int, int]
    """Of the newest checkpoint here that names holders: number of the attempt, and of the save."""
    placement: Mapping[str, tuple[str, ...]]
    former: bytes
    """Digest of the former members that its agent knows; empty: it knows none."""


def join_hosts(session: Session, ranks: Ranks) -> None:
    """Find the job's hosts, and have their agents find each other. Collective.

    Sets ``session.hosts``, and ``session.peers`` if the agents listen.

    Raises:
        ConfigError, UsageError: The ranks differ, two agents have one name, or there are fewer
            hosts than are required.
        AgentError: An agent cannot listen. As in all cases, on all ranks.
    """
    config = session.config
    facts = ranks.gather(lambda: _facts(session))
    check_alike(facts)
    session.hosts = job = job_hosts(facts, config)
    if not job.listens and not job.wanted:
        return
    if job.listens:
        joined = _listen(session, ranks, job)
        entries = tuple(each.entry for each in joined)
        newest = max(joined, key=lambda each: each.age)
        session.hosts = job = job_hosts(facts, config, newest.placement)
        reporters = {each.former: each.entry.host_id for each in joined if each.former}
        earlier = _earlier(session, ranks, job, sorted(reporters.values())[:REPORTERS_MAX])
    else:
        entries = earlier = ()
    warning = shortage(job, config.save.ack)

    def inform() -> None:
        if job.is_lowest_of_its_host(ranks.rank):
            failpoints.reach("open.peers.before")
            session.client.call(
                SetPeers(
                    session_id=session.client.session_id,
                    run=session.run_id,
                    leader=job.leader,
                    hosts=entries,
                    earlier=earlier,
                    seeds=config.discovery.addresses,
                    dns=config.discovery.dns_name,
                    replicas=job.wanted,
                    replication_bytes_per_s=config.memory.replication_bytes_per_s or 0,
                )
            )
        if ranks.rank == 0 and warning is not None:
            log.warning("%s", warning)
            warnings.warn(warning, stacklevel=5)

    ranks.run(inform)
    if job.listens:
        # After all agents are informed: so this one's table of the others is of this start.
        session.peers = ranks.run(session.client.peers)


def _facts(session: Session) -> RankFacts:
    config, runtime_dir = session.config, session.client.runtime_dir
    found = os.stat(runtime_dir)
    try:
        boot_id = _BOOT_ID.read_text("ascii").strip()
    except OSError:  # not readable here; the folder's device and inode are left
        boot_id = ""
    return RankFacts(
        host_id=session.host_id,
        agent=(boot_id, found.st_dev, found.st_ino),
        runtime_dir=str(runtime_dir),
        namespace=session.namespace,
        labels=config.labels,
        discovery=config.discovery.kind,
        replicas=config.memory.replicas,
        require_replicas=config.memory.require_replicas,
        ack=config.save.ack,
        copies=config.memory.copies,
        credentials=session.script is not None,
        met_others=bool(session.client.peers().peers),
    )


def _listen(session: Session, ranks: Ranks, job: JobHosts) -> list[_Joined]:
    """Have each host's agent listen; the report of each host, in their order."""
    speaks = job.is_lowest_of_its_host(ranks.rank)
    known = ranks.gather(lambda: _known_secret(session, ranks) if speaks else None)
    secret = _chosen([each for each in known if each is not None])

    def listen() -> _Joined | None:
        if not speaks:
            return None
        failpoints.reach("open.listen.before")
        entry = listen_to_hosts(session.client, session.config, secret.token, session.host_id)
        age, placement = _newest_placement(session)
        names = sorted(each.host.host_id for each in _former_members(session, job))
        former = hashlib.sha256("\n".join(names).encode()).digest() if names else b""
        return _Joined(entry=entry, age=age, placement=placement, former=former)

    return [each for each in ranks.gather(listen) if each is not None]


def _former_members(session: Session, job: JobHosts) -> list[PeerState]:
    known = session.client.peers().peers
    return [each for each in known if each.host.host_id not in job.hosts]


def _earlier(
    session: Session, ranks: Ranks, job: JobHosts, reporters: Sequence[str]
) -> tuple[HostEntry, ...]:
    """Hosts of earlier jobs, as the agents of ``reporters`` know them. Collective."""
    reports = session.host_id in reporters and job.is_lowest_of_its_host(ranks.rank)
    found = ranks.gather(lambda: _former_members(session, job) if reports else [])
    return earlier_hosts(state for states in found for state in states)[:EARLIER_MAX]


def _known_secret(session: Session, ranks: Ranks) -> _Secret | None:
    """The token that this host knows; rank 0 mints one, in case that no host knows one.

    Raises:
        ConfigError: It cannot be read.
    """
    security = session.config.security
    configured = read_token(security, os.environ)
    if configured is not None or security.tls is not None:
        # With certificates alone, these authenticate hosts.
        return _Secret(configured or "", "configured")
    # A former member knows only the token of the job before, and may have copies that no other
    # host has: so a namespace keeps its token.
    known = session.client.peers().token
    if known:
        return _Secret(known, "known")
    return _Secret(secrets.token_hex(TOKEN_BYTES), "minted") if ranks.is_coordinator else None


def _chosen(found: Sequence[_Secret]) -> _Secret:
    """The secret of all ranks: the configured one, else the known one, else the minted one.

    Raises:
        ConfigError: The hosts are configured with different ones.
    """
    configured = [each for each in found if each.origin == "configured"]
    if len({each.token for each in configured}) > 1 or 0 < len(configured) < len(found):
        raise ConfigError(
            "security: the hosts of this job have different tokens: give all of them the same "
            "token_file or token_env",
            key="security",
            allowed=[],
        )
    known = [each for each in found if each.origin == "known"]
    return (configured or known or list(found))[0]


def _newest_placement(session: Session) -> tuple[tuple[int, int], dict[str, tuple[str, ...]]]:
    """Attempt and sequence number of the newest checkpoint here with replicas; its placement."""
    found = read_holdings(session.client)
    placed = (each for each in manifests_in(found) if each.replicas)
    newest = max(placed, key=lambda each: (each.attempt.number, each.seq), default=None)
    if newest is None:
        return (-1, -1), {}
    records, _ = read_records([found])
    return (newest.attempt.number, newest.seq), placement_of(newest, records)
