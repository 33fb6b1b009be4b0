"""The command line beside a real agent, and beside the folders of one that is gone."""

from __future__ import annotations

import io
import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.agent import (
    ROOT,
    AgentProcess,
    FakeTrainer,
    fork_agents,
    spec_of,
    wait_until,
)
from tieredckpt.agent.host import launch
from tieredckpt.cli.main import main
from tieredckpt.storage.memory.slot import LABEL_BYTES, read_label

SIZE = 9 << 20
"""Three blocks, the last one short."""


@dataclass
class Answer:
    """What a command left behind."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Run = Callable[..., Answer]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """``tieredckpt ARGUMENTS``, in this process."""

    def call(*arguments: str) -> Answer:
        monkeypatch.setattr(sys, "argv", ["tieredckpt", *arguments])
        capsys.readouterr()
        with pytest.raises(SystemExit) as left:
            main()
        out, err = capsys.readouterr()
        return Answer(int(left.value.code or 0), out, err)

    return call


@dataclass
class Site:
    """A host with three checkpoints: the newest two in memory, steps 20 and 30 on disk."""

    runtime_dir: Path
    config: Path
    agent: AgentProcess
    disk: Path

    def slot_of(self, segment_id: str) -> Path:
        for path in (self.runtime_dir / "slots").iterdir():
            with path.open("rb") as file:
                label = read_label(file.fileno(), path.stat().st_size - LABEL_BYTES)
            if label.segment_id == segment_id and label.state == "sealed":
                return path
        raise AssertionError(segment_id)


@pytest.fixture
def site(runtime_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    disk = tmp_path / "disk"
    config = tmp_path / "tieredckpt.yaml"
    config.write_text(
        "namespace: run\n"
        "memory: {keep: {last: 2}}\n"
        f"tiers: [{{name: disk, url: 'file://{disk}', keep: {{last: 2}}}}]\n"
        f"agent: {{runtime_dir: {runtime_dir}}}\n"
    )
    monkeypatch.setenv("TIEREDCKPT_CONFIG", str(config))
    with AgentProcess(runtime_dir) as agent:
        with FakeTrainer(runtime_dir, spec_of(tiers={"disk": disk}), size=SIZE) as trainer:
            for step in (10, 20, 30):
                trainer.spilled(trainer.save(step, tiers=("disk",)).save_id)
        yield Site(runtime_dir, config, agent, disk)


def steps(answer: Answer) -> dict[int, dict[str, str]]:
    return {each["step"]: each["tiers"] for each in answer.json["checkpoints"]}


def test_ls_and_plan_agree_with_and_without_an_agent(site: Site, run: Run):
    listed, planned = run("ls", "--json"), run("recovery", "plan", "--json")
    assert steps(listed) == {30: both(), 20: both()}
    assert listed.json["source"] == planned.json["source"] == "agent"
    assert planned.json["chosen"]["step"] == 30
    text = run("ls")
    assert text.code == 0
    assert "candidate" in text.out
    assert "step 30" in run("recovery", "plan").out

    stopped = run("agent", "stop")
    assert stopped.code == 0
    assert site.agent.wait_end() == 0

    without, plan = run("ls", "--json"), run("recovery", "plan", "--json")
    assert "reading the folders" in without.err
    assert without.json == {**listed.json, "source": "folders"}
    assert plan.json == {**planned.json, "source": "folders"}


def both() -> dict[str, str]:
    return {"memory": "whole", "disk": "whole"}


def test_status_is_watched_until_ctrl_c_also_while_no_agent_runs(site: Site):
    """A real process, and a real signal."""
    words = [sys.executable, "-m", "tieredckpt", "status", "--watch", "0.1"]
    words += ["--runtime-dir", str(site.runtime_dir)]
    # Where this run was started in the background, SIGINT is ignored, and would be by its children.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        process = subprocess.Popen(
            words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
    finally:
        signal.signal(signal.SIGINT, before)
    with process:
        assert process.stdout is not None
        seen = 0
        for line in process.stdout:
            seen += line.startswith("agent ")
            if seen == 2:
                site.agent.kill()
            if "no agent answers" in line:
                break
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
        assert "Traceback" not in process.stdout.read()
    assert seen >= 2


def test_verify_finds_the_flipped_block_and_quarantines_it(site: Site, run: Run):
    assert run("verify").code == 0
    newest = run("ls", "--json").json["checkpoints"][0]["segments"][0]["id"]
    with site.slot_of(newest).open("r+b") as slot:
        slot.seek((4 << 20) + 5)
        byte = slot.read(1)[0]
        slot.seek((4 << 20) + 5)
        slot.write(bytes([byte ^ 1]))

    answer = run("verify", "--json", "--quarantine")
    assert answer.code == 1
    assert "1 of 4 copies" in answer.err
    (bad,) = (copy for copy in answer.json["copies"] if not copy["intact"])
    assert (bad["tier"], bad["step"], bad["bad_blocks"]) == ("memory", 30, [1])

    assert "1 bad block" in steps(run("ls", "--json"))[30]["memory"]
    assert "bad block numbers: 1\n" in run("verify", "--tier", "memory").out
    source = run("recovery", "plan", "--json").json["chosen"]
    assert source["step"] == 30  # from disk, or block by block

    with site.slot_of(newest).open("r+b") as slot:
        slot.seek((4 << 20) + 5)
        slot.write(bytes([byte]))
    assert "memory, step 30: reported as intact" in run("verify").err
    assert steps(run("ls", "--json"))[30] == both()
    assert run("verify").err == ""


@pytest.mark.full
def test_what_verify_cannot_read_is_not_quarantined(site: Site, run: Run):
    """Nothing is known of it: a bucket, for one, that this shell has no credentials for."""
    (site.runtime_dir / "fds.sock").unlink()
    answer = run("verify", "--json", "--quarantine")
    assert answer.code == 1
    assert "4 of 4 copies cannot be read" in answer.err
    assert [copy["intact"] for copy in answer.json["copies"]] == [False] * 4
    assert all("tieredckpt agent stop" in copy["error"] for copy in answer.json["copies"])
    assert steps(run("ls", "--json")) == {30: both(), 20: both()}


def test_verify_without_an_agent(site: Site, run: Run):
    site.agent.kill()
    assert run("verify", "--step", "20").code == 0
    segment = next((site.disk / "run" / "segments").iterdir())
    with segment.open("r+b") as file:
        file.truncate(1 << 20)
    answer = run("verify", "--tier", "disk", "--json")
    assert answer.code == 1
    assert [copy["intact"] for copy in answer.json["copies"]].count(False) == 1
    assert run("verify", "--step", "99").code == 1
    for manifest in (site.disk / "run" / "manifests" / "default").iterdir():
        manifest.write_bytes(b"")
    answer = run("verify", "--json")
    assert answer.code == 1, "what cannot be looked at is not intact"
    assert {each["tier"] for each in answer.json["unreadable"]} == {"disk"}
    assert {copy["tier"] for copy in answer.json["copies"]} == {"memory"}
    assert run("verify", "--tier", "memory").code == 0


def test_what_is_not_there_is_named(site: Site, run: Run):
    typo = run("ls", "--namespace", "rum")
    assert typo.code == 1
    assert "no namespace rum" in typo.err
    assert "there: run" in typo.err
    tier = run("verify", "--tier", "disc")
    assert tier.code == 2
    assert "memory, disk" in tier.err
    assert "step 99" in run("verify", "--step", "99").err
    step = run("recovery", "plan", "--step", "99")
    assert step.code == 3
    assert "step 99 cannot be loaded" in step.out
    assert "that is step 99" in step.err
    stream = run("recovery", "plan", "--stream", "actor")
    assert "streams that have checkpoints: default" in stream.err
    # A checkpoint by the first digits of its id:
    newest, older = (each["save_id"] for each in run("ls", "--json").json["checkpoints"])
    plan = run("recovery", "plan", "--save-id", older[:8], "--json")
    assert plan.json["chosen"]["save_id"] == older
    assert run("recovery", "plan", "--save-id", "").code == 2
    assert run("recovery", "plan", "--save-id", newest).code == 0


def test_purge_empties_memory_alone(site: Site, run: Run):
    assert run("agent", "purge").code == 2
    answer = run("agent", "purge", "--namespace", "run", "--yes", "--json")
    assert answer.json["purged"] == ["run"]
    assert "checkpoints in memory: 2; steps in no other tier: none" in answer.err
    assert steps(run("ls", "--json")) == {30: {"disk": "whole"}, 20: {"disk": "whole"}}


def test_purge_deletes_from_a_disk_what_memory_does_not_have(
    site: Site, run: Run, monkeypatch: pytest.MonkeyPatch
):
    def purge(*words: str) -> Answer:
        monkeypatch.setattr(sys, "stdin", io.StringIO("run\n"))
        return run("purge", *words, "--yes")

    with FakeTrainer(site.runtime_dir, spec_of(tiers={"disk": site.disk}), size=SIZE):
        running = purge("--tier", "all")
        assert (running.code, "agent purge --namespace run" in running.err) == (2, True)
        assert run("agent", "purge", "--namespace", "run", "--yes").code == 1
    assert purge("20", "--tier", "disk").code == 2, "memory would bring it back"
    assert steps(run("ls", "--json")) == {30: both(), 20: both()}
    assert run("pin", "20", "--reason", "figures").code == 0
    assert run("agent", "purge", "--namespace", "run", "--yes").code == 0
    assert "pinned, and stays" in purge("--tier", "all").err
    assert steps(run("ls", "--json")) == {20: {"disk": "whole"}}
    shutil.rmtree(site.disk / "run" / "records")
    assert purge("20", "--tier", "disk").code == 0
    assert not [each for each in (site.disk / "run/segments").rglob("*") if each.is_file()]
    assert steps(run("ls", "--json")) == {}
    assert purge("--tier", "all").code == 0
    assert not list(site.disk.iterdir())


def test_the_error_of_a_tier_that_was_corrected_is_told_as_past(
    runtime_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run
):
    """The agent has the tier where the last run had it, until a job opens the new configuration."""
    wrong, config = tmp_path / "wrong", tmp_path / "tieredckpt.yaml"
    wrong.touch()  # no folder can be made there
    old = (
        f"{{namespace: run, tiers: [{{name: disk, url: 'file://{wrong}'}}], "
        f"agent: {{runtime_dir: {runtime_dir}}}}}\n"
    )
    config.write_text(old)
    monkeypatch.setenv("TIEREDCKPT_CONFIG", str(config))
    with AgentProcess(runtime_dir):
        with FakeTrainer(runtime_dir, spec_of(tiers={"disk": wrong}), size=SIZE) as trainer:
            trainer.save(10, tiers=("disk",))
        assert f"tier disk is not available: file://{wrong} since 20" in run("ls").out
        assert run("doctor").code == 1
        config.write_text(old.replace(f"file://{wrong}", f"file://{wrong}2"))
        past = f"until a job opens file://{wrong}2; past: file://{wrong} since 20"
        plan = run("recovery", "plan")
        assert past in plan.err
        assert (plan.code, "not answer" in plan.out) == (0, False)
        spilled = run("spill", "--now")
        assert (spilled.code, past in spilled.err) == (2, True)
        checks = {each["check"]: each for each in run("doctor", "--json").json["checks"]}
    assert checks["tier disk"]["state"] == "ok"
    assert checks["tier disk: copies"]["state"] == "warn"
    assert past in checks["tier disk: copies"]["found"]


def test_purge_of_what_an_agent_left_looks_anew(
    site: Site, run: Run, monkeypatch: pytest.MonkeyPatch
):
    """Also where a person has removed the disk's folder."""
    monkeypatch.setattr(launch, "subprocess", launch.subprocess)  # restored at the end
    fork_agents()
    shutil.rmtree(site.disk)
    site.agent.kill()
    answer = run("agent", "purge", "--all", "--yes")
    assert (answer.code, answer.out) == (0, "deleted from memory: run\n")
    assert "2; steps in no other tier: default 30, default 20" in answer.err
    assert not list((site.runtime_dir / "slots").iterdir())
    wait_until(lambda: run("status").code == 4)  # the agent that it started ends
    shutil.rmtree(site.runtime_dir)
    assert run("agent", "purge", "--all", "--yes").code == 4
    assert not site.runtime_dir.exists()


def test_nothing_recoverable_is_exit_code_3(site: Site, run: Run):
    site.agent.kill()
    shutil.rmtree(site.runtime_dir)
    shutil.rmtree(site.disk)
    answer = run("recovery", "plan", "--json")
    assert answer.code == 3
    assert answer.json["chosen"] is None
    assert "no recoverable checkpoint" in answer.err
    assert run("status").code == 4
    assert run("agent", "stop").code == 4


@pytest.mark.full
def test_a_full_disk_is_an_error_without_a_traceback(site: Site):
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "tieredckpt", "ls"],
            cwd=ROOT,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            check=False,
        )
    assert done.returncode == 1
    assert done.stderr.strip() == "error: [Errno 28] No space left on device"


@pytest.mark.full
def test_a_tier_that_the_agent_was_not_told_of_is_named(site: Site, run: Run, tmp_path: Path):
    """Somebody has added it for the next start; what it holds is not in what the agent says."""
    told = run("ls", "--json", "--config", str(site.config))
    assert (told.code, told.err) == (0, "")
    text = site.config.read_text()
    more = f", {{name: nfs, url: 'file://{tmp_path}/nfs', scope: shared, keep: {{last: 2}}}}]"
    site.config.write_text(text.replace("]\n", more + "\n", 1))
    for command in (["ls"], ["recovery", "plan"], ["verify"]):
        told = run(*command, "--config", str(site.config))
        assert told.code == 0, told.err
        assert "not shown: nfs of the configuration" in told.err
