"""A session from its facts: in a trainer, and in a process that saves in its stead."""

from __future__ import annotations

from tieredckpt.dcp.dcp_plan_caches import PlanCaches
from tieredckpt.dcp.failure import SaveFailures
from tieredckpt.dcp.gathered import GatheredSaves
from tieredckpt.dcp.group import Ranks
from tieredckpt.dcp.history import History
from tieredckpt.dcp.job_hosts import JobHosts
from tieredckpt.dcp.session import Session
from tieredckpt.dcp.staging import SlotRing
from tieredckpt.policy.config import Config
from tieredckpt.recovery.other_hosts import OtherHosts
from tieredckpt.transport.client import AgentClient


def make_session(
    config: Config,
    namespace: str,
    client: AgentClient,
    ring: SlotRing,
    ranks: Ranks,
    host_id: str,
    *,
    unsafe_pickle: bool,
) -> Session:
    """A session that knows nothing yet, not even of other hosts.

    Args:
        config: As loaded.
        namespace: The run's name.
        client: With an open session.
        ring: Of that client.
        ranks: Who we are.
        host_id: This host, as the agent named it.
        unsafe_pickle: As for ``Engine.open``.
    """
    session = Session(
        config=config,
        namespace=namespace,
        run_id=client.run_id,
        client=client,
        ring=ring,
        ranks=ranks,
        host_id=host_id,
        hosts=JobHosts(by_rank=(host_id,) * ranks.world_size),
        history=History(client, config.tiers),
        failures=SaveFailures(config.save),
        dcp_plans=PlanCaches(),
        gathered=GatheredSaves(config.save, client.run_id),
        unsafe_pickle=unsafe_pickle,
    )

    def others() -> OtherHosts | None:
        if session.peers is None:
            return None  # the agent does not listen
        if session.other_hosts is None:
            session.other_hosts = OtherHosts(session.client, session.peers)
        return session.other_hosts

    session.history.others = others
    client.fates = session.fates.told
    return session
