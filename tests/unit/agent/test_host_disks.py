"""What hosts tell the leader of their disks, and what they go by while it is silent."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.saves import manifest_of
from tieredckpt.agent.leader.shedding import SILENT_S, HostDisks
from tieredckpt.errors import TierUnavailableError
from tieredckpt.format.manifest import Manifest
from tieredckpt.policy.completeness import Whole
from tieredckpt.rpc.messages.peer import Push, Pushed, Vouch

OLD, NEW, ALONE = (manifest_of(seq, owners) for seq, owners in ((1, "ab"), (2, "ab"), (3, "b")))


class Host:
    """The agent's parts around one :class:`HostDisks`; ``a`` leads."""

    def __init__(self, name: str, hosts: dict[str, Host], clock: Callable[[], float]) -> None:
        self.namespace = "run"
        self.asked = 0
        self.answers = True
        self.hosts = hosts
        self.peers = SimpleNamespace(
            host_id=name, leader="a", is_leader=name == "a", leads=name == "a", active=True,
            members=lambda: ("a", "b"), ask=self._ask,
        )  # fmt: skip
        self.exchange = SimpleNamespace(push=lambda push, to: self._send(push))
        spec = SimpleNamespace(scope="host")
        self.coming: tuple[tuple[str, ...] | None, tuple[int, int]] = ((), (1, 3))
        worker: Any = SimpleNamespace(spec=spec, coming=lambda stream: self.coming)
        known = {m.save_id: m for m in (OLD, NEW, ALONE)}
        keeping: Any = SimpleNamespace(find=known.get, workers=lambda: {"disk": worker})
        self.disks = HostDisks(self, keeping, clock=clock)  # type: ignore[arg-type]
        hosts[name] = self

    def own(self, manifest: Manifest) -> list[object]:
        return [ref for ref in manifest.segments if ref.host == self.peers.host_id]

    def _ask(self, host: str, push: Push) -> Pushed:
        self.asked += 1
        if not self.answers:
            raise TierUnavailableError("it is silent")
        return self._send(push)

    def _send(self, push: Push) -> Pushed:
        return Pushed(whole=self.hosts["a"].disks.take(push.vouched))


@pytest.fixture
def now() -> list[float]:
    return [0.0]


@pytest.fixture
def hosts(now: list[float]) -> dict[str, Host]:
    found: dict[str, Host] = {}
    for name in "ab":
        Host(name, found, lambda: now[0])
    return found


def test_whole_is_what_both_have(hosts: dict[str, Host]):
    a, b = hosts["a"].disks, hosts["b"].disks
    assert a.ask("disk", [NEW, OLD]).newest is None
    assert b.ask("disk", [OLD]).newest == OLD.save_id
    assert a.ask("disk", [NEW, OLD]) == Whole(OLD.save_id, missing=frozenset({NEW.save_id}))
    hosts["b"].coming = ((NEW.save_id,), (1, 3))
    b.ask("disk", [OLD])
    assert a.ask("disk", [NEW, OLD]) == Whole(OLD.save_id)


def test_nobody_is_asked_about_what_lies_here_alone(hosts: dict[str, Host]):
    assert hosts["b"].disks.ask("disk", [ALONE, OLD]).newest == ALONE.save_id
    assert hosts["b"].asked == 0
    # What is newer than that is asked about; that it is whole is known.
    assert hosts["b"].disks.ask("disk", [NEW, ALONE]).newest == ALONE.save_id
    assert hosts["b"].asked == 1


def test_a_silent_leader_is_not_waited_for_each_time(hosts: dict[str, Host], now: list[float]):
    a, b = hosts["a"].disks, hosts["b"]
    a.ask("disk", [OLD])
    assert b.disks.ask("disk", [NEW, OLD]).newest == OLD.save_id
    b.answers = False
    for _ in range(3):
        assert b.disks.ask("disk", [NEW, OLD]) == Whole(OLD.save_id)
    assert b.asked == 2
    now[0] += SILENT_S
    b.answers = True
    a.ask("disk", [NEW])
    assert b.disks.ask("disk", [NEW, OLD]).newest == NEW.save_id


def test_what_was_given_up_is_said_at_once_and_to_the_next_leader(
    hosts: dict[str, Host], now: list[float]
):
    a, b = hosts["a"], hosts["b"]
    b.disks.lack("disk", "default", NEW.save_id)
    assert a.disks.ask("disk", [NEW, OLD]).never == {NEW.save_id}
    again = Host("a", hosts, lambda: now[0])  # it knows nothing
    assert again.disks.ask("disk", [NEW, OLD]) == Whole()
    b.disks.ask("disk", [OLD])
    assert again.disks.ask("disk", [NEW, OLD]).never == {NEW.save_id}


def test_strangers_and_other_tiers_count_for_nothing(hosts: dict[str, Host]):
    a = hosts["a"].disks
    a.ask("disk", [OLD])
    for host, tier in (("c", "disk"), ("b", "tape")):
        vouch = Vouch(host=host, tier=tier, stream="default", saves=(OLD.save_id,))
        (answer,) = a.take([vouch])
        assert (answer.newest, answer.never, answer.missing) == ("", (), ())
    assert a.ask("disk", [OLD]).newest is None
    # One that has no part cannot say that it lacks it.
    a.take([Vouch(host="b", tier="disk", stream="default", saves=(), lacking=("f" * 32,))])
    assert a.ask("disk", [OLD]).never == frozenset()
