"""``tieredckpt import``: stock DCP folders and torch.save files become checkpoints of a job."""

from __future__ import annotations

import json
import os
import pickle
import warnings
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from tests.support.commands import tieredckpt as run_command
from tests.support.pieces import InPieces
from tests.support.states import blank, config, flip, same, save
from tieredckpt.config.schema import load_config
from tieredckpt.engine import Engine
from tieredckpt.errors import IntegrityError, UsageError, WaitError
from tieredckpt.export import imports
from tieredckpt.export.export import Request, export_checkpoint
from tieredckpt.export.imports import import_checkpoint
from tieredckpt.export.source import Which
from tieredckpt.recovery.flush import FlushReport, flush_and_wait

STOCK = Path(__file__).parents[1] / "format/stock"
"""Folders that stock DCP wrote: torch 2.2.2 with Python 3.11.7, torch 2.4.1 with Python 3.11.2."""

pytestmark = pytest.mark.usefixtures("served")


def state_of(seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    return {
        "model": {
            "w": torch.randn(301, 40),
            "columns": torch.randn(40, 30).t(),
            "half": torch.randn(99).bfloat16(),
            "flags": torch.tensor([True, False, True]),
            "none": torch.empty(0, 3),
            "scalar": torch.tensor(7),
            "conjugate": torch.randn(9, 2, dtype=torch.complex64).conj(),  # by a bit in the file
            "imaginary": torch._neg_view(torch.randn(3)),
        },
        "optim": {"state": {"0": {"step": torch.tensor(3.0)}}, "groups": [{"lr": 0.1, "n": None}]},
        "note": "text",
    }


def stock_save(state: dict[str, Any], folder: Path, planner: Any = None) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is")
        dcp.save(state, checkpoint_id=folder, planner=planner, no_dist=True)


def test_a_tier_that_does_not_get_it_fails_the_import(
    runtime_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def slow(client: Any, tier: str | None, deadline_s: float) -> FlushReport:
        report = flush_and_wait(client, tier, deadline_s)
        assert report.done
        return replace(report, tiers=("disk", "s3"), errors={"s3": "step 1: not copied yet"})

    monkeypatch.setattr(imports, "flush_and_wait", slow)
    torch.save({"w": torch.ones(3)}, tmp_path / "source")
    tier = {"name": "disk", "url": f"file://{tmp_path}/disk"}
    settings = load_config(config(runtime_dir, tiers=[tier]), {})
    with pytest.raises(WaitError, match=r"in memory, and not in every tier yet \(s3: step 1: not"):
        import_checkpoint(settings, tmp_path / "source", 1, "default")


@pytest.mark.parametrize("kind", ["pieces", pytest.param("torch", marks=pytest.mark.full)])
def test_a_job_loads_what_was_imported(runtime_dir: Path, tmp_path: Path, kind: str):
    state, source = state_of(1), tmp_path / "source"
    if kind == "torch":
        torch.save(state, source)
    else:
        stock_save(state, source, InPieces())
    before = {each: each.read_bytes() for each in tmp_path.rglob("*") if each.is_file()}
    tier = {"name": "disk", "url": f"file://{tmp_path}/disk"}
    settings = config(runtime_dir, tiers=[tier])
    file = tmp_path / "run.yaml"
    file.write_text(json.dumps(settings))
    where = ("--config", str(file), "--json")
    done = run_command("import", str(source), "--step", "70", *where)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["step"], report["tier"], report["keys"]) == (70, "disk", 12)
    assert {each: each.read_bytes() for each in before} == before
    verified = run_command("verify", *where)
    assert verified.returncode == 0, verified.stderr
    assert [each["tier"] for each in json.loads(verified.stdout)["copies"]] == ["memory", "disk"]
    with Engine.open(settings) as engine:
        found = blank(state)
        assert engine.load(found) == 70
        assert same(found, state)
        save(engine, 71, state_of(2))  # the job goes on
        assert [each.step for each in engine.checkpoints()] == [71, 70]
    refused = run_command("import", str(source), "--step", "72", *where)
    assert refused.returncode == 2
    assert "holds 2 checkpoint(s) already" in refused.stderr


def test_a_round_trip_through_files_of_torch(runtime_dir: Path, tmp_path: Path):
    settings = config(runtime_dir)
    state = state_of(3)
    with Engine.open(settings) as engine:
        save(engine, 5, state)
    for format_ in ("dcp", "torch"):
        request = Request(out=tmp_path / format_, format=format_)
        export_checkpoint(load_config(settings, {}), Which(), request)
        source = tmp_path / f"{format_}-link"  # caches of models consist of links
        source.symlink_to(tmp_path / format_)
        for file in [*(tmp_path / format_).glob("*")]:
            file.rename(file.with_name(f"{file.name}.blob"))
            file.symlink_to(f"{file.name}.blob")
        again = settings | {"namespace": f"again-{format_}"}
        import_checkpoint(load_config(again, {}), source, 5)
        with Engine.open(again) as engine:
            found = blank(state)
            assert engine.load(found) == 5
        assert same(found, state)


def test_a_prefix_and_a_namespace_that_has_checkpoints(runtime_dir: Path, tmp_path: Path):
    """What a script saves has another level than its old files, and its random state."""
    settings, old = config(runtime_dir), state_of(4)
    with Engine.open(settings) as engine:
        save(engine, 5, {"train": {**old, "more": torch.ones(2)}, "random": "state"})
    source, folder = tmp_path / "old.pt", tmp_path / "folder"
    torch.save(old, source)
    stock_save(old, folder)
    lacks = "only step 5 has 2 of the keys: random, train.more"
    cases = [
        (source, "train.", lacks, 0), (source, "train", lacks, 0),
        (source, "", "only step 5 has 14 of the keys: random, train.model.columns, ", 12),
        (folder, "", "only step 5 has 14 of the keys: random, train.model.columns, ", 12),
    ]  # fmt: skip
    for path, prefix, text, more in cases:
        with pytest.raises(UsageError, match="holds 1 checkpoint") as refused:
            import_checkpoint(load_config(settings, {}), path, 7, prefix=prefix)
        assert text in str(refused.value)
        lines = str(refused.value).splitlines()[2:]
        assert [more] * len(lines) == [int(each.split()[4]) for each in lines]
        assert all(each.startswith("only the source has ") for each in lines)
        assert bool(lines) == (more > 0)
    with pytest.raises(UsageError, match="a prefix is for a file"):
        import_checkpoint(load_config(settings, {}), folder, 7, prefix="train.")
    again = settings | {"namespace": "again"}
    import_checkpoint(load_config(again, {}), source, 7, prefix="a.train.")
    with Engine.open(again) as engine:
        found = blank(old)
        assert engine.load({"a": {"train": found}}) == 7
        assert same(found, old)
    request = Request(out=tmp_path / "back.pt", format="torch")
    export_checkpoint(load_config(again, {}), Which(), request)
    assert torch.load(request.out)["a"]["train"]["optim"]["groups"] == old["optim"]["groups"]


def test_files_of_older_releases_of_torch(runtime_dir: Path, tmp_path: Path):
    state = state_of(6)
    old = tmp_path / "old.pt"
    torch.save(state, old, _use_new_zipfile_serialization=False)
    cases: list[tuple[Path, dict[str, Any]]] = [(old, state)]
    for folder in STOCK.glob("torch-*"):
        found: dict[str, Any] = {
            name: torch.empty(each.size, dtype=each.properties.dtype)
            if isinstance(each, TensorStorageMetadata)
            else None
            for name, each in dcp.FileSystemReader(folder)
            .read_metadata()
            .state_dict_metadata.items()
        }
        dcp.load(found, checkpoint_id=folder, no_dist=True)
        assert found["half"].tolist() == [[0, 1, 2], [3, 4, 5]]
        cases.append((folder, found))
    assert len(cases) == 3
    for number, (source, expected) in enumerate(cases):
        settings = config(runtime_dir, namespace=f"of-{number}")
        import_checkpoint(load_config(settings, {}), source, 5)
        with Engine.open(settings) as engine:
            found = blank(expected)
            assert engine.load(found) == 5
        assert same(found, expected), source


class Evil:
    def __reduce__(self) -> Any:
        return os.system, ("touch /tmp/tieredckpt-was-here",)


class Attribute:
    def __reduce__(self) -> Any:
        return getattr, (torch.Size, "count")


def test_files_that_are_refused(runtime_dir: Path, tmp_path: Path):
    found = load_config(config(runtime_dir), {})
    cases: dict[str, tuple[type[Exception], str]] = {}

    torch.save({"w": torch.ones(2), "evil": Evil()}, tmp_path / "evil.pt")
    cases["evil.pt"] = UsageError, r"evil\.pt holds posix\.system, which a load"
    torch.save({"when": Fraction(1, 2)}, tmp_path / "type.pt", _use_new_zipfile_serialization=False)
    cases["type.pt"] = UsageError, r"type\.pt holds fractions\.Fraction, which a load"
    inside_itself: list[Any] = []
    inside_itself.append(inside_itself)
    torch.save({"w": inside_itself}, tmp_path / "itself.pt")
    cases["itself.pt"] = IntegrityError, r"itself\.pt is malformed: RecursionError"
    torch.save([torch.ones(2)], tmp_path / "list.pt")
    cases["list.pt"] = UsageError, "holds a list, not a state dict"
    (tmp_path / "text.pt").write_text("no archive")
    cases["text.pt"] = UsageError, r"text\.pt is no file of torch\.save$"
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text("{}")
    save_file({"w": torch.ones(2)}, tmp_path / "model/model.safetensors")
    cases["model"] = UsageError, r"\.metadata \(Hugging Face's libraries wrote it\): load the model"
    cases["model/model.safetensors"] = UsageError, r"is no file of torch\.save \(Hugging Face's"
    (tmp_path / "empty").mkdir()
    cases["empty"] = UsageError, r"has no \.metadata"
    (tmp_path / "evil").mkdir()
    (tmp_path / "evil/.metadata").write_bytes(pickle.dumps(Evil()))
    cases["evil"] = UsageError, "which stock DCP does not write"
    (tmp_path / "noise").mkdir()
    (tmp_path / "noise/.metadata").write_bytes(b"\x80\x04noise")
    (tmp_path / "attribute").mkdir()
    (tmp_path / "attribute/.metadata").write_bytes(pickle.dumps(Attribute()))
    cases["attribute"] = IntegrityError, r"\.metadata is damaged: an attribute that no writer makes"
    cases["noise"] = IntegrityError, r"\.metadata is damaged"
    for name in ("short", "gone", "flipped"):
        stock_save(state_of(4), tmp_path / name)
        cases[name] = IntegrityError, "truncated|cannot be read|no tensor of stock DCP"
    data = tmp_path / "short/__0_0.distcp"
    os.truncate(data, data.stat().st_size - 5000)
    (tmp_path / "gone/__0_0.distcp").unlink()
    whole = (tmp_path / "flipped/__0_0.distcp").read_bytes()
    flip(tmp_path / "flipped/__0_0.distcp", whole.rindex(b"PK\x05\x06") + 1)
    stock_save({"w": torch.randn(4, 2)}, tmp_path / "twice", InPieces())
    of_twice = pickle.loads((tmp_path / "twice/.metadata").read_bytes())
    chunks = of_twice.state_dict_metadata["w"].chunks
    chunks[1] = chunks[0]  # of the same size
    (tmp_path / "twice/.metadata").write_bytes(pickle.dumps(of_twice))
    cases["twice"] = UsageError, "overlapping pieces of 'w', which leave a hole"
    for name, file in (("pipe", "pipe"), ("pipes", ".metadata"), ("piped", "__0_0.distcp")):
        if name != file:
            stock_save(state_of(4), tmp_path / name)
            (tmp_path / name / file).unlink()
        os.mkfifo(tmp_path / name / file if name != file else tmp_path / name)
        cases[name] = IntegrityError, f"{file} is not a regular file"
    for name, file in (("out", ".metadata"), ("outer", "__0_0.distcp")):
        stock_save(state_of(4), tmp_path / name)
        (tmp_path / name / file).rename(tmp_path / f"of-{name}")
        (tmp_path / name / file).symlink_to(tmp_path / f"of-{name}")
        cases[name] = IntegrityError, f"{file} is a link out of its folder"
    for name, (kind, text) in cases.items():
        with pytest.raises(kind, match=text):
            import_checkpoint(found, tmp_path / name, 1)
    assert not Path("/tmp/tieredckpt-was-here").exists()
    with Engine.open(config(runtime_dir)) as engine:
        assert engine.load({}) is None
