"""What replication is decided from: the time line of each stream, and the records about it."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Sequence

from tieredckpt.agent.cluster.members import Peers
from tieredckpt.agent.host.events import Hooks
from tieredckpt.format.manifest import Holders, Manifest
from tieredckpt.format.records import RecordKind, SaveRecord, encode_save_record
from tieredckpt.policy.history import candidates, left_behind
from tieredckpt.policy.placement import PlacementHost, domains_of
from tieredckpt.policy.replication import must_stay
from tieredckpt.storage.catalog import Catalog

TEXT_MAX = 2000
SAID: tuple[RecordKind, ...] = ("order", "replicated", "failed")
"""What decides what must stay: sent along with every manifest, so that no host's retention runs
without it."""

HELD: tuple[RecordKind, ...] = ("order", "ack", "replicated", "failed")
"""What is about copies in the memory of other hosts: without one there is nothing to say."""
NOBODY = "0" * 32
"""Incarnation in records of a host that does not listen: only what is held in memory depends on it,
and nobody else holds anything of that host."""


class KnownSaves:
    """Of one namespace, in memory. Thread-safe.

    Args:
        namespace: Its name.
        catalog: Of the memory tier.
        peers: The other hosts.
        hooks: Told of what is said here.
        mint: Makes record ids of 32 hex digits.
    """

    def __init__(
        self,
        namespace: str,
        catalog: Catalog,
        peers: Peers,
        hooks: Hooks,
        *,
        mint: Callable[[], str] = lambda: secrets.token_hex(16),
    ) -> None:
        self.namespace = namespace
        self._catalog = catalog
        self._peers = peers
        self._hooks = hooks
        self._mint = mint

    def lines(self) -> dict[str, tuple[Manifest, ...]]:
        """By stream, the candidates in memory, newest first."""
        manifests, attempts = self._catalog.manifests(), self._catalog.attempts()
        return {
            stream: candidates(manifests, attempts, stream)
            for stream in sorted({manifest.stream for manifest in manifests})
        }

    def left_behind(self, stream: str) -> tuple[Manifest, ...]:
        """Checkpoints in memory that a run passed over in silence, newest first."""
        return left_behind(self._catalog.manifests(), self._catalog.attempts(), stream)

    def find(self, save_id: str) -> Manifest | None:
        """A checkpoint in memory, on the line or not."""
        return self._catalog.get(save_id)

    def about(self, *manifests: Manifest) -> list[SaveRecord]:
        """All records about these checkpoints."""
        return [record for each in manifests for record in self._catalog.records(each.save_id)]

    def must_stay(self, stream: str) -> set[str]:
        """See :func:`tieredckpt.policy.replication.must_stay`."""
        return self.stay_of(self.lines().get(stream, ()))

    def stay_of(self, line: Sequence[Manifest]) -> set[str]:
        """The same of one stream's candidates, newest first."""
        return must_stay(line, self.about(*line), incarnations=self.live())

    def sent_along(self, manifest: Manifest) -> tuple[bytes, ...]:
        """Encoded records that whoever gets this manifest must know before retention runs."""
        line = self.lines().get(manifest.stream, ())
        stay = self.stay_of(line) | {manifest.save_id}
        about = self.about(*(each for each in line if each.save_id in stay))
        return self.encoded(each for each in about if each.kind in SAID)

    def live(self) -> dict[str, str]:
        """Incarnations of the members that live, this host included."""
        gone = self._peers.lost()
        members = set(self._peers.members())
        return {
            host: incarnation
            for host, incarnation in self._peers.incarnations().items()
            if host in members and host not in gone
        }

    def incarnation(self) -> str | None:
        """This host's; None: it does not listen, and so holds nothing for others."""
        own = self._peers.own()
        return own.incarnation if own is not None else None

    def say(
        self,
        manifest: Manifest,
        kind: RecordKind,
        *,
        segments: tuple[str, ...] = (),
        placement: tuple[Holders, ...] = (),
        text: str = "",
    ) -> bytes | None:
        """Note a record about a checkpoint that is here; the encoded record, to be told to others.

        None: the checkpoint is not in memory any more, or it is about copies for other hosts and
        this host does not listen.

        Raises:
            CapacityError, TierUnavailableError: It could not be noted.
        """
        incarnation = self.incarnation()
        if incarnation is None and kind not in HELD:
            incarnation = NOBODY
        if incarnation is None or self.find(manifest.save_id) is None:
            return None
        record = SaveRecord(
            namespace=self.namespace,
            stream=manifest.stream,
            save_id=manifest.save_id,
            kind=kind,
            id=self._mint(),
            host=self._peers.host_id,
            incarnation=incarnation,
            segments=segments,
            placement=placement,
            text=text[:TEXT_MAX],
        )
        data = encode_save_record(record)
        self._catalog.put_record(data)
        for call in self._hooks.on_records:
            call((record,))
        return data

    def own_acks(self, manifest: Manifest) -> list[SaveRecord]:
        """What this host has acknowledged of a checkpoint since it lives."""
        mine = (self._peers.host_id, self.incarnation())
        acks = [record for record in self.about(manifest) if record.kind == "ack"]
        return [record for record in acks if (record.host, record.incarnation) == mine]

    def encoded(self, records: Iterable[SaveRecord]) -> tuple[bytes, ...]:
        """Records that are noted here, as bytes."""
        return self._catalog.encoded_records([record.id for record in records])

    def placed(self, hosts: Iterable[str]) -> list[PlacementHost]:
        """These hosts, with their failure domains."""
        labels = {entry.host_id: entry.labels for entry in self._peers.book()}
        return [PlacementHost(host, domains_of(labels.get(host, {}))) for host in hosts]
