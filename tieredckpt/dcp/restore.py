"""``engine.load``: agree on one checkpoint, load it on all ranks, or walk back together.

Nothing is decided by one rank alone. The coordinator chooses and tells the others; DCP carries each
rank's failure to all, so that all see the same failures and draw the same conclusion.
"""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import LoadPlanner
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from tieredckpt.dcp.checkpoint_id import DEFAULT_STREAM, checked_step, checked_stream
from tieredckpt.dcp.group import Ranks
from tieredckpt.dcp.history import HistoryState
from tieredckpt.dcp.planner import SafeLoadPlanner
from tieredckpt.dcp.reader import Reader, names_text, not_recoverable
from tieredckpt.dcp.session import RestoreReport, Session
from tieredckpt.errors import (
    AgentError,
    FormatVersionError,
    IntegrityError,
    NotFoundError,
    TieredCkptError,
    TierUnavailableError,
    UsageError,
)
from tieredckpt.format.manifest import Manifest
from tieredckpt.recovery.plan import Candidate, RecoveryPlan, Refusal

log = logging.getLogger(__name__)

POLL_S = 0.25
"""How often a tier that does not answer is asked again, for up to ``recovery.wait``."""

UNDEFINED = "; the contents of the tensors that were to be loaded are undefined"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRequest:
    """What the caller of ``engine.load`` asked for."""

    step: int | None
    stream: str
    strict: bool
    planner: LoadPlanner | None
    process_group: dist.ProcessGroup | None
    fresh_start: bool


@dataclass(slots=True)
class _Chosen:
    """What the coordinator tells the other ranks, and what only it needs afterwards."""

    plan: RecoveryPlan
    known: tuple[Manifest, ...] = ()


def restore(session: Session, state: dict[str, Any], request: LoadRequest) -> int | None:
    """Load into ``state``; see ``Engine.load``. Collective."""
    begun_s = time.perf_counter()
    ranks = session.ranks.of(request.process_group)
    stream = _check_same(
        ranks.gather(lambda: (_check(session, request), request.step, session.run_id))
    )
    # Once, before anything is read: walking back must not ask the user's objects again.
    content = ranks.run(lambda: _content(state))
    failed: list[Refusal] = []
    written = False
    while True:
        chosen = _agree(session, ranks, request, stream, failed)
        candidate = chosen.plan.chosen
        if candidate is None:
            _nothing(session, ranks, request, chosen.plan, failed, written=written)
            return None
        reader = Reader(session, stream=stream, pinned=candidate, strict=request.strict)
        try:
            _load(session, ranks, request, reader, content)
            break
        except CheckpointException as error:
            written = written or reader.may_have_written
            failed.append(_refusal(candidate, error, request, written=written))
    manifest = candidate.manifest
    ranks.run(lambda: _hand_over(state, content))
    loaded = {stream: (manifest, chosen.known)}
    _go_on(session, ranks, [stream], lambda: session.history.restored(loaded))
    passed_over = _passed_over(manifest, chosen.plan, failed)
    for save_id, step, reason in passed_over:
        log.warning("restored step %d; passed over step %s (%s): %s",
                    manifest.step, step, save_id, reason)  # fmt: skip
    session.last_restore = RestoreReport(
        save_id=manifest.save_id,
        stream=stream,
        step=manifest.step,
        bytes_by_tier=reader.bytes_by_tier,
        repaired_blocks=reader.repaired_blocks,
        seconds=time.perf_counter() - begun_s,
        refused=passed_over,
    )
    session.prepare_ring(_segment_bytes(manifest, ranks, content))
    return manifest.step


def _check(session: Session, request: LoadRequest) -> str:
    session.check()
    checked_step(request.step)
    return checked_stream(request.stream) or DEFAULT_STREAM


def _check_same(wanted: list[tuple[str, int | None, str]]) -> str:
    """The stream that all ranks want; all of them raise if they differ in it or in the step."""
    stream, step, run_id = wanted[0]
    for rank, (other, at, run) in enumerate(wanted):
        if run != run_id:
            raise UsageError(
                "the ranks have opened their engines apart: call Engine.open on all ranks "
                "together, after init_process_group"
            )
        if (other, at) != (stream, step):
            raise UsageError(
                f"the ranks ask for different checkpoints: rank 0 for step {step} of stream "
                f"{stream!r}, rank {rank} for step {at} of stream {other!r}"
            )
    return stream


def _content(state: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: state[key].state_dict() if isinstance(state[key], Stateful) else state[key]
        for key in sorted(state)
    }


def _hand_over(state: dict[str, Any], content: Mapping[str, Any]) -> None:
    for key, value in content.items():
        if isinstance(state[key], Stateful):
            state[key].load_state_dict(value)
        else:
            state[key] = value


def _agree(
    session: Session, ranks: Ranks, request: LoadRequest, stream: str, failed: list[Refusal]
) -> _Chosen:
    known: list[Manifest] = []

    def choose() -> _Chosen:
        until_s = time.monotonic() + session.config.recovery.wait_s
        exclude = frozenset(refusal.save_id for refusal in failed)
        while True:
            plan = session.history.recovery_plan(stream, step=request.step, exclude=exclude)
            # An older step is settled for only when there is nothing left to wait for. After a
            # failed candidate the tiers have had their time already.
            if not plan.incomplete or failed or time.monotonic() >= until_s:
                break
            time.sleep(POLL_S)
        known.extend(candidate.manifest for candidate in plan.candidates)
        return _Chosen(replace(plan, candidates=()))

    chosen = ranks.from_coordinator(choose)
    return _Chosen(chosen.plan, tuple(known))


def _nothing(
    session: Session,
    ranks: Ranks,
    request: LoadRequest,
    plan: RecoveryPlan,
    failed: list[Refusal],
    *,
    written: bool,
) -> None:
    """Nothing to restore: that is certain (or wished), or it raises."""
    refused = [
        refusal for refusal in plan.refused if all(refusal.save_id != f.save_id for f in failed)
    ]
    plan = replace(plan, refused=(*failed, *refused))
    certain = not plan.refused and (not plan.incomplete or request.fresh_start)
    if certain and request.step is None:
        begin = partial(session.history.nothing_to_restore, [plan.stream])
        _go_on(session, ranks, [plan.stream], begin)
        return
    error = not_recoverable(plan, request.step, None)
    if written:
        error = type(error)(error.message + UNDEFINED, **error.fields)
    raise error


def _go_on(
    session: Session, ranks: Ranks, streams: Sequence[str], decide: Callable[[], None]
) -> None:
    """The coordinator decides where the streams go on; any rank may coordinate their next save."""
    history = session.history

    def take() -> HistoryState:
        decide()
        return history.snapshot(streams)

    state = ranks.from_coordinator(take)
    if not ranks.is_coordinator:
        history.adopt(state)


def _load(
    session: Session,
    ranks: Ranks,
    request: LoadRequest,
    reader: Reader,
    content: dict[str, Any],
) -> None:
    planner = request.planner or SafeLoadPlanner(
        unsafe_pickle=session.unsafe_pickle, allow_partial_load=not request.strict
    )
    with warnings.catch_warnings():
        if ranks.alone:
            warnings.filterwarnings("ignore", message="torch.distributed is (disabled|unavailable)")
        dcp.load(content, storage_reader=reader, planner=planner, process_group=ranks.group)
    missing = planner.missing_keys if isinstance(planner, SafeLoadPlanner) else ()
    if missing:
        warnings.warn(
            f"not loaded: {len(missing)} key(s) of the state that the checkpoint does not have: "
            f"{names_text(list(missing))}",
            stacklevel=5,
        )


def _refusal(
    candidate: Candidate,
    error: CheckpointException,
    request: LoadRequest,
    *,
    written: bool,
) -> Refusal:
    """Why this candidate is passed over. Raises if it must not be."""
    failures = {rank: failure[0] for rank, failure in sorted(error.failures.items())}
    first_rank, first = next(iter(failures.items()))
    if not all(isinstance(each, TieredCkptError) for each in failures.values()):
        if written:
            error.add_note(UNDEFINED.removeprefix("; "))
        raise error
    assert isinstance(first, TieredCkptError)
    if request.step is not None or not all(map(_speaks_of_copies, failures.values())):
        text = f"{first.message} (rank {first_rank}){UNDEFINED if written else ''}"
        raise type(first)(text, **first.fields) from error
    reasons = "; ".join(dict.fromkeys(str(each) for each in failures.values()))
    return Refusal(candidate.manifest.save_id, candidate.manifest.step, reasons)


def _speaks_of_copies(error: BaseException) -> bool:
    """Whether an older checkpoint may do better.

    An agent that is gone has none at all, and one of a newer format is intact: it wants a newer
    release, and walking back would abandon it.
    """
    return isinstance(
        error, IntegrityError | NotFoundError | TierUnavailableError
    ) and not isinstance(error, AgentError | FormatVersionError)


def _passed_over(
    restored: Manifest, plan: RecoveryPlan, failed: list[Refusal]
) -> tuple[tuple[str, int | None, str], ...]:
    """What was tried and failed, and what the plan refused though it may be newer."""
    tried = {refusal.save_id for refusal in failed}
    newer = [
        refusal
        for refusal in plan.refused
        if refusal.save_id not in tried and (refusal.step is None or refusal.step > restored.step)
    ]
    return tuple((each.save_id, each.step, each.reason) for each in (*failed, *newer))


def _segment_bytes(manifest: Manifest, ranks: Ranks, content: Mapping[str, Any]) -> int:
    """How large this rank's next segment will be, as far as one can tell."""
    sizes = [ref.size for ref in manifest.segments]
    if manifest.world_size == ranks.world_size == len(sizes):
        return sizes[ranks.rank]
    return state_bytes(content, ranks.world_size)


def state_bytes(content: Mapping[str, Any], world_size: int) -> int:
    """Bytes that one rank writes of ``content``: its shards, and its part of what all have."""
    shards = replicated = 0
    for leaf in tree_leaves(dict(content)):
        if isinstance(leaf, DTensor):
            local = leaf.to_local()
            shards += local.numel() * local.element_size()
        elif isinstance(leaf, torch.Tensor):
            replicated += leaf.numel() * leaf.element_size()
    return shards + replicated // world_size
