"""The catalog of a tier that several hosts share: what it holds, and its one-object operations.

    claims/<attempt number>            the attempt record of whoever has this number
    pending/<stream>/<save id>         the manifest's bytes, put before the first segment
    plans/<plan id>.<nonce>            copies of a plan; each key is written once
    notices/, verdicts/<nonce>         what is about to be deleted, and whether it is
    manifests/<stream>/<save id>       the commit; or, in its place, a tombstone (shared_records.py)

Others write here at any time, so it is refreshed by listing, and only what is new is read. The
protocol is docs/design/004-durable-tiers.md; who does what when is in ``agent/tiers/``
(``upload.py``, ``pruner.py``).
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Callable, Collection, Iterable
from typing import Literal, NoReturn

from tieredckpt.errors import IntegrityError, NotFoundError, TierUnavailableError, UsageError
from tieredckpt.format.envelope import ENVELOPE_BYTES
from tieredckpt.format.manifest import (
    ATTEMPT_LIMIT_BYTES,
    MANIFEST_LIMIT_BYTES,
    AttemptRecord,
    Manifest,
    decode_attempt,
    decode_manifest,
)
from tieredckpt.format.records import (
    SaveRecord,
    Tombstone,
    decode_tombstone,
    encode_tombstone,
    is_tombstone,
)
from tieredckpt.storage.base import (
    ObjectInfo,
    Tier,
    attempt_key,
    manifest_key,
    pending_key,
    segment_key,
)
from tieredckpt.storage.catalog import Catalog
from tieredckpt.storage.shared.once import Decided, SharedNotices, SharedPlans
from tieredckpt.storage.shared.records import (
    Listed,
    Save,
    SharedClaims,
    SharedCommits,
    bare,
    lean,
    parse_pending,
    tombstone_of,
)
from tieredckpt.storage.stored import Contents, StoredAttempt, StoredManifest, parse_attempt

log = logging.getLogger(__name__)

State = Literal["absent", "committed", "buried"]
"""Of a checkpoint in a shared tier."""


class SharedCatalog(Catalog):
    """See the module. Thread-safe.

    Args:
        tier: Where everything is kept. Call :meth:`load` before anything else.
        mint: Makes nonces.
    """

    def __init__(
        self, tier: Tier, *, mint: Callable[[], str] = lambda: secrets.token_hex(8)
    ) -> None:
        super().__init__(tier)
        self.put_record = self._put_record
        self.commits = SharedCommits(tier)
        self._pendings = Listed(tier, "pending/", MANIFEST_LIMIT_BYTES, parse_pending)
        self._attempt_records = Listed(tier, "attempts/", ATTEMPT_LIMIT_BYTES, parse_attempt)
        self._claims = SharedClaims(tier)
        self._cleared: tuple[int, str] | None = None
        """The attempt that no deletion of others is under way after."""
        self._looking = threading.Lock()
        self.plan_copies = SharedPlans(tier, mint)
        self.notices = SharedNotices(tier, mint)

    # --- reading ----------------------------------------------------------------------------------

    def load(self) -> Contents:
        """List the tier anew, and read what is new. Raises as :meth:`Catalog.load`."""
        self.refresh_commits()
        self.plan_copies.refresh()
        # After the manifests: what they name is listed, unless it was deleted since.
        segments = dict(self.listed_segments())
        with self._looking:
            return Contents(
                manifests=tuple(self._manifests.values()),
                plans=self.plan_copies.ids(),
                segments=segments,
            )

    def refresh_commits(self) -> None:
        """List attempts, claims and manifests anew. Raises TierUnavailableError."""
        self._claims.refresh()
        self._attempt_records.refresh()
        self.commits.refresh()
        self._take_over()

    def _take_over(self) -> None:
        with self._looking:  # who is later has seen more
            heads = self.commits.heads()
            manifests = {
                save: head.value
                for save, head in heads.items()
                if isinstance(head.value, StoredManifest)
            }
            attempts = {
                attempt_key(each.record.number, each.record.id) if each.record else each.key: each
                for each in (*self._claims.values(), *self._attempt_records.values())
                if each.record or not each.key.startswith("claims/")
            }
            self._manifests, self._attempts = manifests, attempts

    def refresh_pending(self) -> dict[tuple[str, str], tuple[ObjectInfo, StoredManifest]]:
        """What is on its way, by stream and save id. Raises TierUnavailableError."""
        self._pendings.refresh()
        return {
            (each.stream, each.save_id): (info, each)
            for info, each in self._pendings.all().values()
        }

    def read_manifest(self, stream: str, save_id: str) -> bytes:
        _, data = self.commits.read(stream, save_id)
        if is_tombstone(data):
            raise NotFoundError(
                f"checkpoint {save_id} was deleted from tier {self.tier.name}", key=save_id
            )
        return data

    def has_plan(self, plan_id: str) -> bool:
        return plan_id in self.plan_copies.ids()

    def check_plan(self, plan_id: str) -> bool:
        self.plan_copies.refresh()
        return self.plan_copies.find(plan_id) is not None

    def read_plan(self, plan_id: str) -> bytes:
        return self.plan_copies.read(plan_id)

    load_records = Catalog.read_records

    # --- attempts ---------------------------------------------------------------------------------

    def put_attempt(self, data: bytes) -> AttemptRecord:
        record = decode_attempt(data)
        key = attempt_key(record.number, record.id)
        if key not in self._attempt_records.all():
            self._put_over_damage(key, data, ATTEMPT_LIMIT_BYTES, parse_attempt)
            self._attempt_records.note(key, StoredAttempt(key=key, data=data, record=record))
            self._take_over()
        return record

    def claim(self, mine: AttemptRecord, known: Collection[str]) -> None:
        """See :meth:`SharedClaims.hold`; the first time, what others are deleting comes to an end.

        So whatever is there after it stays, but for what who has claimed deletes. Raises as that.
        """
        before = self._claims.all()
        self._claims.hold(mine, known)
        if self._claims.all() != before:
            self._take_over()
        if self._cleared != (mine.number, mine.id):
            self.carry_out(self.notices.object())
            self._cleared = (mine.number, mine.id)

    def has_attempt(self, record: AttemptRecord) -> bool:
        """Whether its record is there, beside its claim; as of the last refresh."""
        return attempt_key(record.number, record.id) in self._attempt_records.all()

    def claims_of_nobody(self, namespace: str) -> list[int]:
        """See :meth:`SharedClaims.nobodys`."""
        return self._claims.nobodys(namespace)

    def claimed(self) -> tuple[AttemptRecord, ...]:
        """The attempts that have claims, as of the last refresh."""
        return tuple(each.record for each in self._claims.values() if each.record is not None)

    def drop_old_claims(self, older_than_s: float, namespace: str) -> None:
        """Delete claims that later ones make superfluous; their attempts' records stay.

        Raises CapacityError, TierUnavailableError.
        """
        for each in self._claims.old_ones(self.tier.now_s() - older_than_s, namespace):
            if each.record is not None and each.data is not None:
                self.put_attempt(each.data)
            self.tier.delete(each.key)

    # --- checkpoints ------------------------------------------------------------------------------

    def put_pending(self, data: bytes) -> None:
        """Say that a checkpoint is on its way, and what it consists of. Idempotent.

        Raises as :meth:`Tier.put`.
        """
        manifest = decode_manifest(data)
        try:
            self.tier.put(pending_key(manifest.stream, manifest.save_id), data)
        except UsageError:
            limit = MANIFEST_LIMIT_BYTES + ENVELOPE_BYTES
            found = self.tier.get(pending_key(manifest.stream, manifest.save_id), limit=limit)
            if decode_manifest(found) != manifest:
                raise
            # Compressed by another zstd: it says the same.

    def drop_pending(self, stream: str, save_id: str) -> None:
        """Its manifest or its tombstone exists. Raises TierUnavailableError."""
        self.tier.delete(pending_key(stream, save_id))

    def pending_bytes(self, manifest: Manifest) -> bytes | None:
        """The pending manifest as it lies there; None: it does not. Raises TierUnavailableError."""
        key = pending_key(manifest.stream, manifest.save_id)
        try:
            return self.tier.get(key, limit=MANIFEST_LIMIT_BYTES + ENVELOPE_BYTES)
        except NotFoundError:
            return None

    def has_segment(self, segment_id: str, size: int) -> bool:
        """Whether a segment is there, whole. Raises TierUnavailableError."""
        try:
            return self.tier.info(segment_key(segment_id)).size == size
        except NotFoundError:
            return False

    def state_of(self, manifest: Manifest) -> State:
        """Whether a checkpoint is committed, or was deleted; read anew.

        Raises:
            IntegrityError: Something else lies in the manifest's place.
            TierUnavailableError: The tier does not answer.
        """
        try:
            deletions, data = self.commits.read(manifest.stream, manifest.save_id)
        except NotFoundError:
            return "absent"
        key = manifest_key(manifest.stream, manifest.save_id, deletions)
        if is_tombstone(data):
            self.noted(key, decode_tombstone(data))
            return "buried"
        if decode_manifest(data) != manifest:
            raise IntegrityError(
                f"another manifest lies at {key} in tier {self.tier.name}",
                tier=self.tier.name,
                key=key,
            )
        self.noted(key, manifest)
        return "committed"

    def holds(self, manifest: Manifest) -> bool:
        save = (manifest.stream, manifest.save_id)
        doomed = any(each.names(*save) for each in self.notices.object(save))
        return not doomed and self.state_of(manifest) == "committed"

    def _put_record(self, data: bytes) -> SaveRecord | None:
        """As in every tier; a pin stops whoever is about to delete what it is about."""
        record = self._records.put(data)
        if record is not None and record.kind == "pin":
            self.notices.object((record.stream, record.save_id))
        return record

    def put_manifest(self, data: bytes) -> State:
        """Make a checkpoint exist, of which everything is here: "committed", or "buried".

        A response that was lost is resolved by reading.

        Raises:
            IntegrityError: Something else lies in the manifest's place.
            CapacityError, TierUnavailableError: It is not known whether it is committed.
        """
        manifest = decode_manifest(data)
        key = manifest_key(manifest.stream, manifest.save_id)
        try:
            self.tier.put(key, data)
        except (UsageError, TierUnavailableError):
            found = self.state_of(manifest)
            if found == "absent":  # not applied, or not yet: who tries again finds out
                raise
            return found
        self.noted(key, manifest)
        return "committed"

    def noted(self, key: str, found: Manifest | Tombstone) -> None:
        """This was put at a commit's key, or seen there; no I/O."""
        value: StoredManifest | Tombstone
        if isinstance(found, Tombstone):
            value = bare(found)
        else:
            value = StoredManifest(stream=found.stream, save_id=found.save_id, manifest=lean(found))
        self.commits.note(key, value)
        self._take_over()

    def bury(self, tombstone: Tombstone, deletions: int = 0) -> bool:
        """Put a tombstone in a manifest's place; False: it was committed meanwhile, or is buried.

        One because of retention replaces the manifest that is there after so many ``deletions``,
        any other one loses against it.

        Raises as :meth:`Tier.put`.
        """
        key = manifest_key(tombstone.stream, tombstone.save_id, deletions)
        data = encode_tombstone(tombstone)
        if tombstone.cause == "retention":
            self.tier.replace(key, data)
        else:
            try:
                self.tier.put(key, data)
            except UsageError:
                return False
        self.noted(key, tombstone)
        return True

    def carry_out(self, decided: Iterable[Decided]) -> None:
        """Bury what was decided to go by who did not live to do it.

        Raises CapacityError, TierUnavailableError: Some are buried, some not.
        """
        for each in decided:
            if not each.goes or each.notice is None:
                log.warning("tier %s: notice %s cannot be read", self.tier.name, each.nonce)
                continue
            counts = each.notice.deletions or (0,) * len(each.notice.saves)
            for save, decided_at in zip(each.notice.saves, counts, strict=True):
                try:
                    deletions, data = self.commits.read(*save)
                    if deletions != decided_at or is_tombstone(data):
                        continue  # buried already, and perhaps taken back since
                    manifest = decode_manifest(data)
                except (NotFoundError, IntegrityError):  # gone; or nobody can tell
                    continue
                self.bury(tombstone_of(manifest, "retention", each.notice.host), decided_at)
            self.notices.end(each.nonce)

    # --- what other catalogs do, and this one does not --------------------------------------------

    def put_plan(self, plan_id: str, data: bytes) -> None:
        self.plan_copies.ensure(plan_id, lambda: data, float("inf"))

    def _not_here(self, *args: object, **kwargs: object) -> NoReturn:
        raise UsageError(f"tier {self.tier.name} is shared: agent/tiers changes it")

    commit = remove = discard = sweep_orphans = _not_here


# --- what becomes of a deleted checkpoint ---------------------------------------------------------
#
# It is taken back, or its segments go. Both create the next key of it (see SharedCommits), so one
# of them is refused. Segments are deleted only after that; so who was not refused finds all of
# them, and keeps them.


def close(catalog: SharedCatalog, tombstone: Tombstone, deletions: int, host: str) -> bool:
    """Decide that the segments of a deleted checkpoint go; False: it was taken back before.

    Args:
        catalog: Of the tier.
        tombstone: The last one of it; because of retention.
        deletions: How many there were before this one.
        host: Who decides. Informative.

    Raises:
        CapacityError, TierUnavailableError: It is not known; nothing may be deleted here.
    """
    end = Tombstone(
        namespace=tombstone.namespace, stream=tombstone.stream, save_id=tombstone.save_id,
        cause="emptied", host=host,
    )  # fmt: skip
    save = (tombstone.stream, tombstone.save_id)
    return _is_closed(_create(catalog, save, deletions + 1, encode_tombstone(end)))


def take_back(catalog: SharedCatalog, save: Save, pin: bytes) -> Manifest:
    """Make a deleted checkpoint exist again, pinned, if its segments were not given up before.

    Args:
        catalog: Of the tier, loaded.
        save: Which one.
        pin: Encoded record: retention would delete it again.

    Raises:
        UsageError: It is not deleted.
        NotFoundError: It was never there, or never whole, or it is too late.
        CapacityError, TierUnavailableError: It is not known whether it is taken back.
    """
    catalog.carry_out(catalog.notices.left())  # what is decided, and not yet buried
    name = f"checkpoint {save[1]} of stream {save[0]}"
    deletions, data = catalog.commits.read(*save)
    if not is_tombstone(data):
        raise UsageError(f"{name} is in tier {catalog.tier.name}: there is nothing to take back")
    tombstone = decode_tombstone(data)
    too_late = NotFoundError(
        f"it is too late: {name} was deleted from tier {catalog.tier.name}, and its segments too",
        key=save[1],
    )
    if tombstone.cause == "unfinished":
        raise NotFoundError(
            f"{name} was never whole in tier {catalog.tier.name}: it was given up", key=save[1]
        )
    if tombstone.cause == "emptied":
        raise too_late
    manifest = decode_manifest(tombstone.manifest)
    if not catalog.check_plan(manifest.plan) or not all(
        catalog.has_segment(ref.id, ref.size) for ref in manifest.segments
    ):
        raise too_late  # of a release that did not say so
    catalog.put_record(pin)
    found = _create(catalog, save, deletions + 1, tombstone.manifest)
    if _is_closed(found):
        raise too_late
    if is_tombstone(found):
        raise NotFoundError(f"{name} was taken back and deleted again: try again", key=save[1])
    return manifest


def _is_closed(data: bytes) -> bool:
    return is_tombstone(data) and decode_tombstone(data).cause == "emptied"


def _create(catalog: SharedCatalog, save: Save, deletions: int, data: bytes) -> bytes:
    """What lies at a key of a checkpoint now, whoever put it there.

    Raises TierUnavailableError: nothing, or nobody can tell.
    """
    key = manifest_key(*save, deletions)
    try:
        catalog.tier.put(key, data)
        found = data
    except (UsageError, TierUnavailableError) as error:
        now, found = catalog.commits.read(*save)
        if now < deletions:  # the request failed, or is late: who tries again finds out
            if isinstance(error, TierUnavailableError):
                raise
            raise TierUnavailableError(
                f"{key} is in tier {catalog.tier.name}, and is not: {error}",
                tier=catalog.tier.name, outcome="unknown",
            ) from error  # fmt: skip
        if now > deletions:
            found = catalog.commits.get(key)
    what = decode_tombstone(found) if is_tombstone(found) else decode_manifest(found)
    catalog.noted(key, what)
    return found
