"""What one host knows of its sealed segments, with what its ranks, manifests and runs tell it."""

from __future__ import annotations

from types import SimpleNamespace

import msgspec
import pytest

from tests.format.samples import hex_id
from tests.support.sealed import Here
from tieredckpt.dcp.job.unreported import Ended, Ending, UnreportedSegments
from tieredckpt.dcp.save.failures import reporting_outcome
from tieredckpt.errors import (
    AgentError,
    CapacityError,
    IntegrityError,
    NotFoundError,
    RankError,
    RemoteProtocolError,
    StaleAttemptError,
    TieredCkptError,
)
from tieredckpt.format.manifest import StreamBase
from tieredckpt.rpc.messages.agent import SEALED_BEFORE_MAX, SealedBefore

# --- the agent ------------------------------------------------------------------------------------


def test_what_is_named_or_disowned_is_decided():
    here = Here()
    named, failed, unknown = (here.seal() for _ in range(3))
    manifest = here.commit(named)
    assert here.fates.undecided() == {failed: "s", unknown: "s"}
    assert here.fates.disown([named, failed]) == {failed}  # what a manifest names stays
    assert here.fates.undecided() == {unknown: "s"}
    assert here.fates.free([named, failed, unknown])
    assert set(here.pool.sealed) == {named, unknown}
    here.fates.check(manifest.segments)
    with pytest.raises(NotFoundError, match="was released"):
        here.fates.check([msgspec.structs.replace(manifest.segments[0], id=failed)])


def test_without_other_hosts_nothing_is_undecided():
    here = Here()
    here.seal()
    here.peers.active = False
    assert here.fates.undecided() == {}


def before(*entries: tuple[str, str]) -> list[SealedBefore]:
    return [
        SealedBefore(segment_id=segment, stream="default", fate=fate)  # type: ignore[arg-type]
        for segment, fate in entries
    ]


def test_only_what_is_older_than_a_known_checkpoint_goes_for_room():
    here = Here()
    first, second, third = (here.seal() for _ in range(3))
    told = before((first, "unknown"), (second, "unknown"), (third, "unknown"))
    assert here.overtaken(told, 1) is None
    here.commit(second)
    assert here.overtaken(told, 1, "another") is None
    assert here.overtaken(told[1:], 1) is None  # its rank does not say when it was
    here.damaged.append("a manifest")
    assert here.overtaken(told, 1) is None
    here.damaged.clear()
    assert here.overtaken(told, 1) == first
    assert here.overtaken(told, 1) is None


def test_what_an_ended_run_left_stays_until_the_next_one_goes_on():
    here = Here()
    base, unheard = here.seal(), here.seal()
    living = here.seal("t")
    loaded = here.commit(base)
    here.begin_run("b" * 32, live={"t"})
    assert set(here.fates.undecided()) == {unheard, living}
    # It went on from a checkpoint that this host has not heard of: that may be the one.
    attempt = here.open_attempt(StreamBase("default", hex_id(77), 9, ()))
    assert set(here.fates.undecided()) == {unheard, living}
    here.catalog.opened.remove(attempt)
    here.open_attempt(StreamBase("default", loaded.save_id, 9, ()))
    assert set(here.fates.undecided()) == {living}  # whose process is there


def test_a_checkpoint_of_the_next_run_is_enough():
    here = Here()
    unheard = here.seal()
    here.begin_run("b" * 32, live=set())
    attempt = here.open_attempt(StreamBase("default", hex_id(77), 9, ()))
    mine = here.seal("t")
    assert set(here.fates.undecided()) == {unheard, mine}
    here.commit(mine, attempt)
    assert here.fates.undecided() == {}


def test_what_may_have_been_committed_unheard_waits_for_the_hosts_of_the_next_run():
    """The next run's first checkpoint may be pushed here before those that it passed over."""
    here = Here()
    base, unheard = here.seal(), here.seal()
    loaded = here.commit(base)
    here.caught_up = False
    here.begin_run("b" * 32, live=set())
    here.open_attempt(StreamBase("default", loaded.save_id, 9, ()))
    assert set(here.fates.undecided()) == {unheard}
    here.caught_up = True
    assert here.fates.undecided() == {}


def test_who_opens_beside_the_run_that_rules_ends_nothing_of_it():
    """Its own attempt says what it went on from, not what was saved since."""
    here = Here()
    base = here.seal()
    loaded = here.commit(base)
    here.begin_run("b" * 32, live=set())
    here.open_attempt(StreamBase("default", loaded.save_id, 9, ()))
    unheard = here.seal("dead")
    here.visit("c" * 32, live=set())
    assert set(here.fates.undecided()) == {unheard}
    here.peers.run = "c" * 32
    assert set(here.fates.undecided()) == {unheard}
    here.open_attempt(StreamBase("default", loaded.save_id, 9, ()))
    assert here.fates.undecided() == {}


def test_who_looks_before_the_first_save_keeps_nothing_for_the_life_of_the_run():
    here = Here()
    base, dead = here.seal(), here.seal("dead")
    loaded = here.commit(base)
    here.begin_run("b" * 32, live=set())
    here.visit("c" * 32, live=set())
    assert set(here.fates.undecided()) == {dead}
    here.open_attempt(StreamBase("default", loaded.save_id, 9, ()))
    assert here.fates.undecided() == {}


def test_an_agent_that_starts_in_a_run_does_not_know_what_was_there_before_it():
    here = Here()
    unheard = here.seal()
    here.begin_run("b" * 32, live=set())
    here.open_attempt()
    assert here.fates.undecided() == {}
    here.restart()
    assert set(here.fates.undecided()) == {unheard}


# --- the ranks ------------------------------------------------------------------------------------


def session(*hosts: str) -> SimpleNamespace:
    return SimpleNamespace(hosts=SimpleNamespace(hosts=hosts), unreported=UnreportedSegments())


RECEIPTS = [SimpleNamespace(segment_id=hex_id(n)) for n in (1, 2)] + [
    SimpleNamespace(segment_id=None)
]


def outcomes_of(rank: UnreportedSegments) -> dict[str, str]:
    return {each.segment_id: each.fate for each in rank.report()}


def test_all_ranks_hear_of_a_commit_in_what_dcp_brings():
    coordinator, rank, metadata = session("a", "b"), UnreportedSegments(), SimpleNamespace()
    coordinator.unreported.begin(hex_id(1), "default")
    rank.begin(hex_id(2), "default")
    rank.begin(hex_id(3), "default")
    with reporting_outcome(coordinator, metadata, RECEIPTS) as ending, ending.committing():  # type: ignore[arg-type]
        pass
    assert outcomes_of(coordinator.unreported) == {hex_id(1): "committed"}
    arrive(metadata.storage_data)
    assert outcomes_of(rank) == {hex_id(2): "committed", hex_id(3): "unknown"}


def arrive(ended: Ended) -> None:
    """What unpickling does; a test has no pickles of strangers to fear, but needs none either."""
    call, arguments = ended.__reduce__()
    assert call(*arguments) == ended


@pytest.mark.parametrize(
    ("error", "fate"),
    [
        (CapacityError("full"), "failed"),
        (StaleAttemptError("old"), "failed"),
        (RankError("another one"), "failed"),
        (AgentError("silent", outcome="unknown"), "unknown"),
        (IntegrityError("of what?"), "unknown"),
        (AgentError("no"), "unknown"),
        (AgentError("refused", outcome="not_applied"), "failed"),
        (NotFoundError("which of both?"), "unknown"),
        (RemoteProtocolError("garbage"), "unknown"),
    ],
)
def test_all_ranks_hear_of_a_failure_in_the_error(error: TieredCkptError, fate: str):
    coordinator, rank = session("a", "b"), UnreportedSegments()
    rank.begin(hex_id(2), "default")
    with (
        pytest.raises(type(error)) as raised,
        reporting_outcome(coordinator, SimpleNamespace(), RECEIPTS) as ending,  # type: ignore[arg-type]
        ending.committing(),
    ):
        raise error
    arrive(raised.value.ended)
    assert outcomes_of(rank) == {hex_id(2): fate}


def test_what_was_never_sent_to_be_committed_failed():
    assert Ending().outcome == "failed"
    rank = session("a", "b")
    rank.unreported.begin(hex_id(1), "default")
    with (
        pytest.raises(ValueError, match="planner"),
        reporting_outcome(rank, SimpleNamespace(), RECEIPTS),
    ):  # type: ignore[arg-type]
        raise ValueError("a planner")
    assert outcomes_of(rank.unreported) == {hex_id(1): "failed"}


def test_a_rank_remembers_the_last_ones():
    rank = UnreportedSegments()
    for number in range(SEALED_BEFORE_MAX + 3):
        rank.begin(hex_id(number), "default")
    assert [each.segment_id for each in rank.report()] == [
        hex_id(number) for number in range(3, SEALED_BEFORE_MAX + 3)
    ]
