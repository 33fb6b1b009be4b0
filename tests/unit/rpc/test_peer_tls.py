"""Mutual TLS between hosts: who gets in, and what happens when certificates are renewed."""

from __future__ import annotations

import contextlib
import datetime
import os
import socket
import ssl
from contextlib import closing
from pathlib import Path

import msgspec
import pytest
import trustme

from tests.support.peer_server import HERE, NAMESPACE, SEGMENT, TOKEN, serving
from tieredckpt.errors import AgentError, TierUnavailableError
from tieredckpt.rpc import auth, peer_server
from tieredckpt.rpc.auth import Secret
from tieredckpt.rpc.messages import peer as pm
from tieredckpt.rpc.messages.agent import TlsSpec
from tieredckpt.rpc.peer_client import PeerClient
from tieredckpt.rpc.peer_server import Limits

LONG_AGO = datetime.datetime(2001, 1, 1, tzinfo=datetime.UTC)


def write(folder: Path, ca: trustme.CA, *names: str, expired: bool = False) -> TlsSpec:
    """Certificate files for a host of these names, over whatever lies there."""
    folder.mkdir(exist_ok=True)
    leaf = ca.issue_cert(*(names or ("127.0.0.1",)), not_after=LONG_AGO if expired else None)
    files = {
        "cert.pem": leaf.cert_chain_pems[0].bytes(),
        "key.pem": leaf.private_key_pem.bytes(),
        "ca.pem": ca.cert_pem.bytes(),
    }
    for name, data in files.items():
        (folder / f"{name}.new").write_bytes(data)
        (folder / f"{name}.new").replace(folder / name)
    return TlsSpec(**{name.partition(".")[0]: str(folder / name) for name in files})


@pytest.fixture(scope="module")
def ca() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def server_tls(tmp_path: Path, ca: trustme.CA) -> TlsSpec:
    return write(tmp_path / "server", ca)


@pytest.mark.parametrize("token", ["", TOKEN])
def test_with_certificates_of_one_ca(server_tls: TlsSpec, token: str):
    data = os.urandom((3 << 20) + 17)
    secret = Secret(token, server_tls)
    with serving(secret=secret, tls=server_tls) as (peer, entry, server):
        peer.add(SEGMENT, data)
        peer.add(SEGMENT, data, "nvme")
        with PeerClient(entry, NAMESPACE, secret) as client:
            assert client.identify() == HERE
            for tier in ("memory", "nvme"):
                got = bytearray(len(data) - 5)
                with closing(client.open_range(SEGMENT, tier, 5, len(data))) as stream:
                    stream.read_into(memoryview(got))
                assert got == data[5:]
            assert client.ask(pm.AskHoldings(manifests=())) == b"holdings of run-7"
            assert len(server.admission) == 1
        other = msgspec.structs.replace(entry, host_id="there")
        with (
            PeerClient(other, NAMESPACE, secret) as client,
            pytest.raises(TierUnavailableError, match=r"host there .* and host here .* answered"),
        ):
            client.ask(pm.AskHoldings(manifests=()))
        with (
            PeerClient(entry, "another", secret) as client,
            pytest.raises(AgentError, match="the host refuses"),
        ):
            client.identify()


def refused(tmp_path: Path, server: TlsSpec, client: TlsSpec | None, token: str = "") -> str:
    """What a client with these files is told; nothing must reach the API."""
    with serving(secret=Secret(token, server), tls=server) as (peer, entry, _):
        with (
            PeerClient(entry, NAMESPACE, Secret(token, client)) as asking,
            pytest.raises(TierUnavailableError) as caught,
        ):
            asking.identify()
        assert not peer.calls
        return str(caught.value)


def test_a_certificate_of_another_ca(tmp_path: Path, ca: trustme.CA, server_tls: TlsSpec):
    stranger = write(tmp_path / "stranger", trustme.CA())
    assert "certificate is refused" in refused(tmp_path, server_tls, stranger)
    # The stranger trusts our CA, but we do not trust his.
    (tmp_path / "stranger" / "ca.pem").write_bytes(ca.cert_pem.bytes())
    refused(tmp_path, server_tls, stranger)


def test_a_server_of_another_name(tmp_path: Path, ca: trustme.CA, server_tls: TlsSpec):
    other = write(tmp_path / "other", ca, "127.0.0.9", "another.example")
    found = refused(tmp_path, other, server_tls)
    assert "certificate is refused: IP address mismatch" in found
    assert "; run `tieredckpt config check` on both hosts" in found


def test_an_expired_certificate_on_either_side(tmp_path: Path, ca: trustme.CA, server_tls: TlsSpec):
    expired = write(tmp_path / "expired", ca, expired=True)
    assert "certificate has expired" in refused(tmp_path, expired, server_tls)
    refused(tmp_path, server_tls, expired)


def test_no_client_certificate(server_tls: TlsSpec):
    with serving(secret=Secret("", server_tls), tls=server_tls) as (peer, entry, _):
        context = ssl.create_default_context(cafile=server_tls.ca)
        host, port = entry.addresses[0].split(":")
        raw = socket.create_connection((host, int(port)), 30)
        with context.wrap_socket(raw, server_hostname=host) as sock:
            # TLS 1.3 tells a client only when it reads.
            with contextlib.suppress(ConnectionError):
                sock.sendall(b"GET /p1/hello HTTP/1.1\r\nHost: x\r\n\r\n")
            with contextlib.suppress(ssl.SSLError, ConnectionError):
                assert sock.recv(100) == b""
        assert not peer.calls


def test_no_tls_at_all(tmp_path: Path, server_tls: TlsSpec):
    refused(tmp_path, server_tls, None, TOKEN)


def test_a_namespace_with_tls_is_not_served_without(server_tls: TlsSpec):
    """The token alone is not enough where certificates are asked for."""
    with (
        serving(secret=Secret(TOKEN, server_tls)) as (peer, entry, _),
        PeerClient(entry, NAMESPACE, Secret(TOKEN)) as client,
    ):
        with pytest.raises(AgentError, match="the host refuses"):
            client.identify()
        assert not peer.calls


def test_a_namespace_of_another_ca_is_not_served(
    tmp_path: Path, ca: trustme.CA, server_tls: TlsSpec
):
    other = write(tmp_path / "other", trustme.CA())
    with (
        serving(secret=Secret("", other), tls=server_tls) as (peer, entry, _),
        PeerClient(entry, NAMESPACE, Secret("", server_tls)) as client,
    ):
        with pytest.raises(AgentError, match="the host refuses"):
            client.identify()
        assert not peer.calls


def test_renewal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """New files are used by new connections; those that exist go on."""
    monkeypatch.setattr(auth, "CHECK_S", 0.0)
    old_ca, new_ca = trustme.CA(), trustme.CA()
    server, mine = write(tmp_path / "server", old_ca), write(tmp_path / "mine", old_ca)
    with serving(secret=Secret("", server), tls=server) as (_, entry, _):
        before = PeerClient(entry, NAMESPACE, Secret("", mine))
        assert before.identify() == HERE
        write(tmp_path / "server", new_ca)
        assert before.identify() == HERE
        before.retire()
        with pytest.raises(TierUnavailableError, match="certificate is refused"):
            before.identify()
        write(tmp_path / "mine", new_ca)
        assert before.identify() == HERE
        before.close()


def test_half_a_renewal_leaves_what_was_there(
    tmp_path: Path, ca: trustme.CA, monkeypatch: pytest.MonkeyPatch, caplog
):
    monkeypatch.setattr(auth, "CHECK_S", 0.0)
    spec = write(tmp_path / "server", ca)
    with serving(secret=Secret("", spec), tls=spec) as (_, entry, _):
        mine = write(tmp_path / "mine", ca)
        with PeerClient(entry, NAMESPACE, Secret("", mine)) as client:
            Path(spec.key).write_bytes(b"half of a k")
            assert client.identify() == HERE
            assert "the changed TLS files are not used" in caplog.text
        write(tmp_path / "server", ca)
        with PeerClient(entry, NAMESPACE, Secret("", mine)) as client:
            assert client.identify() == HERE


def test_files_that_do_not_fit(tmp_path: Path, ca: trustme.CA):
    spec = write(tmp_path / "one", ca)
    other = write(tmp_path / "two", ca)
    mixed = TlsSpec(cert=spec.cert, key=other.key, ca=spec.ca)
    for bad in (mixed, TlsSpec(cert=spec.cert, key=str(tmp_path / "no"), ca=spec.ca)):
        with pytest.raises(AgentError, match="cannot use the TLS files"):
            PeerClient(HERE, NAMESPACE, Secret("", bad))


@pytest.mark.full
def test_somebody_who_never_ends_his_handshake(
    server_tls: TlsSpec, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(peer_server, "HANDSHAKE_S", 600.0)
    # (As long as our own client may take to prove itself on a busy machine.)
    secret, limits = Secret("", server_tls), Limits(pending_s=3.0)
    with serving(secret=secret, tls=server_tls, limits=limits) as (_, entry, server):
        host, port = entry.addresses[0].split(":")
        with socket.create_connection((host, int(port)), 120) as sock:
            assert sock.recv(1) == b""  # long before the handshake's own time is over
        with PeerClient(entry, NAMESPACE, secret, connect_s=30) as client:
            assert client.identify() == HERE
            assert len(server.admission) == 1


def test_a_certificate_is_checked_without_a_peer(tmp_path: Path, ca: trustme.CA):
    good = write(tmp_path / "good", ca, "10.0.0.1", "node1.example")
    for name in ("10.0.0.1", "node1.example"):
        auth.check_certificate(good, name)
    bad = {
        "IP address mismatch": good,
        "expired": write(tmp_path / "old", ca, "10.0.0.2", expired=True),
        "unable to get local issuer": msgspec.structs.replace(
            good, ca=write(tmp_path / "other", trustme.CA()).ca
        ),
        "KEY_VALUES_MISMATCH": msgspec.structs.replace(
            good, key=write(tmp_path / "two", ca).key
        ),
    }  # fmt: skip
    for why, spec in bad.items():
        with pytest.raises(AgentError, match=why):
            auth.check_certificate(spec, "10.0.0.2")
