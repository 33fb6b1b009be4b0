"""Ports that no other process takes between the look for one and its use."""

from __future__ import annotations

import socket


def hold_port(held: socket.socket) -> int:
    """A port of 127.0.0.1 that nobody else gets while ``held`` is open, which is bound to it.

    It does not listen: who says SO_REUSEADDR, as agents and torch's store do, can. Neither another
    bind nor a connection on its way out is given the port meanwhile.
    """
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    return int(held.getsockname()[1])
