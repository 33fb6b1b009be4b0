"""Reads a namespace without an agent: memory's folder, file tiers and object stores.

Nothing is locked for writing, created, adopted or swept, so a live job is not disturbed.
:class:`ReadOnlyClient` replaces an agent's client in a process that only reads.
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
    decode_holdings,
    encode_holdings,
    gather,
    kind_of,
)
from tieredckpt.storage.memory.pool import TIER as MEMORY
from tieredckpt.storage.memory.pool import SlotPool
from tieredckpt.storage.memory.tier import MemoryTier
from tieredckpt.storage.object.supplied import Supplied
from tieredckpt.storage.quarantine import QuarantineMarks
from tieredckpt.storage.shared.catalog import SharedCatalog

_T = TypeVar("_T")

SCAN_S = 30.0
"""A tier that has not been listed within this time counts as unavailable."""
RETRY_S = 15.0
"""A scan retries a failing store for so long: less than SCAN_S, so that the cause is reported."""
AGENT_S = 10.0
"""If the agent takes longer to answer, memory is read without it."""
AWAY_S = 10.0
"""An agent that did not answer is not asked again for so long."""

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
    config: TierSpec,
    namespace: str,
    *,
    retry_s: float | None = None,
    read_only: bool = True,
    script: Supplied | None = None,
) -> Tier:
    """One tier below memory; ``retry_s`` limits ``retry_for``.

    ``script``: credentials of the training script, for tiers that use those.

    Raises:
        ConfigError: The package that reads the tier is not installed.
        TierUnavailableError: The tier does not answer.
    """
    if config.is_file:
        folder, scope = folder_of_url(config.url), Scope(config.scope)
        return FileTier(config.name, folder, namespace, scope=scope, read_only=read_only)
    settings = config.object
    if retry_s is not None:
        retry_s = min(retry_s, settings.retry_for_s)
        settings = msgspec.structs.replace(settings, retry_for_s=retry_s)
    return open_store(config.name, config.url, namespace, settings, script)


def in_daemon(work: Callable[[], _T], name: str) -> Future[_T]:
    """Start ``work`` in a daemon thread called ``name``; a file system that hangs blocks nothing.

    The future has its result or TieredCkptError; CancelledError: a bug ended the thread, which has
    printed it.
    """
    answer: Future[_T] = Future()

    def run() -> None:
        try:
            answer.set_result(work())
        except TieredCkptError as error:
            answer.set_exception(error)
        finally:
            answer.cancel()  # has no effect unless a bug ends this thread

    threading.Thread(target=run, name=name, daemon=True).start()
    return answer


class Folders:
    """The tiers of one namespace, opened at their first use. Thread-safe.

    Args:
        tiers: The configured ones.
        runtime_dir: The folder of memory; None: memory is not read.
        namespace: Its name.
        host_id: This host.
        script: Credentials of the training script.
    """

    def __init__(
        self,
        tiers: Iterable[TierSpec],
        runtime_dir: Path | None,
        namespace: str,
        host_id: str,
        script: Supplied | None = None,
    ) -> None:
        self.namespace = namespace
        self.host_id = host_id
        self._configs = {each.name: each for each in tiers}
        self._runtime_dir = runtime_dir
        self._script = script
        self._lock = threading.Lock()
        self._opened: dict[str, Catalog] = {}

    def has_memory(self) -> bool:
        """Whether the runtime folder has a memory tier of the namespace."""
        folder = self._runtime_dir
        return (
            folder is not None
            and (folder / "ns" / self.namespace).is_dir()
            and (folder / "slots").is_dir()
        )

    def catalog(self, tier: str, *, anew: bool = False) -> Catalog:
        """The catalog of a tier; ``anew``: slots are scanned again, as a live job changes them.

        Raises:
            NotFoundError: There is no memory.
            ConfigError, TierUnavailableError: As :func:`open_tier`, or it is not configured.
        """
        with self._lock:
            found = self._opened.get(tier)
        if found is not None and not (anew and tier == MEMORY):
            return found
        # Not under the lock: a store may ask a service for its credentials.
        if tier == MEMORY:
            opened: Tier = self._open_memory()
        elif tier in self._configs:
            opened = open_tier(
                self._configs[tier], self.namespace, retry_s=RETRY_S, script=self._script
            )
        else:
            raise TierUnavailableError(
                f"tier {tier} is not configured here: pass the job's file (--config)", tier=tier
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

    def holdings(self, reported: Holdings | None = None) -> Holdings:
        """The holdings that an agent of this host would report; see :class:`Holdings`.

        A tier that cannot be read, or does not answer within :data:`SCAN_S`, is reported as
        unavailable. Raises ConfigError: the package that reads a tier is not installed.

        Args:
            reported: The agent's report of memory; None: memory is scanned.
        """
        until_s = time.monotonic() + SCAN_S
        marks: QuarantineMarks | None = None
        if self.has_memory():
            with suppress(NotFoundError, TierUnavailableError):  # the scan below reports why
                marks = QuarantineMarks(self.catalog(MEMORY, anew=True).tier)
        names = [*([MEMORY] if reported is None and self.has_memory() else []), *self._configs]
        scans = [
            (name, in_daemon(partial(self._scan, name, marks), f"tck-scan-{name}"))
            for name in names
        ]
        found: list[Holdings] = []
        if reported is not None:
            memory = tuple(each for each in reported.tiers if each.kind == "memory")
            found.append(msgspec.structs.replace(reported, tiers=memory))
        for name, answer in scans:
            try:
                found.append(answer.result(max(0.0, until_s - time.monotonic())))
            except TimeoutError:
                found.append(self._away(name, f"no answer within {SCAN_S:g} s"))
        return self._holdings_of(
            tuple(each for one in found for each in one.tiers),
            (each for one in found for each in one.attempts),
            (each for one in found for each in one.records),
            (each for one in found for each in one.saved),
        )

    def _scan(self, name: str, marks: QuarantineMarks | None) -> Holdings:
        """The holdings of one tier."""
        try:
            catalog = self.catalog(name)
        except (NotFoundError, TierUnavailableError) as error:
            return self._away(name, str(error))
        facts = gather(catalog, kind=kind_of(self._configs.get(name)), marks=marks)
        if facts.error is not None:
            return self._away(name, facts.error)
        # Damaged ones, too: the timeline may have changed with them.
        attempts = (*map(encode_attempt, catalog.attempts()), *catalog.bad_attempts().values())
        of_host = catalog.tier.scope is Scope.HOST  # a shared one has leases, too
        saved = sorted(proven(catalog.attempts())) if of_host else ()
        records: tuple[bytes, ...] = ()
        # The tier answered a moment ago: at worst it is reported without its marks.
        with suppress(TierUnavailableError):
            catalog.read_records()
            records = catalog.encoded_records(catalog.record_ids())
        return self._holdings_of((facts,), attempts, records, saved)

    def _away(self, name: str, error: str) -> Holdings:
        scope = self._configs[name].scope if name in self._configs else "host"
        kind = kind_of(self._configs.get(name))
        if name in self._configs:
            error = f"{self._configs[name].url}: {error}"
        facts = TierFacts(tier=name, scope=scope, kind=kind, available=False, error=error)
        return self._holdings_of((facts,))

    def _holdings_of(
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

    def close(self) -> None:
        """Close all tiers; the next use opens them again."""
        with self._lock:
            opened, self._opened = list(self._opened.values()), {}
        for each in opened:
            each.tier.close()


class ReadOnlyClient(AgentClient):
    """Reads memory through this host's agent, or without it if none answers, and tiers directly.

    It has no session. Thread-safe, invalid after fork.

    Args:
        runtime_dir: The agent's folder, which need not exist.
        folders: The tiers of the namespace; closed with this client.
        run_id: Agreed by the ranks that opened together.
    """

    def __init__(self, runtime_dir: Path, folders: Folders, run_id: str = "") -> None:
        super().__init__(runtime_dir, deadline_s=AGENT_S)
        self.run_id = run_id
        self._folders = folders
        self._asks_from_s = 0.0
        if (health := self._of_agent(super().health)) is not None:
            folders.host_id = health.host_id
            if health.api != API_VERSION:
                self._asks_from_s = math.inf

    @property
    def namespace(self) -> str:
        """The namespace that is read."""
        return self._folders.namespace

    def close(self) -> None:
        """Close all connections. Idempotent."""
        super().close()
        self._folders.close()

    def holdings(
        self, namespace: str | None = None, *, within_s: float | None = None, tiers: bool = True
    ) -> bytes:
        """This host's holdings, as :meth:`AgentClient.holdings`, with the configured tiers alone.

        This process scans the tiers: the agent may have others under the same names.
        """
        ask = partial(super().holdings, self.namespace, within_s=within_s, tiers=False)
        memory = self._of_agent(ask)
        found = self._folders.holdings(decode_holdings(memory) if memory else None)
        return encode_holdings(found)

    def plan(self, plan_id: str, *, tier: str = MEMORY, namespace: str | None = None) -> bytes:
        """The encoded plan as ``tier`` holds it, unverified. Raises as :meth:`Folders.catalog`."""
        if tier == MEMORY:
            ask = partial(super().plan, plan_id, tier=tier, namespace=self.namespace)
            if (plan := self._of_agent(ask)) is not None:
                return plan
        return self._folders.catalog(tier).read_plan(plan_id)

    def open_segment(
        self, tier: str, segment_id: str, *, namespace: str | None = None
    ) -> tuple[SegmentOpened, int]:
        """As :meth:`AgentClient.open_segment`. Raises as :meth:`Folders.open_segment`."""
        if tier == MEMORY:
            ask = partial(super().open_segment, tier, segment_id, namespace=self.namespace)
            if (granted := self._of_agent(ask)) is not None:
                return granted
        with self._folders.open_segment(tier, segment_id) as opened:
            # The copy shares the open file description, and so the lease.
            fd = os.dup(opened.fileno())
            found = SegmentOpened(
                ticket="", size_bytes=opened.size, direct=opened.direct, slot_id=None
            )
            return found, fd

    def peers(self, namespace: str | None = None) -> PeerTable:
        """The other hosts that the agent knows. Raises NotFoundError if no agent answers."""
        table = self._of_agent(partial(super().peers, self.namespace))
        if table is None:
            raise NotFoundError("no agent of this host answers, so other hosts are not known")
        return table

    def _of_agent(self, ask: Callable[[], _T]) -> _T | None:
        """The agent's answer; None: no agent answers, or it does not know the namespace.

        Raises NotFoundError if the agent does not have the object. Memory is not read behind its
        back: a reader's lock on a slot that was just granted again would block the job's writer.
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
        revive: bool = True,
    ) -> bytes:
        """Send a request that changes nothing at the agent. Raises UsageError for any other."""
        if method != "GET" and not path.endswith(f"/{OpenSegment.verb()}"):
            raise UsageError(READ_ONLY)
        return super()._call(method, path, body, more_s=more_s, within_s=within_s, revive=revive)
