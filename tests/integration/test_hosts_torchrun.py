"""torchrun's own elastic restart over several hosts, one of which is lost with memory and disk.

What a user writes: ``torchrun --nnodes=2:3 --rdzv-backend=c10d ...`` on each host, and nothing that
restarts anything. The agents are started by the trainers.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.agent import ROOT
from tests.support.faults import eventually
from tests.support.hosts import Cluster, Host, needs_links
from tieredckpt.errors import AgentError

STEPS, EVERY = 60, 4
DEADLINE_S = 240.0
NAMESPACE = "run-gpt-run-7"
"""Of ``--rdzv-id``; the configuration names none."""


@contextmanager
def torchrun(
    host: Host, journal: Path, *, nodes: str, endpoint: str, ranks: int = 1
) -> Iterator[Any]:
    """torchrun on a host, ended at the end of the block; its output is in a file on the disk."""
    config = host.runtime_dir / "train.yaml"
    text = host.config(
        memory={"capacity": "512MiB"},
        agent={"start": "auto", "idle_timeout": "10 min"},
        tiers="disk",
        network={"interface": "eth0", "port": 0},
    )
    del text["namespace"]
    config.write_text(yaml.safe_dump(text))
    command = [
        sys.executable, "-m", "torch.distributed.run", f"--nnodes={nodes}",
        f"--nproc-per-node={ranks}",
        "--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}:29500", "--rdzv-id=gpt-run-7",
        # The names of real hosts say who is who; these here share one.
        f"--local-addr={host.address()}", f"--rdzv-conf=is_host={host.address() == endpoint:d}",
        "--max-restarts=3", str(ROOT / "examples" / "train_gpt.py"), f"--config={config}",
        f"--journal={journal}", f"--steps={STEPS}", f"--save-every={EVERY}",
        "--layers=2", "--width=64", "--context=64", "--batch=1",
    ]  # fmt: skip
    environ = {**os.environ, **host.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    # Else a node that joins later waits for ever (docs/operate/hosts.md, "torchrun").
    environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    with (journal.parent / f"{host.name}-{journal.stem}.log").open("wb") as output:
        process = subprocess.Popen(
            host.command(*command), stdin=subprocess.DEVNULL, stdout=output, stderr=output,
            env=environ, start_new_session=True,
        )  # fmt: skip
        try:
            yield process
        finally:
            process.kill()
            process.wait()


def events(journal: Path, kind: str) -> list[dict[str, Any]]:
    lines = journal.read_text().splitlines() if journal.exists() else []
    return [event for line in lines if (event := json.loads(line))["event"] == kind]


def replicated_step(host: Host) -> int:
    try:
        with closing(host.client()) as client:
            found = [each for each in client.status().namespaces if each.name == NAMESPACE]
    except AgentError:
        return -1
    replication = found[0].replication if found else None
    step = replication.newest_replicated_step if replication is not None else None
    return -1 if step is None else step


def logs(folder: Path) -> str:
    return "\n".join(
        f"--- {path.name}\n{path.read_text(errors='replace')[-3000:]}"
        for path in sorted(folder.glob("*.log"))
    )


@pytest.mark.nightly
def test_torchrun_restarts_what_is_left_with_a_fresh_host(tmp_path: Path):
    """Nobody is told of the loss: the fresh host that joins makes torchrun restart the others."""
    needs_links()
    calm, journal = tmp_path / "calm.jsonl", tmp_path / "hosts.jsonl"
    with Cluster(tmp_path, 4) as cluster, ExitStack() as stack:
        stack.push(lambda _kind, error, _trace: error and error.add_note(logs(tmp_path)))
        alone = cluster.hosts.pop()
        with torchrun(alone, calm, nodes="1", endpoint=alone.address(), ranks=3) as run:
            assert run.wait(DEADLINE_S) == 0
        alone.kill()
        first, _, lost = cluster.hosts
        runs: dict[Host, Any] = {}

        def start(host: Host) -> None:
            context = torchrun(host, journal, nodes="2:3", endpoint=first.address())
            runs[host] = stack.enter_context(context)

        def running() -> None:
            codes = {host.name: run.poll() for host, run in runs.items()}
            if any(codes.values()):
                pytest.fail(f"torchrun ended: {codes}")

        def ripe() -> bool:
            running()
            return replicated_step(first) >= STEPS // 3

        def ended() -> bool:
            running()
            return bool(events(journal, "end"))

        for host in cluster.hosts:
            start(host)
        eventually(ripe, deadline_s=DEADLINE_S)
        owed = replicated_step(first)
        lost.kill()
        del runs[lost]
        start(cluster.replace(lost))
        eventually(ended, deadline_s=DEADLINE_S)
        assert [run.wait(DEADLINE_S) for run in runs.values()] == [0, 0, 0]
    begun, resumed = events(journal, "start")
    assert (begun["step"], begun["ranks"], resumed["ranks"]) == (None, 3, 3)
    assert resumed["step"] >= owed
    assert all(place.startswith("memory on h") for place in resumed["bytes_by_source"]), resumed
    expected = {event["step"]: event["loss"] for event in events(calm, "step")}
    losses = [(event["step"], event["loss"]) for event in events(journal, "step")]
    assert len(expected) == STEPS
    assert {step for step, _ in losses} == set(expected)
    assert [pair for pair in losses if expected[pair[0]] != pair[1]] == []
