"""``tieredckpt export``: every format, from every tier, beside live jobs and without them."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import load_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.testing._internal.two_tensor import TwoTensor

import tieredckpt
from tests.support.commands import tieredckpt as run_command
from tests.support.faults import Site, expected, on_all, ranks
from tests.support.leftovers import shm
from tests.support.pieces import InPieces
from tests.support.states import blank, config, flip, manifest_of, same, save, slot_of
from tieredckpt.config.schema import Config, load_config
from tieredckpt.engine import Engine
from tieredckpt.errors import IntegrityError, NotFoundError, UsageError
from tieredckpt.export import export as exporting
from tieredckpt.export.export import Report, Request, export_checkpoint
from tieredckpt.export.imports import import_checkpoint
from tieredckpt.export.source import Which
from tieredckpt.export.tree import contents
from tieredckpt.testing.s3_server import ACCESS_KEY, SECRET_KEY, S3Server

MIB = 1 << 20
ROOT = Path(__file__).parents[2]


def export(
    settings: dict[str, Any] | Config, out: Path, format_: Any, *, which: Which | None = None,
    **more: Any,
) -> Report:  # fmt: skip
    found = settings if isinstance(settings, Config) else load_config(settings, {})
    request = Request(out=out, format=format_, **more)
    seen: list[tuple[int, int]] = []
    report = export_checkpoint(found, which or Which(), request, lambda *now: seen.append(now))
    assert seen[-1][0] == seen[-1][1] >= 0
    return report


def flat(state: Any, path: str = "") -> dict[str, Any]:
    items = state.items() if isinstance(state, dict) else enumerate(state)
    found: dict[str, Any] = {}
    for key, value in items:
        name = f"{path}.{key}" if path else str(key)
        nested = isinstance(value, dict | list)
        found |= flat(value, name) if nested else {name: value}
    return found


def tensors(state: Any) -> dict[str, torch.Tensor]:
    return {k: v for k, v in flat(state).items() if isinstance(v, torch.Tensor)}


def files_of(folder: Path) -> list[str]:
    return sorted(each.name for each in folder.iterdir())


# --- formats --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A finished run of two ranks, its disk alone, and its whole state."""
    folder = tmp_path_factory.mktemp("sharded")
    runtime_dir = shm() / f"tck-test-export-{os.getpid()}"
    runtime_dir.mkdir(mode=0o700)
    site = Site(runtime_dir, folder / "disk")
    try:
        with site.forked_agent(), ranks(2, seed=7, mib=3) as job:
            on_all(job, lambda _: ("open", site.config))
            on_all(job, lambda _: ("save", 4))
            on_all(job, lambda _: ("wait", 4, "disk"))
            site.lose_memory()
    finally:
        for path in sorted(runtime_dir.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        runtime_dir.rmdir()
    return folder / "disk", expected(4, 7, 3, 2)


def only_disk(disk: Path) -> dict[str, Any]:
    return {
        "namespace": "run",
        "tiers": [{"name": "disk", "url": f"file://{disk}"}],
        "agent": {"runtime_dir": "/nowhere"},
        "recovery": {"wait": "0s"},
    }


def test_safetensors_of_a_resharded_state(sharded: Any, tmp_path: Path):
    disk, state = sharded
    report = export(only_disk(disk), tmp_path / "out", "safetensors", shard_bytes=2 * MIB)
    wanted = tensors(state)
    assert (report.step, report.tensors, report.values) == (4, len(wanted), 0)
    assert set(report.left_out) == flat(state).keys() - wanted.keys()
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == report.bytes
    assert set(index["weight_map"]) == wanted.keys()
    shards = sorted(set(index["weight_map"].values()))
    assert len(shards) > 2
    assert shards[0] == f"model-00001-of-{len(shards):05d}.safetensors"
    assert files_of(tmp_path / "out") == [*shards, "model.safetensors.index.json"]
    found: dict[str, torch.Tensor] = {}
    for shard in shards:
        with safe_open(tmp_path / "out" / shard, "pt") as opened:
            assert opened.metadata() == {"format": "pt"}
        found |= load_file(tmp_path / "out" / shard)
    assert same({key: found[key] for key in wanted}, wanted)


def test_torch_of_a_resharded_state(sharded: Any, tmp_path: Path):
    disk, state = sharded
    report = export(only_disk(disk), tmp_path / "weights.pt", "torch")
    assert report.left_out == {}
    assert report.values == len(flat(state)) - len(tensors(state))
    found = torch.load(tmp_path / "weights.pt", weights_only=True)
    assert found.keys() == state.keys()
    assert same({key: found[key] for key in state}, state)
    assert files_of(tmp_path) == ["weights.pt"]


def test_dcp_of_a_resharded_state(sharded: Any, tmp_path: Path):
    disk, state = sharded
    export(only_disk(disk), tmp_path / "out", "dcp")
    found = blank(state)
    reader = dcp.FileSystemReader(tmp_path / "out")
    with pytest.warns(UserWarning, match=r"torch\.distributed is"):
        dcp.load(found, storage_reader=reader)
    assert same(found, state)
    dcp_to_torch_save(tmp_path / "out", tmp_path / "converted.pt")
    found = torch.load(tmp_path / "converted.pt", weights_only=True)
    assert same({key: found[key] for key in state}, state)


def test_keys_a_prefix_and_a_type(sharded: Any, tmp_path: Path):
    disk, state = sharded
    choice = {"keys": ("model.[!o]*",), "strip": "model.", "dtype": "fp32"}  # all but "odd"
    export(only_disk(disk), tmp_path / "out", "safetensors", **choice)
    assert files_of(tmp_path / "out") == ["model.safetensors"]
    found = load_file(tmp_path / "out/model.safetensors")
    wanted = {
        key: value.float() if value.is_floating_point() else value
        for key, value in state["model"].items()
        if key != "odd"
    }
    with pytest.raises(UsageError, match=r"'model\.odd' has values that torch\.float16 cannot"):
        export(only_disk(disk), tmp_path / "odd", "torch", keys=("model.odd",), dtype="fp16")
    assert files_of(tmp_path) == ["out"], "nothing is left of the export that failed"
    assert found.keys() == wanted.keys()
    for key, value in wanted.items():  # a cast NaN may have other bits
        assert torch.equal(found[key].nan_to_num(), value.nan_to_num()), key
        assert found[key].dtype == value.dtype
    report = export(only_disk(disk), tmp_path / "w.pt", "torch", **(choice | {"dtype": None}))
    found = torch.load(tmp_path / "w.pt", weights_only=True)
    assert found.keys() == wanted.keys()
    assert all(same(found[key], state["model"][key]) for key in wanted)
    assert report.values == 0


@pytest.mark.usefixtures("served")
def test_pieces_that_are_columns(runtime_dir: Path, tmp_path: Path):
    """Rows of the export lie in several pieces; wide and narrow ones, cast and not."""
    settings = config(runtime_dir)
    state = {"wide": torch.randn(40, 9000), "narrow": torch.randn(5000, 7).double()}
    with Engine.open(settings) as engine:
        save(engine, 1, state, planner=InPieces(1))
    found: Any
    export(settings, tmp_path / "out", "safetensors")
    found = load_file(tmp_path / "out/model.safetensors")
    assert same({key: found[key] for key in state}, state)
    export(settings, tmp_path / "w.pt", "torch", dtype="bf16")
    found = torch.load(tmp_path / "w.pt", weights_only=True)
    assert same(dict(found), {key: value.bfloat16() for key, value in state.items()})
    export(settings, tmp_path / "dcp", "dcp", strip="na")
    found = {"wide": torch.zeros(40, 9000), "rrow": torch.zeros(5000, 7).double()}
    with pytest.warns(UserWarning, match=r"torch\.distributed is"):
        dcp.load(found, storage_reader=dcp.FileSystemReader(tmp_path / "dcp"))
    assert same([found["wide"], found["rrow"]], [*state.values()])


@pytest.mark.usefixtures("served")
def test_values_per_rank_values_and_tensors_inside_of_values(runtime_dir: Path, tmp_path: Path):
    state = {
        "rng": tieredckpt.per_rank(tieredckpt.RandomState()),
        "pair": (torch.arange(5), torch.ones(2, 3).t()),
        "device": torch.device("cpu"),
        "path": tmp_path,  # which weights_only refuses
        "columns": torch.arange(12.0).reshape(3, 4).t(),
        "none": torch.empty(0, 4),
    }
    settings = config(runtime_dir)
    with Engine.open(settings) as engine, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the path, which engine.load refuses, too
        save(engine, 3, state)
    report = export(settings, tmp_path / "w.pt", "torch")
    assert list(report.left_out) == ["path"]
    found = torch.load(tmp_path / "w.pt", weights_only=True)
    assert found["rng"]["per_rank:rank:0"].startswith(b"tieredckpt.per_rank 1 rank 0 1\n")
    assert all(map(same, found["pair"], state["pair"]))
    assert same(found["columns"], state["columns"])
    assert found["none"].shape == (0, 4)
    export(settings, tmp_path / "out", "dcp")
    back = {"pair": None, "rng": {"per_rank:rank:0": b""}, "path": None}
    with pytest.warns(UserWarning, match=r"torch\.distributed is"):
        dcp.load(back, storage_reader=dcp.FileSystemReader(tmp_path / "out"))
    assert back["path"] == tmp_path
    assert all(map(same, back["pair"], state["pair"]))
    assert back["rng"] == found["rng"]


def trained() -> tuple[dict[str, Any], Any]:
    """The state of a training as ``torch.save`` is given it, after two steps; and its objects."""
    torch.manual_seed(1)
    model = torch.nn.Linear(3, 2)
    adam, sgd = torch.optim.AdamW([model.weight]), torch.optim.SGD([model.bias], lr=0.1)
    schedule = torch.optim.lr_scheduler.MultiStepLR(sgd, [3, 4], gamma=0.5)
    for _ in range(2):
        model(torch.ones(3)).sum().backward()
        for each in (adam, sgd, schedule):
            each.step()
    objects = {"model": model, "adam": adam, "sgd": sgd, "schedule": schedule}
    state = {name: each.state_dict() for name, each in objects.items()}
    return state | {"pairs": {(0, "a"): 1, None: [{}, {2: 3}, {}]}}, objects


def alike(one: Any, other: Any) -> bool:
    """Bit for bit, with the same types of keys in any order."""
    if isinstance(other, dict):
        keys = [{(type(key), key) for key in each} for each in (one, other)]
        return keys[0] == keys[1] and all(alike(one[key], other[key]) for key in other)
    if isinstance(other, list):
        return len(one) == len(other) and all(map(alike, one, other))
    return same(one, other)


def continues(file: dict[str, Any], state: dict[str, Any]) -> None:
    """Make sure that a new training that gets ``file`` goes on as one that gets ``state``."""
    ends = []
    for loaded in (file, state):
        _, objects = trained()
        for name, each in objects.items():
            each.load_state_dict(copy.deepcopy(loaded[name]))
        for _ in range(3):
            objects["model"](torch.ones(3)).sum().backward()
            for name in ("adam", "sgd", "schedule"):
                objects[name].step()
        ends.append([objects["model"].state_dict(), objects["schedule"].get_last_lr()])
    assert same(ends[0], ends[1])
    assert ends[0][1] == [0.025], "it passed both milestones"


@pytest.mark.usefixtures("served")
def test_keys_that_are_no_text_come_back(runtime_dir: Path, tmp_path: Path):
    settings = config(runtime_dir)
    state, _ = trained()
    with Engine.open(settings) as engine:
        engine.async_save(state, 2).result()
    report = export(settings, tmp_path / "w.pt", "torch")
    assert (report.text_keys, report.missing, report.left_out) == ([], [], {})
    found = torch.load(tmp_path / "w.pt", weights_only=True)
    assert alike(found, state)
    continues(found, state)
    again = settings | {"namespace": "imported"}
    import_checkpoint(load_config(again, {}), tmp_path / "w.pt", 2)
    export(again, tmp_path / "again.pt", "torch")
    assert alike(torch.load(tmp_path / "again.pt", weights_only=True), state)


@pytest.mark.usefixtures("served")
def test_what_plain_saves_leave_in_doubt_is_named(runtime_dir: Path, tmp_path: Path):
    settings = config(runtime_dir)
    state, _ = trained()
    with Engine.open(settings) as engine:
        save(engine, 2, state)
    report = export(settings, tmp_path / "w.pt", "torch", keys=("adam.*", "schedule.*"))
    assert (report.text_keys, report.missing) == (["adam.state", "schedule.milestones"], [])
    file = tmp_path / "run.yaml"
    file.write_text(json.dumps(settings))
    command = ("export", "2", str(tmp_path / "n.pt"), "--format", "torch", "--config", str(file))
    done = run_command(*command, "--number-keys")
    assert done.returncode == 0, done.stderr
    assert "may have been numbers" not in done.stderr
    assert "is not in the checkpoint: sgd.state, pairs.None.0" in done.stderr
    found = torch.load(tmp_path / "n.pt", weights_only=True)
    assert found["schedule"]["milestones"] == {3: 1, 4: 1}
    continues(found | {"sgd": found["sgd"] | {"state": {}}}, state)
    (tmp_path / "n.pt").unlink()
    done = run_command(*command)
    assert "(--number-keys): adam.state, schedule.milestones, pairs.None.1" in done.stderr


@pytest.mark.usefixtures("served")
def test_wrapper_subclasses_are_refused_by_key(runtime_dir: Path, tmp_path: Path):
    settings = config(runtime_dir)
    with Engine.open(settings) as engine:
        state = {"w": torch.ones(4), "two": TwoTensor(torch.ones(3, 2), torch.zeros(3, 2))}
        save(engine, 1, state)
    for format_ in ("safetensors", "torch", "dcp"):
        with pytest.raises(UsageError, match="'two' was saved as the inner tensors"):
            export(settings, tmp_path / "out", format_)
    export(settings, tmp_path / "out", "safetensors", keys=("w",))
    assert load_file(tmp_path / "out/model.safetensors").keys() == {"w"}
    leaves = {each.name: each for each in contents(load_config(settings, {}), Which()).leaves}
    two = leaves["two"]
    assert (two.shape, two.bytes, two.segments) == ((3, 2), 48, (0,))
    assert two.wrapper is not None
    assert two.wrapper.endswith("TwoTensor")
    assert leaves.keys() == state.keys()


# --- sources --------------------------------------------------------------------------------------


@pytest.mark.usefixtures("served")
def test_a_damaged_block_comes_from_the_next_copy_or_nothing_does(
    runtime_dir: Path, tmp_path: Path
):
    settings = config(runtime_dir, tiers=[{"name": "disk", "url": f"file://{tmp_path}/disk"}])
    state = {"w": torch.randn(3 << 20), "small": torch.ones(3)}
    with Engine.open(settings) as engine:
        save(engine, 5, state)
        engine.wait(5, "disk", 60)
        (segment,) = manifest_of(engine, 5).segments
        slot = slot_of(runtime_dir, segment.id)
        flip(slot, 4096 + (5 << 20))
        report = export(settings, tmp_path / "out", "safetensors")
        assert report.repaired_blocks == 1
        assert set(report.bytes_by_tier) == {"memory", "disk"}
        found = load_file(tmp_path / "out/model.safetensors")
        assert same({key: found[key] for key in state}, state)
        (copy,) = (tmp_path / "disk").rglob(f"*{segment.id}*")
        flip(copy, 5 << 20)
        for format_ in ("safetensors", "dcp", "torch"):
            with pytest.raises(IntegrityError, match="no copy has these blocks intact"):
                export(settings, tmp_path / "bad", format_)
        assert files_of(tmp_path) == ["disk", "out"], "neither a file nor the start of one"


@pytest.mark.usefixtures("served")
def test_beside_a_live_job_that_goes_on(
    runtime_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The checkpoint is deleted while it is exported; another one is not, and nothing is left."""
    settings = config(runtime_dir, memory={"keep": {"last": 1}})
    with Engine.open(settings) as engine:
        save(engine, 1, {"w": torch.ones(1000)})
        attempts = sorted((runtime_dir / "ns").rglob("*"))
        export(settings, tmp_path / "one.pt", "torch")
        assert sorted((runtime_dir / "ns").rglob("*")) == attempts, "no record of any kind"
        chosen = exporting.select

        def chosen_and_overtaken(*given: Any) -> Any:
            for step in (2, 3, 4):
                save(engine, step, {"w": torch.full((1000,), float(step))})
            return chosen(*given)

        monkeypatch.setattr(exporting, "select", chosen_and_overtaken)
        with pytest.raises(NotFoundError, match=r"step 1 \(.*was deleted by retention while"):
            export(settings, tmp_path / "two.pt", "torch")
        monkeypatch.undo()
        export(settings, tmp_path / "three.pt", "torch", which=Which(step=4))
        save(engine, 5, {"w": torch.zeros(1000)})  # no lock is left
        words = ("export", "5", str(tmp_path / "five.pt"), "--format", "torch")
        done = run_command(*words, "--runtime-dir", str(runtime_dir))  # without a configuration
        assert done.returncode == 0, done.stderr
    assert files_of(tmp_path) == ["five.pt", "one.pt", "three.pt"]
    assert float(torch.load(tmp_path / "three.pt")["w"][0]) == 4


@pytest.mark.usefixtures("served")
def test_what_memory_lets_go_meanwhile_comes_from_the_disk(
    runtime_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    tier = {"name": "disk", "url": f"file://{tmp_path}/disk"}
    settings = config(runtime_dir, memory={"keep": {"last": 1}}, tiers=[tier])
    with Engine.open(settings) as engine:
        save(engine, 1, {"w": torch.ones(1000)})
        engine.wait(1, "disk", 60)
        chosen = exporting.select

        def chosen_and_overtaken(*given: Any) -> Any:
            for step in (2, 3):
                save(engine, step, {"w": torch.zeros(1000)})
                engine.wait(step, "disk", 60)
            return chosen(*given)

        monkeypatch.setattr(exporting, "select", chosen_and_overtaken)
        report = export(settings, tmp_path / "w.pt", "torch")
    assert (report.step, set(report.bytes_by_tier)) == (1, {"disk"})
    assert same(dict(torch.load(tmp_path / "w.pt")), {"w": torch.ones(1000)})


@pytest.fixture
def _credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)


@pytest.mark.usefixtures("_credentials", "starts_agent")  # with these credentials
def test_from_a_bucket_on_another_machine(
    runtime_dir: Path, tmp_path: Path, s3_server: S3Server, s3_prefix: str
):
    store = {"endpoint": s3_server.endpoint, "allow_http": True}
    bucket = {"name": "s3", "url": f"s3://{s3_prefix}", **store}
    state = {"w": torch.randn(2 << 20), "half": torch.randn(77).bfloat16()}
    with Engine.open(config(runtime_dir, tiers=[bucket])) as engine:
        save(engine, 5, state)
        engine.wait(5, "s3", 120)
    agent = {"runtime_dir": str(tmp_path / "none")}
    file = tmp_path / "bucket.yaml"
    file.write_text(json.dumps({"namespace": "test", "tiers": [bucket], "agent": agent}))
    command = ("export", "latest", str(tmp_path / "out"), "--format", "safetensors")
    done = run_command(*command, "--config", str(file), "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert set(report["bytes_by_tier"]) == {"s3"}
    assert report["step"] == 5
    found = load_file(tmp_path / "out/model.safetensors")
    assert same({key: found[key] for key in state}, state)
    assert not (tmp_path / "none").exists()


# --- memory ---------------------------------------------------------------------------------------

CHILD = """
import sys, threading, time
import tieredckpt.export.safetensors, tieredckpt.export.torch_files
from tieredckpt.cli.main import cli
def used():
    with open("/proc/self/status") as file:
        return int(file.read().partition("RssAnon:")[2].split()[0]) >> 10
def watch():
    global peak
    while True:
        peak = max(peak, used())
        time.sleep(0.002)
peak = imported = used()
threading.Thread(target=watch, daemon=True).start()
for words in sys.stdin:
    cli.main(words.split(), standalone_mode=False)
print(peak - imported, file=sys.stderr)
"""


@pytest.mark.usefixtures("served")
def test_the_data_takes_no_memory_of_the_process(runtime_dir: Path, tmp_path: Path):
    """At most 64 MiB beside torch and all, of a state of 200 MiB with one tensor of 128 MiB."""
    tier = {"name": "disk", "url": f"file://{tmp_path}/disk"}
    settings = config(runtime_dir, memory={"capacity": "1GiB", "keep": {"last": 1}}, tiers=[tier])
    state = {"large": torch.ones(32 << 20), "others": [torch.ones(4 << 20) for _ in range(5)]}
    with Engine.open(settings) as engine:
        save(engine, 5, state)
        engine.wait(5, "disk", 120)
    away = settings | {"agent": {"runtime_dir": str(tmp_path / "none")}}
    cases = {
        "torch": (settings, "torch", ()),
        "cast": (away, "safetensors", ("--dtype", "bf16")),
    }
    lines = []
    for name, (found, format_, more) in cases.items():
        file = tmp_path / f"{name}.yaml"
        file.write_text(json.dumps(found))
        words = ["export", "5", str(tmp_path / name), "--format", format_, *more]
        lines.append(" ".join([*words, "--config", str(file)]))
    done = subprocess.run(
        [sys.executable, "-c", CHILD], input="\n".join(lines),
        capture_output=True, text=True, timeout=200, check=False, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert int(done.stderr.split()[-1]) < 64


# --- the command ----------------------------------------------------------------------------------


def test_the_command(sharded: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    disk, state = sharded
    file = tmp_path / "run.yaml"
    file.write_text(json.dumps(only_disk(disk)))
    where = ("--config", str(file))
    (tmp_path / "empty").mkdir()
    command = ("export", "4", str(tmp_path / "empty"), "--format", "dcp", *where)
    done = run_command(*command)
    assert done.returncode == 0, done.stderr
    assert "read from disk" in done.stdout
    refused = run_command(*command)
    assert refused.returncode == 2
    assert "empty exists" in refused.stderr
    save_id = contents(load_config(only_disk(disk), {}), Which()).manifest.save_id
    out = str(tmp_path / "w.safetensors")
    named = run_command("export", save_id[:24], out, "--format", "safetensors", *where)
    assert named.returncode == 0, named.stderr
    assert "not exported: 1" in named.stdout
    assert "meta.step" in named.stdout
    for step, code, text in (("9", 1, "step 9"), ("newest", 2, "`latest`")):
        missing = run_command("export", step, str(tmp_path / "x"), "--format", "torch", *where)
        assert missing.returncode == code
        assert text in missing.stderr

    shown = run_command("show", "latest", "--json", *where)
    assert shown.returncode == 0, shown.stderr
    keys = {each["name"]: each for each in json.loads(shown.stdout)["keys"]}
    assert keys.keys() == flat(state).keys()
    embed = state["model"]["embed"]
    assert keys["model.embed"] == {
        "name": "model.embed", "path": ["model", "embed"], "dtype": "float32",
        "shape": list(embed.shape), "wrapper": None, "bytes": embed.nbytes, "segments": [0, 1],
    }  # fmt: skip
    assert keys["meta.step"]["shape"] is None
    assert keys["meta.step"]["bytes"] > 0
    for segment in json.loads(shown.stdout)["segments"]:
        assert [place.split()[0] for place in segment["held by"]] == ["disk"]
    monkeypatch.setenv("COLUMNS", "30")  # a terminal that is narrower than a line of it
    tree = run_command("show", "4", "--tree", *where).stdout
    assert f"embed  float32 {list(embed.shape)}" in tree
    assert "segment 0, 1" in tree
    assert sorted(files_of(tmp_path)) == ["empty", "run.yaml", "w.safetensors"]
