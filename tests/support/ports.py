"""Ports that no other process takes between the look for one and its use."""

from __future__ import annotations

import os
import socket


def hold_port(held: socket.socket) -> int:
    """A port of 127.0.0.1 that the kernel gives to no other socket while ``held`` is open.

    ``held`` is bound to it and does not listen. A socket that asks for this port with SO_REUSEADDR,
    as those of agents and of torch's store do, can listen on it.
    """
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    return int(held.getsockname()[1])


def own_loopback() -> str:
    """Three bytes of an address: a network of loopback for this process, where any port is free.

    Two processes share one only if their ids differ by a multiple of 37,500.
    """
    return f"127.{100 + os.getpid() // 250 % 150}.{os.getpid() % 250}"
