"""Live recovery of trainings on a device: the ranks of a world share one GPU, over gloo, and one
rank has NCCL for itself.

The trainings run on the CPU, too (nightly), so that a machine without a device tries the script.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.live import (
    STEPS,
    Fault,
    Outcome,
    Row,
    device_script,
    failing_device_script,
    stopped_agent,
    supervised,
)
from tieredckpt.live.rank import EXIT_UNHEALTHY

DEVICES = [
    pytest.param("cuda", marks=pytest.mark.gpu),
    pytest.param("cpu", marks=pytest.mark.nightly),
]
GENERATIONS = 12
FIRST_IGNORED = 3
"""Generations that still fill caches."""
GROWTH_MAX = 8 << 20
"""Of the device's memory over all other generations; a communicator of NCCL has more."""
HANG_S, UNWIND_S = 15.0, 5.0
"""So that a rank that does not leave shows its stacks."""


@pytest.fixture(scope="module", params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def trained(folder: Path, faults: list[Fault], device: str, **options: object) -> Outcome:
    script = functools.partial(device_script, device, "gloo")
    return supervised(
        folder, faults, script=script, hang_s=HANG_S, unwind_s=UNWIND_S, timeout_s=80, **options
    )


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory, device: str) -> dict[int, Row]:
    folder = tmp_path_factory.mktemp("undisturbed")
    with stopped_agent(folder):
        found = trained(folder, [], device, standby=0)
    assert found.code == 0, "\n".join(found.lines)
    rows = {row.step: row for row in found.rows}
    assert sorted(rows) == list(range(1, STEPS + 1))
    return rows


@pytest.fixture
def folder(runtime_dir: Path) -> Iterator[Path]:
    with stopped_agent(runtime_dir):
        yield runtime_dir


def check(found: Outcome, reference: dict[int, Row]) -> None:
    """Each step was trained once, and all rows are the reference's, to the bit."""
    text = "\n".join(found.lines)
    assert found.code == 0, text
    assert [row for row in found.rows if row != reference[row.step]] == [], text
    counts = Counter(row.step for row in found.rows)
    assert counts == Counter(list(reference)), text
    assert not found.said("does not leave"), text


def test_ranks_that_raise_or_die_are_replaced_and_no_step_is_lost(folder: Path, device, reference):
    faults = [Fault(2, 0, "kill"), Fault(4, 1, "raise"), Fault(6, 3, "kill"), Fault(9, 2, "kill")]
    found = trained(folder, faults, device)
    check(found, reference)
    assert len(found.said("from the state of the surviving ranks, no step lost")) >= 3
    assert len(found.said("is gone: SIGKILL")) == 3


def test_ranks_that_change_at_every_generation(folder: Path, device, reference):
    faults = [Fault(step, step % 4, "raise") for step in range(2, 7)]
    found = trained(folder, faults, device, standby=0, rotated=True)
    check(found, reference)
    assert len(found.said("no step lost")) == len(faults)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("kind", "ends"),
    [
        ("break", f"exit code {EXIT_UNHEALTHY}"),
        # The first tensor that is freed ends the process, if it does not end by itself before.
        ("break-later", f"(exit code {EXIT_UNHEALTHY}|SIGABRT)"),
    ],
)
@pytest.mark.parametrize("device", ["cuda"], indirect=True, scope="module")
def test_a_process_whose_device_has_failed_is_replaced(
    folder: Path, device, reference, kind: str, ends: str
):
    """The state comes from the other replica."""
    found = trained(folder, [Fault(6, 1, kind)], device)
    check(found, reference)
    assert re.search(f"rank 1 .* is gone: {ends}", "\n".join(found.lines))
    assert found.said("resumed at step 5 from the state of the surviving ranks, no step lost")


@pytest.mark.full
def test_a_device_that_fails_needs_no_health_check(folder: Path):
    """On the CPU: what reports the failure of the device is replaced."""
    found = supervised(folder, [Fault(6, 1, "raise")], script=failing_device_script)
    assert found.code == 0, "\n".join(found.lines)
    assert found.said(f"is gone: exit code {EXIT_UNHEALTHY}"), "\n".join(found.lines)
    assert [row.step for row in found.rows] == list(range(1, STEPS + 1))
    assert found.said("resumed at step 5 from the state of the surviving ranks, no step lost")


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["nccl", "cpu:gloo,cuda:nccl", "gloo"])
def test_one_process_makes_its_communicators_anew_and_its_memory_does_not_grow(
    folder: Path, backend: str
):
    """Two updates in each generation, with one rank; its process is never replaced.

    Other processes on the device change what is free: run these tests in one process.
    """
    script = functools.partial(device_script, "cuda", backend)
    steps = 2 * GENERATIONS
    with stopped_agent(folder / "undisturbed"):
        undisturbed = supervised(
            folder / "undisturbed", size=1, standby=0, steps=steps, script=script
        )
    faults = [Fault(2 * number + 1, 0, "raise") for number in range(1, GENERATIONS)]
    found = supervised(folder, faults, size=1, standby=0, steps=steps, script=script)
    check(found, {row.step: row for row in undisturbed.rows})
    assert len(found.said("no step lost")) == len(faults)
    assert not found.said("is gone")
    last = {}
    for line in (folder / "memory").read_text().splitlines():
        generation, *memory = map(int, line.split())
        last[generation] = memory
    assert len(last) == GENERATIONS
    later = [last[generation] for generation in sorted(last)[FIRST_IGNORED:]]
    *memory, threads = zip(*later, strict=True)
    for what, each in zip(("tensors", "torch", "device"), memory, strict=True):
        print(f"{backend}, MiB of the {what}:", [round(value / 2**20, 1) for value in each])
        assert max(each) - each[0] <= (0 if what == "tensors" else GROWTH_MAX), later
    assert max(threads) <= threads[0] + 2, threads  # a group has more
