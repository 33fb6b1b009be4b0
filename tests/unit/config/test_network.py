"""The keys about other hosts: what they mean, and what they say when they are wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from tieredckpt.config.schema import (
    Config,
    DiscoveryConfig,
    NetworkConfig,
    SecurityConfig,
    TlsConfig,
    load_config,
)
from tieredckpt.errors import ConfigError

TOKEN = {"token_env": "CKPT_TOKEN"}
FILES = {"cert": "/tls/tls.crt", "key": "/tls/tls.key", "ca": "/tls/ca.crt"}
SECRET = "S3CRET"
"""Stands for a token that somebody wrote into the configuration."""


def load(**source: object) -> Config:
    config = load_config(source, {})
    assert load_config(config.effective(), {}) == config
    return config


def refusal(source: object, environ: dict[str, str] | None = None) -> str:
    with pytest.raises(ConfigError) as refused:
        load_config(source, environ or {})  # type: ignore[arg-type]
    assert refused.value.key is not None
    return str(refused.value)


def test_defaults_find_hosts_by_torch_and_need_no_secret() -> None:
    for config in (load(), load(discovery="torch"), load(discovery={"static": None})):
        assert config.discovery == DiscoveryConfig()
        assert config.network == NetworkConfig(port=0)
        assert config.security == SecurityConfig()
        assert config.labels == ()
    assert load().effective()["discovery"] == "torch"


def test_static_addresses_get_the_port_that_all_hosts_listen_on() -> None:
    listed = ["a", "b.example.org:1", "10.0.0.1", "[fd00::1]", "[fd00:0::2]:9"]
    config = load(discovery={"static": listed}, security=TOKEN)
    assert config.network.port == 7411
    assert config.discovery == DiscoveryConfig(
        kind="static",
        addresses=(
            "a:7411", "b.example.org:1", "10.0.0.1:7411", "[fd00::1]:7411", "[fd00::2]:9",
        ),
    )  # fmt: skip
    config = load(discovery={"static": ["a"]}, security=TOKEN, network={"port": 80})
    assert (config.discovery.addresses, config.network.port) == (("a:80",), 80)


def test_dns() -> None:
    config = load(discovery={"dns": "agents.my-job:7000"}, security={"tls": FILES})
    assert config.discovery == DiscoveryConfig(kind="dns", dns_name="agents.my-job:7000")
    assert config.network.port == 7411
    assert config.security == SecurityConfig(tls=TlsConfig(**FILES))


def test_network() -> None:
    assert load(network={"interface": "eth0"}).network.interfaces == ("eth0",)
    assert load(network={"interface": ["ib0", "ib1"]}).network.interfaces == ("ib0", "ib1")
    assert load(network={"cidr": "10.0.0.0/8"}).network.cidrs == ("10.0.0.0/8",)
    assert load(network={"cidr": ["10.0.0.7", "FD00::/8"]}).network.cidrs == (
        "10.0.0.7/32",
        "fd00::/8",
    )
    assert load(network={"port": 65535}).network == NetworkConfig(port=65535)


def test_token_and_tls_may_both_be_used() -> None:
    config = load(security={"token_file": "/run//secrets/t", "tls": FILES})
    assert config.security.token_file == "/run/secrets/t"
    assert config.security.tls == TlsConfig(**FILES)


def test_labels_stay_in_order_and_numbers_are_names() -> None:
    config = load(labels={"zone": "b", "row": 10, "rack": "r7"})
    assert config.labels == (("zone", "b"), ("row", "10"), ("rack", "r7"))


def test_one_file_serves_all_hosts_since_labels_come_from_the_environment(tmp_path: Path) -> None:
    environ = {"TIEREDCKPT_LABELS__RACK": "r7", "TIEREDCKPT_LABELS__ZONE": "2"}
    file = tmp_path / "a.yaml"
    file.write_text("labels:\n  zone:\n  rack: nowhere\n")
    assert load_config(file, {}).labels == (("rack", "nowhere"),)
    assert load_config(file, environ).labels == (("zone", "2"), ("rack", "r7"))
    assert load_config(None, {"TIEREDCKPT_LABELS__RACK": "r7"}).labels == (("rack", "r7"),)
    whole = {"TIEREDCKPT_LABELS": "{zone: b, rack: r1}"}
    assert load_config(file, whole).labels == (("zone", "b"), ("rack", "r1"))


@pytest.mark.parametrize(
    ("memory", "save", "on_one", "on_two"),
    [
        ({}, {}, 0, 1),
        ({"require_replicas": True}, {}, 1, 1),
        ({}, {"ack": "replicated"}, 1, 1),
        ({"replicas": 0}, {}, 0, 0),
        ({"replicas": 2}, {"ack": "replicated"}, 2, 2),
    ],
)
def test_replicas(
    memory: dict[str, object], save: dict[str, object], on_one: int, on_two: int
) -> None:
    config = load(memory=memory, save=save)
    assert config.memory.replicas == memory.get("replicas")
    assert config.memory.require_replicas == memory.get("require_replicas", False)
    assert (config.wanted_replicas(1), config.wanted_replicas(2)) == (on_one, on_two)


@pytest.mark.parametrize(
    ("value", "bytes_per_s"),
    [("2GiB/s", 2 << 30), ("2GiB", 2 << 30), ("1.5 GB / sec", 1_500_000_000), (1 << 20, 1 << 20)],
)
def test_replication_bandwidth(value: object, bytes_per_s: int) -> None:
    memory = load(memory={"replication_bandwidth": value}).memory
    assert memory.replication_bytes_per_s == bytes_per_s


def test_ack_and_copies() -> None:
    assert load().save.ack == "memory"
    assert load(save={"ack": "replicated"}).save.ack == "replicated"
    assert load().memory.copies == load(memory={"copies": "sealed"}).memory.copies == "sealed"
    assert load(memory={"copies": "local"}).memory.copies == "local"


STATIC = 'discovery: {static: [host-a:7411, host-b:7411]}'  # fmt: skip
NO_ADDRESS = ' is no address; write "host:7411", "10.0.0.1:7411" or "[fd00::1]:7411"'
NO_NETWORK = ' is no network; write for example "10.0.0.0/8" or "fd00::/8"'


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"discovery": "static"},
         f'discovery: "static" is not enough to find hosts; write torch, or {STATIC}, '
         'or discovery: {dns: "agents.my-job:7411"}'),
        ({"discovery": {"torch": True}}, 'discovery.torch: unknown key; write "discovery: torch"'),
        ({"discovery": {"static": ["a"], "dns": "b"}},
         "discovery: static and dns exclude each other; write one of them"),
        ({"discovery": {"static": []}},
         "discovery.static: 0 addresses, where a list of 1 to 4096 addresses belongs; "
         f"write {STATIC}"),
        ({"discovery": {"static": "a:1"}},
         'discovery.static: "a:1", where a list of 1 to 4096 addresses belongs; '
         f"write {STATIC}"),
        ({"discovery": {"static": ["a"] * 4097}},
         "discovery.static: 4097 addresses, where a list of 1 to 4096 addresses belongs; "
         f"write {STATIC}"),
        ({"network": {"port": 0}, "discovery": {"dns": "a"}},
         'network.port: 0 takes any free port, and with discovery "dns" the other hosts must know '
         "it beforehand; write 1 to 65535, or leave it out for 7411"),
        ({"network": {"port": 65536}}, "network.port: 65536 is no port; allowed are 0 to 65535"),
        ({"network": {"port": True}}, "network.port: true is no port; allowed are 0 to 65535"),
        ({"network": {"workers": 2}},
         "network.workers: unknown key; delete it: the key is gone"),
        ({"network": {"interface": "a", "cidr": "10.0.0.0/8"}},
         "network: interface and cidr exclude each other; write one of them"),
        ({"network": {"interface": "a/b"}},
         'network.interface: "a/b" is no network interface; write for example "eth0"'),
        ({"network": {"interface": ["eth0", "a" * 16]}},
         f'network.interface[1]: "{"a" * 16}" is no network interface; write for example "eth0"'),
        ({"network": {"interface": "10.0.0.0/8"}},
         'network.interface: "10.0.0.0/8" is an address; write cidr: "10.0.0.0/8"'),
        ({"network": {"interface": ["a", "a"]}}, 'network.interface[1]: "a" is there twice'),
        ({"network": {"interface": list("abcdefghi")}},
         "network.interface: 9 of them; allowed are 1 to 8"),
        ({"network": {"cidr": "10.1.2.3/8"}},
         'network.cidr: "10.1.2.3/8" names an address within a network; write "10.0.0.0/8"'),
        ({"network": {"cidr": 10}}, f"network.cidr: 10{NO_NETWORK}"),
        ({"network": {"cidr": "10.0.0.0/33"}}, f'network.cidr: "10.0.0.0/33"{NO_NETWORK}'),
        ({"network": {"interfaces": "a"}},
         'network.interfaces: unknown key; write "network: {interface: [eth0, eth1]}"'),
        ({"labels": {"Zone": "b"}},
         'labels.Zone: not the name of a label; use lower case letters, digits, ".", "_" and "-"'),
        ({"labels": {"zone": 1.1}}, 'labels.zone: 1.1 is a number; put it in quotes: "1.1"'),
        ({"labels": ["a"]},
         "labels: a list is not a mapping; write for example labels: {rack: r7}"),
        ({"labels": {f"l{n}": "a" for n in range(9)}}, "labels: 9 labels; allowed are 0 to 8"),
        ({"memory": {"replicas": 65}},
         "memory.replicas: 65 is out of range; allowed are 0 to 64 replicas"),
        ({"memory": {"require_replicas": 1}},
         "memory.require_replicas: 1 is not allowed; write true or false"),
        ({"memory": {"replication_bandwidth": "1000KiB/s"}},
         'memory.replication_bandwidth: "1000KiB/s" is out of range; allowed are 1MiB to 1EiB'),
        ({"memory": {"replication_bandwidth": "10Gbit/s"}},
         'memory.replication_bandwidth: "10Gbit/s" is not bytes per second: write "1GB/s" for '
         "8 Gbit/s"),
        ({"memory": {"copies": "all"}},
         'memory.copies: "all" is not allowed; write "sealed" or "local"'),
        ({"memory": {"ack": "replicated"}},
         'memory.ack: unknown key; write "save: {ack: replicated}"'),
        ({"save": {"ack": "disk"}},
         'save.ack: "disk" is not allowed; write "memory" or "replicated"'),
        ({"save": {"ack": "replicated"}, "memory": {"replicas": 0}},
         'save.ack: "replicated" waits for copies, and "memory: {replicas: 0}" makes none'),
    ],
)  # fmt: skip
def test_messages(source: dict[str, object], message: str) -> None:
    assert refusal(source) == message


@pytest.mark.parametrize(
    "address",
    ["", "fd00::1", "10.0.0", "a:b", "a:1:2", "[10.0.0.1]:1", "[a]:1", "a b:1", "-a:1", "a..b:1",
     ":1", "http://a:1", "a/b:1", "a" * 300, 7, None, "256.0.0.1:1", "a:123456"],
)  # fmt: skip
def test_no_address(address: object) -> None:
    refused = refusal({"discovery": {"static": [address]}, "security": TOKEN})
    assert refused.startswith("discovery.static[0]: ")
    assert refused.endswith(NO_ADDRESS)


@pytest.mark.parametrize("port", ["0", "65536", "99999"])
def test_no_port(port: str) -> None:
    refused = refusal({"discovery": {"dns": f"a:{port}"}, "security": TOKEN})
    assert refused == (
        f'discovery.dns: "a:{port}": there is no port {int(port)}; allowed are 1 to 65535'
    )


def test_addresses_are_not_given_twice() -> None:
    source = {"discovery": {"static": ["a:7411", "b", "a"]}, "security": TOKEN}
    assert refusal(source) == 'discovery.static[2]: "a:7411" is there twice'


@pytest.mark.parametrize("discovery", [{"static": ["a"]}, {"dns": "a"}])
def test_only_torch_mints_a_token(discovery: dict[str, object]) -> None:
    refused = refusal({"discovery": discovery})
    assert refused.startswith("security: missing, and with discovery")
    for key in ("token_file", "token_env", "tls"):
        assert key in refused
    for security in (TOKEN, {"token_file": "/t"}, {"tls": FILES}):
        assert load(discovery=discovery, security=security).security != SecurityConfig()


@pytest.mark.parametrize(
    ("key", "instead"),
    [("ack", "save: {ack: "), ("replicas", "memory: {replicas: "), ("peers", "discovery: {static"),
     ("token", "security: {token_file: "), ("listen", "network: {interface: "),
     ("tls", "security: {tls: "), ("placement", "labels: {"), ("cidr", "network: {cidr: ")],
)  # fmt: skip
def test_keys_that_people_look_for_at_the_top(key: str, instead: str) -> None:
    assert refusal({key: SECRET}).startswith(f'{key}: unknown key; write "{instead}')
    below = refusal({"agent": {key: SECRET}})
    assert below.startswith(f'agent.{key}: unknown key; write "{instead}')
    assert SECRET not in below


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"token": SECRET},
         "security.token: unknown key; write token_file: /a/path or token_env: A_VARIABLE, and put "
         "the token there: the configuration is printed, logged and shared"),
        ({"token_file": SECRET},
         'security.token_file: not a usable path: write an absolute one, without ".."'),
        ({"token_env": f"{SECRET}-1"},
         "security.token_env: not the name of an environment variable; write for example "
         "CKPT_TOKEN, and put the token into that variable"),
        (SECRET,
         "security: not a mapping; write the keys token_file, token_env, tls below it"),
        ({"tls": SECRET},
         "security.tls: not a mapping; write the keys cert, key, ca below it"),
        ({"tls": {"cert": "/a", "key": "/b"}},
         "security.tls.ca: missing; write for example ca: /tls/ca.pem"),
        ({"tls": FILES | {"key": SECRET}},
         'security.tls.key: not a usable path: write an absolute one, without ".."'),
        ({"token_file": "/a", "token_env": "B"},
         "security: token_file and token_env exclude each other; write one of them"),
        ({"cert": "/a"},
         'security.cert: unknown key; write "security: {tls: {cert: /tls/tls.crt, '
         'key: /tls/tls.key, ca: /tls/ca.crt}}"'),
    ],
)  # fmt: skip
def test_security_is_refused_without_repeating_what_stands_there(
    source: object, message: str
) -> None:
    assert refusal({"security": source}) == message
    assert SECRET not in message


@pytest.mark.parametrize(
    "environ",
    [
        {"TIEREDCKPT_SECURITY__TOKEN": SECRET},
        {"TIEREDCKPT_SECURITY": SECRET},
        {"TIEREDCKPT_SECURITY": SECRET, "TIEREDCKPT_SECURITY__TOKEN_FILE": "/a"},
        {"TIEREDCKPT_SECURITY__TOKEN_FILE": SECRET, "TIEREDCKPT_SECURITY__TOKEN_FILE__X": "1"},
        {"TIEREDCKPT_SECURITY__TOKEN": f"{SECRET}: {SECRET}: {SECRET}"},
        {"TIEREDCKPT_SECURITY__TOKEN": f"%{SECRET}"},
        {"TIEREDCKPT_SECURITY__TOKEN_ENV": f"[{SECRET}"},
    ],
)
def test_a_token_in_the_environment_is_not_repeated(environ: dict[str, str]) -> None:
    assert SECRET not in refusal({}, environ)


def test_a_token_may_be_in_a_variable_of_our_prefix() -> None:
    source = {"security": {"token_env": "TIEREDCKPT_TOKEN"}}
    config = load_config(source, {"TIEREDCKPT_TOKEN": SECRET})
    assert config.security.token_env == "TIEREDCKPT_TOKEN"
    assert SECRET not in repr(config)


def examples() -> list[str]:
    """The YAML in the section about several hosts: pieces that begin with a comment, and labels."""
    page = (Path(__file__).parents[3] / "docs" / "reference" / "configuration.md").read_text()
    section = page.partition("## Several hosts")[2].partition("\n## ")[0]
    pieces: list[list[str]] = []
    for line in section.splitlines():
        if line.startswith(("    # ", "    labels:")):
            pieces.append([])
        if line.startswith("    ") and "TIEREDCKPT_" not in line:
            pieces[-1].append(line[4:])
    return ["\n".join(piece) for piece in pieces]


def test_the_examples_of_the_docs_are_configurations(tmp_path: Path) -> None:
    found = []
    for number, text in enumerate(examples()):
        file = tmp_path / f"{number}.yaml"
        file.write_text(text)
        found.append(load_config(file, {}))
    kinds = [config.discovery.kind for config in found]
    assert kinds == ["torch", "dns", "static", "torch"]
    assert found[0].network.interfaces == ("ib0", "ib1")
    assert found[2].discovery.addresses[2:] == ("10.0.0.3:7411", "[fd00::4]:7411")
    environ = {"TIEREDCKPT_LABELS__ZONE": "b", "TIEREDCKPT_LABELS__RACK": "r7"}
    labelled = load_config(tmp_path / "3.yaml", environ)
    assert labelled.labels == (("zone", "b"), ("rack", "r7"))
