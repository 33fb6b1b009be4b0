"""Whose rules hold, as far as one host's memory tells."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import msgspec

from tests.support.saves import made, manifest_of
from tieredckpt.agent.rule import Ruling
from tieredckpt.format.manifest import AttemptRecord, Followed, Manifest
from tieredckpt.policy.config_keep import Best, Keep
from tieredckpt.policy.timeline import ancestry_of
from tieredckpt.policy.units import Every
from tieredckpt.transport.messages import NamespaceSpec, TierSpec


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


OLD_OPTIONS = """{"endpoint": null, "region": "eu", "profile": null, "anonymous": false,
 "path_style": false, "allow_http": false, "ca": null, "concurrency": 8, "part_bytes": 16777216,
 "bandwidth_bytes_per_s": null, "storage_class": null, "sse_type": null, "sse_key": null,
 "timeout_s": 30.0, "retry_for_s": 300.0}"""
OLD_TIER = """{"name": "far", "url": "s3://b/c", "scope": "shared", "keep_last": 5, "keep":
 {"every_steps": %s, "every_s": null, "max_age_s": 60.0, "max_bytes": null,
  "best": {"metric": "loss", "mode": "min", "n": 2}, "everything": false},
 "source": "memory", "on_pressure": "keep", "lag_alarm_steps": null, "lag_alarm_s": %s,
 "takeover_after_s": 60.0, "delete_delay_s": 600.0, "sweep_after_s": 86400.0, "object": %s}"""
OLD_RULE = """{"run": "%s", "spec": {"capacity_bytes": 1, "keep_last": 2, "wait_s": 0.0,
 "tiers": [%s]}}"""


def read(path: Path) -> Ruling:
    return Ruling(path, Known(), SimpleNamespace(run=""), lambda: set())  # type: ignore[arg-type]


def test_rules_are_read_as_agents_before_wrote_them(tmp_path: Path):
    path = tmp_path / "rule"
    for steps, alarm_s in (("10", "null"), ("null", "60.0")):
        tier = OLD_TIER % (steps, alarm_s, OLD_OPTIONS)
        path.write_text(OLD_RULE % (made("run", 1), tier))
        rule = read(path).rule
        assert rule is not None
        assert rule.run == made("run", 1)
        (found,) = rule.spec.tiers
        every = Every(steps=10) if steps == "10" else None
        best = Best(metric="loss", mode="min", n=2)
        assert found == TierSpec(
            name="far", url="s3://b/c", scope="shared", on_pressure="keep",
            keep=Keep(last=5, every=every, max_age_s=60.0, best=best),
            lag_alarm=Every(seconds=60.0) if alarm_s == "60.0" else None,
            object=msgspec.structs.replace(found.object, region="eu"),
        )  # fmt: skip


def test_rules_that_cannot_be_read_are_none(tmp_path: Path):
    path = tmp_path / "rule"
    for text in (
        "", "[", "[]", "{}", '{"spec": {"tiers": 5}}', '{"spec": {"tiers": [5]}}',
        '{"spec": {"tiers": [{"keep": 5}]}}', OLD_RULE % ("x", OLD_TIER % ("0", "null", "{}")),
        OLD_RULE % (made("run", 1), OLD_TIER % ("1", "null", '{"no": 1}')),
    ):  # fmt: skip
        path.write_text(text)
        assert read(path).rule is None
