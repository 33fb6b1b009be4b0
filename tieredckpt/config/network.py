"""The keys about other hosts: discovery, network, authentication and labels.

A token is read from a file or an environment variable, never from the configuration, which is
printed, logged and committed. A user may write one there all the same, so no error about a key of
``security`` repeats its value.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Annotated, ClassVar, Literal

import msgspec

from tieredckpt.config.names import parse_folder, parse_name
from tieredckpt.config.reader import Tree, child
from tieredckpt.config.sections import NOT_A_KEY, Options, Written, entries, fail, parsed
from tieredckpt.config.units import show

DEFAULT_PORT = 7411
"""Default of static and dns discovery, for which other hosts must know the port beforehand."""
STATIC_MAX = 4096
"""Most addresses in a static list; a larger job uses a name service."""
RAILS_MAX = 8
"""Most interfaces or networks that one host serves on."""
LABELS_MAX = 8

STATIC_EXAMPLE = "discovery: {static: [host-a:7411, host-b:7411]}"
DNS_EXAMPLE = 'discovery: {dns: "agents.my-job:7411"}'
MAKE_TOKEN = "openssl rand -hex 32"  # noqa: S105  a command that makes one
SECRET_EXAMPLES = (
    "security: {token_file: /run/secrets/tieredckpt}",
    "security: {token_env: CKPT_TOKEN}",
    "security: {tls: {cert: /tls/tls.crt, key: /tls/tls.key, ca: /tls/ca.crt}}",
)

_ADDRESS = re.compile(r"(\[[^\[\]]+\]|[^\[\]:]+)(?::([0-9]{1,5}))?")
_HOST_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,62}")
_INTERFACE = re.compile(r"[!-.0-~]{1,15}")  # what the kernel takes: no space, no "/"
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")
_LABEL_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,127}")


class DiscoveryConfig(Options, frozen=True):
    """How the agents of a job discover each other."""

    hints: ClassVar = {"torch": '"discovery: torch"'}
    kind: Annotated[Literal["torch", "static", "dns"], NOT_A_KEY] = "torch"
    addresses: Annotated[tuple[str, ...], Written(key="static")] = ()
    """static: ``host:port`` of every agent, this host's included."""
    dns_name: Annotated[str, Written(key="dns")] = ""
    """dns: ``name:port``; the name resolves to the addresses of all agents."""

    def effective(self) -> object:
        """As it is written in the configuration."""
        if self.kind == "static":
            return {"static": list(self.addresses)}
        return {"dns": self.dns_name} if self.kind == "dns" else "torch"


def _listed(values: tuple[str, ...]) -> list[str] | None:
    return list(values) or None


class NetworkConfig(Options, frozen=True):
    """Which of this host's addresses serve other hosts."""

    hints: ClassVar = {
        "interfaces": '"network: {interface: [eth0, eth1]}"',
        "cidrs": '"network: {cidr: [10.0.0.0/8]}"',
        "tls": '"security: {tls: {cert, key, ca}}"',
        "bandwidth": '"memory: {replication_bandwidth: 2GiB/s}"',
        "workers": "delete it: the key is gone",
    }
    interfaces: Annotated[
        tuple[str, ...], Written(partial(_parse_rails, _parse_interface), _listed, "interface")
    ] = ()
    cidrs: Annotated[
        tuple[str, ...], Written(partial(_parse_rails, _parse_cidr), _listed, "cidr")
    ] = ()
    """With neither: the address of the default route, else loopback. Several are several rails."""
    port: Annotated[int, Written(_parse_port)] = 0
    """0: any free one (discovery "torch" only)."""

    def __post_init__(self) -> None:
        if self.interfaces and self.cidrs:
            raise ValueError("interface and cidr exclude each other; write one of them")


class TlsConfig(Options, frozen=True):
    """Absolute paths of PEM files for mutual TLS."""

    cert: Annotated[str, Written(_parse_secret_path, missing="for example cert: /tls/cert.pem")]
    key: Annotated[str, Written(_parse_secret_path, missing="for example key: /tls/key.pem")]
    ca: Annotated[str, Written(_parse_secret_path, missing="for example ca: /tls/ca.pem")]


class SecurityConfig(Options, frozen=True):
    """How hosts authenticate. By default with a token that the job mints (discovery "torch")."""

    hints: ClassVar = {
        "token": "token_file: /a/path or token_env: A_VARIABLE, and put the token there: the "
        "configuration is printed, logged and shared",
    } | dict.fromkeys(("cert", "key", "ca"), f'"{SECRET_EXAMPLES[-1]}"')
    token_file: Annotated[str | None, Written(_parse_secret_path)] = None
    token_env: Annotated[str | None, Written(_parse_variable)] = None
    """Name of the environment variable that holds the token."""
    tls: TlsConfig | None = None

    def __post_init__(self) -> None:
        if self.token_file is not None and self.token_env is not None:
            raise ValueError("token_file and token_env exclude each other; write one of them")


def read_discovery(
    values: Mapping[str, Tree], network: NetworkConfig, security: SecurityConfig
) -> tuple[DiscoveryConfig, NetworkConfig]:
    """The section ``discovery`` of a whole configuration, and ``network`` with its port.

    Raises:
        ConfigError: A key or value is wrong, or they do not fit together.
    """
    # All hosts share one file, so an address without a port has the port they all listen on.
    port = network.port or DEFAULT_PORT
    found = parsed("discovery", values.get("discovery"), partial(_parse_discovery, port))
    if found.kind == "torch":
        return found, network
    if entries(values.get("network"), NetworkConfig).get("port") == 0:
        fail(
            "network.port",
            f'0 takes any free port, and with discovery "{found.kind}" the other hosts must know '
            f"it beforehand; write 1 to 65535, or leave it out for {DEFAULT_PORT}",
        )
    if security == SecurityConfig():
        fail(
            "security",
            f'missing, and with discovery "{found.kind}" no token is minted: write '
            + " or ".join(SECRET_EXAMPLES)
            + f", the same on all hosts (`{MAKE_TOKEN}` makes a token)",
        )
    return found, msgspec.structs.replace(network, port=port)


def _parse_discovery(port: int, value: Tree) -> DiscoveryConfig:
    if value is None or value == "torch":
        return DiscoveryConfig()
    if not isinstance(value, dict):
        fail(
            "",
            f"{show(value)} is not enough to find hosts; write torch, or {STATIC_EXAMPLE}, "
            f"or {DNS_EXAMPLE}",
            allowed=["torch", STATIC_EXAMPLE, DNS_EXAMPLE],
        )
    section = entries(value, DiscoveryConfig)
    static, dns = section.get("static"), section.get("dns")
    parse = partial(_parse_address, port)
    if static is not None and dns is not None:
        raise ValueError("static and dns exclude each other; write one of them")
    if dns is not None:
        return DiscoveryConfig(kind="dns", dns_name=parsed("dns", dns, parse))
    if static is None:
        return DiscoveryConfig()
    if not isinstance(static, list) or not 1 <= len(static) <= STATIC_MAX:
        what = f"{len(static)} addresses" if isinstance(static, list) else show(static)
        fail(
            "static",
            f"{what}, where a list of 1 to {STATIC_MAX} addresses belongs; write {STATIC_EXAMPLE}",
        )
    addresses = parsed("static", static, partial(_parse_each, parse))
    return DiscoveryConfig(kind="static", addresses=addresses)


def _parse_each(parse: Callable[[object], str], values: list[Tree]) -> tuple[str, ...]:
    """The parsed values of a list. Refuses one that is there twice."""
    found = tuple(parsed(child("", n), item, parse) for n, item in enumerate(values))
    for number, value in enumerate(found):
        if value in found[:number]:
            fail(child("", number), f'"{value}" is there twice')
    return found


def _parse_address(default_port: int, value: object) -> str:
    """``host:port``, always with a port."""
    match = _ADDRESS.fullmatch(value) if isinstance(value, str) else None
    host = _host(match[1]) if match else None
    if match is None or host is None:
        raise ValueError(
            f'{show(value)} is no address; write "host:{DEFAULT_PORT}", '
            f'"10.0.0.1:{DEFAULT_PORT}" or "[fd00::1]:{DEFAULT_PORT}"'
        )
    port = int(match[2] or default_port)
    if not 1 <= port <= 65535:
        raise ValueError(f"{show(value)}: there is no port {port}; allowed are 1 to 65535")
    return f"{host}:{port}"


def _host(text: str) -> str | None:
    """A host's name or address, normalised; None if it is neither."""
    address = _ip(text.strip("[]"))
    if text.startswith("["):
        return f"[{address}]" if isinstance(address, ipaddress.IPv6Address) else None
    if address is not None:
        return str(address)
    parts = text.removesuffix(".").split(".")
    # A last part of digits is a mistyped address: no such domain exists.
    named = all(map(_HOST_PART.fullmatch, parts)) and not parts[-1].isdecimal()
    return text if named and len(text) <= 253 else None


def _ip(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None


def _parse_port(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= 65535:
        raise ValueError(f"{show(value)} is no port; allowed are 0 to 65535")
    return value


def _parse_rails(parse: Callable[[object], str], value: Tree) -> tuple[str, ...]:
    """One value or a list of several."""
    if not isinstance(value, list):
        return (parse(value),)
    if len(value) > RAILS_MAX:
        raise ValueError(f"{len(value)} of them; allowed are 1 to {RAILS_MAX}")
    return _parse_each(parse, value)


def _parse_interface(value: object) -> str:
    if isinstance(value, str) and _ip(value.partition("/")[0]):
        raise ValueError(f"{show(value)} is an address; write cidr: {show(value)}")
    if not isinstance(value, str) or not _INTERFACE.fullmatch(value) or value in (".", ".."):
        raise ValueError(f'{show(value)} is no network interface; write for example "eth0"')
    return value


def _parse_cidr(value: object) -> str:
    example = 'write for example "10.0.0.0/8" or "fd00::/8"'
    if not isinstance(value, str):  # ipaddress would take a number for an address
        raise ValueError(f"{show(value)} is no network; {example}")
    try:
        network = ipaddress.ip_network(value, strict=False)
    except ValueError:
        raise ValueError(f"{show(value)} is no network; {example}") from None
    if "/" in value and _ip(value.partition("/")[0]) != network.network_address:
        raise ValueError(f'{show(value)} names an address within a network; write "{network}"')
    return str(network)


def parse_labels(value: Tree) -> tuple[tuple[str, str], ...]:
    """Names and values of the labels, without those whose value is null (for overrides).

    Their order has no meaning: placement sorts labels by name (``Config.labels``).

    Raises:
        ConfigError: A name or a value is wrong.
        ValueError: No mapping, or too many.
    """
    if not isinstance(value, dict):
        raise ValueError(f"{show(value)} is not a mapping; write for example labels: {{rack: r7}}")
    found: list[tuple[str, str]] = []
    for name, item in value.items():
        if not _LABEL_NAME.fullmatch(name):
            # Lower case, because names of environment variables are upper case here.
            fail(
                child("", name),
                'not the name of a label; use lower case letters, digits, ".", "_" and "-"',
            )
        if item is not None:
            # Racks have numbers; unlike 1.10 a whole number is printed as it was written.
            number = isinstance(item, int) and not isinstance(item, bool) and item >= 0
            text = str(item) if number else item
            found.append((name, parsed(child("", name), text, parse_name)))
    if len(found) > LABELS_MAX:
        raise ValueError(f"{len(found)} labels; allowed are 0 to {LABELS_MAX}")
    return tuple(found)


def _parse_secret_path(value: object) -> str:
    try:
        return parse_folder(value)
    except ValueError:
        raise ValueError('not a usable path: write an absolute one, without ".."') from None


def _parse_variable(value: object) -> str:
    if not isinstance(value, str) or not _VARIABLE.fullmatch(value):
        raise ValueError(
            "not the name of an environment variable; write for example CKPT_TOKEN, and put the "
            "token into that variable"
        )
    return value
