"""A training on one host whose checkpoints go to a disk and to a bucket, behind a proxy.

The oracle: a save that was made is in memory and on the disk whatever the bucket does, what the
bucket holds is byte for byte what the disk holds, and another host restores exactly that.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch

from tests.conftest import stop_processes_of
from tests.support.agent import wait_until
from tests.support.faults import ForkedAgent
from tests.support.http_proxy import HttpProxy, Rule
from tests.support.leftovers import shm
from tests.support.states import same, save
from tieredckpt.engine import Engine
from tieredckpt.errors import IntegrityError
from tieredckpt.format.manifest import Manifest, decode_manifest
from tieredckpt.format.records import is_tombstone
from tieredckpt.testing.s3_server import ACCESS_KEY, BUCKET, SECRET_KEY, S3Server

DEADLINE_S = 180.0
"""For a loaded machine; nothing takes more than a few seconds."""
NUMBERS = 4_300_000
"""Three parts of an upload: 5 MiB become 8, a multiple of the block."""
_numbers = itertools.count()


def credentials(secret: str = SECRET_KEY) -> dict[str, str]:
    """In the environment of whoever talks to the store, and no other way to find any."""
    return {
        "AWS_ACCESS_KEY_ID": ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": secret,
        "AWS_EC2_METADATA_DISABLED": "true", "AWS_CONFIG_FILE": "/dev/null",
        "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
    }  # fmt: skip


class HandedOut:
    """Credentials that a process hands out, as a profile of AWS's names it.

    Args:
        folder: For the profile, and for what is handed out.
    """

    def __init__(self, folder: Path) -> None:
        self._answer = folder / "handed-out.json"
        self._asked = folder / "asked"
        process = folder / "credential-process"
        # A line each time it is asked; it fails with what it was given instead of an answer.
        process.write_text(
            f'#!/bin/sh\necho asked >> "{self._asked}"\n'
            f'case "$(head -c1 "{self._answer}")" in\n'
            f'"{{") cat "{self._answer}";; *) cat "{self._answer}" >&2; exit 1;;\nesac\n'
        )
        process.chmod(0o755)
        config = folder / "aws-config"
        config.write_text(f"[default]\ncredential_process = {process}\n")
        self.environ = {
            "AWS_CONFIG_FILE": str(config), "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
            "AWS_EC2_METADATA_DISABLED": "true",
        }  # fmt: skip

    @property
    def asked(self) -> int:
        """How often."""
        return len(self._asked.read_text().splitlines()) if self._asked.exists() else 0

    def give(self, key: str, secret: str, *, lives: timedelta | None = timedelta(hours=6)) -> None:
        """What is handed out from now on, and how long the process says that it is good for."""
        found = {"Version": 1, "AccessKeyId": key, "SecretAccessKey": secret}
        if lives is not None:
            found["Expiration"] = (datetime.now(UTC) + lives).isoformat()
        self._put(json.dumps(found))

    def fail(self, why: str) -> None:
        """The process fails from now on."""
        self._put(why)

    def _put(self, text: str) -> None:
        (new := self._answer.with_suffix(".new")).write_text(text)
        new.replace(self._answer)


def state_of(step: int, numbers: int = NUMBERS) -> dict[str, Any]:
    """What is saved at a step."""
    made = torch.Generator().manual_seed(step)
    return {
        "w": torch.randn(numbers, generator=made),
        "m": {"v": torch.randn(70, 9, generator=made)},
        "step": step,
    }


def zeros(numbers: int = NUMBERS) -> dict[str, Any]:
    """What :func:`state_of` is loaded into."""
    return {"w": torch.zeros(numbers), "m": {"v": torch.zeros(70, 9)}, "step": -1}


class Bucket:
    """What lies below one prefix, past every client.

    Args:
        server: The store.
        prefix: ``bucket/prefix``.
    """

    def __init__(self, server: S3Server, prefix: str) -> None:
        self.server, self.prefix = server, prefix

    def keys(self, below: str = "") -> list[str]:
        """Relative to the namespace; at most a thousand."""
        bucket, _, prefix = self.prefix.partition("/")
        query = {"list-type": "2", "prefix": f"{prefix}/run/{below}"}
        reply = self.server.request("GET", f"/{bucket}", query=query)
        assert reply.status == 200, reply
        found = [each.text or "" for each in ElementTree.fromstring(reply.body).iter()
                 if each.tag.rpartition("}")[2] == "Key"]  # fmt: skip
        return [each.removeprefix(f"{prefix}/run/") for each in found]

    def get(self, key: str) -> bytes:
        reply = self.server.request("GET", f"/{self.prefix}/run/{key}")
        assert reply.status == 200, (key, reply)
        return reply.body

    def put(self, key: str, data: bytes) -> None:
        reply = self.server.request("PUT", f"/{self.prefix}/run/{key}", body=data)
        assert reply.status == 200, (key, reply)

    def delete(self, key: str) -> None:
        reply = self.server.request("DELETE", f"/{self.prefix}/run/{key}")
        assert reply.status == 204, (key, reply)

    def damage(self, key: str, kind: str) -> None:
        """``flip``, ``truncate``, ``empty`` or ``delete``."""
        if kind == "delete":
            self.delete(key)
            return
        data = bytearray(self.get(key))
        if kind == "flip":
            data[len(data) // 3] ^= 1
        self.put(key, bytes({"flip": data, "truncate": data[: len(data) // 2], "empty": b""}[kind]))

    def manifests(self) -> dict[int, Manifest]:
        """Of committed checkpoints that can be read, by step."""
        found = {}
        for key in self.keys("manifests/"):
            if not is_tombstone(data := self.get(key)):
                with contextlib.suppress(IntegrityError):
                    manifest = decode_manifest(data)
                    found[manifest.step] = manifest
        return found

    def tombstones(self) -> list[str]:
        """Keys."""
        return [key for key in self.keys("manifests/") if is_tombstone(self.get(key))]

    def snapshot(self) -> dict[str, bytes]:
        return {key: self.get(key) for key in self.keys()}


@dataclass
class Restored:
    """What a host found that has nothing but the bucket."""

    step: int | None
    state: dict[str, Any]
    engine: Engine
    agent: ForkedAgent
    runtime: Path

    @property
    def sources(self) -> set[str]:
        report = self.engine.last_restore
        return set(report.bytes_by_source) if report is not None else set()


@contextlib.contextmanager
def fresh_runtime() -> Iterator[Path]:
    """An empty runtime folder; what runs in it is ended."""
    folder = shm() / f"tck-test-{os.getpid()}-s3-{next(_numbers)}"
    folder.mkdir(mode=0o700)
    try:
        yield folder
    finally:
        stop_processes_of(folder)
        shutil.rmtree(folder, ignore_errors=True)


def settings(runtime: Path, endpoint: str, prefix: str, **more: Any) -> dict[str, Any]:
    """Of one host with a tier in the bucket; ``more``: keys of that tier."""
    tier = {
        "name": "s3", "url": f"s3://{prefix}", "endpoint": endpoint, "allow_http": True,
        "part_size": "5MiB", "concurrency": 2, "retry_for": "2 s", "timeout": "10 s",
    }  # fmt: skip
    return {
        "namespace": "run",
        "memory": {"capacity": "512MiB", "keep": {"last": 2}},
        "agent": {"runtime_dir": str(runtime), "start": "never", "start_timeout": "60s"},
        "save": {"on_error": "raise", "timeout": "60 s"},
        "recovery": {"wait": "20 s"},
        "tiers": [{**tier, **more}],
    }


def start_agent(runtime: Path, environ: dict[str, str] | None = None, armed: str = "") -> Any:
    """An agent that knows the store's credentials, or is given others."""
    first = functools.partial(put_into_environ, environ or credentials())
    return ForkedAgent(runtime, armed, first=first)


def put_into_environ(values: dict[str, str]) -> None:
    """The first thing that a process does: forget other credentials, know these."""
    for name in [each for each in os.environ if each.startswith("AWS_")]:
        del os.environ[name]
    os.environ.update(values)


@contextlib.contextmanager
def restored(
    server: S3Server,
    prefix: str,
    *,
    numbers: int = NUMBERS,
    load: bool = True,
    environ: dict[str, str] | None = None,
    **more: Any,
) -> Iterator[Restored]:
    """A fresh host loads from the bucket, past the proxy; ``environ``: of its agent."""
    with fresh_runtime() as runtime:
        agent = start_agent(runtime, environ)
        try:
            with Engine.open(settings(runtime, server.endpoint, prefix, **more)) as engine:
                state = zeros(numbers)
                step = engine.load(state) if load else None
                yield Restored(step, state, engine, agent, runtime)
        except BaseException as error:
            error.add_note(log_of(runtime))
            raise
        finally:
            agent.kill()


def log_of(runtime: Path) -> str:
    """The end of an agent's log."""
    return "\n".join(each.read_text()[-4000:] for each in runtime.glob("agent.log*"))


class Bench:
    """See the module. Saves are numbered; step 0 is there, in every tier, when it is made.

    Args:
        server: The store; the training reaches it through :attr:`proxy`.
        folder: For the disk.
        environ: Of the agent, with its credentials.
        first: Whether step 0 is saved, and waited for in the bucket.
        numbers: In the tensor that matters.
        wait: How long a restart waits for a tier that cannot be read.
        more: Keys of the bucket's tier.
    """

    def __init__(
        self,
        server: S3Server,
        folder: Path,
        *,
        environ: dict[str, str] | None = None,
        first: bool = True,
        numbers: int = NUMBERS,
        wait: str = "20 s",
        **more: Any,
    ) -> None:
        self.prefix = f"{BUCKET}/test-{os.getpid()}-bench-{next(_numbers)}"
        self.bucket = Bucket(server, self.prefix)
        self.server, self.disk, self.step = server, folder / "disk", -1
        self.numbers = numbers
        self._stack = contextlib.ExitStack()
        try:
            self.runtime = self._stack.enter_context(fresh_runtime())
            self.proxy = self._stack.enter_context(HttpProxy(server.address))
            self.environ = environ or credentials()
            self.agent = start_agent(self.runtime, self.environ)
            self._stack.callback(lambda: self.agent.kill())
            self.config = settings(self.runtime, self.proxy.endpoint, self.prefix, **more)
            self.config["recovery"]["wait"] = wait
            self.config["tiers"].insert(0, {"name": "disk", "url": f"file://{self.disk}"})
            self.engine = self._stack.enter_context(Engine.open(self.config))
            if first:
                self.save()
                self.caught_up()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            error.add_note(log_of(self.runtime))
        self.close()

    def close(self) -> None:
        self._stack.close()

    def restart_agent(self, armed: str = "") -> None:
        """Kill the agent if it lives, and start another one."""
        self.agent.kill()
        self.agent = start_agent(self.runtime, self.environ, armed)

    def save(self) -> int:
        """One more checkpoint: committed in memory when this returns; raises if it is skipped."""
        self.step += 1
        save(self.engine, self.step, state_of(self.step, self.numbers))
        assert self.engine.last_save is not None
        assert self.engine.last_save.skipped is None
        return self.step

    def train_on(self, saves: int = 3) -> None:
        """Saves that reach the disk, whatever the bucket does meanwhile."""
        for _ in range(saves):
            self.engine.wait(self.save(), "disk", DEADLINE_S)

    def caught_up(self) -> Manifest:
        """Wait until the bucket has the newest checkpoint; it has exactly what the disk has."""
        self.engine.wait(self.step, "s3", DEADLINE_S)
        self.engine.wait(self.step, "disk", DEADLINE_S)
        found = self.bucket.manifests()
        assert max(found) == self.step
        newest = found[self.step]
        for ref in newest.segments:
            stored = self.bucket.get(f"segments/{ref.id}")
            assert stored == (self.disk / "run" / "segments" / ref.id).read_bytes()
        return newest

    def restores(self) -> None:
        """Another host, with the bucket alone, gets the newest checkpoint bit for bit."""
        with restored(self.server, self.prefix, numbers=self.numbers) as found:
            assert found.step == self.step
            assert same(found.state, state_of(self.step, self.numbers))
            assert found.sources == {"s3"}

    @contextlib.contextmanager
    def failing(self, *rules: Rule, strikes: int = 1, saves: int = 2) -> Iterator[None]:
        """Saves go on under a fault that ends only afterwards; then the bucket catches up.

        ``strikes``: so often the rules have to strike, before the block of ``with`` is run and
        before anything is mended.
        """
        self.proxy.rules += rules
        self.save()
        self.struck(rules, strikes)
        self.train_on(saves)
        yield
        self.proxy.heal()
        self.caught_up()

    def struck(self, rules: tuple[Rule, ...], strikes: int = 1) -> None:
        """Wait until the rules have struck so often in all."""
        wait_until(lambda: sum(each.met for each in rules) >= strikes, deadline_s=DEADLINE_S)

    def says(self, text: str) -> None:
        """Wait until the bucket's tier is away for this reason; it comes and goes while it is
        tried again.
        """

        def away() -> bool:
            found = self.tier()
            return not found.available and text in (found.error or "")

        wait_until(away, deadline_s=DEADLINE_S)

    def tier(self, name: str = "s3") -> Any:
        """Its status."""
        (found,) = (e for e in self.engine.status().namespaces[0].tiers if e.name == name)
        return found
