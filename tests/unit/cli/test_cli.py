"""The parts of the command line that need no agent."""

from __future__ import annotations

import errno
import importlib.util
import json
import os
import signal
import socket
import sys
import threading
from pathlib import Path
from typing import Any

import click
import pytest
import trustme

from tieredckpt.agent.host import runtime
from tieredckpt.agent.host.runtime import MEMORY_FILE_SYSTEMS
from tieredckpt.cli import config as config_command
from tieredckpt.cli import metrics
from tieredckpt.cli.main import EXIT_CODES, cli, main
from tieredckpt.cli.output import print_json, print_table, size
from tieredckpt.cli.status import print_status
from tieredckpt.config.reader import to_yaml
from tieredckpt.config.schema import load_config
from tieredckpt.errors import TieredCkptError, UsageError
from tieredckpt.rpc import fd_passing
from tieredckpt.rpc.messages.agent import Health, NamespaceStatus, Status, TierStatus

YAML = """\
namespace: gpt-run-7
tiers:
  - {name: nvme, url: file:///mnt/nvme/ckpt, every: 10 steps, keep: {last: 3}}
  - {name: slow, url: "file:///mnt/a: b/#c", every: 30 min}
memory: {replicas: 2, replication_bandwidth: 2GiB/s}
discovery: {static: [host-a, "[fd00::1]:80"]}
network: {cidr: [10.0.0.0/8, "::1/128"]}
security: {token_env: "true"}
labels: {zone: "null", rack: "07", row: 7, shelf: "1.0"}
"""


TOKEN = "5f" * 16  # fixed: it stands in the names of tests, which all workers must agree on


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
    second.write_text(to_yaml(config.effective()))
    assert load_config(second, {}) == config


def config_file(folder: Path, *tiers: str, runtime_dir: Path | None = None) -> Path:
    """A configuration with these tier URLs, in ``folder``."""
    file = folder / "tieredckpt.yaml"
    listed = ", ".join(f"{{name: t{i}, url: 'file://{url}'}}" for i, url in enumerate(tiers))
    file.write_text(
        "namespace: gpt-run-7\n"
        "memory: {capacity: 64GiB, keep: {last: 2}}\n"
        f"tiers: [{listed}]\n" + (f"agent: {{runtime_dir: {runtime_dir}}}\n" if runtime_dir else "")
    )
    return file


def test_config_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    file = config_file(tmp_path, f"{tmp_path}/a", f"{tmp_path}/b")
    fits = ("config", "check", str(file), "--state-size", "8GiB", "--ranks", "8", "--json")
    assert run(monkeypatch, *fits) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["fits"] is True
    assert answer["memory"]["ring_slots"] == 5
    assert run(monkeypatch, "config", "check", str(file)) == 0
    assert "--state-size and --ranks" in capsys.readouterr().out
    assert run(monkeypatch, "config", "check", str(file), "--state-size", "800GiB") == 1
    assert "memory.capacity" in capsys.readouterr().err
    assert run(monkeypatch, "config", "check", str(file), "--state-size", "much") == 2
    assert "--state-size" in capsys.readouterr().err
    monkeypatch.setenv("TIEREDCKPT_MEMORY__KEEP__LAST", "4")
    assert run(monkeypatch, *fits) == 0
    assert json.loads(capsys.readouterr().out)["memory"]["ring_slots"] == 7


def check_of(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    text: str,
    folder: Path,
    *options: str,
    code: int = 0,
) -> dict[str, Any]:
    """What ``config check --json`` says of that YAML, with that exit code."""
    file = folder / "tieredckpt.yaml"
    file.write_text(text)
    assert run(monkeypatch, "config", "check", str(file), *options, "--json") == code
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    return answer


STATE = ("--state-size", "64MiB", "--ranks", "2")


def test_config_check_counts_the_copies_of_other_hosts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def need(text: str, *options: str) -> tuple[int, int, int]:
        answer = check_of(monkeypatch, capsys, text, tmp_path, *STATE, *options)
        memory = answer["memory"]
        assert memory["total_bytes"] == memory["replica_bytes"] + (
            2 * memory["ring_slots"] * memory["slot_bytes"]
        )
        return answer["replicas"], memory["ring_slots"], memory["replica_bytes"]

    slot = (32 << 20) + 4096
    assert need("") == need("", "--hosts", "1") == (0, 3, 0)
    assert need("", "--hosts", "2") == (1, 5, 2 * 3 * slot)
    assert need("memory: {replicas: 0}", "--hosts", "2") == (0, 3, 0)
    assert need("memory: {replicas: 2}") == (2, 5, 2 * 2 * 3 * slot)
    assert need("memory: {replicas: 2, keep: {last: 1}}", "--hosts", "9")[2] == 2 * 2 * 2 * slot
    listed = "discovery: {static: [a, b, c]}\nmemory: {replicas: 2}\nsecurity: {token_env: T}"
    assert need(listed) == (2, 5, 2 * 2 * 3 * slot)


def test_config_check_says_that_there_are_too_few_hosts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    few = "memory: {replicas: 3, require_replicas: %s}"
    answer = check_of(monkeypatch, capsys, few % "false", tmp_path, "--hosts", "2")
    assert [(p["key"], p["fatal"]) for p in answer["problems"]] == [("memory.replicas", False)]
    assert answer["problems"][0]["message"].startswith("1/3: ")
    assert answer["replicas"] == 1
    answer = check_of(monkeypatch, capsys, few % "true", tmp_path, "--hosts", "2", code=1)
    assert answer["problems"][0]["fatal"] is True
    shared = "tiers: [{name: a, url: 'file:///a', scope: shared}]"
    file = tmp_path / "shared.yaml"
    file.write_text(shared)
    assert run(monkeypatch, "config", "check", str(file), "--hosts", "2") in (0, 1)
    assert "not in this release" not in capsys.readouterr().err


def test_config_check_says_that_nothing_is_deleted_without_rules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(config_command, "file_system_of", lambda path: None)
    file = tmp_path / "tieredckpt.yaml"
    file.write_text(
        "namespace: x\n"
        "tiers:\n"
        f"  - {{name: a, url: 'file://{tmp_path}/a'}}\n"
        f"  - {{name: b, url: 'file://{tmp_path}/b', scope: shared}}\n"
        f"  - {{name: c, url: 'file://{tmp_path}/c', scope: shared, keep: {{}}}}\n"
        f"  - {{name: d, url: 'file://{tmp_path}/d', scope: shared, keep: all}}\n"
        f"  - {{name: e, url: 'file://{tmp_path}/e', scope: shared, keep: {{last: 3}}}}\n"
    )
    assert problems_of(monkeypatch, capsys, file, 0) == [
        ("tiers[1].keep", False), ("tiers[2].keep", False),
    ]  # fmt: skip
    assert run(monkeypatch, "config", "check", str(file), "--json") == 0
    answer = json.loads(capsys.readouterr().out)
    kept = [tier["keep"] for tier in answer["config"]["tiers"]]
    assert (kept[0]["last"], kept[1:4], kept[4]["last"]) == (3, ["all"] * 3, 3)
    assert run(monkeypatch, "config", "check", str(file)) == 0
    said = capsys.readouterr()
    assert "tiers[1].keep: tier b is shared by hosts and has no keep of its own" in said.err
    assert "nothing is ever deleted there" in said.err
    assert said.out.count("    keep: all") == 3


@pytest.mark.parametrize("text", ["", "# nothing\n", "{}"])
def test_config_check_says_that_a_file_sets_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], text: str
):
    (problem,) = check_of(monkeypatch, capsys, text, tmp_path)["problems"]
    assert problem["message"] == f"{tmp_path}/tieredckpt.yaml sets nothing: all defaults apply"
    assert run(monkeypatch, "config", "check", str(tmp_path / "tieredckpt.yaml")) == 0
    assert "warning: " + problem["message"] in capsys.readouterr().err


def test_config_check_refuses_a_view_of_the_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    file = config_file(tmp_path, "/proc/foo", "/sys/kernel/x/y", f"{tmp_path}/a")
    assert run(monkeypatch, "config", "check", str(file)) == 1
    lines = [line for line in capsys.readouterr().err.splitlines() if "will fail" in line]
    assert lines == [
        "will fail: tiers[0].url: /proc is on proc, a view of the kernel, which keeps no files "
        "(tieredckpt.yaml, line 3)",
        "will fail: tiers[1].url: /sys/kernel is on sysfs, a view of the kernel, which keeps no "
        "files (tieredckpt.yaml, line 3)",
    ]
    file = config_file(tmp_path, runtime_dir=Path("/proc/tck"))
    assert problems_of(monkeypatch, capsys, file, 1) == [("agent.runtime_dir", True)]


def test_config_check_looks_for_interfaces_and_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def found(text: str, code: int) -> list[tuple[str, bool]]:
        answer = check_of(monkeypatch, capsys, text, tmp_path, code=code)
        return [(problem["key"], problem["fatal"]) for problem in answer["problems"]]

    token, pem = tmp_path / "token", tmp_path / "a.pem"
    token.write_text(TOKEN)
    token.chmod(0o600)
    pem.touch()
    assert found("network: {interface: [lo, no-such-one]}", 1) == [("network.interface", True)]
    assert found("network: {interface: lo}", 0) == []
    assert found(f"security: {{token_file: {token}}}", 0) == []
    token.chmod(0o644)
    assert found(f"security: {{token_file: {token}}}", 1) == [("security.token_file", True)]
    monkeypatch.delenv("TCK_TEST_TOKEN", raising=False)
    assert found("security: {token_env: TCK_TEST_TOKEN}", 0) == [("security.token_env", False)]
    monkeypatch.setenv("TCK_TEST_TOKEN", TOKEN[:5])
    assert found("security: {token_env: TCK_TEST_TOKEN}", 1) == [("security.token_env", True)]
    tls = f"security: {{tls: {{cert: {pem}, key: {pem}.key, ca: {tmp_path}}}}}"
    assert found(tls, 1) == [("security.tls.key", True), ("security.tls.ca", True)]


def test_config_check_shakes_hands_with_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    leaf = (ca := trustme.CA()).issue_cert("127.0.0.1")
    files = {"cert": leaf.cert_chain_pems[0], "key": leaf.private_key_pem, "ca": ca.cert_pem}
    for name, pem in files.items():
        pem.write_to_path(tmp_path / name)
    tls = ", ".join(f"{name}: {tmp_path / name}" for name in files)
    text = f"security: {{tls: {{{tls}}}}}\nnetwork: {{cidr: %s}}"
    assert check_of(monkeypatch, capsys, text % "127.0.0.1/32", tmp_path)["problems"] == []
    (bad,) = check_of(monkeypatch, capsys, text % "127.0.0.2/32", tmp_path, code=1)["problems"]
    assert (bad["key"], bad["fatal"]) == ("security.tls", True)
    assert "is refused for 127.0.0.2: IP address mismatch" in bad["message"]
    (bad,) = check_of(monkeypatch, capsys, text % "198.51.100.0/24", tmp_path, code=1)["problems"]
    assert bad["key"] == "network.cidr"


def test_config_check_never_prints_a_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("TCK_TEST_TOKEN", TOKEN)
    file = tmp_path / "tieredckpt.yaml"
    for text in ("security: {token_env: TCK_TEST_TOKEN}", f"security: {{token: {TOKEN}}}"):
        file.write_text(text)
        run(monkeypatch, "config", "check", str(file))
        out, err = capsys.readouterr()
        assert "token_env" in out + err
        assert TOKEN not in out + err


def problems_of(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], file: Path, code: int
) -> list[tuple[str, bool]]:
    """Key and certainty of what ``config check`` finds, with that exit code."""
    assert run(monkeypatch, "config", "check", str(file), "--json") == code
    out, err = capsys.readouterr()
    found = json.loads(out)["problems"]
    assert all(each["message"] in err for each in found)
    return [(each["key"], each["fatal"]) for each in found]


def test_config_check_refuses_a_runtime_dir_that_is_too_long_for_a_socket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    file = config_file(tmp_path, runtime_dir=Path("/dev/shm") / ("x" * 100))
    assert problems_of(monkeypatch, capsys, file, 1) == [("agent.runtime_dir", True)]


@pytest.mark.parametrize(("kind", "warned"), [("ext4", True), ("tmpfs", False), (None, False)])
def test_config_check_warns_of_a_runtime_dir_on_a_disk(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    kind: str | None,
    warned: bool,
):
    monkeypatch.setattr(config_command, "file_system_of", lambda path: kind)
    file = config_file(tmp_path, runtime_dir=Path("/tmp/tck"))
    found = problems_of(monkeypatch, capsys, file, 0)
    assert found == [("agent.runtime_dir", False)] * warned


def test_the_file_system_of_a_folder():
    assert config_command.file_system_of(Path("/dev/shm")) in MEMORY_FILE_SYSTEMS
    assert config_command.file_system_of(Path("/proc")) == "proc"


def test_config_check_looks_at_a_runtime_dir_that_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(config_command, "file_system_of", lambda path: "tmpfs")
    monkeypatch.setattr(runtime, "check_socket_path", lambda path: None)
    folder = tmp_path / "open"
    folder.mkdir(mode=0o755)
    file = config_file(tmp_path, runtime_dir=folder)
    assert problems_of(monkeypatch, capsys, file, 1) == [("agent.runtime_dir", True)]
    folder.chmod(0o700)
    assert problems_of(monkeypatch, capsys, file, 0) == []


def test_config_check_finds_a_tier_that_cannot_be_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    plain, other, link = tmp_path / "file", tmp_path / "other", tmp_path / "link"
    plain.touch()
    other.touch()
    link.symlink_to(tmp_path / "nothing")
    file = config_file(tmp_path, f"{tmp_path}/new/below", str(plain), f"{other}/below", str(link))
    found = problems_of(monkeypatch, capsys, file, 1)
    assert found == [(f"tiers[{number}].url", True) for number in (1, 2, 3)]


def test_config_check_finds_a_tier_that_may_not_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def access(path: Path, mode: int) -> bool:
        return path != tmp_path / "closed"

    (tmp_path / "closed").mkdir()
    monkeypatch.setattr(config_command.os, "access", access)  # root may write everywhere
    file = config_file(tmp_path, f"{tmp_path}/closed/a/b", f"{tmp_path}/other")
    assert problems_of(monkeypatch, capsys, file, 1) == [("tiers[0].url", True)]


def test_config_check_finds_what_an_object_store_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(config_command, "file_system_of", lambda path: "tmpfs")
    here = {"obstore"}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name in here or None)
    trustme.CA().cert_pem.write_to_path(tmp_path / "ca.pem")
    (tmp_path / "text.pem").write_text("-----BEGIN CERTIFICATE-----\nhello\n")
    file = tmp_path / "tieredckpt.yaml"
    tiers = [
        {"name": "a", "url": "s3://bucket/a", "ca": f"{tmp_path}/none.pem"},
        {"name": "b", "url": "gs://bucket/b", "ca": f"{tmp_path}/ca.pem"},
        {"name": "c", "url": "smb://host/c"},
        {"name": "d", "url": "s3://bucket/d", "ca": f"{tmp_path}/text.pem"},
    ]
    tiers = [{**each, "keep": "all"} for each in tiers]
    file.write_text(json.dumps({"namespace": "x", "tiers": tiers}))  # which is YAML, too
    wrong = ["tiers[0].url", "tiers[0].ca", "tiers[2].url", "tiers[3].url", "tiers[3].ca"]
    assert problems_of(monkeypatch, capsys, file, 1) == [(key, True) for key in wrong]
    here.update(("botocore", "fsspec"))
    wrong.remove("tiers[0].url")
    wrong.remove("tiers[3].url")
    # tiers[2]: fsspec is there now, and what it needs itself is not
    assert problems_of(monkeypatch, capsys, file, 1) == [(key, True) for key in wrong]


def test_config_check_finds_what_no_store_can_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(config_command, "file_system_of", lambda path: "tmpfs")
    (tmp_path / "config").write_text("[profile there]\nregion = eu-west-1\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    for variable in ("AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ACCOUNT"):
        monkeypatch.delenv(variable, raising=False)
    file = tmp_path / "tieredckpt.yaml"
    file.write_text(
        "namespace: x\n"
        "tiers:\n"
        "  - {name: a, url: nope://host/a, keep: all}\n"
        "  - {name: b, url: fsspec+nope://host/b, keep: all}\n"
        "  - name: c\n"
        "    url: s3://bucket/c\n"
        "    profile: nobody\n"
        "    keep: {last: 3}\n"
        "  - {name: d, url: s3://bucket/d, profile: there, keep: all}\n"
        "  - {name: e, url: az://container/e, keep: all}\n"
    )
    assert run(monkeypatch, "config", "check", str(file), "--json") == 1
    found = json.loads(capsys.readouterr().out)["problems"]
    assert [(each["key"], each["fatal"], each["where"]) for each in found] == [
        ("tiers[0].url", True, "tieredckpt.yaml, line 3"),
        ("tiers[1].url", True, "tieredckpt.yaml, line 4"),
        ("tiers[2].profile", True, "tieredckpt.yaml, line 7"),
        ("tiers[4].url", False, "tieredckpt.yaml, line 10"),  # the job's environment may name it
    ]
    assert "there are there" in found[2]["message"]
    assert "Debug" not in found[3]["message"]
    assert run(monkeypatch, "config", "check", str(file)) == 1
    said = capsys.readouterr().err
    assert 'tiers[2].profile: there is no profile "nobody"' in said
    assert "(tieredckpt.yaml, line 7)" in said


def test_a_table_is_never_fitted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("COLUMNS", "40")
    name, state = "namespace-with-a-long-name", "x" * 300
    rows = [{"namespace": name, "state": state}, {"namespace": "[i]b", "state": "y"}]
    print_table("title", rows)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "title"
    assert lines[1].split() == ["namespace", "state"]
    assert lines[2].split() == [name, state]
    assert lines[3].split() == ["[i]b", "y"]


def test_a_terminal_obeys_no_text_of_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    key = "w\x1b[2J\n\x9b\u202eü"
    print_table(None, [{"name": key}])
    print_json(name=key)
    table, given = capsys.readouterr().out.split("{")
    assert table.splitlines()[1] == r"w\x1b[2J \x9b\u202eü"
    assert json.loads("{" + given) == {"name": key}
    assert "\x1b" not in given
    assert "\x9b" not in given

    def fail(**_: Any) -> None:
        raise UsageError(f"there is no key {key}")

    monkeypatch.setattr(cli, "main", fail)
    assert run(monkeypatch) == 2
    assert capsys.readouterr().err == "error: there is no key w\\x1b[2J\n\\x9b\\u202eü\n"


def tier_status(name: str, error: str | None) -> TierStatus:
    return TierStatus(
        name=name, url="file:///x", scope="host", available=error is None, error=error,
        checkpoints=1, stored_bytes=1, queued=0, active_save_id=None, retaining=False,
        newest_step=1, lag_steps=0,
        spilled_bytes_total=1, spill_seconds_total=1.0, quarantined=0,
    )  # fmt: skip


def test_status_shows_a_tiers_error_on_its_own_line(capsys: pytest.CaptureFixture[str]):
    error = "cannot make /mnt/nvme/ckpt/gpt-run-7: [Errno 20] Not a directory:\n  " + "y" * 120
    namespace = NamespaceStatus(
        name="gpt-run-7", capacity_bytes=1, slot_bytes=1, slots=1, free_slots=0, sessions=0,
        checkpoints=1, newest_step=1, attempt=1, skipped_saves=0,
        tiers=(tier_status("nvme", error), tier_status("slow", None)),
    )  # fmt: skip
    health = Health(api=1, version="0", pid=1, host_id="h", uptime_s=1.0)
    print_status(
        Status(
            health=health,
            runtime_dir="/r",
            survives="process",
            rss_bytes=1,
            shm_free_bytes=1,
            shm_total_bytes=1,
            namespaces=(namespace,),
        )
    )
    lines = capsys.readouterr().out.splitlines()
    (row,) = (line for line in lines if line.startswith("gpt-run-7  nvme"))
    assert row.endswith("unavailable")
    assert lines[-1] == f"tier nvme of gpt-run-7: {' '.join(error.split())}"


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
    assert path in (("run",), ("agent", "run"), ("agent", "metrics")) or "--json" in options


def test_every_error_of_ours_has_an_exit_code():
    assert EXIT_CODES[-1][0] is TieredCkptError


def test_a_folder_that_may_not_be_searched_is_no_failure_of_the_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Path.is_dir raises PermissionError there; root, which runs tests, may search all."""

    def is_dir(path: Path) -> bool:
        if path != tmp_path:
            raise PermissionError(13, "Permission denied", str(path))
        return True

    monkeypatch.setattr(Path, "is_dir", is_dir)
    assert config_command.tmpfs_of(tmp_path / "in" / "run")[0] == tmp_path


def test_commands_say_that_they_cannot_ask_another_users_agent(
    runtime_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    with fd_passing.listen(runtime_dir / "agent.sock"):
        monkeypatch.setattr(fd_passing, "peer_uid", lambda sock: 4242)
        for words in (["ls"], ["verify"], ["status"], ["agent", "metrics"],
                      ["agent", "metrics", "--listen", "127.0.0.1:0"]):  # fmt: skip
            assert run(monkeypatch, *words, "--runtime-dir", str(runtime_dir)) == 4, words
            out, err = capsys.readouterr()
            assert "user 4242 listens on" in err
            assert "sudo -u '#4242'" in err
            assert not out, "nothing is known of it"
        assert run(monkeypatch, "doctor", "--runtime-dir", str(runtime_dir), "--json") == 1
        checks = {each["check"]: each for each in json.loads(capsys.readouterr().out)["checks"]}
        assert checks["agent"]["fix"].startswith("run this process as that user")


def test_metrics_are_served_until_sigterm(monkeypatch: pytest.MonkeyPatch):
    """Also by the first process of a container, whose SIGTERM does nothing without a handler."""
    monkeypatch.setattr(metrics.click, "echo", lambda *_, **__: signal.raise_signal(signal.SIGTERM))
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    watch = threading.Timer(30, lambda: os.kill(os.getpid(), signal.SIGINT))
    watch.start()
    try:
        metrics._serve(("127.0.0.1", 0), bytes)
    finally:
        watch.cancel()
        signal.signal(signal.SIGTERM, before)


def test_a_socket_that_may_not_be_opened_is_named(
    runtime_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    class Shut(socket.socket):
        def connect(self, address: Any) -> None:
            raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(fd_passing.socket, "socket", Shut)
    assert run(monkeypatch, "status", "--runtime-dir", str(runtime_dir)) == 4
    assert f"agent.sock: Permission denied; {runtime_dir} belongs to" in capsys.readouterr().err


def test_a_log_is_named_only_if_there_is_one(
    runtime_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    for there in (False, True):
        assert run(monkeypatch, "status", "--runtime-dir", str(runtime_dir)) == 4
        assert ("agent.log" in capsys.readouterr().err) == there
        (runtime_dir / "agent.log").touch()
