"""Comparing catalogues with other hosts, so that whoever missed a message catches up.

Every :data:`INTERVAL_S` (with jitter) with one member at random; with all of them at once before an
attempt is opened. What retention would delete at once is not asked for again, so nothing deleted
comes back.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable

from tieredckpt import failpoints
from tieredckpt.agent.exchange import SYNC_PUSH_S, Exchange, read_manifests
from tieredckpt.agent.ingest import Ingest
from tieredckpt.agent.peers import Peers
from tieredckpt.tiers.catalog import Catalog
from tieredckpt.transport.peer_messages import AskPlan, Push, Sync, SyncReply

INTERVAL_S = 10.0
PUSH_BYTES_MAX = 64 << 20
"""In one message; the rest comes with the next comparison."""
IDS_MAX = 1 << 16

log = logging.getLogger(__name__)


class AntiEntropy:
    """Of one namespace. Thread-safe.

    Args:
        namespace: Its name.
        peers: Whom to compare with.
        catalog: Of the memory tier.
        ingest: Takes over what others have.
        exchange: How others are told.
    """

    def __init__(
        self,
        namespace: str,
        peers: Peers,
        catalog: Catalog,
        ingest: Ingest,
        exchange: Exchange,
    ) -> None:
        self._namespace = namespace
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
            asked = [AskPlan(plan_id=each, tier="memory") for each in answer.need_plans]
            plans = [self._peers.ask(host, each) for each in asked]
            self._ingest.take(Push(manifests=reply.push.manifests, plans=tuple(plans)))
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
        hosts = self._exchange.all_hosts()
        for host in set(silent).intersection(hosts):
            self._exchange.soon(lambda h=host: self.sync_with(h))  # type: ignore[misc]
        return self._exchange.each(
            [h for h in hosts if h not in silent], self.sync_with, SYNC_PUSH_S
        )


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
