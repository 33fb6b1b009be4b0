"""What a simulated run leaves, and costs."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tieredckpt.cli.main import main
from tieredckpt.policy.config import Best, Every, Keep, Price, TierConfig
from tieredckpt.policy.forecast import POINTS_MAX, SAVES_MAX, SimulatedRun, forecast

GIB = 1 << 30
NVME = TierConfig(name="nvme", url="file:///n", every=Every(steps=10), keep=Keep(last=3))
S3 = TierConfig(
    name="s3", url="s3://b/c", scope="shared", every=Every(seconds=100.0), source="nvme",
    keep=Keep(last=2, every=Every(steps=500), best=Best(metric="loss", mode="min", n=1)),
    price=Price(gib_month=2.0, put_1000=3.0),
)  # fmt: skip


def run_of(steps: int, **changes: int) -> SimulatedRun:
    fields = {"steps": steps, "save_every": 5, "save_bytes": 4 * GIB, "ranks": 2} | changes
    return SimulatedRun(step_s=1.0, **fields)


def test_the_same_rules_as_in_a_real_run():
    memory, nvme, s3 = forecast(Keep(last=2), [NVME, S3], run_of(1200))
    assert (memory.kept, memory.saves, memory.cost_month) == ((1200, 1195), 240, None)
    assert nvme.kept == (1200, 1190, 1180)
    assert (nvme.objects, nvme.peak_bytes) == (3 * 3 + 1, 3 * 4 * GIB)
    assert s3.kept == (1105, 1005, 505), "every 100 s from the first save on; 505 passed 500"
    assert s3.reasons[-1] == "the first in its 500 steps"
    assert s3.saves == 12
    parts = 2 * GIB // S3.object.part_bytes
    assert s3.puts == 12 * (2 * (parts + 2) + 2), "parts, begin, complete; announced and committed"
    month = 30 * 86400
    assert s3.cost_month == pytest.approx(12 * 2.0 + s3.puts / (1200 / month) / 1000 * 3.0)


def test_curves_are_short_and_end_at_the_end():
    memory, nvme = forecast(Keep(last=1), [NVME], run_of(10_000))
    for each in (memory, nvme):
        assert len(each.curve) <= POINTS_MAX
        assert each.curve[-1].step == 10_000
        steps = [point.step for point in each.curve]
        assert steps == sorted(steps)


def test_runs_without_a_save_or_with_too_many():
    memory, nvme = forecast(Keep(last=1), [NVME], run_of(3))
    assert (memory.kept, nvme.curve, nvme.objects) == ((), (), 0)
    with pytest.raises(ValueError, match="save less often"):
        forecast(Keep(last=1), [], run_of(2 * SAVES_MAX, save_every=1))


def test_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    file = tmp_path / "c.yaml"
    file.write_text("namespace: r\ntiers: [{name: s3, url: 's3://bucket/c', keep: {last: 4}}]\n")

    def run(*arguments: str) -> tuple[int, str, str]:
        command = ["tieredckpt", "retention", "plan", "--config", str(file), *arguments]
        monkeypatch.setattr(sys, "argv", command)
        capsys.readouterr()
        with pytest.raises(SystemExit) as left:
            main()
        out, err = capsys.readouterr()
        return int(left.value.code or 0), out, err

    simulated = ("--simulate", "20", "--save-bytes", "2GiB", "--step-time", "1 min")
    code, out, _ = run(*simulated, "--price-gib-month", "0.5", "--json")
    assert code == 0
    told = json.loads(out)
    assert told["assumed"] == {"save_every": 1, "ranks": 1}
    assert (told["save_bytes"], told["step_seconds"]) == (2 * GIB, 60)
    memory, s3 = told["tiers"]
    assert (memory["cost_month"], s3["bytes"], s3["cost_month"]) == (None, 8 * GIB, 4.0)
    assert [each["step"] for each in s3["kept"]] == [20, 19, 18, 17]
    code, out, _ = run(*simulated)
    assert code == 0
    assert "20, 19, 18, 17" in out
    assert out.splitlines()[-1] == "assumed, as it was not given: --save-every 1, --ranks 1"
    assert "assumed" not in run(*simulated, "--save-every", "1", "--ranks", "1")[1]
    assert run("--plot", str(tmp_path / "p.png"))[0] == 2, "of a simulated run only"
    assert run("--simulate", "5", "--save-bytes", "2 stones")[0] == 2
    pytest.importorskip("matplotlib")
    assert run(*simulated, "--plot", str(tmp_path / "p.png"))[0] == 0
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
