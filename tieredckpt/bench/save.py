"""``bench save``: how long each kind of save holds up training, and its way through the tiers."""

from __future__ import annotations

import threading
import time
from contextlib import closing
from pathlib import Path

import torch.distributed.checkpoint as dcp

from tieredckpt.bench import state as states
from tieredckpt.bench.rank import Rank
from tieredckpt.bench.settings import ASYNC, CALLS, Level, Result
from tieredckpt.engine import Engine
from tieredckpt.errors import AgentError
from tieredckpt.rpc.agent_client import AgentClient
from tieredckpt.rpc.messages.agent import NamespaceStatus

POLL_S = 0.02
IDLE_WAIT_S = 600.0
"""Longest wait for the tiers after the last save."""


def save(rank: Rank) -> Result:
    """Save ``count`` times with ``async_save``, then with ``dcp.save``. Collective.

    Saves begin ``step_s`` apart. The way of those of ``async_save`` through the tiers is timed.
    """
    settings, stalls = rank.settings, {call: list[float]() for call in CALLS}
    with Engine.open(settings.config or None) as engine:
        watch = Watch(Path(settings.runtime_dir), settings.namespace)
        for step in rank.track(range(1, len(CALLS) * settings.count + 1), "saving"):
            call = CALLS[(step - 1) // settings.count]
            states.change(rank.state, step)
            with rank.timed() as stall:
                if call == ASYNC:
                    watch.begun(step)
                    engine.async_save(dict(rank.state), step)
                else:
                    dcp.save(dict(rank.state), storage_writer=engine.writer(step))
            stalls[call] += stall
            time.sleep(settings.step_s)
            if step == settings.count:
                engine.wait_background()
                if rank.number == 0:
                    watch.wait_idle()
                rank.gather(None)
        levels = watch.stop()
    result = rank.result(stall_s=stalls, levels=levels)
    rank.clean()
    return result


class Watch:
    """Looks every 20 ms where the newest checkpoint is, in a thread.

    A checkpoint that is replaced by a newer one before it gets somewhere does not count there.
    """

    def __init__(self, runtime_dir: Path, namespace: str) -> None:
        self._namespace = namespace
        self._client = AgentClient(runtime_dir)
        self._begun_s: dict[int, float] = {}
        self._levels: dict[str, dict[int, float]] = {}
        self._is_busy = True
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tck-bench", daemon=True)
        self._thread.start()

    def begun(self, step: int) -> None:
        """A save begins now."""
        self._begun_s[step] = time.monotonic()

    def wait_idle(self) -> None:
        """Wait until no tier copies, at most ten minutes."""
        until_s, idle = time.monotonic() + IDLE_WAIT_S, 0
        while idle < 10 and time.monotonic() < until_s:
            idle = 0 if self._is_busy else idle + 1
            time.sleep(2 * POLL_S)

    def stop(self) -> list[Level]:
        """End the thread; what it saw."""
        self._ended.set()
        self._thread.join()
        return [Level(name=name, seconds=found) for name, found in self._levels.items()]

    def _run(self) -> None:
        with closing(self._client) as client:
            while not self._ended.wait(POLL_S):
                try:
                    found = client.status().namespaces
                except AgentError:
                    self._is_busy = False  # nothing to wait for
                    continue
                for namespace in found:
                    if namespace.name == self._namespace:
                        self._record(namespace)

    def _record(self, status: NamespaceStatus) -> None:
        newest = {"memory": status.newest_step}
        busy = False
        if (copies := status.replication) is not None and copies.possible:
            newest["replicated"] = copies.newest_replicated_step
            busy = bool(copies.lag_steps)
        for tier in status.tiers:
            newest[tier.name] = tier.newest_step
            busy |= bool(tier.queued or tier.active_save_id or tier.awaited)
        now_s = time.monotonic()
        for level, step in newest.items():
            steps = self._levels.setdefault(level, {})
            if step is not None and step in self._begun_s:
                steps.setdefault(step, now_s - self._begun_s[step])
        self._is_busy = busy
