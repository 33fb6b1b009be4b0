"""Hosts are destroyed in the middle of a training, and the other hosts keep processes and state.

Part of ``make demo-live``. Two hosts with two ranks each train under ``tieredckpt run --nnodes 2``;
a third one stands by. The second host is destroyed with its ranks, its agent and its memory, and
the standby host takes its place. It comes back, empty, as a standby host. Then the host of rank 0
is destroyed, which leads the job. There is no rendezvous server and no root.

The hosts are network namespaces where this machine lets root make them (Linux, the command `ip`),
else loopback addresses.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from starts import Start, kill, processes_naming

from tieredckpt.testing import netns

HERE = Path(__file__).parent
NAMES = ("first", "second", "third")
DEADLINE_S = 180.0
POLL_S = 0.05
CONFIG = """\
namespace: lose-live-hosts
memory: {{capacity: 512MiB, keep: {{last: 2}}, replicas: 1}}
agent: {{runtime_dir: {runtime}, idle_timeout: 2 min}}
discovery: {{static: [{addresses}]}}
network: {{cidr: {address}/32}}
security: {{token_file: {token}}}
"""


@dataclass
class Host:
    """One host."""

    name: str
    folder: Path
    address: str
    namespace: str | None
    supervisor: subprocess.Popen[bytes] | None = None

    @property
    def output(self) -> Path:
        """Of its supervisor and its ranks."""
        return self.folder / f"{self.name}.log"


class Hosts:
    """A context manager that ends and removes everything.

    Args:
        folder: In tmpfs, for memory, configurations, the journal and logs.
        steps: Of the training.
    """

    def __init__(self, folder: Path, steps: int) -> None:
        self.folder, self.steps = folder, steps
        self.why_not = netns.missing()
        self.network: netns.Network | None = None
        self.journal = Start("hosts lost", folder / "journal")
        self.hosts: dict[str, Host] = {}

    def __enter__(self) -> Hosts:
        self.folder.mkdir()
        token = self.folder / "token"
        token.write_text(secrets.token_hex(32))
        token.chmod(0o600)
        if self.why_not is None:
            netns.sweep()
            self.network = netns.Network(subnets=1)
        return self

    def __exit__(self, *exc: object) -> None:
        for host in self.hosts.values():
            self._kill(host)
        if self.network is not None:
            self.network.close()

    def describe(self) -> str:
        """What a host is here."""
        if self.network is not None:
            return "network namespaces"
        return f"loopback addresses (no network namespaces: {self.why_not})"

    def start(self, name: str, *, stands_by: bool) -> None:
        """Start a host with an empty memory."""
        number = NAMES.index(name) + 1
        address, namespace = f"127.78.0.{number}", None
        addresses = [f"127.78.0.{n + 1}" for n in range(len(NAMES))]
        if self.network is not None:
            namespace = self.network.add(name, number)
            address = self.network.address(name)
            addresses = [f"{address.rpartition('.')[0]}.{n + 1}" for n in range(len(NAMES))]
        runtime, config = self.folder / name, self.folder / f"{name}.yaml"
        runtime.mkdir(mode=0o700)
        config.write_text(
            CONFIG.format(
                runtime=runtime,
                addresses=", ".join(addresses),
                address=address,
                token=self.folder / "token",
            )
        )
        command = [
            sys.executable, "-m", "tieredckpt", "run", "--nnodes", "2", "--rdzv-id", "demo",
            "--nproc-per-node", "2", "--standby", "0", "--config", str(config),
            *(["--standby-host"] if stands_by else []),
            str(HERE / "train_live.py"), "--config", str(config),
            "--journal", str(self.journal.journal), "--steps", str(self.steps),
        ]  # fmt: skip
        within = ["ip", "netns", "exec", namespace] if namespace else []
        host = Host(name, self.folder, address, namespace)
        with host.output.open("ab") as output:
            host.supervisor = subprocess.Popen(
                [*within, *command],
                stdout=output,
                stderr=output,
                stdin=subprocess.DEVNULL,
                env={
                    **os.environ,
                    "TIEREDCKPT_NODE_NAME": name,
                    "GLOO_SOCKET_IFNAME": "eth0" if namespace else "lo",
                },
            )
        self.hosts[name] = host

    def destroy(self, name: str) -> None:
        """Destroy a host: the others get no notice, and nothing is left."""
        host = self.hosts.pop(name)
        if self.network is not None:
            self.network.cut(name)
        self._kill(host)
        if self.network is not None:
            self.network.remove(name)
        shutil.rmtree(self.folder / name)

    def _kill(self, host: Host) -> None:
        for mark in (host.folder / f"{host.name}.yaml", host.folder / host.name):
            for pid in processes_naming(mark):
                kill(pid)
        if host.supervisor is not None:
            host.supervisor.kill()
            host.supervisor.wait()

    def follow(self, until: Callable[[], bool], show: Callable[[], None]) -> bool:
        """Wait; whether all hosts are done. Raises RuntimeError: one failed, or it is too late."""
        limit_s = time.monotonic() + DEADLINE_S
        while not until():
            self.journal.refresh()
            show()
            codes = [each.supervisor and each.supervisor.poll() for each in self.hosts.values()]
            if all(code == 0 for code in codes):
                return True
            if any(codes) or time.monotonic() > limit_s:
                texts = [each.output.read_text()[-3000:] for each in self.hosts.values()]
                raise RuntimeError("\n---\n".join(["the training failed or is late", *texts]))
            time.sleep(POLL_S)
        return False


def train(folder: Path, steps: int, show: Callable[[list[str]], None]) -> tuple[Start, str]:
    """Train while two hosts are destroyed; the journal, and what a host is.

    ``show`` gets the output of all hosts, again and again.
    """
    with Hosts(folder, steps) as hosts:

        def shown() -> None:
            show([path.read_text() for path in sorted(folder.glob("*.log"))])

        def reaches(step: int) -> Callable[[], bool]:
            return lambda: hosts.journal.last_step >= step

        def has_joined() -> bool:
            text = (folder / "second.log").read_text()
            return "ranks on this host: none" in text

        for name in NAMES:
            hosts.start(name, stands_by=name == "third")
        hosts.follow(reaches(steps // 4), shown)
        hosts.destroy("second")
        hosts.follow(reaches(steps // 4 + 4), shown)
        hosts.start("second", stands_by=True)
        hosts.follow(has_joined, shown)
        hosts.follow(reaches(hosts.journal.last_step + 4), shown)
        hosts.destroy("first")
        hosts.follow(lambda: False, shown)
        hosts.journal.refresh()
        shown()
        return hosts.journal, hosts.describe()
