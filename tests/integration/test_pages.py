"""Pages as a reader follows them: their commands are run in their order, and their snippets too."""

from __future__ import annotations

import http.client
import os
import re
import shlex
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.utils.data import DataLoader

import tieredckpt
from tests.support.agent import ROOT
from tests.support.commands import tieredckpt as command
from tests.support.states import save

pytestmark = pytest.mark.usefixtures("served")

ELSEWHERE = {
    "python3 -m venv": "the Makefile",
    "pip install": "the Makefile",
    "export": "sets a variable",
    "torchrun": "tests/integration/test_tutorial.py",
    "sleep": "tests/integration/test_tutorial.py",
    "rm -r": "deletes what the reader made",
    "python examples/from_torch_save.py": "tests/integration/test_examples.py",
    "tieredckpt agent run": "tests/integration/test_agent.py",
}
"""Commands that are not run here, and where they are."""


class Part(NamedTuple):
    """A command, or a block of code: its language, and its lines."""

    kind: str
    text: str


def parts(page: str) -> Iterator[Part]:
    """Of a page below docs/, in order: fenced blocks, and the lines of indented ones."""
    text = (ROOT / "docs" / page).read_text()
    pattern = re.compile(r"^```(\w+)\n(.*?)^```|^    (\S[^\n]*)", re.DOTALL | re.MULTILINE)
    for found in pattern.finditer(text):
        if found[1]:
            yield Part(found[1], found[2])
        elif re.match(r"(\$ )?(tieredckpt|curl|python3?|pip|export|torchrun|sleep|rm) ", found[3]):
            yield Part("command", found[3].removeprefix("$ ").partition("  #")[0].strip())
        else:
            yield Part("shown", found[3])


class Reader:
    """Somebody in a folder of their own, with the configuration of the page."""

    def __init__(self, folder: Path, runtime_dir: Path) -> None:
        self.folder, self.runtime_dir = folder, runtime_dir
        self.printed = ""

    def configure(self, text: str) -> None:
        text = re.sub(r"file:///(tmp|mnt)/", f"file://{self.folder}/", text)
        (self.folder / "tieredckpt.yaml").write_text(text)

    def train(self) -> None:
        """Instead of the tutorial's script, which tests/integration/test_tutorial.py runs."""
        with tieredckpt.Engine.open("tieredckpt.yaml") as engine:
            step = (engine.load({"a": torch.zeros(3)}) or 0) + 10
            save(engine, step, {"a": torch.ones(3)})
            engine.wait(step, "disk")

    def run(self, line: str) -> None:
        if "examples/tutorial/after.py" in line and line.startswith("torchrun"):
            self.train()
            return
        if any(line.startswith(each) for each in ELSEWHERE):
            return
        words = shlex.split(line)
        if words[1] == "export":  # the page has it in two ways
            Path(words[3]).unlink(missing_ok=True)
        if words[1] == "import":  # the page's other script has saved into this one
            words += ["--namespace", "imported"]
        if words[0] == "curl":
            self.printed += self.curl(words[1:])
            return
        assert words[0] == "tieredckpt", line
        done = command(*words[1:])
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
        self.printed += done.stdout

    def curl(self, words: list[str]) -> str:
        """What curl would print; it is not installed everywhere."""
        options = dict(zip(words[:-1:2], words[1:-1:2], strict=True))
        assert set(options) == {"--unix-socket", "-H"}
        line = http.client.HTTPConnection("localhost", timeout=30)
        line.sock = socket.socket(socket.AF_UNIX)
        line.sock.connect(str(self.runtime_dir / options["--unix-socket"]))
        line.request("GET", words[-1].removeprefix("http://localhost"),
                     headers=dict([options["-H"].split(": ")]))  # fmt: skip
        reply = line.getresponse()
        body = reply.read().decode()
        line.close()
        assert reply.status == 200, body
        return body


@pytest.fixture
def reader(runtime_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Reader:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TIEREDCKPT_RUNTIME_DIR", str(runtime_dir))
    return Reader(tmp_path, runtime_dir)


def follow(reader: Reader, page: str, names: dict[str, Any] | None = None) -> None:
    """A page from its first line to its last, and its ``agent stop`` at the end."""
    ends = []
    for part in parts(page):
        if part.kind == "yaml":
            reader.configure(part.text)
        elif part.kind == "command" and part.text == "tieredckpt agent stop":
            ends.append(part.text)
        elif part.kind == "command":
            reader.run(part.text)
        elif part.kind == "python" and names is not None:
            exec(part.text, names)
    for line in ends[:1]:
        reader.run(line)


def test_the_commands_of_the_tutorial(reader: Reader):
    follow(reader, "start/tutorial.md")
    assert "a restart would load step 20" in reader.printed


def test_the_agent_page(reader: Reader):
    """Also the table of commands, what ``doctor`` prints, and the versions in the samples."""
    page = "operate/agent.md"
    reader.configure("namespace: NAME\n")
    with tieredckpt.Engine.open("tieredckpt.yaml") as engine:
        save(engine, 1, {"a": torch.ones(3)})
    table = re.findall(r"`(tieredckpt [^`]+)`", (ROOT / "docs" / page).read_text().split("## ")[0])
    assert len(table) >= 8
    for line in sorted(table, key=lambda line: "purge" in line):
        if line not in ("tieredckpt agent stop", "tieredckpt purge"):  # the second names no tier
            reader.run(line + " --yes" * ("purge" in line))
    reader.printed = ""
    follow(reader, page)
    shown = [part.text for part in parts(page) if part.kind == "shown"]
    version = next(line for line in shown if "agent's version" in line)
    assert version in reader.printed.splitlines()
    assert '"namespaces":' in reader.printed, "curl's"


def test_the_page_on_torch_save(reader: Reader):
    model = nn.Sequential(nn.Linear(16, 4), nn.ReLU())
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 60)
    model(torch.ones(2, 16)).sum().backward()
    optimizer.step()
    schedule.step()
    trained = {"model": model, "optimizer": optimizer, "schedule": schedule}
    content = {name: each.state_dict() for name, each in trained.items()}
    torch.save({**content, "step": 40}, "checkpoint.pt")
    names: dict[str, Any] = {
        **trained, "torch": torch, "tieredckpt": tieredckpt, "dcp": dcp, "step": 7
    }  # fmt: skip
    try:
        follow(reader, "start/from-torch-save.md", names)
    finally:
        names["engine"].close()
    assert torch.equal(names["file"]["train"]["model"]["0.weight"], model[0].weight)
    assert schedule.last_epoch == 1


@pytest.fixture
def default_sigterm() -> Iterator[None]:
    """As in a script, where the run of the tests handles it itself."""
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.usefixtures("default_sigterm")
def test_the_page_on_preemption(reader: Reader, capsys: pytest.CaptureFixture[str]):
    """The loop leaves at the step after the signal; the other snippets run as they are."""
    reader.configure(
        "namespace: x\ntiers:\n  - {name: disk, url: file:///tmp/x, every: 1000 steps}\n"
    )

    def train(state: dict[str, torch.Tensor]) -> None:
        state["n"] += 1
        if state["n"] == 12:
            os.kill(os.getpid(), signal.SIGTERM)

    state = {"n": torch.zeros((), dtype=torch.int64)}
    names = {"tieredckpt": tieredckpt, "dcp": dcp, "train": train, "state": state, "last": 1000}
    blocks = [part.text for part in parts("use/preemption.md") if part.kind == "python"]
    loop, ignoring, asking = blocks
    exec(loop, names)
    printed = capsys.readouterr().out
    assert "step {'default': 12} -> disk" in printed
    assert "not there: {}" in printed

    class Loader:
        def __new__(cls, rows: Any, **options: Any) -> DataLoader[int]:  # type: ignore[misc]
            return DataLoader(range(3), **{**options, "num_workers": 1})  # type: ignore[arg-type]

    exec(ignoring.replace("DataLoader(..., ", "found = DataLoader(..., "), {"DataLoader": Loader})

    with tieredckpt.Engine.open("tieredckpt.yaml") as engine:
        exec("import threading, time\n" + asking, {
            "engine": engine, "signal": signal, "notice_is_there": lambda: True,
        })  # fmt: skip
        engine.load(state)
        while not engine.should_leave():
            signal.sigtimedwait([], 0.01)
