"""The contract of torch's stores, over ours on one and on three agents, and over torch's own.

A promise that torch's HashStore or TCPStore does not keep is none: so the suite itself is checked.
Each store is also used through a prefix, as process groups do, which calls it from C++.
"""

from __future__ import annotations

import itertools
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from tests.support.tables import NAMESPACE, TableHosts
from tieredckpt.live.store import AgentStore

SHORT = timedelta(seconds=0.3)
LONG = timedelta(seconds=60)
MORE = ("hash", "tcp", "agent")
"""Beyond several agents: torch's own, of which each promise must be true, too; and one agent."""
KINDS = (
    "agents",
    *(pytest.param(kind, marks=pytest.mark.full) for kind in ("hash", "tcp", "agent")),
)
Make = Callable[[], dist.Store]


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TableHosts]:
    with TableHosts(tmp_path_factory.mktemp("hosts"), 3) as hosts:
        yield hosts


def never() -> None:
    """A generation that does not end."""


def agent_store(hosts: TableHosts, count: int, check: Callable[[], None] = never) -> AgentStore:
    """A store of its own on the first ``count`` of the hosts, used from the first one."""
    table = secrets.token_hex(4)
    return AgentStore(hosts.hosts[0].runtime_dir, NAMESPACE, table, hosts.entries[:count], check)


@pytest.fixture(params=["agents", *(pytest.param(kind, marks=pytest.mark.full) for kind in MORE)])
def store(request: pytest.FixtureRequest) -> Iterator[dist.Store]:
    if request.param == "hash":
        yield dist.HashStore()
    elif request.param == "tcp":
        yield dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    else:
        hosts = request.getfixturevalue("hosts")
        store = agent_store(hosts, 1 if request.param == "agent" else 3)
        yield store
        store.close()


@pytest.fixture(params=["", "prefix"])
def any_store(request: pytest.FixtureRequest, store: dist.Store) -> dist.Store:
    """With a prefix and without one."""
    return dist.PrefixStore(request.param, store) if request.param else store


def later(store: dist.Store, do: Callable[[dist.Store], object]) -> threading.Thread:
    """Do it in a thread, soon: a wait for it has begun, or finds it done.

    With a clone: a TCPStore's client that waits delays its other threads.
    """
    thread = threading.Timer(0.05, do, args=[store.clone()])
    thread.start()
    return thread


def test_set_and_get(any_store: dist.Store):
    values = [b"", b"\x00\xff\n", "text", bytes(range(256)) * 2048]
    keys = ["k", "a/b//c", "with space", "ключ", "k" * 500]
    for key, value in itertools.product(keys, values):
        any_store.set(key, value)
        assert any_store.get(key) == (value.encode() if isinstance(value, str) else value)


def test_add(any_store: dist.Store):
    assert [any_store.add("n", amount) for amount in (5, 0, -7)] == [5, 5, -2]
    assert any_store.get("n") == b"-2"
    any_store.set("n", "40")
    assert any_store.add("n", 2) == 42
    any_store.set("empty", "")
    assert any_store.add("large", 1 << 40) == 1 << 40


def test_add_to_no_number(store: dist.Store):
    if isinstance(store, dist.TCPStore):
        pytest.skip("TCPStore's server ends the connection")
    store.set("k", "x")
    with pytest.raises(ValueError, match=r"stoll|no decimal number"):
        store.add("k", 1)
    assert store.get("k") == b"x"


def test_check(any_store: dist.Store):
    assert any_store.check([])
    assert not any_store.check(["a"])
    any_store.set("a", "1")
    assert any_store.check(["a"])
    assert not any_store.check(["a", "b"])
    any_store.add("b", 0)
    assert any_store.check([f"{key}" for key in "abab"])


def test_wait_returns_at_once(any_store: dist.Store):
    keys = [f"k{i}" for i in range(20)]
    for key in keys:
        any_store.set(key, key)
    any_store.wait([], SHORT)
    any_store.wait(keys)


@pytest.mark.parametrize("ends", ["wait", "get"])
def test_a_wait_ends_at_its_time_out(any_store: dist.Store, ends: str):
    any_store.set("there", "")
    any_store.set_timeout(LONG if ends == "wait" else SHORT)
    began_s = time.monotonic()
    with pytest.raises(dist.DistStoreError, match=r"(?i)wait timeout"):
        any_store.wait(["there", "k"], SHORT) if ends == "wait" else any_store.get("k")
    assert SHORT.total_seconds() * 0.9 < time.monotonic() - began_s < LONG.total_seconds() / 2


def test_a_wait_ends_when_the_last_key_is_set(any_store: dist.Store):
    keys = [f"k{i}" for i in range(6)]

    def set_all(store: dist.Store) -> None:
        for key in reversed(keys):
            store.set(key, key.upper())

    thread = later(any_store, set_all)
    any_store.wait(keys, LONG)
    assert any_store.check(keys)
    thread.join()


@pytest.mark.parametrize("how", ["set", "add", "append", "compare_set", "multi_set"])
def test_each_way_to_make_a_key_ends_a_wait(any_store: dist.Store, how: str):
    store = getattr(any_store, "underlying_store", any_store)
    if isinstance(store, dist.HashStore) and how == "add":
        pytest.skip("an add to a HashStore wakes nobody")
    any_store.set_timeout(LONG)
    make = {
        "set": lambda store: store.set("k", "1"),
        "add": lambda store: store.add("k", 1),
        "append": lambda store: store.append("k", "1"),
        "compare_set": lambda store: store.compare_set("k", "", "1"),
        "multi_set": lambda store: store.multi_set(["k"], ["1"]),
    }[how]
    thread = later(any_store, make)
    assert any_store.get("k") == b"1"
    thread.join()


def test_compare_set(any_store: dist.Store):
    assert any_store.compare_set("k", "old", "new") == b"old"
    assert not any_store.check(["k"])
    assert any_store.compare_set("k", "", "new") == b"new"
    assert any_store.compare_set("k", "old", "other") == b"new"
    assert any_store.compare_set("k", "", "other") == b"new"
    assert any_store.compare_set("k", "new", "") == b""
    assert any_store.get("k") == b""


def test_delete_key(any_store: dist.Store):
    any_store.set("k", "x")
    assert any_store.delete_key("k")
    assert not any_store.delete_key("k")
    assert not any_store.check(["k"])
    any_store.set_timeout(SHORT)
    with pytest.raises(dist.DistStoreError):
        any_store.get("k")


def test_num_keys(any_store: dist.Store):
    before = any_store.num_keys()
    for number in range(10):
        any_store.set(f"k{number}", "x")
        any_store.add("n", 1)
    assert any_store.num_keys() == before + 11
    any_store.delete_key("k3")
    assert any_store.num_keys() == before + 10


def test_append(any_store: dist.Store):
    for value in ("a", b"\x00", "c"):
        any_store.append("k", value)
    assert any_store.get("k") == b"a\x00c"


def test_the_extended_api(any_store: dist.Store):
    assert any_store.has_extended_api()
    keys = [f"k{i}" for i in range(20)]
    any_store.multi_set(keys, [f"{key}!" for key in keys])
    assert any_store.multi_get(keys) == [f"{key}!".encode() for key in keys]
    assert any_store.multi_get([keys[3], keys[3], keys[1]]) == [b"k3!", b"k3!", b"k1!"]
    assert any_store.multi_get([]) == []
    any_store.set_timeout(LONG)
    thread = later(any_store, lambda store: store.set("late", "x"))
    assert any_store.multi_get([keys[0], "late"]) == [b"k0!", b"x"]
    thread.join()


def test_list_keys(store: dist.Store):
    before = set(store.list_keys())
    for number in range(10):
        store.set(f"k{number}", "x")
    assert set(store.list_keys()) - before == {f"k{number}" for number in range(10)}


def test_queues(store: dist.Store):
    store.set_timeout(LONG)
    before = store.num_keys()
    assert store.queue_len("q") == 0
    for value in ("1", "2"):
        store.queue_push("q", value)
    assert store.queue_len("q") == 2
    assert store.num_keys() == before
    store.wait(["q"], SHORT)
    assert store.check(["q"])
    assert [store.queue_pop("q"), store.queue_pop("q", False)] == [b"1", b"2"]
    with pytest.raises(dist.QueueEmptyError):
        store.queue_pop("q", False)
    thread = later(store, lambda other: other.queue_push("q", "3"))
    assert store.queue_pop("q") == b"3"
    thread.join()
    store.set_timeout(SHORT)
    with pytest.raises(dist.DistStoreError, match=r"(?i)wait timeout"):
        store.queue_pop("q")


def test_queues_and_lists_through_a_prefix_are_refused_by_torch(hosts: TableHosts):
    """torch has no way to them in a store written in Python; once it has, they are to be tested."""
    store = agent_store(hosts, 1)
    prefixed = dist.PrefixStore("prefix", store)
    for call in (
        lambda: prefixed.queue_push("q", "1"),
        lambda: prefixed.queue_pop("q"),
        lambda: prefixed.queue_len("q"),
        lambda: prefixed.list_keys(),
    ):
        with pytest.raises(NotImplementedError):
            call()
    store.close()


def test_a_clone_is_the_same_store(store: dist.Store):
    store.set("k", "x")
    clone = store.clone()
    assert clone.get("k") == b"x"
    clone.set("k", "y")
    assert store.get("k") == b"y"


def test_threads(any_store: dist.Store):
    def work(store: dist.Store, number: int) -> list[int]:
        store.set(f"t{number}", str(number))
        sums = [store.add("n", 1) for _ in range(20)]
        store.wait([f"t{other}" for other in range(8)], LONG)
        return sums

    with ThreadPoolExecutor(8) as pool:
        clones = [any_store.clone() for _ in range(8)]
        sums = [each for some in pool.map(work, clones, range(8)) for each in some]
    assert sorted(sums) == list(range(1, 161))


def test_a_barrier(any_store: dist.Store):
    with ThreadPoolExecutor(3) as pool:
        calls = [pool.submit(any_store.clone().barrier, "b", 3, LONG) for _ in range(3)]
        assert [call.result(30) for call in calls] == [None] * 3
