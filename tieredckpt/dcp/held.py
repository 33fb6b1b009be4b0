"""What the agent holds, as it says itself: read whole and taken apart here, decided elsewhere."""

from __future__ import annotations

import logging
from collections.abc import Iterable

import msgspec

from tieredckpt.errors import RemoteProtocolError
from tieredckpt.format.manifest import Manifest
from tieredckpt.policy.schedule import LastSpill
from tieredckpt.recovery.evidence import manifest_of
from tieredckpt.recovery.plan import RecoveryPlan, plan_recovery
from tieredckpt.tiers.facts import Holdings, decode_holdings
from tieredckpt.transport.client import AgentClient

log = logging.getLogger(__name__)


def read_plan(
    client: AgentClient,
    stream: str,
    *,
    step: int | None = None,
    save_id: str | None = None,
    exclude: frozenset[str] = frozenset(),
) -> RecoveryPlan:
    """Ask the agent what it holds, and plan the recovery from that."""
    plan = plan_recovery(
        [read_holdings(client)], stream=stream, step=step, save_id=save_id, exclude=exclude
    )
    log_warnings(plan)
    return plan


def log_warnings(plan: RecoveryPlan) -> None:
    """Say what is uncertain about it."""
    for warning in plan.warnings:
        log.warning("stream %s: %s", plan.stream, warning)


def read_holdings(client: AgentClient) -> Holdings:
    """What the agent holds of its namespace. Raises AgentError, RemoteProtocolError."""
    data = client.holdings()
    try:
        return decode_holdings(data)
    except (ValueError, msgspec.MsgspecError) as error:
        raise RemoteProtocolError(f"the agent's holdings are malformed: {error}") from error


def spilled_up_to(manifests: Iterable[Manifest], step: int) -> dict[str, LastSpill]:
    """By tier, the last checkpoint up to ``step`` that was destined for it."""
    found: dict[str, LastSpill] = {}
    for manifest in sorted(manifests, key=lambda m: (m.attempt.number, m.seq)):
        if manifest.step <= step:
            for tier in manifest.tiers:
                found[tier] = LastSpill(step=manifest.step, at_s=manifest.created_at_s)
    return found


def manifests_in(held: Holdings) -> tuple[Manifest, ...]:
    """The readable manifests, each once."""
    found = {
        manifest.save_id: manifest
        for tier in held.tiers
        for fact in tier.manifests
        if isinstance(manifest := manifest_of(fact, {held.namespace}), Manifest)
    }
    return tuple(found.values())
