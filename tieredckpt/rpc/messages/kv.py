"""Messages of the key-value tables in agents (``agent/tables.py``), for both kinds of callers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, ClassVar, Literal

import msgspec

from tieredckpt.errors import RemoteProtocolError
from tieredckpt.format.manifest import Name
from tieredckpt.rpc.messages import base
from tieredckpt.rpc.messages.base import SMALL_BODY_BYTES_MAX, Count, NodeRequest, PeerRequest

WAIT_S_MAX = 5.0
"""Longest wait of one request: less than any client's own limit. Clients ask again."""
KEYS_MAX = 4096
KEY_CHARS_MAX = 4096
REPLY_BYTES_MAX = 8 << 20
"""Of the keys and values in one reply."""
PAGES_MAX = 16
"""Replies that have all of a table: more than a full one needs, also if it changes meanwhile."""

Op = Literal[
    "set", "append", "get", "check", "add", "compare_set", "delete", "count", "watch", "push",
    "pop", "len",
]  # fmt: skip
_Key = Annotated[str, msgspec.Meta(max_length=KEY_CHARS_MAX)]
_Value = Annotated[bytes, msgspec.Meta(max_length=SMALL_BODY_BYTES_MAX)]


class KvReply(base.Message, frozen=True, omit_defaults=True):
    """Reply to :class:`Kv`."""

    table_id: str
    """Made at random with the table: another one means that the earlier keys are lost."""
    keys: tuple[str, ...] = ()
    """Of "watch", in order."""
    values: tuple[bytes | None, ...] = ()
    """In the order of the keys; None: there is none (in time)."""
    number: int = 0
    """See each operation."""
    more: bool = False
    """Of "watch": there are keys behind these."""


class Kv(NodeRequest[KvReply], frozen=True):
    """One operation on a table in the agent's memory, which the first request makes.

    ==============  ==============================================================================
    set, append     ``values`` of ``keys``
    get             values of ``keys``; waits until all exist
    check           waits likewise, for queues that are not empty, too; has no values
    add             ``amount`` to one key, a decimal number (0 if missing); number: the sum
    compare_set     ``values`` (expected, desired) of one key; the reply has its value now. A
                    missing key equals b"" alone, else the reply has what was expected
    delete          number: the ``keys`` that existed
    count           number: keys
    watch           keys and values in order, those behind ``keys[0]`` if it is given, as many as
                    fit into a reply; waits until the revision is not ``after``; number: the
                    revision, which each change increases
    push, pop, len  of a queue, apart from the keys: add a value; take the first one, or wait for
                    one; number: its length
    ==============  ==============================================================================

    A wait ends after ``wait_s``, too. The number of get, check and pop is 1, or 0 if something was
    missing until then.

    Raises:
        CapacityError: The namespace's tables are full, too many of its requests wait, or a value
            or the reply is too large.
        UsageError: ``add`` to a value that is no decimal number.
    """

    packed: ClassVar[bool] = True
    awaited: ClassVar[bool] = True

    table: Name
    op: Op
    keys: Annotated[tuple[_Key, ...], msgspec.Meta(max_length=KEYS_MAX)] = ()
    values: Annotated[tuple[_Value, ...], msgspec.Meta(max_length=KEYS_MAX)] = ()
    amount: Annotated[int, msgspec.Meta(ge=-(1 << 62), le=1 << 62)] = 0
    wait_s: Annotated[float, msgspec.Meta(ge=0, le=WAIT_S_MAX)] = 0.0
    after: Count = 0
    once: Annotated[str, msgspec.Meta(max_length=32)] = ""
    """Requests with the same one, not empty, are applied once and get the same reply: clients
    repeat a request whose connection broke. Without it set, get, delete and watch may be repeated.
    """

    def __post_init__(self) -> None:
        keys, values = len(self.keys), len(self.values)
        if self.op in ("add", "compare_set", "push", "pop", "len") and keys != 1:
            raise ValueError(f"{self.op} is of one key, not of {keys}")
        wanted = {"set": keys, "append": keys, "push": 1, "compare_set": 2}.get(self.op, 0)
        if values != wanted:
            raise ValueError(f"{self.op} of {keys} keys with {values} values, not {wanted}")


def watch(ask: Callable[[Kv], KvReply], request: Kv) -> KvReply:
    """All pages of a "watch" as one reply; its number is of the first: no change is missed.

    Raises RemoteProtocolError: There are more than a table has.
    """
    reply = page = ask(request)
    pages = 1
    while page.more:
        pages += 1
        if pages > PAGES_MAX:
            raise RemoteProtocolError(f"table {request.table} has more than {PAGES_MAX} pages")
        page = ask(msgspec.structs.replace(request, keys=page.keys[-1:], wait_s=0.0))
        keys, values = reply.keys + page.keys, reply.values + page.values
        reply = msgspec.structs.replace(reply, keys=keys, values=values)
    return reply


class PeerKv(PeerRequest[KvReply], frozen=True):
    """:class:`Kv` in another host's agent."""

    awaited: ClassVar[bool] = True
    reply_bytes_max: ClassVar[int] = 2 * REPLY_BYTES_MAX
    request: Kv

    @classmethod
    def verb(cls) -> str:
        """As of the request on the local socket."""
        return Kv.verb()


base.resolve(globals().values())
