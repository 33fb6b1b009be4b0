"""Asks an agent to copy the newest checkpoints to tiers now, and polls its progress."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType

from tieredckpt.errors import NotFoundError, TieredCkptError, UsageError
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
_OVER: tuple[Level, ...] = ("done", "failed", "superseded")


@dataclass(frozen=True, slots=True, kw_only=True)
class FlushReport:
    """The progress of a flush.

    Attributes:
        tier: Name of the tier.
        steps: By stream, the step of its newest checkpoint in memory.
        levels: By stream, the level of that checkpoint in the tier; "done": this host's part is
            there, and in a shared tier the checkpoint is complete.
        errors: By stream, why it is not "done". "superseded": it was deleted from the tier since,
            or shed.
        copied_bytes: By this host since the request.
        total_bytes: What this host had to copy at the request.
        seconds: Since the request.
    """

    tier: str
    steps: Mapping[str, int]
    levels: Mapping[str, Level]
    errors: Mapping[str, str]
    copied_bytes: int
    total_bytes: int
    seconds: float

    @property
    def done(self) -> bool:
        """Whether all streams are done."""
        return all(level == "done" for level in self.levels.values())


class Terminated(BaseException):
    """SIGTERM came. Not an Exception, since nothing on the way is to handle it."""


@contextlib.contextmanager
def raises_on_sigterm() -> Iterator[None]:
    """Within it SIGTERM raises Terminated, if it would end this process there and then.

    A wait then ends at once. The caller reports it, and ends the process by that signal. A second
    SIGTERM ends it, too. Changes nothing outside of the main thread, where Python handles signals.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    came = False

    def terminate(number: int, frame: FrameType | None) -> None:
        nonlocal came
        came = True
        signal.signal(number, signal.SIG_DFL)
        raise Terminated

    signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
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
    """Flush, and return when it has ended or ``deadline_s`` has passed; ``while_moving``: also when
    the tier fails, or no bytes move.

    Calls ``on_report`` after each poll. Raises as :func:`tieredckpt.agent.status.flush`, and
    AgentError if the agent stops answering until ``deadline_s`` (or the client's own deadline, if
    that is shorter).
    """
    check_deadline(deadline_s)
    began_s = time.monotonic()

    def left_s() -> float | None:
        return None if deadline_s is None else max(0.0, deadline_s - (time.monotonic() - began_s))

    # Before the request: a small checkpoint may be copied before the reply comes.
    totals = _spilled(client, namespace, left_s(), revive=not while_moving)
    request = Flush(tier=tier or "", left_s=deadline_s)
    asked = client.call(request, namespace, within_s=left_s(), revive=not while_moving)
    before = totals.get(asked.tier, 0)
    copied, pause_s, moved_s = 0, POLL_S, time.monotonic()
    while True:
        levels: dict[str, Level] = {}
        errors: dict[str, str] = {}
        for save in asked.saves:
            levels[save.stream], error, moves = _level(
                client, asked.tier, save, namespace, left_s(), revive=not while_moving
            )
            moved_s = time.monotonic() if moves else moved_s
            if error is not None:
                errors[save.stream] = error
        now = _spilled(client, namespace, left_s(), revive=not while_moving).get(asked.tier, 0)
        # An agent that was restarted meanwhile counts from 0 again.
        copied, before = copied + (now - before if now >= before else now), now
        report = FlushReport(
            tier=asked.tier,
            steps={save.stream: save.step for save in asked.saves},
            levels=levels,
            errors=errors,
            copied_bytes=copied,
            total_bytes=asked.remaining_bytes,
            seconds=time.monotonic() - began_s,
        )
        on_report(report)
        if all(level in _OVER for level in report.levels.values()):
            return report
        if deadline_s is not None and report.seconds >= deadline_s:
            return report
        if while_moving and time.monotonic() - moved_s >= QUIET_S:
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
) -> tuple[Level, str | None, bool]:
    """The level of a checkpoint in the tier, why it is not "done", and whether bytes move: one that
    is being copied may be written out for long after its last byte was read.
    """
    try:
        found = client.progress(
            save.save_id, namespace=namespace, awaited=tier, within_s=left_s, revive=revive
        )
    except NotFoundError as error:
        if error.fields.get("what") != "save":
            raise
        return "superseded", "it has been deleted everywhere since", False
    quiet_s = found.quiet_s.get(tier)
    level = found.levels.get(tier, "not_scheduled")
    if level == "not_scheduled":
        # It was scheduled at the request, so it is not waited for any more.
        return "superseded", f"it is neither in {tier} any more nor scheduled for it", False
    limit_s = WRITE_OUT_S if level == "active" else QUIET_S
    moves = quiet_s is not None and quiet_s < limit_s
    return level, found.errors.get(tier), moves


def bring_to_tiers(client: AgentClient, tiers: Sequence[str], limit_s: float) -> list[str]:
    """Copy the newest checkpoint of each stream to all ``tiers``, the nearest first.

    Waits ``limit_s`` at most, for each tier while bytes move. The agent goes on afterwards.

    Returns:
        What is not there yet, and why; a sentence for each stream and tier.
    """
    until_s = time.monotonic() + limit_s
    missing = []
    try:  # no agent is started for this, and one that is stopped is asked once
        client.call(AskTroubles(), within_s=min(limit_s, QUIET_S), revive=False)
    except TieredCkptError as error:
        return [str(error)]
    for tier in tiers[1:]:  # at the same time as the first one
        with contextlib.suppress(TieredCkptError):
            left_s = min(QUIET_S, max(0.0, until_s - time.monotonic()))
            client.call(Flush(tier=tier, left_s=0.0), within_s=left_s, revive=False)
    for tier in tiers:
        left_s = max(0.0, until_s - time.monotonic())
        try:
            report = flush_and_wait(client, tier, left_s, while_moving=True)
        except TieredCkptError as error:
            missing.append(f"tier {tier}: {error}")
            continue
        missing += [
            f"step {report.steps[stream]} of stream {stream!r} is not in tier {tier} yet "
            f"({report.errors.get(stream, level)})"
            for stream, level in report.levels.items()
            if level != "done"
        ]
    return missing


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
