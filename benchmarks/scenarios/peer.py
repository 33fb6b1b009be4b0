"""How fast another host's bytes arrive: our server and client on loopback, against raw sockets."""

from __future__ import annotations

import contextlib
import importlib.util
import mmap
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path

import msgspec

from benchmarks.measure import Report, Row, Samples, explore, interleave, ratio_row, timed
from benchmarks.peer_limits import BUFFERS, RECEIVERS, SENDERS, RawPeer, run_together
from benchmarks.processes import Setup, Spawner
from tieredckpt.rpc.auth import Secret
from tieredckpt.rpc.messages import agent as m
from tieredckpt.rpc.peer_client import PeerClient
from tieredckpt.rpc.peer_server import PeerServer, listen_tcp

STREAMS = (1, 2, 4)
RANGE_BYTES = 64 << 20
"""As a recovery asks: runs of blocks of up to this size."""
FETCH_BYTES = 1 << 30
NAMESPACE, SEGMENT = "bench", "be" * 16
TOKEN = "worth nothing, for a benchmark"
LIMIT = "best raw sendfile/send -> recv_into"
EXPLORE_ROUNDS = 2


class Served(msgspec.Struct, frozen=True, kw_only=True):
    """What a serving process is told, as JSON on its command line."""

    path: str
    tls: m.TlsSpec | None


class _File:
    """The one segment, a file in tmpfs."""

    def __init__(self, path: str) -> None:
        self._fd = os.open(path, os.O_RDONLY)
        self.size = os.fstat(self._fd).st_size
        self.direct = False

    def read_into(self, offset: int, into: memoryview) -> None:
        """As an open slot reads."""
        assert os.preadv(self._fd, [into], offset) == len(into)

    def fileno(self) -> int:
        """For sendfile."""
        return self._fd

    def close(self) -> None:
        """Release it."""
        os.close(self._fd)


HOST = m.HostEntry(host_id="bench", incarnation="0" * 32, addresses=())


class _Api:
    """As much of an agent as a fetch needs: :class:`tieredckpt.rpc.peer_routes.PeerApi`."""

    def __init__(self, path: str, secret: Secret) -> None:
        self._path = path
        self._secret = secret

    def peer_served(self, _namespace: str) -> tuple[m.HostEntry, Secret]:
        return HOST, self._secret

    def read_segment(
        self, _namespace: str, _segment_id: str, _tier: str | None
    ) -> tuple[str, _File]:
        return "memory", _File(self._path)


def _secret(tls: m.TlsSpec | None) -> Secret:
    return Secret("" if tls is not None else TOKEN, tls)


def serve() -> None:
    """The serving process: ``python -m benchmarks.scenarios.peer JSON``, until its input ends."""
    told = msgspec.json.decode(sys.argv[1], type=Served)
    listener = listen_tcp("127.0.0.1", 0)
    api = _Api(told.path, _secret(told.tls))
    server = PeerServer(api, [listener], tls=told.tls)
    server.start()
    sys.stdout.write(f"{server.ports[0]}\n")
    sys.stdout.flush()
    sys.stdin.buffer.read()
    server.stop()


class _Ours:
    """A serving process, and a client of it that keeps its connections."""

    def __init__(self, path: str, tls: m.TlsSpec | None) -> None:
        told = msgspec.json.encode(Served(path=path, tls=tls)).decode()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.scenarios.peer", told],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self.process.stdout is not None
        where = f"127.0.0.1:{int(self.process.stdout.readline())}"
        host = msgspec.structs.replace(HOST, addresses=(where,))
        self._client = PeerClient(host, NAMESPACE, _secret(tls))

    def fetch(self, target: memoryview, streams: int) -> None:
        """The whole segment into ``target``: ``streams`` threads, a range at a time."""
        starts = list(range(0, len(target), RANGE_BYTES))[::-1]
        lock = threading.Lock()

        def work() -> None:
            while True:
                with lock:
                    if not starts:
                        return
                    start = starts.pop()
                stop = min(start + RANGE_BYTES, len(target))
                with closing(self._client.open_range(SEGMENT, "memory", start, stop)) as stream:
                    stream.read_into(target[start:stop])

        run_together([work] * streams)

    def close(self) -> None:
        """End the process."""
        self._client.close()
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(30)


@contextlib.contextmanager
def _peers(setup: Setup) -> Iterator[tuple[RawPeer, dict[str, _Ours], memoryview]]:
    path = Path(setup.shm) / "segment"
    size = min(FETCH_BYTES, setup.work_bytes)
    block = os.urandom(1 << 20)
    with path.open("wb") as file:
        for offset in range(0, size, len(block)):
            file.write(block[: size - offset])
    target = memoryview(mmap.mmap(-1, size))
    with contextlib.ExitStack() as stack:
        target[:] = bytes(1) * size  # warm: no page fault is measured
        raw = RawPeer(str(path))
        stack.callback(raw.close)
        kinds: dict[str, m.TlsSpec | None] = {"token": None}
        if (tls := _certificates(Path(setup.disk))) is not None:
            kinds["TLS"] = tls
        ours: dict[str, _Ours] = {}
        for name, spec in kinds.items():
            ours[name] = _Ours(str(path), spec)
            stack.callback(ours[name].close)
        yield raw, ours, target
        assert target[: len(block)] == block[:size], "something else arrived"


def _certificates(folder: Path) -> m.TlsSpec | None:
    """Files for mutual TLS; None without the package that makes them (extra ``dev``)."""
    if importlib.util.find_spec("trustme") is None:
        return None
    import trustme

    ca = trustme.CA()
    leaf = ca.issue_cert("127.0.0.1")
    leaf.cert_chain_pems[0].write_to_path(str(folder / "cert.pem"))
    leaf.private_key_pem.write_to_path(str(folder / "key.pem"))
    ca.cert_pem.write_to_path(str(folder / "ca.pem"))
    names = (str(folder / f"{each}.pem") for each in ("cert", "key", "ca"))
    cert, key, authority = names
    return m.TlsSpec(cert=cert, key=key, ca=authority)


def peer_process(setup: Setup, report: Report) -> Samples:
    """For each number of streams: find the best raw method, then measure it in turn with ours.

    Names of samples begin with the number of streams.
    """
    samples: Samples = {}
    # One process for all: a serving process takes longer to start than a quick run to measure.
    with _peers(setup) as (raw, ours, target):
        for count, streams in enumerate(STREAMS):
            variants = _raw_methods(raw, target, streams)
            # More than one round: the first one also tunes the connections' windows.
            best, tried = explore(variants, rounds=EXPLORE_ROUNDS)
            parts: dict[str, Callable[[int], float]] = {"raw": partial(_ignoring, variants[best])}
            for name, each in ours.items():
                each.fetch(target, streams)
                fetch = partial(each.fetch, target, streams)
                parts[name] = partial(_ignoring, partial(timed, fetch))
            found = interleave(max(setup.repeat // 4, 2), lambda *_: None, parts)
            samples |= {f"{streams} {name}": seconds for name, seconds in found.items()}
            samples |= {f"{streams} raw: {name}": seconds for name, seconds in tried.items()}
            report(count + 1, len(STREAMS))
    return samples


def _raw_methods(raw: RawPeer, target: memoryview, streams: int) -> dict[str, Callable[[], float]]:
    methods: dict[str, Callable[[], float]] = {}
    for sender in SENDERS:
        for receiver in RECEIVERS:
            for buffer in BUFFERS:
                size = f", buffers {buffer >> 20} MiB" if buffer else ""
                fetch = partial(raw.fetch, target, streams, sender, receiver, buffer)
                methods[f"{sender} -> {receiver}{size}"] = partial(timed, fetch)
    return methods


def _ignoring(action: Callable[[], float], _number: int) -> float:
    return action()


def peer(spawn: Spawner) -> list[Row]:
    """1 GiB from another process's tmpfs over loopback, with 1, 2 and 4 streams."""
    every = spawn.one(peer_process)
    rows: list[Row] = []
    for streams in STREAMS:
        prefix = f"{streams} "
        samples = {k.removeprefix(prefix): v for k, v in every.items() if k.startswith(prefix)}
        raws = [name for name in samples if name.startswith("raw: ")]
        best = min(raws, key=lambda name: min(samples[name]))
        rows += [
            ratio_row(
                "peer",
                f"fetch from a peer, {streams} stream(s), {name}",
                samples,
                ours=name,
                limit="raw",
                limit_name=f"{LIMIT}, {streams} socket(s), unencrypted",
                work_bytes=min(FETCH_BYTES, spawn.setup.work_bytes),
                target=0.85 if name == "token" else None,
                note=f"raw: {best.removeprefix('raw: ')}",
                detail=raws if name == "token" else (),
            )
            for name in samples
            if name != "raw" and name not in raws
        ]
    return rows


if __name__ == "__main__":
    serve()
