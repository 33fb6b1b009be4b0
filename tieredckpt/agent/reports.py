"""What a namespace tells others: holdings, progress of a checkpoint, status of its tiers."""

from __future__ import annotations

import functools
import logging
import time

from tieredckpt.agent.look import LOOK_WAIT_S
from tieredckpt.agent.memory_retention import MEMORY
from tieredckpt.agent.namespace import Namespace
from tieredckpt.agent.spill import ATTACH_WAIT_S, TierWorker
from tieredckpt.errors import NotFoundError
from tieredckpt.format.manifest import encode_attempt
from tieredckpt.tiers.catalog import gather
from tieredckpt.tiers.facts import Holdings, TierFacts, encode_holdings
from tieredckpt.tiers.quarantine import QuarantineMarks
from tieredckpt.transport import messages as m

log = logging.getLogger(__name__)


def holdings_of(namespace: Namespace) -> bytes:
    """Encoded :class:`tieredckpt.tiers.facts.Holdings`; reads all tiers anew, at the same time.

    A tier that does not answer within :data:`~tieredckpt.agent.look.LOOK_WAIT_S` is reported as
    unavailable, with the reason.
    """
    until_s = time.monotonic() + LOOK_WAIT_S
    asked = []
    for worker in list(namespace.workers.values()):
        look = functools.partial(_look_at, worker, namespace.marks)
        asked.append((worker, look, worker.look.ask(look)))
    tiers = [gather(namespace.catalog, kind="memory", marks=namespace.marks)]
    for worker, look, number in asked:
        facts = worker.look.wait(number, look, until_s)
        tiers.append(facts or _unavailable(worker, f"no answer within {LOOK_WAIT_S:g} s"))
    attempts = [encode_attempt(record) for record in namespace.attempts.known()]
    # Who plans a recovery must know that the time line may not be what it was.
    for key, data in namespace.attempts.damaged().items():
        log.warning("namespace %s: record %s is damaged", namespace.name, key)
        attempts.append(data)
    return encode_holdings(
        Holdings(
            host_id=namespace.host_id,
            namespace=namespace.name,
            attempts=tuple(attempts),
            tiers=tuple(tiers),
        )
    )


def _look_at(worker: TierWorker, marks: QuarantineMarks) -> TierFacts:
    catalog = worker.attach(ATTACH_WAIT_S)
    if catalog is None:
        return _unavailable(worker, worker.error or f"no answer within {ATTACH_WAIT_S:g} s")
    return gather(catalog, kind="file", marks=marks)


def _unavailable(worker: TierWorker, error: str) -> TierFacts:
    spec = worker.spec
    return TierFacts(tier=spec.name, scope=spec.scope, kind="file", available=False, error=error)


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
