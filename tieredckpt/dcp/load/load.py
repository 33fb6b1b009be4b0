"""``engine.load``: load the agreed checkpoint on all ranks, or an older one on all of them.

No rank decides alone. The coordinator broadcasts its choice, and DCP sends each rank's failure to
all ranks, so they all see the same failures and draw the same conclusion.
"""

from __future__ import annotations

import logging
import time
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader

from tieredckpt import failpoints
from tieredckpt.dcp.job.history import HistoryState, newer_text
from tieredckpt.dcp.job.ranks import Ranks
from tieredckpt.dcp.job.session import RestoreReport, Session
from tieredckpt.dcp.load.choose import (
    UNDEFINED,
    Chosen,
    LoadRequest,
    agree,
    check_roll_back,
    check_same,
    nothing_or_raise,
    wanted,
)
from tieredckpt.dcp.load.reader import Reader, names_text
from tieredckpt.dcp.load.sharing import storages_of
from tieredckpt.dcp.slots.stager import materialized
from tieredckpt.dcp.state.per_rank import PerRank
from tieredckpt.dcp.state.per_rank_keys import parse_key
from tieredckpt.dcp.state.planner import SafeLoadPlanner
from tieredckpt.errors import (
    AgentError,
    FormatVersionError,
    IntegrityError,
    NoRecoverableCheckpointError,
    NotFoundError,
    TieredCkptError,
    TierUnavailableError,
    UsageError,
)
from tieredckpt.format.manifest import Manifest
from tieredckpt.format.segment import PAGE_BYTES
from tieredckpt.recovery.other_hosts import warn_of_other_names
from tieredckpt.recovery.plan import Candidate, RecoveryPlan, Refusal, naming

log = logging.getLogger(__name__)

LOADS_MAX = 5
"""How often a load is repeated because another running trainer's saves evicted its checkpoint."""


class _EvictedError(Exception):
    """The checkpoint was deleted during the load: another process is saving."""

    def __init__(self, cause: NoRecoverableCheckpointError) -> None:
        super().__init__(cause.message)
        self.cause = cause


def restore(session: Session, state: dict[str, Any], request: LoadRequest) -> int | None:
    """Load into ``state``; see ``Engine.load``. Collective."""
    begun_s = time.perf_counter()
    ranks = session.ranks.of(request.process_group)
    for left in reversed(range(LOADS_MAX)):
        try:
            return _restore(session, ranks, state, request, begun_s)
        except _EvictedError as error:
            if not left:
                raise error.cause from None
            log.warning("loading again: %s", error)
        finally:
            if session.other_hosts is not None:
                session.other_hosts.close()  # the next load connects anew
    raise AssertionError  # the loop returns or raises


def _warn_of_loaders(state: Mapping[str, Any]) -> None:
    """Of loaders that draw a number from torch's generator once they begin, after the load."""
    for name, value in state.items():
        loader = value.obj if isinstance(value, PerRank) else value
        if isinstance(loader, DataLoader) and loader.generator is None:
            log.warning(
                "the loader %r of the state has no generator of its own: it draws from torch's "
                "when it begins, and random numbers after a restart are others than without one; "
                "give it generator=torch.Generator()", name,
            )  # fmt: skip


def _restore(
    session: Session,
    ranks: Ranks,
    state: dict[str, Any],
    request: LoadRequest,
    begun_s: float,
) -> int | None:
    asked = check_same(ranks.gather(lambda: wanted(session, state, request)))
    if not session.read_only:
        _warn_of_loaders(state)
    contents: dict[str, dict[str, Any]] = {}
    failed: list[Refusal] = []
    tried: list[Reader] = []
    until_s: float | None = None
    while True:
        chosen = agree(session, ranks, asked, failed, until_s)
        asked = replace(asked, streams=chosen.streams, together=chosen.together)
        if not chosen.candidates:
            try:
                nothing_or_raise(request, chosen, failed, written=_may_have_written(tried))
            except NoRecoverableCheckpointError as error:
                if failed and set.intersection(*map(set, chosen.steps.values())):
                    raise _EvictedError(error) from error  # there are newer ones by now
                raise
            asked_for = (session.client, chosen.streams, session.config.tiers, session.script)
            ranks.from_coordinator(partial(warn_of_other_names, *asked_for))
            _resume(session, ranks, request, chosen)
            where = ", ".join(["memory", *(tier.name for tier in session.config.tiers)])
            log.info("namespace %s: no checkpoint in %s", session.namespace, where)
            return None
        check_roll_back(request, chosen.plans, read_only=session.read_only)
        if not contents:
            # Once, before anything is read: an older checkpoint must not ask the objects again.
            contents = ranks.run(partial(_contents, state, chosen))
        refusal = _load_all(session, ranks, request, chosen, contents, tried)
        if refusal is None:
            break
        if not refusal.final and until_s is None:
            until_s = time.monotonic() + session.config.recovery.wait_s
        failed = [*(each for each in failed if each.save_id != refusal.save_id), refusal]
    manifests = {each.manifest.stream: each.manifest for each in chosen.candidates}
    readers = tried[-len(manifests) :]
    if failed:
        step = chosen.candidates[0].manifest.step
        ranks.run(partial(_check_all_restored, step, readers, tried, failed))
    failpoints.reach("load.attempt.before")
    ranks.run(lambda: _put_all(state, contents, chosen))
    _resume(session, ranks, request, chosen)
    failpoints.reach("load.attempt.after")
    _report(session, chosen, readers, failed, time.perf_counter() - begun_s)
    sizes = [_segment_bytes(each, ranks, contents[s]) for s, each in manifests.items()]
    session.prepare_ring(max(sizes))
    return chosen.candidates[0].manifest.step


def _load_all(
    session: Session,
    ranks: Ranks,
    request: LoadRequest,
    chosen: Chosen,
    contents: Mapping[str, dict[str, Any]],
    tried: list[Reader],
) -> Refusal | None:
    """Read every stream, and append its reader to ``tried``. The failure of one that is to be
    passed over, or None.
    """
    for candidate in chosen.candidates:
        stream = candidate.manifest.stream
        tried.append(Reader(session, stream=stream, pinned=candidate, strict=request.strict))
        planner = request.planner or SafeLoadPlanner(
            unsafe_pickle=session.unsafe_pickle, allow_partial_load=not request.strict
        )
        try:
            with warnings.catch_warnings():
                if ranks.alone:
                    text = "torch.distributed is (disabled|unavailable)"
                    warnings.filterwarnings("ignore", message=text)
                dcp.load(
                    contents[stream], storage_reader=tried[-1], planner=planner,
                    process_group=ranks.group,
                )  # fmt: skip
        except CheckpointException as error:
            return _refusal(candidate, error, request, written=_may_have_written(tried))
        if isinstance(planner, SafeLoadPlanner) and (missing := planner.missing_keys):
            warnings.warn(
                f"not loaded: {planner.prefix_text}{len(missing)} key(s) of the state that the "
                f"checkpoint does not have: {names_text(list(missing))}",
                stacklevel=4,
            )
    return None


def _may_have_written(tried: Sequence[Reader]) -> bool:
    return any(reader.may_have_written for reader in tried)


def _check_all_restored(
    step: int, readers: Sequence[Reader], tried: Sequence[Reader], failed: Sequence[Refusal]
) -> None:
    """Keys that a load leaves alone (``strict=False``) must not be those of a failed checkpoint.

    Raises:
        NoRecoverableCheckpointError: This rank read keys of a failed one that are missing in the
            restored one.
    """
    left = {key for each in tried for key in each.asked}
    left.difference_update(*(each.asked for each in readers))
    # Per-rank values are not read into the state itself: a planner collects them anew each time.
    names = sorted({name for _, name in left if parse_key(name) is None})
    if not names:
        return
    raise NoRecoverableCheckpointError(
        f"step {step} can be restored, but {len(names)} key(s) are missing in it that were read "
        f"from a newer checkpoint, which then failed: {names_text(names)}{UNDEFINED}. Make the "
        f"state anew, and load it with engine.load(..., step={step}, strict=False):\n  "
        + "\n  ".join(f"step {each.step} ({each.save_id}): {each.reason}" for each in failed),
        refused=[(each.save_id, each.step, each.reason) for each in failed],
    )


def _report(
    session: Session,
    chosen: Chosen,
    readers: Sequence[Reader],
    failed: Sequence[Refusal],
    seconds: float,
) -> None:
    manifests = [each.manifest for each in chosen.candidates]
    step = manifests[0].step
    passed_over = _passed_over(step, chosen.plans, failed)
    for save_id, at, reason in passed_over:
        log.warning("restored step %d; passed over %s: %s", step, naming(at, save_id), reason)
    segments = tuple(each for reader in readers for each in reader.segments.items())
    tiers: Counter[str] = Counter()
    places: Counter[str] = Counter()
    for reader in readers:
        tiers.update(reader.bytes_by_tier)
        for of_segment in reader.segments.values():
            places.update(of_segment)
    session.last_restore = RestoreReport(
        save_id=manifests[0].save_id,
        stream=", ".join(chosen.streams),
        step=step,
        bytes_by_tier=dict(tiers),
        repaired_blocks=sum(reader.repaired_blocks for reader in readers),
        seconds=seconds,
        refused=passed_over,
        save_ids={each.stream: each.save_id for each in manifests},
        bytes_by_source=dict(places),
        segments=segments,
    )


def _contents(state: Mapping[str, Any], chosen: Chosen) -> dict[str, dict[str, Any]]:
    """By stream, the part of the state to load. A rank may have no part of a stream."""
    if not chosen.together:
        return {chosen.streams[0]: _content(state)}
    contents = {stream: _part(state.get(stream, {}), stream) for stream in chosen.streams}
    owners: dict[int, str] = {}
    for stream, content in contents.items():
        for memory in {each for leaf in tree_leaves(content) for each in storages_of(leaf)}:
            if (other := owners.setdefault(memory, stream)) != stream:
                raise UsageError(
                    f"tensors of the streams {other!r} and {stream!r} share memory: load the "
                    "streams one after the other, or give each tensors of its own"
                )
    return contents


def _part(part: Any, stream: str) -> dict[str, Any]:
    if isinstance(part, Stateful):
        part = part.state_dict()
    if not isinstance(part, dict):
        raise UsageError(
            f"the state to be loaded from stream {stream!r} is a {type(part).__name__}: give the "
            "dict that was saved into it, or a Stateful object"
        )
    return _content(part)


def _content(state: Mapping[str, Any]) -> dict[str, Any]:
    return materialized({key: state[key] for key in sorted(state)})


def _put_all(state: dict[str, Any], contents: Mapping[str, dict[str, Any]], chosen: Chosen) -> None:
    if not chosen.together:
        # The items count, as for DCP: a dict may have a state_dict() of its own.
        _put(state, contents[chosen.streams[0]])
        return
    for stream, content in contents.items():
        part = state.get(stream)
        if isinstance(part, Stateful):
            part.load_state_dict(content)
        elif part is not None:
            _put(part, content)


def _put(state: dict[str, Any], content: Mapping[str, Any]) -> None:
    for key, value in content.items():
        if not isinstance(state[key], Stateful):
            state[key] = value
            continue
        try:
            state[key].load_state_dict(value)
        except UsageError as error:  # of per_rank, which does not know its key
            raise UsageError(f"state[{key!r}]: {error.message}", **error.fields) from error


def _resume(session: Session, ranks: Ranks, request: LoadRequest, chosen: Chosen) -> None:
    """Record on all ranks where the streams resume; any rank may coordinate their next save."""
    history = session.history

    def record() -> HistoryState:
        history.restored(chosen.plans, chosen.known, abandon_newer=request.abandon_newer)
        for plan in chosen.plans if not session.read_only else ():
            if plan.chosen is not None and plan.newer:
                log.warning("a roll-back: the next save abandons %s", newer_text(plan.newer))
        return history.snapshot(chosen.streams)

    state = ranks.from_coordinator(record)
    if not ranks.is_coordinator:
        history.adopt(state)
    session.resumed_at(chosen.streams, state.load_id)


def _refusal(
    candidate: Candidate,
    error: CheckpointException,
    request: LoadRequest,
    *,
    written: bool,
) -> Refusal:
    """The refusal of this candidate. Raises if it must not be passed over."""
    failures = {rank: failure[0] for rank, failure in sorted(error.failures.items())}
    first_rank, first = next(iter(failures.items()))
    if not all(isinstance(each, TieredCkptError) for each in failures.values()):
        if written:
            error.add_note(UNDEFINED.removeprefix("; "))
        raise error
    assert isinstance(first, TieredCkptError)
    named = request.step is not None or request.save_id is not None
    if named or not all(map(_is_about_copies, failures.values())):
        text = f"{first.message} (rank {first_rank}){UNDEFINED if written else ''}"
        raise type(first)(text, **first.fields) from error
    of_lowest = {str(each): rank for rank, each in reversed(failures.items())}
    reasons = "; ".join(f"{reason} (rank {rank})" for reason, rank in reversed(of_lowest.items()))
    # One that could not be read may be intact: it is passed over only if older is fine.
    final = request.abandon_newer or not all(
        isinstance(each, TierUnavailableError) for each in failures.values()
    )
    if written and not final:
        reasons += UNDEFINED
    return Refusal(candidate.manifest.save_id, candidate.manifest.step, reasons, final)


def _is_about_copies(error: BaseException) -> bool:
    """Whether an older checkpoint may do better.

    An agent that is gone has none at all. One of a newer format is intact and needs a newer
    release; an older one would abandon it.
    """
    return isinstance(
        error, IntegrityError | NotFoundError | TierUnavailableError
    ) and not isinstance(error, AgentError | FormatVersionError)


def _passed_over(
    step: int, plans: Sequence[RecoveryPlan], failed: Sequence[Refusal]
) -> tuple[tuple[str, int | None, str], ...]:
    """The checkpoints that failed, and those that the plans refused though they may be newer."""
    tried = {refusal.save_id for refusal in failed}
    refused = [each for plan in plans for each in plan.refused if each.save_id not in tried]
    return tuple(
        (each.save_id, each.step, each.reason)
        for each in (*failed, *refused)
        if each.step is None or each.step > step  # a running job may have saved since
    )


def _segment_bytes(manifest: Manifest, ranks: Ranks, content: Mapping[str, Any]) -> int:
    """An estimate of the size of this rank's next segment."""
    sizes = [ref.size for ref in manifest.segments]
    if manifest.world_size == ranks.world_size == len(sizes):
        return sizes[ranks.rank]
    return state_bytes(content, ranks.world_size)


def state_bytes(content: Mapping[str, Any], world_size: int) -> int:
    """The size of one rank's segment: its shards, and its part of the replicated tensors."""
    shards = replicated = 0
    for leaf in tree_leaves(dict(content)):
        if isinstance(leaf, DTensor):
            local = leaf.to_local()
            shards += local.numel() * local.element_size()
        elif isinstance(leaf, torch.Tensor):
            replicated += leaf.numel() * leaf.element_size()
    return -(-(shards + replicated // world_size) // PAGE_BYTES) * PAGE_BYTES
