"""The checkpoints of one tier, and the order of the steps that commit and delete them.

    manifests/<stream>/<save id>       the commit: written last, deleted first
    plans/<plan id>                    before any manifest that refers to it; shared
    segments/<segment id>              before the manifest; each belongs to one checkpoint
    attempts/<number>-<attempt id>
    records/<save id>/<record id>      later facts about it; deleted after the manifest

So a visible manifest means that plan and segments are there, and a crash in between leaves
orphans (see :meth:`Catalog.sweep_orphans`), never a dangling manifest. The catalog knows the tier
only by its contract, and nothing of timelines or retention.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Iterator, Set

from tieredckpt import failpoints
from tieredckpt.errors import IntegrityError, NotFoundError, TieredCkptError, UsageError
from tieredckpt.format.envelope import ENVELOPE_BYTES
from tieredckpt.format.manifest import (
    ATTEMPT_LIMIT_BYTES,
    ID_PATTERN,
    MANIFEST_LIMIT_BYTES,
    AttemptRecord,
    Manifest,
    decode_attempt,
    decode_manifest,
)
from tieredckpt.format.plan_record import PLAN_LIMIT_BYTES, encoded_plan_id
from tieredckpt.storage.base import Tier, attempt_key, manifest_key, plan_key, segment_key
from tieredckpt.storage.stored import (
    Contents,
    Parse,
    SaveRecords,
    Stored,
    StoredAttempt,
    StoredManifest,
    Swept,
    is_newer,
    parse_attempt,
    parse_manifest,
    read_attempts,
    read_manifests,
    read_stored,
)

log = logging.getLogger(__name__)


class Catalog:
    """The commit protocol over any tier; thread-safe; keeps the tier's manifests in memory.

    Args:
        tier: The tier. Call :meth:`load` before any other method.
    """

    def __init__(self, tier: Tier) -> None:
        self.tier = tier
        # Changes exclude each other, or a plan could be deleted between the check and the manifest
        # that needs it. Readers wait neither for a disk nor for a lock: each change replaces a
        # table instead of modifying it.
        self._changing = threading.RLock()
        self._manifests: dict[tuple[str, str], StoredManifest] = {}
        self._attempts: dict[str, StoredAttempt] = {}
        self._plans: frozenset[str] = frozenset()
        self._removing: dict[tuple[str, str], Manifest] = {}
        """Checkpoints whose deletion has begun; some of their objects may be left."""
        self._records = SaveRecords(tier)
        self.records = self._records.of
        self.put_record = self._records.put
        self.record_ids = self._records.ids
        self.encoded_records = self._records.encoded

    # --- reading ------------------------------------------------------------------------------

    def load(self) -> Contents:
        """Read the tier anew. Single bad objects are reported in the result, not raised.

        Raises:
            TierUnavailableError: The tier does not answer; the tables are unchanged.
        """
        with self._changing:
            manifests = {(each.stream, each.save_id): each for each in read_manifests(self.tier)}
            attempts = {each.key: each for each in read_attempts(self.tier)}
            listed = list(self._named("plans/"))
            plans = frozenset(
                name for name, _ in listed if name in self._plans or self._verify_plan(name)
            )
            segments = dict(self.listed_segments())
            self._manifests, self._attempts, self._plans = manifests, attempts, plans
        return Contents(manifests=tuple(manifests.values()), plans=plans, segments=segments)

    def listed_segments(self) -> Iterator[tuple[str, int]]:
        """Ids and sizes. Raises TierUnavailableError."""
        return self._named("segments/")

    def _named(self, prefix: str) -> Iterator[tuple[str, int]]:
        for info in self.tier.list(prefix):
            if ID_PATTERN.fullmatch(name := info.key.rpartition("/")[2]):
                yield name, info.size

    def _verify_plan(self, plan_id: str) -> bool:
        """Whether the stored plan has the id in its name."""
        try:
            return encoded_plan_id(self.read_plan(plan_id)) == plan_id
        except (NotFoundError, IntegrityError):
            return False

    def manifests(self) -> tuple[Manifest, ...]:
        """The readable manifests, as of the last load and later changes made here; no I/O."""
        return tuple(each.manifest for each in self._manifests.values() if each.manifest)

    def get(self, save_id: str) -> Manifest | None:
        """The readable manifest of one checkpoint, likewise; None: there is none."""
        return next((each for each in self.manifests() if each.save_id == save_id), None)

    def holds(self, manifest: Manifest) -> bool:
        """Whether the tier has a checkpoint; asks the tier if other hosts delete in it.

        Raises TierUnavailableError.
        """
        return manifest in self.manifests()

    def attempts(self) -> tuple[AttemptRecord, ...]:
        """The readable attempt records, likewise."""
        return tuple(each.record for each in self._attempts.values() if each.record)

    def has_plan(self, plan_id: str) -> bool:
        """Whether the tier has the plan now, and the plan was intact when it was read.

        Raises TierUnavailableError.
        """
        if plan_id not in self._plans:
            return False
        try:  # scratch disks are purged of old files, and a plan is used for long
            self.tier.info(plan_key(plan_id))
        except NotFoundError:
            return False
        return True

    def check_plan(self, plan_id: str) -> bool:
        """As :meth:`has_plan`, but reads the plan anew.

        Raises:
            TierUnavailableError: The tier does not answer; the tables are unchanged.
        """
        with self._changing:
            intact = self._verify_plan(plan_id)
            self._plans = self._plans | {plan_id} if intact else self._plans - {plan_id}
        return intact

    def unreadable(self, *, newer: bool = True) -> list[tuple[str, str]]:
        """Stream and save id of the manifests that cannot be read, as of the last load; no I/O.

        ``newer``: include intact ones of a later release.
        """
        bad = {key: each for key, each in self._manifests.items() if not each.manifest}
        return [key for key, each in bad.items() if newer or not is_newer(each)]

    def bad_attempts(self) -> dict[str, bytes]:
        """By key, the bytes of the attempt records that cannot be read; likewise."""
        return {key: each.data or b"" for key, each in self._attempts.items() if each.error}

    def read_manifest(self, stream: str, save_id: str) -> bytes:
        """An encoded manifest from the tier.

        Raises:
            NotFoundError, IntegrityError, TierUnavailableError: As :meth:`Tier.get`.
        """
        limit = MANIFEST_LIMIT_BYTES + ENVELOPE_BYTES
        return self.tier.get(manifest_key(stream, save_id), limit=limit)

    def read_plan(self, plan_id: str) -> bytes:
        """An encoded plan from the tier; not verified. Raises as :meth:`read_manifest`."""
        return self.tier.get(plan_key(plan_id), limit=PLAN_LIMIT_BYTES + ENVELOPE_BYTES)

    def load_records(self) -> None:
        """Read the records of the checkpoints that were found; delete those of other checkpoints.

        Raises TierUnavailableError.
        """
        self._records.load({save_id for _, save_id in self._manifests})

    def read_records(self) -> None:
        """Read all records and delete none, for a tier that is only read.

        Raises TierUnavailableError.
        """
        self._records.load(None)

    # --- committing ---------------------------------------------------------------------------

    def put_plan(self, plan_id: str, data: bytes) -> None:
        """Store an encoded plan under its id, unless an intact one is there already.

        Raises:
            IntegrityError: ``data`` is not the plan with this id.
            CapacityError, TierUnavailableError: As :meth:`Tier.put`.
        """
        with self._changing:
            # Its bytes may differ: another release of zstd compresses the same plan differently.
            if not (self.has_plan(plan_id) or self._verify_plan(plan_id)):
                if encoded_plan_id(data) != plan_id:
                    raise IntegrityError(f"these bytes are not plan {plan_id}", key=plan_id)
                self.tier.delete(plan_key(plan_id))  # a damaged one, if any
                self.tier.put(plan_key(plan_id), data)
            self._plans |= {plan_id}

    def put_attempt(self, data: bytes) -> AttemptRecord:
        """Store an encoded attempt record. Idempotent. Raises as :meth:`Tier.put`."""
        record = decode_attempt(data)
        key = attempt_key(record.number, record.id)
        with self._changing:
            self._put_over_damage(key, data, ATTEMPT_LIMIT_BYTES, parse_attempt)
            stored = StoredAttempt(key=key, data=data, record=record)
            self._attempts = {**self._attempts, key: stored}
        return record

    def commit(
        self, data: bytes, plan: bytes | None = None, *, segments: Set[str] | None = None
    ) -> Manifest:
        """Make a checkpoint exist: the plan first (if given), then the manifest.

        Idempotent for identical bytes. An unreadable manifest under the same key is replaced.

        Args:
            data: The encoded manifest.
            plan: The encoded plan, unless the tier has it.
            segments: Ids of the segments that must be in this tier, if each host stores only its
                own; None: all segments of the manifest.

        Raises:
            NotFoundError: The plan or a segment is missing in the tier; nothing is visible.
            UsageError: Another manifest has this save id; nothing was changed.
            IntegrityError: ``data`` or ``plan`` is damaged; nothing is visible.
            CapacityError, TierUnavailableError: As :meth:`Tier.put`.
        """
        manifest = decode_manifest(data)
        key = (manifest.stream, manifest.save_id)
        with self._changing:
            if plan is not None:
                self.put_plan(manifest.plan, plan)
            self._check_complete(manifest, segments)
            self._put_over_damage(manifest_key(*key), data, MANIFEST_LIMIT_BYTES, parse_manifest)
            stored = StoredManifest(stream=key[0], save_id=key[1], data=data, manifest=manifest)
            self._manifests = {**self._manifests, key: stored}
        return manifest

    def _check_complete(self, manifest: Manifest, segments: Set[str] | None) -> None:
        """Check plan and segments right before the manifest is put, so that it cannot dangle."""
        self.tier.info(plan_key(manifest.plan))
        for ref in manifest.segments:
            if segments is not None and ref.id not in segments:
                continue
            size = self.tier.info(segment_key(ref.id)).size
            if size != ref.size:
                raise NotFoundError(
                    f"segment {ref.id} has {size} of {ref.size} bytes in tier {self.tier.name}",
                    key=segment_key(ref.id),
                )

    def _put_over_damage(self, key: str, data: bytes, limit: int, parse: Parse[Stored]) -> None:
        """Put a record; replace an unreadable one, or an intact one that belongs to another key."""
        try:
            self.tier.put(key, data)
        except UsageError:
            found = read_stored(self.tier, key, limit, parse)
            if found is not None:
                if found.error is None or is_newer(found):
                    raise
                self.tier.delete(key)
            self.tier.put(key, data)

    # --- deleting -----------------------------------------------------------------------------

    def remove(self, manifest: Manifest, *, keep: Iterable[Manifest] = ()) -> Swept:
        """Delete a checkpoint: its manifest, then objects that no other one or ``keep`` needs.

        Raises:
            TierUnavailableError: The checkpoint is deleted or not; its remaining objects are
                orphans.
        """
        with self._changing:
            self._removing[manifest.stream, manifest.save_id] = manifest
            failpoints.reach("agent.retention.before_manifest_delete")
            self._delete_manifest(manifest.stream, manifest.save_id)
            failpoints.reach("agent.retention.after_manifest_delete")
            self._records.forget(manifest.save_id)
            segments, plans = self._needed(keep)
            swept = self._delete(
                [ref.id for ref in manifest.segments if ref.id not in segments],
                # A plan is shared: an unreadable manifest may need it. Segments are not.
                [manifest.plan] if manifest.plan not in plans and not self.unreadable() else [],
            )
            del self._removing[manifest.stream, manifest.save_id]
        return swept

    def finish_removals(self) -> Swept:
        """Continue failed calls of :meth:`remove`; checkpoints committed again since are kept.

        Raises:
            TierUnavailableError: As :meth:`remove`.
        """
        with self._changing:
            here = {(each.stream, each.save_id) for each in self.manifests()}
            for key in here & self._removing.keys():
                del self._removing[key]
            done = [self.remove(manifest) for manifest in list(self._removing.values())]
        return Swept(
            segments=tuple(each for swept in done for each in swept.segments),
            plans=tuple(each for swept in done for each in swept.plans),
        )

    def discard(self, stream: str, save_id: str) -> None:
        """Delete an unreadable manifest (its segments become orphans).

        Raises:
            TierUnavailableError: As :meth:`Tier.delete`.
        """
        with self._changing:
            self._delete_manifest(stream, save_id)
            self._records.forget(save_id)

    def sweep_orphans(
        self, *, keep: Iterable[Manifest] = (), keep_segments: Iterable[str] = ()
    ) -> Swept:
        """Delete segments and plans that no manifest here or in ``keep`` refers to.

        Nothing is deleted while a manifest here is unreadable and ``keep`` does not contain the
        same checkpoint: its segments may still serve, with a manifest from another tier. Objects of
        a running copy into the tier must be named by ``keep`` or ``keep_segments``.

        Raises:
            TierUnavailableError: Some are deleted, some are not.
        """
        keep = tuple(keep)
        known = {(each.stream, each.save_id) for each in keep}
        with self._changing:
            blocked = tuple(manifest_key(*key) for key in self.unreadable() if key not in known)
            if blocked:
                return Swept(blocked_by=blocked)
            segments, plans = self._needed(keep)
            segments |= set(keep_segments)
            return self._delete(
                [name for name, _ in self._named("segments/") if name not in segments],
                [name for name, _ in self._named("plans/") if name not in plans],
            )

    def _needed(self, keep: Iterable[Manifest]) -> tuple[set[str], set[str]]:
        manifests = [*keep, *self.manifests()]
        return {ref.id for m in manifests for ref in m.segments}, {m.plan for m in manifests}

    def _delete_manifest(self, stream: str, save_id: str) -> None:
        """Durably gone before anything it refers to is touched."""
        key = (stream, save_id)
        # If this fails, the manifest may be there or not. It then counts as unreadable, which also
        # keeps a sweep from deleting the objects that it refers to.
        left = StoredManifest(stream=stream, save_id=save_id, error="being deleted")
        self._manifests = {**self._manifests, key: left}
        self.tier.delete(manifest_key(stream, save_id))
        self._manifests = {k: each for k, each in self._manifests.items() if k != key}

    def _delete(self, segments: list[str], plans: list[str]) -> Swept:
        for name in segments:
            self.tier.delete(segment_key(name))
        failpoints.reach("agent.retention.after_segments_delete")
        for name in plans:
            self._plans -= {name}
            self.tier.delete(plan_key(name))
        return Swept(segments=tuple(segments), plans=tuple(plans))


class MemoryCatalog(Catalog):
    """The catalog of memory, where one agent alone writes and deletes. Thread-safe.

    Manifests and attempt records that another process deleted are written again.
    """

    def load(self) -> Contents:
        with self._changing:
            self._write_again()
            return super().load()

    def commit(
        self, data: bytes, plan: bytes | None = None, *, segments: Set[str] | None = None
    ) -> Manifest:
        with self._changing:
            self._write_again()
            return super().commit(data, plan, segments=segments)

    def read_manifest(self, stream: str, save_id: str) -> bytes:
        known = self._manifests.get((stream, save_id))
        if known is not None and known.manifest is not None and known.data is not None:
            return known.data
        return super().read_manifest(stream, save_id)

    def _write_again(self) -> None:
        there = {each.key for kind in ("manifests/", "attempts/") for each in self.tier.list(kind)}
        known = {key: each.data for key, each in self._attempts.items() if each.record}
        for save, stored in self._manifests.items():
            if stored.manifest is not None:
                known[manifest_key(*save)] = stored.data
        for key, data in known.items():
            if key in there or data is None:
                continue
            try:
                self.tier.put(key, data)
            except TieredCkptError as error:  # the current request does not depend on it
                log.warning("%s was deleted and cannot be written again: %s", key, error)
            else:
                log.warning("%s was deleted by another process and is written again", key)
