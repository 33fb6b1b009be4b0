"""The agent's gatherings, with a commit that is only noted."""

from __future__ import annotations

import re
import threading
from typing import Any

import msgspec
import pytest

from tests.format.samples import hex_id, small_manifest
from tieredckpt.agent.no_collectives import coordinator
from tieredckpt.agent.no_collectives.coordinator import Gatherings
from tieredckpt.errors import (
    AgentError,
    CapacityError,
    RemoteProtocolError,
    TieredCkptError,
    UsageError,
)
from tieredckpt.format.manifest import Manifest, decode_manifest, encode_manifest
from tieredckpt.format.plan import (
    Chunk,
    TensorEntry,
    build_plan,
    decode_plan,
    encode_plan,
)
from tieredckpt.rpc.messages import agent as m

STREAM = small_manifest().stream
RUN = hex_id(77)


class Agent:
    """Gatherings, and what they commit."""

    def __init__(self) -> None:
        self.commits: list[m.Commit] = []
        self.fails: TieredCkptError | None = None
        self.gatherings = Gatherings(threading.RLock(), "host", self.manifests, self.commit)

    def manifests(self) -> tuple[Manifest, ...]:
        return tuple(decode_manifest(each.manifest) for each in self.commits)

    def commit(self, request: m.Commit) -> m.Committed:
        if self.fails is not None:
            raise self.fails
        self.commits.append(request)
        return m.Committed(need_plan=False)

    def put(self, who: int, ordinal: int = 0, world: int = 2, **change: Any) -> m.Gathered:
        request = msgspec.structs.replace(part(who, ordinal, world), **change)
        return self.gatherings.contribute(request)

    def ask(self, ordinal: int = 0, rank: int | None = None, **change: Any) -> m.Gathered:
        request = m.AskGathering(session_id="s", key=key(ordinal), rank=rank, give_up=None)
        return self.gatherings.ask(msgspec.structs.replace(request, **change))


def key(ordinal: int, epoch: int = 1) -> m.GatheringKey:
    return m.GatheringKey(stream=STREAM, epoch=hex_id(epoch), ordinal=ordinal)


def plan_of(rank: int, world: int) -> bytes:
    entry = TensorEntry(
        "w", "float32", "strided", False, "contiguous_format", False, (2 * world,),
        (Chunk((2 * rank,), (2,), 0, 0),),
    )  # fmt: skip
    return encode_plan(build_plan([entry], structures=[bytes([rank]) * 16]))


def part(rank: int, ordinal: int, world: int) -> m.Contribute:
    draft = msgspec.structs.replace(
        small_manifest(), save_id=hex_id(1000 + ordinal), step=10 + ordinal, world_size=world,
        segments=(), plan=hex_id(0),
    )  # fmt: skip
    return m.Contribute(
        session_id=f"session {rank}",
        run=RUN,
        key=key(ordinal),
        step=10 + ordinal,
        world_size=world,
        members=hex_id(0),
        rank=rank,
        part=m.SealedPart(segment_id=hex_id(100 * ordinal + rank), size=4096, root=hex_id(rank)),
        values=(),
        plan=plan_of(rank, world),
        draft=encode_manifest(draft) if rank == 0 else None,
        error=None,
    )


def test_one_commit_when_all_are_there():
    agent = Agent()
    assert agent.ask() == m.Gathered(state="unknown")
    assert agent.put(2, world=3) == m.Gathered(state="open", missing=(0, 1))
    assert agent.gatherings.segments() == {hex_id(2)}
    assert agent.put(0, world=3) == m.Gathered(state="open", missing=(1,))
    assert agent.put(0, world=3) == m.Gathered(state="open", missing=(1,))  # sent again
    assert not agent.commits
    assert agent.put(1, world=3) == m.Gathered(state="committed", save_id=hex_id(1000))
    (commit,) = agent.commits
    assert (commit.session_id, commit.run) == ("session 0", RUN)
    manifest = decode_manifest(commit.manifest)
    assert [ref.id for ref in manifest.segments] == [hex_id(0), hex_id(1), hex_id(2)]
    assert commit.plan is not None
    (entry,) = decode_plan(commit.plan).entries()
    assert isinstance(entry, TensorEntry)
    assert [(c.offsets, c.segment) for c in entry.chunks] == [((0,), 0), ((2,), 1), ((4,), 2)]
    assert agent.gatherings.segments() == set()
    for rank in range(3):
        assert agent.ask(rank=rank).save_id == hex_id(1000)
    assert agent.put(2, world=3).state == "committed"  # an answer that was lost
    assert len(agent.commits) == 1


@pytest.mark.parametrize(
    "change",
    [
        {"session_id": "other"},
        {"part": m.SealedPart(segment_id=hex_id(99), size=4096, root=hex_id(9))},
        {"part": None},
    ],
)
def test_who_is_not_in_a_checkpoint_is_not_told_that_it_is(change: dict[str, Any]):
    agent = Agent()
    other = m.SealedPart(segment_id=hex_id(98), size=4096, root=hex_id(8))
    agent.put(0)
    assert agent.put(1).state == "committed"
    with pytest.raises(UsageError, match="two processes save as rank 1"):
        agent.put(1, **{"part": other} | change)
    assert agent.put(1).state == "committed"
    assert len(agent.commits) == 1


def error_of(gathered: m.Gathered) -> str:
    assert gathered.state == "failed"
    assert gathered.error is not None
    return f"{gathered.error.error}: {gathered.error.message}"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"step": 11}, "UsageError: the ranks save different things .*step 10 .* rank 1 step 11"),
        ({"world_size": 3}, "UsageError: the ranks save different things .*by 2 ranks.*3 ranks"),
        ({"rank": 0, "draft": b"x", "session_id": "other"}, "UsageError: two processes save as"),
        ({"run": hex_id(78)}, "UsageError: the ranks have not opened their engines together"),
        ({"plan": b"damaged"}, "IntegrityError"),
        ({"part": None}, "RemoteProtocolError: rank 1's plan is not of its one segment"),
        ({"plan": plan_of(0, 2)}, "UsageError: the pieces of 'w' have 2 elements"),
        (
            {"error": m.ErrorReply(error="CapacityError", message="full", fields={"rank": 1})},
            "CapacityError: full",
        ),
    ],
)
def test_parts_that_do_not_fit(change: dict[str, Any], message: str):
    agent = Agent()
    assert agent.put(0).state == "open"
    found = agent.put(1, **change)

    assert re.match(message, error_of(found)), found
    assert agent.ask(rank=0) == found  # the same for all
    assert agent.put(1) == found  # and for good
    assert not agent.commits
    assert agent.gatherings.segments() == set()
    # The next save is another matter.
    agent.put(0, 1)
    assert agent.put(1, 1).state == "committed"


def test_requests_that_are_malformed():
    agent = Agent()
    with pytest.raises(RemoteProtocolError, match="rank 2 of 2"):
        agent.put(1, rank=2)
    with pytest.raises(RemoteProtocolError, match="draft"):
        agent.put(1, draft=b"")
    with pytest.raises(RemoteProtocolError, match="draft"):
        agent.put(0, draft=None)
    assert agent.gatherings.num_open() == 0
    agent.put(1, 1)
    wrong = part(0, 2, 2).draft
    assert "another save" in error_of(agent.put(0, 1, draft=wrong))
    agent.put(1, 2)
    assert error_of(agent.put(0, 2, draft=b"junk")).startswith("IntegrityError")
    assert not agent.commits


def test_a_commit_that_fails_fails_for_all():
    agent = Agent()
    agent.fails = CapacityError("no room", needed_bytes=1)
    agent.put(1)
    assert error_of(agent.put(0)) == "CapacityError: no room"
    assert error_of(agent.ask(rank=1)) == "CapacityError: no room"
    agent.fails = None
    agent.put(0, 1)
    assert agent.put(1, 1).state == "committed"


def test_values_that_differ():
    def value(content: bytes, *, must_agree: bool) -> tuple[m.RankValue, ...]:
        return (m.RankValue(name="rng", digest=content, must_agree=must_agree),)

    agent = Agent()
    for ordinal, must_agree in enumerate((False, True)):
        agent.put(0, ordinal, values=value(b"a", must_agree=must_agree))
        found = agent.put(1, ordinal, values=value(b"a", must_agree=must_agree))
        assert (found.state, found.differing) == ("committed", {})
    agent.put(0, 2, values=value(b"a", must_agree=False))
    found = agent.put(1, 2, values=value(b"b", must_agree=False))
    assert (found.state, found.differing) == ("committed", {"rng": [[0], [1]]})
    assert agent.ask(2, rank=0) == found
    agent.put(0, 3, values=value(b"a", must_agree=True))
    found = agent.put(1, 3, values=value(b"b", must_agree=True))
    assert "UsageError: ranks with one per-rank coordinate" in error_of(found)
    assert len(agent.commits) == 3


def test_a_bug_in_a_commit_leaves_nobody_waiting():
    agent = Agent()
    agent.gatherings._commit = None  # type: ignore[assignment]
    agent.put(1)
    with pytest.raises(TypeError):
        agent.put(0)
    assert error_of(agent.ask(rank=1)).startswith("AgentError: the agent failed")


def test_limits(monkeypatch: pytest.MonkeyPatch):
    agent = Agent()
    monkeypatch.setattr(coordinator, "OPEN_MAX", 2)
    monkeypatch.setattr(coordinator, "KEPT_MAX", 4)
    for number in range(2):
        agent.put(1, key=m.GatheringKey(stream=f"s{number}", epoch=hex_id(1), ordinal=0))
    assert agent.gatherings.num_open() == 2
    with pytest.raises(TieredCkptError, match="waiting for ranks already"):
        agent.put(1)
    for number in range(2):
        agent.ask(
            key=m.GatheringKey(stream=f"s{number}", epoch=hex_id(1), ordinal=0),
            give_up=m.ErrorReply(error="AgentError", message="x"),
        )
    for ordinal in range(20):
        agent.put(0, ordinal)
        assert agent.put(1, ordinal).state == "committed"
    assert len(agent.gatherings._known) <= 4
    assert agent.ask(19).state == "committed"
    assert len(agent.gatherings._merged) == 1
    monkeypatch.setattr(coordinator, "PLANS_BYTES_MAX", 10)
    assert error_of(agent.put(0, 30)).startswith("CapacityError")


def test_a_plan_that_vanishes_is_no_commit():
    agent = Agent()
    agent.gatherings._commit = lambda request: m.Committed(need_plan=True)
    agent.put(1)
    found = agent.put(0)
    assert found.error is not None
    assert found.error.error == AgentError.__name__


def test_a_host_that_is_lost_is_not_waited_for():
    agent = Agent()
    hosts = ("host", "other")
    agent.put(0, world=3, hosts=hosts)
    agent.gatherings.contribute(part(1, 0, 3), "third")
    agent.gatherings.drop_host("fourth")
    assert agent.ask().missing == (2,)
    agent.gatherings.drop_host("other")  # has ranks of the group, none of which has come yet
    assert "host other does not answer" in error_of(agent.ask())
    agent.gatherings.contribute(part(1, 1, 3), "third")
    agent.gatherings.drop_host("third")
    assert "host third does not answer" in error_of(agent.ask(1))
    agent.gatherings._lost = lambda: frozenset({"other"})
    assert "host other does not answer" in error_of(agent.put(0, 2, world=3, hosts=hosts))
