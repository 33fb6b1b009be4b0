"""The shipped suite for DCP plug-ins: on ours, on PyTorch's own, and on some that are broken."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.planner import LoadItemType

from tests.support.preloaded import start_server
from tieredckpt.testing.dcp.command import main
from tieredckpt.testing.dcp.crews import SHARED, Answer
from tieredckpt.testing.dcp.ours import EngineStorage, FileTierStorage, MemoryStorage
from tieredckpt.testing.dcp.scenario import SCENARIOS
from tieredckpt.testing.dcp.suite import _problems
from tieredckpt.testing.dcp_suite import DcpSuite, StockStorage, Suite, select

ROOT = Path(__file__).parents[2]
NOT_HANDED_OVER = (
    "DCP's DefaultLoadPlanner puts values into a copy of the state that flatten_sharded_tensors "
    "made, and copies them back only if flatten_state_dict is on as well"
)
NOT_STRICT = "with strict=False, which scenarios with a part of the keys need, it is only a warning"


@pytest.fixture(scope="module", autouse=True)
def _one_set_of_ranks() -> Iterator[None]:
    start_server()  # or the suite starts one, which is too small for the files after this one
    with SHARED.held():
        yield


@pytest.mark.nightly
class TestStock(DcpSuite):
    """What of DCP's own docs/reference/conformance.md says: nothing of ours runs in it."""

    storage = StockStorage
    known_failures: ClassVar = {
        "only-sharded-tensors-flattened": NOT_HANDED_OVER,
        "no-collectives-resharded": "each rank has metadata of its own; nobody joins them",
        "failed-save-of-an-existing-step": "FileSystemWriter writes over the files of the earlier",
        "killed-while-an-existing-step-is-saved": "likewise",
    }


class Thinned(DcpSuite):
    """Of the scenarios, those in ``gate`` are part of ``make test``, the others of ``test-all``."""

    gate: ClassVar[frozenset[str]]

    def pytest_generate_tests(self, metafunc: Any) -> None:
        if "scenario" in metafunc.fixturenames:
            kind = type(self)
            assert kind.gate <= set(select(kind.only))
            full = pytest.mark.full
            cases = [
                name if name in kind.gate else pytest.param(name, marks=full)
                for name in select(kind.only)
            ]
            metafunc.parametrize("scenario", cases)


class TestMemory(Thinned):
    storage = MemoryStorage
    gate = frozenset(select()) - {
        # What they combine has scenarios of its own.
        "fsdp2-other-world-sizes", "interleaved-pipeline", "three-dimensional-layouts",
        "offloaded-optimizer", "two-optimizers", "gathered-parameters",
        "async-save-in-a-process",  # test_async_process.py has it
    }  # fmt: skip
    known_failures: ClassVar = {
        "only-sharded-tensors-flattened": NOT_HANDED_OVER,
        "a-group-into-the-stream-of-all": "refused with a UsageError, unless engine.load is called",
    }


class TestEngineLoad(Thinned):
    """The same through ``engine.load``, which agrees on one checkpoint before it reads."""

    storage = EngineStorage
    only = "parallel/ or groups/ or sharding/ or calls/ or failures/"
    gate = frozenset({
        "other-dimension", "mixed-with-values", "full-state-dict", "ranks-with-nothing",
        "group-of-the-last-ranks", "groups-at-once", "no-dist-loads", "no-collectives-resharded",
        "no-collectives-one-rank-missing", "different-keys-on-each-rank", "stateful-objects",
        "no-such-checkpoint", "load-fails-in-local-planning", "load-fails-in-global-planning",
        "load-fails-while-resolving", "load-fails-while-committing", "load-fails-in-a-value",
    })  # fmt: skip
    known_failures: ClassVar = {
        "only-sharded-tensors-flattened": NOT_HANDED_OVER,
        "missing-key": NOT_STRICT,
    }


class TestFileTier(Thinned):
    """What was saved before a restart of the job comes from the file tier: memory is empty then."""

    storage = FileTierStorage
    only = "values/ or sharding/ or deaths/"
    gate = frozenset({
        "fewer-ranks-in-part", "mixed-with-values", "coordinator-killed-before-the-commit"
    })  # fmt: skip


# --- the suite itself: it must find what is wrong ---------------------------------------------


class LosesAnElement(FileSystemReader):
    """Gives the last element of each tensor as zero."""

    def read_data(self, plan: Any, planner: Any) -> Any:
        done = super().read_data(plan, planner)
        for item in plan.items:
            if item.type == LoadItemType.TENSOR:
                planner.resolve_tensor(item).detach().reshape(-1)[-1:].zero_()
        return done


class HangsInFinish(FileSystemWriter):
    """The coordinator waits for ever."""

    def finish(self, metadata: Any, results: Any) -> None:
        threading.Event().wait(3600)


class DiesInFinish(FileSystemWriter):
    """The coordinator is gone."""

    def finish(self, metadata: Any, results: Any) -> None:
        os._exit(3)


class TakesTheNewest(StockStorage):
    """Loads the newest step instead of the one that was asked for."""

    def reader(self, step: int, stream: str = "main") -> FileSystemReader:
        found = sorted((self.folder / stream).glob("step-*/.metadata"))
        return FileSystemReader(found[-1].parent if found else self.folder)


def loses_an_element(path: Path) -> tuple[FileSystemWriter, FileSystemReader]:
    return FileSystemWriter(path), LosesAnElement(path)


def hangs_in_finish(path: Path) -> tuple[FileSystemWriter, FileSystemReader]:
    return HangsInFinish(path), FileSystemReader(path)


def dies_in_finish(path: Path) -> tuple[FileSystemWriter, FileSystemReader]:
    return DiesInFinish(path), FileSystemReader(path)


@pytest.mark.parametrize(
    ("found", "scenario", "reason"),
    [
        (loses_an_element, "replicated-tensors", "bytes differ"),
        (dies_in_finish, "replicated-tensors", "died"),
        pytest.param(hangs_in_finish, "replicated-tensors", "hangs", marks=pytest.mark.full),
        pytest.param(
            TakesTheNewest, "no-such-checkpoint", "no error on rank", marks=pytest.mark.full
        ),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_a_broken_plug_in_is_found_out(found: Any, scenario: str, reason: str) -> None:
    with Suite(found) as suite:
        outcome = suite.run(scenario, deadline_s=8.0 if reason == "hangs" else None)
        assert not outcome.passed
        assert reason in outcome.reason, outcome.details
    # It is of no consequence for the next plug-in on the same ranks.
    with Suite(StockStorage) as suite:
        after = suite.run("other-dtype")
        assert after.passed, after.details


def test_who_sees_its_peer_killed_may_say_so() -> None:
    died, raised = Answer("died"), Answer("raised", "RuntimeError: connection reset")
    assert not list(_problems([died, raised], frozenset({0})))
    assert list(_problems([Answer("hangs"), raised], frozenset({0})))
    assert list(_problems([died, raised], frozenset()))


PAGE = ROOT / "docs" / "reference" / "conformance.md"
COLUMNS: dict[str, type[DcpSuite]] = {
    "stock": TestStock,
    "memory": TestMemory,
    "load": TestEngineLoad,
    "file": TestFileTier,
}
"""By column of the page: the class that runs it."""


def test_the_page_has_every_scenario() -> None:
    _, _, rest = PAGE.read_text().partition("\n### The scenarios\n")
    section, _, _ = rest.partition("\n### ")
    on_page = {}
    for subject in section.split("\n#### ")[1:]:
        heading, _, bullets = subject.partition("\n")
        for bullet in re.findall(r"^- .*\n(?:  .*\n)*", f"{bullets}\n", re.MULTILINE):
            match = re.fullmatch(
                r"- `(.+?)`: (.+?)(?: \(\*\*fails\*\*: (.+)\))?", " ".join(bullet.split())
            )
            assert match, bullet
            assert match[1] not in on_page, bullet
            on_page[match[1]] = (heading.lower(), match[2], match[3] or "")
    assert on_page == {
        each.name: (each.subject, each.title, ", ".join(failing(each.name)))
        for each in SCENARIOS.values()
    }


def failing(name: str) -> list[str]:
    """The columns in which a scenario is declared to fail."""
    return [column for column, suite in COLUMNS.items() if name in suite.known_failures]


def test_the_page_counts_them() -> None:
    page = PAGE.read_text()
    rows = {subject: ["-"] * len(COLUMNS) for subject in [e.subject for e in SCENARIOS.values()]}
    total = [[0, 0] for _ in COLUMNS]
    for number, (column, suite) in enumerate(COLUMNS.items()):
        selected = set((suite.only or "/").split(" or "))
        for subject, row in rows.items():
            names = [each.name for each in SCENARIOS.values() if each.subject == subject]
            if selected & {"/", f"{subject}/"}:
                passed = sum(column not in failing(name) for name in names)
                row[number] = f"{passed}/{len(names)}"
                total[number] = [total[number][0] + passed, total[number][1] + len(names)]
    for subject, row in rows.items():
        assert f"| [{subject}](#{subject}) | {' | '.join(row)} |" in page, row
    assert f"| all | {' | '.join(f'{passed}/{ran}' for passed, ran in total)} |" in page, total


@pytest.mark.nightly
def test_command_line(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter\n"
        "def pair(path):\n"
        "    return FileSystemWriter(path), FileSystemReader(path)\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "tieredckpt.testing.dcp_suite", "--factory", "mine:pair",
         "-k", "calls/saved-twice or failed-save-of-an", "--no-compare"],
        capture_output=True, text=True, timeout=200, cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert "2 scenarios" in done.stdout
    assert "1 pass, 1 fail, 0 dcp cannot" in done.stdout


def test_what_stock_cannot_do_either_is_told_apart(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    here = f"{__name__}:loses_an_element"
    names = "calls/missing-key-allowed or failed-save-of-an"
    assert main(["--factory", here, "--json", "-k", names]) == 1
    answer = json.loads(capsys.readouterr().out)
    assert {row["scenario"]: row["result"] for row in answer["scenarios"]} == {
        "missing-key-allowed": "fail",
        "failed-save-of-an-existing-step": "dcp cannot",
    }
    assert answer["failed"] == 1


@pytest.mark.parametrize(
    "arguments",
    [("nowhere:pair",), ("os:no_such_thing",), ("mine",), ("os:sep",), ("stock", "-k", "no such")],
    ids=" ".join,
)
def test_command_line_refuses(
    arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--factory", *arguments]) == 2
    said = capsys.readouterr()
    assert said.err
    assert not said.out
