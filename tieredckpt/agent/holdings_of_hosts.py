"""What the members hold of some checkpoints, asked of each, before copies are ordered anew."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

from tieredckpt.agent.exchange import Exchange
from tieredckpt.agent.peers import Peers
from tieredckpt.errors import NotFoundError
from tieredckpt.format.manifest import Manifest
from tieredckpt.tiers.catalog import Catalog
from tieredckpt.tiers.facts import decode_holdings, manifest_digest
from tieredckpt.transport.peer_messages import AskHoldings, Push

ASK_S = 10.0
"""For all members together."""


@dataclass(frozen=True, slots=True)
class Held:
    """By one host, in memory."""

    segments: frozenset[str]
    """Ids of those that are whole, as far as it knows."""
    saves: frozenset[str]
    """Save ids of the manifests: only of these can it keep further copies."""


def ask_holdings(
    peers: Peers, exchange: Exchange, catalog: Catalog, manifests: Sequence[Manifest]
) -> tuple[dict[str, Held], list[str]]:
    """What each live member holds, and the names of those that did not answer.

    A member that has none of these checkpoints (it joined just now) is given them first.
    """
    hosts = [host for host in peers.others() if host not in peers.lost()]
    encoded = {m.save_id: data for m in manifests if (data := _read(catalog, m)) is not None}
    have = [manifest_digest(data) for data in encoded.values()]
    found: dict[str, Held] = {}
    lock = threading.Lock()

    def ask(host: str) -> None:
        held = _held(peers, host, have)
        lacking = [each for each in encoded if each not in held.saves]
        if lacking:
            records = [r.id for each in lacking for r in catalog.records(each)]
            push = Push(
                manifests=tuple(encoded[each] for each in lacking),
                records=catalog.encoded_records(records),
            )
            exchange.tell(push, host)  # in this thread: it is one of the exchange's own
            held = _held(peers, host, have)
        with lock:
            found[host] = held

    exchange.each(hosts, ask, ASK_S)
    with lock:
        answered = dict(found)
    lost = peers.lost()
    return answered, [h for h in hosts if h not in answered and h not in lost]


def _read(catalog: Catalog, manifest: Manifest) -> bytes | None:
    try:
        return catalog.read_manifest(manifest.stream, manifest.save_id)
    except NotFoundError:  # deleted just now
        return None


def _held(peers: Peers, host: str, have: Sequence[str]) -> Held:
    holdings = decode_holdings(peers.ask(host, AskHoldings(manifests=tuple(have))))
    memory = next((tier for tier in holdings.tiers if tier.tier == "memory"), None)
    if memory is None or not memory.available:
        return Held(frozenset(), frozenset())
    return Held(
        frozenset(
            each.id for each in memory.segments if each.error is None and not each.bad_blocks
        ),
        frozenset(each.save_id for each in memory.manifests if each.error is None),
    )
