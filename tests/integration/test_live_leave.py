"""A host that leaves in so many seconds: what its report says is what is held."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tests.support.live_elastic import STEPS, read, train
from tests.support.live_hosts import Hosts
from tieredckpt.cli.main import cli
from tieredckpt.live.control import CONTROL, Request, ask


def script(world: Any, folder: Path) -> None:
    train(world, folder, STEPS)


def train_to(hosts: Hosts, step: int) -> None:
    hosts.go_to(step)
    hosts.wait(lambda: any(row[0] >= step for row in read(hosts.folder / "seen")))


def sources(config: Path, runtime_dir: Path, step: str) -> list[set[str]]:
    """The tiers of each segment of a checkpoint that can be loaded, as a host sees them.

    Of a newer one, where that has taken its place.
    """
    arguments = ["recovery", "plan", "--json", "--config", str(config)]
    arguments += ["--runtime-dir", str(runtime_dir)]
    result = CliRunner().invoke(cli, [*arguments, "--step", step])
    if result.exit_code:
        result = CliRunner().invoke(cli, arguments)
        assert result.exit_code == 0, result.output
        assert json.loads(result.stdout)["chosen"]["step"] > int(step), result.output
    found = json.loads(result.stdout)["chosen"]["segments"]
    return [{each["tier"] for each in segment["sources"] if each["intact"]} for segment in found]


@pytest.mark.parametrize(
    ("within_s", "copies"),
    [
        (2.0, 1),
        *(pytest.param(s, c, marks=pytest.mark.nightly)
          for s, c in ((10.0, 0), (10.0, 1), (2.0, 0), (0.2, 0), (0.2, 1))),
    ],
)  # fmt: skip
def test_what_the_report_says_is_held(runtime_dir: Path, within_s: float, copies: int):
    """In the tier, as a new host with an empty memory sees it, and in other hosts' memory."""
    for name in ("replicated", "saves", "empty"):
        (runtime_dir / name).mkdir(mode=0o700)
    tiers = [{"name": "disk", "url": f"file://{runtime_dir}/disk", "scope": "shared",
              "every": "1000 steps"}]  # fmt: skip
    with Hosts(runtime_dir, nodes=(1, 3), script=script, copies=copies, tiers=tiers) as hosts:
        hosts.start("first", "second", "third", per_host=1)
        train_to(hosts, 4)
        ask(runtime_dir / "first" / CONTROL, Request(host="third", deadline_s=within_s), 30.0)
        hosts.go_to(STEPS)
        code = hosts.code("third")
        (report,) = re.findall(r"host third leaves: (.*)", hosts.text("third"))
        assert code in (0, 128 + signal.SIGTERM)
        train_to(hosts, STEPS)
        for step in re.findall(r"step (\d+) of stream 'default' in disk: done", report):
            assert all("disk" in each for each in sources(
                runtime_dir / "third.json", runtime_dir / "empty", step))  # fmt: skip
        for step in re.findall(r"copies on other hosts: step (\d+)", report):
            assert all("memory" in each for each in sources(
                runtime_dir / "first.json", runtime_dir / "first", step))  # fmt: skip
        print(within_s, copies, code, report)
        hosts.go_to(STEPS + 1)
        assert set(hosts.codes().values()) == {0}, hosts.text()
    assert [row[0] for row in read(runtime_dir / "seen")] == list(range(1, STEPS + 1))
