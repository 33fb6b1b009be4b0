"""What tests ask about copies on other hosts."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from tests.support.agent import content, wait_until
from tests.support.peers import Job, PeerHost
from tieredckpt.errors import NotFoundError, TierUnavailableError
from tieredckpt.format.manifest import Manifest, SegmentRef
from tieredckpt.rpc.messages import agent as m
from tieredckpt.storage.memory.slot import REPLICA_ID

MIB = 1 << 20
DEADLINE_S = 90.0
"""Far beyond what anything takes: this machine may be busy with other things."""


def progress(host: PeerHost, manifest: Manifest) -> m.Progress:
    return host.client.progress(manifest.save_id)


def level(host: PeerHost, manifest: Manifest) -> str:
    return progress(host, manifest).levels.get("replicated", "not_scheduled")


def wait_replicated(job: Job, manifest: Manifest, hosts: Iterable[PeerHost] | None = None) -> None:
    """Until every host knows that all copies are there."""
    for host in hosts or job.hosts:
        wait_until(lambda h=host: level(h, manifest) == "done", deadline_s=DEADLINE_S)


def status(host: PeerHost) -> m.ReplicationStatus:
    found = host.client.status().namespaces[0].replication
    assert found is not None
    return found


def holds(host: PeerHost, ref: SegmentRef) -> bool:
    """Whether the host's memory has the segment, by its own word."""
    return any(each.id == ref.id and each.error is None for each in host.trainer.tier().segments)


def intact(host: PeerHost, ref: SegmentRef, step: int) -> bool:
    """Whether the host's memory has the segment, byte by byte.

    Raises TierUnavailableError: It cannot be told, such as of one that is just being made.
    """
    try:
        data = host.trainer.read(ref)
    except NotFoundError:
        return False
    offset, size = host.trainer.layout.items[0].offset, host.trainer.size
    root = data[-16:].hex()
    return root == ref.root and data[offset : offset + size] == content(step, size)


def intact_by_now(host: PeerHost, ref: SegmentRef, step: int) -> bool:
    """For who waits for :func:`intact`, or counts copies: one that is just being made is none."""
    with suppress(TierUnavailableError):
        return intact(host, ref, step)
    return False


def slot_path(host: PeerHost, ref: SegmentRef) -> Path:
    """The slot file in which the host holds a segment."""
    opened, fd = host.client.open_segment("memory", ref.id)
    os.close(fd)
    assert opened.slot_id is not None
    return host.runtime / "slots" / opened.slot_id


def flip(path: Path, offset: int) -> None:
    """One bit of a slot, behind everybody's back."""
    with path.open("r+b") as file:
        file.seek(offset)
        old = file.read(1)
        file.seek(offset)
        file.write(bytes([old[0] ^ 0x04]))


def copy_slots(host: PeerHost) -> int:
    """Slots for copies on a host, whatever they hold."""
    count = 0
    for path in (host.runtime / "slots").iterdir():
        with suppress(FileNotFoundError), path.open("rb") as file:  # it may go meanwhile
            file.seek(max(0, os.fstat(file.fileno()).st_size - 4096))
            count += bytes.fromhex(REPLICA_ID) in file.read(4096)
    return count
