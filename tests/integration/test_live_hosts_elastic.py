"""Elastic training on several hosts: worlds that shrink with the hosts, and grow again."""

from __future__ import annotations

import itertools
import re
import signal
from pathlib import Path
from typing import Any

from tests.support.live_elastic import BATCH, SAMPLES, STEPS, read, train
from tests.support.live_hosts import Hosts
from tieredckpt.policy.elastic import rows


def script(world: Any, folder: Path) -> None:
    train(world, folder, STEPS)


def sizes(hosts: Hosts) -> list[int]:
    return [size for size, _ in itertools.groupby(row[3] for row in read(hosts.folder / "seen"))]


def wanted(hosts: Hosts) -> list[int]:
    found = re.findall(r"the job is to have (\d+) ranks", hosts.text("second"))
    return [int(each) for each in found]


def train_to(hosts: Hosts, step: int) -> None:
    hosts.go_to(step)
    hosts.wait(lambda: any(row[0] >= step for row in read(hosts.folder / "seen")))


def test_a_job_shrinks_to_one_host_and_grows_again(runtime_dir: Path):
    """One is lost, one leaves, and both come back: each row is seen once, from memory."""
    (runtime_dir / "replicated").touch()
    with Hosts(runtime_dir, nodes=(1, 3), script=script) as hosts:
        hosts.start("first", "second", "third", per_host=1)
        train_to(hosts, 2)
        hosts.lose("third")
        train_to(hosts, 4)
        hosts.signal("first")  # which leads
        hosts.wait(lambda: "host first is to leave" in hosts.text("second"))
        train_to(hosts, 6)
        assert hosts.code("first") == 128 + signal.SIGTERM
        hosts.start("first", "third", per_host=1)
        step = 6
        while sizes(hosts)[-1] < 3:  # by one after the other, or at once
            size = sizes(hosts)[-1]
            hosts.wait(lambda least=size: max(wanted(hosts)[-1:]) > least)  # type: ignore[misc]
            step += 2
            train_to(hosts, step)
        hosts.go_to(STEPS + 1)
        assert set(hosts.codes().values()) == {0}, hosts.text()
    seen = read(runtime_dir / "seen")
    assert [row[0] for row in seen] == list(range(1, STEPS + 1)), hosts.text()
    assert sizes(hosts) in ([3, 2, 1, 3], [3, 2, 1, 2, 3])
    for step, _, ids, _ in seen:
        assert ids == [row * 7 % SAMPLES for row in rows(step, BATCH)]
    sources = [place for *_, source in read(runtime_dir / "restored") for place in source]
    assert sources
    assert all(place.startswith("memory") for place in sources)
