"""A real agent as a donor: segments of its memory and its disk, over the wire, byte for byte."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from secrets import token_hex

import pytest
import trustme

from tests.support.agent import AgentProcess, FakeTrainer, spec_of
from tieredckpt.errors import AgentError, TierUnavailableError
from tieredckpt.format.manifest import SegmentRef
from tieredckpt.rpc.auth import Secret
from tieredckpt.rpc.messages import agent as m
from tieredckpt.rpc.peer_client import PeerClient

SIZE = 5 << 20


@pytest.fixture
def tls(tmp_path: Path) -> m.TlsSpec:
    ca = trustme.CA()
    leaf = ca.issue_cert("127.0.0.1")
    files = {
        "cert": leaf.cert_chain_pems[0].bytes(),
        "key": leaf.private_key_pem.bytes(),
        "ca": ca.cert_pem.bytes(),
    }
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
        (tmp_path / name).chmod(0o600)
    return m.TlsSpec(**{name: str(tmp_path / name) for name in files})


@pytest.fixture
def host(runtime_dir: Path, tmp_path: Path) -> Iterator[tuple[AgentProcess, FakeTrainer]]:
    spec = spec_of(tiers={"disk": tmp_path / "disk"})
    env = {"TIEREDCKPT_NODE_NAME": "donor"}
    with (
        AgentProcess(runtime_dir, env=env) as agent,
        FakeTrainer(runtime_dir, spec, size=SIZE) as trainer,
    ):
        yield agent, trainer


def listen(trainer: FakeTrainer, token: str, tls: m.TlsSpec | None) -> m.HostEntry:
    request = m.Listen(
        session_id=trainer.client.session_id, token=token, tls=tls, interfaces=(),
        cidrs=("127.0.0.1/32",), port=0, labels={},
    )  # fmt: skip
    return trainer.client.call(request).host


def fetch(client: PeerClient, ref: SegmentRef, tier: str, start: int, stop: int) -> bytes:
    data = bytearray(stop - start)
    with closing(client.open_range(ref.id, tier, start, stop)) as stream:
        stream.read_into(memoryview(data))
    return bytes(data)


def check_both_tiers(trainer: FakeTrainer, client: PeerClient) -> None:
    saved = trainer.save(1, tiers=("disk",))
    trainer.spilled(saved.save_id)
    (ref,) = saved.segments
    whole = trainer.read(ref)
    assert len(whole) == ref.size
    for tier in ("memory", "disk"):
        # Unaligned ones, too: the disk is read with direct I/O.
        for start, stop in [(0, ref.size), (1, 2), (4095, 2 << 20), (ref.size - 7, ref.size)]:
            assert fetch(client, ref, tier, start, stop) == whole[start:stop]


def test_with_a_token(host: tuple[AgentProcess, FakeTrainer]):
    agent, trainer = host
    token = token_hex(32)
    entry = listen(trainer, token, None)
    with PeerClient(entry, trainer.namespace, Secret(token)) as client:
        assert client.identify().host_id == "donor"
        check_both_tiers(trainer, client)
        agent.kill()
        with pytest.raises(TierUnavailableError):
            client.identify()
    with PeerClient(entry, trainer.namespace, Secret(token_hex(32))) as stranger:
        with pytest.raises(TierUnavailableError):
            stranger.identify()
        assert token not in agent.log()


def test_with_tls(host: tuple[AgentProcess, FakeTrainer], tls: m.TlsSpec):
    _, trainer = host
    token = token_hex(32)
    entry = listen(trainer, token, tls)
    with PeerClient(entry, trainer.namespace, Secret(token, tls)) as client:
        check_both_tiers(trainer, client)
    with (
        PeerClient(entry, trainer.namespace, Secret(token_hex(32))) as plain,
        pytest.raises(TierUnavailableError),
    ):
        plain.identify()
    with (
        PeerClient(entry, trainer.namespace, Secret(token_hex(32), tls)) as other,
        pytest.raises(AgentError, match="refuses"),
    ):
        other.identify()
