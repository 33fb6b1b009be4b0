"""`tieredckpt purge` in a tier that hosts share, without an agent."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import click
import msgspec
import pytest

from tests.format.samples import hex_id, save_record, small_manifest
from tieredckpt.cli.main import main
from tieredckpt.errors import TierUnavailableError
from tieredckpt.format.manifest import encode_manifest
from tieredckpt.format.records import encode_save_record, encode_tombstone
from tieredckpt.storage.backends.file import FileTier
from tieredckpt.storage.base import ObjectInfo, Scope, manifest_key, record_key, segment_key
from tieredckpt.storage.shared.catalog import SharedCatalog
from tieredckpt.storage.shared.records import tombstone_of

FIRST = small_manifest()
SECOND, THIRD = (
    msgspec.structs.replace(
        FIRST,
        save_id=hex_id(70 + step),
        step=step,
        segments=(msgspec.structs.replace(FIRST.segments[0], id=hex_id(80 + step)),),
    )
    for step in (2, 3)
)
NAME = FIRST.namespace
MINUTE_S = 60.0
Purge = Callable[..., tuple[int, Any, str]]


@pytest.fixture
def tier(tmp_path: Path) -> FileTier:
    """With three checkpoints; the first one was deleted once, and taken back."""
    found = FileTier("s3", tmp_path / "shared", NAME, scope=Scope.SHARED)
    dead = encode_tombstone(tombstone_of(FIRST, "retention", "h0"))
    found.put(manifest_key(FIRST.stream, FIRST.save_id), dead)
    found.put(manifest_key(FIRST.stream, FIRST.save_id, 1), encode_manifest(FIRST))
    for each in (SECOND, THIRD):
        found.put(manifest_key(each.stream, each.save_id), encode_manifest(each))
    for ref in (ref for each in (FIRST, SECOND, THIRD) for ref in each.segments):
        found.put(segment_key(ref.id), b"segment")
    age(found)
    return found


def age(tier: FileTier) -> None:
    """Nothing was written within the last two minutes."""
    for file in filter(Path.is_file, tier.root.rglob("*")):
        times_s = file.stat().st_mtime - 2 * MINUTE_S
        os.utime(file, (times_s, times_s))


@pytest.fixture
def purge(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Purge:
    file = tmp_path / "run.yaml"
    settings = {
        "namespace": NAME,
        "agent": {"runtime_dir": str(tmp_path / "runtime")},
        "tiers": [
            {"name": "s3", "url": f"file://{tmp_path}/shared", "scope": "shared"},
            {"name": "disk", "url": f"file://{tmp_path}/disk"},
        ],
    }
    file.write_text(json.dumps(settings))

    def call(*words: str, typed: str = f"{NAME}\n") -> tuple[int, Any, str]:
        monkeypatch.setattr(sys, "argv", ["tieredckpt", "purge", *words, "--config", str(file)])
        monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
        with pytest.raises(SystemExit) as left:
            main()
        out, err = capsys.readouterr()
        return int(left.value.code or 0), json.loads(out) if "--json" in words else out, err

    return call


def held(tier: FileTier) -> set[int]:
    catalog = SharedCatalog(tier)
    catalog.refresh_commits()
    return {each.step for each in catalog.manifests()}


def test_one_checkpoint_goes_and_a_pinned_one_stays(tier: FileTier, purge: Purge):
    pin = msgspec.structs.replace(save_record("pin"), stream=SECOND.stream, save_id=SECOND.save_id)
    SharedCatalog(tier).put_record(encode_save_record(pin))
    code, answer, err = purge(SECOND.save_id[:12], "--tier", "s3", "--yes", "--json")
    assert (code, answer["deleted"]) == (0, [])
    assert "is pinned, and stays" in err
    code, answer, _ = purge(str(FIRST.step), "--tier", "s3", "--yes", "--json")
    assert (code, [each["save_id"] for each in answer["deleted"]]) == (0, [FIRST.save_id])
    assert held(tier) == {2, 3}
    kept = {segment_key(ref.id) for each in (SECOND, THIRD) for ref in each.segments}
    assert {info.key for info in tier.list("segments/")} == kept
    assert len(list(tier.list("manifests/"))) == 2, "no key of it is left"
    code, answer, err = purge("--tier", "all", "--yes", "--json")
    assert (code, [each["step"] for each in answer["deleted"]]) == (0, [3])
    assert held(tier) == {2}
    assert len(list(tier.list("records/"))) == 1
    assert purge("77", "--tier", "s3", "--yes")[0] == 1


def test_a_pin_that_another_tier_has_counts(tier: FileTier, tmp_path: Path, purge: Purge):
    fourth = msgspec.structs.replace(THIRD, save_id=hex_id(97), step=4)
    with closing(FileTier("disk", tmp_path / "disk", NAME)) as disk:
        for each in (SECOND, fourth):
            pin = msgspec.structs.replace(
                save_record("pin"), id=hex_id(each.step), stream=each.stream, save_id=each.save_id
            )
            disk.put(manifest_key(each.stream, each.save_id), encode_manifest(each))
            disk.put(record_key(each.save_id, pin.id), encode_save_record(pin))
    code, answer, _ = purge("--tier", "s3", "--yes", "--json")
    assert (code, {each["step"] for each in answer["deleted"]}) == (0, {FIRST.step, 3})
    assert ([each["step"] for each in answer["pinned"]], held(tier)) == ([2], {2})
    shutil.rmtree(tmp_path / "disk" / NAME / "records" / SECOND.save_id)
    assert purge("--tier", "s3", "--yes")[0] == 0
    assert not tier.root.exists(), "what is pinned on disk alone does not matter"
    code, _, err = purge("--tier", "disk", "--yes")
    assert (code, "step 4" in err) == (0, True)


def test_a_namespace_goes_after_two_answers(tier: FileTier, purge: Purge):
    assert purge("--tier", "s3", typed="n\n")[0] == 130
    code, _, err = purge("--tier", "s3", typed=f"y\n{NAME}x\n")
    assert (code, "another name" in err) == (2, True)
    assert purge("--tier", "s4", "--yes")[0] == 2
    assert held(tier) == {FIRST.step, 2, 3}
    code, out, err = purge("--tier", "s3", typed=f"y\n{NAME}\n")
    assert (code, "deleted: 3 checkpoints" in out) == (0, True)
    assert re.search(r"3 checkpoints, 2 GiB, the newest saved \d+ .* ago\n", err)
    assert not tier.root.exists()


def test_what_is_not_ours_stays(tier: FileTier, tmp_path: Path, purge: Purge):
    """A folder beside the namespaces, and a file in one."""
    foreign = tmp_path / "shared" / "records" / "segments" / "a.wav"
    foreign.parent.mkdir(parents=True)
    foreign.write_bytes(b"a")
    code, _, err = purge("--tier", "all", "--yes", "--namespace", "records", typed="records\n")
    assert (code, "nothing of namespace records is there" in err, foreign.exists()) == (
        1,
        True,
        True,
    )
    assert purge("--tier", "s3", "--yes", "--namespace", "../shared", typed="../shared\n")[0] == 2
    note = tier.root / "note.txt"
    note.write_text("n")
    assert purge("--tier", "s3", "--yes")[0] == 0
    assert list(tier.root.rglob("*")) == [note]


def test_a_pin_counts_that_the_scan_could_not_read(
    tier: FileTier, purge: Purge, monkeypatch: pytest.MonkeyPatch
):
    pin = msgspec.structs.replace(save_record("pin"), stream=SECOND.stream, save_id=SECOND.save_id)
    SharedCatalog(tier).put_record(encode_save_record(pin))
    listed, failed = FileTier.list, []

    def fails_once(self: FileTier, prefix: str) -> Iterator[ObjectInfo]:
        if prefix == "records/" and self.name == "s3" and not failed:
            failed.append(prefix)
            raise TierUnavailableError("slow down", tier="s3")
        return listed(self, prefix)

    monkeypatch.setattr(FileTier, "list", fails_once)
    assert purge("--tier", "s3", "--yes")[0] == 0
    assert (failed, held(tier)) == (["records/"], {2})


def test_a_job_that_begins_before_the_answer(
    tier: FileTier, purge: Purge, monkeypatch: pytest.MonkeyPatch
):
    def prompt(*_: object, **__: object) -> str:
        tier.put(segment_key(hex_id(99)), b"another one")
        return NAME

    monkeypatch.setattr(click, "prompt", prompt)
    code, _, err = purge("--tier", "s3", "--yes")
    assert (code, "a job copied to tier s3" in err) == (2, True)
    assert held(tier) == {FIRST.step, 2, 3}


def test_a_pin_that_is_set_before_the_answer(
    tier: FileTier, purge: Purge, monkeypatch: pytest.MonkeyPatch
):
    pin = msgspec.structs.replace(save_record("pin"), stream=SECOND.stream, save_id=SECOND.save_id)

    def prompt(*_: object, **__: object) -> str:
        SharedCatalog(tier).put_record(encode_save_record(pin))
        return NAME

    monkeypatch.setattr(click, "prompt", prompt)
    code, _, err = purge("--tier", "s3", "--yes")
    assert (code, "something has changed since this was listed" in err) == (2, True)
    assert held(tier) == {FIRST.step, 2, 3}


def test_the_last_copies_and_what_cannot_be_read_are_named(
    tier: FileTier, tmp_path: Path, purge: Purge
):
    with closing(FileTier("disk", tmp_path / "disk", NAME)) as disk:
        disk.put(manifest_key(SECOND.stream, SECOND.save_id), encode_manifest(SECOND))
    tier.put(manifest_key(THIRD.stream, hex_id(96)), b"of a later release")
    age(tier)
    _, _, err = purge("--tier", "s3", typed="n\n")
    for each in (SECOND, THIRD):  # disk has the manifest of one alone
        assert f"step {each.step} ({each.save_id[:8]}) goes, and no other tier has it whole" in err
    assert f"unreadable in s3, and goes: {hex_id(96)[:8]}" in err


def test_a_tier_that_a_job_fills_is_refused(tier: FileTier, purge: Purge):
    tier.put(segment_key(hex_id(99)), b"another one")
    code, _, err = purge("--tier", "all", "--yes")
    assert (code, "a job copied to tier s3 0 s ago" in err) == (2, True)
    assert held(tier) == {FIRST.step, 2, 3}
    age(tier)
    assert purge("--tier", "all", "--yes")[0] == 0


def test_a_segment_of_another_checkpoint_stays(tier: FileTier, purge: Purge):
    """A manifest may be forged."""
    wrong = msgspec.structs.replace(THIRD, save_id=hex_id(98), step=9, segments=SECOND.segments)
    tier.put(manifest_key(wrong.stream, wrong.save_id), encode_manifest(wrong))
    assert purge("9", "--tier", "s3", "--yes")[0] == 0
    assert held(tier) == {FIRST.step, 2, 3}
    assert tier.info(segment_key(SECOND.segments[0].id))
