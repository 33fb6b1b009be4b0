"""All that the authority simulation asks of the product, in one place.

The world (``authority_world.py``) and the oracle know nothing of attempts, terms or leaders: they
open runs, load, save, purge and let agents take their turns through this module. When the protocol
changes, this is what changes with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, Literal, TypeVar

from tests.simulation import authority_host as hw
from tests.simulation.authority_seam import Client, simulated
from tests.simulation.shared_world import PLANS
from tieredckpt.agent.namespace import Namespace
from tieredckpt.agent.node import Node
from tieredckpt.config.tiers import Keep
from tieredckpt.dcp.job.history import History
from tieredckpt.dcp.job.hosts import earlier_hosts
from tieredckpt.dcp.job.unreported import Ending, UnreportedSegments
from tieredckpt.errors import (
    AgentError,
    NamespaceInUseError,
    NoRecoverableCheckpointError,
    NotFoundError,
    StaleAttemptError,
    TieredCkptError,
    TierUnavailableError,
    UsageError,
)
from tieredckpt.format.manifest import (
    Followed,
    Holders,
    Manifest,
    SegmentRef,
    decode_attempt,
    encode_manifest,
)
from tieredckpt.policy.placement import PlacementHost, place
from tieredckpt.recovery.evidence import known_manifests
from tieredckpt.recovery.plan import RecoveryPlan, plan_common
from tieredckpt.rpc.auth import Secret
from tieredckpt.rpc.messages import agent as m
from tieredckpt.rpc.messages.peer import AskHoldings
from tieredckpt.storage.holdings import Holdings, decode_holdings

__all__ = ["AUTHORITY_ERRORS", "Rules", "Run", "simulated"]

T = TypeVar("T")
NAMESPACE = "run"
STREAM = "default"
SEGMENT_BYTES = 4096
ADOPTIONS_MAX = 8
"""As in dcp/save/collective.py, which imports torch."""
Choose = Callable[[list[str]], str]
PLAN_ID, PLAN = next(iter(PLANS.items()))
AUTHORITY_ERRORS = (StaleAttemptError, NamespaceInUseError, NotFoundError, UsageError)
"""What says that somebody else is right, or that a part is gone. Others say: not now."""


@dataclass(frozen=True, slots=True)
class Rules:
    """What the user asked for."""

    keep: int
    """In memory."""
    bucket_keep: int
    """In the shared tier; 0: there is none in this configuration."""
    on_pressure: Literal["keep", "drop_oldest_queued"]
    replicas: int

    def spec(self) -> m.NamespaceSpec:
        bucket = m.TierSpec(
            name="bucket", url="s3://bucket/prefix", scope="shared",
            keep=Keep(last=self.bucket_keep or 1), on_pressure=self.on_pressure,
            takeover_after_s=10.0, delete_delay_s=20.0, sweep_after_s=300.0,
        )  # fmt: skip
        return m.NamespaceSpec(
            capacity_bytes=1 << 40,
            keep_last=self.keep,
            wait_s=0.0,
            tiers=(bucket,) if self.bucket_keep else (),
        )

    def schedules(self) -> tuple[m.TierSpec, ...]:
        return self.spec().tiers


# --- agents -------------------------------------------------------------------------------------


def boot(world: hw.World, machine: hw.Machine) -> None:
    """Start a host's agent; it adopts what is there."""
    life = machine.life = hw.Life(machine)
    world.running.append(life)
    try:
        node: Any = Node(
            hw.SimRuntime(machine),  # type: ignore[arg-type]
            hw.Tickets(world),
            host_id=machine.name,
            clock=hw.mono,
        )
        life.node = node
        node.adopt()
        for namespace in node._registry.namespaces():
            namespace.across.start()
            namespace.replication.start()
    finally:
        world.running.pop()


def _namespace(machine: hw.Machine) -> Namespace | None:
    life = machine.life
    if life is None:
        return None
    found = {each.name: each for each in life.node._registry.namespaces()}
    return found.get(NAMESPACE)


def gossip_tick(world: hw.World, machine: hw.Machine) -> None:
    """The turn of the thread that watches other hosts."""
    for watch in machine.life.watches if machine.life is not None else ():
        if watch.on:
            _quietly(world, machine, lambda life, watch=watch: watch.step())


def prune_tick(world: hw.World, machine: hw.Machine) -> None:
    """The turns of copying between memories, of the tiers' workers, and of their pruners."""
    life = machine.life
    for background in life.backgrounds if life is not None else ():
        _quietly(world, machine, lambda _, each=background: each.turn())
    namespace = _namespace(machine)
    for worker in list(namespace.workers.values()) if namespace is not None else ():
        _quietly(world, machine, lambda _, each=worker: each.turn())


def reap_tick(world: hw.World, machine: hw.Machine) -> None:
    """The reaper's turn."""
    if machine.life is not None:
        _quietly(world, machine, lambda life: life.node.reap())


def _quietly(world: hw.World, machine: hw.Machine, call: Callable[[hw.Life], object]) -> None:
    try:
        world.as_agent(machine, call)
    except AgentError:
        pass  # it died in the middle


def purge(world: hw.World, machine: hw.Machine) -> bool:
    """A person deletes the namespace from a host's memory; False: it is not there."""
    if _namespace(machine) is None:
        return False
    world.as_agent(machine, lambda life: life.node.purge(NAMESPACE))
    return True


# --- what exists, as hardware has it ------------------------------------------------------------


def believed_alive(machine: hw.Machine) -> frozenset[str]:
    """The members of its job that a host's agent takes for alive, but itself."""
    namespace = _namespace(machine)
    if namespace is None:
        return frozenset()
    return frozenset(namespace.peers.others()) - namespace.peers.lost()


def said_replicated(machine: hw.Machine, save_id: str) -> bool:
    """Whether a host's agent says that all copies of a checkpoint are there."""
    namespace = _namespace(machine)
    return namespace is not None and namespace.replication.outcome(save_id).level == "done"


def given_up(machine: hw.Machine, save_id: str) -> bool:
    """Whether a host's agent holds that a checkpoint goes to the shared tier no more."""
    namespace = _namespace(machine)
    if namespace is None or "bucket" not in namespace.workers:
        return False
    found = namespace.keeping.find(save_id)
    return found is not None and "bucket" not in namespace.giving_up.destinations(found)


def has_manifest(machine: hw.Machine, save_id: str) -> bool:
    """In memory."""
    return f"manifests/{STREAM}/{save_id}" in machine.objects.get(NAMESPACE, {})


def has_segment(machine: hw.Machine, segment_id: str) -> bool:
    """Sealed, in memory."""
    return any(
        slot.label.state == "sealed" and slot.label.segment_id == segment_id
        for slot in machine.slots.values()
    )


def bucket_key(save_id: str) -> str:
    return f"manifests/{STREAM}/{save_id}"


def served_with(machine: hw.Machine) -> str:
    """The token with which a host's agent answers others; "": it does not."""
    return machine.served.get(NAMESPACE, (None, ""))[1]


def _check_plan(plan: RecoveryPlan) -> None:
    """As dcp/load/choose.py: there is something to restore, or certainly nothing."""
    if plan.chosen is not None:
        return
    if plan.sides:
        raise NoRecoverableCheckpointError("a fork", sides=[each.save_id for each in plan.sides])
    if plan.refused or plan.candidates or plan.abandoned or plan.incomplete:
        raise NoRecoverableCheckpointError("nothing that can be restored", refused=[])


# --- trainers -----------------------------------------------------------------------------------


@dataclass(eq=False)
class Rank:
    """One trainer process."""

    machine: hw.Machine
    session_id: str
    number: int
    local: int = 0
    grant: m.Grant | None = None
    unreported: UnreportedSegments = field(default_factory=UnreportedSegments)


@dataclass(frozen=True, slots=True)
class Part:
    """What a rank has sealed for a save."""

    segment: str
    host: str
    ref: SegmentRef


@dataclass(eq=False)
class Run:
    """One start of all ranks together.

    Args:
        world: Where.
        machines: Its hosts; the first one's agent leads.
        rules: What was configured.
        coordinator: The host whose first rank commits saves.
        token: As configured; "": the hosts agree on one.
        crowd: Draws how many ranks a host has, one or two, and the ranks tell their agents of hosts
            of earlier jobs. None: one rank on each host, which tells of nobody.
    """

    world: hw.World
    machines: Sequence[hw.Machine]
    rules: Rules
    coordinator: int
    token: str
    crowd: Random | None = None
    ranks: list[Rank] = field(default_factory=list)
    attempts: list[int] = field(default_factory=list)
    """Numbers of the attempts that the run was told of: only to say what a case is about."""

    def __post_init__(self) -> None:
        self.run_id = self.world.token_hex(16)
        self.asked = 0
        self.warned = ""
        self.listens = False
        self.placement: tuple[Holders, ...] = ()

    # --- life -------------------------------------------------------------------------------------

    def open(self) -> None:
        """``Engine.open`` on all ranks. Raises what it raises."""
        for at, machine in enumerate(self.machines):
            count = self.crowd.choice((1, 2, 2)) if self.crowd is not None else 1
            for local in range(count):
                rank = Rank(machine, self.world.token_hex(16), len(self.ranks), local)
                if at == self.coordinator and local == 0:
                    self.saver = rank.number
                machine.trainers.add(rank.session_id)
                self.ranks.append(rank)
                self._open_session(rank)
        self._join()
        schedules = self.rules.schedules()
        clients = [TrainerClient(self, rank) for rank in self.ranks]
        self._histories = [History(each, schedules) for each in clients]  # type: ignore[arg-type]
        for number, history in enumerate(self._histories):
            others = Others(self, self.ranks[number]) if self.listens else None
            history.others = lambda others=others: others  # type: ignore[assignment,misc,return-value]

    def _open_session(self, rank: Rank) -> None:
        request = m.OpenSession(
            api=m.API_VERSION, version="sim", session_id=rank.session_id, namespace=NAMESPACE,
            run=self.run_id, spec=self.rules.spec(), local_rank=rank.local,
            local_world_size=1 if self.crowd is None else 2,
        )  # fmt: skip
        self._ask(rank, lambda node: node.open_session(request))

    def _ask(self, rank: Rank, call: Callable[[Node], T]) -> T:
        """A request of a trainer to its own agent, which it starts if there is none."""
        if rank.machine.life is None:
            boot(self.world, rank.machine)
        return self.world.as_agent(rank.machine, lambda life: call(life.node))

    def request(self, rank: Rank, call: Callable[[Node], T]) -> T:
        """In the session, which is opened again if the agent does not know it."""
        try:
            return self._ask(rank, call)
        except NotFoundError as error:
            if error.fields.get("what") != "session":
                raise
        self._open_session(rank)
        return self._ask(rank, call)

    def _join(self) -> None:
        """As dcp/open.py."""
        speakers = [rank for rank in self.ranks if rank.local == 0]
        met = [bool(self._ask(r, lambda node: node.peers(NAMESPACE)).peers) for r in speakers]
        hosts = [PlacementHost(machine.name, ()) for machine in self.machines]
        holders = place(hosts, self.rules.replicas, {}).holders
        self.placement = tuple(Holders(h, tuple(holders[h])) for h in sorted(holders) if holders[h])
        self.listens = len(speakers) > 1 or any(met)
        if not self.listens:
            return
        known = [self._ask(r, lambda node: node.peers(NAMESPACE)).token for r in speakers]
        token = self.token or next((each for each in known if each), self.world.token_hex(32))
        entries = []
        for rank in speakers:
            request = m.Listen(
                session_id=rank.session_id, token=token, tls=None, interfaces=(), cidrs=(),
                port=0, labels={},
            )  # fmt: skip
            entries.append(self._ask(rank, lambda n, x=request: n.listen(NAMESPACE, x)).host)
        names = {each.host_id for each in entries}
        tables = [self._ask(r, lambda node: node.peers(NAMESPACE)).peers for r in speakers]
        told = [s for table in tables for s in table if s.host.host_id not in names]
        for rank in speakers:
            peers = m.SetPeers(
                session_id=rank.session_id, run=self.run_id, leader=self.machines[0].name,
                hosts=tuple(entries), replicas=self.rules.replicas,
                earlier=earlier_hosts(told) if self.crowd is not None else (),
            )  # fmt: skip
            self._ask(rank, lambda node, x=peers: node.set_peers(NAMESPACE, x))

    def end(self) -> None:
        """All ranks are killed."""
        for rank in self.ranks:
            self.end_rank(rank)

    def end_rank(self, rank: Rank) -> None:
        rank.machine.trainers.discard(rank.session_id)
        for fd in [f for f, (_, who) in self.world.fds.items() if who == rank.session_id]:
            self.world.close(fd)

    # --- loading ----------------------------------------------------------------------------------

    def load(self, choose: Choose | None = None) -> str | None:
        """``engine.load``: what was restored; None: it says that there is nothing. Raises as it.

        ``choose``: asked which checkpoint to load by its save id, if there is a fork.
        """
        first, history = self.ranks[0], self._histories[0]
        others = history.others()
        own = decode_holdings(self.request(first, lambda node: node.holdings(NAMESPACE)))
        held, silent = ([own], None) if others is None else others.ask_all(own)  # type: ignore[misc]
        (plan,) = plan_common(held, (STREAM,), unreachable=silent)
        if plan.sides and choose is not None:
            save_id = choose([each.save_id for each in plan.sides])
            (plan,) = plan_common(held, (STREAM,), save_id=save_id, unreachable=silent)
        _check_plan(plan)
        self.warned = " ".join(plan.warnings)
        known = [each.manifest for each in plan.candidates]
        history.restored([plan], {STREAM: known}, abandon_newer=False)
        for other in self._histories[1:]:
            other.adopt(history.snapshot((STREAM,)))
        return plan.chosen.manifest.save_id if plan.chosen is not None else None

    # --- saving -----------------------------------------------------------------------------------

    def seal(self) -> list[Part]:
        """Every rank writes its part. Raises: one could not; those before are given back."""
        parts: list[Part] = []
        try:
            parts.extend(self._write(rank) for rank in self.ranks)
        except TieredCkptError:
            self.failed(parts)
            raise
        return parts

    def _write(self, rank: Rank) -> Part:
        world = self.world
        grant, fd = self._claim(rank)
        self.asked += 1
        if grant is None:
            request = m.Reserve(
                session_id=rank.session_id, segment_bytes=SEGMENT_BYTES, asked_at_ns=self.asked,
                before=rank.unreported.report(),
            )  # fmt: skip
            grant = self.request(rank, lambda node: node.reserve(NAMESPACE, request))
            fd = int(grant.ticket or 0)
            world.fds[fd] = (world.fds[fd][0], rank.session_id)
        rank.unreported.begin(grant.segment_id, STREAM)
        root = world.token_hex(16)
        slot, _ = world.fds[fd]
        slot.content = (grant.segment_id, SEGMENT_BYTES, root)
        seal = m.Seal(
            session_id=rank.session_id, segment_id=grant.segment_id, slot_id=grant.slot_id,
            segment_bytes=SEGMENT_BYTES, root=root,
        )  # fmt: skip
        try:
            rank.grant = self.request(rank, lambda node: node.seal(NAMESPACE, seal)).next
        finally:
            world.close(fd)
        ref = SegmentRef(grant.segment_id, SEGMENT_BYTES, root, rank.machine.name)
        return Part(grant.segment_id, rank.machine.name, ref)

    def _claim(self, rank: Rank) -> tuple[m.Grant | None, int]:
        """The slot that was granted ahead, if it is still the rank's."""
        grant, rank.grant = rank.grant, None
        slot = rank.machine.slots.get(grant.slot_id) if grant is not None else None
        if grant is None or slot is None or slot.writer or slot.label.state != "reserved":
            return None, 0
        if slot.label.segment_id != grant.segment_id:
            return None, 0
        return grant, self.world.open_fd(slot, rank.session_id, locked=True)

    def failed(self, parts: Iterable[Part]) -> None:
        """The ranks hear that their save failed; the coordinator says so."""
        self._end_save(parts, Ending())
        rank = self.ranks[self.saver]
        request = m.SaveFailed(
            session_id=rank.session_id, segments=tuple(each.segment for each in parts), skipped=0
        )
        try:
            self.request(rank, lambda node: node.save_failed(NAMESPACE, request))
        except TieredCkptError:
            pass  # it hears of it when the next save asks for slots

    def _end_save(self, parts: Iterable[Part], ending: Ending) -> None:
        """What the job's own network brings to all ranks."""
        for rank in self.ranks:
            rank.unreported.end([each.segment for each in parts], ending.outcome)

    def commit(
        self, parts: Sequence[Part], step: int, begun: Callable[[str], None]
    ) -> str:  # fmt: skip
        """The coordinator commits the save. Raises what the caller of the save is told.

        Args:
            parts: From :meth:`seal`.
            step: The training step.
            begun: Called with the save id before it is sent.
        """
        history, world = self._histories[self.saver], self.world
        history.check_may_save(STREAM)
        manifest = history.begin_save(
            STREAM, step, world.wall(), plan=PLAN_ID, segments=tuple(each.ref for each in parts),
            world_size=len(parts), tags={}, replicas=self.placement,
        )  # fmt: skip
        begun(manifest.save_id)
        ending = Ending()
        try:
            with ending.committing():
                self._commit(manifest)
        finally:
            self._end_save(parts, ending)
        return manifest.save_id

    def _commit(self, manifest: Manifest) -> None:
        """As dcp/save/collective.py."""
        history = self._histories[self.saver]
        for left in reversed(range(ADOPTIONS_MAX)):
            try:
                self._send(manifest)
                break
            except StaleAttemptError as error:
                if not error.fields.get("same_run") or not left:
                    raise
            manifest = history.moved(manifest)
        history.saved(manifest)

    def _send(self, manifest: Manifest) -> None:
        rank, history = self.ranks[self.saver], self._histories[self.saver]
        try:
            for plan in (None, PLAN):
                request = m.Commit(
                    session_id=rank.session_id, run=self.run_id,
                    manifest=encode_manifest(manifest), plan=plan, attempt=history.attempt,
                )  # fmt: skip
                if not self.request(rank, lambda n, x=request: n.commit(NAMESPACE, x)).need_plan:
                    return
        except TierUnavailableError:
            history.save_unknown(manifest)
            raise
        raise AssertionError("the agent asks for a plan that it was just sent")


class TrainerClient:
    """What an ``AgentClient`` with a session is to :class:`History`."""

    namespace = NAMESPACE

    def __init__(self, run: Run, rank: Rank) -> None:
        self._run, self._rank = run, rank
        self.run_id, self.session_id = run.run_id, rank.session_id

    def open_attempt(
        self, attempt_id: str, bases: tuple[m.BaseSpec, ...], *,
        followed: tuple[Followed, ...], cause: Literal["load", "save"],
        silent: tuple[str, ...] = (),
    ) -> bytes:  # fmt: skip
        request = m.OpenAttempt(
            session_id=self.session_id, attempt_id=attempt_id, run=self.run_id,
            cause=cause, bases=bases, followed=followed, silent=silent,
        )  # fmt: skip
        data = self._run.request(self._rank, lambda node: node.open_attempt(NAMESPACE, request))
        self._run.attempts.append(decode_attempt(data).number)
        return data

    def call(self, request: m.AddRecord) -> m.Pinned:
        return self._run.request(self._rank, lambda node: node.add_record(NAMESPACE, request))

    def holdings(self, *, within_s: float | None = None, tiers: bool = True) -> bytes:
        return self._run.request(self._rank, lambda node: node.holdings(NAMESPACE))

    def progress(self, save_id: str) -> m.Progress:
        return self._run.request(self._rank, lambda node: node.progress(NAMESPACE, save_id))


class Others:
    """A trainer's lines to other hosts' agents, as ``dcp/other_hosts.py`` asks them."""

    def __init__(self, run: Run, rank: Rank) -> None:
        self._run, self._rank = run, rank
        self._silent: tuple[str, ...] = ()

    def unreachable(self) -> tuple[str, ...]:
        return self._silent

    def ask_all(self, own: Holdings) -> tuple[list[Holdings], dict[str, str]]:
        """What all hosts hold, the own one first, and why others did not say."""
        table = self._run.request(self._rank, lambda node: node.peers(NAMESPACE))
        found, silent = [own], dict[str, str]()
        for state in table.peers:
            client = Client(
                state.host, NAMESPACE, Secret(table.token, None), source=self._rank.machine
            )
            have = sorted(known_manifests(found))
            try:
                held = decode_holdings(client.ask(AskHoldings(manifests=tuple(have))))
            except TieredCkptError as error:
                silent[state.host.host_id] = str(error)
                continue
            if held.host_id == state.host.host_id:
                found.append(held)
            else:
                silent[state.host.host_id] = f"it reports that it is {held.host_id}"
        self._silent = tuple(sorted(silent))
        return found, {**silent, **table.unmet}
