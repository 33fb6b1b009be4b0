"""What the agents hold, as they say themselves: read whole, taken apart here, decided elsewhere."""

from __future__ import annotations

import difflib
import logging
import time
import warnings
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import closing, suppress

from tieredckpt.errors import TieredCkptError
from tieredckpt.format.manifest import Manifest
from tieredckpt.policy.config import TierSpec
from tieredckpt.policy.schedule import LastSpill
from tieredckpt.recovery.evidence import manifest_of
from tieredckpt.recovery.folders import open_tier
from tieredckpt.recovery.other_hosts import Held, OtherHosts
from tieredckpt.recovery.plan import RecoveryPlan, plan_recovery
from tieredckpt.tiers.facts import Holdings, decode_holdings
from tieredckpt.transport.client import AgentClient

FindOthers = Callable[[], OtherHosts | None]
"""The lines to other hosts, if there are any."""

POLL_S = 0.25
"""How often what does not answer is asked again, for up to ``recovery.wait``."""

STREAMS_SHOWN = 5

log = logging.getLogger(__name__)


def read_everywhere(client: AgentClient, others: OtherHosts | None, before: Held | None) -> Held:
    """What all hosts hold; other hosts that told everything ``before`` are not asked again.

    Raises AgentError: the own agent does not answer.
    """
    own = read_holdings(client)
    if others is None:
        return Held((own,))
    return others.ask_all(own, before)


def read_plan(
    client: AgentClient,
    others: OtherHosts | None,
    stream: str,
    *,
    step: int | None = None,
    save_id: str | None = None,
    exclude: frozenset[str] = frozenset(),
    wait_s: float = 0.0,
) -> RecoveryPlan:
    """Ask all hosts what they hold, and plan the recovery from that.

    Other hosts that do not answer, or not for all of their tiers, are waited for, at most
    ``wait_s``, if an older checkpoint had to be settled for without them.
    """
    until_s = time.monotonic() + wait_s
    held: Held | None = None
    while True:
        held = read_everywhere(client, others, held)
        plan = plan_recovery(
            held.holdings, stream=stream, step=step, save_id=save_id, exclude=exclude,
            silent=held.silent,
        )  # fmt: skip
        left_s = until_s - time.monotonic()
        waits = held.silent is not None and plan.incomplete and plan.passes_over
        if not waits or left_s <= 0:
            log_warnings(plan)
            return plan
        time.sleep(min(POLL_S, left_s))


def log_warnings(plan: RecoveryPlan) -> None:
    """Say what is uncertain about it."""
    for warning in plan.warnings:
        log.warning("stream %s: %s", plan.stream, warning)


def log_not_asked(plans: Sequence[RecoveryPlan], wait_s: float) -> None:
    """Say what is restored although a newer one may lie where nobody answered in time."""
    for plan in plans:
        if plan.chosen is not None and plan.incomplete:
            log.warning(
                "stream %s: going on from step %d, but %s may hold a newer checkpoint and did not "
                "answer within %g s (recovery.wait)",
                plan.stream, plan.chosen.manifest.step, "; ".join(plan.incomplete), wait_s,
            )  # fmt: skip


def warn_of_other_names(
    client: AgentClient, streams: Collection[str], tiers: Iterable[TierSpec]
) -> None:
    """Where nothing was loaded, say which other streams there are, and namespaces of similar names.

    A folder in ``checkpoint_id`` names a stream; who loads another one than was saved, or mistypes
    the namespace, would silently begin anew. What cannot be listed is left out.
    """
    held = read_holdings(client).tiers
    others = sorted({fact.stream for tier in held for fact in tier.manifests}.difference(streams))
    if others:
        names = ", ".join(map(repr, others[:STREAMS_SHOWN]))
        wanted = ", ".join(map(repr, sorted(streams)))
        warnings.warn(
            f"stream {wanted} of this namespace holds no checkpoint, so nothing was loaded; "
            f"other streams do: {names} (engine.load(state, stream=...); the folder in "
            "dcp.save's checkpoint_id names the stream)",
            stacklevel=3,
        )
    name, found = client.namespace, set[str]()
    with suppress(TieredCkptError):
        found.update(each.name for each in client.status().namespaces)
    for spec in tiers:
        with suppress(TieredCkptError), closing(open_tier(spec, name, retry_s=POLL_S)) as tier:
            found.update(tier.beside())
    by_name = {each.casefold(): each for each in sorted(found - {name})}
    if close := difflib.get_close_matches(name.casefold(), by_name):
        names = ", ".join(repr(by_name[each]) for each in close)
        warnings.warn(
            f"namespace {name!r} holds no checkpoint, so nothing was loaded; there are "
            f"namespaces of a similar name: {names}. If one was meant, set it (namespace: in the "
            "configuration, or TIEREDCKPT_NAMESPACE)",
            stacklevel=3,
        )


def read_holdings(
    client: AgentClient, *, within_s: float | None = None, tiers: bool = True
) -> Holdings:
    """What the agent holds of its namespace; see :meth:`AgentClient.holdings`.

    Raises AgentError, RemoteProtocolError.
    """
    return decode_holdings(client.holdings(within_s=within_s, tiers=tiers))


def spilled_up_to(manifests: Iterable[Manifest], step: int) -> dict[str, LastSpill]:
    """By tier, the last checkpoint up to ``step`` that was destined for it."""
    found: dict[str, LastSpill] = {}
    for manifest in sorted(manifests, key=lambda m: (m.attempt.number, m.seq)):
        if manifest.step <= step:
            for tier in manifest.tiers:
                found[tier] = LastSpill(step=manifest.step, at_s=manifest.created_at_s)
    return found


def manifests_in(held: Holdings, stream: str | None = None) -> tuple[Manifest, ...]:
    """The readable manifests of all streams or of one, each once."""
    found = {
        manifest.save_id: manifest
        for tier in held.tiers
        for fact in tier.manifests
        if stream in (None, fact.stream)
        and isinstance(manifest := manifest_of(fact, {held.namespace}), Manifest)
    }
    return tuple(found.values())
