"""``tieredckpt live`` against supervisors that are there, are not, or do not do it."""

from __future__ import annotations

import json
import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from msgspec.structs import replace

from tieredckpt.cli.main import cli
from tieredckpt.errors import NotFoundError, UsageError
from tieredckpt.live.control import FOLDER_PREFIX, Control, Status
from tieredckpt.live.messages import Order
from tieredckpt.policy.ranks import Member

FOUR = Status(
    pid=70, job="", host="", leader="", generation=3, step=12, ended="", trains=True,
    ranks=tuple(Member("", pid, pid) for pid in range(4)), size=4, per_host=2, standbys=1,
    starting=0,
)  # fmt: skip


ANSWERS = 4
"""After so many a supervisor ends: it was found, looked at, ordered, and looked at again."""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # not that of others on this machine
    return tmp_path


@pytest.fixture
def serve(folder: Path) -> Iterator[Callable[..., None]]:
    """Starts a supervisor that answers with the last status, after an order with each in turn."""
    ended = threading.Event()
    threads = []

    def start(*states: Status, takes_orders: bool = True, ends: bool = False) -> None:
        place = folder / f"{FOLDER_PREFIX}{states[0].pid}"
        place.mkdir()
        control = Control(place)

        def loop() -> None:
            done, left, asked = Order(), list(states), 0

            def answer() -> Status:
                nonlocal asked
                asked += 1
                return left[0]

            while not ended.wait(0.01):
                order = control.serve(answer, done)
                if order > Order() and takes_orders:
                    done = order
                if done > Order() and len(left) > 1:
                    left.pop(0)
                if ends and asked > ANSWERS:
                    break
            control.close()

        threads.append(threading.Thread(target=loop))
        threads[-1].start()

    yield start
    ended.set()
    for thread in threads:
        thread.join(30)


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["live", *arguments])


def test_nothing_runs(folder: Path):
    (folder / f"{FOLDER_PREFIX}old").mkdir()
    (folder / f"{FOLDER_PREFIX}old" / "control").touch()  # of one that was killed
    assert "no `tieredckpt run` of this user" in invoke("status").output
    assert isinstance(invoke("resize", "2").exception, NotFoundError)


def test_a_supervisor_of_another_user_is_not_asked(
    serve: Callable[..., None], monkeypatch: pytest.MonkeyPatch
):
    serve(FOUR)
    assert "pid 70" in invoke("status").output
    another = os.getuid() + 1
    monkeypatch.setattr(os, "getuid", lambda: another)
    assert "no `tieredckpt run` of this user" in invoke("status").output


def test_status(serve: Callable[..., None]):
    serve(replace(FOUR, size=2))
    found = invoke("status")
    assert "pid 70, generation 3, step 12, 4 ranks, to have 2, 1 standby process" in found.output
    (job,) = json.loads(invoke("status", "--json").output)["jobs"]
    assert (job["generation"], len(job["ranks"]), job["trains"]) == (3, 4, True)


def test_resize_returns_once_the_new_world_trains(serve: Callable[..., None]):
    leaving = replace(FOUR, size=2)
    begun = replace(FOUR, size=2, ranks=FOUR.ranks[:2], generation=4, trains=False)
    serve(FOUR, leaving, begun, replace(begun, trains=True))
    found = invoke("resize", "2")
    assert found.exception is None, found.output
    assert found.output.strip() == "generation 4 trains with 2 ranks"


def on(*hosts: str) -> Status:
    """Of a job on hosts."""
    ranks = tuple(Member(host, number, 0) for number, host in enumerate(hosts))
    return replace(FOUR, job="j", host="a", leader="a", ranks=ranks, size=len(ranks))


def test_the_supervisor_of_a_host_that_has_left_ends(serve: Callable[..., None]):
    serve(on("a", "b"), replace(on("c", "b"), trains=False), ends=True)
    found = invoke("leave")
    assert found.exception is None, found.exception
    assert "host a has left" in found.output


def test_a_host_that_cannot_leave(serve: Callable[..., None]):
    serve(on("b", "c"), takes_orders=False)  # it has no ranks as it is
    found = invoke("leave", "--deadline", "0.3s")
    assert isinstance(found.exception, UsageError)
    assert "host a stays" in str(found.exception)


def test_the_size_as_a_number_of_hosts(serve: Callable[..., None]):
    serve(FOUR)
    assert "generation 3 trains with 4 ranks" in invoke("resize", "--hosts", "2").output
    for arguments in ((), ("4", "--hosts", "2")):
        assert "give either RANKS or --hosts" in invoke("resize", *arguments).output


def test_too_few_processes(serve: Callable[..., None]):
    serve(FOUR, takes_orders=False)
    found = invoke("resize", "6", "--timeout", "0.3")
    assert isinstance(found.exception, UsageError)
    assert "6 ranks need as many processes" in str(found.exception)


def test_one_of_several_is_chosen(serve: Callable[..., None]):
    serve(FOUR)
    serve(replace(FOUR, pid=71, generation=9))
    found = invoke("resize", "4")
    assert isinstance(found.exception, UsageError)
    assert "70, 71" in str(found.exception)
    assert "generation 9" in invoke("resize", "4", "--pid", "71").output
