"""The configuration: what it means, and what it says when it is wrong."""

from __future__ import annotations

import json
import pickle
import re
import time
from pathlib import Path

import pytest
import yaml

import tieredckpt
from tieredckpt.config.schema import (
    TOP_KEYS,
    Best,
    Config,
    Every,
    Keep,
    ObjectOptions,
    load_config,
    resolve_namespace,
)
from tieredckpt.errors import ConfigError

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
    assert (config.memory.keep.last, config.memory.wait_s, config.memory.replicas) == (2, 1.0, None)
    assert (config.agent.start, config.agent.start_timeout_s) == ("auto", 60.0)
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
        "capacity": "64GiB", "keep": {"last": 2}, "wait": "1 s", "replicas": None,
        "require_replicas": False, "replication_bandwidth": None, "copies": "sealed",
    }  # fmt: skip
    assert effective["save"] == {
        "on_error": "skip",
        "max_skipped": 3,
        "timeout": "5 min",
        "ack": "memory",
        "wait_timeout": "1 min",
    }


MEMORY_KEYS = "capacity, keep, wait, replicas, require_replicas, replication_bandwidth, copies"
TIER = {"name": "nvme", "url": "file:///ckpt"}
S3 = {"name": "s3", "url": "s3://bucket/ckpt"}


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
            f"allowed keys: {MEMORY_KEYS}",
        ),
        (
            {"memory": {"CAPACITY": "1GiB"}},
            'memory.CAPACITY: unknown key (did you mean "capacity"?); '
            f"allowed keys: {MEMORY_KEYS}",
        ),
        (
            {"zzz": 1},
            f"zzz: unknown key; allowed keys: {', '.join(TOP_KEYS)}",
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
            f"memory: not a mapping; write the keys {MEMORY_KEYS} below it",
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
        ({"tiers": [TIER | {"url": "s3//bucket/x"}]},
         'tiers[0].url: "s3//bucket/x" is not a URL; write "s3://bucket/x"'),
        ({"tiers": [TIER | {"url": "S3:/bucket"}]},
         'tiers[0].url: "S3:/bucket" is not a URL; write "s3://bucket"'),
        ({"tiers": [TIER | {"url": "file:///~/x"}]},
         'tiers[0].url: "/~/x": "~" is not expanded; write out the absolute path'),
        ({"tiers": [TIER, TIER | {"name": "b", "url": "file:///ckpt/b"}]},
         'tiers[1].url: "file:///ckpt/b" is below the url of tiers[0], "file:///ckpt"; '
         "give each tier a folder of its own"),
        ({"tiers": [TIER | {"url": "file:///a/b"}, TIER | {"name": "b", "url": "file:///a"}]},
         'tiers[1].url: "file:///a" is above the url of tiers[0], "file:///a/b"; '
         "give each tier a folder of its own"),
        ({"tiers": [TIER | {"url": "file://mnt/x"}]},
         'tiers[0].url: "file://mnt/x" names a host or a relative path; write three slashes and '
         'an absolute path, as in "file:///mnt/nvme/checkpoints"'),
        ({"tiers": [TIER | {"url": "file:///a/../b"}]},
         'tiers[0].url: "/a/../b" is not a usable path: name a folder below "/", without ".."'),
        ({"tiers": [TIER | {"url": "https://a/b"}]},
         'tiers[0].url: "https://a/b": nothing can be written there; '
         'write "file:///mnt/nvme/checkpoints" or "s3://bucket/checkpoints"'),
        ({"tiers": [TIER | {"url": "fiel:///b"}]},
         'tiers[0].url: "fiel:///b": there is no tier for "fiel://" (did you mean "file://"?); '
         'write "file:///mnt/nvme/checkpoints" or "s3://bucket/checkpoints"'),
        ({"tiers": [TIER | {"url": "s3:///b"}]},
         'tiers[0].url: "s3:///b" names no bucket; write "s3://bucket/checkpoints"'),
        ({"tiers": [TIER | {"url": "s3://b/../c"}]},
         'tiers[0].url: "s3://b/../c" is not a usable URL: name a bucket or host, and a path '
         'without ".."'),
        ({"tiers": [TIER | {"url": "fsspec+reference://::data:,x"}]},
         'tiers[0].url: "fsspec+reference://::data:,x": fsspec takes "::" as a chain of file '
         "systems, and a tier is in one; write the host's name in place of such an address"),
        ({"tiers": [TIER | {"url": "fsspec+memory://a/b"}]},
         'tiers[0].url: "fsspec+memory://a/b": it ends with the process; '
         'write "file:///mnt/nvme/checkpoints" or "s3://bucket/checkpoints"'),
        ({"tiers": [TIER | {"url": "sftp://me:secret@host/b"}]},
         "tiers[0].url: there is a password in it, and configurations are printed; remove it"),
        ({"tiers": [S3 | {"scope": "host"}]},
         'tiers[0].scope: "host" is for file:// only: every host sees "s3://bucket/ckpt"'),
        ({"tiers": [TIER | {"region": "eu"}]},
         "tiers[0].region: is about an object store, and this tier is a folder"),
        ({"tiers": [TIER | {"delete_delay": "1 h"}]},
         'tiers[0].delete_delay: is about a tier of several hosts, "scope: shared"'),
        ({"tiers": [S3 | {"secret_key": "abc"}]},
         "tiers[0].secret_key: unknown key; write no credentials here: the store's client takes "
         'them from the environment, from a profile ("profile: name") or from the role of the '
         "machine"),
        ({"tiers": [S3 | {"endpoint": "http://store:9000"}]},
         'tiers[0].endpoint: "http://store:9000" is not encrypted, so anyone on the network path '
         'can change stored data; write https, or add "allow_http: true"'),
        ({"tiers": [S3 | {"endpoint": "store:9000"}]},
         'tiers[0].endpoint: "store:9000" is not an endpoint; write for example '
         '"https://s3.example.com:9000", without bucket and credentials'),
        ({"tiers": [S3 | {"sse": {"type": "s3", "key": "k"}}]},
         'tiers[0].sse.key: the store has the keys of "type: s3"; write "type: kms"'),
        ({"tiers": [S3 | {"sse": {"key": "k"}}]},
         "tiers[0].sse.type: missing; write for example type: kms"),
        ({"tiers": [S3 | {"anonymous": True, "profile": "p"}]},
         'tiers[0].anonymous: true, and there is "profile: p"; write one'),
        ({"tiers": [S3 | {"part_size": "1MiB"}]},
         'tiers[0].part_size: "1MiB" is out of range; allowed are 5MiB to 1EiB'),
        ({"tiers": [S3 | {"part_size": "2GiB"}]},
         'tiers[0].part_size: "2GiB" is out of range; allowed are 5MiB to 1GiB'),
        ({"tiers": [TIER | {"from": "s3"}, S3]},
         'tiers[0].from: "s3" is no tier before this one; write one of memory'),
        ({"tiers": [S3, TIER | {"from": "s3"}]},
         'tiers[1].from: "s3" is no folder: a tier is filled from memory or file://'),
        ({"tiers": [TIER | {"lag_alarm": "save"}]},
         'tiers[0].lag_alarm: "save" is not allowed; write "1000 steps" or "6 h"'),
        ({"tiers": [TIER | {"keep": {"every": "save"}}]},
         'tiers[0].keep.every: "save" is not allowed; write "1000 steps" or "6 h"'),
        ({"tiers": [TIER | {"keep": {"best": {"metric": "loss"}}}]},
         "tiers[0].keep.best.mode: missing; write mode: min if less is better, else mode: max"),
        ({"tiers": [TIER | {"price": {"put_1000": 0.005}}]},
         "tiers[0].price: unknown key; delete it: the key is gone"),
        ({"memory": {"keep": {"max_age": "1 h"}}},
         "memory.keep.max_age: unknown key; write it below a tier; memory has a fixed number of "
         "slots"),
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
        ({"memory": {"require_survives": "pod"}},
         "memory.require_survives: unknown key; delete it: the survival of memory cannot be "
         "demanded in this release"),
        ({"tiers": [TIER | {"keep": {"min_age": "30 d"}}]},
         "tiers[0].keep.min_age: unknown key; delete it: retention by least age is not in this "
         "release"),
    ],
)  # fmt: skip
def test_not_in_this_release(source: dict[str, object], message: str) -> None:
    assert str(refusal(source)) == message


def test_an_object_tier(write) -> None:
    text = """\
tiers:
  - {name: nvme, url: file:///mnt/nvme}
  - name: s3
    url: s3://bucket//ckpt/
    every: 30 min
    from: nvme
    keep: {last: 5, every: 1000 steps, max_age: 30 d, max_bytes: 10TiB,
           best: {metric: loss, mode: min, n: 3}}
    on_pressure: keep
    lag_alarm: 2 h
    sweep_after: 2 d
    endpoint: https://store:9000/
    part_size: 32MiB
    bandwidth: 1GiB/s
    sse: {type: kms, key: "arn:aws:kms:eu:1:key/a"}
"""
    nvme, s3 = load_config(write(text), {}).tiers
    assert (nvme.scope, nvme.filled_from, nvme.on_pressure) == ("host", None, "drop_oldest_queued")
    assert (s3.url, s3.scope, s3.filled_from) == ("s3://bucket/ckpt", "shared", "nvme")
    assert s3.keep == Keep(
        last=5,
        every=Every(steps=1000),
        max_age_s=30 * 86400.0,
        max_bytes=10 << 40,
        best=Best(metric="loss", mode="min", n=3),
    )
    assert (s3.lag_alarm, s3.sweep_after_s) == (Every(seconds=7200.0), 2 * 86400.0)
    assert s3.object == ObjectOptions(
        endpoint="https://store:9000",
        part_bytes=32 << 20,
        bandwidth_bytes_per_s=1 << 30,
        sse_type="kms",
        sse_key="arn:aws:kms:eu:1:key/a",
    )


@pytest.mark.parametrize("url", ["gs://bucket", "az://container/a-b", "sftp://me@host:22/ckpt"])
def test_urls_of_other_stores(url: str) -> None:
    (tier,) = load_config({"tiers": [{"name": "far", "url": url}]}, {}).tiers
    assert (tier.url, tier.scope) == (url, "shared")


@pytest.mark.parametrize(
    "url",
    ["s3://my_bucket/c", "s3://My/c", "s3://ab", "s3://a..b/c", "s3://10.0.0.1/c", "s3://-ab/c",
     "s3://me@bucket/c", "s3://bucket/a b", "s3://bucket/ä", "gs://go", "gs://Bucket", "gs://a..b",
     "gs://" + "b" * 64, "az://my--box", "az://box.b", "az://$any/c", "az://" + "a" * 64],
)  # fmt: skip
def test_urls_without_a_possible_bucket(url: str) -> None:
    with pytest.raises(ConfigError, match=r"^tiers\[0\].url: ") as error:
        load_config({"tiers": [{"name": "far", "url": url}]}, {})
    assert error.value.key == "tiers[0].url"


def test_a_store_of_ones_own_may_have_other_names() -> None:
    tier = {"name": "far", "url": "s3://My_bucket/c", "endpoint": "https://store"}
    assert load_config({"tiers": [tier]}, {}).tiers[0].url == tier["url"]
    for url in ("s3://my bucket/c", "s3://b$/c"):
        with pytest.raises(ConfigError):
            load_config({"tiers": [tier | {"url": url}]}, {})
    for url in ("s3://bucket/a::b", "az://$root/c", "gs://" + ".".join(["b" * 63] * 3)):
        load_config({"tiers": [{"name": "far", "url": url}]}, {})


@pytest.mark.parametrize(
    ("endpoint", "good"),
    [("https://store", True), ("https://[::1]:9000", True), ("https://a.b:65535", True),
     ("https://a:0", False), ("https://a:65536", False), ("https://:9000", False),
     ("https://a:b", False), ("https://[::1", False), ("https://a:1:2", False)],
)  # fmt: skip
def test_endpoints(endpoint: str, good: bool) -> None:
    tiers = {"tiers": [S3 | {"endpoint": endpoint}]}
    if good:
        assert load_config(tiers, {}).tiers[0].object.endpoint == endpoint
        return
    with pytest.raises(ConfigError, match=r"^tiers\[0\].endpoint: "):
        load_config(tiers, {})


def test_one_bucket_behind_two_endpoints() -> None:
    tiers = [S3 | {"endpoint": "https://a"}, S3 | {"name": "b", "endpoint": "https://b"}]
    assert len(load_config({"tiers": tiers}, {}).tiers) == 2


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
        (b"a: 1\nmemory:{keep: {last: 2}}", "but found '}'; write a space after the colon"),
        (
            b"memory:{capacity: 1GiB}",
            "unknown key; write a space after the colon of a key; allowed",
        ),
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
    began_s = time.process_time()
    refusal(write("\n".join(levels)))
    assert time.process_time() - began_s < 5


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
        "memory.wait: a value of type object is not possible in a configuration"
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
            f'memroy: unknown key (did you mean "memory"?); allowed keys: {", ".join(TOP_KEYS)} '
            "(environment variable TIEREDCKPT_MEMROY__CAPACITY)",
        ),
        (
            "TIEREDCKPT_NAMESPCAE",
            "x",
            "the environment variable TIEREDCKPT_NAMESPCAE sets nothing; did you mean "
            "TIEREDCKPT_NAMESPACE?",
        ),
        (
            "TIEREDCKPT_RUNTIME_DRI",
            "/dev/shm/x",
            "the environment variable TIEREDCKPT_RUNTIME_DRI sets nothing; did you mean "
            "TIEREDCKPT_RUNTIME_DIR?",
        ),
        (
            "TIEREDCKPT_QUOTA",
            "8GiB",
            "the environment variable TIEREDCKPT_QUOTA sets nothing; unset it",
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


def test_variables_that_are_no_keys_are_accepted():
    """All that the product reads, our tests' own, and those of a Kubernetes service's name."""
    files = (Path(tieredckpt.__file__).parent).rglob("*.py")
    texts = (re.findall(r'"(TIEREDCKPT_[A-Z_]+)"', file.read_text("utf-8")) for file in files)
    read = {name for found in texts for name in found if "__" not in name}
    assert {"TIEREDCKPT_LIVE", "TIEREDCKPT_CONFIG", "TIEREDCKPT_NODE_NAME"} < read
    other = ("TEST_SHM", "SERVICE_HOST", "AGENTS_SERVICE_PORT_HTTP", "AGENTS_PORT_80_TCP_ADDR")
    names = (read | {f"TIEREDCKPT_{each}" for each in other}) - {"TIEREDCKPT_"}
    load_config(None, dict.fromkeys(names, "x"))
    load_config({"security": {"token_env": "TIEREDCKPT_A_TOKEN"}}, {"TIEREDCKPT_A_TOKEN": "x" * 64})


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
    page = (Path(__file__).parents[3] / "docs" / "reference" / "configuration.md").read_text()

    def keys(value: object, path: str) -> list[str]:
        if isinstance(value, dict):
            return [k for name, v in value.items() for k in keys(v, f"{path}.{name}".lstrip("."))]
        if isinstance(value, list):
            return [k for item in value for k in keys(item, f"{path}[i]")]
        return [path]

    # Entries of the lists: "- `save.ack` (`memory`, `replicated`; default `memory`): what ...".
    section = page.partition("\n## Keys\n")[2].partition("\n## ")[0]
    documented = [line.split("`")[1] for line in section.splitlines() if line.startswith("- `")]
    tls = {"cert": "/c", "key": "/k", "ca": "/a"}
    tier = S3 | {
        "keep": {"best": {"metric": "loss", "mode": "min"}}, "sse": {"type": "s3"},
    }  # fmt: skip
    effective = load_config({"tiers": [tier], "security": {"tls": tls}}, {}).effective()
    added = ["tiers", "labels", "tiers[i].keep"]  # lists, and what a word may stand for
    assert sorted([*keys(effective, ""), *added]) == sorted(documented)
