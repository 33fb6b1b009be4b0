"""Messages between the supervisor and its processes: JSON, a packet each, over a socket pair.

Each process has its own, so no message names its sender.
"""

from __future__ import annotations

import msgspec

from tieredckpt.rpc.messages.agent import HostEntry

MESSAGE_BYTES_MAX = 1 << 16
SOCKET_VARIABLE = "TIEREDCKPT_LIVE"
"""Descriptor of its end of the socket pair, in the environment of a process."""


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=str.lower, tag_field="is"):
    """One packet. ``generation``: the one that it belongs to; a receiver ignores another one's."""

    generation: int = 0


class Keys(msgspec.Struct, frozen=True, kw_only=True):
    """The key-value table of a generation on several hosts.

    Attributes:
        runtime_dir: Of the agent of this host.
        namespace, table: The table.
        hosts: Those whose agents share it, in one order on all.
    """

    runtime_dir: str
    namespace: str
    table: str
    hosts: tuple[HostEntry, ...]


class Train(Message, frozen=True):
    """To a process: enter a generation.

    Attributes:
        rank, size: The process's rank, and the number of ranks.
        local_rank, local_size: The same among the ranks of this host.
        host_rank: Of this host among the hosts.
        run: Id of the run.
        job: Its name in the environment.
        store: Path of the generation's keys if the job has one host.
        keys: Else their table.
        reason: Why the generation before ended.
        updated: The newest update of the generation before.
        saves_only: Save what the ranks keep, and leave: others still start.
    """

    rank: int
    size: int
    local_rank: int = 0
    local_size: int = 1
    host_rank: int = 0
    run: str = ""
    job: str = ""
    store: str = ""
    keys: Keys | None = None
    reason: str = ""
    updated: int = 0
    saves_only: bool = False


class Change(Message, frozen=True):
    """To a process: save together with all ranks after the next update, and leave ``train``.

    Attributes:
        size: Ranks of the next generation.
        left_s: Time that a host has which leaves; None: it is not limited.
    """

    size: int
    left_s: float | None = None


class Stop(Message, frozen=True):
    """To a process: the generation ends; leave ``train`` and keep the state."""


class Leave(Message, frozen=True):
    """To a process: training is done or cannot go on; return from ``live.run``."""

    code: int


class Ready(Message, frozen=True):
    """From a process: it is in no generation, and may enter one.

    Attributes:
        version: The last update of the state that it keeps; None: it keeps none.
    """

    version: int | None = None


class Progress(Message, frozen=True):
    """From a rank: it goes on.

    Attributes:
        what: What it did: "begin", "load", "ping" or "update".
        version: The last finished update.
        quiet_s: No further progress need be expected for this long.
        restored: After "load", of rank 0: the report of the restore, for the log.
    """

    what: str
    version: int
    quiet_s: float = 0.0
    restored: str = ""


class Fault(Message, frozen=True):
    """From a rank: ``train`` raised an error that no end of the generation explains.

    ``is_final``: no other generation should be tried.
    """

    error: str
    is_final: bool = False


class Done(Message, frozen=True):
    """From a rank: ``train`` returned after update ``version``."""

    version: int = 0


ToProcess = Train | Change | Stop | Leave
FromProcess = Ready | Progress | Fault | Done

encode = msgspec.json.Encoder().encode
decode_to_process = msgspec.json.Decoder(ToProcess).decode
decode_from_process = msgspec.json.Decoder(FromProcess).decode
"""Raise msgspec.ValidationError or msgspec.DecodeError."""
