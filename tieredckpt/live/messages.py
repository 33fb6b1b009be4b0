"""Messages of a supervisor: to and from its processes, and to other supervisors.

Those of processes are JSON, a packet each, over a socket pair that each process has for itself, so
no message names its sender. Supervisors of several hosts exchange views and decisions.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from tieredckpt.format.envelope import unpack_struct
from tieredckpt.policy.ranks import Member
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
_to_process: msgspec.json.Decoder[ToProcess] = msgspec.json.Decoder(ToProcess)
_from_process: msgspec.json.Decoder[FromProcess] = msgspec.json.Decoder(FromProcess)


def decode_to_process(data: bytes) -> ToProcess:
    """A packet of the supervisor. Raises IntegrityError."""
    return unpack_struct(_to_process, data, "the supervisor's message")


def decode_from_process(data: bytes) -> FromProcess:
    """A packet of a process. Raises IntegrityError."""
    return unpack_struct(_from_process, data, "its message")


# --- between supervisors --------------------------------------------------------------------------

Where = Literal["starting", "ready", "in", "done"]
Term = tuple[int, str, str]
"""Its number, the host that leads, and the id of its start: before it, the host may have made
decisions that it does not know any more. Ordered."""
Place = tuple[Term, int]
"""A decision's place in the order of decisions. That of the decision that began a generation
identifies it: two leaders may count alike."""
WITH_RANKS: tuple[Where, ...] = ("ready", "done", "in")
"""Processes that have imported everything."""
NEVER: Place = ((0, "", ""), 0)


class ProcessFacts(msgspec.Struct, frozen=True, kw_only=True):
    """One process.

    Attributes:
        pid: Its process.
        where: "starting": not in ``live.run`` yet; "ready": in no generation; "in": in one;
            "done": its ``train`` returned.
        began: The generation that it is in, or was in last.
        version: The last update of the state that it keeps, or of its ``train``; None: it keeps
            none.
        begun: The last update before the step that it began last; None: it began none.
        started_s, stopped_s: When it was started, and ordered to leave its generation (None: it was
            not), by the clock of its host.
        is_changing: It was asked to save and leave with all ranks.
    """

    pid: int
    where: Where
    began: Place = NEVER
    version: int | None = None
    begun: int | None = None
    started_s: float = 0.0
    stopped_s: float | None = None
    is_changing: bool = False


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """A rank died, or its ``train`` raised.

    Attributes:
        text: For the log and for ``world.reason``.
        is_death: Its process is gone.
        by_signal: A signal from outside killed it, so that the script is not to blame.
        code: Exit code for the job if it goes on failing.
        is_final: It would come again.
    """

    text: str
    is_death: bool = False
    by_signal: bool = False
    code: int = 1
    is_final: bool = False


class Order(msgspec.Struct, frozen=True, order=True):
    """A user's order to change the world. Of two the later one counts.

    Attributes:
        at_ns: When it was given, by the wall clock.
        size: Ranks of the next generations; 0: as before.
        before: Ranks before it was adopted; they are wanted again if this size does not work.
        host: It is to have no ranks.
        deadline_s: It ends after this time, whatever it holds.
    """

    at_ns: int = 0
    size: int = 0
    before: int = 0
    host: str = ""
    deadline_s: float = 0.0


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """What all hosts are to do. A host adopts a decision if its ``place`` is higher.

    Attributes:
        term: The leader's. Another leader has a higher one.
        number: Of the decision.
        voters: Hosts, most of which agree on what is decided, and the id of each one's start.
        old_voters: Those before, most of which agree as well until ``voters`` are adopted; {}: they
            are.
        run: Id of the run.
        generation: From 1; 0: none began.
        began: Place of the decision that began it.
        members: By rank.
        hosts: Of the members, in the order of their lowest ranks.
        saves_only: The ranks save what they keep, and then wait for others.
        ended: Why the generation ended; "": it runs.
        is_outside: A host was lost, though it may be back: the script is not to blame.
        reason: Why the generation before ended.
        updated: The newest update before the generation began.
        failures: Generations in a row that the script ended after update ``failed_at``.
        order: The newest one of a user.
        wanted: Ranks of the next generation while processes are missing; 0: as many as ordered.
        shrunk: Generations in a row that lost processes soon, and that none replaced.
        leaving: Hosts that are to have no ranks, and then end.
        left_s: The least time that one of them has, as of the decision; None: not limited.
        exit: The job is over, with this code.
    """

    term: Term = NEVER[0]
    number: int = 0
    voters: dict[str, str] = {}
    old_voters: dict[str, str] = {}
    run: str = ""
    generation: int = 0
    began: Place = NEVER
    members: tuple[Member, ...] = ()
    hosts: tuple[HostEntry, ...] = ()
    saves_only: bool = False
    ended: str = ""
    is_outside: bool = False
    reason: str = ""
    updated: int = 0
    failures: int = 0
    failed_at: int = -1
    order: Order = Order()
    wanted: int = 0
    shrunk: int = 0
    leaving: tuple[str, ...] = ()
    left_s: float | None = None
    exit: int | None = None

    def table_of(self, job: str) -> str:
        """Name of the generation's table; no two generations have the same."""
        (term, _, start), number = self.began
        return f"{job}.{term}.{start}.{number}"

    @property
    def size(self) -> int:
        """Ranks of the generation."""
        return len(self.members)

    @property
    def place(self) -> Place:
        """Its place in the order of decisions."""
        return self.term, self.number

    def ranks_on(self, host: str) -> dict[int, int]:
        """The rank of each pid on a host."""
        return {each.pid: rank for rank, each in enumerate(self.members) if each.host == host}


class View(msgspec.Struct, frozen=True, kw_only=True):
    """What one supervisor knows; durations as of now.

    Attributes:
        start: Id of its start.
        leader: The host that it follows.
        term: The highest one that it has acknowledged: it adopts no decision of a lower one.
        place: Of the decision that it applies.
        newer: That decision, if the leader does not know it.
        entry: How other hosts reach its agent; None: the job has one host.
        is_standby: It was started with ``--standby-host``.
        order: Given on this host, by a user who waits.
        left_s: It leaves, and ends after so much time; None: it does not.
        processes: The living ones, in the order of their start.
        to_start: Processes that it will still start.
        code: Exit code of the last process that failed.
        began: The generation that the rest is about.
        failures: In the order in which they were seen.
        updates, step_s: Updates that its lowest rank has made, and the median time between them.
        updated: The newest update of any of its ranks.
        idle_s: Since one of its ranks made progress.
        quiet_s: For so long no progress need be expected.
        beat: When the message was sent, by its host's wall clock, in ns.
    """

    start: str = ""
    leader: str = ""
    term: Term = NEVER[0]
    place: Place = NEVER
    newer: Decision | None = None
    entry: HostEntry | None = None
    is_standby: bool = False
    order: Order = Order()
    left_s: float | None = None
    processes: tuple[ProcessFacts, ...] = ()
    to_start: int = 0
    code: int = 1
    began: Place = NEVER
    failures: tuple[Failure, ...] = ()
    updates: int = 0
    step_s: float = 0.0
    updated: int = 0
    idle_s: float = 0.0
    quiet_s: float = 0.0
    beat: int = 0
