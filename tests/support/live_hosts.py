"""A supervised training on several hosts: supervisors as ``tieredckpt run --nnodes`` makes them.

A host is a process with a supervisor, whose ranks are forked with torch imported by a process that
has no threads; an agent, a runtime folder, a node name, and a loopback address or a network
namespace.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.conftest import processes_naming
from tests.support.agent import fork_agents
from tests.support.live import STEPS, Fault, Faults, Forked, Row, train
from tests.support.ports import own_loopback
from tests.support.preloaded import context, server_address, share_server
from tieredckpt.agent.host.runtime import NODE_NAME_VARIABLE
from tieredckpt.config.schema import load_config
from tieredckpt.errors import AgentError
from tieredckpt.live import board, decide
from tieredckpt.live import messages as m
from tieredckpt.live.job import joiner
from tieredckpt.live.supervisor import Supervisor
from tieredckpt.rpc.agent_client import AgentClient
from tieredckpt.rpc.messages.agent import Status
from tieredckpt.testing import netns

NAMES = ("first", "second", "third")
PORT = 7411
LOOPBACK = own_loopback()
"""Another one for each test process: others may run on this machine."""
FDS_MAX = 4
MESSAGE_BYTES_MAX = 1 << 16
CONFIG_VARIABLE = "TCK_TEST_CONFIG"
DEADLINE_S = 120.0


class Zygote:
    """Forks ranks; made before its process has threads. The ranks end with their supervisor."""

    def __init__(self, target: Callable[[], None]) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if not os.fork():
            try:
                ours.close()
                _fork_ranks(theirs, target)
            finally:
                os._exit(0)
        theirs.close()
        self._socket = ours

    def spawn(self, env: Mapping[str, str], descriptor: int) -> Any:
        """As :data:`tieredckpt.live.processes.Spawn`."""
        socket.send_fds(self._socket, [json.dumps(dict(env)).encode()], [descriptor])
        data, fds, *_ = socket.recv_fds(self._socket, MESSAGE_BYTES_MAX, FDS_MAX)
        return Rank(int(data), os.fdopen(fds[0], "rb", buffering=0), self._socket)


class Rank:
    """A forked rank as :class:`subprocess.Popen` has it."""

    def __init__(self, pid: int, stdout: Any, zygote: socket.socket) -> None:
        self.pid, self.stdout, self._zygote = pid, stdout, zygote

    def wait(self) -> int:
        self._zygote.sendall(str(self.pid).encode())
        return int(self._zygote.recv(MESSAGE_BYTES_MAX))


def _fork_ranks(sock: socket.socket, target: Callable[[], None]) -> None:
    while True:
        data, fds, *_ = socket.recv_fds(sock, MESSAGE_BYTES_MAX, FDS_MAX)
        if not data:
            return
        if not fds:  # a process that has died, or is killed
            _, status = os.waitpid(int(data), 0)
            sock.sendall(str(os.waitstatus_to_exitcode(status)).encode())
            continue
        env = {**json.loads(data), m.SOCKET_VARIABLE: str(fds[0])}
        rank = Forked(target, env, fds[0])
        os.close(fds[0])
        socket.send_fds(sock, [str(rank.pid).encode()], [rank.stdout.fileno()])
        rank.stdout.close()


class Hosts:
    """Hosts of one job with two ranks on each of two; a context manager that ends all of it.

    Args:
        folder: For configurations, rows, outputs and memory.
        network: For hosts that are network namespaces; None: loopback addresses.
        replicas: Of each shard.
        standby: Processes of a host beyond its ranks.
        faults: Of ranks.
        listed: Hosts that the first ones wait for before they train.
        nodes: As of ``--nnodes``: the least number of hosts (0: the same), and the largest.
        stable_s: As of the policy.
        copies: On other hosts, of each checkpoint.
        tiers: As of the configuration.
        script: Called with the world and the folder; None: that of tests.support.live.
    """

    def __init__(
        self, folder: Path, network: netns.Network | None = None, *, replicas: int = 2,
        standby: int = 0, faults: Sequence[Fault] = (), listed: int = len(NAMES),
        nodes: tuple[int, int] = (0, 2), stable_s: float = 1.0, copies: int = 1,
        tiers: Sequence[Mapping[str, Any]] = (),
        script: Callable[[Any, Path], None] | None = None,
    ) -> None:  # fmt: skip
        self.folder, self.network = folder, network
        self._replicas, self._standby, self._faults = replicas, standby, tuple(faults)
        self._listed, self._nodes, self._stable_s, self._script = listed, nodes, stable_s, script
        self._copies, self._tiers = copies, tiers
        self._processes: dict[str, Any] = {}
        self._args: dict[str, tuple[Any, ...]] = {}
        token = folder / "token"
        token.write_text(secrets.token_hex(32))
        token.chmod(0o600)

    def __enter__(self) -> Hosts:
        self.go_to(0)
        return self

    def __exit__(self, *exc: object) -> None:
        for name in list(self._processes):
            self.lose(name)

    # --- hosts ------------------------------------------------------------------------------------

    def start(self, *names: str, stands_by: bool = False, per_host: int = 2) -> None:
        """Start hosts with empty memories."""
        for name in names:
            number = NAMES.index(name) + 1
            namespace, network = None, f"{LOOPBACK}.{number}/32"
            prefix, listed = LOOPBACK, max(number, self._listed)
            if self.network is not None:
                with contextlib.suppress(OSError):  # it is there already
                    self.network.add(name, number)
                namespace = self.network.namespace(name)
                own = self.network.address(name)
                network, prefix = f"{own}/32", own.rpartition(".")[0]
            (self.folder / name).mkdir(mode=0o700)
            config = {
                "namespace": "hosts",
                "memory": {"capacity": "256MiB", "keep": {"last": 2}, "replicas": self._copies},
                "tiers": list(self._tiers),
                "agent": {"runtime_dir": str(self.folder / name), "idle_timeout": "1 min"},
                "discovery": {"static": [f"{prefix}.{n + 1}:{PORT}" for n in range(listed)]},
                "network": {"cidr": network, "port": PORT},
                "security": {"token_file": str(self.folder / "token")},
            }
            path = self.folder / f"{name}.json"
            path.write_text(json.dumps(config))
            policy = decide.Policy(
                per_host=per_host, hosts=self._nodes[1], hosts_min=self._nodes[0],
                standby=self._standby, hang_s=0.0, unwind_s=20.0, wait_s=DEADLINE_S,
                stable_s=self._stable_s,
            )  # fmt: skip
            args = str(self.folder), name, namespace, policy, stands_by, self._replicas
            self._args[name] = (*args, self._faults, self._script, server_address())
            self._processes[name] = context.Process(target=_host, args=self._args[name])
            self._processes[name].start()

    def start_again(self, name: str) -> int | None:
        """Start a second supervisor on a host; its exit code."""
        process = context.Process(target=_host, args=self._args[name])
        process.start()
        process.join(DEADLINE_S)
        return process.exitcode

    def lose(self, name: str) -> None:
        """End all processes of a host, and remove its memory."""
        process = self._processes.pop(name)
        pids = [process.pid, *_children(process.pid), *processes_naming(self.folder / name)]
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.join(DEADLINE_S)
        shutil.rmtree(self.folder / name, ignore_errors=True)

    def signal(self, name: str) -> None:
        """Send SIGTERM to the supervisor of a host."""
        self._processes[name].terminate()

    def code(self, name: str) -> int | None:
        """Wait for the end of a host's supervisor; its exit code. The host's memory is removed."""
        process = self._processes[name]
        process.join(DEADLINE_S)
        code: int | None = process.exitcode
        self.lose(name)
        return code

    def kill_agent(self, name: str) -> None:
        """End the agent of a host."""
        for pid in processes_naming(self.folder / name):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def answers(self, name: str) -> bool:
        """Whether the agent of a host serves requests."""
        return self._status(name) is not None

    def has_copies(self, name: str, step: int) -> bool:
        """Whether other hosts have copies of what was saved after a step."""
        status = self._status(name)
        found = [each.replication for each in status.namespaces] if status is not None else []
        return any(each is not None and each.newest_replicated_step == step for each in found)

    def _status(self, name: str) -> Status | None:
        with AgentClient(self.folder / name) as client, contextlib.suppress(AgentError):
            return client.status(revive=False)
        return None

    # --- the training -----------------------------------------------------------------------------

    def go_to(self, step: int) -> None:
        """Let the training go on until it has made this update."""
        part = self.folder / "limit.part"
        part.write_text(str(step))
        part.rename(self.folder / "limit")

    def rows(self) -> list[Row]:
        """What rank 0 has seen so far."""
        path = self.folder / "rows"
        text = path.read_text() if path.exists() else ""
        return [Row(*json.loads(line)) for line in text.splitlines(True) if line.endswith("\n")]

    def text(self, *names: str) -> str:
        """The outputs of hosts; of all by default."""
        paths = [self.folder / f"{name}.log" for name in names or NAMES]
        return "\n".join(path.read_text() for path in paths if path.exists())

    def wait(self, until: Callable[[], bool]) -> None:
        """Wait for it, with a deadline."""
        limit_s = time.monotonic() + DEADLINE_S
        while not until():
            assert time.monotonic() < limit_s, self.text()
            time.sleep(0.02)

    def train_to(self, step: int) -> None:
        """Go on until it, and wait."""
        self.go_to(step)
        self.wait(lambda: bool(self.rows()) and self.rows()[-1].step >= step)

    def codes(self) -> dict[str, int | None]:
        """Wait for the end of all hosts; their exit codes."""
        for process in self._processes.values():
            process.join(DEADLINE_S)
        return {name: process.exitcode for name, process in self._processes.items()}


def _children(pid: int) -> list[int]:
    found: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, path.read_text().split()):
                found += [child, *_children(child)]
    return found


def _host(
    folder: str,
    name: str,
    namespace: str | None,
    policy: decide.Policy,
    stands_by: bool,
    replicas: int,
    faults: Sequence[Fault],
    script: Callable[[Any, Path], None] | None,
    server: str,
) -> None:
    """The process of a host."""
    # On a busy machine a killed agent is not restarted and read again within the product's second.
    board.DOUBT_S = board.FAILING_S
    if namespace is not None:
        netns.enter(namespace)
    else:  # an agent that is killed is back before its host counts as lost
        share_server(server)
        fork_agents()
    config = f"{folder}/{name}.json"
    os.environ |= {
        NODE_NAME_VARIABLE: name,
        CONFIG_VARIABLE: config,
        "GLOO_SOCKET_IFNAME": "eth0" if namespace is not None else "lo",
    }
    zygote = Zygote(lambda: _script(folder, replicas, faults, script))
    output = open(f"{folder}/{name}.log", "a", buffering=1)  # noqa: SIM115  (until it ends)
    runtime_dir = Path(folder, name)
    supervisor = Supervisor(
        policy,
        zygote.spawn,
        runtime_dir,
        max_restarts=8,
        grace_s=DEADLINE_S,
        write=lambda line: print(line, file=output),
        join=joiner(
            policy, load_config(config, {}), runtime_dir, "job", is_standby=stands_by, environ={}
        ),
    )
    sys.exit(supervisor.run())


def _script(
    folder: str,
    replicas: int,
    faults: Sequence[Fault],
    script: Callable[[Any, Path], None] | None,
) -> None:
    from tieredckpt import live

    def held(world: Any) -> None:
        if script is not None:
            script(world, Path(folder))
            return

        def wait(_: Any) -> None:
            while world.version >= int(Path(folder, "limit").read_text()):
                world.ping()  # it leaves with its generation
                time.sleep(0.005)

        each = Faults(folder, faults)
        train(world, folder, STEPS, each, replicas=replicas, after_update=wait)

    live.run(held, os.environ[CONFIG_VARIABLE])
