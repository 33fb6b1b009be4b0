"""The attempts of one namespace: which is the newest, opening the next, refusing older ones.

A *run* is one start of all ranks together (``Engine.open``). Its process groups may each open
attempts, one after another; only an attempt of another run makes a run's saves stale for good.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable, Sequence

import msgspec

from tieredckpt import failpoints
from tieredckpt.agent.spill import ATTACH_WAIT_S, TierWorker
from tieredckpt.agent.stream_owners import StreamOwners, check_number
from tieredckpt.errors import StaleAttemptError
from tieredckpt.format.manifest import (
    AttemptId,
    AttemptRecord,
    Manifest,
    decode_manifest,
    encode_attempt,
)
from tieredckpt.policy.timeline import newest_attempt, next_attempt
from tieredckpt.tiers.catalog import Catalog, attempt_key
from tieredckpt.transport.messages import Commit, OpenAttempt

LAST_WAIT_S = 1.0
"""What is left for a tier to answer when the ones before it took all the time."""
_ANY_ID = "g"
"""Larger than every id: of a run's newest attempt only the number counts."""
_KEY = re.compile(r"attempts/([0-9]{8,18})-[0-9a-f]{32}", re.ASCII)
UNSEEN_ATTEMPTS = 1000
"""Skipped in the numbering while a tier, and so the attempts that it holds, cannot be read."""

log = logging.getLogger(__name__)


class Attempts:
    """High-water mark and records. Thread-safe.

    Args:
        namespace: Its name.
        lock: The node's lock.
        catalog: Of the memory tier.
        workers: The tiers at this moment.
        is_live: Whether a session's process still holds its lease.
        elsewhere: Manifests that only other hosts hold.
        now_s: Wall clock, for people only.
    """

    def __init__(
        self,
        namespace: str,
        lock: threading.RLock,
        catalog: Catalog,
        workers: Callable[[], tuple[TierWorker, ...]],
        is_live: Callable[[str], bool],
        elsewhere: Callable[[], tuple[Manifest, ...]] = tuple,
        *,
        now_s: Callable[[], float] = time.time,
    ) -> None:
        self._namespace = namespace
        self._lock = lock
        self._catalog = catalog
        self._workers = workers
        self._owners = StreamOwners(is_live)
        self._elsewhere = elsewhere
        self._now_s = now_s

    def known(self) -> tuple[AttemptRecord, ...]:
        """The records that memory and the attached tiers hold, each once."""
        found = {(record.number, record.id): record for record in self._catalog.attempts()}
        for catalog in self._catalogs():
            found.update({(r.number, r.id): r for r in catalog.attempts()})
        return tuple(found.values())

    def damaged(self) -> dict[str, bytes]:
        """What is left of the records that cannot be read anywhere, by key."""
        intact = {attempt_key(record.number, record.id) for record in self.known()}
        found = self._catalog.bad_attempts()
        for catalog in self._catalogs():
            found.update(catalog.bad_attempts())
        return {key: data for key, data in found.items() if key not in intact}

    def _highest_damaged(self) -> int:
        """The key names the number, so it is not given a second time, nor are older ones served."""
        numbers = [int(named[1]) for key in self.damaged() if (named := _KEY.fullmatch(key))]
        return max(numbers, default=0)

    def _catalogs(self) -> list[Catalog]:
        return [c for worker in self._workers() if (c := worker.catalog) is not None]

    def newest_number(self) -> int:
        """The highest attempt number seen, 0 if none."""
        with self._lock:
            newest = newest_attempt(self._catalog.manifests(), self.known())
        return newest.number if newest is not None else 0

    def _unseen(self) -> list[str]:
        """Names of the tiers that do not answer; one deadline for all, since all try at once."""
        until_s = time.monotonic() + ATTACH_WAIT_S
        workers = self._workers()
        return [
            worker.spec.name
            for worker in workers
            if worker.attach(max(LAST_WAIT_S, until_s - time.monotonic())) is None
        ]

    def open(self, request: OpenAttempt) -> bytes:
        """The record of a new attempt, or of the one with this id; encoded.

        Waits until each tier answered or failed: what it holds must not turn out to be newer.

        Raises:
            StaleAttemptError: Another run has taken over from the caller's.
            NotFoundError: A checkpoint to go on from does not exist any more.
            UsageError: It belongs to another stream, or it is named for a save and another live
                session of the run saves into that stream.
        """
        unseen = self._unseen()
        with self._lock:
            attempts = self.known()
            for record in attempts:
                if record.id == request.attempt_id:
                    return encode_attempt(record)
            manifests = {each.save_id: each for each in (*_named(request), *self._elsewhere())}
            manifests.update({each.save_id: each for each in self._catalog.manifests()})
            for catalog in self._catalogs():
                manifests.update({each.save_id: each for each in catalog.manifests()})
            self._check_not_taken_over(request, attempts, tuple(manifests.values()))
            streams = [base.stream for base in request.bases]
            if request.cause == "save":
                for stream in streams:
                    self._owners.check(stream, request.run, request.session_id)
            record = next_attempt(
                attempts,
                tuple(manifests.values()),
                request.attempt_id,
                {base.stream: base.save_id for base in request.bases},
                self._now_s(),
                namespace=self._namespace,
                run=request.run,
            )
            if unseen and not self._catalog.attempts():
                log.warning(
                    "namespace %s: the attempts in %s are unknown, %d numbers are skipped",
                    self._namespace, ", ".join(unseen), UNSEEN_ATTEMPTS,
                )  # fmt: skip
                record = msgspec.structs.replace(record, number=record.number + UNSEEN_ATTEMPTS)
            if record.number <= (damaged := self._highest_damaged()):
                log.warning(
                    "namespace %s: the record of attempt %d is damaged, its number is skipped: "
                    "what it began from is not known any more", self._namespace, damaged,
                )  # fmt: skip
                record = msgspec.structs.replace(record, number=damaged + 1)
            data = encode_attempt(record)
            failpoints.reach("agent.attempt.before_record")
            self._catalog.put_attempt(data)
            failpoints.reach("agent.attempt.after_record")
            if request.cause == "load":
                self._owners.release(streams)
        log.info("namespace %s: attempt %d (%s)", self._namespace, record.number, record.id)
        return data

    def check_owner(self, request: OpenAttempt) -> None:
        """Before a request is forwarded: what only this host can know of its sessions.

        Raises:
            UsageError: Another live session of the run saves into a stream that it names.
        """
        if request.cause == "save":
            with self._lock:
                for base in request.bases:
                    self._owners.check(base.stream, request.run, request.session_id)

    def opened_elsewhere(self, request: OpenAttempt) -> None:
        """The leader has opened the attempt that a process of this host asked for."""
        if request.cause == "load":
            with self._lock:
                self._owners.release(base.stream for base in request.bases)

    def _check_not_taken_over(
        self,
        request: OpenAttempt,
        attempts: Sequence[AttemptRecord],
        manifests: Sequence[Manifest],
    ) -> None:
        """A run that has begun and that another one took over from may not come back."""
        mine = max([request.known, *(r.number for r in attempts if r.run == request.run)])
        if mine:
            self._check_newest(AttemptId(mine, _ANY_ID), request.run, attempts, manifests)
        newest = max(attempts, key=lambda record: (record.number, record.id), default=None)
        if request.seen is None or newest is None or newest.run == request.run:
            return
        if newest.number > request.seen:
            raise StaleAttemptError(
                f"attempt {newest.number} of namespace {self._namespace} was opened by another "
                "process while this one loaded: if it is the one that goes on, this one must stop; "
                "else load again",
                attempt=request.seen,
                newest_attempt=newest.number,
                same_run=False,
            )

    def look(self) -> None:
        """Before :meth:`check`, not under the lock: wait for the tiers if memory knows no attempt.

        Then memory was lost, and only they can tell that somebody has taken over since.
        """
        if not self._catalog.attempts():
            self._unseen()

    def check(self, manifest: Manifest, request: Commit) -> None:
        """Whether this session may add this checkpoint to its stream now.

        Raises:
            StaleAttemptError: A newer attempt has taken over. Fields ``attempt``,
                ``newest_attempt`` and ``same_run``: whether the newest one was opened by other
                ranks of the run, and may be adopted.
            UsageError: Another live session of the run saves into the stream.
        """
        held = self._catalog.manifests()
        self._check_newest(manifest.attempt, request.run, self.known(), held, own=True)
        self._owners.check(manifest.stream, request.run, request.session_id)
        check_number(manifest, held)

    def committed(self, manifest: Manifest, request: Commit) -> None:
        """The session owns the stream from now on."""
        self._owners.committed(manifest.stream, request.run, request.session_id)

    def _check_newest(
        self,
        mine: AttemptId,
        run: str,
        attempts: Sequence[AttemptRecord],
        manifests: Sequence[Manifest],
        *,
        own: bool = False,
    ) -> None:
        """Refuse ``mine`` if there is a newer attempt; one of this run counts if ``own``."""
        newest = newest_attempt(manifests, attempts)
        known = (newest.number, newest.id) if newest is not None else (0, "")
        # An id is larger than "": of a damaged record only the number counts.
        number, identity = max(known, (self._highest_damaged(), ""))
        if (mine.number, mine.id) >= (number, identity):
            return
        record = next((r for r in attempts if (r.number, r.id) == (number, identity)), None)
        same_run = record is not None and record.run == run
        if same_run and not own:
            return
        if same_run:
            why = "it was opened by other ranks of this run"
        elif record is None:
            why = "its record is lost, so that it may be another run's: restart the job"
        else:
            why = "this process is left over from before a restart and must stop"
        raise StaleAttemptError(
            f"attempt {number} of namespace {self._namespace} has taken over from "
            f"attempt {mine.number}: {why}",
            attempt=mine.number,
            newest_attempt=number,
            same_run=same_run,
        )


def _named(request: OpenAttempt) -> list[Manifest]:
    """Manifests that came with the request: what was loaded may lie on other hosts only.

    Raises:
        IntegrityError: One is damaged.
    """
    return [decode_manifest(base.manifest) for base in request.bases if base.manifest]
