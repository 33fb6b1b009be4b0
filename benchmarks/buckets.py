"""The only place that knows how tiers in a bucket are configured, looked at and counted."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import msgspec

from benchmarks import engines
from benchmarks.object_limits import At
from benchmarks.processes import Setup
from benchmarks.shapes import MIB
from tieredckpt import Engine
from tieredckpt.storage.backends.open import open_store
from tieredckpt.storage.base import Tier
from tieredckpt.storage.object.errors import ObjectSettings
from tieredckpt.testing.s3_server import ACCESS_KEY, BUCKET, REGION, SECRET_KEY

TIER = "s3"
NAMESPACE = "benchmark"
AT_ONCE = 8
PART_MIB, PART_MIB_QUICK = 16, 8
"""The default; and one that divides a small state, too."""
SMALL_BYTES = 256 * MIB
WAIT_S = 300.0
POLL_S = 0.05


class Bucket(msgspec.Struct, frozen=True, kw_only=True):
    """A prefix of the server's bucket, as JSON in a child's options."""

    endpoint: str
    prefix: str
    vacuum_url: str
    size: int
    """Of the state."""

    @property
    def part_bytes(self) -> int:
        """Of the tier, and of the raw clients."""
        return (PART_MIB_QUICK if self.size < SMALL_BYTES else PART_MIB) * MIB

    def config(self, setup: Setup, folder: str = "agent", endpoint: str = "") -> dict[str, object]:
        """As :func:`benchmarks.engines.config`, with a tier in the bucket for every save.

        Args:
            setup: Of the scenario.
            folder: The agent's, below the scenario's.
            endpoint: Of a proxy before the server.
        """
        runtime = Path(setup.shm) / folder
        runtime.mkdir(mode=0o700, exist_ok=True)
        return engines.config(setup, spill=False) | {
            "agent": {"runtime_dir": str(runtime)},
            "tiers": [
                {
                    "name": TIER,
                    "url": f"s3://{BUCKET}/{self.prefix}",
                    "endpoint": endpoint or self.endpoint,
                    "allow_http": True,
                    "part_size": f"{self.part_bytes // MIB}MiB",
                    "concurrency": AT_ONCE,
                    "every": "save",
                    "keep": {"last": 1},
                    "delete_delay": "1 s",
                }
            ],
        }

    def tier(self) -> Tier:
        """What the bucket holds of our checkpoints."""
        settings = ObjectSettings(endpoint=self.endpoint, region=REGION, allow_http=True)
        return open_store(TIER, f"s3://{BUCKET}/{self.prefix}", NAMESPACE, settings)

    def raw(self, key: str) -> At:
        """An object for the raw clients."""
        return At(
            endpoint=self.endpoint,
            key=f"{self.prefix}/{key}",
            part_bytes=self.part_bytes,
            at_once=AT_ONCE,
        )

    def raw_segment(self) -> tuple[At, int]:
        """The largest segment, and its size."""
        tier = self.tier()
        try:
            found = max(tier.list("segments/"), key=lambda info: info.size)
        finally:
            tier.close()
        return self.raw(f"{NAMESPACE}/{found.key}"), found.size

    def wait_pruned(self) -> None:
        """Until the pruner has deleted older checkpoints, and the server has freed their room.

        The file system's work for it would else be in the next sample.
        """
        tier = self.tier()
        try:
            until_s = time.monotonic() + WAIT_S
            while len(list(tier.list("segments/"))) > 1:
                if time.monotonic() > until_s:
                    raise TimeoutError(f"old segments are still there after {WAIT_S:.0f} s")
                time.sleep(POLL_S)
        finally:
            tier.close()
        self.vacuum()

    def vacuum(self) -> None:
        """Let the server free the room of what was deleted; returns when it is done."""
        with urllib.request.urlopen(self.vacuum_url, timeout=WAIT_S) as answer:
            answer.read()


def told(text: str) -> Bucket:
    """What a child was told; its environment has the credentials from then on, its agents', too."""
    os.environ.update(
        AWS_ACCESS_KEY_ID=ACCESS_KEY, AWS_SECRET_ACCESS_KEY=SECRET_KEY, AWS_REGION=REGION
    )
    return msgspec.json.decode(text, type=Bucket)


@contextlib.contextmanager
def opened(
    bucket: Bucket, setup: Setup, folder: str = "agent", endpoint: str = ""
) -> Iterator[Engine]:
    """An engine with a tier in the bucket; the agent that it started goes on."""
    with Engine.open(bucket.config(setup, folder, endpoint)) as engine:
        yield engine


def wait_idle(engine: Engine) -> None:
    """Until the tier has nothing to do but to prune."""
    until_s = time.monotonic() + WAIT_S
    while time.monotonic() < until_s:
        (tier,) = engine.status().namespaces[0].tiers
        if not (tier.queued or tier.awaited or tier.active_save_id):
            return
        time.sleep(POLL_S)
    raise TimeoutError(f"the tier is still busy after {WAIT_S:.0f} s")


# --- counting -------------------------------------------------------------------------------------


class CountingProxy:
    """Passes connections on to the server and counts what comes back, headers included.

    Whatever is asked for, by whichever process and client, is seen here and nowhere else.
    """

    def __init__(self, endpoint: str) -> None:
        host, _, port = endpoint.removeprefix("http://").rpartition(":")
        self._to = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self._lock = threading.Lock()
        self.endpoint = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.received_bytes = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Take no more connections; those that are open end with their client."""
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(self._to)
                for source, target, counts in ((client, server, False), (server, client, True)):
                    threading.Thread(
                        target=self._pass, args=(source, target, counts), daemon=True
                    ).start()

    def _pass(self, source: socket.socket, target: socket.socket, counts: bool) -> None:
        buffer = memoryview(bytearray(256 << 10))
        with contextlib.suppress(OSError):
            while count := source.recv_into(buffer):
                if counts:
                    with self._lock:
                        self.received_bytes += count
                target.sendall(buffer[:count])
        for each in (source, target):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
