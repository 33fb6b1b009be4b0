"""The hosts of a job: the host of each rank, and the hosts that keep copies of a host. Pure.

All ranks compute the same, since each may coordinate a save of its process group.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from tieredckpt.config.schema import Config
from tieredckpt.errors import ConfigError, UsageError
from tieredckpt.format.manifest import Holders
from tieredckpt.policy.placement import PlacementHost, domains_of, holders_with_drafts, place
from tieredckpt.rpc.messages.agent import HostEntry, PeerState

NODE_NAME_VARIABLE = "TIEREDCKPT_NODE_NAME"
_NOBODY: Mapping[str, tuple[str, ...]] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFacts:
    """One rank's report of its host and its configuration. Pickled between ranks.

    Attributes:
        agent: Identifies this host's agent: the kernel's boot id, device and inode of the runtime
            folder.
        replicas: As configured; None: as many as suits the number of hosts.
        copies: ``memory.copies``.
        credentials: Whether the script supplies credentials.
        met_others: Whether the agent knows other hosts, of an earlier start.
    """

    host_id: str
    agent: tuple[str, int, int]
    runtime_dir: str
    namespace: str
    labels: tuple[tuple[str, str], ...]
    discovery: str
    replicas: int | None
    require_replicas: bool
    ack: str
    copies: str
    credentials: bool
    met_others: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class JobHosts:
    """See the module.

    Attributes:
        by_rank: The host of each rank of the engine.
        wanted: Copies of each segment on other hosts, as configured.
        possible: Of these, what the number of hosts allows.
        holders: By host, the hosts that keep copies of what its ranks write.
        listens: Whether the agents serve each other.
        domains: By host, the failure domains that it stands in.
    """

    by_rank: tuple[str, ...]
    wanted: int = 0
    possible: int = 0
    holders: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    listens: bool = False
    domains: Mapping[str, tuple[tuple[str, str], ...]] = field(default_factory=dict)

    @property
    def leader(self) -> str:
        """The host of rank 0: it opens attempts and assigns replication."""
        return self.by_rank[0]

    @property
    def hosts(self) -> tuple[str, ...]:
        """Each once, in the order of their lowest ranks."""
        return tuple(dict.fromkeys(self.by_rank))

    def is_lowest_of_its_host(self, rank: int) -> bool:
        """Whether this is the lowest rank of its host."""
        return self.by_rank.index(self.by_rank[rank]) == rank

    def replicas_of(
        self, hosts: Iterable[str], mirrored: Mapping[str, tuple[str, ...]] = _NOBODY
    ) -> tuple[Holders, ...]:
        """The hosts that keep copies, for a manifest with segments written on ``hosts``.

        ``mirrored``: by host, the hosts that already have mirrors of all its segments.
        """
        found = []
        for host in sorted(set(hosts)):
            holders = self.holders.get(host, ())
            if host in mirrored:
                holders = holders_with_drafts(host, holders, mirrored[host], self.domains)
            if holders:
                found.append(Holders(host, holders))
        return tuple(found)


def check_alike(facts: Sequence[RankFacts]) -> None:
    """Whether these can be the ranks of one job. All ranks raise the same.

    Raises:
        UsageError: The ranks are of different runs, or were configured differently.
        ConfigError: Two agents go by the same name.
    """
    first = facts[0]
    for rank, each in enumerate(facts):
        if each.namespace != first.namespace:
            raise UsageError(
                f"the ranks name different namespaces: rank 0 {first.namespace!r}, rank {rank} "
                f"{each.namespace!r}"
            )
        for key, mine, theirs in (
            ("discovery", each.discovery, first.discovery),
            ("memory.replicas", each.replicas, first.replicas),
            ("memory.require_replicas", each.require_replicas, first.require_replicas),
            ("save.ack", each.ack, first.ack),
            ("memory.copies", each.copies, first.copies),
            ("credentials=", each.credentials, first.credentials),
        ):
            if mine != theirs:
                raise ConfigError(
                    f"{key}: {mine!r} on rank {rank} (host {each.host_id}), {theirs!r} on rank 0: "
                    "give all ranks the same configuration",
                    key=key,
                    allowed=[],
                )
    _check_names(facts)


def _check_names(facts: Sequence[RankFacts]) -> None:
    found: dict[str, int] = {}
    for rank, each in enumerate(facts):
        before = found.setdefault(each.host_id, rank)
        other = facts[before]
        if each.agent != other.agent:
            raise ConfigError(
                f"two agents go by the name {each.host_id!r}: rank {before} uses the one in "
                f"{other.runtime_dir}, rank {rank} another one in {each.runtime_dir}. If these are "
                " containers of one machine, or machines cloned from one image, set "
                f"{NODE_NAME_VARIABLE} to a name of its own in each, for the agent and the "
                "trainers; if it is meant to be one host, give all its ranks the same "
                "agent.runtime_dir",
                key=NODE_NAME_VARIABLE,
                allowed=[],
            )


def job_hosts(
    facts: Sequence[RankFacts],
    config: Config,
    previous: Mapping[str, tuple[str, ...]] | None = None,
) -> JobHosts:
    """The hosts of these ranks, and where the copies of each host are kept.

    Args:
        facts: In rank order, after :func:`check_alike`.
        config: Of any of them.
        previous: The placement until now, of which as little as possible is changed.

    Raises:
        ConfigError: More replicas are required than there can be.
    """
    labels = {each.host_id: dict(each.labels) for each in reversed(facts)}
    hosts = [PlacementHost(host, domains_of(found)) for host, found in labels.items()]
    wanted = config.wanted_replicas(len(hosts))
    placement = place(hosts, wanted, previous or {})
    if config.memory.require_replicas and placement.possible < wanted:
        raise ConfigError(
            f"memory.require_replicas: {wanted} replica(s) need {wanted + 1} hosts, and this job "
            f"has {len(hosts)}: start it on more, lower memory.replicas, or write "
            "require_replicas: false",
            key="memory.require_replicas",
            allowed=[],
        )
    return JobHosts(
        by_rank=tuple(each.host_id for each in facts),
        wanted=wanted,
        possible=placement.possible,
        domains={host.host_id: host.domains for host in hosts},
        holders={host: tuple(holders) for host, holders in placement.holders.items() if holders},
        # A job that shrank to one host asks its earlier hosts, and reports that to its agent.
        listens=len(hosts) > 1
        or config.discovery.kind != "torch"
        or any(each.met_others for each in facts),
    )


def earlier_hosts(known: Iterable[PeerState]) -> tuple[HostEntry, ...]:
    """Choose one entry per host, preferably one at which the host answered."""
    found = sorted(known, key=lambda state: state.reachable is True)
    return tuple({state.host.host_id: state.host for state in found}.values())


def shortage(job: JobHosts, ack: str) -> str | None:
    """The one warning of a job that has fewer hosts than its replicas need."""
    if job.possible >= job.wanted:
        return None
    waits = (
        "; save.ack: replicated has nothing to wait for, a save returns when it is in memory"
        if ack == "replicated" and not job.possible
        else ""
    )
    return (
        f"{job.possible}/{job.wanted} replicas: memory.replicas is {job.wanted}, and this job has "
        f"{len(job.hosts)} host(s): what a lost host held in memory alone is lost{waits} "
        "(memory.require_replicas: true refuses to start like this)"
    )
