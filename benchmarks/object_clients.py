"""Which client moves bytes to and from an S3 server with the least time and processor time.

    python -m benchmarks.object_clients [--mib 512] [--rounds 3]

One server, the same part size and number of requests at once for all; the rounds go through all
clients in turn, and the best of each counts. The table is in ``docs/design/004-durable-tiers.md``.
boto3 is no dependency: without it its rows are left out.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.object_limits import Act, At, Bytes, Plain, in_threads, obstore_gets, obstore_puts
from tieredckpt.storage.backends.open import open_store
from tieredckpt.storage.object.errors import ObjectSettings
from tieredckpt.testing.s3_server import ACCESS_KEY, BUCKET, REGION, SECRET_KEY, S3Server, missing


def with_boto3(at: At, data: Bytes) -> dict[str, Act]:
    """AWS's own client for Python."""
    if importlib.util.find_spec("boto3") is None:
        return {}
    import boto3
    from botocore.config import Config

    client = boto3.client(
        "s3",
        endpoint_url=at.endpoint,
        region_name=REGION,
        aws_access_key_id=ACCESS_KEY,
        aws_secret_access_key=SECRET_KEY,
        config=Config(max_pool_connections=at.at_once, s3={"addressing_style": "path"}),
    )

    def put() -> None:
        made = client.create_multipart_upload(Bucket=BUCKET, Key="x", ChecksumAlgorithm="CRC32")
        name = {"Bucket": BUCKET, "Key": "x", "UploadId": made["UploadId"]}
        found: dict[int, Any] = {}

        def part(where: tuple[int, int]) -> None:
            number = where[0] // at.part_bytes + 1
            body = data.source[where[0] : where[1]].tobytes()  # it takes no memoryview
            reply = client.upload_part(
                **name, PartNumber=number, Body=body, ChecksumAlgorithm="CRC32"
            )
            found[number] = {
                "PartNumber": number,
                "ETag": reply["ETag"],
                "ChecksumCRC32": reply["ChecksumCRC32"],
            }

        in_threads(part, data, at)
        parts = [found[number] for number in sorted(found)]
        client.complete_multipart_upload(**name, MultipartUpload={"Parts": parts})

    def get() -> None:
        def part(where: tuple[int, int]) -> None:
            wanted = f"bytes={where[0]}-{where[1] - 1}"
            body = client.get_object(Bucket=BUCKET, Key="x", Range=wanted)["Body"]
            done = where[0]
            while done < where[1]:
                done += body._raw_stream.readinto(data.into[done : where[1]])

        in_threads(part, data, at)

    return {"put boto3": put, "get boto3, readinto": get}


class Source:
    """A segment in memory, without the digests that the agent checks."""

    def __init__(self, data: Bytes) -> None:
        self.size = data.size
        self._data = data

    def read_into(self, offset: int, into: memoryview) -> None:
        into[:] = self._data.source[offset : offset + len(into)]


def with_tier(at: At, data: Bytes) -> dict[str, Act]:
    """The tier itself, with all that it does besides."""
    os.environ["AWS_ACCESS_KEY_ID"], os.environ["AWS_SECRET_ACCESS_KEY"] = ACCESS_KEY, SECRET_KEY
    settings = ObjectSettings(
        endpoint=at.endpoint, allow_http=True, part_bytes=at.part_bytes, concurrency=at.at_once
    )
    tier = open_store("s3", f"s3://{BUCKET}", "tier", settings)
    key = "segments/" + "00" * 16

    def put() -> None:
        tier.delete(key)
        tier.put_from(key, Source(data))

    def get() -> None:
        with tier.open(key) as opened:
            opened.read_into(0, data.into)

    return {"put tier": put, "get tier": get}


def measure(server: S3Server, size: int, rounds: int) -> dict[str, tuple[float, float]]:
    """Least seconds and processor seconds of each."""
    data, at = Bytes(size), At(endpoint=server.endpoint, key="x")
    plain = Plain(at)
    acts: dict[str, Act] = obstore_puts(at, data) | plain.puts(data)
    acts |= obstore_gets(at, data) | plain.gets(data)
    for make in (with_boto3, with_tier):
        acts |= make(at, data)
    order = sorted(acts, key=lambda name: name.startswith("get"))
    best: dict[str, tuple[float, float]] = {}
    for _ in range(rounds):
        for name in order:
            before, begun_s = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
            acts[name]()
            took = time.perf_counter() - begun_s
            after = resource.getrusage(resource.RUSAGE_SELF)
            cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
            old = best.get(name, (took, cpu))
            best[name] = min(old[0], took), min(old[1], cpu)
            if name.startswith("get"):
                assert data.into == data.source, name
                data.into[:1000] = bytes(1000)
    return best


def main() -> None:
    """Print the table."""
    asked = argparse.ArgumentParser()
    asked.add_argument("--mib", type=int, default=512)
    asked.add_argument("--rounds", type=int, default=3)
    options = asked.parse_args()
    if why := missing():
        raise SystemExit(why)
    with tempfile.TemporaryDirectory(prefix="tck-s3-bench-", ignore_cleanup_errors=True) as name:
        Path(name).chmod(0o755)
        with S3Server(Path(name)) as server:
            found = measure(server, options.mib << 20, options.rounds)
    print(f"{options.mib} MiB, parts of 16 MiB, 8 at once, best of {options.rounds}")
    print("| | MB/s | processor s per GiB |\n| --- | --- | --- |")
    for name, (took, cpu) in found.items():
        per_gib = cpu * 1024 / options.mib
        print(f"| {name} | {(options.mib << 20) / took / 1e6:.0f} | {per_gib:.2f} |")


if __name__ == "__main__":
    main()
