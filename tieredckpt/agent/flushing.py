"""Bringing the newest checkpoints to a tier now: which one, first in line, on all hosts."""

from __future__ import annotations

import time
from collections.abc import Sequence

from tieredckpt.agent.namespace import Namespace
from tieredckpt.agent.spill import TierWorker
from tieredckpt.errors import NotFoundError, TierUnavailableError, UsageError
from tieredckpt.format.manifest import Manifest
from tieredckpt.policy.schedule import Reachable, choose_tier
from tieredckpt.transport.messages import Flush, Flushed, FlushedSave

TRY_S = 5.0
"""Longest wait for tiers that failed, or have not answered yet, before one is chosen."""


def flush(namespace: Namespace, request: Flush) -> Flushed:
    """Let the newest checkpoint of each stream go to a tier before everything that waits.

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
            f"namespace {namespace.name} has no checkpoint in memory to be brought to a tier: "
            "nothing was saved since memory was lost, or at all",
            what="save",
        )
    asked = [workers[request.tier]] if request.tier else list(workers.values())
    _try_again(asked, request.left_s)
    chosen = choose_tier([_reach(namespace, each, saves) for each in asked], request.left_s)
    if chosen is None:
        why = "; ".join(f"{each.spec.name}: {each.error}" for each in asked)
        raise TierUnavailableError(f"no tier answers: {why}", outcome="not_applied")
    for manifest in saves:
        namespace.giving_up.send(workers[chosen.tier], manifest)
    workers[chosen.tier].poke()  # a pause may be longer than the time that is left
    return Flushed(
        tier=chosen.tier,
        saves=tuple(
            FlushedSave(stream=each.stream, step=each.step, save_id=each.save_id) for each in saves
        ),
        remaining_bytes=chosen.remaining_bytes,
        estimate_s=chosen.estimate_s,
    )


def _try_again(asked: Sequence[TierWorker], left_s: float | None) -> None:
    """Tiers that failed are tried now, instead of when their pause ends.

    Right after a start of the agent, and it may have died of the same signal as the job, none has
    said yet what it holds: that is waited for, too.
    """
    until_s = time.monotonic() + min(TRY_S, TRY_S if left_s is None else left_s / 4)
    for worker in asked:
        worker.poke()  # all at the same time
    for worker in asked:
        left_s = max(0.0, until_s - time.monotonic())
        if worker.catalog is None:
            worker.attach(left_s)
        else:
            worker.retry(left_s)


def _reach(namespace: Namespace, worker: TierWorker, saves: list[Manifest]) -> Reachable:
    remaining = {m.save_id: m for m in saves if worker.outcome(m.save_id).level != "done"}
    active = worker.active_manifest()
    if remaining and active is not None:
        remaining[active.save_id] = active  # it is finished before another one begins
    size = sum(ref.size for m in remaining.values() for ref in namespace.own_segments(m))
    counts = worker.counts
    return Reachable(
        tier=worker.spec.name,
        outlives_host=worker.spec.scope == "shared",
        available=worker.catalog is not None,
        failing=worker.error is not None and active is None,
        remaining_bytes=size,
        bytes_per_s=counts.bytes / counts.seconds if counts.bytes and counts.seconds else None,
    )
