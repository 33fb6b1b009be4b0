"""The keys about other hosts: discovery, network, authentication and labels.

A token is read from a file or an environment variable, never from the configuration, which is
printed, logged and committed. A user may write one there all the same, so no error about a key of
``security`` repeats its value.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable
from typing import Annotated, Literal

from tieredckpt.config.names import parse_folder, parse_name
from tieredckpt.config.reader import Tree, child
from tieredckpt.config.sections import Options, Section, Written, fail, keys_of, parsed
from tieredckpt.config.units import one_of, show

DEFAULT_PORT = 7411
"""Default of static and dns discovery, for which other hosts must know the port beforehand."""
STATIC_MAX = 4096
"""Most addresses in a static list; a larger job uses a name service."""
RAILS_MAX = 8
"""Most interfaces or networks that one host serves on."""
LABELS_MAX = 8

STATIC_EXAMPLE = "discovery: {static: [host-a:7411, host-b:7411]}"
DNS_EXAMPLE = 'discovery: {dns: "agents.my-job:7411"}'
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

    kind: Literal["torch", "static", "dns"] = "torch"
    addresses: tuple[str, ...] = ()
    """static: ``host:port`` of every agent, this host's included."""
    dns_name: str = ""
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

    interfaces: Annotated[tuple[str, ...], Written(show=_listed, key="interface")] = ()
    cidrs: Annotated[tuple[str, ...], Written(show=_listed, key="cidr")] = ()
    """With neither: the address of the default route, else loopback. Several are several rails."""
    port: Annotated[int, Written(_parse_port)] = 0
    """0: any free one (discovery "torch" only)."""


class TlsConfig(Options, frozen=True):
    """Absolute paths of PEM files for mutual TLS."""

    cert: Annotated[str, Written(_parse_secret_path, missing="for example cert: /tls/cert.pem")]
    key: Annotated[str, Written(_parse_secret_path, missing="for example key: /tls/key.pem")]
    ca: Annotated[str, Written(_parse_secret_path, missing="for example ca: /tls/ca.pem")]


class SecurityConfig(Options, frozen=True):
    """How hosts authenticate. By default with a token that the job mints (discovery "torch")."""

    token_file: Annotated[str | None, Written(_parse_secret_path)] = None
    token_env: Annotated[str | None, Written(_parse_variable)] = None
    """Name of the environment variable that holds the token."""
    tls: TlsConfig | None = None


def read_hosts(around: Section) -> tuple[DiscoveryConfig, NetworkConfig, SecurityConfig]:
    """The sections ``discovery``, ``network`` and ``security`` of a configuration.

    Raises:
        ConfigError: A key or value is wrong, or they do not fit together.
    """
    security = _security(around.raw("security"))
    kind, listed = _discovery(around.raw("discovery"))
    network = _network(around.raw("network"), kind)
    if kind != "torch" and security == SecurityConfig():
        fail(
            "security",
            f'missing, and with discovery "{kind}" no token is minted: write '
            + " or ".join(SECRET_EXAMPLES),
        )
    # All hosts share one file, so an address without a port has the port they all listen on.
    parse, key = _address(network.port), child("discovery", kind)
    if kind == "dns":
        return DiscoveryConfig(kind=kind, dns_name=parsed(key, listed[0], parse)), network, security
    addresses = _each(key, listed, parse)
    return DiscoveryConfig(kind=kind, addresses=addresses), network, security


def _discovery(value: Tree) -> tuple[Literal["torch", "static", "dns"], list[Tree]]:
    """The kind, and the addresses as they are written."""
    allowed = ["torch", STATIC_EXAMPLE, DNS_EXAMPLE]
    if value is None or value == "torch":
        return "torch", []
    if value == "static":
        fail("discovery", f'"static" needs the addresses; write {STATIC_EXAMPLE}', allowed=allowed)
    if value in ("dns", "kubernetes"):
        fail("discovery", f"{show(value)} needs a name; write {DNS_EXAMPLE}", allowed=allowed)
    if not isinstance(value, dict):
        fail(
            "discovery",
            f"{show(value)} is no way to find hosts; write torch, or {{static: [host:port, ...]}}, "
            "or {dns: name:port}",
            allowed=allowed,
        )
    section = Section(value, "discovery", ("static", "dns"), hints={"torch": '"discovery: torch"'})
    static, dns = section.raw("static"), section.raw("dns")
    if static is not None and dns is not None:
        fail("discovery", "static and dns exclude each other; write one of them")
    if dns is not None:
        return "dns", [dns]
    if static is None:
        return "torch", []
    if not isinstance(static, list) or not 1 <= len(static) <= STATIC_MAX:
        what = f"{len(static)} addresses" if isinstance(static, list) else show(static)
        fail(
            section.key("static"),
            f"{what}, where a list of 1 to {STATIC_MAX} addresses belongs; write {STATIC_EXAMPLE}",
        )
    return "static", static


def _each(key: str, values: list[Tree], parse: Callable[[object], str]) -> tuple[str, ...]:
    """The parsed values of a list. Raises ConfigError if one is refused, or is there twice."""
    found = tuple(parsed(child(key, n), item, parse) for n, item in enumerate(values))
    for number, value in enumerate(found):
        if value in found[:number]:
            fail(child(key, number), f'"{value}" is there twice')
    return found


def _address(default_port: int) -> Callable[[object], str]:
    """A parser of ``host:port``; the result always has a port."""

    def parse(value: object) -> str:
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

    return parse


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


def _network(value: Tree, kind: str) -> NetworkConfig:
    section = Section(
        value,
        "network",
        keys_of(NetworkConfig),
        hints={
            "interfaces": '"network: {interface: [eth0, eth1]}"',
            "cidrs": '"network: {cidr: [10.0.0.0/8]}"',
            "tls": '"security: {tls: {cert, key, ca}}"',
            "bandwidth": '"memory: {replication_bandwidth: 2GiB/s}"',
            "workers": "nothing, the key is gone: delete it",
        },
    )
    interfaces = _rails(section, "interface", _parse_interface)
    cidrs = _rails(section, "cidr", _parse_cidr)
    if interfaces and cidrs:
        fail("network", "interface and cidr exclude each other; write one of them")
    fixed = kind != "torch"
    port = DEFAULT_PORT if fixed else 0
    network = section.fill(NetworkConfig(interfaces=interfaces, cidrs=cidrs, port=port))
    if fixed and network.port == 0:
        fail(
            section.key("port"),
            f'0 takes any free port, and with discovery "{kind}" the other hosts must know it '
            f"beforehand; write 1 to 65535, or leave it out for {DEFAULT_PORT}",
        )
    return network


def _parse_port(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= 65535:
        raise ValueError(f"{show(value)} is no port; allowed are 0 to 65535")
    return value


def _rails(section: Section, name: str, parse: Callable[[object], str]) -> tuple[str, ...]:
    """One value or a list of several."""
    value, path = section.raw(name), section.key(name)
    if value is None:
        return ()
    if not isinstance(value, list):
        return (parsed(path, value, parse),)
    if len(value) > RAILS_MAX:
        fail(path, f"{len(value)} of them; allowed are 1 to {RAILS_MAX}")
    return _each(path, value, parse)


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


def read_labels(value: Tree) -> tuple[tuple[str, str], ...]:
    """Names and values of the labels, without those whose value is null (for overrides).

    Their order has no meaning: placement sorts labels by name (``Config.labels``).

    Raises:
        ConfigError: A name or a value is wrong.
    """
    if value is None:
        return ()
    if not isinstance(value, dict):
        fail("labels", f"{show(value)} is not a mapping; write for example labels: {{rack: r7}}")
    found: list[tuple[str, str]] = []
    for name, item in value.items():
        key = child("labels", name)
        if not _LABEL_NAME.fullmatch(name):
            # Lower case, because names of environment variables are upper case here.
            fail(key, 'not the name of a label; use lower case letters, digits, ".", "_" and "-"')
        if item is not None:
            # Racks have numbers; unlike 1.10 a whole number is printed as it was written.
            number = isinstance(item, int) and not isinstance(item, bool) and item >= 0
            found.append((name, parsed(key, str(item) if number else item, parse_name)))
    if len(found) > LABELS_MAX:
        fail("labels", f"{len(found)} labels; allowed are 0 to {LABELS_MAX}")
    return tuple(found)


def _security(value: Tree) -> SecurityConfig:
    keys = keys_of(SecurityConfig)
    if value is not None and not isinstance(value, dict):
        fail("security", f"not a mapping; write {one_of(SECRET_EXAMPLES)}")
    if isinstance(value, dict) and "token" in value:
        fail(
            "security.token",
            "a token does not stand in the configuration, which is printed, logged and shared; "
            "write token_file: /a/path or token_env: A_VARIABLE, and put it there",
            allowed=list(keys),
        )
    section = Section(
        value,
        "security",
        keys,
        hints=dict.fromkeys(("cert", "key", "ca"), f'"{SECRET_EXAMPLES[-1]}"'),
    )
    found = section.fill(SecurityConfig(tls=_tls(section)))
    if found.token_file is not None and found.token_env is not None:
        fail("security", "token_file and token_env exclude each other; write one of them")
    return found


def _tls(around: Section) -> TlsConfig | None:
    value, path = around.raw("tls"), around.key("tls")
    if value is None:
        return None
    if not isinstance(value, dict):
        fail(path, f"not a mapping; write {SECRET_EXAMPLES[-1]}")
    return Section(value, path, keys_of(TlsConfig)).make(TlsConfig)


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
