"""Objects in a bucket that are damaged, truncated, emptied or missing: nothing wrong is loaded.

One bucket is made by a training; each case lays its objects anew, spoils one kind of them, and lets
a host restore that has nothing else. Whatever it finds, it goes on training, and the bucket gets
what it saves.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.support.agent import wait_until
from tests.support.s3_bench import (
    DEADLINE_S,
    Bench,
    Bucket,
    credentials,
    restored,
    state_of,
    zeros,
)
from tests.support.states import same, save
from tieredckpt.testing.s3_server import BUCKET, S3Server

KINDS = ("flip", "empty", "delete")
NUMBERS = 70_000


@pytest.fixture(scope="module", autouse=True)
def _credentials() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in credentials().items():
            patch.setenv(name, value)
        yield


@dataclass
class Made:
    """The objects of a run that ended: steps 1 to 3, step 0 pruned, and step 4 begun."""

    server: S3Server
    objects: dict[str, bytes]

    def laid(self, name: str) -> Bucket:
        """All objects below a prefix of the case's own."""
        bucket = Bucket(self.server, f"{BUCKET}/{name}")
        for key, data in self.objects.items():
            bucket.put(key, data)
        return bucket


@pytest.fixture(scope="module")
def made(s3_server: S3Server, tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp("made")
    keep = {"keep": {"last": 3}, "delete_delay": "0 s"}
    with Bench(s3_server, folder, numbers=NUMBERS, **keep) as bench:
        for _ in range(3):
            bench.save()
            bench.caught_up()
        wait_until(
            lambda: bench.bucket.tombstones() and len(bench.bucket.keys("segments/")) == 3,
            deadline_s=DEADLINE_S,
        )
        bench.restart_agent("agent.shared.after_pending=kill")
        bench.save()
        bench.agent.process.join(DEADLINE_S)
        assert bench.agent.process.exitcode == -9
        objects = bench.bucket.snapshot()
    assert {key.partition("/")[0] for key in objects} == {
        "attempts", "claims", "manifests", "pending", "plans", "segments",
    }  # fmt: skip
    return Made(s3_server, objects)


def victim(bucket: Bucket, what: str) -> str:
    """The key of one object of each kind; of several the newest checkpoint's."""
    newest = bucket.manifests()[3]
    if what == "segments":
        return f"segments/{newest.segments[0].id}"
    if what == "manifests":
        return f"manifests/default/{newest.save_id}"
    if what == "tombstones":
        return bucket.tombstones()[0]
    return bucket.keys(f"{what}/")[0]


CASES = {
    # What is spoilt, and the step that is restored then (a plan is made anew from segments).
    "segments": 2, "manifests": 2, "plans": 3, "tombstones": 3, "pending": 3, "claims": 3,
    "attempts": 3,
}  # fmt: skip
GATE = {("segments", "flip"), ("manifests", "flip"), ("claims", "empty"), ("plans", "delete")}


def case(what: str, kind: str) -> object:
    marks = () if (what, kind) in GATE else (pytest.mark.full,)
    return pytest.param(what, kind, CASES[what], marks=marks, id=f"{what}-{kind}")


@pytest.mark.parametrize(("what", "kind", "step"), [case(w, k) for w in CASES for k in KINDS])
def test_spoilt(made: Made, what: str, kind: str, step: int):
    bucket = made.laid(f"spoilt-{what}-{kind}")
    bucket.damage(victim(bucket, what), kind)
    with restored(made.server, bucket.prefix, numbers=NUMBERS, load=False) as found:
        state = zeros(NUMBERS)
        assert found.engine.load(state) == step
        assert same(state, state_of(step, NUMBERS))
        # Training goes on, and the bucket gets what it saves.
        save(found.engine, 5, state_of(5, NUMBERS))
        found.engine.wait(5, "s3", DEADLINE_S)
    there = bucket.manifests()
    assert 5 in there
    assert 0 not in there, "what was pruned is back"
