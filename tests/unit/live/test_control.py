"""Commands to a supervisor: an order counts while its command waits."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tieredckpt.errors import AgentError
from tieredckpt.live.control import CLIENTS_MAX, CONTROL, Control, Request, Status, ask
from tieredckpt.live.messages import Order

STATUS = Status(
    pid=1, job="", host="", leader="", generation=1, ranks=(), size=2, per_host=2, ended="", step=3,
    trains=True, standbys=0, starting=0,
)  # fmt: skip


@pytest.fixture
def control(tmp_path: Path) -> Iterator[Control]:
    found = Control(tmp_path)
    yield found
    found.close()


class Asked:
    """A command in a thread."""

    def __init__(self, path: Path, request: Request, timeout_s: float) -> None:
        self.answer: Status | AgentError | None = None
        self._thread = threading.Thread(target=self._ask, args=(path, request, timeout_s))
        self._thread.start()

    def _ask(self, *args: object) -> None:
        try:
            self.answer = ask(*args)  # type: ignore[arg-type]
        except AgentError as error:
            self.answer = error

    def join(self) -> Status | AgentError | None:
        self._thread.join(30)
        return self.answer


def serve_until(control: Control, done: Order, is_so: object) -> Order:
    for _ in range(3000):
        order = control.serve(lambda: STATUS, done)
        if is_so(order):  # type: ignore[operator]
            return order
        threading.Event().wait(0.01)
    raise AssertionError("it did not come to it")


def test_the_status_is_answered_at_once(control: Control, tmp_path: Path):
    asked = Asked(tmp_path / CONTROL, Request(), 30.0)
    serve_until(control, Order(), lambda _: asked.answer is not None)
    assert asked.join() == STATUS


def test_an_order_waits_until_it_is_taken_over(control: Control, tmp_path: Path):
    asked = Asked(tmp_path / CONTROL, Request(size=2), 30.0)
    order = serve_until(control, Order(at_ns=1 << 62), lambda order: order.size == 2)
    assert order.at_ns > 1 << 62, "it is later than the last one, whatever the clocks show"
    assert asked.answer is None
    assert control.serve(lambda: STATUS, order) == Order()
    assert asked.join() == STATUS


def test_an_order_is_void_once_its_command_has_ended(control: Control, tmp_path: Path):
    asked = Asked(tmp_path / CONTROL, Request(size=2), 0.2)
    serve_until(control, Order(), lambda order: order.size == 2)
    assert isinstance(asked.join(), AgentError)
    serve_until(control, Order(), lambda order: order == Order())


def test_clients_that_say_nothing_or_nonsense_keep_nobody_waiting(control: Control, tmp_path: Path):
    silent = [socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(CLIENTS_MAX - 1)]
    for each in silent:
        each.connect(str(tmp_path / CONTROL))
        control.serve(lambda: STATUS, Order())
    silent[0].send(b'{"size": -3}')
    asked = Asked(tmp_path / CONTROL, Request(), 30.0)
    serve_until(control, Order(), lambda _: asked.answer is not None)
    assert asked.join() == STATUS
    assert silent[0].recv(10) == b""
    for each in silent:
        each.close()


def test_nobody_answers(tmp_path: Path):
    with pytest.raises(AgentError, match=CONTROL):
        ask(tmp_path / CONTROL, Request(), 1.0)
