"""The choice of the checkpoint that ``engine.load`` restores, before the first byte is read.

The coordinator asks its agent and all other hosts, waits for tiers and hosts that do not answer,
chooses, and broadcasts the choice.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace

import torch.distributed as dist
from torch.distributed.checkpoint.planner import LoadPlanner

from tieredckpt import failpoints
from tieredckpt.dcp.job.history import consent_text
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
    log_waiting,
    log_warnings,
    read_everywhere,
)
from tieredckpt.recovery.plan import (
    Candidate,
    RecoveryPlan,
    Refusal,
    fork_error,
    naming,
    plan_common,
)

UNDEFINED = "; the contents of the tensors that were to be loaded are undefined"
STEPS_SHOWN = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRequest:
    """The arguments of ``engine.load``."""

    step: int | None
    save_id: str | None
    stream: str | Sequence[str]
    strict: bool
    planner: LoadPlanner | None
    process_group: dist.ProcessGroup | None
    fresh_start: bool
    abandon_newer: bool
    again: bool


@dataclass(frozen=True, slots=True)
class Wanted:
    """The request of one rank; all ranks must ask for the same, but for the keys."""

    streams: tuple[str, ...]
    together: bool
    """The state has one entry per stream; False: it is the state of the one stream."""
    step: int | None
    save_id: str | None
    run_id: str
    keys: tuple[str, ...]


@dataclass(slots=True)
class Chosen:
    """The choice that the coordinator broadcasts."""

    plans: tuple[RecoveryPlan, ...]
    """One per stream, each without its candidates; either all of them chose, or none."""
    together: bool
    steps: Mapping[str, tuple[int, ...]]
    """By stream, the steps that could be restored, newest first."""
    known: Mapping[str, tuple[Manifest, ...]]
    """On the coordinator, the manifests of these steps; empty elsewhere."""

    @property
    def streams(self) -> tuple[str, ...]:
        """In the order in which they are loaded."""
        return tuple(plan.stream for plan in self.plans)

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        """One per stream, in their order; empty if there is nothing to restore."""
        return tuple(plan.chosen for plan in self.plans if plan.chosen is not None)


def wanted(session: Session, state: Mapping[str, object], request: LoadRequest) -> Wanted:
    """The request of this rank. Raises UsageError if it is not valid.

    Raises AgentError: The agent of this host does not answer and cannot be started.
    """
    session.check()
    if not isinstance(state, MutableMapping):
        raise UsageError(
            "engine.load needs a dict that names what is to be restored, for example "
            f'{{"model": model, "optimizer": optimizer}}; this is a {type(state).__name__}'
        )
    session.background_saves.wait_idle(session.config.save.wait_timeout_s)
    if not session.read_only:
        # Other hosts cannot start this one's agent, and a new agent knows neither its tiers nor
        # perhaps the namespace: it is informed here, before the coordinator asks all hosts.
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
    """The request of all ranks, with the keys of all. Raises UsageError if they differ."""
    first = asked[0]
    for rank, each in enumerate(asked):
        if each.run_id != first.run_id:
            raise UsageError(
                "the ranks have opened their engines apart: call Engine.open on all ranks "
                "together, after init_process_group"
            )
        if replace(each, keys=first.keys) != first:
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
    """Choose the checkpoint to restore, the same on all ranks. Collective.

    Args:
        session: This rank's.
        ranks: Those that load.
        asked: From :func:`check_same`.
        failed: Checkpoints that were tried; one that is not final could not be read, and is tried
            again.
        until_s: Until when, by the monotonic clock; None: none has to be tried again.

    Raises:
        TierUnavailableError: One could not be read until then.
    """
    unread = [refusal for refusal in failed if not refusal.final]
    exclude = frozenset(refusal.save_id for refusal in failed if refusal.final)
    known: dict[str, tuple[Manifest, ...]] = {}
    # A running job may save faster than this reads: the checkpoints that it adds are ignored.
    tried = [each.step for each in failed if each.step is not None]

    failpoints.reach("load.choose")

    def choose() -> Chosen:
        wait_s = session.config.recovery.wait_s
        end_s = until_s or time.monotonic() + wait_s
        others, answers = session.history.others(), None
        time.sleep(POLL_S if until_s is not None else 0.0)
        while True:
            first, answers = answers is None, read_everywhere(session.client, others, answers)
            now = _with_streams(asked, answers)
            plans = plan_common(
                answers.holdings, now.streams, step=now.step, save_id=now.save_id, exclude=exclude,
                unreachable=answers.unreachable, up_to=min(tried, default=math.inf),
                own=session.history.attempt_id,
            )  # fmt: skip
            # An older step is accepted only if no tier or host may still answer. After a damaged
            # candidate, tiers and hosts have had their time already.
            over = time.monotonic() >= end_s
            chosen = {plan.chosen.manifest.save_id for plan in plans if plan.chosen is not None}
            again = [each for each in unread if each.save_id in chosen]
            # A tier that does not answer may still have it. A host is not waited for again.
            if over and (missed := again or (unread if answers.is_away else [])):
                raise _unread_error(missed[0], wait_s)
            if over or again or not answers.should_wait(plans) or (failed and until_s is None):
                break
            if first and until_s is None:
                log_waiting(plans, end_s - time.monotonic())
            time.sleep(POLL_S)
        # A tier that is not waited for is named, too: its URL may be mistyped.
        away = any(not tier.available for tier in answers.holdings[0].tiers)
        if now.step is None and (away or answers.should_wait(plans)):
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


def check_roll_back(
    request: LoadRequest, plans: Sequence[RecoveryPlan], *, read_only: bool
) -> None:
    """Whether the ranks may resume before newer checkpoints; before the first byte is read.

    Raises UsageError: The script did not agree, or these were saved after the same roll-back.
    """
    for plan in plans if not read_only else ():
        if plan.chosen is None or not plan.newer:
            continue
        chosen = plan.chosen.manifest
        if not request.abandon_newer:
            raise UsageError(consent_text(chosen, plan.newer))
        if plan.regained and not request.again:
            names = [naming(each.step, each.save_id) for each in plan.regained[:STEPS_SHOWN]]
            raise UsageError(
                f"stream {plan.stream!r} went back to step {chosen.step} before, and a save would "
                f"abandon the {len(plan.regained)} checkpoint(s) since: {', '.join(names)}. "
                "To continue from the newest (as a restarted script should), call "
                "engine.load(state); to go back all the same, add again=True. Nothing was lost"
            )


def _unread_error(unread: Refusal, wait_s: float) -> TierUnavailableError:
    return TierUnavailableError(
        f"step {unread.step} ({unread.save_id}) could not be read within {wait_s:g} s "
        f"(recovery.wait), and there is no sign of damage: {unread.reason}\nNothing was "
        "passed over. Load again once it can be read, or go back to an older one for good with "
        "engine.load(state, abandon_newer=True)",
        save_id=unread.save_id,
    )


def _with_streams(asked: Wanted, answers: AllHoldings) -> Wanted:
    """``asked``, for the streams that the state's keys name, if it names no stream itself."""
    if asked.together or asked.streams != (DEFAULT_STREAM,) or not asked.keys:
        return asked
    tiers = [tier for each in answers.holdings for tier in each.tiers]
    there = {fact.stream for tier in tiers for fact in tier.manifests}
    if DEFAULT_STREAM in there or not there.issuperset(asked.keys):
        return asked
    return replace(asked, streams=tuple(sorted(asked.keys)), together=True)


def nothing_or_raise(
    request: LoadRequest, chosen: Chosen, failed: Sequence[Refusal], *, written: bool
) -> None:
    """Return if there is certainly no checkpoint, or the caller wants a fresh start.

    Raises:
        NoRecoverableCheckpointError: There is one, or may be.
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
    """The plans with the errors of checkpoints that were tried, also of deleted ones."""
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
    details = []
    for plan in plans:
        details.append(f"stream {plan.stream!r} has {_steps(chosen.steps[plan.stream])}")
        details += [f"  refused step {r.step} ({r.save_id}): {r.reason}" for r in plan.refused]
    incomplete = list(dict.fromkeys(tier for plan in plans for tier in plan.incomplete))
    details += [f"not asked: {tier}" for tier in incomplete]
    refused = [(r.save_id, r.step, r.reason) for plan in plans for r in plan.refused]
    why = f"not all of them have step {step}"
    if step is None:
        why = "they have no step in common that can be restored"
    text = f"the streams {_names(chosen.streams)} cannot be restored together: {why}:\n  "
    text += "\n  ".join(details)
    if step is None and not refused and not incomplete:
        text += (
            "\nLoad each stream by itself (and take care that they fit together), or begin all of "
            "them anew with engine.load(..., fresh_start=True)"
        )
    if step is not None and not refused and not incomplete:
        return NotFoundError(text, key=f"step {step}")
    return NoRecoverableCheckpointError(text, refused=refused, incomplete=incomplete)


def _steps(steps: Sequence[int]) -> str:
    if not steps:
        return "no checkpoint that can be restored"
    more = f" and {len(steps) - STEPS_SHOWN} older ones" if len(steps) > STEPS_SHOWN else ""
    return f"step {', '.join(map(str, steps[:STEPS_SHOWN]))}{more}"


def _names(streams: Iterable[str]) -> str:
    return ", ".join(map(repr, streams))
