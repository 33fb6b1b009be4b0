"""What this process reads of a namespace by itself: memory's folder, file tiers and object stores.

Only reads: nothing is locked for writing, made, adopted or swept, so it is safe beside anything,
and it needs no agent. :class:`ReadOnlyClient` stands in an agent's place for who only looks.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec

from tieredckpt.config.schema import TierSpec
from tieredckpt.errors import (
    AgentError,
    NotFoundError,
    RemoteProtocolError,
    TieredCkptError,
    TierUnavailableError,
    UsageError,
)
from tieredckpt.format.manifest import encode_attempt
from tieredckpt.policy.history import proven
from tieredckpt.rpc.agent_client import AgentClient
from tieredckpt.rpc.messages.agent import API_VERSION, OpenSegment, PeerTable, SegmentOpened
from tieredckpt.storage.backends.file import FileTier, folder_of_url
from tieredckpt.storage.backends.open import open_store
from tieredckpt.storage.base import OpenObject, Scope, Tier, segment_key
from tieredckpt.storage.catalog import Catalog
from tieredckpt.storage.holdings import (
    Holdings,
    TierFacts,
    TierKind,
    decode_holdings,
    encode_holdings,
    gather,
)
from tieredckpt.storage.memory.pool import TIER as MEMORY
from tieredckpt.storage.memory.pool import SlotPool
from tieredckpt.storage.memory.tier import MemoryTier
from tieredckpt.storage.quarantine import QuarantineMarks
from tieredckpt.storage.shared.catalog import SharedCatalog

_T = TypeVar("_T")

SCAN_S = 30.0
"""A tier that has not said within this time what it holds counts as unavailable."""
RETRY_S = 15.0
"""A store that fails is asked again for so long when it is looked at, so that it can say why."""
AGENT_S = 10.0
"""Memory of an agent that takes longer to answer is read without it."""
AWAY_S = 10.0
"""One that did not answer is not asked again for so long."""

READ_ONLY = (
    "this engine was opened with read_only=True and changes nothing: to save, wait, pin, flush or "
    "leave, open one without it, tieredckpt.Engine.open(config), in a process of the job"
)

log = logging.getLogger(__name__)


def namespaces(runtime_dir: Path) -> list[str]:
    """The namespaces that a runtime folder holds, sorted; none if there is no such folder."""
    try:
        return sorted(each.name for each in (runtime_dir / "ns").iterdir() if each.is_dir())
    except FileNotFoundError:
        return []


def open_tier(
    config: TierSpec, namespace: str, *, retry_s: float | None = None, read_only: bool = True
) -> Tier:
    """One tier below memory; ``retry_s``: at most, instead of ``retry_for``.

    Raises:
        ConfigError: The package that reads it is not installed.
        TierUnavailableError: It does not answer.
    """
    if config.is_file:
        folder, scope = folder_of_url(config.url), Scope(config.scope)
        return FileTier(config.name, folder, namespace, scope=scope, read_only=read_only)
    settings = config.object
    if retry_s is not None:
        retry_s = min(retry_s, settings.retry_for_s)
        settings = msgspec.structs.replace(settings, retry_for_s=retry_s)
    return open_store(config.name, config.url, namespace, settings)


def in_daemon(work: Callable[[], _T], name: str) -> Future[_T]:
    """Start ``work`` in a thread called ``name`` that nobody has to wait for, as a daemon.

    So a file system that hangs holds up nothing. What it returns, or which TieredCkptError it
    raises, the future has; CancelledError: a bug ended the thread, which has printed it.
    """
    answer: Future[_T] = Future()

    def run() -> None:
        try:
            answer.set_result(work())
        except TieredCkptError as error:
            answer.set_exception(error)
        finally:
            answer.cancel()  # nothing, unless a bug ends this thread: nobody waits for it then

    threading.Thread(target=run, name=name, daemon=True).start()
    return answer


class Folders:
    """The tiers of one namespace, opened when they are first needed. Thread-safe.

    Args:
        tiers: Those of the configuration.
        runtime_dir: Where memory lies; None: it is not looked at.
        namespace: Whose checkpoints.
        host_id: This host.
    """

    def __init__(
        self, tiers: Iterable[TierSpec], runtime_dir: Path | None, namespace: str, host_id: str
    ) -> None:
        self.namespace = namespace
        self.host_id = host_id
        self._configs = {each.name: each for each in tiers}
        self._runtime_dir = runtime_dir
        self._lock = threading.Lock()
        self._opened: dict[str, Catalog] = {}

    def has_memory(self) -> bool:
        """Whether an agent holds, or has left, a memory tier here."""
        folder = self._runtime_dir
        return (
            folder is not None
            and (folder / "ns" / self.namespace).is_dir()
            and (folder / "slots").is_dir()
        )

    def catalog(self, tier: str, *, anew: bool = False) -> Catalog:
        """What reads a tier; ``anew``: slots are looked at again, as a live job changes them.

        Raises:
            NotFoundError: There is no memory.
            ConfigError, TierUnavailableError: As :func:`open_tier`; it is not configured.
        """
        with self._lock:
            found = self._opened.get(tier)
        if found is not None and not (anew and tier == MEMORY):
            return found
        # Not under the lock: a store may ask a service for its credentials.
        if tier == MEMORY:
            opened: Tier = self._open_memory()
        elif tier in self._configs:
            opened = open_tier(self._configs[tier], self.namespace, retry_s=RETRY_S)
        else:
            raise TierUnavailableError(
                f"tier {tier} is in no configuration here: name the job's (--config)", tier=tier
            )
        found = SharedCatalog(opened) if opened.scope is Scope.SHARED else Catalog(opened)
        with self._lock:
            self._opened[tier] = found
        return found

    def _open_memory(self) -> MemoryTier:
        if self._runtime_dir is None or not self.has_memory():
            raise NotFoundError(f"there is no memory of namespace {self.namespace} here")
        pool = SlotPool(self._runtime_dir / "slots")
        pool.scan(sweep=False)
        folder = self._runtime_dir / "ns" / self.namespace
        return MemoryTier(pool, folder, self.namespace, read_only=True)

    def open_segment(self, tier: str, segment_id: str) -> OpenObject:
        """One copy of a segment. Raises as :meth:`catalog` and :meth:`Tier.open`."""
        return self.catalog(tier, anew=True).tier.open(segment_key(segment_id))

    def holdings(self, told: Holdings | None = None) -> Holdings:
        """What an agent of this host would report; see :class:`Holdings`.

        A tier that cannot be read, or does not answer within :data:`SCAN_S`, is reported as
        unavailable. Raises ConfigError: the package that reads a tier is not installed.

        Args:
            told: What the agent says of memory, which is looked at otherwise.
        """
        until_s = time.monotonic() + SCAN_S
        marks: QuarantineMarks | None = None
        if self.has_memory():
            with suppress(NotFoundError, TierUnavailableError):  # looking at it, below, says why
                marks = QuarantineMarks(self.catalog(MEMORY, anew=True).tier)
        names = [*([MEMORY] if told is None and self.has_memory() else []), *self._configs]
        asked = [
            (name, in_daemon(partial(self._look, name, marks), f"tck-look-{name}"))
            for name in names
        ]
        found: list[Holdings] = []
        if told is not None:
            memory = tuple(each for each in told.tiers if each.kind == "memory")
            found.append(msgspec.structs.replace(told, tiers=memory))
        for name, answer in asked:
            try:
                found.append(answer.result(max(0.0, until_s - time.monotonic())))
            except TimeoutError:
                found.append(self._away(name, f"no answer within {SCAN_S:g} s"))
        return self._held(
            tuple(each for one in found for each in one.tiers),
            (each for one in found for each in one.attempts),
            (each for one in found for each in one.records),
            (each for one in found for each in one.saved),
        )

    def _look(self, name: str, marks: QuarantineMarks | None) -> Holdings:
        """What one tier holds."""
        try:
            catalog = self.catalog(name)
        except (NotFoundError, TierUnavailableError) as error:
            return self._away(name, str(error))
        facts = gather(catalog, kind=self._kind(name), marks=marks)
        if not facts.available:
            return self._held((facts,))
        # Damaged ones, too: the time line may not be what it was.
        attempts = (*map(encode_attempt, catalog.attempts()), *catalog.bad_attempts().values())
        of_host = catalog.tier.scope is Scope.HOST  # a shared one has claims, too
        saved = sorted(proven(catalog.attempts())) if of_host else ()
        records: tuple[bytes, ...] = ()
        # It was there a moment ago: at worst it is told without its marks.
        with suppress(TierUnavailableError):
            catalog.read_records()
            records = catalog.encoded_records(catalog.record_ids())
        return self._held((facts,), attempts, records, saved)

    def _away(self, name: str, error: str) -> Holdings:
        scope = self._configs[name].scope if name in self._configs else "host"
        kind = self._kind(name)
        facts = TierFacts(tier=name, scope=scope, kind=kind, available=False, error=error)
        return self._held((facts,))

    def _held(
        self,
        tiers: tuple[TierFacts, ...],
        attempts: Iterable[bytes] = (),
        records: Iterable[bytes] = (),
        saved: Iterable[str] = (),
    ) -> Holdings:
        return Holdings(
            host_id=self.host_id,
            namespace=self.namespace,
            attempts=tuple(dict.fromkeys(attempts)),
            tiers=tiers,
            records=tuple(dict.fromkeys(records)),
            saved=tuple(dict.fromkeys(saved)),
        )

    def _kind(self, name: str) -> TierKind:
        config = self._configs.get(name)
        return "memory" if config is None else "file" if config.is_file else "object"

    def close(self) -> None:
        """Give up what is open; the next use opens it again."""
        with self._lock:
            opened, self._opened = list(self._opened.values()), {}
        for each in opened:
            each.tier.close()


class ReadOnlyClient(AgentClient):
    """Memory through this host's agent, or without it if none answers, and the tiers themselves.

    It has no session. Thread-safe, invalid after fork.

    Args:
        runtime_dir: The agent's folder, which need not exist.
        folders: The tiers of the namespace; closed with this.
        run_id: Agreed by the ranks that opened together.
    """

    def __init__(self, runtime_dir: Path, folders: Folders, run_id: str = "") -> None:
        super().__init__(runtime_dir, deadline_s=AGENT_S)
        self.run_id = run_id
        self._folders = folders
        self._asks_from_s = 0.0
        if (told := self._of_agent(super().health)) is not None:
            folders.host_id = told.host_id
            if told.api != API_VERSION:
                self._asks_from_s = math.inf

    @property
    def namespace(self) -> str:
        """The one that is read."""
        return self._folders.namespace

    def close(self) -> None:
        """Close all connections. Idempotent."""
        super().close()
        self._folders.close()

    def holdings(
        self, namespace: str | None = None, *, within_s: float | None = None, tiers: bool = True
    ) -> bytes:
        """What this host holds, as :meth:`AgentClient.holdings`; only configured tiers are in it.

        They are looked at from here: the agent's may be others, under the same names.
        """
        ask = partial(super().holdings, self.namespace, within_s=within_s, tiers=False)
        told = self._of_agent(ask)
        return encode_holdings(self._folders.holdings(decode_holdings(told) if told else None))

    def plan(self, plan_id: str, *, tier: str = MEMORY, namespace: str | None = None) -> bytes:
        """The encoded plan as ``tier`` holds it, unverified. Raises as :meth:`Folders.catalog`."""
        if tier == MEMORY:
            ask = partial(super().plan, plan_id, tier=tier, namespace=self.namespace)
            told = self._of_agent(ask)
            if told is not None:
                return told
        return self._folders.catalog(tier).read_plan(plan_id)

    def open_segment(
        self, tier: str, segment_id: str, *, namespace: str | None = None
    ) -> tuple[SegmentOpened, int]:
        """As :meth:`AgentClient.open_segment`. Raises as :meth:`Folders.open_segment`."""
        if tier == MEMORY:
            ask = partial(super().open_segment, tier, segment_id, namespace=self.namespace)
            told = self._of_agent(ask)
            if told is not None:
                return told
        with self._folders.open_segment(tier, segment_id) as opened:
            # The copy shares the open file description, and so the lease.
            fd = os.dup(opened.fileno())
            found = SegmentOpened(
                ticket="", size_bytes=opened.size, direct=opened.direct, slot_id=None
            )
            return found, fd

    def peers(self, namespace: str | None = None) -> PeerTable:
        """The other hosts, as the agent finds them. Raises NotFoundError if none answers."""
        told = self._of_agent(partial(super().peers, self.namespace))
        if told is None:
            raise NotFoundError("no agent of this host tells of other hosts")
        return told

    def _of_agent(self, ask: Callable[[], _T]) -> _T | None:
        """What the agent says; None: none answers, or it does not know the namespace.

        Raises NotFoundError if it has not what was asked for: nobody looks behind its back, since a
        reader's lock on a slot that it has just granted again would hold up the job's writer.
        """
        if not self._folders.has_memory() or time.monotonic() < self._asks_from_s:
            return None
        try:
            return ask()
        except NotFoundError as error:
            if error.fields.get("what") != "namespace":
                raise
        except (AgentError, RemoteProtocolError) as error:
            self._asks_from_s = time.monotonic() + AWAY_S
            log.info("memory is read without the agent: %s", error)
        return None

    def _call(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        *,
        more_s: float = 0.0,
        within_s: float | None = None,
    ) -> bytes:
        """Only what changes nothing at the agent. Raises UsageError for anything else."""
        if method != "GET" and not path.endswith(f"/{OpenSegment.verb()}"):
            raise UsageError(READ_ONLY)
        return super()._call(method, path, body, more_s=more_s, within_s=within_s)
