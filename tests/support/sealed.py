"""The sealed slots of one host, and what it has heard: for tests of
``agent/cluster/in_doubt.py``."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from types import SimpleNamespace
from typing import Any

import msgspec

from tests.format.samples import hex_id, small_manifest
from tieredckpt.agent.cluster.in_doubt import Fates
from tieredckpt.format.manifest import (
    AttemptId,
    AttemptRecord,
    Manifest,
    SegmentRef,
    StreamBase,
)
from tieredckpt.rpc.messages.agent import SealedBefore


class Slots:
    """Sealed slots as the pool lists them: the segment, and the session of each."""

    def __init__(self) -> None:
        self.sealed: dict[str, str] = {}

    def slots(self) -> tuple[SimpleNamespace, ...]:
        return tuple(
            SimpleNamespace(
                slot_id=segment,
                label=SimpleNamespace(
                    state="sealed", namespace="run", segment_id=segment, session_id=session
                ),
            )
            for segment, session in self.sealed.items()
        )

    def find(self, segment_id: str) -> SimpleNamespace | None:
        return next((s for s in self.slots() if s.label.segment_id == segment_id), None)

    def free(self, slot_id: str) -> bool:
        return self.sealed.pop(slot_id, None) is not None


class Here:
    """One host, and its :attr:`fates`."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1000)
        self.pool = Slots()
        self.known: list[Manifest] = []
        self.damaged: list[str] = []
        """Manifests that cannot be read."""
        opened: list[AttemptRecord] = []
        self.catalog = SimpleNamespace(
            manifests=lambda: tuple(self.known), attempts=lambda: tuple(opened), opened=opened,
            unreadable=lambda: self.damaged,
        )  # fmt: skip
        self.caught_up = True
        """With the hosts of the present run."""
        self.peers = SimpleNamespace(
            active=True, run="a" * 32, has_caught_up=lambda: self.caught_up
        )
        self.restart()

    def restart(self) -> None:
        """Another agent, which knows what is on the host."""
        self.fates = Fates("run", self.pool, self.catalog, self.peers)  # type: ignore[arg-type]

    def overtaken(self, told: Sequence[SealedBefore], keep: int, session: str = "s") -> str | None:
        """What a rank's need of room frees."""
        before = set(self.pool.sealed)
        freed = self.fates.give_overtaken(session, told, keep)
        gone = before - self.pool.sealed.keys()
        assert freed == bool(gone)
        return gone.pop() if gone else None

    def new_id(self) -> str:
        return hex_id(next(self._numbers))

    def seal(self, session: str = "s") -> str:
        """A rank seals a segment; its id."""
        segment = self.new_id()
        self.pool.sealed[segment] = session
        return segment

    def commit(self, segment: str, attempt: AttemptRecord | None = None, **other: Any) -> Manifest:
        """The manifest of a save with this segment arrives."""
        number, ident = (attempt.number, attempt.id) if attempt is not None else (1, hex_id(5))
        made = msgspec.structs.replace(
            small_manifest(),
            save_id=self.new_id(),
            namespace="run",
            attempt=AttemptId(number, ident),
            segments=(SegmentRef(segment, 8192, hex_id(8), "here"),),
            **other,
        )
        self.known.append(made)
        return made

    def begin_run(self, run: str, live: Collection[str]) -> None:
        """Engines are opened; of the processes before, these sessions still live."""
        self.peers.run = run
        self.fates.run_began(run, lambda session: session in live)

    def visit(self, run: str, live: Collection[str]) -> None:
        """Engines are opened beside sessions of the run that rules."""
        self.fates.run_began(run, lambda session: session in live)

    def open_attempt(self, *bases: StreamBase) -> AttemptRecord:
        """The present run opens an attempt, and this host hears of it."""
        opened = self.catalog.opened
        record = AttemptRecord("run", len(opened) + 2, self.new_id(), self.peers.run, bases, 0.0)
        opened.append(record)
        return record
