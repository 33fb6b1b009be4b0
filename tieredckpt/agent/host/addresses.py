"""This host's network addresses: which of them serve other hosts.

Standard library only: IPv4 by the kernel's SIOCGIFCONF, IPv6 from /proc/net/if_inet6, and which
process has a port from /proc/net/tcp.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import glob
import ipaddress
import os
import socket
import struct
from collections.abc import Sequence
from pathlib import Path

from tieredckpt.errors import ConfigError

ADDRESSES_MAX = 16
"""More rails than this are a mistake."""

_SIOCGIFCONF = 0x8912
_IFREQ_BYTES = 40
_INTERFACES_BYTES = _IFREQ_BYTES * 1024
_IF_INET6 = Path("/proc/net/if_inet6")
_LINK_SCOPE = 0x20
_TCP = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
_LISTENING = "0A"
_ELSEWHERE = (("192.0.2.1", socket.AF_INET), ("2001:db8::1", socket.AF_INET6))
"""Addresses reserved for documentation: the default route leads there, and nothing is sent."""


def local_addresses() -> list[tuple[str, str]]:
    """``(interface, address)`` of all that this host has, link-local ones of IPv6 excepted."""
    found = _ipv4()
    try:
        lines = _IF_INET6.read_text("ascii").splitlines()
    except OSError:  # a kernel without IPv6
        lines = []
    for line in lines:
        digits, _, _, scope, _, name = line.split()
        if int(scope, 16) != _LINK_SCOPE:
            found.append((name, str(ipaddress.IPv6Address(bytes.fromhex(digits)))))
    return found


def _ipv4() -> list[tuple[str, str]]:
    buffer = array.array("B", bytes(_INTERFACES_BYTES))
    where, size = buffer.buffer_info()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        reply = fcntl.ioctl(sock.fileno(), _SIOCGIFCONF, struct.pack("iL", size, where))
    used = struct.unpack("iL", reply)[0]
    data = buffer.tobytes()[:used]
    found = []
    for start in range(0, used, _IFREQ_BYTES):
        name = data[start : start + 16].split(b"\0", 1)[0].decode("ascii", "replace")
        address = socket.inet_ntoa(data[start + 20 : start + 24])
        found.append((name.partition(":")[0], address))  # eth0:1 is an alias of eth0
    return found


def default_address() -> str:
    """The address of the default route, else loopback."""
    for elsewhere, family in _ELSEWHERE:
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as sock:
                sock.connect((elsewhere, 9))
                return str(sock.getsockname()[0])
        except OSError:
            continue
    return "127.0.0.1"


def choose_addresses(interfaces: Sequence[str], cidrs: Sequence[str]) -> tuple[str, ...]:
    """The addresses to listen on, in the order in which they were asked for, each once.

    A CIDR of one address (``/32``, ``/128``, or without a length) is that address itself: loopback
    has many that no interface lists.

    Raises:
        ConfigError: An interface does not exist or has no address, or no address is in a CIDR.
    """
    if not interfaces and not cidrs:
        return (default_address(),)
    here = local_addresses()
    chosen: dict[str, None] = {}
    for name in interfaces:
        mine = [address for interface, address in here if interface == name]
        if not mine:
            names = ", ".join(sorted({interface for interface, _ in here}))
            raise ConfigError(
                f"network.interface: {name[:64]!r} has no address on this host; those with one "
                f"are {names}",
                key="network.interface",
            )
        chosen[mine[0]] = None  # the IPv4 one if it has both
    for text in cidrs:
        chosen |= dict.fromkeys(_in_cidr(text, [address for _, address in here]))
    if len(chosen) > ADDRESSES_MAX:
        raise ConfigError(
            f"network: {len(chosen)} addresses of this host are meant; the limit is "
            f"{ADDRESSES_MAX}: name the interfaces",
            key="network.cidr",
        )
    return tuple(chosen)


def _in_cidr(text: str, here: Sequence[str]) -> list[str]:
    try:
        network = ipaddress.ip_network(text, strict=False)
    except ValueError as error:
        raise ConfigError(f"network.cidr: {error}", key="network.cidr") from error
    if network.num_addresses == 1:
        return [str(network.network_address)]
    found = [address for address in here if ipaddress.ip_address(address) in network]
    if not found:
        raise ConfigError(
            f"network.cidr: this host has no address in {network}; it has {', '.join(here)}",
            key="network.cidr",
        )
    return found


def with_port(address: str, port: int) -> str:
    """``ip:port`` or ``[ip6]:port``."""
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def split_port(text: str) -> tuple[str, int]:
    """Inverse of :func:`with_port`, for names of hosts too. Raises ValueError."""
    host, sep, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ValueError(f"{text[:200]!r}: an IPv6 address belongs in brackets")
    if not sep or not host or not port.isascii() or not port.isdigit() or int(port) > 0xFFFF:
        raise ValueError(f"{text[:200]!r} is not HOST:PORT")
    return host, int(port)


def pid_on_port(port: int) -> int | None:
    """The process that listens on TCP ``port``; None: unknown, as another user's is."""
    sockets = set()
    for table in _TCP:
        with contextlib.suppress(OSError):  # a kernel without IPv6
            rows = [line.split() for line in table.read_text("ascii").splitlines()[1:]]
            found = [row for row in rows if int(row[1].rpartition(":")[2], 16) == port]
            sockets |= {f"socket:[{row[9]}]" for row in found if row[3] == _LISTENING}
    for link in glob.iglob("/proc/[0-9]*/fd/*") if sockets else ():
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            if os.readlink(link) in sockets:
                return int(link.split("/")[2])
    return None
