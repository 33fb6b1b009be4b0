"""Retention, once after an agent's start: what the one before it did not come to delete.

It may have ended between a commit, or a spill, and the retention that follows. Else the slots of an
older checkpoint would be taken until the next commit.
"""

from __future__ import annotations

import logging

from tieredckpt.agent.namespace import Namespace
from tieredckpt.errors import TieredCkptError
from tieredckpt.format.manifest import Manifest
from tieredckpt.policy.timeline import candidates
from tieredckpt.tiers.pool import SlotPool

log = logging.getLogger(__name__)


def catch_up(namespace: Namespace, pool: SlotPool) -> bool:
    """Apply retention to what was adopted; False: not yet, ask again. The node's lock is held.

    Unknown is never permission to free. So it waits for rules, and for other hosts: the time
    line may have gone on from an older checkpoint while no agent ran here. It leaves a namespace
    alone while a manifest or an attempt of it cannot be read, and a stream of which something that
    is to stay has lost its slot here: then the older one may be the only good copy.

    Args:
        namespace: One that was adopted.
        pool: The host's slots.
    """
    catalog = namespace.catalog
    keep = namespace.ruling.keep_last()
    if keep is None or not _knows_the_line(namespace):
        return False
    if catalog.unreadable() or catalog.bad_attempts():
        return False
    before = len(catalog.manifests())
    try:
        for stream in sorted({manifest.stream for manifest in catalog.manifests()}):
            line = candidates(catalog.manifests(), catalog.attempts(), stream)
            if line and all(_is_sealed(namespace, pool, each) for each in line[:keep]):
                namespace.retention.apply(stream)
    except TieredCkptError as error:  # the next commit tries it again
        log.warning("namespace %s: retention after the start: %s", namespace.name, error)
    if gone := before - len(catalog.manifests()):
        log.info(
            "namespace %s: %d checkpoints that the agent before this one had not come to delete "
            "are gone from memory", namespace.name, gone,
        )  # fmt: skip
    return True


def _knows_the_line(namespace: Namespace) -> bool:
    """Whether all attempts are known here: the leader opens them."""
    peers = namespace.peers
    if not peers.others():
        return True
    unmet = namespace.across.anti_entropy.unmet()
    if peers.is_leader:
        return not unmet
    return peers.leader not in unmet and peers.leader not in peers.lost()


def _is_sealed(namespace: Namespace, pool: SlotPool, manifest: Manifest) -> bool:
    """Whether this host's part of a checkpoint is here, as far as its labels tell."""
    for ref in namespace.own_segments(manifest):
        slot = pool.find(ref.id)
        if slot is None or slot.label.state != "sealed" or slot.label.root != ref.root:
            return False
    return True
