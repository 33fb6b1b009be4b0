"""One simulated host: an agent that is stepped, and trainers without torch that save and load.

The trainer repeats what the writer, ``dcp/save/collective.py`` and ``dcp/load/load.py`` do around
the real :class:`~tieredckpt.dcp.job.history.History`, recovery plan and fetcher. Every process is a
name: what it opened goes when it dies. A request is a call of the node, in which the agent may die;
then the client gets what it gets from a broken connection.
"""

from __future__ import annotations

import errno
import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Literal, TypeVar

import msgspec

from tests.format.samples import plan_id
from tests.simulation.filesystem import Died, FileSystem, Mount, oserror
from tests.simulation.oracle import MEMORY, SLOT_SIZES, Oracle, Save
from tests.simulation.system import BLOCK, SimPath, current
from tieredckpt.agent.host.runtime import RuntimeDir
from tieredckpt.agent.node import Node
from tieredckpt.config.tiers import Keep
from tieredckpt.config.units import Every
from tieredckpt.dcp.job.history import History
from tieredckpt.errors import (
    AgentError,
    FormatVersionError,
    IntegrityError,
    NotFoundError,
    StaleAttemptError,
    TieredCkptError,
    TierUnavailableError,
)
from tieredckpt.format.digest import digest
from tieredckpt.format.manifest import (
    Followed,
    Manifest,
    SegmentRef,
    encode_manifest,
)
from tieredckpt.format.plan import (
    Chunk,
    Plan,
    TensorEntry,
    build_plan,
    encode_plan,
)
from tieredckpt.format.segment import (
    ItemSpec,
    SegmentLayout,
    encode_footer,
    lay_out,
    structure_digest,
)
from tieredckpt.recovery.blocks import Range
from tieredckpt.recovery.copies import OpenedSource
from tieredckpt.recovery.fetch import SegmentFetcher
from tieredckpt.recovery.plan import Candidate, RecoveryPlan, SourceRef
from tieredckpt.rpc.messages import agent as m
from tieredckpt.storage.memory.slot import LABEL_BYTES, lock_reserved, unlock

SHM = "/sim/shm"
RUNTIME = f"{SHM}/run"
NAMESPACE = "run"
ADOPTIONS_MAX = 8
"""As in dcp/save/collective.py, which imports torch."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Settings:
    """What one case has."""

    ranks: int
    streams: tuple[str, ...]
    tiers: tuple[str, ...]
    every: int
    keep_last: int
    tier_keep_last: int
    links: bool
    direct: bool

    @staticmethod
    def draw(rng: Random) -> Settings:
        return Settings(
            ranks=rng.choice((1, 1, 2)),
            streams=rng.choice((("default",), ("default",), ("actor", "critic"))),
            tiers=rng.choice((("disk",), ("disk",), ("disk",), ("disk", "other"), ())),
            every=rng.choice((1, 1, 2)),
            keep_last=rng.choice((1, 1, 2, 3)),
            tier_keep_last=rng.choice((1, 2, 2, 3)),
            links=rng.random() < 0.8,
            direct=rng.random() < 0.5,
        )

    def spec(self) -> m.NamespaceSpec:
        return m.NamespaceSpec(
            capacity_bytes=64 << 20,
            keep_last=self.keep_last,
            wait_s=0.0,
            tiers=tuple(
                m.TierSpec(
                    name=name, url=f"file:///sim/{name}", scope="host",
                    keep=Keep(last=self.tier_keep_last),
                )
                for name in self.tiers
            ),
        )  # fmt: skip

    def schedules(self) -> tuple[m.TierSpec, ...]:
        every = Every() if self.every == 1 else Every(steps=self.every)
        return tuple(msgspec.structs.replace(tier, every=every) for tier in self.spec().tiers)


_CODES = {"eio": errno.EIO, "enospc": errno.ENOSPC, "emfile": errno.EMFILE}
_FAILING = {
    "enospc": ("write", "create", "mkdir", "link", "fallocate"),
    "emfile": ("open", "create", "listdir"),
    "eio": ("open", "create", "mkdir", "link", "unlink", "rename", "listdir", "read", "write",
            "fsync", "flock", "fallocate"),
}  # fmt: skip
"""Which calls can fail in which way."""


@dataclass(slots=True)
class Fault:
    """What goes wrong at a file system call; ``at`` counts from 1 within one operation."""

    kind: str
    at: int
    fired: str = ""


class Tickets:
    """Descriptors that the agent offers."""

    def __init__(self, fs: FileSystem) -> None:
        self._fs = fs
        self._offers: dict[str, int] = {}
        self._numbers = itertools.count()

    def offer(self, fd: int) -> str:
        ticket = f"{next(self._numbers):032x}"
        self._offers[ticket] = fd
        return ticket

    def revoke(self, ticket: str) -> bool:
        fd = self._offers.pop(ticket, None)
        if fd is not None:
            self._fs.close(fd)
        return fd is not None

    def take(self, ticket: str, process: str) -> int:
        fd = self._offers.pop(ticket, None)
        if fd is None:
            raise AgentError("no such ticket", outcome="not_applied")
        return self._fs.send(fd, process)


class Host:
    """See the module."""

    def __init__(self, seed: int, settings: Settings) -> None:
        self.rng = Random(f"host {seed}")
        self.settings = settings
        mounts = [(SHM, True), *((f"/sim/{name}", False) for name in settings.tiers)]
        self.fs = FileSystem(Random(f"fs {seed}"), mounts)
        for mount in self.fs.mounts:
            mount.links = settings.links or mount.volatile
            mount.direct = settings.direct and not mount.volatile
        self.fs.before = self._before
        current.set(self.fs, Random(f"ids {seed}"))
        self.now_s = 1000.0
        self.wall_s = 1.7e9
        self.node: Node | None = None
        self.tickets = Tickets(self.fs)
        self.fault: Fault | None = None
        self.dying = ""
        """Who is dying: its calls end nowhere until it is gone."""
        self.doomed = ""
        """The trainer that dies when the agent has answered it."""
        keep = dict.fromkeys(settings.tiers, settings.tier_keep_last)
        self.oracle = Oracle(self.fs, {MEMORY: settings.keep_last, **keep})
        self.at_call: Callable[[], None] | None = None
        """Done once, in the middle of a spill, at the fault's call."""

    # --- faults -----------------------------------------------------------------------------------

    def _before(self, name: str, mount: Mount | None) -> int | None:
        if self.dying:
            raise Died(self.dying)
        fault = self.fault
        if fault is None or fault.fired or self.fs.calls < fault.at:
            return None
        return self._fire(fault, name, mount)

    def _fire(self, fault: Fault, name: str, mount: Mount | None) -> int | None:
        agent = self.fs.process == "agent"
        if fault.kind in ("short", *_CODES):
            return self._fail(fault, name, mount)
        if fault.kind == "nested" and (mount is None or mount.volatile or self.at_call is None):
            return None
        fault.fired = name
        if fault.kind == "nested":
            call, self.at_call = self.at_call, None
            process, self.fs.process = self.fs.process, "test"
            try:
                assert call is not None
                call()
            finally:
                self.fs.process = process
        elif fault.kind == "power" or (fault.kind == "kill agent" and agent):
            self.dying = fault.kind
            raise Died(fault.kind)
        elif fault.kind == "kill agent":
            self.agent_gone()
        elif agent:
            self.doomed = fault.kind
        else:
            self.dying = fault.kind
            raise Died(fault.kind)
        return None

    def _fail(self, fault: Fault, name: str, mount: Mount | None) -> int | None:
        """A call fails that can fail in this way, the next one if this one cannot."""
        if mount is None:
            return None
        if fault.kind == "short":
            if name not in ("read", "write"):
                return None
            fault.fired = name
            # A read of a page is never cut; a larger one may be, between pages.
            return 4096 if name == "read" else self.rng.choice((1, 100, 4096))
        if fault.kind in _FAILING and name not in _FAILING[fault.kind]:
            return None
        fault.fired = name
        raise oserror(_CODES[fault.kind], f"{name} on {mount.path}")

    def agent_gone(self) -> None:
        """The agent was killed."""
        self.fs.kill("agent")
        self.node = None

    def power_gone(self) -> None:
        """The host lost its power: nobody runs, and the agent's folder is empty."""
        self.fs.lose_power()
        self.node = None
        self.dying = self.doomed = ""

    # --- the agent --------------------------------------------------------------------------------

    def as_agent(self, call: Callable[[Node], T]) -> T:
        """Let the agent do something; one is started if none runs.

        Raises:
            AgentError: It died; ``outcome`` is "unknown".
        """
        process, self.fs.process = self.fs.process, "agent"
        try:
            return call(self._running())
        except Died as died:
            if died.args[0] != "kill agent":
                raise
            self.dying = ""
            self.agent_gone()
            raise AgentError("the agent died", outcome="unknown") from None
        except OSError as error:  # the server answers with an error
            raise AgentError(f"the agent failed: {error}", outcome="unknown") from error
        finally:
            self.fs.process = process

    def _running(self) -> Node:
        if self.node is None:
            try:
                self.node = self._boot()
            except (OSError, TieredCkptError) as error:
                self.agent_gone()
                raise AgentError(f"the agent does not start: {error}", outcome="unknown") from error
        return self.node

    def _boot(self) -> Node:
        self.tickets = Tickets(self.fs)
        path = SimPath(RUNTIME)
        path.mkdir(exist_ok=True)
        runtime = RuntimeDir(path)  # type: ignore[arg-type]
        node = Node(runtime, self.tickets, host_id="sim", clock=lambda: self.now_s)
        node.adopt()
        return node

    def stop_agent(self) -> None:
        """An orderly end."""
        if self.node is not None:
            self.as_agent(lambda node: node.stop())
            for worker in self.workers().values():
                worker._place.close()
            self.agent_gone()

    def workers(self) -> dict[str, SimWorker]:
        node = self.node
        if node is None:
            return {}
        found = {each.name: each for each in node._registry.namespaces()}
        return dict(found[NAMESPACE].workers) if NAMESPACE in found else {}  # type: ignore[arg-type]

    def spill(self, tier: str) -> None:
        """One step of a tier's thread."""

        def step(node: Node) -> None:
            worker = self.workers().get(tier)
            if worker is not None:
                worker.step()

        self.as_agent(step)
        for save in list(self.oracle.waiting(tier)):
            worker = self.workers().get(tier)
            if worker is not None and worker.outcome(save.save_id).level == "done":
                self.oracle.holds(tier, save)


class Client:
    """What an ``AgentClient`` with a session is to a trainer's rank."""

    def __init__(self, host: Host, process: str, rank: int, run_id: str) -> None:
        self.process = process
        self.rank = rank
        self.run_id = run_id
        self.namespace = NAMESPACE
        self._host = host
        self.session_id = current.ids.randbytes(16).hex()
        self._lease = -1
        self.open_session()

    def _ask(self, call: Callable[[Node], T]) -> T:
        host = self._host
        host.fs.process = self.process
        try:
            return host.as_agent(call)
        finally:
            if host.doomed and not host.dying:
                host.dying, host.doomed = host.doomed, ""
                raise Died(host.dying)

    def open_session(self) -> None:
        request = m.OpenSession(
            api=m.API_VERSION, version="sim", session_id=self.session_id, namespace=NAMESPACE,
            run=self.run_id, spec=self._host.settings.spec(), local_rank=self.rank,
            local_world_size=self._host.settings.ranks,
        )  # fmt: skip
        opened = self._ask(lambda node: node.open_session(request))
        if opened.lease_ticket:
            if self._lease >= 0:
                self._host.fs.close(self._lease)
            self._lease = self.redeem(opened.lease_ticket)

    def redeem(self, ticket: str) -> int:
        return self._host.tickets.take(ticket, self.process)

    def request(self, call: Callable[[Node], T]) -> T:
        """In the session, which is opened again if the agent does not know it."""
        try:
            return self._ask(call)
        except NotFoundError as error:
            if error.fields.get("what") != "session":
                raise
        self.open_session()
        return self._ask(call)

    def prepare(self, size: int) -> m.Prepared:
        request = m.Prepare(session_id=self.session_id, segment_bytes=size)
        return self.request(lambda node: node.prepare(NAMESPACE, request))

    def reserve(self, size: int) -> m.Grant:
        request = m.Reserve(session_id=self.session_id, segment_bytes=size)
        return self.request(lambda node: node.reserve(NAMESPACE, request))

    def seal(self, grant: m.Grant, size: int, root: str) -> m.Sealed:
        request = m.Seal(
            session_id=self.session_id, segment_id=grant.segment_id, slot_id=grant.slot_id,
            segment_bytes=size, root=root,
        )  # fmt: skip
        return self.request(lambda node: node.seal(NAMESPACE, request))

    def commit(self, manifest: bytes, plan: bytes | None = None, *, attempt: bytes) -> m.Committed:
        request = m.Commit(
            session_id=self.session_id, run=self.run_id, manifest=manifest, plan=plan,
            attempt=attempt,
        )  # fmt: skip
        return self.request(lambda node: node.commit(NAMESPACE, request))

    def open_attempt(
        self,
        attempt_id: str,
        bases: tuple[m.BaseSpec, ...],
        *,
        followed: tuple[Followed, ...] = (),
        cause: Literal["load", "save"],
        silent: tuple[str, ...] = (),
    ) -> bytes:
        request = m.OpenAttempt(
            session_id=self.session_id, attempt_id=attempt_id, run=self.run_id, cause=cause,
            bases=bases, followed=followed, silent=silent,
        )  # fmt: skip
        data = self.request(lambda node: node.open_attempt(NAMESPACE, request))
        asked = {base.stream: base.save_id for base in bases}
        self._host.oracle.opened(attempt_id, asked, data)
        return data

    def holdings(self, *, within_s: float | None = None, tiers: bool = True) -> bytes:
        del within_s, tiers  # simulated time does not pass while a tier is looked at
        return self.request(lambda node: node.holdings(NAMESPACE))

    def progress(self, save_id: str) -> m.Progress:
        return self.request(lambda node: node.progress(NAMESPACE, save_id))

    def open_segment(self, source: SourceRef) -> OpenedSource:
        request = m.OpenSegment(tier=source.tier, segment_id=source.segment_id)
        opened = self.request(lambda node: node.open_segment(NAMESPACE, request))
        return OpenedSource(fd=self.redeem(opened.ticket), direct=opened.direct)

    def report_damage(self, source: SourceRef, blocks: tuple[int, ...], reason: str) -> None:
        damage = m.ReportDamage(
            tier=source.tier, segment_id=source.segment_id, blocks=blocks, reason=reason
        )
        try:
            self.request(lambda node: node.report_damage(NAMESPACE, damage))
        except TieredCkptError:
            pass  # as in dcp/load/sources.py: whoever reads this copy next finds it again


@functools.cache
def layout_of(size: int) -> SegmentLayout:
    tensor = ItemSpec("weights", "tensor", size, "uint8", (size,), (0,), (size,))
    return lay_out([tensor, ItemSpec("step", "bytes", 16)], BLOCK)


SIZES = (2 * BLOCK + 600, 3 * BLOCK, 900)


@functools.cache
def plan_of(ranks: int, size: int) -> tuple[str, bytes]:
    """Id and bytes of the plan of a state whose every rank has ``size`` bytes."""
    plan: Plan = build_plan(
        [
            TensorEntry(
                f"weights{rank}", "uint8", "strided", False, "contiguous_format", False,
                (size,), (Chunk((0,), (size,), rank, 0),),
            )
            for rank in range(ranks)
        ],
        structures=[structure_digest(layout_of(size).items)] * ranks,
    )  # fmt: skip
    return plan_id(plan), encode_plan(plan)


def content(number: int, rank: int, size: int) -> bytes:
    """Bytes that differ for each save, rank and block."""
    return b"".join(
        digest(f"{number} {rank} {block}".encode()) * (BLOCK // 16)
        for block in range(-(-size // BLOCK))
    )[:size]


@dataclass(slots=True)
class Loaded:
    """What a load restored, or why nothing."""

    plan: RecoveryPlan
    save: Save | None
    refused: list[str] = field(default_factory=list)


class Trainer:
    """All ranks of one start of training."""

    def __init__(self, host: Host, number: int) -> None:
        self.host = host
        self.number = number
        settings = host.settings
        self.names = [f"trainer{number}.{rank}" for rank in range(settings.ranks)]
        self.alive = True
        self.blind = False
        """It loaded an older checkpoint, or nothing, as what there is could not be read."""
        self.loaded_at = ""
        """The newest attempt when it began to load."""
        run_id = current.ids.randbytes(16).hex()
        self.clients = [Client(host, name, r, run_id) for r, name in enumerate(self.names)]
        self.history = History(self.clients[0], settings.schedules())  # type: ignore[arg-type]
        self._next: list[m.Grant | None] = [None] * settings.ranks
        self._fds: list[dict[str, int]] = [{} for _ in self.names]

    def die(self) -> None:
        """SIGKILL to all ranks."""
        self.alive = False
        for name in self.names:
            self.host.fs.kill(name)

    # --- saving -----------------------------------------------------------------------------------

    def save(self, stream: str, step: int, size: int) -> Save:
        """One save; raises what the product raises."""
        host, oracle = self.host, self.host.oracle
        self.history.check_may_save(stream)
        number = oracle.next_number()
        written = [self._segment(rank, number, size) for rank in range(len(self.clients))]
        identity, plan = plan_of(len(self.clients), size)
        manifest = self.history.begin_save(
            stream, step, host.wall_s, plan=identity,
            segments=tuple(ref for ref, _ in written), world_size=len(written), tags={},
        )  # fmt: skip
        for left in reversed(range(ADOPTIONS_MAX)):
            save = self._known(manifest, number, written, layout_of(size).data_bytes)
            oracle.committing(save)
            try:
                self._send(manifest, save.manifest, identity, plan)
                break
            except StaleAttemptError as error:
                oracle.refused(save)
                if not error.fields.get("same_run") or not left:
                    raise
            manifest = self.history.moved(manifest)
        self.history.plans_sent = {identity}
        self.history.saved(manifest)
        oracle.holds(MEMORY, save)
        return save

    def _known(
        self,
        manifest: Manifest,
        number: int,
        written: Sequence[tuple[SegmentRef, bytes]],
        data_bytes: int,
    ) -> Save:
        return Save(
            save_id=manifest.save_id, stream=manifest.stream, step=manifest.step, number=number,
            attempt=manifest.attempt.id, tiers=manifest.tiers, manifest=encode_manifest(manifest),
            plan=manifest.plan, segments=tuple((ref.id, image) for ref, image in written),
            data_bytes=data_bytes,
        )  # fmt: skip

    def _send(self, manifest: Manifest, data: bytes, identity: str, plan: bytes) -> None:
        """As in dcp/save/collective.py."""
        client = self.clients[0]
        try:
            with_plan = identity not in self.history.plans_sent
            attempt = self.history.attempt
            reply = client.commit(data, plan if with_plan else None, attempt=attempt)
            if reply.need_plan:
                reply = client.commit(data, plan, attempt=attempt)
                assert not reply.need_plan, "the agent asks for a plan that it was just sent"
        except TierUnavailableError:
            self.history.save_unknown(manifest)
            raise

    def _segment(self, rank: int, number: int, size: int) -> tuple[SegmentRef, bytes]:
        host, client, layout = self.host, self.clients[rank], layout_of(size)
        segment_bytes = layout.segment_bytes
        grant, fd, own = self._reserve(rank, segment_bytes)
        host.fs.process = client.process
        SLOT_SIZES.add(grant.capacity_bytes + LABEL_BYTES)
        data = content(number, rank, layout.data_bytes)
        digests = b"".join(
            digest(data[start : start + BLOCK]) for start in range(0, len(data), BLOCK)
        )
        footer = encode_footer(layout, digests, bytes.fromhex(grant.segment_id))
        image = data.ljust(layout.data_bytes, b"\0") + footer
        half = len(image) // 2
        for start, piece in ((0, image[:half]), (half, image[half:])):
            while piece:  # the trainer writes through a mapping, which is never short
                done = host.fs.pwrite(fd, piece, start)
                start, piece = start + done, piece[done:]
        root = footer[-16:].hex()
        sealed = client.seal(grant, segment_bytes, root)
        self._next[rank] = sealed.next
        host.fs.process = client.process
        unlock(fd)
        if own:
            host.fs.close(fd)
        host.fs.process = "test"
        return SegmentRef(grant.segment_id, segment_bytes, root, "sim"), image

    def _reserve(self, rank: int, segment_bytes: int) -> tuple[m.Grant, int, bool]:
        client = self.clients[rank]
        if not self._fds[rank]:
            for slot in client.prepare(segment_bytes).slots:
                self._fds[rank][slot.slot_id] = client.redeem(slot.ticket)
        grant, self._next[rank] = self._next[rank], None
        if grant is not None and grant.capacity_bytes >= segment_bytes:
            held = self._fds[rank].get(grant.slot_id)
            self.host.fs.process = client.process
            try:
                if held and lock_reserved(held, grant.capacity_bytes, grant.segment_id):
                    return grant, held, False
            except (IntegrityError, OSError):
                pass  # as in dcp/slots/slot_ring.py: it is damaged, the agent gives another one
        grant = client.reserve(segment_bytes)
        assert grant.ticket is not None
        return grant, client.redeem(grant.ticket), True

    # --- loading ----------------------------------------------------------------------------------

    def load(self, stream: str, *, step: int | None = None) -> Loaded:
        """Restore the newest checkpoint that can be, as ``engine.load`` does; nothing changes.

        With a step it is to go back for good; if there is nothing it may begin anew.

        Raises:
            AgentError, FormatVersionError, RemoteProtocolError: As ``engine.load``.
        """
        failed: list[str] = []
        refused: list[str] = []
        while True:
            plan = self.history.recovery_plan(stream, step=step, exclude=frozenset(failed))
            chosen = plan.chosen
            refused = [f"{each.save_id}: {each.reason}" for each in plan.refused]
            if chosen is None:
                if step is None:
                    self.history.restored([plan], {}, abandon_newer=False)
                return Loaded(plan, None, refused)
            try:
                save = self._fetch(chosen)
            except (AgentError, FormatVersionError):
                raise
            except (IntegrityError, NotFoundError, TierUnavailableError):
                failed.append(chosen.manifest.save_id)
                continue
            known = [each.manifest for each in plan.candidates]
            self.history.restored([plan], {stream: known}, abandon_newer=step is not None)
            return Loaded(plan, save, refused)

    def _fetch(self, chosen: Candidate) -> Save:
        manifest = chosen.manifest
        save = self.host.oracle.saves.get(manifest.save_id)
        assert save is not None, "a checkpoint that nobody saved"
        found: list[bytes] = []
        for rank, (ref, sources) in enumerate(zip(manifest.segments, chosen.sources, strict=True)):
            found.append(self._fetch_segment(rank, ref, sources))
        wanted = [image[: len(data)] for (_, image), data in zip(save.segments, found, strict=True)]
        assert found == wanted, f"wrong bytes were restored for step {save.step}"
        return save

    def _fetch_segment(self, rank: int, ref: SegmentRef, sources: Sequence[SourceRef]) -> bytes:
        client = self.clients[rank % len(self.clients)]
        self.host.fs.process = client.process
        try:
            with SegmentFetcher(
                ref, sources, client.open_segment, client.report_damage, threads=1
            ) as fetcher:
                into = bytearray(fetcher.footer().trailer.data_bytes)
                fetcher.fetch([Range(0, len(into), memoryview(into))])
                return bytes(into)
        finally:
            self.host.fs.process = "test"


from tests.simulation.worker import SimWorker  # noqa: E402
