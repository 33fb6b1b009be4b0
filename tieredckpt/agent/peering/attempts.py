"""The attempts of one namespace at one agent: who may save, and what an attempt follows.

An attempt is opened before a run's first save and exists with it: until then its record is noted
here and lies nowhere. Who was followed by another run's attempt may not save any more. A fork, two
attempts that do not know of each other, never ends by a number: the run that saves opens an attempt
that follows its own and leaves the other one aside, as a branch (docs/understand/timeline.md).
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait

from tieredckpt import failpoints
from tieredckpt.agent.tiers.worker import TierWorker
from tieredckpt.errors import (
    CapacityError,
    IntegrityError,
    StaleAttemptError,
    TieredCkptError,
    TierUnavailableError,
    UsageError,
)
from tieredckpt.format.manifest import (
    MAX_PARENTS,
    AttemptId,
    AttemptRecord,
    Followed,
    Manifest,
    decode_attempt,
    decode_manifest,
    encode_attempt,
)
from tieredckpt.policy.history import (
    Base,
    Chain,
    next_attempt,
    on_line,
    proven,
    saved_by,
    with_saves,
)
from tieredckpt.rpc.messages.agent import Commit, OpenAttempt
from tieredckpt.storage.catalog import Catalog
from tieredckpt.storage.shared.catalog import SharedCatalog

ATTACH_WAIT_S = 5.0
"""How long opening an attempt, or a reader, waits for a tier to answer for the first time."""
LAST_WAIT_S = 0.1
"""What a tier gets whose turn comes after that: it tries since the first one was asked."""
NOTED_MAX = 1 << 10
"""Records kept of attempts without a checkpoint here; the oldest are forgotten."""

log = logging.getLogger(__name__)


class Attempts:
    """See the module. Thread-safe.

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
        self._opening = threading.Lock()
        self._noted: OrderedDict[str, AttemptRecord] = OrderedDict()
        """Opened, or heard of, and without a checkpoint that is known here."""

    # --- what is known ----------------------------------------------------------------------------

    def known(self) -> tuple[AttemptRecord, ...]:
        """The records that memory and the attached tiers hold or were noted here, each once."""
        with self._lock:
            found = dict(self._noted)
        found.update({record.id: record for record in self._catalog.attempts()})
        for catalog in self._catalogs():
            found.update({record.id: record for record in catalog.attempts()})
        return tuple(found.values())

    def stored(self) -> set[str]:
        """Ids of the attempts whose records memory or a disk of this host holds: each was put there
        with the first checkpoint of it, or of one after it. A shared tier has claims, too.
        """
        own = (c for c in self._catalogs() if not isinstance(c, SharedCatalog))
        return proven(record for each in (self._catalog, *own) for record in each.attempts())

    def damaged(self) -> dict[str, bytes]:
        """What lies in place of the records that cannot be read, by key."""
        found = self._catalog.bad_attempts()
        for catalog in self._catalogs():
            found.update(catalog.bad_attempts())
        return found

    def note(self, data: bytes) -> None:
        """Remember a record until a checkpoint of its attempt, or of one after it, is here.

        Raises IntegrityError: It is damaged, or of another namespace.
        """
        record = decode_attempt(data)
        if record.namespace != self._namespace:
            raise IntegrityError(f"an attempt record of namespace {record.namespace}")
        with self._lock:
            self._noted[record.id] = record
            while len(self._noted) > NOTED_MAX:
                self._noted.popitem(last=False)

    def store(self) -> tuple[AttemptRecord, ...]:
        """Put the noted records that count by now into memory; those that were put.

        Raises CapacityError, TierUnavailableError: Some were put, some are still noted.
        """
        with self._lock:
            held = {record.id for record in self._catalog.attempts()}
            for attempt in held.intersection(self._noted):
                del self._noted[attempt]
            if not self._noted:
                return ()
            records = (*self._catalog.attempts(), *self._noted.values())
            saved = saved_by(self._catalog.manifests())
            new = [each for each in with_saves(records, saved) if each.id in self._noted]
            for record in new:
                failpoints.reach("agent.attempt.before_record")
                self._catalog.put_attempt(encode_attempt(record))
                failpoints.reach("agent.attempt.after_record")
                del self._noted[record.id]
        return tuple(new)

    def record_of(self, manifest: Manifest) -> bytes | None:
        """The encoded record of a checkpoint's attempt; None: it is not known here."""
        found = (each for each in self.known() if each.id == manifest.attempt.id)
        return encode_attempt(record) if (record := next(found, None)) is not None else None

    def _chain(
        self,
        manifests: Sequence[Manifest],
        run: str,
        also: Iterable[AttemptId] = (),
        *,
        record: bytes = b"",
    ) -> Chain:
        """The attempts that count: those that have saved, and what this run opened or names."""
        records = (*self.known(), *((decode_attempt(record),) if record else ()))
        named = {each.id for each in also}
        named |= {each.id for each in records if each.run == run} | saved_by(manifests)
        named |= self.stored()
        counted = with_saves(records, named)
        if len(counted) < len(records):  # some may have saved into tiers alone
            tiers = (each for catalog in self._catalogs() for each in catalog.manifests())
            counted = with_saves(records, named | saved_by(tiers))
        return Chain(manifests, counted)

    def _catalogs(self) -> list[Catalog]:
        return [c for worker in self._workers() if (c := worker.catalog) is not None]

    def _shared(self) -> list[SharedCatalog]:
        return [each for each in self._catalogs() if isinstance(each, SharedCatalog)]

    def _manifests(self, more: Iterable[Manifest] = ()) -> tuple[Manifest, ...]:
        found = {each.save_id: each for each in (*more, *self._elsewhere())}
        for catalog in (self._catalog, *self._catalogs()):
            found.update({each.save_id: each for each in catalog.manifests()})
        return tuple(found.values())

    def _attach(self) -> None:
        """Wait for the tiers, all at once: what they hold must not turn out to be newer."""
        until_s = time.monotonic() + ATTACH_WAIT_S
        for worker in self._workers():
            worker.attach(max(LAST_WAIT_S, until_s - time.monotonic()))

    # --- opening ----------------------------------------------------------------------------------

    def open(self, request: OpenAttempt) -> bytes:
        """The record of a new attempt, or of the one with this id; encoded.

        Waits until each tier answered or failed. Claims the shared ones that answer.

        Raises:
            StaleAttemptError: Another run has taken over from the caller's, or has begun while it
                loaded.
            NamespaceInUseError: A shared tier is claimed by a run that the caller does not know of.
            NotFoundError: A checkpoint to go on from does not exist any more.
            UsageError: It belongs to another stream, or another live session of the run has saved
                into that stream since.
        """
        self._attach()
        named = [decode_manifest(base.manifest) for base in request.bases if base.manifest]
        with self._opening:  # the claims are put without the node's lock
            found = next((each for each in self.known() if each.id == request.attempt_id), None)
            if found is not None:
                return encode_attempt(found)
            manifests = self._manifests(named)
            chain = self._chain(manifests, request.run, request.followed)
            goes_on, aside = self._followed(request, chain, saved_by(manifests))
            self._check_owners(request, manifests, chain)
            record = next_attempt(
                chain.records.values(),
                manifests,
                request.attempt_id,
                {
                    each.stream: Base(
                        save_id=each.save_id, newest=each.newest, in_silence=each.in_silence
                    )
                    for each in request.bases
                },
                (*goes_on, *(Followed(each.number, each.id) for each in aside))[:MAX_PARENTS],
                self._now_s(),
                namespace=self._namespace,
                run=request.run,
                taken=[n for c in self._shared() for n in c.claims_of_nobody(self._namespace)],
            )
            data = encode_attempt(record)
            # Also by links that a fork has cut: the claim was right when it was made.
            links = Chain((), chain.records.values())
            self._claim(record, links.ancestors(chain.ancestors(each.id for each in goes_on)))
            self.note(data)
        if aside:
            log.warning(
                "namespace %s: attempt %d does not continue %s, which did not know of this run: "
                "its checkpoints are kept, load by their save ids, and no rule deletes them",
                self._namespace, record.number, _names(aside),
            )  # fmt: skip
        log.info("namespace %s: attempt %d (%s)", self._namespace, record.number, record.id)
        return data

    def _followed(
        self, request: OpenAttempt, chain: Chain, saved: set[str]
    ) -> tuple[tuple[Followed, ...], tuple[AttemptId, ...]]:
        """What a new attempt knowingly follows, and the heads that it leaves aside besides."""
        mine = chain.of_run(request.run)
        if mine is not None:
            self._check_not_over(chain, AttemptId(mine.number, mine.id), request.run, own=True)
        named = {mine.id: Followed(mine.number, mine.id)} if mine is not None else {}
        for told in request.followed:
            # Whoever took it for one without saves, and there are some, does not know what it did.
            if told.saved or told.id not in saved:
                named.setdefault(told.id, told)
        # What was opened, saved nothing and is forgotten leads nowhere: no line goes on from it.
        goes_on = tuple(sorted(named.values(), key=lambda each: not chain.knows(each.id)))
        beside = chain.beside(each.id for each in goes_on)
        leads = next((each.id for each in goes_on if chain.knows(each.id)), "")
        for each in beside:
            if not leads or leads in chain.ancestors([each.id]):
                raise StaleAttemptError(
                    f"attempt {each.number} of namespace {self._namespace} was begun by another "
                    "run while this one loaded: if that run is to continue, this one must stop; "
                    "else load again",
                    newest_attempt=each.number,
                    same_run=False,
                )
        return goes_on, beside

    def check_owner(self, request: OpenAttempt) -> None:
        """Before a request is forwarded: what only this host can know of its sessions.

        Raises:
            UsageError: Another live session of the run saves into a stream that it names.
        """
        manifests = self._manifests()
        self._check_owners(request, manifests, self._chain(manifests, request.run))

    def _check_owners(
        self, request: OpenAttempt, manifests: Sequence[Manifest], chain: Chain
    ) -> None:
        """Raises UsageError if other ranks of the run save into a stream that is named."""
        mine = chain.of_run(request.run)
        head = AttemptId(mine.number, mine.id) if mine is not None else None
        own = {each.id for each in chain.records.values() if each.run == request.run}
        for base in request.bases:
            known = {each.id: each.last_seq for each in base.newest}
            since = any(
                each.attempt.id in own and each.seq > known.get(each.attempt.id, -1)
                for each in on_line(chain.line(head, base.stream), manifests)
            )
            if since and request.cause == "load":
                raise two_groups(base.stream)
            with self._lock:
                if request.cause == "save":
                    self._owners.check(base.stream, request.run, request.session_id)
                else:
                    self._owners.release([base.stream])

    def _claim(self, record: AttemptRecord, known: set[str]) -> None:
        """Hold every shared tier that answers before anything is saved: that is the lease."""
        shared = self._shared()
        if not shared:
            return
        threads = ThreadPoolExecutor(len(shared), "tck-claim")
        asked = {threads.submit(each.claim, record, known): each.tier.name for each in shared}
        done, late = wait(asked, ATTACH_WAIT_S)
        threads.shutdown(wait=False)
        why = dict.fromkeys((asked[each] for each in late), "it does not answer")
        for future in done:
            try:
                future.result()
            except (TierUnavailableError, CapacityError) as error:
                why[asked[future]] = str(error)
        for name, reason in why.items():
            # Losing a tier must not stop training; whoever uploads claims again.
            log.warning("namespace %s: no lease of tier %s yet: %s", self._namespace, name, reason)

    # --- committing -------------------------------------------------------------------------------

    def look(self) -> None:
        """Before :meth:`check`, not under the lock: wait for the tiers if memory knows no attempt.

        Then memory was lost, and only they can tell that somebody has taken over since.
        """
        if not self._catalog.attempts():
            self._attach()

    def check(self, manifest: Manifest, request: Commit) -> None:
        """Whether this session may add this checkpoint to its stream now.

        Raises:
            StaleAttemptError: Another run has taken over, or this run has to open an attempt that
                follows more: then field ``same_run`` is true.
            UsageError: Another live session of the run saves into the stream.
            IntegrityError: The record that came with it is damaged, or another one's.
        """
        if request.attempt and decode_attempt(request.attempt).id != manifest.attempt.id:
            raise IntegrityError(f"the record is not of attempt {manifest.attempt.id}")
        held = self._catalog.manifests()
        chain = self._chain(held, request.run, record=request.attempt)
        self._check_not_over(chain, manifest.attempt, request.run)
        if beside := chain.beside([manifest.attempt.id]):
            self._check_not_second(chain, manifest, request.run, beside)
            raise StaleAttemptError(
                f"{_names(beside)} of namespace {self._namespace} did not know of attempt "
                f"{manifest.attempt.number}: there is a fork",
                attempt=manifest.attempt.number,
                same_run=True,
            )
        self._owners.check(manifest.stream, request.run, request.session_id)
        check_number(manifest, held)

    def _check_not_second(
        self, chain: Chain, manifest: Manifest, run: str, beside: Iterable[AttemptId]
    ) -> None:
        """Refuse a run's first save if another run has saved from the same attempt on meanwhile."""
        own = {each.id for each in chain.records.values() if each.run == run}
        record = chain.records.get(manifest.attempt.id)
        if record is None or own & saved_by(self._catalog.manifests()):
            return
        for each in beside:
            if each.id in own:
                continue  # it was opened for this run, whose rank did not hear of it
            if not record.followed or record.followed[0].id in chain.ancestors([each.id]):
                raise StaleAttemptError(
                    f"attempt {each.number} of namespace {self._namespace} was begun by another "
                    "run before the first save of this one: it has to load again",
                    newest_attempt=each.number,
                    same_run=False,
                )

    def committed(self, manifest: Manifest, request: Commit) -> None:
        """The session owns the stream from now on; the attempt exists.

        Never raises: what is not on disk comes with the next commit.
        """
        self._owners.committed(manifest.stream, request.run, request.session_id)
        try:
            if request.attempt:
                self.note(request.attempt)
            self.store()
        except TieredCkptError as error:
            log.warning("namespace %s: attempt records: %s", self._namespace, error)

    def _check_not_over(
        self, chain: Chain, mine: AttemptId, run: str, *, own: bool = False
    ) -> None:
        """Refuse ``mine`` if an attempt followed it; one of this run is all right if ``own``."""
        for each in chain.after(mine.id):
            record = chain.records.get(each.id)
            same_run = record is not None and record.run == run
            if same_run and own:
                continue
            if same_run:
                why = "it was opened by other ranks of this run"
            elif record is None:
                why = "its record is lost, so that it may be another run's: restart the job"
            else:
                why = "this process is from before a restart and must stop"
            raise StaleAttemptError(
                f"attempt {each.number} of namespace {self._namespace} has superseded attempt "
                f"{mine.number}: {why}",
                attempt=mine.number,
                newest_attempt=each.number,
                same_run=same_run,
            )


def _names(attempts: Iterable[AttemptId]) -> str:
    return ", ".join(f"attempt {each.number} ({each.id})" for each in attempts)


class StreamOwners:
    """Which session saves into which stream of a namespace. Guarded by the node's lock.

    Within one run each stream has one coordinator: two process groups that saved into the same
    stream, or several ranks that each call ``dcp.save(no_dist=True)``, would make a time line of
    checkpoints that do not follow from one another. An agent that starts anew has forgotten the
    owners and learns them from the next commits; the numbers of the saves refuse the others
    meanwhile.

    Args:
        is_live: Whether a session's process still holds its lease.
    """

    def __init__(self, is_live: Callable[[str], bool]) -> None:
        self._is_live = is_live
        self._owners: dict[str, tuple[str, str]] = {}
        """By stream: the run and the session that committed last."""

    def check(self, stream: str, run: str, session_id: str) -> None:
        """Raises UsageError if another live session of the same run saves into ``stream``."""
        owner = self._owners.get(stream)
        if owner is None or owner == (run, session_id):
            return
        if owner[0] == run and self._is_live(owner[1]):
            raise two_groups(stream)

    def committed(self, stream: str, run: str, session_id: str) -> None:
        """The session owns the stream from now on."""
        self._owners[stream] = (run, session_id)

    def release(self, streams: Iterable[str]) -> None:
        """The streams were loaded: whoever of those ranks saves next owns them."""
        for stream in streams:
            self._owners.pop(stream, None)


def check_number(manifest: Manifest, known: Iterable[Manifest]) -> None:
    """Raises UsageError if a save of this attempt with this number, or a later one, exists."""
    for other in known:
        if (
            (other.stream, other.attempt) == (manifest.stream, manifest.attempt)
            and other.seq >= manifest.seq
            and other.save_id != manifest.save_id
        ):
            raise two_groups(manifest.stream)


def two_groups(stream: str) -> UsageError:
    """Two coordinators of one stream in one run."""
    return UsageError(
        f"two process groups save into stream {stream!r} (or several ranks call dcp.save with "
        "no_dist=True): each checkpoint would hold the state of some ranks only. Give each group "
        "its own stream (engine.writer(step, stream=...)), or call dcp.save on all ranks; if other "
        "ranks shall go on with this stream, call engine.load on them first"
    )
