"""Several hosts on one machine: network namespaces on a switch, with links that can be cut.

For tests and examples that lose hosts. Needs root and the command ``ip`` (package iproute2); ask
:func:`missing` first. Each :class:`Network` is an island: its addresses may equal those of another
one and reach nothing outside. Names begin with the process id of their maker, so that what a
killed process left behind is found and removed by the next one (:func:`sweep`).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import os
import re
import signal
import subprocess
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["Network", "enter", "inside", "missing", "sweep"]

_IP = next((p for p in ("/usr/sbin/ip", "/sbin/ip", "/usr/bin/ip") if os.access(p, os.X_OK)), "")
_NAMED = Path("/run/netns")
_CLONE_NEWNET = 0x40000000
_PREFIX = "tcknet"
_DEADLINE_S = 30.0
_numbers = itertools.count()


def _ip(*arguments: str, lines: Iterable[str] = ()) -> str:
    """Run ``ip``; with ``lines`` in one batch. Raises OSError with what it says."""
    command = [_IP, *arguments, *(["-batch", "-"] if lines else [])]
    done = subprocess.run(
        command,
        input="".join(f"{line}\n" for line in lines),
        capture_output=True,
        text=True,
        timeout=_DEADLINE_S,
        check=False,
    )
    if done.returncode:
        raise OSError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout


@functools.cache
def missing() -> str | None:
    """What keeps this machine from making network namespaces; None: nothing. Asked once."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if not _IP:
        return "network namespaces need the command ip (package iproute2)"
    try:
        with Network(subnets=1) as network:
            network.add("probe", 1)
    except OSError as error:
        return f"this machine makes no network namespaces: {error}"
    return None


def enter(name: str) -> None:
    """Move this thread, and every one that it starts later, into a namespace for good."""
    fd = os.open(_NAMED / name, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _setns(fd)
    finally:
        os.close(fd)


@contextmanager
def inside(name: str) -> Iterator[None]:
    """A block whose sockets belong to a namespace: they stay there wherever they are used."""
    home = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        enter(name)
        try:
            yield
        finally:
            _setns(home)
    finally:
        os.close(home)


def _setns(fd: int) -> None:
    # os.setns came with Python 3.12.
    if ctypes.CDLL(None, use_errno=True).setns(fd, _CLONE_NEWNET):
        number = ctypes.get_errno()
        raise OSError(number, f"setns: {os.strerror(number)}")


def sweep() -> list[str]:
    """Remove namespaces, and end the processes in them, whose maker has died; their names."""
    gone = []
    for path in sorted(_NAMED.glob(f"{_PREFIX}-*")) if _NAMED.is_dir() else ():
        found = re.fullmatch(rf"{_PREFIX}-(\d+)-\d+-.+", path.name)
        if found and not Path("/proc", found[1]).exists():
            with contextlib.suppress(OSError):  # somebody else removes it at this moment
                _remove(path.name)
                gone.append(path.name)
    return gone


def _remove(name: str) -> None:
    for pid in _ip("netns", "pids", name).split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    _ip("netns", "del", name)


@functools.cache
def _no_name_server() -> list[str]:
    """Routes that make looking up a name fail at once: torch looks up the name of each peer."""
    try:
        lines = Path("/etc/resolv.conf").read_text("ascii", "replace").splitlines()
    except OSError:
        return []
    found = (re.match(r"nameserver\s+(?!127)([\d.]+)\s*$", line) for line in lines)
    return [f"route add unreachable {each}" for each in sorted({f[1] for f in found if f})]


class Network:
    """A switch, and hosts on it with one interface per subnet: eth0, eth1, ...

    Host number n has the address ``10.77.<subnet>.<n>``. Use it as a context manager, or call
    :meth:`close`: both end all processes that still are in its namespaces. Not thread-safe.

    Args:
        subnets: How many networks each host is on.

    Raises:
        OSError: By every method; the text is what ``ip`` says.
    """

    def __init__(self, *, subnets: int = 2) -> None:
        self.subnets = subnets
        self._prefix = f"{_PREFIX}-{os.getpid()}-{next(_numbers)}"
        self._switch = f"{self._prefix}-switch"
        self._names: list[str] = []
        self._numbers: dict[str, int] = {}
        self._relays: dict[tuple[str, int], str] = {}
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            self._make(self._switch)
            bridges = range(subnets)
            lines = [f"link add name br{subnet} type bridge" for subnet in bridges]
            _ip("-n", self._switch, lines=[*lines, *(f"link set br{i} up" for i in bridges)])
            undo.pop_all()

    def _make(self, name: str) -> None:
        _ip("netns", "add", name)
        self._names.append(name)
        _ip("-n", name, "link", "set", "lo", "up")

    def add(self, host: str, number: int) -> str:
        """Plug in a host (1 to 250, each number once at a time); the name of its namespace."""
        name = f"{self._prefix}-{host}"
        self._make(name)
        self._numbers[host] = number
        _ip(
            lines=[
                f"link add name eth{subnet} netns {name} type veth "
                f"peer name h{number}n{subnet} netns {self._switch}"
                for subnet in range(self.subnets)
            ]
        )
        ports = [f"h{number}n{subnet}" for subnet in range(self.subnets)]
        lines = [f"link set {port} master br{i} up" for i, port in enumerate(ports)]
        _ip("-n", self._switch, lines=lines)
        lines = []
        for subnet in range(self.subnets):
            lines += [f"addr add {self.address(host, subnet)}/24 dev eth{subnet}"]
            lines += [f"link set eth{subnet} up"]
        _ip("-n", name, lines=[*lines, "route add default dev eth0", *_no_name_server()])
        return name

    def address(self, host: str, subnet: int = 0) -> str:
        """The host's IPv4 address on a subnet."""
        return f"10.77.{subnet}.{self._numbers[host]}"

    def namespace(self, host: str) -> str:
        """The name of a host's namespace, for :func:`enter`, :func:`inside`, ``ip netns exec``."""
        return f"{self._prefix}-{host}"

    def remove(self, host: str) -> None:
        """Unplug a host first, so that nobody is told, then end all its processes."""
        self.cut(host)
        # The kernel clears a namespace away some time after it is deleted, and its links with it.
        _ip("-n", self._switch, lines=[f"link del {port}" for port in self._ports(host, None)])
        self._drop(self.namespace(host))
        for (relayed, subnet), outer in list(self._relays.items()):
            if relayed == host:
                self._drop(outer)
                self._drop(f"{outer}-in")
                del self._relays[relayed, subnet]
        del self._numbers[host]

    def _drop(self, name: str) -> None:
        _remove(name)
        self._names.remove(name)

    def cut(self, host: str, subnet: int | None = None, *, noticed: bool = False) -> None:
        """Cut a host's link to one subnet, or all. What is sent is lost.

        Args:
            host: Whose link.
            subnet: Which one; None: all.
            noticed: The host sees that its cable has no carrier; else nothing tells it.
        """
        how = "down" if noticed else "nomaster"
        _ip("-n", self._switch, lines=[f"link set {p} {how}" for p in self._ports(host, subnet)])

    def heal(self, host: str, subnet: int | None = None) -> None:
        """Undo :meth:`cut`. Idempotent."""
        lines = [f"link set {p} master br{p[-1]} up" for p in self._ports(host, subnet)]
        _ip("-n", self._switch, lines=lines)

    def _ports(self, host: str, subnet: int | None) -> list[str]:
        chosen = range(self.subnets) if subnet is None else (subnet,)
        return [f"h{self._numbers[host]}n{each}" for each in chosen]

    def part(self, host: str, other: str, subnet: int, *, parted: bool = True) -> None:
        """Lose what two hosts send to each other, and nothing else; or no longer."""
        for one, two in ((host, other), (other, host)):
            address = self.address(two, subnet)
            # The address of no network card: the switch floods it, and nobody takes it.
            what = f"neigh replace {address} lladdr 02:00:00:00:00:01 nud permanent"
            if not parted:
                what = f"neigh del {address}"
            _ip("-n", self.namespace(one), *what.split(), "dev", f"eth{subnet}")

    def interpose(self, host: str, subnet: int) -> tuple[str, str]:
        """Put a middle man between a host and the switch of one subnet, before the host uses it.

        Nothing passes by itself any more: a process with sockets in both namespaces has to carry
        it. The outer one has the host's address; the inner one has those of everybody else.

        Returns:
            The names of the outer and the inner namespace.
        """
        number = self._numbers[host]
        name, outer = self.namespace(host), f"{self._prefix}-{host}-via{subnet}"
        inner = f"{outer}-in"
        self._make(outer)
        self._make(inner)
        address, port = self.address(host, subnet), f"h{number}n{subnet}"
        _ip("-n", name, "link", "del", f"eth{subnet}")
        eth, there = f"link add name eth{subnet} netns", "type veth peer name"
        _ip(
            lines=[
                f"{eth} {outer} {there} {port} netns {self._switch}",
                f"{eth} {name} {there} host netns {inner}",
            ]
        )
        _ip("-n", self._switch, "link", "set", port, "master", f"br{subnet}", "up")
        up = [f"addr add {address}/24 dev eth{subnet}", f"link set eth{subnet} up"]
        _ip("-n", outer, lines=up)
        _ip("-n", name, lines=[*up, *(["route add default dev eth0"] if subnet == 0 else [])])
        # Every address of the subnet is local here, except that of the host itself.
        _ip(
            "-n",
            inner,
            lines=[
                "link set host up",
                f"route add local 10.77.{subnet}.0/24 dev lo",
                f"route add {address}/32 dev host table local",
            ],
        )
        self._relays[host, subnet] = outer
        return outer, inner

    def close(self) -> None:
        """End what runs in the namespaces, and remove them. Idempotent."""
        while self._names:
            with contextlib.suppress(OSError):  # the next sweep tries again
                _remove(self._names[-1])
            self._names.pop()

    def __enter__(self) -> Network:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
