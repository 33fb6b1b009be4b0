"""Several agents on this machine as several hosts: each with a runtime folder, name and address."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import msgspec

from tests.support.agent import LOST_AFTER, AgentProcess, FakeTrainer, join_run, spec_of
from tieredckpt.format.manifest import Holders, Manifest, SegmentRef
from tieredckpt.rpc.auth import Secret
from tieredckpt.rpc.messages import agent as m
from tieredckpt.rpc.peer_client import PeerClient

REPLICAS = 1


class PeerHost:
    """One host: its agent, and a trainer on it.

    Args:
        folder: Where its runtime folder is made; its last component names the host.
        number: 127.0.<number>.1 is its address.
        spec: Of the namespace.
        failpoints: Of its agent.
        size: Bytes of its rank's tensor.
        lost_after_s: When its agent takes a host for lost that does not answer; 0: as in use.
    """

    bytes_per_s = 0
    """Of its copies; told at the next :meth:`set_peers`."""
    learnt: Future[None]
    """See :meth:`Job.gather`."""

    def __init__(
        self,
        folder: Path,
        number: int,
        spec: m.NamespaceSpec,
        *,
        failpoints: str = "",
        size: int = 1 << 20,
        lost_after_s: float = 0.0,
    ) -> None:
        self.size = size
        self.lost_after_s = lost_after_s
        self.name = folder.name
        self.runtime = folder
        self.cidr = f"127.0.{number}.1/32"
        self.spec = spec
        folder.mkdir(mode=0o700)
        self.agent = self._agent(failpoints)
        self.trainer = self._trainer()

    def _agent(self, failpoints: str = "") -> AgentProcess:
        env = {"TIEREDCKPT_NODE_NAME": self.name}
        if self.lost_after_s:
            env[LOST_AFTER] = str(self.lost_after_s)
        return AgentProcess(self.runtime, failpoints=failpoints, env=env)

    def _trainer(self) -> FakeTrainer:
        return FakeTrainer(self.runtime, self.spec, size=self.size)

    @property
    def client(self):
        return self.trainer.client

    def restart(self, failpoints: str = "") -> None:
        """Kill the agent and start another one in its folder; the trainer lives on."""
        self.agent.kill()
        self.agent = self._agent(failpoints)

    def restart_trainer(self) -> None:
        """The trainer ends, another one takes its place: its run is another one."""
        self.trainer.close()
        self.trainer = self._trainer()

    def listen(self, token: str) -> m.HostEntry:
        request = m.Listen(
            session_id=self.client.session_id, token=token, tls=None, interfaces=(),
            cidrs=(self.cidr,), port=0, labels={"rack": self.name},
        )  # fmt: skip
        return self.client.call(request).host

    def set_peers(self, hosts: Sequence[m.HostEntry], leader: str, replicas: int) -> None:
        self.client.call(
            m.SetPeers(
                session_id=self.client.session_id, run=self.client.run_id, leader=leader,
                hosts=tuple(hosts), replicas=replicas, replication_bytes_per_s=self.bytes_per_s,
            )
        )  # fmt: skip

    def save_ids(self) -> set[str]:
        """What its memory holds."""
        return {each.save_id for each in self.trainer.tier().manifests}

    def close(self) -> None:
        self.trainer.close()
        if self.agent._process.poll() is None:
            self.agent.kill()


class Job:
    """A job over several hosts, with one trainer each; the first host is the leader's."""

    def __init__(
        self,
        folder: Path,
        count: int,
        *,
        spec: m.NamespaceSpec | None = None,
        replicas: int = REPLICAS,
        failpoints: dict[int, str] | None = None,
        size: int = 1 << 20,
        bytes_per_s: int = 0,
        lost_after_s: float = 0.0,
    ) -> None:
        self.folder = folder
        self.lost_after_s = lost_after_s
        self.token = secrets.token_hex(32)
        self.replicas = replicas
        self.size = size
        self.bytes_per_s = bytes_per_s
        self.spec = spec or spec_of()
        self.hosts: list[PeerHost] = []
        try:
            for number in range(count):
                self.add(number, (failpoints or {}).get(number, ""))
            self.gather()
        except BaseException:
            self.close()
            raise

    def add(self, number: int, failpoints: str = "") -> PeerHost:
        """A host that nobody knows yet."""
        host = PeerHost(
            self.folder / f"h{number}", number + 1, self.spec, failpoints=failpoints,
            size=self.size, lost_after_s=self.lost_after_s,
        )  # fmt: skip
        host.bytes_per_s = self.bytes_per_s
        self.hosts.append(host)
        return host

    def gather(
        self, hosts: Sequence[PeerHost] | None = None, *, stops: PeerHost | None = None
    ) -> list[m.HostEntry]:
        """What ``Engine.open`` does: all listen, and all learn who is there.

        ``stops``: This host's agent may stop itself as soon as it has learnt it. It is told last,
        and ``stops.learnt`` has the outcome.
        """
        members = self.hosts if hosts is None else hosts
        run = secrets.token_hex(16)
        entries = [host.listen(self.token) for host in members]
        for host in members:
            join_run(host.client, run)
            if host is not stops:
                host.set_peers(entries, members[0].name, self.replicas)
        if stops is not None:
            asking = ThreadPoolExecutor(1)
            stops.learnt = asking.submit(stops.set_peers, entries, members[0].name, self.replicas)
            asking.shutdown(wait=False)
        return entries

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *exc: object) -> None:
        if exc[0] is not None:
            for host in self.hosts:  # pytest shows it with the failure
                print(f"--- agent of {host.name}\n{host.agent.log()[-8000:]}")
        self.close()

    def close(self) -> None:
        for host in self.hosts:
            host.close()
            logged = "".join(each.read_text() for each in host.runtime.glob("agent.log*"))
            assert self.token not in logged, "the token is in the log of an agent"

    def seal(self, step: int, hosts: Iterable[PeerHost] | None = None) -> tuple[SegmentRef, ...]:
        """Each host's rank writes and seals its segment."""
        return tuple(host.trainer.write_segment(step) for host in hosts or self.hosts)

    def manifest(
        self,
        step: int,
        refs: tuple[SegmentRef, ...],
        coordinator: PeerHost,
        *,
        tiers: tuple[str, ...] = (),
        stream: str = "default",
    ) -> Manifest:
        """Of a checkpoint of these segments; the next host in the ring keeps each one's copy."""
        names = [ref.host for ref in refs]
        ring = tuple(
            Holders(
                name,
                tuple(
                    names[(number + 1 + each) % len(names)]
                    for each in range(min(self.replicas, len(names) - 1))
                ),
            )
            for number, name in enumerate(names)
            if self.replicas and len(names) > 1
        )
        made = coordinator.trainer.manifest(step, refs, tiers=tiers, stream=stream)
        return msgspec.structs.replace(made, world_size=len(refs), replicas=ring)

    def save(
        self,
        step: int,
        hosts: Sequence[PeerHost] | None = None,
        *,
        coordinator: PeerHost | None = None,
        tiers: tuple[str, ...] = (),
        stream: str = "default",
    ) -> Manifest:
        """One whole save over the hosts."""
        members = self.hosts if hosts is None else list(hosts)
        refs = self.seal(step, members)
        first = coordinator or members[0]
        made = self.manifest(step, refs, first, tiers=tiers, stream=stream)
        first.trainer.commit(made)
        return made


def line_to(host: PeerHost, token: str) -> PeerClient:
    """A line of the test's own to a host's agent, as another host has one."""
    table = host.client.peers()
    assert table.host is not None
    return PeerClient(table.host, host.trainer.namespace, Secret(token))
