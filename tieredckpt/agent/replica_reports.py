"""How far the copies of a checkpoint are, as one host knows it: for waiting and for status."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tieredckpt.agent.known_saves import KnownSaves
from tieredckpt.agent.peers import Peers
from tieredckpt.format.manifest import Manifest
from tieredckpt.policy.replication import (
    is_failed,
    is_ordered,
    is_replicated,
    newest_replicated,
    ordered_and_open,
    progress,
    was_replicated,
)
from tieredckpt.transport.messages import Level


@dataclass(frozen=True, slots=True)
class ReplicaOutcome:
    """How far the copies of a checkpoint are, for ``wait`` and ``status``."""

    level: Level
    done: int | None = None
    """Copies that count, as far as this host knows; the leader knows all."""
    wanted: int | None = None
    error: str | None = None


def outcome_of(
    saves: KnownSaves, peers: Peers, save_id: str, past: Level, error: str | None
) -> ReplicaOutcome:
    """The outcome of one checkpoint.

    Args:
        saves: What is known.
        peers: Who answers.
        save_id: Of the checkpoint.
        past: What became of it, if it is not in memory any more.
        error: Why its copies cannot be pulled here now.
    """
    manifest = saves.find(save_id)
    if manifest is None:
        return ReplicaOutcome(past)
    about = saves.about(manifest)
    if not manifest.replicas and not is_ordered(manifest, about):
        return ReplicaOutcome("not_scheduled")
    live = saves.live()
    copies = progress(manifest, about, live)
    if is_replicated(manifest, about, live):
        return ReplicaOutcome("done", copies.wanted, copies.wanted)
    newer = _newer(saves, manifest)
    if was_replicated(manifest, about) and (whole := newest_replicated(newer, saves.about(*newer))):
        # Nobody makes the copies again that were lost.
        return ReplicaOutcome(
            "superseded", copies.done, copies.wanted, f"step {whole.step} was replicated after it"
        )
    if is_failed(manifest, about):
        why = next((each.text for each in about if each.kind == "failed"), "")
        return ReplicaOutcome("failed", copies.done, copies.wanted, why)
    if is_ordered(manifest, about):
        if error is None and peers.is_leader:
            error = _silent(peers, copies.missing)
        return ReplicaOutcome("waiting" if error else "active", copies.done, copies.wanted, error)
    for each in newer:
        if is_ordered(each, saves.about(each)):
            return ReplicaOutcome(
                "superseded", 0, copies.wanted, f"step {each.step} came before its turn"
            )
    return ReplicaOutcome("queued", 0, copies.wanted)


def _newer(saves: KnownSaves, manifest: Manifest) -> Sequence[Manifest]:
    """The candidates before it; all of them if it is none."""
    line = saves.lines().get(manifest.stream, ())
    return line[: line.index(manifest)] if manifest in line else line


def _silent(peers: Peers, missing: Sequence[tuple[str, str, str]]) -> str | None:
    """Holders that are waited for and do not answer."""
    down = {each.host.host_id: each.error for each in peers.states() if each.error}
    silent = sorted({holder for _, _, holder in missing if holder in down})
    return f"no answer from {', '.join(silent)}: {down[silent[0]]}" if silent else None


def newest_and_open(saves: KnownSaves) -> tuple[Manifest | None, list[Manifest]]:
    """The checkpoint with the highest step of which all copies are there, and what is being
    replicated.
    """
    found: list[Manifest] = []
    waiting: list[Manifest] = []
    live = saves.live()
    for line in saves.lines().values():
        about = saves.about(*line)
        newest = newest_replicated(line, about, live)
        found += [newest] if newest is not None else []
        waiting += ordered_and_open(line, about)
    return max(found, key=lambda each: each.step, default=None), waiting
