"""Whose rules hold, as far as one host's memory tells."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from tests.support.saves import made, manifest_of
from tieredckpt.agent.cluster.authority import RULES, Rule, Ruling
from tieredckpt.config.tiers import Keep
from tieredckpt.format.manifest import AttemptRecord, Followed, Manifest
from tieredckpt.policy.history import ancestry_of
from tieredckpt.rpc.messages.agent import NamespaceSpec, TierSpec


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
    assert ruling.term() == made("run", 1)
    assert [each.id for each in ruling._heads() if each is not None] == [made("attempt", 1)]


def read(path: Path) -> Ruling:
    return Ruling(path, Known(), SimpleNamespace(run=""), lambda: set())  # type: ignore[arg-type]


def a_rule() -> Rule:
    tier = TierSpec(name="far", url="s3://b/c", scope="shared", keep=Keep(last=7))
    spec = NamespaceSpec(capacity_bytes=1, keep_last=2, wait_s=0.0, tiers=(tier,))
    return Rule(run=made("run", 1), spec=spec)


def test_rules_with_any_bit_flipped_are_none(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    path = tmp_path / "rule"
    path.write_bytes(good := RULES.encode(a_rule()))
    assert read(path).rule == a_rule()
    for bit in range(8 * len(good)):
        bad = bytearray(good)
        bad[bit // 8] ^= 1 << bit % 8
        path.write_bytes(bad)
        caplog.clear()
        ruling = read(path)
        assert (ruling.rule, ruling.term(), ruling.tiers()) == (None, None, {}), bit
        assert "nothing is deleted" in caplog.text


def test_rules_of_the_former_form_are_written_anew_in_the_present_one(tmp_path: Path):
    path, known = tmp_path / "rule", Known()
    known.saves.append(manifest_of(0, ["a"]))
    known.records.append(attempt(1))
    path.write_bytes(msgspec.json.encode(a_rule()))
    ruling = Ruling(path, known, SimpleNamespace(run=""), lambda: set())  # type: ignore[arg-type]
    assert ruling.settle("")
    assert ruling.rule == a_rule() == RULES.decode(path.read_bytes())
    assert not ruling.settle("")


def test_the_configuration_of_a_session_of_the_run_replaces_an_old_files_at_once(tmp_path: Path):
    """Also while it is not known whose the newest attempt is."""
    path = tmp_path / "rule"
    path.write_bytes(RULES.encode(a_rule()))
    runs = {made("run", 1), made("run", 2)}
    ruling = Ruling(path, Known(), SimpleNamespace(run=""), lambda: runs)  # type: ignore[arg-type]
    far = TierSpec(name="far", url="s3://b/now", scope="shared", keep=Keep(last=9))
    spec = msgspec.structs.replace(a_rule().spec, keep_last=5, tiers=(far,))
    ruling.note(made("run", 2), spec)
    assert ruling.rule == a_rule(), "another run's does not"
    ruling.note(made("run", 1), spec)
    assert (ruling.spec, ruling.spec_of(made("run", 1)), ruling.keep_last()) == (spec, spec, 5)
    assert ruling.tiers() == {"far": far}
    assert ruling.fills(far)
    assert not ruling.fills(a_rule().spec.tiers[0])


def test_rules_of_the_former_form_that_cannot_be_read_are_none(tmp_path: Path):
    path = tmp_path / "rule"
    good = msgspec.json.encode(a_rule())
    path.write_bytes(good)
    assert read(path).rule == a_rule()
    bad = [
        good.replace(was, now, 1)
        for was, now in (
            (b'"last":7', b'"last":-1'), (b'"last":7', b'"last":"x"'), (b'"last":7', b'"lust":7'),
            (b'"shared"', b'"all"'), (b'"name"', b'"no":1,"name"'), (b'"keep_last":2,', b""),
        )
    ]  # fmt: skip
    assert good not in bad
    for text in (b"", b"[", b"[]", b"{}", b"[" * 10_000, b'{"spec": {"tiers": 5}}', *bad):
        path.write_bytes(text)
        assert read(path).rule is None, text
