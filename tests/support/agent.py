"""Real agents in runtime folders of their own, and a torch-free trainer that saves real segments.

``python -m tests.support.agent --runtime-dir DIR ...`` runs the trainer as a process of its own,
which tests kill: it prints one line per stage and, with ``--stop-at STAGE``, waits there.
"""

from __future__ import annotations

import argparse
import math
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, TypeVar

import msgspec

from tests.format.samples import plan_id
from tests.support.preloaded import context
from tieredckpt import failpoints
from tieredckpt.agent.host import launch
from tieredckpt.agent.host.launch import READY
from tieredckpt.agent.host.sessions import LEASES
from tieredckpt.agent.node import Node
from tieredckpt.config.tiers import Keep
from tieredckpt.errors import AgentError, NotFoundError
from tieredckpt.format.digest import digest
from tieredckpt.format.manifest import (
    AttemptId,
    AttemptRecord,
    Followed,
    Manifest,
    SegmentRef,
    decode_attempt,
    encode_attempt,
    encode_manifest,
)
from tieredckpt.format.plan import Chunk, TensorEntry, build_plan, encode_plan
from tieredckpt.format.segment import (
    BLOCK_BYTES,
    ItemSpec,
    SegmentLayout,
    encode_footer,
    lay_out,
    structure_digest,
)
from tieredckpt.policy.history import ancestry_of, base_of
from tieredckpt.recovery.plan import plan_recovery
from tieredckpt.rpc.agent_client import AgentClient
from tieredckpt.rpc.messages import agent as m
from tieredckpt.storage.holdings import Holdings, TierFacts, decode_holdings
from tieredckpt.storage.memory.slot import lock_reserved, unlock

T = TypeVar("T")
ROOT = Path(__file__).parents[2]
LOST_AFTER = "TEST_LOST_AFTER_S"
"""In the environment of a forked agent: ``LOST_AFTER_S``, where half a minute is not the case."""

STAGES = (
    "opened", "reserved", "writing", "written", "sealed", "committing", "committed",
)  # fmt: skip


def spec_of(
    *,
    capacity_bytes: int = 256 << 20,
    keep_last: int = 2,
    wait_s: float = 0.5,
    tiers: dict[str, Path] | None = None,
    tier_keep_last: int = 2,
) -> m.NamespaceSpec:
    """A spec with host-scoped file tiers at the given folders."""
    return m.NamespaceSpec(
        capacity_bytes=capacity_bytes,
        keep_last=keep_last,
        wait_s=wait_s,
        tiers=tuple(
            m.TierSpec(
                name=name, url=f"file://{path}", scope="host", keep=Keep(last=tier_keep_last)
            )
            for name, path in (tiers or {}).items()
        ),
    )


class FakeTickets:
    """Offered descriptors in a dictionary."""

    def __init__(self) -> None:
        self.offers: dict[str, int] = {}

    def offer(self, fd: int) -> str:
        ticket = secrets.token_hex(16)
        self.offers[ticket] = fd
        return ticket

    def revoke(self, ticket: str) -> bool:
        fd = self.offers.pop(ticket, None)
        if fd is not None:
            os.close(fd)
        return fd is not None

    def close(self) -> None:
        for ticket in list(self.offers):
            self.revoke(ticket)


class DirectClient:
    """What :class:`FakeTrainer` needs of a client, calling a node in this process."""

    def __init__(self, node: Node, tickets: FakeTickets) -> None:
        self.node = node
        self.session_id = secrets.token_hex(16)
        self.run_id = secrets.token_hex(16)
        self.namespace = ""
        self.lease_fd = -1
        self.more: dict[str, Any] = {}
        """Further fields of OpenSession."""
        self._tickets = tickets

    def open_session(
        self, namespace: str, spec: m.NamespaceSpec, *, local_rank: int = 0
    ) -> m.SessionOpened:
        self._session = m.OpenSession(
            api=m.API_VERSION, version="test", session_id=self.session_id,
            namespace=namespace, run=self.run_id, spec=spec, local_rank=local_rank,
            local_world_size=1, **self.more,
        )  # fmt: skip
        self.namespace = namespace
        return self._open()

    def _open(self) -> m.SessionOpened:
        opened = self.node.open_session(self._session)
        if opened.lease_ticket:
            self.drop_lease()
            self.lease_fd = self.redeem(opened.lease_ticket)
        return opened

    def request(self, request: m.NodeRequest[T]) -> T:
        """In the session, which is opened again if the agent asks for it."""
        answer = getattr(self.node, request.verb())
        try:
            return answer(self.namespace, request)
        except NotFoundError as error:
            if error.fields.get("what") != "session":
                raise
        self._open()
        return answer(self.namespace, request)

    def drop_lease(self) -> None:
        """What the kernel does when the process dies."""
        if self.lease_fd >= 0:
            os.close(self.lease_fd)
            self.lease_fd = -1

    def redeem(self, ticket: str) -> int:
        return self._tickets.offers.pop(ticket)

    def prepare(self, size: int) -> m.Prepared:
        request = m.Prepare(session_id=self.session_id, segment_bytes=size)
        return self.request(request)

    def reserve(self, size: int) -> m.Grant:
        request = m.Reserve(session_id=self.session_id, segment_bytes=size)
        return self.request(request)

    def seal(self, segment_id: str, slot_id: str, size: int, root: str) -> m.Sealed:
        request = m.Seal(
            session_id=self.session_id, segment_id=segment_id, slot_id=slot_id,
            segment_bytes=size, root=root,
        )  # fmt: skip
        return self.request(request)

    def commit(
        self, manifest: bytes, plan: bytes | None = None, *, attempt: bytes = b""
    ) -> m.Committed:
        request = m.Commit(
            session_id=self.session_id, run=self.run_id, manifest=manifest, plan=plan,
            attempt=attempt,
        )  # fmt: skip
        return self.request(request)

    def open_attempt(
        self,
        attempt_id: str,
        bases: tuple[m.BaseSpec, ...] = (),
        *,
        followed: tuple[Followed, ...] = (),
        cause: Literal["load", "save"] = "load",
        silent: tuple[str, ...] = (),
    ) -> bytes:
        request = m.OpenAttempt(
            session_id=self.session_id, attempt_id=attempt_id, run=self.run_id,
            followed=followed, cause=cause, bases=bases, silent=silent,
        )  # fmt: skip
        return self.request(request)

    def holdings(self, *, within_s: float | None = None, tiers: bool = True) -> bytes:
        limit_s = math.inf if within_s is None else within_s
        return self.node.holdings(self.namespace, limit_s if tiers else 0.0)

    def progress(self, save_id: str) -> m.Progress:
        return self.node.progress(self.namespace, save_id)

    def status(self) -> m.Status:
        return self.node.status()

    def open_segment(self, tier: str, segment_id: str) -> tuple[m.SegmentOpened, int]:
        request = m.OpenSegment(tier=tier, segment_id=segment_id)
        opened = self.node.open_segment(self.namespace, request)
        return opened, self.redeem(opened.ticket)

    def close(self) -> None:
        self.drop_lease()
        self.node.end_session(self.session_id)


def join_run(client: AgentClient, run: str) -> None:
    """The client's session is of ``run`` from now on, as if it had been opened so."""
    client.run_id = run
    assert client._session is not None
    client._session = msgspec.structs.replace(client._session, run=run)
    client._open(client._session, time.monotonic() + 30.0)
    # Real ones are of one run for life: an agent that starts again reads it from there.
    noted = client.runtime_dir / "sessions" / client.session_id
    record = msgspec.structs.replace(LEASES.decode(noted.read_bytes()), run=run)
    noted.write_bytes(LEASES.encode(record))


def wait_until(true: Callable[[], object], *, deadline_s: float = 60.0) -> None:
    """Poll until ``true()``; the only way to see what another process does by itself."""
    until_s = time.monotonic() + deadline_s
    while not true():
        assert time.monotonic() < until_s, "it did not happen in time"
        time.sleep(0.01)


class AgentProcess:
    """One agent in the foreground, started by us, with its log in the runtime folder.

    Args:
        runtime_dir: Its folder.
        failpoints: From its first instruction on.
        idle_timeout_s: See ``AgentOptions``.
        env: Of its environment, what differs from ours.
        wait: Return only when it serves.
        new: A new interpreter, instead of a fork of one that has its modules, which takes a tenth
            of the processor time.
    """

    def __init__(
        self,
        runtime_dir: Path,
        *,
        failpoints: str = "",
        idle_timeout_s: float | None = None,
        env: dict[str, str] | None = None,
        wait: bool = True,
        new: bool = False,
    ) -> None:
        self.runtime_dir = runtime_dir
        arguments = ["--runtime-dir", str(runtime_dir), "--log-level", "debug"]
        arguments += ["--log-file", str(runtime_dir / "agent.log")]
        if idle_timeout_s is not None:
            arguments += ["--idle-timeout", str(idle_timeout_s)]
        environment = {**os.environ, **(env or {})}
        environment.pop("TIEREDCKPT_FAILPOINTS", None)
        if failpoints:
            environment["TIEREDCKPT_FAILPOINTS"] = failpoints
        ready_r, ready_w = context.Pipe(duplex=False)
        with ready_w:
            start = _new_agent if new else _ForkedMain
            self._process: Any = start(arguments, environment, ready_w)
        with ready_r, os.fdopen(os.dup(ready_r.fileno()), "rb") as ready:
            self.ready = ready.read() if wait else b""
        if wait and self.ready != READY:
            self.wait_end()
            raise AssertionError(f"the agent did not start: {self.ready!r}\n{self.log()}")

    @property
    def pid(self) -> int:
        return self._process.pid

    def ended(self) -> bool:
        """Whether the process is gone."""
        return self._process.poll() is not None

    def log(self) -> str:
        path = self.runtime_dir / "agent.log"
        return path.read_text() if path.exists() else ""

    def client(self, **options: object) -> AgentClient:
        """A client without a session."""
        return AgentClient(self.runtime_dir, **options)  # type: ignore[arg-type]

    def kill(self) -> None:
        """SIGKILL, and wait for the end."""
        self._process.kill()
        self._process.wait(10)

    def stop(self, *, deadline_s: float = 15.0) -> int:
        """SIGTERM, and wait for the end; returns the exit status."""
        self._process.terminate()
        return self._process.wait(deadline_s)

    def wait_end(self, *, deadline_s: float = 20.0) -> int:
        """Wait until it ends by itself; returns the exit status (-9: killed)."""
        return self._process.wait(deadline_s)

    def __enter__(self) -> AgentProcess:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._process.poll() is None:
            self.kill()


def _new_agent(
    arguments: list[str], environ: dict[str, str], ready: Connection
) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "tieredckpt.agent.daemon", *arguments]
    command += ["--ready-fd", str(ready.fileno())]
    return subprocess.Popen(
        command, cwd=ROOT, env=environ, pass_fds=(ready.fileno(),), stdin=subprocess.DEVNULL
    )


class _ForkedMain:
    """An agent that is forked, with as much of :class:`subprocess.Popen` as is used of it."""

    def __init__(self, arguments: list[str], environ: dict[str, str], ready: Connection) -> None:
        self._process = context.Process(
            target=_agent_main,
            args=(arguments, environ, ready),
            daemon="--detached" not in arguments,
        )
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid
        self.kill = self._process.kill
        self.terminate = self._process.terminate

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout_s: float) -> int:
        self._process.join(timeout_s)
        code = self._process.exitcode
        if code is None:
            raise subprocess.TimeoutExpired("agent", timeout_s)
        return code


class _Launched(_ForkedMain):
    """As ``subprocess.Popen`` is called in :mod:`tieredckpt.agent.host.launch`."""

    def __init__(
        self, command: list[str], *, env: dict[str, str], pass_fds: tuple[int, ...], **_rest: object
    ) -> None:
        (ready,) = pass_fds
        with Connection(os.dup(ready), readable=False) as pipe:
            super().__init__(command[3:-2], env, pipe)


def fork_agents() -> None:
    """From now on an engine of this process has its agents forked, where it starts them."""
    launch.subprocess = SimpleNamespace(  # type: ignore[assignment]
        Popen=_Launched, DEVNULL=subprocess.DEVNULL, TimeoutExpired=subprocess.TimeoutExpired
    )


def _agent_main(arguments: list[str], environ: dict[str, str], ready: Connection) -> None:
    from tests.support.faults import name_process
    from tieredckpt.agent.cluster import members
    from tieredckpt.agent.daemon import main

    if "--detached" in arguments:
        os.setsid()
    os.chdir(ROOT)
    os.environ.clear()
    os.environ.update(environ)
    name_process(f"agent {' '.join(arguments)}")
    failpoints.arm(environ.get("TIEREDCKPT_FAILPOINTS", ""))
    members.LOST_AFTER_S = float(environ.get(LOST_AFTER, members.LOST_AFTER_S))
    os.set_inheritable(ready.fileno(), True)
    sys.exit(main([*arguments, "--ready-fd", str(ready.fileno())]))


def content(seed: int, size: int) -> bytes:
    """``size`` bytes that differ for each seed and each block, cheaply."""
    piece = b"".join(digest(f"{seed}:{i}".encode()) for i in range(256))
    return (piece * (size // len(piece) + 1))[:size]


def layout_of(size: int) -> SegmentLayout:
    """A segment of one uint8 tensor of ``size`` bytes and one small bytes item."""
    tensor = ItemSpec("weights", "tensor", size, "uint8", (size,), (0,), (size,))
    return lay_out([tensor, ItemSpec("step", "bytes", 16)])


class FakeTrainer:
    """Saves real segments through an :class:`AgentClient`, one rank, without torch.

    Args:
        runtime_dir: Of the agent.
        spec: Of the namespace.
        size: Bytes of its one tensor.
        on_stage: Called with each of :data:`STAGES` as it is reached.
        revive: Given to the client.
    """

    def __init__(
        self,
        runtime_dir: Path,
        spec: m.NamespaceSpec,
        *,
        namespace: str = "run",
        size: int = 1 << 20,
        rank: int = 0,
        on_stage: Callable[[str], None] = lambda stage: None,
        revive: Callable[[], object] | None = None,
        deadline_s: float = 30.0,
        client: AgentClient | DirectClient | None = None,
    ) -> None:
        self.client = client or AgentClient(runtime_dir, revive=revive, deadline_s=deadline_s)
        try:
            self.opened = self.client.open_session(namespace, spec, local_rank=rank)
        except BaseException:
            self.client.close()
            raise
        self.namespace = namespace
        self.layout = layout_of(size)
        self.size = size
        self.segment_bytes = self.layout.segment_bytes
        self.next: m.Grant | None = None
        self.attempt: AttemptRecord | None = None
        self.seqs: dict[str, int] = {}
        self.parents: dict[str, str] = {}
        self.fds: dict[str, int] = {}
        self.reserves = 0
        self._on_stage = on_stage
        self.plan = build_plan(
            [
                TensorEntry(
                    "weights", "uint8", "strided", False, "contiguous_format", False,
                    (size,), (Chunk((0,), (size,), 0, 0),),
                )
            ],
            structures=[structure_digest(self.layout.items)],
        )  # fmt: skip
        on_stage("opened")

    def __enter__(self) -> FakeTrainer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        self.client.close()
        for fd in self.fds.values():
            os.close(fd)
        self.fds.clear()

    def prepare(self) -> int:
        """Fetch the ring; returns its number of slots."""
        prepared = self.client.prepare(self.segment_bytes)
        for slot in prepared.slots:
            fd = self.client.redeem(slot.ticket)
            if slot.slot_id in self.fds:
                os.close(self.fds[slot.slot_id])
            self.fds[slot.slot_id] = fd
        return len(prepared.slots)

    def open_attempt(
        self, bases: dict[str, str | None] | None = None, *, in_silence: bool = False
    ) -> AttemptRecord:
        """As a trainer does that loaded these just now."""
        held = self.holdings()
        specs = []
        for stream, save_id in (bases or {}).items():
            plan = plan_recovery([held], stream=stream)
            newest = ancestry_of(plan.newest) if plan.newest is not None else ()
            specs.append(
                m.BaseSpec(stream=stream, save_id=save_id, newest=newest, in_silence=in_silence)
            )
        followed = plan_recovery([held], stream=next(iter(bases or ()), "default")).followed
        data = self.client.open_attempt(secrets.token_hex(16), tuple(specs), followed=followed)
        self.attempt = decode_attempt(data)
        return self.attempt

    def reserve(self) -> tuple[m.Grant, int]:
        """The next save's grant, and a descriptor (ours to close) that holds the slot's lock."""
        failpoints.reach("save.reserve.before")
        grant, fd = self.next, -1
        self.next = None
        if grant is not None and grant.slot_id in self.fds:
            held = self.fds[grant.slot_id]
            if lock_reserved(held, grant.capacity_bytes, grant.segment_id):
                fd = held
        if fd < 0:
            self.reserves += 1
            grant = self.client.reserve(self.segment_bytes)
            assert grant.ticket is not None
            fd = self.client.redeem(grant.ticket)
        assert grant is not None
        failpoints.reach("save.reserve.after")
        self._on_stage("reserved")
        return grant, fd

    def write(self, grant: m.Grant, fd: int, step: int) -> bytes:
        """Write segment and footer; returns the root."""
        data = bytearray(self.layout.data_bytes)
        weights, mark = self.layout.items
        data[weights.offset : weights.offset + self.size] = content(step, self.size)
        data[mark.offset : mark.offset + 16] = step.to_bytes(16, "little")
        digests = b""
        for start in range(0, len(data), BLOCK_BYTES):
            block = bytes(data[start : start + BLOCK_BYTES])
            os.pwrite(fd, block, start)
            digests += digest(block)
            failpoints.reach("save.copy")
            self._on_stage("writing")
        footer = encode_footer(self.layout, digests, bytes.fromhex(grant.segment_id))
        os.pwrite(fd, footer, self.layout.data_bytes)
        self._on_stage("written")
        return footer[-16:]

    def release(self, grant: m.Grant, fd: int) -> None:
        """Give up the writer's lock after the seal."""
        unlock(fd)
        if self.fds.get(grant.slot_id) != fd:
            os.close(fd)

    def seal(self, grant: m.Grant, root: bytes) -> SegmentRef:
        failpoints.reach("save.seal.before")
        sealed = self.client.seal(grant.segment_id, grant.slot_id, self.segment_bytes, root.hex())
        failpoints.reach("save.seal.after")
        self.next = sealed.next
        self._on_stage("sealed")
        return SegmentRef(
            id=grant.segment_id, size=self.segment_bytes, root=root.hex(), host=self.opened.host_id
        )

    def write_segment(self, step: int) -> SegmentRef:
        """Reserve, write, seal."""
        grant, fd = self.reserve()
        root = self.write(grant, fd, step)
        ref = self.seal(grant, root)
        self.release(grant, fd)
        return ref

    def manifest(
        self,
        step: int,
        refs: tuple[SegmentRef, ...],
        *,
        stream: str = "default",
        tiers: tuple[str, ...] = (),
    ) -> Manifest:
        attempt = self.attempt or self.open_attempt()
        base = base_of(attempt, stream)
        seq = self.seqs.get(stream, 0)
        return Manifest(
            save_id=secrets.token_hex(16),
            namespace=self.namespace,
            stream=stream,
            step=step,
            attempt=AttemptId(attempt.number, attempt.id),
            seq=seq,
            parent=self.parents.get(stream, base.parent),
            lineage=base.lineage,
            plan=plan_id(self.plan),
            tiers=tiers,
            segments=refs,
            world_size=1,
            tags={},
            created_at_s=0.0,
        )

    def commit(self, manifest: Manifest) -> None:
        failpoints.reach("save.commit.before")
        self._on_stage("committing")
        data = encode_manifest(manifest)
        attempt = encode_attempt(self.attempt) if self.attempt is not None else b""
        if self.client.commit(data, attempt=attempt).need_plan:
            again = self.client.commit(data, encode_plan(self.plan), attempt=attempt)
            assert not again.need_plan
        failpoints.reach("save.commit.after")
        self.seqs[manifest.stream] = manifest.seq + 1
        self.parents[manifest.stream] = manifest.save_id
        self._on_stage("committed")

    def save(self, step: int, *, stream: str = "default", tiers: tuple[str, ...] = ()) -> Manifest:
        """One whole save."""
        ref = self.write_segment(step)
        manifest = self.manifest(step, (ref,), stream=stream, tiers=tiers)
        self.commit(manifest)
        return manifest

    def holdings(self) -> Holdings:
        return decode_holdings(self.client.holdings())

    def tier(self, name: str = "memory") -> TierFacts:
        """What one holds; for memory nobody waits for tiers that do not answer."""
        held = decode_holdings(self.client.holdings(tiers=name != "memory"))
        return next(tier for tier in held.tiers if tier.tier == name)

    def read(self, ref: SegmentRef, tier: str = "memory") -> bytes:
        """A segment through its descriptor."""
        opened, fd = self.client.open_segment(tier, ref.id)
        with os.fdopen(os.open(f"/proc/self/fd/{fd}", os.O_RDONLY), "rb") as file:
            os.close(fd)
            return file.read(min(opened.size_bytes, ref.size))

    def spilled(self, save_id: str, tier: str = "disk") -> None:
        """Wait until a checkpoint is in a tier, and what that tier need not keep is deleted."""
        wait_until(lambda: self.client.progress(save_id).levels[tier] == "done")
        wait_until(lambda: not any(each.retaining for each in self._tiers() if each.name == tier))

    def _tiers(self) -> tuple[m.TierStatus, ...]:
        found = self.client.status().namespaces
        return next(each.tiers for each in found if each.name == self.client.namespace)

    def check(self, manifest: Manifest, tier: str = "memory") -> None:
        """Make sure that a checkpoint's bytes are those of its step."""
        data = self.read(manifest.segments[0], tier)
        offset = self.layout.items[0].offset
        assert data[offset : offset + self.size] == content(manifest.step, self.size)


class TrainerProcess:
    """A :class:`FakeTrainer` in a process of its own, to be killed."""

    def __init__(
        self,
        runtime_dir: Path,
        spec: m.NamespaceSpec,
        *,
        saves: int,
        stop_at: str = "",
        failpoints: str = "",
        size: int = 1 << 20,
        tiers: tuple[str, ...] = (),
    ) -> None:
        command = [sys.executable, "-m", "tests.support.agent", "--runtime-dir", str(runtime_dir)]
        command += ["--spec", msgspec.json.encode(spec).decode(), "--saves", str(saves)]
        command += ["--stop-at", stop_at, "--size", str(size), "--tiers", ",".join(tiers)]
        environment = dict(os.environ)
        environment.pop("TIEREDCKPT_FAILPOINTS", None)
        if failpoints:
            environment["TIEREDCKPT_FAILPOINTS"] = failpoints
        self._process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.lines: list[str] = []

    def wait_for(self, line: str) -> None:
        """Read its lines until ``line`` (a stage and the save's number: "sealed 3")."""
        assert self._process.stdout is not None
        for text in self._process.stdout:
            self.lines.append(text.strip())
            if text.strip() == line:
                return
        raise AssertionError(f"the trainer ended before {line!r}: {self.lines}")

    def go_on(self) -> None:
        """Let it pass the stage at which it waits."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self.wait_end()

    def wait_end(self, *, deadline_s: float = 30.0) -> int:
        try:
            return self._process.wait(deadline_s)
        finally:
            for stream in (self._process.stdin, self._process.stdout):
                if stream is not None:
                    stream.close()

    def __enter__(self) -> TrainerProcess:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._process.poll() is None:
            self.kill()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--runtime-dir", type=Path, required=True)
    parser.add_argument("--spec", required=True)
    parser.add_argument("--saves", type=int, required=True)
    parser.add_argument("--stop-at", default="")
    parser.add_argument("--size", type=int, default=1 << 20)
    parser.add_argument("--tiers", default="")
    values = parser.parse_args()
    save = 0

    def on_stage(stage: str) -> None:
        line = f"{stage} {save}"
        print(line, flush=True)
        if line == values.stop_at:
            sys.stdin.readline()

    spec = msgspec.json.decode(values.spec, type=m.NamespaceSpec)
    tiers = tuple(filter(None, values.tiers.split(",")))
    with FakeTrainer(values.runtime_dir, spec, size=values.size, on_stage=on_stage) as trainer:
        trainer.prepare()
        trainer.open_attempt()
        for save in range(1, values.saves + 1):
            trainer.save(save, tiers=tiers)
        print("done", flush=True)
        sys.stdin.readline()


if __name__ == "__main__":
    try:
        main()
    except AgentError as error:
        sys.exit(f"trainer: {error}")
