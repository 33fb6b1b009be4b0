"""Sides of a job that did not know of each other, and what is true when they meet again.

Hosts are network namespaces, their agents, trainers and links are real. A side is cut off from the
agents' network and started again by itself, as by a scheduler that takes the others for lost.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support import commands
from tests.support.faults import Loaded, eventually
from tests.support.hosts import DATA, Cluster, Host, HostJob, needs_links
from tieredckpt.errors import (
    NoRecoverableCheckpointError,
    StaleAttemptError,
    TieredCkptError,
)

WAIT_S = 90.0
RANKS = 2
"""So many saved what all of these load."""
NEVER_WAIT = {"recovery": {"wait": "0s"}}


@contextmanager
def job(cluster: Cluster, hosts: list[Host], **more: Any) -> Iterator[HostJob]:
    """Ranks with open engines on some hosts."""
    with cluster.job(hosts, saved_by=RANKS) as found:
        found.open(**NEVER_WAIT, **more)
        yield found


def load(of: HostJob, step: int | None, **options: Any) -> Loaded:
    """All ranks load this step, with the right content; None: there is nothing."""
    for each in (found := of.all("load", **options)):
        if isinstance(each, BaseException):
            raise each
        assert (each.step, each.wrong) == (step, [])
    return found[0]


def save(of: HostJob, *steps: int) -> dict[int, str]:
    """Save ids by step."""
    return {step: of.must("save", step) for step in steps}


def reachable(host: Host, other: Host) -> bool:
    """Whether a host's agent hears another one."""
    with closing(host.client()) as client:
        return any(
            each.host.host_id == other.name and each.reachable is True
            for each in client.peers("run").peers
        )


def tieredckpt(host: Host, *arguments: str, code: int = 0) -> str:
    """What a command prints that a person gives on a host."""
    place = ("--runtime-dir", str(host.runtime_dir))
    done = commands.tieredckpt(*arguments, *place, first=host.first)
    assert done.returncode == code, f"{done.returncode}: {done.stdout}{done.stderr}"
    return done.stdout


def listed(host: Host, *more: str) -> dict[str, dict[str, Any]]:
    """By save id, what ``tieredckpt ls`` shows."""
    found = json.loads(tieredckpt(host, "ls", "--json", *more))
    return {each["save_id"]: each for each in found["checkpoints"]}


def knows(of: HostJob, step: int) -> bool:
    """Whether the memory of the first rank's host has the manifest of a step, on any line."""
    return bool(of.trainers[0].copies(step)[0])


def begin(cluster: Cluster, *steps: int, **more: Any) -> dict[int, str]:
    """A job over all hosts that has saved, with all copies, and has ended."""
    cluster.start_agents()
    with job(cluster, cluster.hosts, **more) as first:
        saved = save(first, *steps)
        first.must("wait", steps[-1], "replicated", WAIT_S)
    return saved


def mend(one: Host, other: Host) -> None:
    """The links of ``other`` work again. Its agent is started anew, so that it asks at once who is
    there, instead of within a minute.
    """
    other.heal(DATA)
    other.start_agent()
    eventually(lambda: reachable(other, one), deadline_s=WAIT_S)


@pytest.mark.full
def test_a_side_that_saved_stays_as_a_branch(tmp_path: Path):
    """The live job goes on over it, and never deletes it; who still trains there has to stop."""
    needs_links()
    with Cluster(tmp_path, 2) as cluster:
        live, old = cluster.hosts
        tiers = {"tiers": [{"name": "bucket", "url": f"file://{tmp_path}/bucket",
                            "scope": "shared", "keep": {"last": 2}}]}  # fmt: skip
        begin(cluster, 20)
        old.cut(DATA)
        with job(cluster, [live], **tiers) as goes_on, job(cluster, [old]) as zombie:
            load(goes_on, 20)
            load(zombie, 20)
            saved = save(goes_on, 50, 60, 70)
            branch = save(zombie, 21, 22)
            mend(live, old)
            # Nobody has to load for it: the hosts of the sides compare what they hold.
            eventually(lambda: knows(goes_on, 22), deadline_s=WAIT_S)
            load(goes_on, 70)  # its own side is meant
            saved |= save(goes_on, 80, 90)
            old.start_agent()  # it asks at once again, not within a minute
            eventually(lambda: knows(zombie, 80), deadline_s=WAIT_S)
            with pytest.raises(StaleAttemptError):
                zombie.must("save", 23)
        with job(cluster, [live], **tiers) as goes_on:
            load(goes_on, 90)
            saved |= save(goes_on, *range(100, 160, 10))
            goes_on.must("wait", 150, "bucket", WAIT_S)
            for host in cluster.hosts:
                found = listed(host)
                assert {found[each]["step"] for each in branch.values()} == {21, 22}
            for step, save_id in branch.items():
                (loaded,) = goes_on.all("load_save", save_id, step)
                assert loaded.wrong == []
        with job(cluster, [live], **tiers) as goes_on:
            load(goes_on, 150)


def test_two_sides_that_met_after_all_had_ended_are_for_a_person_to_choose(tmp_path: Path):
    needs_links()
    with Cluster(tmp_path, 2) as cluster:
        one, other = cluster.hosts
        begin(cluster, 20)
        other.cut(DATA)
        sides = []
        for host, step in ((one, 50), (other, 22)):
            with job(cluster, [host]) as side:
                load(side, 20)
                sides.append(save(side, step)[step])
        mend(one, other)
        with job(cluster, cluster.hosts) as both:
            before = {host.name: listed(host) for host in cluster.hosts}
            for options in ({}, {"fresh_start": True}):
                for error in both.all("load", **options):
                    assert isinstance(error, NoRecoverableCheckpointError), error
                    text = str(error)
                    for wanted in (*sides, "step 50", "step 22", "tieredckpt mark bad", "save_id="):
                        assert wanted in text, (wanted, text)
            for error in both.all("save", 60):
                assert isinstance(error, TieredCkptError), error
            assert {host.name: listed(host) for host in cluster.hosts} == before
            load(both, 22, save_id=sides[1])
            load(both, 50, save_id=sides[0])
            tieredckpt(other, "mark", "bad", sides[0], "--reason", "the other side is meant")
            load(both, 22)
            save(both, 23)
        with job(cluster, cluster.hosts) as both:
            load(both, 23)
            assert sides[0] in listed(one)
