"""Hosts that tests start, cut off, kill and replace, and jobs whose ranks run on several of them.

A host is a network namespace with two interfaces (eth0 for the job, eth1 for the agents), or where
the machine makes none a loopback address; each has a node name, a runtime folder in tmpfs and a
disk of its own. Trainers and agents are forked where torch and their modules are imported.
"""

from __future__ import annotations

import functools
import itertools
import os
import shutil
import signal
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import processes_naming, stop_processes_of
from tests.support.agent import LOST_AFTER
from tests.support.fault_bench import Job
from tests.support.faults import ForkedAgent, Trainer, death
from tests.support.leftovers import shm
from tests.support.names import NameServer, use_names
from tests.support.ports import hold_port
from tests.support.proxy import Proxy
from tieredckpt.agent.cluster import members
from tieredckpt.agent.host.runtime import NODE_NAME_VARIABLE
from tieredckpt.rpc.agent_client import AgentClient
from tieredckpt.testing import netns

JOB, DATA = 0, 1
"""Subnets: where gloo and the store of a job are, and where agents talk to each other."""
AGENT_PORT = 7411
LOG_CHARS = 4000
_clusters = itertools.count()
_ports = itertools.count(29500)


def needs_links() -> None:
    """Skip a test that cuts or slows links where this machine has none to cut."""
    if reason := netns.missing():
        pytest.skip(f"links cannot be cut here: {reason}")


def _settle(
    name: str, namespace: str | None, names: Path | None, environ: Mapping[str, str]
) -> None:
    """The first thing that a process of a host does."""
    os.environ.update(environ)
    members.LOST_AFTER_S = float(environ.get(LOST_AFTER, members.LOST_AFTER_S))
    if namespace is not None:
        netns.enter(namespace)
    if names is not None:
        use_names(names)
    os.environ[NODE_NAME_VARIABLE] = name


class Host:
    """One host. Made by :class:`Cluster`.

    Attributes:
        name: Its node name.
        number: The last part of its addresses.
        labels: Its failure domains.
        settings: What its configuration has of its own.
        agent: The running one, if the harness has started it.
        alive: Whether it is there: it is not after :meth:`kill`.
    """

    def __init__(self, cluster: Cluster, name: str, number: int, labels: dict[str, str]) -> None:
        self.cluster = cluster
        self.name, self.number, self.labels = name, number, labels
        self.runtime_dir = cluster.memory / name
        self.disk = cluster.folder / name
        self.namespace: str | None = None
        self.settings: dict[str, Any] = {}
        self.agent: ForkedAgent | None = None
        self.trainers: list[Trainer] = []
        self.proxy: Proxy | None = None
        self.alive = False
        self._plug_in()

    def _plug_in(self) -> None:
        self.runtime_dir.mkdir(mode=0o700)
        self.disk.mkdir()
        if self.cluster.network is not None and self.namespace is None:
            self.namespace = self.cluster.network.add(self.name, self.number)
            if self.cluster.names is not None:
                self.cluster.names.serve(self.namespace)
        self.alive = True

    @property
    def first(self) -> Callable[[], None]:
        """What a process calls to be on this host, before anything else."""
        names = self.cluster.names.resolv_conf if self.cluster.names is not None else None
        return functools.partial(_settle, self.name, self.namespace, names, self.cluster.environ)

    def address(self, subnet: int = JOB) -> str:
        """Its IPv4 address."""
        if self.cluster.network is None:
            return "127.0.0.1" if subnet == JOB else f"127.77.0.{self.number}"
        return self.cluster.network.address(self.name, subnet)

    @property
    def interface(self) -> str:
        """Of the job's own traffic."""
        return "eth0" if self.namespace else "lo"

    def config(self, **more: Any) -> dict[str, Any]:
        """A configuration for engines on this host; a dict in ``more`` is merged into its key."""
        found: dict[str, Any] = {
            "namespace": "run",
            "take_over": True,
            "memory": {"capacity": "256MiB", "keep": {"last": 2}, "replicas": 1},
            "agent": {
                "runtime_dir": str(self.runtime_dir), "start": "never", "start_timeout": "60s",
            },
            "recovery": {"wait": "10s"},
            "save": {"timeout": "30s", "on_error": "raise"},
            "network": {"interface": "eth1", "port": AGENT_PORT},
        }  # fmt: skip
        if self.namespace is None:
            found["network"] = {"cidr": f"{self.address(DATA)}/32"}
        if self.labels:
            found["labels"] = dict(self.labels)
        if more.get("tiers") == "disk":
            more["tiers"] = [{"name": "disk", "url": f"file://{self.disk}", "keep": {"last": 3}}]
        for key, value in {**self.settings, **more}.items():
            found[key] = {**found.get(key, {}), **value} if isinstance(value, dict) else value
        return found

    # --- processes -------------------------------------------------------------------------------

    def start_agent(self, armed: str = "", *, wait: bool = True) -> ForkedAgent:
        """Its agent, forked; ``armed``: failpoints."""
        self.stop_agent()
        self.agent = ForkedAgent(self.runtime_dir, armed, first=self.first, wait=wait)
        return self.agent

    def stop_agent(self) -> None:
        """SIGKILL, and wait for the end."""
        if self.agent is not None:
            self.agent.kill()
            self.agent = None

    def trainer(self, **options: Any) -> Trainer:
        """A process that trains here; the arguments are those of ``Trainer``."""
        trainer = Trainer(first=self.first, **options)
        self.trainers.append(trainer)
        return trainer

    def client(self) -> AgentClient:
        """A line to its agent, without a session."""
        return AgentClient(self.runtime_dir, deadline_s=30)

    def command(self, *arguments: str) -> list[str]:
        """A command line that runs ``arguments`` on this host (its environment: ``environ``)."""
        return [*(["ip", "netns", "exec", self.namespace] if self.namespace else []), *arguments]

    @property
    def environ(self) -> dict[str, str]:
        """For processes that are started by :meth:`command`."""
        return {NODE_NAME_VARIABLE: self.name, "GLOO_SOCKET_IFNAME": self.interface}

    # --- faults ----------------------------------------------------------------------------------

    def cut(self, subnet: int | None = None, *, noticed: bool = False) -> None:
        """Lose what it sends and what is sent to it; ``noticed``: its cable has no carrier."""
        self._network.cut(self.name, subnet, noticed=noticed)

    def heal(self, subnet: int | None = None) -> None:
        """Undo :meth:`cut`."""
        self._network.heal(self.name, subnet)

    def part(self, other: Host, *, parted: bool = True) -> None:
        """Two hosts' agents hear nothing from each other, but all from everybody else."""
        self._network.part(self.name, other.name, DATA, parted=parted)

    @property
    def _network(self) -> netns.Network:
        if self.cluster.network is None:
            raise RuntimeError("no links here: say needs_links() first")
        return self.cluster.network

    def behind_proxy(self, *, seed: int = 0) -> Proxy:
        """Put a proxy between its agent and all others, in both directions. Before any process."""
        outer, inner = self._network.interpose(self.name, DATA)
        self.proxy = Proxy(seed=seed)
        self.proxy.carry(outer, inner, self.address(DATA), AGENT_PORT)
        return self.proxy

    def kill(self, *, silent: bool = True) -> None:
        """Lose it: all its processes, its memory and its disk.

        Args:
            silent: Its link is cut first, so that nobody hears of it and nothing answers any more;
                else its kernel goes on and refuses connections.
        """
        assert self.alive, f"{self.name} is gone already"
        network = self.cluster.network if silent else None
        if network is not None:
            network.cut(self.name)
        self.end_processes()
        if self.proxy is not None:
            self.proxy.close()
            self.proxy = None
        if network is not None:
            network.remove(self.name)
            self.namespace = None
        shutil.rmtree(self.runtime_dir)
        shutil.rmtree(self.disk)
        self.alive = False

    def end_processes(self) -> None:
        """SIGKILL to everything that runs here, by process id."""
        pids = [trainer.pid for trainer in self.trainers if trainer.alive]
        for pid in pids:
            with death(pid):
                os.kill(pid, signal.SIGKILL)
        self.trainers.clear()
        self.stop_agent()
        for pid in processes_naming(self.runtime_dir):
            with death(pid):
                os.kill(pid, signal.SIGKILL)

    def boot(self) -> None:
        """A killed host comes back: same name and address, nothing in memory or on disk."""
        assert not self.alive, f"{self.name} is up"
        self._plug_in()

    def log(self) -> str:
        """The end of its agent's log."""
        path = self.runtime_dir / "agent.log"
        text = path.read_text(errors="replace") if path.exists() else "(no log)"
        return f"--- {self.name}{'' if self.alive else ', lost'} ---\n{text[-LOG_CHARS:]}"


class Cluster:
    """Several hosts; a context manager that ends and removes everything.

    Args:
        folder: For disks.
        count: Hosts to begin with: ``h1``, ``h2`` and so on.
        racks: So many racks, over which hosts are dealt out as their label ``rack``; 0: no label.
        links: False: loopback addresses even where the machine can make namespaces.
        rails: Subnets beside that of the job: eth1, eth2 and so on.
        names: Whether its hosts ask a name server of their own, :attr:`names`; needs links.
        environ: Variables of all processes on all hosts.
    """

    def __init__(
        self,
        folder: Path,
        count: int,
        *,
        racks: int = 0,
        links: bool = True,
        rails: int = 1,
        names: bool = False,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self.folder = folder / f"hosts-{next(_clusters)}"
        self.folder.mkdir(parents=True)
        self.memory = shm() / f"tck-hosts-{os.getpid()}-{next(_clusters)}"
        self.memory.mkdir(mode=0o700)
        self.racks = racks
        self.environ = dict(environ or {})
        self.jobs: list[HostJob] = []
        self._numbers = itertools.count(1)
        self.hosts: list[Host] = []
        self.network: netns.Network | None = None
        self.names: NameServer | None = None
        try:
            if links and netns.missing() is None:
                self.network = netns.Network(subnets=1 + rails)
            if names:
                self.names = NameServer(self.folder)
            for _ in range(count):
                self.add()
        except BaseException:
            self.close()
            raise

    def add(self, **labels: str) -> Host:
        """One more host, fresh."""
        number = next(self._numbers)
        if self.racks:
            labels = {"rack": f"r{(number - 1) % self.racks + 1}", **labels}
        host = Host(self, f"h{number}", number, labels)
        self.hosts.append(host)
        return host

    def replace(self, host: Host) -> Host:
        """A fresh host with another name in the place of a lost one, in the same rack."""
        fresh = self.add(**host.labels)
        self.hosts.remove(fresh)
        self.hosts[self.hosts.index(host)] = fresh
        return fresh

    def start_agents(self, hosts: list[Host] | None = None) -> None:
        """An agent on each of these hosts (all) that has none."""
        wanted = self.hosts if hosts is None else hosts
        fresh = [host for host in wanted if host.alive and host.agent is None]
        agents = [host.start_agent(wait=False) for host in fresh]
        for agent in agents:
            assert agent.wait_ready(), f"an agent did not start\n{self.logs()}"

    @contextmanager
    def job(self, hosts: list[Host] | None = None, **options: Any) -> Iterator[HostJob]:
        """Ranks on hosts, ended at the end of the block; the arguments are those of HostJob."""
        job = HostJob(self, self.hosts if hosts is None else hosts, **options)
        try:
            yield job
        finally:
            job.end()

    def logs(self) -> str:
        """The ends of all agents' logs."""
        return "\n".join(host.log() for host in self.hosts)

    def close(self) -> None:
        """End all processes and remove all folders and namespaces. Idempotent."""
        for job in list(self.jobs):
            job.end()
        for host in self.hosts:
            if host.alive:
                host.end_processes()
            if host.proxy is not None:
                host.proxy.close()
        if self.names is not None:
            self.names.close()
        if self.network is not None:
            self.network.close()
        stop_processes_of(self.memory)
        shutil.rmtree(self.memory, ignore_errors=True)
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            error.add_note(self.logs())
        self.close()


class HostJob(Job):
    """One start of training over several hosts, in a gloo group made as torchrun makes it.

    Args:
        hosts: In the order of ranks.
        ranks: On each host.
        seed: Of all contents.
        mib: Size of the whole state, about.
        saved_by: How many ranks saved what it loads; None: as many as it has.
        group_s: Deadline of collectives.
    """

    def __init__(
        self,
        cluster: Cluster,
        hosts: list[Host],
        *,
        ranks: int = 1,
        seed: int = 0,
        mib: float = 1.0,
        saved_by: int | None = None,
        group_s: float = 60.0,
    ) -> None:
        self.hosts = list(hosts)
        self.seed, self.world, self._cluster = seed, len(hosts) * ranks, cluster
        self._held = socket.socket()
        cluster.jobs.append(self)
        self.places = [(host, i) for host in hosts for i in range(ranks)]
        options = {"seed": seed, "mib": mib, "saved_by": saved_by or self.world}
        self.trainers = [host.trainer(**options) for host, _ in self.places]
        port = next(_ports) if cluster.network is not None else hold_port(self._held)
        for rank, (host, local) in enumerate(self.places):
            environ = {
                **host.environ,
                "RANK": str(rank), "WORLD_SIZE": str(self.world),
                "LOCAL_RANK": str(local), "LOCAL_WORLD_SIZE": str(ranks),
                "MASTER_ADDR": hosts[0].address(), "MASTER_PORT": str(port),
            }  # fmt: skip
            self.trainers[rank].start("join_over", environ, group_s)
        self._check(self.outcomes())

    def open(self, **more: Any) -> None:
        """``Engine.open`` on every rank; the arguments are those of ``Host.config``."""
        self._check(self.opening(**more))

    def opening(self, **more: Any) -> list[Any]:
        """The same; what each rank returned or raised."""
        for trainer, (host, _) in zip(self.trainers, self.places, strict=True):
            trainer.start("open", host.config(**more))
        return self.outcomes()

    def _check(self, found: list[Any]) -> None:
        for each in found:
            if isinstance(each, BaseException):
                raise each

    def on(self, host: Host) -> Trainer:
        """The first rank on a host."""
        return self.trainers[next(i for i, place in enumerate(self.places) if place[0] is host)]

    def end(self) -> None:
        """SIGKILL to all ranks. Idempotent."""
        self._held.close()
        for trainer, (host, _) in zip(self.trainers, self.places, strict=True):
            trainer.__exit__()
            if trainer in host.trainers:
                host.trainers.remove(trainer)
        if self in self._cluster.jobs:
            self._cluster.jobs.remove(self)
