"""Asks an agent to copy the newest checkpoints to tiers now, and polls its progress.

The agent fills all tiers at the same time, one thread each, so that none waits for one that fails.
Which tiers, and how long one that fails is waited for: :mod:`tieredckpt.policy.schedule`.
"""

from __future__ import annotations

import contextlib
import itertools
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType

from tieredckpt.errors import NotFoundError, UsageError
from tieredckpt.policy.schedule import ends_flush
from tieredckpt.rpc.agent_client import AgentClient
from tieredckpt.rpc.messages.agent import AskTroubles, Flush, FlushedSave, Level

POLL_S, POLL_MAX_S = 0.05, 0.5
"""The interval of polls grows: all ranks of a host may wait at the same time."""
DEADLINE_MAX_S = 1e9
"""The agent accepts no longer one."""
QUIET_S = 10.0
"""A tier that fails, or that waits, for so long is not waited for."""
WRITE_OUT_S = 30.0
"""As long may a checkpoint be written out after its last byte was read (fsync, a slow link)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlushReport:
    """The progress of a flush.

    Attributes:
        tiers: The tiers that are filled, the surest first: this host's own, then shared ones.
        tier: The last of them that holds all of it; where none does, the last one.
        steps: By stream, the step of its newest checkpoint in memory.
        levels: By stream, the level of that checkpoint in ``tier``; "done": this host's part is
            there, and in a shared tier the checkpoint is complete. "superseded": it was deleted
            from the tier since, or shed.
        errors: By tier that does not hold all of it, why not.
        copied_bytes: By this host since the request, to all tiers.
        total_bytes: What this host had to copy to all tiers at the request.
        seconds: Since the request.
    """

    tiers: Sequence[str]
    tier: str
    steps: Mapping[str, int]
    levels: Mapping[str, Level]
    errors: Mapping[str, str]
    copied_bytes: int
    total_bytes: int
    seconds: float

    @property
    def done(self) -> bool:
        """Whether all streams are done in all of ``tiers``."""
        return not self.errors


class Terminated(BaseException):
    """SIGTERM came. Not an Exception, since nothing on the way is to handle it."""


@contextlib.contextmanager
def raises_on_sigterm() -> Iterator[None]:
    """Within it SIGTERM raises Terminated, if it would end this process there and then.

    A handler that acts as another one has it in ``stands_for``; while its ``is_same_notice()`` is
    true, the signal is ignored.

    A wait then ends at once. The caller reports it, and ends the process by that signal. A second
    SIGTERM ends it, too. Changes nothing outside of the main thread, where Python handles signals.
    """
    handler = signal.getsignal(signal.SIGTERM)
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or getattr(handler, "stands_for", handler) is not signal.SIG_DFL:
        yield
        return
    came = False

    def terminate(number: int, frame: FrameType | None) -> None:
        nonlocal came
        if callable(handler) and handler.is_same_notice():  # type: ignore[attr-defined]
            return
        came = True
        signal.signal(number, signal.SIG_DFL)
        raise Terminated

    signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if came else handler)
    if came:  # within a destructor, for example, from which nothing is raised
        raise Terminated


def check_deadline(deadline_s: float | None) -> None:
    """Raise UsageError unless this is None or a number of seconds from 0 to DEADLINE_MAX_S."""
    if deadline_s is not None and not 0 <= deadline_s <= DEADLINE_MAX_S:
        raise UsageError(f"deadline_s is {deadline_s!r}: pass the seconds that are left")


def flush_and_wait(
    client: AgentClient,
    tier: str | None,
    deadline_s: float | None,
    *,
    namespace: str | None = None,
    on_report: Callable[[FlushReport], object] = lambda report: None,
    while_moving: bool = False,
) -> FlushReport:
    """Flush, and return when it has ended or ``deadline_s`` has passed.

    ``tier``: None for all that are not too slow; one of them that fails is waited for as
    :func:`tieredckpt.policy.schedule.ends_flush` decides. ``while_moving``: none is too slow, it
    also returns when no bytes move, and no agent is started.

    Calls ``on_report`` after each poll. Raises as :func:`tieredckpt.agent.status.flush`, and
    AgentError if the agent stops answering until ``deadline_s`` (or the client's own deadline, if
    that is shorter).
    """
    check_deadline(deadline_s)
    began_s = time.monotonic()

    def left_s() -> float | None:
        return None if deadline_s is None else max(0.0, deadline_s - (time.monotonic() - began_s))

    if while_moving:  # one that is stopped is asked once
        client.call(AskTroubles(), within_s=min(QUIET_S, left_s() or 0.0), revive=False)
    # Before the request: a small checkpoint may be copied before the reply comes.
    totals = _spilled(client, namespace, left_s(), revive=not while_moving)
    request = Flush(tier=tier or "", left_s=None if while_moving else deadline_s)
    asked = client.call(request, namespace, within_s=left_s(), revive=not while_moving)
    copied, pause_s, moved_s = 0, POLL_S, time.monotonic()
    levels: dict[str, dict[str, Level]] = {name: {} for name in asked.tiers}
    reasons: dict[tuple[str, str], str] = {}  # the last ones: between two tries there is none
    works_s = dict.fromkeys(asked.tiers, moved_s)
    while True:
        for name, save in itertools.product(asked.tiers, asked.saves):
            level, reason, quiet_s = _level(
                client, name, save, namespace, left_s(), revive=not while_moving
            )
            levels[name][save.stream] = level
            what = f"step {save.step} of stream {save.stream!r}"
            if reason or (name, save.stream) not in reasons:  # else the last one stays
                reasons[name, save.stream] = f"{what}: {reason or 'not copied yet'}"
            if quiet_s is not None:
                works_s[name] = time.monotonic()
                if quiet_s < (WRITE_OUT_S if level == "active" else QUIET_S):
                    moved_s = works_s[name]
        before, totals = totals, _spilled(client, namespace, left_s(), revive=not while_moving)
        copied += sum(_grown(before.get(name, 0), totals.get(name, 0)) for name in asked.tiers)
        errors = {
            name: "; ".join(reasons[name, stream] for stream, at in found.items() if at != "done")
            for name, found in levels.items()
            if set(found.values()) != {"done"}
        }
        best = [name for name in asked.tiers if name not in errors] or asked.tiers
        report = FlushReport(
            tiers=asked.tiers,
            tier=best[-1],
            steps={save.stream: save.step for save in asked.saves},
            levels=dict(levels[best[-1]]),
            errors=errors,
            copied_bytes=copied,
            total_bytes=asked.remaining_bytes,
            seconds=time.monotonic() - began_s,
        )
        on_report(report)
        now_s = time.monotonic()
        failing_s = {name: now_s - at_s for name, at_s in works_s.items()}
        late = deadline_s is not None and report.seconds >= deadline_s
        quiet = while_moving and now_s - moved_s >= QUIET_S
        if late or quiet or ends_flush(levels, failing_s, deadline_s):
            return report
        time.sleep(pause_s if deadline_s is None else min(pause_s, left_s() or 0.0))
        pause_s = min(2 * pause_s, POLL_MAX_S)


def _level(
    client: AgentClient,
    tier: str,
    save: FlushedSave,
    namespace: str | None,
    left_s: float | None,
    *,
    revive: bool,
) -> tuple[Level, str | None, float | None]:
    """The level of a checkpoint in the tier, why it is not "done", and since when no bytes were
    read for the tier, in seconds; None: it fails.
    """
    try:
        found = client.progress(
            save.save_id, namespace=namespace, awaited=tier, within_s=left_s, revive=revive
        )
    except NotFoundError as error:
        if error.fields.get("what") != "save":
            raise
        return "superseded", "it has been deleted everywhere since", None
    level = found.levels.get(tier, "not_scheduled")
    if level == "not_scheduled":
        # It was scheduled at the request, so it is not waited for any more.
        return "superseded", f"it is neither in {tier} any more nor scheduled for it", None
    return level, found.errors.get(tier), found.quiet_s.get(tier)


def _grown(before: int, now: int) -> int:
    """How much was counted since; an agent that was restarted meanwhile counts from 0 again."""
    return now - before if now >= before else now


def _spilled(
    client: AgentClient, namespace: str | None, left_s: float | None, *, revive: bool
) -> dict[str, int]:
    """By tier, the bytes that were copied into it since the agent started."""
    name = namespace or client.namespace
    return {
        tier.name: tier.spilled_bytes_total
        for found in client.status(within_s=left_s, revive=revive).namespaces
        if found.name == name
        for tier in found.tiers
    }
