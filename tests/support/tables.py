"""Agents on loopback addresses as several hosts, with their key-value tables, without torch."""

from __future__ import annotations

import secrets
from pathlib import Path

from tests.support.agent import AgentProcess, spec_of
from tieredckpt.rpc.agent_client import AgentClient
from tieredckpt.rpc.auth import Secret
from tieredckpt.rpc.messages import agent as m
from tieredckpt.rpc.peer_client import PeerClient

NAMESPACE = "run"


class TableHost:
    """One host: an agent that serves the namespace to other hosts, and a client with a session."""

    def __init__(self, runtime_dir: Path, number: int, token: str) -> None:
        runtime_dir.mkdir(mode=0o700)
        self.runtime_dir = runtime_dir
        self.token = token
        self._env = {"TIEREDCKPT_NODE_NAME": f"h{number}"}
        self.agent = AgentProcess(runtime_dir, env=self._env)
        self.client = AgentClient(runtime_dir, deadline_s=30.0)
        self.client.open_session(NAMESPACE, spec_of())
        request = m.Listen(
            session_id=self.client.session_id, token=token, tls=None, interfaces=(),
            cidrs=(f"127.77.0.{number + 1}/32",), port=0, labels={},
        )  # fmt: skip
        self.entry = self.client.call(request).host

    def peer(self) -> PeerClient:
        """A client of this host as another host has one."""
        return PeerClient(self.entry, NAMESPACE, Secret(self.token))

    def restart(self) -> None:
        """Kill the agent and start another one in its folder, at the same port."""
        self.agent.kill()
        self.agent = AgentProcess(self.runtime_dir, env=self._env)

    def close(self) -> None:
        self.client.close()
        if not self.agent.ended():
            self.agent.kill()


class TableHosts:
    """Several of them; a context manager that ends their agents."""

    def __init__(self, folder: Path, count: int) -> None:
        self.hosts: list[TableHost] = []
        token = secrets.token_hex(32)
        try:
            for number in range(count):
                self.hosts.append(TableHost(folder / f"h{number}", number, token))
        except BaseException:
            self.close()
            raise

    @property
    def entries(self) -> list[m.HostEntry]:
        return [host.entry for host in self.hosts]

    def close(self) -> None:
        for host in self.hosts:
            host.close()

    def __enter__(self) -> TableHosts:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
