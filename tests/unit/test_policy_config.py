"""The configuration: what it means, and what it says when it is wrong."""

from __future__ import annotations

import json
import pickle
import time
from pathlib import Path

import pytest
import yaml

from tieredckpt.errors import ConfigError
from tieredckpt.policy.config import (
    Config,
    Every,
    Keep,
    check_hosts,
    load_config,
    resolve_namespace,
)

EXAMPLE = """\
namespace: gpt-run-7
memory: {capacity: 64GiB, keep: {last: 2}}
tiers:
  - name: nvme
    url: file:///mnt/nvme//ckpt/
    every: 10 steps
    keep: {last: 3}
"""


@pytest.fixture
def write(tmp_path: Path):
    def write_file(text: str | bytes) -> Path:
        path = tmp_path / "tieredckpt.yaml"
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        return path

    return write_file


def refusal(source: object, environ: dict[str, str] | None = None) -> ConfigError:
    with pytest.raises(ConfigError) as refused:
        load_config(source, environ or {})
    assert isinstance(refused.value.key, str)
    assert "\n" not in str(refused.value)
    assert str(pickle.loads(pickle.dumps(refused.value))) == str(refused.value)
    return refused.value


def test_defaults() -> None:
    config = load_config(None, {})
    assert config == Config() == load_config({}, {})
    assert config.memory.capacity_bytes is None
    assert (config.memory.keep.last, config.memory.wait_s, config.memory.replicas) == (2, 1.0, 0)
    assert (config.agent.start, config.agent.start_timeout_s) == ("auto", 10.0)
    assert (config.recovery.wait_s, config.save.on_error) == (30.0, "skip")


def test_a_file(write) -> None:
    config = load_config(write(EXAMPLE), {})
    assert config.namespace == "gpt-run-7"
    assert config.memory.capacity_bytes == 64 << 30
    (tier,) = config.tiers
    assert (tier.name, tier.url, tier.path) == ("nvme", "file:///mnt/nvme/ckpt", "/mnt/nvme/ckpt")
    assert (tier.scope, tier.every, tier.keep) == ("host", Every(steps=10), Keep(last=3))
    assert load_config(str(write(EXAMPLE)), {}) == config
    assert load_config(yaml.safe_load(EXAMPLE), {}) == config


def test_a_dict_with_paths_is_copied(tmp_path: Path) -> None:
    source = {"agent": {"runtime_dir": tmp_path}, "tiers": ({"name": "a", "url": "file:///a"},)}
    assert load_config(source, {}).agent.runtime_dir == str(tmp_path)


def test_empty_sections_are_defaults(write) -> None:
    text = "memory:\ntiers:\nagent:\n# nothing\nsave: {timeout: ~}\n"
    assert load_config(write(text), {}) == Config()
    assert load_config(write(""), {}) == Config()
    assert load_config(write("\ufeffnamespace: a"), {}).namespace == "a"


def test_effective_is_plain_and_complete(write) -> None:
    config = load_config(write(EXAMPLE), {})
    effective = config.effective()
    assert load_config(effective, {}) == config
    assert load_config(json.loads(json.dumps(effective)), {}) == config
    assert load_config(write(yaml.safe_dump(effective)), {}) == config
    assert effective["memory"] == {
        "capacity": "64GiB", "keep": {"last": 2}, "wait": "1 s", "replicas": 0,
    }  # fmt: skip
    assert effective["save"] == {
        "on_error": "skip",
        "max_skipped": 3,
        "timeout": "5 min",
        "wait_timeout": "1 min",
    }


TIER = {"name": "nvme", "url": "file:///ckpt"}


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            {"tiers": [TIER | {"every": "10 stepz"}]},
            'tiers[0].every: "10 stepz" is not a schedule; '
            'write "10 steps", "30 min" or "save"',
        ),
        (
            {"memory": {"capcity": "1GiB"}},
            'memory.capcity: unknown key (did you mean "capacity"?); '
            "allowed keys: capacity, keep, wait, replicas",
        ),
        (
            {"zzz": 1},
            "zzz: unknown key; allowed keys: namespace, memory, tiers, agent, recovery, save",
        ),
        (
            {"memory": {"capacity": "64"}},
            'memory.capacity: "64" is out of range (without a unit it is bytes); '
            "allowed are 2MiB to 1EiB",
        ),
        ({"memory": {"keep": 3}}, "memory.keep: 3 of what? Write {last: 3}"),
        (
            {"memory": {"keep": {"last": 0}}},
            "memory.keep.last: 0 is out of range; allowed are 1 to 100 checkpoints",
        ),
        (
            {"memory": {"keep": {"last": "2"}}},
            'memory.keep.last: "2" is not a whole number of checkpoints; allowed are 1 to 100',
        ),
        ({"memory": {"wait": "2 h"}}, 'memory.wait: "2 h" is out of range; allowed are 0 s to 1 h'),
        (
            {"memory": 5},
            "memory: 5 is not a mapping; write the keys capacity, keep, wait, replicas below it",
        ),
        ({"tiers": {"name": "a"}},
         'tiers: a mapping is not a list; write "- name: nvme" and so on below it'),
        ({"tiers": [TIER] * 9}, "tiers: 9 tiers; allowed are 0 to 8"),
        ({"tiers": [TIER, TIER | {"url": "file:///b"}]},
         'tiers[1].name: "nvme" is the name of tiers[0] too'),
        ({"tiers": [TIER, TIER | {"name": "b"}]},
         'tiers[1].url: "file:///ckpt" is the url of tiers[0] too'),
        ({"tiers": [TIER | {"name": "memory"}]},
         'tiers[0].name: "memory" has a meaning of its own; choose another name'),
        ({"tiers": [{"name": "a"}]},
         "tiers[0].url: missing; write for example url: file:///mnt/nvme/checkpoints"),
        ({"tiers": [{"url": "file:///a"}]},
         "tiers[0].name: missing; write for example name: nvme"),
        ({"tiers": [TIER | {"url": "/mnt/x"}]},
         'tiers[0].url: "/mnt/x" is not a URL; write "file:///mnt/x"'),
        ({"tiers": [TIER | {"url": "file://mnt/x"}]},
         'tiers[0].url: "file://mnt/x" names a host or a relative path; write three slashes and '
         'an absolute path, as in "file:///mnt/nvme/checkpoints"'),
        ({"tiers": [TIER | {"url": "file:///a/../b"}]},
         'tiers[0].url: "/a/../b" is not a usable path: name a folder below "/", without ".."'),
        ({"tiers": [TIER | {"url": "ftp://a/b"}]},
         'tiers[0].url: "ftp://a/b": there is no tier for "ftp://"; '
         'write "file:///mnt/nvme/checkpoints"'),
        ({"tiers": [TIER | {"scope": "hosts"}]},
         'tiers[0].scope: "hosts" is not allowed (did you mean "host"?); write "host" or "shared"'),
        ({"agent": {"start": True}}, 'agent.start: true is not allowed; write "auto" or "never"'),
        ({"agent": {"runtime_dir": "~/x"}},
         'agent.runtime_dir: "~/x" is not an absolute path ("~" is not expanded); '
         'begin it with "/"'),
        ({"namespace": 12}, 'namespace: 12 is a number; put it in quotes: "12"'),
        ({"namespace": "../x"},
         'namespace: "../x" is not a name; use letters, digits, ".", "_" and "-", at most 128, '
         "the first one a letter or digit"),
        ({"on_save_error": "skip"}, 'on_save_error: unknown key; write "save: {on_error: raise}"'),
        ({"save": {"on_error": "ignore"}},
         'save.on_error: "ignore" is not allowed; write "raise" or "skip"'),
        ({"max_skipped": 3}, 'max_skipped: unknown key; write "save: {max_skipped: 3}"'),
        ({"save": {"max_skipped": -1}},
         "save.max_skipped: -1 is out of range; allowed are 0 to 1000000 saves"),
    ],
)  # fmt: skip
def test_messages(source: dict[str, object], message: str) -> None:
    error = refusal(source)
    assert str(error) == message
    assert message.startswith(error.key + ":")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"memory": {"replicas": 1}},
         "memory.replicas: 1: replicas on other hosts are not in this release; write 0"),
        ({"memory": {"require_survives": "pod"}},
         "memory.require_survives: demanding what the memory tier survives is not in this release"),
        ({"tiers": [TIER | {"url": "s3://bucket/ckpt"}]},
         'tiers[0].url: "s3://bucket/ckpt": object stores are not in this release; '
         'write a folder, such as "file:///mnt/nvme/checkpoints"'),
        ({"tiers": [TIER | {"keep": {"last": 5, "max_age": "30 d"}}]},
         "tiers[0].keep.max_age: retention by age is not in this release"),
        ({"tiers": [TIER | {"keep": {"every": "1000 steps"}}]},
         "tiers[0].keep.every: keeping some older checkpoints is not in this release"),
        ({"discovery": "torch"}, "discovery: finding other hosts is not in this release"),
        ({"agent": {"listen": "0.0.0.0:80"}},
         "agent.listen: listening on the network is not in this release"),
    ],
)  # fmt: skip
def test_not_in_this_release(source: dict[str, object], message: str) -> None:
    assert str(refusal(source)) == message


def test_shared_scope_is_for_one_host() -> None:
    config = load_config(
        {"tiers": [TIER, {"name": "b", "url": "file:///b", "scope": "shared"}]}, {}
    )
    check_hosts(config, 1)
    with pytest.raises(ConfigError, match="not in this release") as refused:
        check_hosts(config, 2)
    assert refused.value.key == "tiers[1].scope"


def test_allowed_values_are_a_field() -> None:
    assert refusal({"agent": {"start": "x"}}).allowed == ["auto", "never"]
    assert refusal({"agent": {"strat": "x"}}).allowed[0] == "runtime_dir"


def test_line_numbers(write) -> None:
    def origin(text: str) -> str:
        return str(refusal(write(text))).rpartition(" (")[2].rstrip(")")

    assert origin(EXAMPLE.replace("10 steps", "often")) == "tieredckpt.yaml, line 6"
    assert origin(EXAMPLE.replace("every:", "evry:")) == "tieredckpt.yaml, line 6"
    assert origin(EXAMPLE.replace("    url: file:///mnt/nvme//ckpt/\n", "")) == (
        "tieredckpt.yaml, line 4"
    )
    assert origin("save:\n  timeout:\n\n    [1]\n") == "tieredckpt.yaml, line 2"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\na: 2", 'tieredckpt.yaml, line 2, column 1: the key "a" is given twice'),
        (
            "tiers: [{name: a, name: b}]",
            'tieredckpt.yaml, line 1, column 19: the key "tiers[0].name" is given twice',
        ),
        (
            "a: &x 1\nb: *x",
            "tieredckpt.yaml, line 1, column 4: anchors and aliases (& and *) are not supported",
        ),
        (
            "a: !!python/object/apply:os.system [ls]",
            "tieredckpt.yaml, line 1, column 4: tags (!) are not supported; "
            "quote the text if it begins with !",
        ),
        ("<<: {a: 1}", "tieredckpt.yaml, line 1, column 1: merge keys (<<) are not supported"),
        ("? [a]\n: 1", "tieredckpt.yaml, line 1, column 3: a key must be a word"),
        (
            "- 1",
            'the configuration is a list (tieredckpt.yaml); write "key: value" lines, '
            "such as namespace: my-run",
        ),
        ("[" * 10_000, "tieredckpt.yaml, line 1, column 17: nested deeper than 16 levels"),
    ],
)
def test_hostile_yaml(write, text: str, message: str) -> None:
    assert str(refusal(write(text))) == message


@pytest.mark.parametrize(
    ("text", "part"),
    [
        (b"namespace: \xff", "is not UTF-8 text (byte 11)"),
        (b"a: \x00", "not valid YAML"),
        (b"a: [1", "tieredckpt.yaml, line 1"),
        (b"a: 1\n---\nb: 2", "tieredckpt.yaml, line 2"),
        (b"#" * (1 << 20) + b"\n", "larger than 1048576 bytes"),
        (b"a: [" + b"1, " * 11_000 + b"]", "more than 10000 values"),
    ],
)
def test_unreadable_yaml(write, text: bytes, part: str) -> None:
    assert part in str(refusal(write(text)))


def test_billion_laughs_is_refused_at_once(write) -> None:
    levels = ["a: &a [x, x]"] + [
        f"{b}: &{b} [*{a}, *{a}]" for a, b in zip("abcdefgh", "bcdefghi", strict=True)
    ]
    began_s = time.monotonic()
    refusal(write("\n".join(levels)))
    assert time.monotonic() - began_s < 5


def test_yaml_11_surprises_stay_text(write) -> None:
    config = load_config(write("namespace: 2026-01-01"), {})
    assert config.namespace == "2026-01-01"
    for word in ("no", "off", "0x1F", "1:30"):
        assert f'"{word}" is not' in str(refusal(write(f"save: {{timeout: {word}}}")))


def test_leading_zeros_are_decimal(write) -> None:
    assert load_config(write("save: {timeout: 010}"), {}).save.timeout_s == 10.0


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    missing = str(refusal(tmp_path / "nothing.yaml"))
    assert missing.startswith(f'there is no configuration file "{tmp_path}/nothing.yaml"')
    assert "cannot be read: Is a directory" in str(refusal(tmp_path))
    assert "pass the path of a YAML file, a dict or None" in str(refusal(5))


def test_dict_of_odd_things() -> None:
    assert str(refusal({5: 1})) == "the configuration: the key 5 is not text"
    assert str(refusal({"memory": {"wait": object()}})) == (
        "memory.wait: a value of type object cannot stand in a configuration"
    )
    nested: dict[str, object] = {}
    nested["memory"] = nested
    assert "nested deeper than 16 levels" in str(refusal(nested))


def test_environment_overrides(write) -> None:
    environ = {
        "TIEREDCKPT_NAMESPACE": "other",
        "TIEREDCKPT_MEMORY__CAPACITY": "8GiB",
        "TIEREDCKPT_MEMORY__KEEP__LAST": "1",
        "TIEREDCKPT_TIERS__0__EVERY": "30 min",
        "TIEREDCKPT_SAVE__TIMEOUT": "",
        "TIEREDCKPT_RUNTIME_DIR": "/not/ours",
        "TIEREDCKPT_FAILPOINTS": "not=ours",
        "PATH": "/bin",
    }
    config = load_config(write(EXAMPLE), environ)
    assert config.namespace == "other"
    assert (config.memory.capacity_bytes, config.memory.keep) == (8 << 30, Keep(last=1))
    assert config.tiers[0].every == Every(seconds=1800.0)
    assert config.tiers[0].keep == Keep(last=3)
    whole = {"TIEREDCKPT_TIERS": "[{name: a, url: file:///a}]", "TIEREDCKPT_TIERS__0__KEEP": "~"}
    assert load_config(write(EXAMPLE), whole).tiers[0].name == "a"
    assert load_config(write(EXAMPLE), {"TIEREDCKPT_TIERS": "[]"}).tiers == ()
    assert load_config(None, environ | {"TIEREDCKPT_TIERS__0__EVERY": ""}).namespace == "other"


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        (
            "TIEREDCKPT_MEMORY__CAPACITY",
            "8G",
            'memory.capacity: "8G" is not a size: there is no unit "G"; did you mean "GiB" or '
            '"GB"? (environment variable TIEREDCKPT_MEMORY__CAPACITY)',
        ),
        (
            "TIEREDCKPT_MEMROY__CAPACITY",
            "8GiB",
            'memroy: unknown key (did you mean "memory"?); allowed keys: namespace, memory, tiers, '
            "agent, recovery, save (environment variable TIEREDCKPT_MEMROY__CAPACITY)",
        ),
        (
            "TIEREDCKPT_NAMESPCAE",
            "x",
            "the environment variable TIEREDCKPT_NAMESPCAE sets nothing; did you mean "
            "TIEREDCKPT_NAMESPACE?",
        ),
        (
            "TIEREDCKPT_TIERS__1__EVERY",
            "save",
            "the environment variable TIEREDCKPT_TIERS__1__EVERY leads nowhere: the entries of "
            "tiers are numbered from 0, and there are 1",
        ),
        (
            "TIEREDCKPT_MEMORY__CAPACITY__X",
            "1",
            "the environment variable TIEREDCKPT_MEMORY__CAPACITY__X leads nowhere: "
            'memory.capacity is "64GiB"',
        ),
        (
            "TIEREDCKPT_MEMORY",
            "*x",
            "TIEREDCKPT_MEMORY: anchors and aliases (& and *) are not supported",
        ),
    ],
)
def test_environment_messages(write, variable: str, value: str, message: str) -> None:
    assert str(refusal(write(EXAMPLE), {variable: value})) == message


RANDOM_RUN_ID = "0f9c3d57-6b1a-4c7e-9d3b-2a1f5e8c7b60"


@pytest.mark.parametrize(
    ("configured", "environ", "namespace"),
    [
        ("mine", {"SLURM_JOB_ID": "7"}, "mine"),
        (None, {"SLURM_JOB_ID": "7", "JOBSET_NAME": "j"}, "slurm-7"),
        (None, {"JOBSET_NAME": "j", "TORCHELASTIC_RUN_ID": "r"}, "jobset-j"),
        (None, {"TORCHELASTIC_RUN_ID": "my_run", "SLURM_JOB_ID": ""}, "run-my_run"),
    ],
)
def test_namespace(configured: str | None, environ: dict[str, str], namespace: str) -> None:
    assert resolve_namespace(configured, environ) == namespace


@pytest.mark.parametrize(
    ("environ", "part"),
    [
        ({}, "nothing identifies this run for certain"),
        ({"TORCHELASTIC_RUN_ID": "none"}, "nothing identifies this run for certain"),
        ({"TORCHELASTIC_RUN_ID": RANDOM_RUN_ID}, "the next start will have another one"),
        ({"JOBSET_NAME": "a/b"}, 'JOBSET_NAME="a/b" cannot be used in a name'),
    ],
)
def test_no_namespace(environ: dict[str, str], part: str) -> None:
    with pytest.raises(ConfigError) as refused:
        resolve_namespace(None, environ)
    assert part in str(refused.value)
    assert 'add a line such as "namespace: my-run"' in str(refused.value)
    assert refused.value.key == "namespace"


def test_every_key_is_in_the_docs() -> None:
    page = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text()

    def keys(value: object, path: str) -> list[str]:
        if isinstance(value, dict):
            return [k for name, v in value.items() for k in keys(v, f"{path}.{name}".lstrip("."))]
        if isinstance(value, list):
            return [k for item in value for k in keys(item, f"{path}[i]")]
        return [path]

    documented = [line.split("`")[1] for line in page.splitlines() if line.startswith("| `")]
    effective = load_config({"tiers": [TIER]}, {}).effective()
    assert sorted([*keys(effective, ""), "tiers"]) == sorted(documented)
