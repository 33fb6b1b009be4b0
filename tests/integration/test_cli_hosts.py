"""``tieredckpt recovery plan`` and ``mark`` over several hosts, which are real agents."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support.agent import wait_until
from tests.support.peers import Job
from tieredckpt.cli.main import main

Plan = Callable[..., tuple[int, Any, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Plan:
    """``tieredckpt COMMAND --runtime-dir DIR ARGUMENTS``: code, what it printed, and errors."""

    def call(command: str, runtime_dir: Path, *arguments: str) -> tuple[int, Any, str]:
        line = [*command.split(), *arguments, "--runtime-dir", str(runtime_dir)]
        monkeypatch.setattr(sys, "argv", ["tieredckpt", *line])
        capsys.readouterr()
        with pytest.raises(SystemExit) as left:
            main()
        out, err = capsys.readouterr()
        found = json.loads(out) if "--json" in arguments else out
        return int(left.value.code or 0), found, err

    return call


@pytest.fixture
def plan(run: Plan) -> Plan:
    return partial(run, "recovery plan")


@pytest.fixture
def mark(run: Plan) -> Plan:
    return partial(run, "mark")


def test_the_plan_is_made_from_all_hosts_that_answer(runtime_dir: Path, plan: Plan):
    with Job(runtime_dir, 3, replicas=0) as job:
        job.save(1)
        last = job.save(2)
        for host in job.hosts:
            code, found, _ = plan(host.runtime, "--json")
            assert code == 0
            assert found["chosen"]["save_id"] == last.save_id
            assert sorted(found["hosts"]["asked"]) == ["h0", "h1", "h2"]
            assert found["hosts"]["silent"] == {}
            places = [
                {(source["host"], source["tier"]) for source in segment["sources"]}
                for segment in found["chosen"]["segments"]
            ]
            assert places == [{("h0", "memory")}, {("h1", "memory")}, {("h2", "memory")}]
        code, text, _ = plan(job.hosts[0].runtime)
        assert code == 0
        assert "a restart would load step 2" in text
        assert "memory on h1" in text
        assert "memory on h0" not in text, "what is here needs no name"
        # One host is lost, and nobody has its segments.
        job.hosts[2].agent.kill()
        code, found, _ = plan(job.hosts[1].runtime, "--json", "--timeout", "30")
        assert code == 3
        assert found["chosen"] is None
        assert list(found["hosts"]["silent"]) == ["h2"]
        assert "not asked: host h2" in found["refused"][0]["reason"]
        code, text, _ = plan(job.hosts[1].runtime, "--timeout", "30")
        assert code == 3
        assert "could not answer: host h2" in text


@pytest.mark.full
def test_doctor_compares_the_clocks_of_hosts(
    runtime_dir: Path, run: Plan, monkeypatch: pytest.MonkeyPatch
):
    with Job(runtime_dir, 2) as job:
        job.save(1)  # so the other host has answered

        def clock() -> tuple[int, str, str]:
            code, found, _ = run("doctor", job.hosts[0].runtime, "--json")
            (row,) = [each for each in found["checks"] if "clock" in each["check"]]
            assert row["check"] == "host h1: clock"
            return code, row["state"], row["found"]

        wait_until(lambda: all(p.reachable for p in job.hosts[0].client.peers().peers))
        _, state, found = clock()
        assert state == "ok"
        assert re.fullmatch(r"within \d+\.\d s of this host's", found)
        now_s = time.time
        for behind_s, code, state, side in (
            (200, 0, "warn", "ahead of"),
            (-5000, 1, "fail", "behind"),
        ):
            monkeypatch.setattr(time, "time", lambda by_s=behind_s: now_s() - by_s)
            found = clock()
            assert found[:2] == (code, state)
            assert re.fullmatch(rf"\d+ s {side} this host's", found[2])
        monkeypatch.setattr(time, "time", now_s)


def test_a_mark_is_told_to_all_hosts_and_passes_a_checkpoint_over(
    runtime_dir: Path, plan: Plan, mark: Plan
):
    with Job(runtime_dir, 2, replicas=0) as job:
        first, last = job.save(1), job.save(2)
        one, two = (host.runtime for host in job.hosts)
        code, _, error = mark(one, "bad", "0" * 8, "--reason", "x")
        assert code == 1
        assert "knows no checkpoint" in error
        code, text, _ = mark(one, "bad", last.save_id[:8], "--reason", "the loss is\nNaN")
        assert code == 0
        assert "is marked as bad" in text
        for runtime in (one, two):
            code, found, _ = plan(runtime, "--json")
            assert code == 0
            assert found["chosen"]["save_id"] == first.save_id
            assert found["refused"][0]["reason"].startswith("marked bad by h0: the loss is")
            code, found, _ = plan(runtime, "--json", "--save-id", last.save_id)
            assert found["chosen"]["save_id"] == last.save_id
            code, found, _ = mark(runtime, "list", "--json")
            assert code == 0
            assert [(each["step"], each["host"]) for each in found["marks"]] == [(2, "h0")]
        code, text, _ = mark(two, "list")
        assert "the loss is" in text
        # Taken back at the other host, and marked again.
        code, _, error = mark(two, "good", first.save_id)
        assert code == 1
        assert "is not marked" in error
        code, text, _ = mark(two, "good", last.save_id, "--reason", "it was the data")
        assert code == 0
        assert "not marked as bad any more" in text
        for runtime in (one, two):
            code, found, _ = plan(runtime, "--json")
            assert found["chosen"]["save_id"] == last.save_id
            code, found, _ = mark(runtime, "list", "--json")
            assert found["marks"] == []
        code, _, _ = mark(two, "bad", last.save_id, "--reason", "no, it is NaN")
        code, found, _ = plan(one, "--json")
        assert found["chosen"]["save_id"] == first.save_id
        job.hosts[0].agent.kill()
        code, _, error = mark(one, "bad", last.save_id, "--reason", "x")
        assert code == 4
        assert "no agent" in error
