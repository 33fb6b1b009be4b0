"""Proofs, tokens, and who may listen where; and which connections are kept."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tieredckpt.errors import AgentError
from tieredckpt.rpc.auth import (
    REFUSED,
    Secret,
    Verifier,
    body_digest,
    check_listen,
    check_token,
    sign,
    sign_reply,
)
from tieredckpt.rpc.messages.agent import TlsSpec
from tieredckpt.rpc.peer_server import Admission, Connection, Limits, group_of

TOKEN = "0123456789abcdef"
TLS = TlsSpec(cert="/c", key="/k", ca="/a")


def test_a_proof_is_what_the_design_says():
    """A vector: other implementations, and later releases, must compute the same."""
    asked = ("h7", "GET", "/p1/ns/a/host?x=1", "bytes=0-9", b"body")
    proof = sign("secret token 123", "ab" * 16, 7, *asked)
    assert proof == "8f18e8380bd5abdb1cee4386cc06f3f8c3d574a374f1e113703f97960cf779c8"
    assert (
        sign_reply("secret token 123", "ab" * 16, 7, "h7", 206, "bytes 0-9/10", "")
        == "8f7d6afb6ab44b02d57e34b284736e4ac9e09c3d2e24b7647983710f16c283eb"
    )


texts = st.text(st.characters(codec="ascii", exclude_characters="\n"), max_size=20)
parts = st.tuples(
    texts, st.integers(0, 1 << 62), texts, texts, texts, texts, st.binary(max_size=20)
)


@given(parts, parts)
def test_different_requests_have_different_proofs(one, other):
    assert (sign(TOKEN, *one) == sign(TOKEN, *other)) == (one == other)


@given(st.lists(st.integers(-3, 12), max_size=12))
def test_a_counter_only_rises(counters: list[int]):
    verifier, last = Verifier("n"), 0
    for counter in counters:
        proof = f"{counter} {sign(TOKEN, 'n', counter, '', 'GET', '/x', '', b'')}"
        call = (TOKEN, proof, "", "GET", "/x", "", body_digest(b""))
        if counter > last:
            assert verifier.check(*call) == counter
            last = counter
        else:
            with pytest.raises(AgentError, match="refuses"):
                verifier.check(*call)


def test_a_wrong_proof_does_not_use_the_counter_up():
    verifier = Verifier("n")
    digest = body_digest(b"")
    forged = f"900 {'0' * 64}"
    with pytest.raises(AgentError):
        verifier.check(TOKEN, forged, "", "GET", "/x", "", digest)
    proof = f"1 {sign(TOKEN, 'n', 1, '', 'GET', '/x', '', b'')}"
    assert verifier.check(TOKEN, proof, "", "GET", "/x", "", digest) == 1


@given(st.text(max_size=100), st.text(max_size=100))
def test_no_header_passes_or_breaks_the_check(proof: str, digest: str):
    with pytest.raises(AgentError) as caught:
        Verifier("n").check(TOKEN, proof, "", "GET", "/x", "", digest)
    assert str(caught.value) == REFUSED


def test_tokens():
    minted = secrets.token_hex(32)
    for token in [minted, TOKEN, "x" * 1024]:
        check_token(token)
    for token in ("short", "x" * 1025, "with a line\nfeed at its end", ""):
        with pytest.raises(AgentError) as caught:
            check_token(token)
        assert not token or token not in str(caught.value)
    assert minted not in repr(Secret(minted))


@pytest.mark.parametrize("address", ["127.0.0.1", "127.9.9.9", "::1"])
def test_loopback_needs_no_secret(address: str):
    check_listen(address, Secret(""))
    check_listen(address, Secret(TOKEN))
    with pytest.raises(AgentError, match="characters"):
        check_listen(address, Secret("short"))


@pytest.mark.parametrize("address", ["10.0.0.1", "0.0.0.0", "::", "192.168.1.1", "fe80::1"])
def test_elsewhere_there_must_be_one(address: str):
    with pytest.raises(AgentError, match=r"security\.token_file.*security\.tls"):
        check_listen(address, Secret(""))
    check_listen(address, Secret(TOKEN))
    check_listen(address, Secret("", TLS))


# --- which connections are kept -------------------------------------------------------------------


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def pairs() -> Iterator[Callable[[], socket.socket]]:
    made: list[socket.socket] = []

    def make() -> socket.socket:
        made.extend(socket.socketpair())
        return made[-1]

    yield make
    for each in made:
        each.close()


def is_cut(connection: Connection) -> bool:
    connection.sock.setblocking(False)
    try:
        return connection.sock.recv(1) == b""
    except BlockingIOError:
        return False


def admitted(admission: Admission, sock: socket.socket, address: str) -> Connection:
    connection = admission.admit(sock, address)
    assert connection is not None
    return connection


def test_the_oldest_of_an_address_goes_first(pairs: Callable[[], socket.socket]):
    admission = Admission(Limits(pending=100, pending_per_address=2), Clock())
    first, other, second, third = (
        admitted(admission, pairs(), address) for address in ("a", "b", "a", "a")
    )
    assert [is_cut(each) for each in (first, other, second, third)] == [True, False, False, False]
    assert len(admission._pending) == 3


def test_the_oldest_of_all_goes_when_there_are_too_many(pairs: Callable[[], socket.socket]):
    admission = Admission(Limits(pending=3, pending_per_address=2), Clock())
    those = [admitted(admission, pairs(), str(number)) for number in range(5)]
    assert [is_cut(each) for each in those] == [True, True, False, False, False]


def test_proven_ones_are_not_cut_for_strangers(pairs: Callable[[], socket.socket]):
    admission = Admission(Limits(connections=3, pending=3), Clock())
    proven = [admitted(admission, pairs(), "a") for _ in range(2)]
    for each in proven:
        admission.touch(each, busy=True)
        admission.prove(each)
    strangers = [admitted(admission, pairs(), "b") for _ in range(3)]
    assert not any(is_cut(each) for each in proven)
    assert [is_cut(each) for each in strangers] == [True, True, False]
    admission.prove(strangers[2])
    admission.touch(strangers[2], busy=True)
    assert admission.admit(pairs(), "c") is None  # all are busy: there is no place
    assert len(admission) == 3
    admission.touch(proven[1], busy=False)
    assert admission.admit(pairs(), "c") is not None
    assert [is_cut(each) for each in proven] == [False, True]


def test_time_runs_out(pairs: Callable[[], socket.socket]):
    clock = Clock()
    admission = Admission(Limits(pending_s=10, idle_s=100), clock)
    stranger, idle, busy = (admitted(admission, pairs(), "a") for _ in range(3))
    for each in (idle, busy):
        admission.touch(each, busy=True)
        admission.prove(each)
    admission.touch(idle, busy=False)
    for now_s, cut in [(10, [0, 0, 0]), (11, [1, 0, 0]), (100, [1, 0, 0]), (101, [1, 1, 0])]:
        clock.now_s = now_s
        admission.sweep()
        assert [is_cut(each) for each in (stranger, idle, busy)] == [bool(each) for each in cut]
    for each in (stranger, idle, busy, busy):
        admission.drop(each)
    assert len(admission) == 0


def test_ipv6_counts_by_network():
    assert group_of("2001:db8::1") == group_of("2001:db8::ffff")
    assert group_of("2001:db8::1") != group_of("2001:db8:0:1::1")
    assert group_of("::ffff:10.0.0.1") == group_of("10.0.0.1") == "10.0.0.1"
    assert group_of("fe80::1%eth0") == group_of("fe80::2%eth0")
    assert len({group_of(f"10.0.0.{number}") for number in range(10)}) == 10
