"""What ``engine.load`` restores: agreed by all ranks before the first byte is read.

The coordinator asks its agent and all other hosts, waits for tiers and hosts that do not answer,
chooses, and tells the others.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch.distributed as dist
from torch.distributed.checkpoint.planner import LoadPlanner

from tieredckpt import failpoints
from tieredckpt.dcp.job.ranks import Ranks
from tieredckpt.dcp.job.session import Session
from tieredckpt.dcp.load.reader import not_recoverable
from tieredckpt.dcp.state.checkpoint_id import DEFAULT_STREAM, checked_step, checked_stream
from tieredckpt.errors import (
    NoRecoverableCheckpointError,
    NotFoundError,
    TieredCkptError,
    TierUnavailableError,
    UsageError,
)
from tieredckpt.format.manifest import Manifest
from tieredckpt.recovery.other_hosts import (
    POLL_S,
    AllHoldings,
    log_not_asked,
    log_warnings,
    read_everywhere,
)
from tieredckpt.recovery.plan import Candidate, RecoveryPlan, Refusal, fork_error, plan_common

UNDEFINED = "; the contents of the tensors that were to be loaded are undefined"
STEPS_SHOWN = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRequest:
    """What the caller of ``engine.load`` asked for."""

    step: int | None
    save_id: str | None
    stream: str | Sequence[str]
    strict: bool
    planner: LoadPlanner | None
    process_group: dist.ProcessGroup | None
    fresh_start: bool
    abandon_newer: bool


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a rank asks for; all ranks must ask for the same, but for the keys."""

    streams: tuple[str, ...]
    together: bool
    """The state has one entry per stream, instead of being the state of the one stream."""
    step: int | None
    save_id: str | None
    run_id: str
    keys: tuple[str, ...]


@dataclass(slots=True)
class Chosen:
    """What the coordinator tells the other ranks, and what only it needs afterwards.

    ``plans``: one per stream, each without its candidates; either all of them chose, or none.
    """

    plans: tuple[RecoveryPlan, ...]
    together: bool
    steps: Mapping[str, tuple[int, ...]]
    """By stream, the steps that could be restored, newest first."""
    known: Mapping[str, tuple[Manifest, ...]]

    @property
    def streams(self) -> tuple[str, ...]:
        """In the order in which they are loaded."""
        return tuple(plan.stream for plan in self.plans)

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        """One per stream, in their order; empty if there is nothing to restore."""
        return tuple(plan.chosen for plan in self.plans if plan.chosen is not None)


def wanted(session: Session, state: Mapping[str, object], request: LoadRequest) -> Wanted:
    """What this rank asks for. Raises UsageError if it cannot be.

    Raises AgentError: The agent of this host does not answer and cannot be started.
    """
    session.check()
    session.background_saves.wait_idle(session.config.save.wait_timeout_s)
    if not session.read_only:
        # Other hosts cannot start this one's agent, and a new agent knows neither its tiers nor
        # perhaps the namespace: it learns them here, before the coordinator asks all hosts.
        session.client.peers()
    step = checked_step(request.step)
    together = not isinstance(request.stream, str)
    names = (request.stream,) if isinstance(request.stream, str) else tuple(request.stream)
    streams = tuple(checked_stream(name) or DEFAULT_STREAM for name in names)
    if not streams or len(set(streams)) < len(streams):
        raise UsageError(f"stream={names!r}: name at least one stream, and each only once")
    if together and (unknown := sorted(set(map(str, state)) - set(streams))):
        raise UsageError(
            f"the state has {', '.join(map(repr, unknown))}, which is none of the streams "
            f"{', '.join(map(repr, streams))}: give one entry per stream, named like it"
        )
    if request.save_id is not None and len(streams) > 1:
        raise UsageError("save_id= names one checkpoint of one stream: load each by itself")
    return Wanted(streams, together, step, request.save_id, session.run_id, tuple(map(str, state)))


def check_same(asked: Sequence[Wanted]) -> Wanted:
    """What all ranks want, with the keys of all; they all raise if they differ in it."""
    first = asked[0]
    for rank, each in enumerate(asked):
        if each.run_id != first.run_id:
            raise UsageError(
                "the ranks have opened their engines apart: call Engine.open on all ranks "
                "together, after init_process_group"
            )
        if (each.streams, each.together, each.step, each.save_id) != (
            first.streams, first.together, first.step, first.save_id,
        ):  # fmt: skip
            raise UsageError(
                f"the ranks ask for different checkpoints: rank 0 for step {first.step} of stream "
                f"{_names(first.streams)}, rank {rank} for step {each.step} of stream "
                f"{_names(each.streams)}"
            )
    keys = dict.fromkeys(key for each in asked for key in each.keys)
    return replace(first, keys=tuple(keys))


def agree(
    session: Session,
    ranks: Ranks,
    asked: Wanted,
    failed: Sequence[Refusal],
    until_s: float | None = None,
) -> Chosen:
    """What to restore, the same on all ranks. Collective.

    Args:
        session: This rank's.
        ranks: Those that load.
        asked: From :func:`check_same`.
        failed: What was tried already; what is not final could not be read, and is tried again.
        until_s: Until when, by the monotonic clock; None: nothing has to be.

    Raises:
        TierUnavailableError: One could not be read until then.
    """
    unread = [refusal for refusal in failed if not refusal.final]
    exclude = frozenset(refusal.save_id for refusal in failed if refusal.final)
    known: dict[str, tuple[Manifest, ...]] = {}
    # A job that goes on saves faster than this reads, perhaps: what it adds is not run after.
    tried = [each.step for each in failed if each.step is not None]

    failpoints.reach("load.choose")

    def choose() -> Chosen:
        wait_s = session.config.recovery.wait_s
        end_s = until_s or time.monotonic() + wait_s
        others, held = session.history.others(), None
        time.sleep(POLL_S if until_s is not None else 0.0)
        while True:
            held = read_everywhere(session.client, others, held)
            now = _with_streams(asked, held)
            plans = plan_common(
                held.holdings, now.streams, step=now.step, save_id=now.save_id, exclude=exclude,
                unreachable=held.unreachable, up_to=min(tried, default=math.inf),
                own=session.history.attempt_id,
            )  # fmt: skip
            # An older step is settled for only when there is nothing left to wait for. After a
            # damaged candidate tiers and hosts have had their time already.
            over = time.monotonic() >= end_s
            chosen = {plan.chosen.manifest.save_id for plan in plans if plan.chosen is not None}
            again = [each for each in unread if each.save_id in chosen]
            # A tier that is away may have it still; what a silent host had is settled for as ever.
            if over and (missed := again or (unread if held.is_away else [])):
                raise _unread_error(missed[0], wait_s)
            if over or again or not held.should_wait(plans) or (failed and until_s is None):
                break
            time.sleep(POLL_S)
        if now.step is None and held.should_wait(plans):
            log_not_asked(plans, wait_s)
        for plan in plans:
            log_warnings(plan)
            known[plan.stream] = tuple(each.manifest for each in plan.candidates)
        return Chosen(
            tuple(replace(plan, candidates=()) for plan in plans),
            now.together,
            {s: tuple(m.step for m in manifests) for s, manifests in known.items()},
            {},
        )

    chosen = ranks.from_coordinator(choose)
    chosen.known = known
    return chosen


def _unread_error(unread: Refusal, wait_s: float) -> TierUnavailableError:
    return TierUnavailableError(
        f"step {unread.step} ({unread.save_id}) could not be read within {wait_s:g} s "
        f"(recovery.wait), and nothing says that it is damaged: {unread.reason}\nNothing was "
        "passed over. Load again once it can be read, or go back to an older one for good with "
        "engine.load(state, abandon_newer=True)",
        save_id=unread.save_id,
    )


def _with_streams(asked: Wanted, held: AllHoldings) -> Wanted:
    """Who names no stream, and gives one entry per stream that there is, means these."""
    if asked.together or asked.streams != (DEFAULT_STREAM,) or not asked.keys:
        return asked
    tiers = [tier for each in held.holdings for tier in each.tiers]
    there = {fact.stream for tier in tiers for fact in tier.manifests}
    if DEFAULT_STREAM in there or not there.issuperset(asked.keys):
        return asked
    return replace(asked, streams=tuple(sorted(asked.keys)), together=True)


def nothing_or_raise(
    request: LoadRequest, chosen: Chosen, failed: Sequence[Refusal], *, written: bool
) -> None:
    """Return if there is nothing to restore, for certain or by the caller's wish.

    Raises:
        NoRecoverableCheckpointError: There is, or may be.
        NotFoundError: There is no checkpoint of the wanted step.
    """
    plans = _with_failed(chosen.plans, failed)
    for plan in plans:
        if plan.sides:
            raise fork_error(plan)
    refused = any(plan.refused for plan in plans)
    if not refused and request.step is None and request.save_id is None:
        some = any(chosen.steps[plan.stream] or plan.abandoned for plan in plans)
        if request.fresh_start or not (some or any(plan.incomplete for plan in plans)):
            return
    error = _error(plans, chosen, request)
    if written:
        error = type(error)(error.message + UNDEFINED, **error.fields)
    raise error


def _with_failed(plans: Sequence[RecoveryPlan], failed: Sequence[Refusal]) -> list[RecoveryPlan]:
    """The plans with why each that was tried failed, also of those that are gone meanwhile."""
    reasons = {refusal.save_id: refusal for refusal in failed}
    found = [
        replace(plan, refused=tuple(reasons.pop(each.save_id, each) for each in plan.refused))
        for plan in plans
    ]
    found[0] = replace(found[0], refused=(*reasons.values(), *found[0].refused))
    return found


def _error(plans: Sequence[RecoveryPlan], chosen: Chosen, request: LoadRequest) -> TieredCkptError:
    step = request.step
    if not chosen.together:
        return not_recoverable(plans[0], step, request.save_id)
    lines = []
    for plan in plans:
        steps = chosen.steps[plan.stream]
        lines.append(f"stream {plan.stream!r} has {_steps(steps)}")
        lines += [f"  refused step {r.step} ({r.save_id}): {r.reason}" for r in plan.refused]
    lines += dict.fromkeys(f"not asked: {tier}" for plan in plans for tier in plan.incomplete)
    refused = [(r.save_id, r.step, r.reason) for plan in plans for r in plan.refused]
    what = f"step {step}" if step is not None else "no step"
    text = f"the streams {_names(chosen.streams)} cannot be restored together: "
    if step is not None:
        text += f"not all of them have {what}:\n  "
    else:
        text += "they have no step in common that can be restored:\n  "
    text += "\n  ".join(lines)
    if step is None and not refused:
        text += (
            "\nLoad each stream by itself (and take care that they fit together), or begin all of "
            "them anew with engine.load(..., fresh_start=True)"
        )
    if step is not None and not refused and not any(plan.incomplete for plan in plans):
        return NotFoundError(text, key=what)
    return NoRecoverableCheckpointError(
        text,
        refused=refused,
        incomplete=list(dict.fromkeys(t for plan in plans for t in plan.incomplete)),
    )


def _steps(steps: Sequence[int]) -> str:
    if not steps:
        return "no checkpoint that can be restored"
    more = f" and {len(steps) - STEPS_SHOWN} older ones" if len(steps) > STEPS_SHOWN else ""
    return f"step {', '.join(map(str, steps[:STEPS_SHOWN]))}{more}"


def _names(streams: Iterable[str]) -> str:
    return ", ".join(map(repr, streams))
