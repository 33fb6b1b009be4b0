"""This process's connections to other hosts' agents: their holdings, and bytes of their segments.

The own agent knows their addresses and the secret. A process whose agent knows of no other host
makes no connection. :func:`read_everywhere` reads the holdings of all agents for the recovery plan.
"""

from __future__ import annotations

import difflib
import logging
import threading
import time
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import closing, suppress
from dataclasses import dataclass, field
from functools import partial

import msgspec

from tieredckpt.config.schema import TierSpec
from tieredckpt.errors import (
    AgentError,
    NotFoundError,
    RemoteProtocolError,
    TieredCkptError,
    TierUnavailableError,
)
from tieredckpt.format.manifest import Manifest
from tieredckpt.policy.schedule import LastSpill
from tieredckpt.recovery.evidence import SourceRef, known_manifests, manifest_of, nearest_first
from tieredckpt.recovery.folders import in_daemon, open_tier
from tieredckpt.recovery.plan import RecoveryPlan, plan_recovery
from tieredckpt.rpc.agent_client import AgentClient
from tieredckpt.rpc.auth import Secret
from tieredckpt.rpc.messages.agent import HostEntry, PeerTable
from tieredckpt.rpc.messages.peer import RECORDS_MAX, AskHoldings
from tieredckpt.rpc.peer_client import PeerClient
from tieredckpt.storage.holdings import Holdings, decode_holdings
from tieredckpt.storage.object.errors import NO_BUCKET
from tieredckpt.storage.object.supplied import Supplied

log = logging.getLogger(__name__)

CONNECT_S = 2.0
ANSWER_S = 10.0
ASKED_AT_ONCE = 32
"""Hosts, each by a thread of its own that mostly waits."""

FIRST_ASKED = 2
FIRST_WAIT_S = 1.0
"""So many hosts are asked before all others, for so long: the others need not repeat their
manifests. Else a thousand hosts would send the same ones, of a thousand hosts each, at once."""

ASKING_MAX_S = 60.0
"""For all hosts together; a job's members answer within a fraction of a second."""

PROGRESS_S = 0.2

AWAY_S = 30.0
"""For so long a host that did not answer is asked last for bytes that another one has, too."""


@dataclass(frozen=True, slots=True)
class AllHoldings:
    """The holdings of all hosts that answered."""

    holdings: tuple[Holdings, ...]
    """The own host's first."""
    unreachable: Mapping[str, str] | None = None
    """By host, why it did not answer. None: there are no other hosts."""

    @property
    def is_away(self) -> bool:
        """Whether a tier of some host does not answer that host's agent."""
        return any(not tier.available for each in self.holdings for tier in each.tiers)

    def should_wait(self, plans: Sequence[RecoveryPlan]) -> bool:
        """Whether a newer checkpoint than ``plans`` (made from this) choose may be found later.

        A tier of this host that does not answer may hold any, unless its bucket does not exist.
        Other hosts are not waited for if the newest known checkpoint can be restored without them:
        its manifest reached them all, and a lost host will never answer.
        """
        away = [tier.error or "" for tier in self.holdings[0].tiers if not tier.available]
        away += [why for plan in plans if plan.passes_over for why in plan.incomplete]
        return any(NO_BUCKET not in why for why in away)


class OtherHosts:
    """The other hosts of one namespace. Thread-safe, invalid after fork.

    Args:
        client: Of the own agent, which reports the table when it is needed anew.
        table: As it was when the engine was opened, or None.

    Attributes:
        only: Hosts whose holdings are asked for; None: all.
    """

    def __init__(self, client: AgentClient, table: PeerTable | None) -> None:
        self._agent = client
        self._update(table)
        self._lock = threading.Lock()
        self._clients: dict[str, PeerClient] = {}
        self._unreachable: frozenset[str] = frozenset()
        self.only: frozenset[str] | None = None

    def close(self) -> None:
        """Close all connections and forget :meth:`unreachable`; the next use connects again."""
        with self._lock:
            clients, self._clients = list(self._clients.values()), {}
            self._unreachable = frozenset()
        for client in clients:
            client.close()

    def refresh(self) -> PeerTable | None:
        """Read the table of hosts from the own agent. Raises AgentError."""
        try:
            table = self._agent.peers()
        except NotFoundError:
            table = None  # it does not know the namespace
        with self._lock:
            self._update(table)
        return table

    def _update(self, table: PeerTable | None) -> None:
        self._hosts: dict[str, tuple[HostEntry, Secret]] = {}
        if table is not None:
            secret = Secret(table.token, table.tls)
            self._hosts = {state.host.host_id: (state.host, secret) for state in table.peers}

    # --- bytes ------------------------------------------------------------------------------------

    def client(self, host_id: str) -> PeerClient:
        """The client of a host. Raises TierUnavailableError: its address is not known."""
        client = self._known(host_id)
        if client is None:
            self.refresh()
            client = self._known(host_id)
        if client is None:
            raise TierUnavailableError(f"the address of host {host_id} is not known", tier="peer")
        return client

    def in_order(self, sources: Sequence[SourceRef], host_id: str) -> tuple[SourceRef, ...]:
        """The copies as ``host_id`` is to try them: nearest first, on unreachable hosts last."""
        since_s = time.monotonic() - AWAY_S
        with self._lock:
            away = {name for name, client in self._clients.items() if client.failed_s > since_s}
        found = [
            msgspec.structs.replace(source, intact=False, error="its host did not answer just now")
            if source.host in away
            else source
            for source in sources
        ]
        return nearest_first(found, host_id)

    def _known(self, host_id: str) -> PeerClient | None:
        with self._lock:
            if host_id not in self._hosts:
                return None
            entry, secret = self._hosts[host_id]
            client = self._clients.get(host_id)
            # A restart changes both.
            if client is None or (client.host, client.secret) != (entry, secret):
                if client is not None:
                    client.retire()
                client = self._clients[host_id] = PeerClient(
                    entry, self._agent.namespace, secret, connect_s=CONNECT_S, stall_s=ANSWER_S
                )
            return client

    def unreachable(self) -> tuple[str, ...]:
        """Hosts that did not report their holdings, or were left out, in the last round."""
        with self._lock:
            return tuple(sorted(self._unreachable))

    # --- holdings ---------------------------------------------------------------------------------

    def ask_all(
        self,
        own: Holdings,
        before: AllHoldings | None = None,
        *,
        limit_s: float = ASKING_MAX_S,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> AllHoldings:
        """The holdings of all hosts.

        Args:
            own: The own agent's.
            before: An earlier answer: only hosts that did not answer then, or had a tier that did
                not, are asked again.
            limit_s: For all hosts together.
            progress: Called now and then with the number of hosts that have answered, and of all.
        """
        table = self.refresh()
        answered = {
            each.host_id: each
            for each in (before.holdings[1:] if before is not None else ())
            if all(tier.available for tier in each.tiers)
        }
        states = [
            state
            for state in (table.peers if table is not None else ())
            if state.host.host_id != own.host_id and state.host.host_id not in answered
        ]
        left_out = {s.host.host_id for s in states} - self.only if self.only is not None else set()
        states = [state for state in states if state.host.host_id not in left_out]
        # Hosts that the agent could not reach lately are asked last.
        states.sort(key=lambda state: state.reachable is False)
        have = set(known_manifests([own, *answered.values()]))
        asking = _Asking(own.namespace, have, progress)
        found, unreachable = asking.run(
            [(state.host.host_id, self.client(state.host.host_id)) for state in states], limit_s
        )
        for host, why in unreachable.items():
            log.info("host %s does not report its holdings: %s", host, why)
        with self._lock:
            # Others that are not asked now have answered before.
            self._unreachable = frozenset(unreachable) | left_out
        # A host at such an address may hold the only copy.
        unmet = table.unmet if table is not None and self.only is None else {}
        return AllHoldings((own, *answered.values(), *found), {**unreachable, **unmet})


@dataclass(slots=True)
class _Asking:
    """One round of questions to many hosts, asked at the same time, each with a deadline."""

    namespace: str
    have: set[str]
    """Digests of the manifests that need not be sent."""
    progress: Callable[[int, int], None]
    found: dict[str, Holdings] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def run(
        self, hosts: Sequence[tuple[str, PeerClient]], limit_s: float
    ) -> tuple[tuple[Holdings, ...], dict[str, str]]:
        """Ask all, until each has answered or the time is over.

        Args:
            hosts: Host ids and clients; those that may be away come best at the end.
            limit_s: For all together.

        Returns:
            The holdings of these hosts, in their order, and by host why the others sent none.
        """
        if not hosts:
            return (), {}
        until_s = time.monotonic() + limit_s
        pool = ThreadPoolExecutor(min(ASKED_AT_ONCE, len(hosts)), "tieredckpt-ask")
        try:
            asked = [pool.submit(self._ask, *each) for each in hosts[:FIRST_ASKED]]
            if len(hosts) > FIRST_ASKED:
                wait(asked, FIRST_WAIT_S, FIRST_COMPLETED)
            asked += [pool.submit(self._ask, *each) for each in hosts[FIRST_ASKED:]]
            left = set(asked)
            while left and (left_s := until_s - time.monotonic()) > 0:
                _, left = wait(left, min(left_s, PROGRESS_S))
                self.progress(len(asked) - len(left), len(asked))
        finally:
            # A thread that is left ends with the deadline of its own request.
            pool.shutdown(wait=False, cancel_futures=True)
        with self.lock:  # a late thread must not add to the result
            found = dict(self.found)
        late = f"did not answer within {limit_s:g} s"
        failed = {
            host: str(late if each in left else each.exception())[:500]
            for (host, _), each in zip(hosts, asked, strict=True)
            if host not in found
        }
        return tuple(found[host] for host, _ in hosts if host in found), failed

    def _ask(self, host: str, client: PeerClient) -> None:
        holdings = _twice(lambda: self._read(host, client))
        with self.lock:  # together: later replies may leave out manifests that are in this one
            self.found[host] = holdings
            self.have.update(known_manifests([holdings]))

    def _read(self, host: str, client: PeerClient) -> Holdings:
        with self.lock:
            have = sorted(self.have)[:RECORDS_MAX]
        found = decode_holdings(client.ask(AskHoldings(manifests=tuple(have))))
        if found.host_id != host or found.namespace != self.namespace:
            raise RemoteProtocolError(f"it reports that it is {found.host_id} ({found.namespace})")
        return found


def _twice(call: Callable[[], Holdings]) -> Holdings:
    """Repeat a failed request once: it must not decide what is restored. A refusal is final."""
    begun_s = time.monotonic()
    try:
        return call()
    except AgentError:
        raise
    except (TierUnavailableError, OSError):
        if time.monotonic() - begun_s > CONNECT_S:
            raise  # it had its time
        return call()


FindOthers = Callable[[], OtherHosts | None]
"""The clients of other hosts, if there are any."""

POLL_S = 0.25
"""How often hosts that did not answer are asked again, for up to ``recovery.wait``."""
LIST_WAIT_S = 5.0
"""For each tier: how long a load that found nothing lists namespaces of similar names."""

STREAMS_SHOWN = 5


def read_everywhere(
    client: AgentClient, others: OtherHosts | None, before: AllHoldings | None
) -> AllHoldings:
    """The holdings of all hosts; other hosts that answered for all tiers ``before`` are kept.

    Raises AgentError: the own agent does not answer.
    """
    own = read_holdings(client)
    if others is None:
        return AllHoldings((own,))
    return others.ask_all(own, before)


def read_plan(
    client: AgentClient,
    others: OtherHosts | None,
    stream: str,
    *,
    step: int | None = None,
    save_id: str | None = None,
    exclude: frozenset[str] = frozenset(),
    wait_s: float = 0.0,
) -> RecoveryPlan:
    """Plan the recovery from the holdings of all hosts.

    If a newer checkpoint may be on other hosts, or in their tiers, that do not answer, they are
    asked again for at most ``wait_s``.
    """
    until_s = time.monotonic() + wait_s
    found: AllHoldings | None = None
    while True:
        found = read_everywhere(client, others, found)
        plan = plan_recovery(
            found.holdings, stream=stream, step=step, save_id=save_id, exclude=exclude,
            unreachable=found.unreachable,
        )  # fmt: skip
        left_s = until_s - time.monotonic()
        waits = found.unreachable is not None and plan.incomplete and plan.passes_over
        if not waits or left_s <= 0:
            log_warnings(plan)
            return plan
        time.sleep(min(POLL_S, left_s))


def log_warnings(plan: RecoveryPlan) -> None:
    """Log what is uncertain about a plan."""
    for warning in plan.warnings:
        log.warning("stream %s: %s", plan.stream, warning)


def log_waiting(plans: Sequence[RecoveryPlan], left_s: float) -> None:
    """Log what a load waits for, and how long."""
    log.warning(
        "the load waits for at most %.2g s, until these answer, which may hold a newer checkpoint: "
        "%s (recovery.wait sets the time, and 0 s does not wait)",
        left_s, "; ".join(dict.fromkeys(tier for plan in plans for tier in plan.incomplete)),
    )  # fmt: skip


def log_not_asked(plans: Sequence[RecoveryPlan], wait_s: float) -> None:
    """Warn of a restore for which not all hosts and tiers answered: they may hold a newer one."""
    for plan in plans:
        if plan.chosen is not None and plan.incomplete:
            log.warning(
                "stream %s: resuming at step %d, but %s may hold a newer checkpoint and could not "
                "be read (recovery.wait is %g s)",
                plan.stream, plan.chosen.manifest.step, "; ".join(plan.incomplete), wait_s,
            )  # fmt: skip


def warn_of_other_names(
    client: AgentClient,
    streams: Collection[str],
    tiers: Iterable[TierSpec],
    script: Supplied | None,
) -> None:
    """Warn, where nothing was loaded, of other streams and of namespaces with similar names.

    A folder in ``checkpoint_id`` names a stream. A load of another stream than was saved, or of a
    mistyped namespace, would silently start from scratch. A tier that cannot be listed within
    :data:`LIST_WAIT_S` is left out. ``script``: credentials of the training script.
    """
    own = read_holdings(client).tiers
    others = sorted({fact.stream for tier in own for fact in tier.manifests}.difference(streams))
    if others:
        names = ", ".join(map(repr, others[:STREAMS_SHOWN]))
        wanted = ", ".join(map(repr, sorted(streams)))
        warnings.warn(
            f"stream {wanted} of this namespace holds no checkpoint, so nothing was loaded; "
            f"other streams do: {names} (engine.load(state, stream=...); the folder in "
            "dcp.save's checkpoint_id names the stream)",
            stacklevel=3,
        )
    name, found = client.namespace, set[str]()
    with suppress(TieredCkptError):
        found.update(each.name for each in client.status().namespaces)

    def beside(spec: TierSpec) -> Sequence[str]:
        with closing(open_tier(spec, name, retry_s=POLL_S, script=script)) as tier:
            return tier.beside()

    answering = {tier.tier for tier in own if tier.available}
    for spec in (each for each in tiers if each.name in answering):
        with suppress(TieredCkptError, TimeoutError):
            found.update(in_daemon(partial(beside, spec), "namespaces").result(LIST_WAIT_S))
    by_name = {each.casefold(): each for each in sorted(found - {name})}
    if close := difflib.get_close_matches(name.casefold(), by_name):
        names = ", ".join(repr(by_name[each]) for each in close)
        warnings.warn(
            f"namespace {name!r} holds no checkpoint, so nothing was loaded; there are "
            f"namespaces of a similar name: {names}. If one was meant, set it (namespace: in the "
            "configuration, or TIEREDCKPT_NAMESPACE)",
            stacklevel=3,
        )


def read_holdings(
    client: AgentClient, *, within_s: float | None = None, tiers: bool = True
) -> Holdings:
    """The agent's holdings of its namespace; see :meth:`AgentClient.holdings`.

    Raises AgentError, RemoteProtocolError.
    """
    return decode_holdings(client.holdings(within_s=within_s, tiers=tiers))


def spilled_up_to(manifests: Iterable[Manifest], step: int) -> dict[str, LastSpill]:
    """By tier, the last checkpoint up to ``step`` that was scheduled for it."""
    found: dict[str, LastSpill] = {}
    for manifest in sorted(manifests, key=lambda m: (m.attempt.number, m.seq)):
        if manifest.step <= step:
            for tier in manifest.tiers:
                found[tier] = LastSpill(step=manifest.step, at_s=manifest.created_at_s)
    return found


def manifests_in(holdings: Holdings, stream: str | None = None) -> tuple[Manifest, ...]:
    """The readable manifests of all streams or of one, each once."""
    found = {
        manifest.save_id: manifest
        for tier in holdings.tiers
        for fact in tier.manifests
        if stream in (None, fact.stream)
        and isinstance(manifest := manifest_of(fact, {holdings.namespace}), Manifest)
    }
    return tuple(found.values())
