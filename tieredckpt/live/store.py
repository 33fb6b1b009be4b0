"""The key-value store of one generation, without a server of its own, a port or a root.

On one host it is a file (:class:`GenerationStore`); on several, tables in the memory of their
agents (:class:`AgentStore`). A store is used for one generation, so it has no stale keys. A wait
ends at its time-out, and when its generation ends: a rank that died never sets its keys.
"""

from __future__ import annotations

import os
import secrets
import time
import zlib
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar

import torch.distributed as dist

from tieredckpt.errors import AgentError, TieredCkptError, TierUnavailableError, UsageError
from tieredckpt.rpc.agent_client import AgentClient
from tieredckpt.rpc.auth import Secret
from tieredckpt.rpc.messages.agent import HostEntry
from tieredckpt.rpc.messages.kv import Kv, KvReply, Op, PeerKv, watch
from tieredckpt.rpc.peer_client import PeerClient

_Answer = TypeVar("_Answer")

TIMEOUT = timedelta(minutes=10)
POLL_S_MIN = 0.001
POLL_S_MAX = 0.02
CHECK_S = 1.0
"""How often a wait checks whether its generation has ended."""
RETRY_S = 0.1
DEADLINE_S = 10.0
"""Longest time until an agent answers."""
ONCE = ("append", "add", "compare_set", "push", "pop")
"""Not idempotent: a request that is sent again must not be applied twice."""


class _Store(dist.Store):
    """What the stores have in common. Thread-safe, as torch's.

    torch's own class keeps the time-out: a prefixed store sets it there.
    """

    def __init__(self, check: Callable[[], None]) -> None:
        super().__init__()
        self.set_timeout(TIMEOUT)
        self._check = check

    def clone(self) -> Self:
        return self

    def deleteKey(self, key: str) -> bool:
        """As a prefixed store calls ``delete_key``."""
        return self.delete_key(key)

    def getNumKeys(self) -> int:
        """As a prefixed store calls ``num_keys``."""
        return self.num_keys()

    def _limit(self, timeout: timedelta | None) -> timedelta:
        own: timedelta = self.timeout  # type: ignore[attr-defined]
        return own if timeout is None else timeout


def timed_out(keys: Iterable[str], limit: timedelta) -> Exception:
    """The error of a wait."""
    return dist.DistStoreError(f"wait timeout: {', '.join(keys)} not set within {limit}")


class GenerationStore(_Store):
    """The store of one host: torch's FileStore, with waits that end.

    Args:
        path: Of the file; made by the first rank.
        size: Ranks of the generation.
        check: Raises once the generation ends.
    """

    def __init__(self, path: str, size: int, check: Callable[[], None]) -> None:
        super().__init__(check)
        self._file = dist.FileStore(path, size)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Raises DistStoreError after the time-out, and what ``check`` raises."""
        limit, pause_s = self._limit(timeout), POLL_S_MIN
        until_s = time.monotonic() + limit.total_seconds()
        while not self._file.check(list(keys)):
            self._check()
            if _left(until_s) <= 0:
                raise timed_out(keys, limit)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, POLL_S_MAX)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._file.get(key)

    def set(self, key: str, value: str) -> None:
        self._file.set(key, value)

    def add(self, key: str, amount: int) -> int:
        return self._file.add(key, amount)

    def check(self, keys: Sequence[str]) -> bool:
        return self._file.check(list(keys))

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        return self._file.compare_set(key, expected, desired)

    def delete_key(self, key: str) -> bool:
        return self._file.delete_key(key)

    def num_keys(self) -> int:
        return self._file.num_keys()

    def has_extended_api(self) -> bool:
        return False


class AgentStore(_Store):
    """The store of several hosts: each key is in the table of one host's agent, chosen by its hash.

    Nothing is replicated: a lost agent loses its keys, and ends the generation.

    Args:
        runtime_dir: Of this host's agent.
        namespace: Its secret proves requests to other hosts.
        table: Of this generation alone.
        hosts: Of the generation, in the same order on all.
        check: Raises once the generation ends.

    Raises:
        DistStoreError: From every method: an agent does not answer, is full, or was restarted.
    """

    def __init__(
        self,
        runtime_dir: Path,
        namespace: str,
        table: str,
        hosts: Sequence[HostEntry],
        check: Callable[[], None],
    ) -> None:
        super().__init__(check)
        # gloo then asks for all ranks' addresses in one request, instead of two for each rank.
        os.environ.setdefault("GLOO_ENABLE_STORE_V2_API", "1")
        self._namespace = namespace
        self._table = table
        self._hosts = [host.host_id for host in hosts]
        self._ids: dict[int, str] = {}
        self._is_closed = False
        self._agent = AgentClient(runtime_dir, deadline_s=DEADLINE_S)
        self._peers: dict[int, PeerClient] = {}
        own = self._answered(self._agent.health).host_id
        if self._hosts != [own]:
            known = self._answered(lambda: self._agent.peers(namespace))
            secret = Secret(known.token, known.tls)
            for number, host in enumerate(hosts):
                if host.host_id != own:
                    self._peers[number] = PeerClient(host, namespace, secret, stall_s=DEADLINE_S)

    def close(self) -> None:
        """Abort all requests to other hosts, which raise in their threads; later ones, too."""
        self._is_closed = True
        self._agent.close()
        for peer in self._peers.values():
            peer.close()

    # --- requests ---------------------------------------------------------------------------------

    def _answered(self, ask: Callable[[], _Answer]) -> _Answer:
        """What ``ask`` returns, again and again while the agent is being started anew."""
        until_s = time.monotonic() + DEADLINE_S
        while True:
            try:
                return ask()
            except (AgentError, TierUnavailableError):
                self._check()
                if self._is_closed or time.monotonic() >= until_s:
                    raise
                time.sleep(RETRY_S)

    def _ask(self, host: int, op: Op, *keys: str, wait_s: float = 0.0, **more: Any) -> KvReply:
        request = Kv(
            table=self._table, op=op, keys=keys, wait_s=min(max(wait_s, 0.0), CHECK_S),
            once=secrets.token_hex(8) if op in ONCE else "", **more,
        )  # fmt: skip
        return self._send(host, request)

    def _send(self, host: int, request: Kv) -> KvReply:
        try:
            if host in self._peers:
                reply = self._answered(lambda: self._peers[host].ask(PeerKv(request=request)))
            else:
                reply = self._answered(lambda: self._agent.call(request, self._namespace))
            if self._ids.setdefault(host, reply.table_id) != reply.table_id:
                raise AgentError("it was restarted, so its keys are lost", outcome="unknown")
        except UsageError:
            raise  # a ValueError, as of torch's stores
        except TieredCkptError as error:
            self._check()  # the better reason
            text = f"{request.op} at the agent of host {self._hosts[host]}: {error.message}"
            raise dist.DistStoreError(text) from error
        return reply

    def _of(self, op: Op, key: str, **more: Any) -> KvReply:
        """The reply of the key's owner."""
        return self._ask(self._owner(key), op, key, **more)

    def _owner(self, key: str) -> int:
        return zlib.crc32(key.encode()) % len(self._hosts)

    def _by_owner(self, keys: Iterable[str]) -> dict[int, list[str]]:
        found: dict[int, list[str]] = {}
        for key in keys:
            found.setdefault(self._owner(key), []).append(key)
        return found

    def _wait(
        self, op: Op, keys: Iterable[str], timeout: timedelta | None = None
    ) -> dict[str, bytes | None]:
        """The values of the keys, once all exist. Raises what ``check`` raises."""
        limit = self._limit(timeout)
        until_s = time.monotonic() + limit.total_seconds()
        found: dict[str, bytes | None] = {}
        for host, those in self._by_owner(keys).items():
            while not (reply := self._ask(host, op, *those, wait_s=_left(until_s))).number:
                self._check()
                if _left(until_s) <= 0:
                    raise timed_out(those, limit)
            found.update(zip(those, reply.values, strict=False))
        return found

    # --- torch's interface ------------------------------------------------------------------------

    def set(self, key: str, value: str | bytes) -> None:
        self._of("set", key, values=(_raw(value),))

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def add(self, key: str, amount: int) -> int:
        return self._of("add", key, amount=amount).number

    def check(self, keys: Sequence[str]) -> bool:
        owners = self._by_owner(keys).items()
        return all(self._ask(host, "check", *those).number for host, those in owners)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._wait("check", keys, timeout)

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        values = _raw(expected), _raw(desired)
        return self._of("compare_set", key, values=values).values[0] or b""

    def delete_key(self, key: str) -> bool:
        return bool(self._of("delete", key).number)

    def num_keys(self) -> int:
        return sum(self._ask(host, "count").number for host in range(len(self._hosts)))

    def list_keys(self) -> list[str]:
        every = range(len(self._hosts))
        asked = Kv(table=self._table, op="watch")
        return [key for host in every for key in watch(partial(self._send, host), asked).keys]

    def append(self, key: str, value: str | bytes) -> None:
        self._of("append", key, values=(_raw(value),))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        found = self._wait("get", keys)
        return [found[key] or b"" for key in keys]

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        given = dict(zip(keys, map(_raw, values), strict=True))
        for host, those in self._by_owner(given).items():
            self._ask(host, "set", *those, values=tuple(given[key] for key in those))

    def has_extended_api(self) -> bool:
        return True

    def queue_push(self, key: str, value: str | bytes) -> None:
        self._of("push", key, values=(_raw(value),))

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        value = self._wait("pop", [key])[key] if block else self._of("pop", key).values[0]
        if value is None:
            raise dist.QueueEmptyError("queue is empty")
        return value

    def queue_len(self, key: str) -> int:
        return self._of("len", key).number


def _raw(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else value


def _left(until_s: float) -> float:
    return until_s - time.monotonic()
