"""Whose rules hold, as far as one host's memory tells."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import msgspec

from tests.support.saves import made, manifest_of
from tieredckpt.agent.rule import Ruling
from tieredckpt.format.manifest import AttemptRecord, Followed, Manifest
from tieredckpt.policy.timeline import ancestry_of
from tieredckpt.transport.messages import NamespaceSpec


class Known:
    """What lies in memory."""

    def __init__(self) -> None:
        self.saves: list[Manifest] = []
        self.records: list[AttemptRecord] = []

    def manifests(self) -> tuple[Manifest, ...]:
        return tuple(self.saves)

    def attempts(self) -> tuple[AttemptRecord, ...]:
        return tuple(self.records)


def attempt(number: int, followed: tuple[Followed, ...] = (), name: object = None) -> AttemptRecord:
    name = number if name is None else name
    return AttemptRecord(
        namespace="run", number=number, id=made("attempt", name), run=made("run", name), bases=(),
        created_at_s=0.0, followed=followed,
    )  # fmt: skip


def ruled_by_the_first(path: Path, known: Known) -> Ruling:
    """By the run of attempt 1, which keeps two."""
    runs = {made("run", 1)}
    ruling = Ruling(path, known, SimpleNamespace(run=""), lambda: runs)  # type: ignore[arg-type]
    known.saves.append(manifest_of(0, ["a"]))
    known.records.append(attempt(1))
    ruling.note(made("run", 1), NamespaceSpec(capacity_bytes=1, keep_last=2, wait_s=0, tiers=()))
    assert ruling.settle("")
    assert ruling.keep_last() == 2
    return ruling


def test_a_checkpoint_of_an_attempt_whose_record_is_not_here_ends_the_term(tmp_path: Path):
    """It comes before its record when a host catches up: what it may go by is not known yet."""
    known = Known()
    ruling = ruled_by_the_first(tmp_path / "rule", known)
    of_second = msgspec.structs.replace(
        manifest_of(0, ["a"], attempt=2), lineage=ancestry_of(known.saves[0])
    )
    known.saves.append(of_second)
    assert ruling.term() is None
    assert ruling.keep_last() is None
    assert ruling.newest_run() == ""


def test_two_heads_of_other_runs_end_the_term(tmp_path: Path):
    """The run that ruled was followed by both."""
    known = Known()
    ruling = ruled_by_the_first(tmp_path / "rule", known)
    first = Followed(1, made("attempt", 1))
    known.records += [attempt(2, (first,), name) for name in ("left", "right")]
    assert ruling.term() is None
    assert ruling.newest_run() == ""


def test_beside_a_head_of_another_run_the_one_that_rules_goes_on(tmp_path: Path):
    known = Known()
    ruling = ruled_by_the_first(tmp_path / "rule", known)
    known.records.append(attempt(1, (), "other"))
    term = ruling.term()
    assert term is not None
    assert term.attempt == made("attempt", 1)
