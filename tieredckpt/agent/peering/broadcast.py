"""What this agent says to the others of a namespace: pushes through a tree, forwarded attempts.

A push that did not arrive is no failure: the host catches up by :class:`AntiEntropy`. Nothing here
runs, and no thread exists, until another host is known. No lock is held while another host is
waited for.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

import msgspec

from tieredckpt import failpoints
from tieredckpt.agent.cluster.members import Peers
from tieredckpt.agent.peering.merge import Ingest
from tieredckpt.errors import NotFoundError, TieredCkptError
from tieredckpt.format.manifest import Manifest, encode_attempt
from tieredckpt.policy import replication
from tieredckpt.policy.history import age
from tieredckpt.rpc.messages.peer import AskPlan, Push, Sync, SyncReply
from tieredckpt.storage.catalog import Catalog

SYNC_PUSH_S = 2.0
"""The most that a commit or a new attempt waits for other hosts."""
THREADS = 16
URGENT_THREADS = 16
"""For what somebody waits for: stalled hosts in the background must not delay it."""
STRANGERS_MAX = 64
"""Hosts outside of the job that are asked, and told, when an attempt is opened."""
PENDING_MAX = 1 << 12
"""Messages on their way; what comes then is left to anti-entropy."""
INTERVAL_S = 10.0
"""Between two comparisons with a member."""
PUSH_BYTES_MAX = 64 << 20
"""In one message; the rest comes with the next comparison."""
IDS_MAX = 1 << 16

log = logging.getLogger(__name__)


class Exchange:
    """Of one namespace. Thread-safe.

    Args:
        namespace: Its name.
        peers: Whom to tell.
        catalog: Of the memory tier.
        ingest: Takes over what comes back.
    """

    def __init__(self, namespace: str, peers: Peers, catalog: Catalog, ingest: Ingest) -> None:
        self._namespace = namespace
        self._peers = peers
        self._catalog = catalog
        self._ingest = ingest
        self._background = ThreadPoolExecutor(THREADS, f"tck-push-{namespace}")
        self._urgent = ThreadPoolExecutor(URGENT_THREADS, f"tck-ask-{namespace}")
        self.sent_along: Callable[[Manifest], tuple[bytes, ...]] = lambda manifest: ()
        """Encoded records that go with the manifest of a new checkpoint."""
        self._lock = threading.Lock()
        self._pending = 0
        self._dropped = 0
        self._stopped = False

    # --- telling ----------------------------------------------------------------------------------

    def push(self, push: Push, hosts: Iterable[str]) -> None:
        """Let these hosts know, soon, in the background: each child of the tree tells the next."""
        # Who did not answer just now must not have others hang on it.
        good, silent = self._peers.nearest_first(hosts)
        asked_again = ((host, ()) for host in silent[: replication.DEGREE])
        for child, rest in (*replication.split(good), *asked_again):
            self.soon(self._deliver, push, (child, rest))

    def push_now(
        self, push: Push, hosts: Iterable[str], within_s: float = SYNC_PUSH_S
    ) -> frozenset[str]:
        """Tell each of these hosts at once; returns those that answered in time."""
        return frozenset(self.each(hosts, lambda host: self.tell(push, host), within_s))

    def publish(self, push: Push) -> None:
        """Let all other members know, in the background."""
        if others := self._peers.others():
            self.push(push, others)

    def each(
        self, hosts: Iterable[str], call: Callable[[str], object], within_s: float
    ) -> list[str]:
        """``call`` for each host at the same time; those for which it returned in time."""
        asked: dict[Future[object], str] = {}
        good, silent = self._peers.nearest_first(hosts)
        for host in (*good, *silent):
            if not self._stopped:
                asked[self._urgent.submit(call, host)] = host
        done, late = wait(asked, within_s)
        for future in late:
            future.cancel()
        answered = []
        for future in done:
            if future.cancelled():
                continue
            error = future.exception()
            if error is None:
                answered.append(asked[future])
            elif not isinstance(error, TieredCkptError):
                log.error("host %s: unexpected: %r", asked[future], error)
        return answered

    def soon(self, call: Callable[..., None], *args: object) -> bool:
        """``call`` in the background; False: it never runs, too much is under way already."""
        with self._lock:
            if self._stopped:
                return False
            if self._pending >= PENDING_MAX:
                self._dropped += 1
                if self._dropped & (self._dropped - 1) == 0:  # not a line for each
                    log.warning(
                        "namespace %s: %d messages to other hosts are left to anti-entropy",
                        self._namespace, self._dropped,
                    )  # fmt: skip
                return False
            self._pending += 1
            self._background.submit(self._run, call, args)
            return True

    def _run(self, call: Callable[..., None], args: tuple[object, ...]) -> None:
        try:
            call(*args)
        except TieredCkptError as error:
            log.debug("namespace %s: %s", self._namespace, error)
        finally:
            with self._lock:
                self._pending -= 1

    def at_once(self, call: Callable[[], None]) -> bool:
        """``call`` in a thread of its own, for somebody waits for it; False: it never runs."""
        with self._lock:
            if not self._stopped:
                self._urgent.submit(call).add_done_callback(_log_unexpected)
            return not self._stopped

    def _deliver(self, push: Push, branch: replication.Branch | None) -> None:
        """Tell its child, which tells the rest; if it does not answer the next one is promoted."""
        while branch is not None:
            try:
                self.tell(push, *branch)
            except TieredCkptError as error:
                log.debug("namespace %s: push to %s: %s", self._namespace, branch[0], error)
                branch = replication.promote(branch)
            else:
                return

    def tell(self, push: Push, host: str, rest: Sequence[str] = ()) -> None:
        """Tell one host in this thread; it tells ``rest``. Raises as :meth:`Peers.ask`."""
        failpoints.reach("agent.push.before_send")
        sent = msgspec.structs.replace(push, forward=tuple(rest))
        answer = self._peers.ask(host, sent)
        if answer.need_plans:
            plans = [self._catalog.read_plan(each) for each in answer.need_plans]
            again = msgspec.structs.replace(sent, plans=tuple(plans))
            answer = self._peers.ask(host, again)
        for save_id, why in answer.refused:
            log.info(
                "namespace %s: host %s does not store %s: %s", self._namespace, host, save_id, why
            )
        failpoints.reach("agent.push.after_send")

    def forward(self, push: Push) -> None:
        """Pass on what came, to the hosts that the sender named."""
        if push.forward:
            self.push(msgspec.structs.replace(push, forward=(), plans=()), push.forward)

    # --- commits ----------------------------------------------------------------------------------

    def committed(
        self,
        manifest: Manifest,
        data: bytes,
        plan: bytes | None,
        attempt: bytes | None,
        *,
        begins: bool,
    ) -> None:
        """A checkpoint was committed here: the first holders know before this returns, if they
        answer within :data:`SYNC_PUSH_S`; all other members soon.

        Of the first one of an attempt hosts of earlier jobs hear, too: there a trainer may live
        that does not know that it is over.
        """
        attempts = (attempt,) if attempt is not None else ()
        others = self._peers.others()
        if begins and (strangers := self.strangers()):
            self.push(Push(attempts=attempts, manifests=(data,)), strangers)
        if not others:
            return
        failpoints.reach("agent.push.before_holders")
        records = self.sent_along(manifest)
        plans = (plan,) if plan is not None else ()
        push = Push(attempts=attempts, manifests=(data,), plans=plans, records=records)
        first = self._first(manifest, others)
        told = self.push_now(push, first)
        if len(told) < len(first):
            log.warning(
                "namespace %s: step %d: %s did not confirm the manifest in time",
                self._namespace, manifest.step, ", ".join(sorted(first - told)),
            )  # fmt: skip
        failpoints.reach("agent.push.after_holders")
        rest = Push(attempts=attempts, manifests=(data,), records=records)
        self.push(rest, [host for host in others if host not in told])

    def _first(self, manifest: Manifest, others: Sequence[str]) -> frozenset[str]:
        """``replicas`` hosts, holders of this one's copies before others, and the leader, which
        orders the copies.
        """
        holders = [
            holder
            for each in manifest.replicas
            if each.host == self._peers.host_id
            for holder in each.holders
        ]
        wanted = [h for h in dict.fromkeys((*holders, *others)) if h in set(others)]
        lost = self._peers.lost()
        first = [host for host in wanted if host not in lost][: self._peers.replicas]
        leader = self._peers.leader
        if leader in others and leader not in lost:
            first.append(leader)
        return frozenset(first)

    # --- attempts ---------------------------------------------------------------------------------

    def strangers(self) -> list[str]:
        """Hosts of earlier jobs unless they were silent just now: most are gone for good, and every
        start of the job would wait for them.
        """
        found, _ = self._peers.nearest_first(self._peers.strangers())
        return list(found[:STRANGERS_MAX])

    def attempts(self) -> dict[str, bytes]:
        """Encoded attempt records of memory by id."""
        return {record.id: encode_attempt(record) for record in self._catalog.attempts()}

    # --- life -------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Tell nobody any more; what is under way ends with its deadline. Idempotent."""
        with self._lock:
            self._stopped = True
        self._background.shutdown(wait=False, cancel_futures=True)
        self._urgent.shutdown(wait=False, cancel_futures=True)


class AntiEntropy:
    """Compares catalogues with other hosts, so that whoever missed a message catches up.

    Every :data:`INTERVAL_S` (with jitter) with one member at random; with all of them at once
    before an attempt is opened. What retention would delete at once is not asked for again, so
    nothing deleted comes back. Of one namespace. Thread-safe.

    Args:
        peers: Whom to compare with.
        catalog: Of the memory tier.
        ingest: Takes over what others have.
        exchange: How others are told.
    """

    def __init__(self, peers: Peers, catalog: Catalog, ingest: Ingest, exchange: Exchange) -> None:
        self._peers = peers
        self._catalog = catalog
        self._ingest = ingest
        self._exchange = exchange

    # --- comparing --------------------------------------------------------------------------------

    def sync_with(self, host: str) -> None:
        """Take over what ``host`` has and this one lacks, and give it what it lacks.

        Raises:
            TierUnavailableError, NotFoundError: It does not answer, or is not known.
        """
        run = self._peers.run
        reply = self._peers.ask(host, self._question())
        answer = self._ingest.take(reply.push)
        if answer.need_plans:
            plans = []
            for each in answer.need_plans:
                with contextlib.suppress(NotFoundError):  # deleted just now, with what named it
                    plans.append(self._peers.ask(host, AskPlan(plan_id=each, tier="memory")))
            again = Push(manifests=reply.push.manifests, plans=tuple(plans))
            self._ingest.take(again, complete=True)
        wanted = self._push_of(reply.wanted_manifests, reply.wanted_records, reply.wanted_attempts)
        if wanted != Push():
            self._exchange.push(wanted, [host])
        failpoints.reach("agent.sync.after")
        self._peers.met(run, host)

    def _question(self) -> Sync:
        return Sync(
            manifests=tuple(each.save_id for each in self._catalog.manifests())[:IDS_MAX],
            records=self._catalog.record_ids()[:IDS_MAX],
            attempts=tuple(self._exchange.attempts())[:IDS_MAX],
        )

    def answer(self, request: Sync) -> SyncReply:
        """What the caller lacks, and what this host wants of it."""
        mine = {each.save_id for each in self._catalog.manifests()}
        attempts, records = self._exchange.attempts(), self._catalog.record_ids()
        return SyncReply(
            push=self._push_of(
                mine.difference(request.manifests),
                set(records).difference(request.records),
                attempts.keys() - set(request.attempts),
            ),
            wanted_manifests=tuple(x for x in request.manifests if self._ingest.wants(x)),
            wanted_records=tuple(set(request.records).difference(records)),
            wanted_attempts=tuple(set(request.attempts) - attempts.keys()),
        )

    def _push_of(
        self, manifests: Iterable[str], records: Iterable[str], attempts: Iterable[str]
    ) -> Push:
        known = self._exchange.attempts()
        return Push(
            attempts=_within(known[each] for each in attempts if each in known),
            manifests=_within(read_manifests(self._catalog, manifests)),
            records=_within(self._catalog.encoded_records(records)),
        )

    def sync_all(self, silent: Collection[str] = ()) -> list[str]:
        """Compare with every member and with hosts of earlier jobs; who answered in time.

        Those that are ``silent`` as far as the caller knows are asked, but not waited for.
        """
        hosts = [*self._peers.others(), *self._exchange.strangers()]
        for host in set(silent).intersection(hosts):
            self._exchange.soon(self.sync_with, host)
        return self._exchange.each(
            [h for h in hosts if h not in silent], self.sync_with, SYNC_PUSH_S
        )


def read_manifests(catalog: Catalog, save_ids: Iterable[str]) -> list[bytes]:
    """Encoded manifests of memory, as far as they are there, newest first: not all may fit."""
    wanted = set(save_ids)
    found = []
    for manifest in sorted(catalog.manifests(), key=age, reverse=True):
        if manifest.save_id not in wanted:
            continue
        try:
            found.append(catalog.read_manifest(manifest.stream, manifest.save_id))
        except NotFoundError:  # deleted just now
            continue
    return found


def _log_unexpected(done: Future[None]) -> None:
    error = None if done.cancelled() else done.exception()
    if error is not None:
        log.error("in the background: unexpected: %r", error)


def _within(items: Iterable[bytes]) -> tuple[bytes, ...]:
    """As many as fit into one message; at least one."""
    found: list[bytes] = []
    size = 0
    for item in items:
        size += len(item)
        if found and size > PUSH_BYTES_MAX:
            break
        found.append(item)
    return tuple(found)
