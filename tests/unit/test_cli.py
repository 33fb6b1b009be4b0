"""The parts of the command line that need no agent."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click
import pytest

from tieredckpt.cli.config import as_yaml
from tieredckpt.cli.main import EXIT_CODES, cli, main
from tieredckpt.cli.show import size
from tieredckpt.errors import TieredCkptError
from tieredckpt.policy.config import load_config

YAML = """\
namespace: gpt-run-7
memory: {capacity: 64GiB, keep: {last: 2}}
tiers:
  - {name: nvme, url: file:///mnt/nvme/ckpt, every: 10 steps, keep: {last: 3}}
  - {name: slow, url: "file:///mnt/a: b/#c", every: 30 min}
"""


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["tieredckpt", *arguments])
    with pytest.raises(SystemExit) as left:
        main()
    return int(left.value.code or 0)


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(None, "-"), (0, "0 B"), (999, "999 B"), (4096, "4 KiB"), (1000 << 10, "0.977 MiB"),
     (3 << 29, "1.5 GiB"), (80 << 30, "80 GiB"), (5 << 60, "5120 PiB")],
)  # fmt: skip
def test_size(num_bytes: int | None, text: str):
    assert size(num_bytes) == text


def test_effective_configuration_is_yaml_that_means_the_same(tmp_path: Path):
    first, second = tmp_path / "a.yaml", tmp_path / "b.yaml"
    first.write_text(YAML)
    config = load_config(first, {})
    second.write_text("\n".join(as_yaml(config.effective())))
    assert load_config(second, {}) == config


def test_config_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    file = tmp_path / "tieredckpt.yaml"
    file.write_text(YAML)
    fits = ("config", "check", str(file), "--state-size", "8GiB", "--ranks", "8", "--json")
    assert run(monkeypatch, *fits) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["fits"] is True
    assert answer["memory"]["ring_slots"] == 5
    assert run(monkeypatch, "config", "check", str(file), "--state-size", "800GiB") == 1
    assert "memory.capacity" in capsys.readouterr().err
    assert run(monkeypatch, "config", "check", str(file), "--state-size", "much") == 2
    assert "--state-size" in capsys.readouterr().err
    monkeypatch.setenv("TIEREDCKPT_MEMORY__KEEP__LAST", "4")
    assert run(monkeypatch, *fits) == 0
    assert json.loads(capsys.readouterr().out)["memory"]["ring_slots"] == 7


@pytest.mark.parametrize("arguments", [("--help",), ("--version",)])
def test_help_and_version(monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]):
    assert run(monkeypatch, *arguments) == 0


def commands(
    group: click.Group, path: tuple[str, ...] = ()
) -> list[tuple[tuple[str, ...], click.Command]]:
    found: list[tuple[tuple[str, ...], click.Command]] = []
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            found += commands(command, (*path, name))
        else:
            found.append(((*path, name), command))
    return found


@pytest.mark.parametrize(
    ("path", "command"),
    commands(cli),
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_every_command_has_examples_and_json(path: tuple[str, ...], command: click.Command):
    assert "Example" in (command.help or ""), path
    options = {option for parameter in command.params for option in parameter.opts}
    assert path == ("agent", "run") or "--json" in options


def test_every_error_of_ours_has_an_exit_code():
    assert EXIT_CODES[-1][0] is TieredCkptError
