"""Which checkpoints one tier holds, and the order in which they come to exist and to vanish.

    manifests/<stream>/<save id>       the commit: written last, deleted first
    plans/<plan id>                    before any manifest that refers to it; shared
    segments/<segment id>              before the manifest; each belongs to one checkpoint
    attempts/<number>-<attempt id>
    records/<save id>/<record id>      what else is known of it; deleted after the manifest

So a visible manifest means that plan and segments are there, and a crash in between leaves
orphans (see :meth:`Catalog.sweep_orphans`), never a dangling manifest. The catalog knows the tier
only by its contract, and nothing of time lines or retention.
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
        tier: Where everything is kept. Call :meth:`load` before anything else.
    """

    def __init__(self, tier: Tier) -> None:
        self.tier = tier
        # Changes exclude each other, or a plan could be deleted between the check and the manifest
        # that needs it. Looking at what is there never waits for a disk, nor for a lock: each
        # change puts another table in place of the one that it looked at.
        self._changing = threading.RLock()
        self._manifests: dict[tuple[str, str], StoredManifest] = {}
        self._attempts: dict[str, StoredAttempt] = {}
        self._plans: frozenset[str] = frozenset()
        self._removing: dict[tuple[str, str], Manifest] = {}
        """Checkpoints that are being deleted: of which something may be left."""
        self._records = SaveRecords(tier)
        self.records = self._records.of
        self.put_record = self._records.put
        self.record_ids = self._records.ids
        self.encoded_records = self._records.encoded

    # --- reading ------------------------------------------------------------------------------

    def load(self) -> Contents:
        """Read the tier anew. Single bad objects are reported in the result, not raised.

        Raises:
            TierUnavailableError: The tier does not answer; what was known before stays.
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
        """Whether the stored plan is what its name says."""
        try:
            return encoded_plan_id(self.read_plan(plan_id)) == plan_id
        except (NotFoundError, IntegrityError):
            return False

    def manifests(self) -> tuple[Manifest, ...]:
        """The readable manifests, as of the last load and what was done since; no I/O."""
        return tuple(each.manifest for each in self._manifests.values() if each.manifest)

    def get(self, save_id: str) -> Manifest | None:
        """The readable manifest of one checkpoint, likewise; None: it is not here."""
        return next((each for each in self.manifests() if each.save_id == save_id), None)

    def holds(self, manifest: Manifest) -> bool:
        """Whether a checkpoint is here; where others delete, too, the tier is asked.

        Raises TierUnavailableError.
        """
        return manifest in self.manifests()

    def attempts(self) -> tuple[AttemptRecord, ...]:
        """The readable attempt records, likewise."""
        return tuple(each.record for each in self._attempts.values() if each.record)

    def has_plan(self, plan_id: str) -> bool:
        """Whether the tier holds the plan now, and it was intact when it was read.

        Raises TierUnavailableError.
        """
        if plan_id not in self._plans:
            return False
        try:  # a scratch disk is purged of files that are old, and this one is used for long
            self.tier.info(plan_key(plan_id))
        except NotFoundError:
            return False
        return True

    def check_plan(self, plan_id: str) -> bool:
        """Whether the tier holds the plan and it is intact: :meth:`has_plan`, read anew.

        Raises:
            TierUnavailableError: The tier does not answer; what was known before stays.
        """
        with self._changing:
            intact = self._verify_plan(plan_id)
            self._plans = self._plans | {plan_id} if intact else self._plans - {plan_id}
        return intact

    def unreadable(self, *, newer: bool = True) -> list[tuple[str, str]]:
        """Stream and save id of the manifests that cannot be read, as of the last load; no I/O.

        ``newer``: with those that are merely of a later release.
        """
        bad = {key: each for key, each in self._manifests.items() if not each.manifest}
        return [key for key, each in bad.items() if newer or not is_newer(each)]

    def bad_attempts(self) -> dict[str, bytes]:
        """What lies in the place of the attempt records that cannot be read, by key; likewise."""
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
        """Read the records about the checkpoints that were found; those of others are deleted.

        Raises TierUnavailableError.
        """
        self._records.load({save_id for _, save_id in self._manifests})

    def read_records(self) -> None:
        """Read all records and delete none: of a tier that is only looked at.

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
                self.tier.delete(plan_key(plan_id))  # nothing, or a damaged one
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
            segments: Ids of those that must be here, where hosts commit each what it holds; None:
                all that the manifest names.

        Raises:
            NotFoundError: The tier lacks the plan or a segment; nothing is visible.
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
        """Right before the manifest: whatever deleted plan or segments, it must not be dangling."""
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
        """Put a record, also where an unreadable one is, or an intact one of another key."""
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
        """Delete a checkpoint: its manifest first, then what no other one and not ``keep`` needs.

        Raises:
            TierUnavailableError: The checkpoint is gone or not; what is left of it is orphans.
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
        """Go on where :meth:`remove` failed; what was committed again meanwhile stays.

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

        Nothing is deleted while a manifest here is unreadable and ``keep`` does not hold the same
        checkpoint: its segments may still serve, with a manifest from another tier. Whatever is on
        its way into the tier must be named by ``keep`` or ``keep_segments``.

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
        # Should this fail, it may be there or not: nobody counts on it, and like any unreadable
        # one it keeps a sweep from deleting what it refers to.
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
    """Of memory, where one agent alone writes and deletes: what it knows exists, as a manifest or
    an attempt record that somebody deleted beside it is written again. Thread-safe.
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
            except TieredCkptError as error:  # what is asked for now does not depend on it
                log.warning("%s was deleted and cannot be written again: %s", key, error)
            else:
                log.warning("%s was deleted beside the agent and is written again", key)
