"""What a namespace tells others: holdings, progress of a checkpoint, status of its tiers."""

from __future__ import annotations

from tieredckpt.agent.memory_retention import MEMORY
from tieredckpt.agent.namespace import Namespace
from tieredckpt.agent.spill import ATTACH_WAIT_S
from tieredckpt.errors import NotFoundError
from tieredckpt.format.manifest import encode_attempt
from tieredckpt.tiers.catalog import gather
from tieredckpt.tiers.facts import Holdings, TierFacts, encode_holdings
from tieredckpt.transport import messages as m


def holdings_of(namespace: Namespace) -> bytes:
    """Encoded :class:`tieredckpt.tiers.facts.Holdings`; reads all tiers anew, so it may take long.

    A tier that does not answer is reported as unavailable, with the reason.
    """
    tiers = [gather(namespace.catalog, kind="memory", marks=namespace.marks)]
    for worker in list(namespace.workers.values()):
        catalog = worker.attach(ATTACH_WAIT_S)
        if catalog is not None:
            tiers.append(gather(catalog, kind="file", marks=namespace.marks))
            continue
        tiers.append(
            TierFacts(
                tier=worker.spec.name,
                scope=worker.spec.scope,
                kind="file",
                available=False,
                error=worker.error or f"no answer within {ATTACH_WAIT_S:g} s",
            )
        )
    attempts = tuple(encode_attempt(record) for record in namespace.attempts.known())
    return encode_holdings(
        Holdings(
            host_id=namespace.host_id,
            namespace=namespace.name,
            attempts=attempts,
            tiers=tuple(tiers),
        )
    )


def progress_of(namespace: Namespace, save_id: str) -> m.Progress:
    """See :class:`tieredckpt.transport.messages.Progress`.

    Raises:
        NotFoundError: No tier that answers knows of the checkpoint.
    """
    here = next((x for x in namespace.catalog.manifests() if x.save_id == save_id), None)
    outcomes = {w.spec.name: w.outcome(save_id) for w in list(namespace.workers.values())}
    if here is None and all(o.level == "not_scheduled" for o in outcomes.values()):
        raise NotFoundError(f"no checkpoint {save_id} is known here", key=save_id, what="save")
    levels: dict[str, m.Level] = {MEMORY: "done" if here is not None else "not_scheduled"}
    errors: dict[str, str] = {}
    for name, outcome in outcomes.items():
        scheduled = here is None or name in here.tiers or outcome.level == "done"
        levels[name] = outcome.level if scheduled else "not_scheduled"
        if outcome.error is not None and scheduled:
            errors[name] = outcome.error
    return m.Progress(levels=levels, errors=errors)


def tier_statuses(namespace: Namespace) -> tuple[m.TierStatus, ...]:
    """All tiers but memory, for ``tieredckpt status``."""
    newest = namespace.newest()
    step = newest.step if newest is not None else None
    return tuple(
        worker.status(step, namespace.marks.count(name))
        for name, worker in list(namespace.workers.items())
    )
