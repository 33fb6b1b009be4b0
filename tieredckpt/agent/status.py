"""What a namespace tells others: holdings, progress of a checkpoint, status of its tiers; and
bringing its newest checkpoints to a tier now.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import resource
import threading
import time
from collections.abc import Iterable, Sequence, Set
from pathlib import Path

from tieredckpt.agent.namespace import Namespace
from tieredckpt.agent.peering.memory_retention import MEMORY
from tieredckpt.agent.tiers.scanner import LOOK_WAIT_S
from tieredckpt.agent.tiers.worker import ATTACH_WAIT_S, TierWorker
from tieredckpt.errors import NotFoundError, TierUnavailableError, UsageError
from tieredckpt.format.manifest import Manifest, encode_attempt
from tieredckpt.policy.retention import protections
from tieredckpt.policy.schedule import Reachable, tiers_to_fill
from tieredckpt.rpc.messages import agent as m
from tieredckpt.storage.holdings import (
    Holdings,
    TierFacts,
    encode_holdings,
    gather,
    kind_of,
    slimmed,
)
from tieredckpt.storage.quarantine import QuarantineMarks

REPLICATED = "replicated"
"""The level of :class:`tieredckpt.rpc.messages.agent.Progress` that is no tier's name."""
TRY_S = 5.0
"""Longest wait for a first answer, where no tier has given one."""

log = logging.getLogger(__name__)


def holdings_of(
    namespace: Namespace, have: Set[str] | None = None, *, within_s: float = math.inf
) -> bytes:
    """Encoded :class:`tieredckpt.storage.holdings.Holdings`; reads all tiers anew, at the same
    time.

    Of manifests whose digest is in ``have`` comes their digest alone; None: they all come as often
    as they are stored. With ``have``, another host asks: shared tiers are left out then, which it
    looks at by itself, and which a thousand hosts would list for it all at once.

    A tier that does not answer ``within_s``, or :data:`~tieredckpt.agent.tiers.scanner.LOOK_WAIT_S`
    if that is less, is reported as unavailable, with the reason; at 0 only memory is looked at.
    """
    workers = [w for w in namespace.workers.values() if have is None or w.spec.scope != "shared"]
    below = tier_facts(namespace, workers if within_s > 0 else (), within_s=within_s)
    tiers = (gather(namespace.catalog, kind="memory", marks=namespace.marks), *below)
    attempts = [encode_attempt(record) for record in namespace.attempts.known()]
    # Who plans a recovery must know that the time line may not be what it was.
    for key, data in namespace.attempts.damaged().items():
        log.warning("namespace %s: record %s is damaged", namespace.name, key)
        attempts.append(data)
    holdings = Holdings(
        host_id=namespace.host_id,
        namespace=namespace.name,
        attempts=tuple(attempts),
        tiers=tiers,
        records=_records_of(namespace),
        saved=tuple(sorted(namespace.attempts.stored())),
    )
    return encode_holdings(holdings if have is None else slimmed(holdings, have))


def tier_facts(
    namespace: Namespace, workers: Sequence[TierWorker], *, within_s: float
) -> tuple[TierFacts, ...]:
    """What tiers below memory hold; read anew, at the same time. See :func:`holdings_of`."""
    within_s = min(within_s, LOOK_WAIT_S)
    until_s = time.monotonic() + within_s
    asked = []
    for worker in workers:
        look = functools.partial(_look_at, worker, namespace.marks)
        asked.append((worker, look, worker.look.ask(look)))
    return tuple(
        worker.look.wait(number, look, until_s)
        or _unavailable(worker, f"no answer within {within_s:.3g} s")
        for worker, look, number in asked
    )


def _records_of(namespace: Namespace) -> tuple[bytes, ...]:
    """What a restart needs to know of checkpoints. Not the acknowledgements of other hosts, who
    tell of them and of what they hold by themselves: all hosts know the same thousands.
    """
    catalog = namespace.catalog
    wanted = [
        record.id
        for manifest in catalog.manifests()
        for record in catalog.records(manifest.save_id)
        if record.kind == "order" or (record.kind == "ack" and record.host == namespace.host_id)
    ]
    return (*catalog.encoded_records(wanted), *namespace.keeping.all_pins())


def _look_at(worker: TierWorker, marks: QuarantineMarks) -> TierFacts:
    catalog = worker.attach(ATTACH_WAIT_S)
    if catalog is None:
        return _unavailable(worker, worker.why() or f"no answer within {ATTACH_WAIT_S:g} s")
    return gather(catalog, kind=kind_of(worker.spec), marks=marks)


def _unavailable(worker: TierWorker, error: str) -> TierFacts:
    spec = worker.spec
    return TierFacts(
        tier=spec.name, scope=spec.scope, kind=kind_of(spec), available=False, error=error
    )


def progress_of(namespace: Namespace, save_id: str, awaited: str = "") -> m.Progress:
    """See :class:`tieredckpt.rpc.messages.agent.Progress`.

    Args:
        namespace: Of the checkpoint.
        save_id: Of the checkpoint.
        awaited: The tier that somebody waits for: if it failed, its pause ends now.

    Raises:
        NotFoundError: No tier that answers knows of the checkpoint.
    """
    here = namespace.catalog.get(save_id)
    outcomes = {w.spec.name: w.outcome(save_id) for w in list(namespace.workers.values())}
    for _ in outcomes:  # the tier, and those that it is filled from
        worker = namespace.workers.get(awaited)
        if worker is None:
            break
        if worker.error is not None:
            worker.poke()
        awaited = worker.spec.source
    copies = namespace.replication.outcome(save_id)
    found = {copies.level, *(outcome.level for outcome in outcomes.values())}
    if here is None and found == {"not_scheduled"}:
        raise NotFoundError(f"no checkpoint {save_id} is known here", key=save_id, what="save")
    levels: dict[str, m.Level] = {MEMORY: "done" if here is not None else "not_scheduled"}
    errors: dict[str, str] = {}
    if namespace.peers.active or copies.level != "not_scheduled":
        levels[REPLICATED] = copies.level
    if copies.error is not None:
        errors[REPLICATED] = copies.error
    goes_to = namespace.giving_up.destinations(here) if here is not None else ()
    for name, outcome in outcomes.items():
        scheduled = here is None or name in goes_to or outcome.level != "not_scheduled"
        levels[name] = outcome.level if scheduled else "not_scheduled"
        if outcome.error is not None and scheduled:
            errors[name] = outcome.error
    return m.Progress(
        levels=levels,
        errors=errors,
        copies_done=copies.done,
        copies_wanted=copies.wanted,
        quiet_s={name: worker.quiet_s() for name, worker in list(namespace.workers.items())},
    )


def tier_statuses(namespace: Namespace) -> tuple[m.TierStatus, ...]:
    """All tiers but memory, for ``tieredckpt status``."""
    heads, attempts = namespace.heads(), namespace.attempts.known()
    return tuple(
        worker.status(heads, attempts, namespace.marks.count(name))
        for name, worker in list(namespace.workers.items())
    )


def troubles_of(namespace: Namespace) -> dict[str, m.TierTrouble]:
    """By tier, what training should be told; no I/O."""
    found = {name: worker.trouble() for name, worker in list(namespace.workers.items())}
    return {name: trouble for name, trouble in found.items() if trouble is not None}


def needs_of(namespace: Namespace, lock: threading.RLock) -> m.RetentionNeeds:
    """What retention leaves alone at this moment, beside pins; ``lock``: the node's."""
    with lock:
        found = {MEMORY: namespace.retention.spared()}
    for name, worker in list(namespace.workers.items()):
        catalog = worker.catalog
        needs = namespace.keeping.needs_of(name, catalog.manifests() if catalog else ())
        found[name] = protections(wanted_by=needs.wanted_by, in_use=needs.in_use)
    return m.RetentionNeeds(tiers=found)


def flush(namespace: Namespace, request: m.Flush) -> m.Flushed:
    """Let the newest checkpoint of each stream go to tiers before everything that waits.

    Raises:
        NotFoundError: There is no such tier, or no checkpoint.
        UsageError: No tier below memory is configured.
        TierUnavailableError: No tier answers.
        CapacityError: The record could not be noted.
    """
    workers = dict(namespace.workers)
    if not workers:
        raise UsageError(f"namespace {namespace.name} has no tiers below memory")
    if request.tier and request.tier not in workers:
        known = ", ".join(workers)
        text = f"there is no tier {request.tier!r}; there are {known}"
        raise NotFoundError(text, key=request.tier, what="tier")
    saves = namespace.heads()
    if not saves:
        raise NotFoundError(
            f"namespace {namespace.name} has no checkpoint in memory to copy to a tier: nothing "
            "was saved at all, or since memory was lost",
            what="save",
        )
    asked = {request.tier: workers[request.tier]} if request.tier else workers
    found = _send(namespace, asked, saves, request.left_s)
    if not found and _attach(asked.values(), request.left_s):
        found = _send(namespace, asked, saves, request.left_s)
    if not found:
        why = "; ".join(f"{name}: {each.error}" for name, each in asked.items())
        raise TierUnavailableError(f"no tier answers: {why}", outcome="not_applied")
    estimates_s = [each.estimate_s for each in found.values()]
    return m.Flushed(
        tiers=tuple(found),
        saves=tuple(
            m.FlushedSave(stream=each.stream, step=each.step, save_id=each.save_id)
            for each in saves
        ),
        remaining_bytes=sum(each.remaining_bytes for each in found.values()),
        estimate_s=None if None in estimates_s else max(filter(None, estimates_s), default=0.0),
    )


def _send(
    namespace: Namespace, asked: dict[str, TierWorker], saves: list[Manifest], left_s: float | None
) -> dict[str, Reachable]:
    """Send ``saves`` to the tiers to fill, if any answers; by name, the surest first."""
    found = [_reach(namespace, each, saves) for each in asked.values()]
    chosen = tiers_to_fill(found, left_s)
    for each in chosen:
        for manifest in saves:
            namespace.giving_up.send(asked[each.tier], manifest)
        asked[each.tier].poke()  # a pause may be longer than the time that is left
    return {each.tier: each for each in chosen}


def _attach(asked: Iterable[TierWorker], left_s: float | None) -> bool:
    """Wait until a tier answers, as right after a start of the agent, which may have died of the
    same signal as the job; whether one does.
    """
    until_s = time.monotonic() + min(TRY_S, TRY_S if left_s is None else left_s / 4)
    for worker in asked:
        worker.poke()  # all at the same time
    return any(worker.attach(max(0.0, until_s - time.monotonic())) for worker in asked)


def _reach(namespace: Namespace, worker: TierWorker, saves: list[Manifest]) -> Reachable:
    remaining = {
        each.save_id: each for each in saves if worker.outcome(each.save_id).level != "done"
    }
    active = worker.active_manifest()
    if remaining and active is not None:
        remaining[active.save_id] = active  # it is finished before another one begins
    size = sum(ref.size for each in remaining.values() for ref in namespace.own_segments(each))
    counts = worker.counts
    return Reachable(
        tier=worker.spec.name,
        outlives_host=worker.spec.scope == "shared",
        available=worker.catalog is not None,
        remaining_bytes=size,
        bytes_per_s=counts.bytes / counts.seconds if counts.bytes and counts.seconds else None,
        due=any(worker.spec.name in namespace.giving_up.destinations(each) for each in saves),
    )


def resident_bytes() -> int:
    """Memory that this process has; its peak where the system does not tell."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        pages = int(Path("/proc/self/statm").read_text("ascii").split()[1])
        return pages * resource.getpagesize()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
