"""Where the processes of DCP's process executor meet, without a race for a port."""

from __future__ import annotations

import os

import torch.distributed as dist

_served: list[dist.TCPStore] = []


def meet_on_loopback() -> None:
    """Serve the store in which DCP's processes meet, on a port of 127.0.0.1 that is held.

    Each rank calls it, before its first save with the process executor. DCP by itself looks for
    a free port, lets it go, and has a new process listen there seconds later: by then any
    connection of the machine may have it (``EADDRINUSE``). With ``DCP_USE_PREFIX_STORE`` it uses
    the store at ``MASTER_ADDR`` and ``MASTER_PORT``, which it asks the first rank of the group
    for; torchrun's own will do, too. (torch 2.13, ``_async_process_executor.py``.)
    """
    if not _served:
        _served.append(dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False))
    os.environ.update(
        DCP_USE_PREFIX_STORE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(_served[0].port)
    )
