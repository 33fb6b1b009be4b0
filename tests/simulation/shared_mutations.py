"""The protocol of shared tiers, broken on purpose: each of these must be found.

``python -m tests.simulation.shared_mutations`` says for each one how many seeds it took.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import sys
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from tests.simulation import shared_store, shared_world
from tests.simulation.shared_scenes import cases
from tests.simulation.shared_world import Broken, run_case
from tieredckpt.agent.tiers import pruner as pruner_module
from tieredckpt.agent.tiers import upload as upload_module
from tieredckpt.agent.tiers.pruner import SharedPruner
from tieredckpt.agent.tiers.upload import SharedUploads
from tieredckpt.errors import NotFoundError, TieredCkptError, UsageError
from tieredckpt.format.manifest import decode_manifest
from tieredckpt.format.records import DeletionDecision, encode_decision
from tieredckpt.policy import shared_tier
from tieredckpt.storage.base import decision_key, manifest_key, segment_key
from tieredckpt.storage.shared import catalog as catalog_module
from tieredckpt.storage.shared.catalog import SharedCatalog
from tieredckpt.storage.shared.once import SharedNotices, SharedPlans
from tieredckpt.storage.shared.records import SharedClaims

Patch = tuple[object, str, Any]

_bury, _commit = SharedCatalog.bury, SharedUploads._commit
_put_pending, _list = SharedCatalog.put_pending, SharedPruner._list
_ensure, _times, _sweep = SharedPlans.ensure, shared_world.World.times, shared_tier.sweep
_is_agreed, _delete = SharedPruner._is_agreed, SharedPruner._delete
_state_of, _settled = SharedCatalog.state_of, SharedUploads._settled


def _segments_before_the_tombstone(self: Any, tombstone: Any, deletions: int = 0) -> bool:
    if tombstone.cause == "retention":
        for ref in decode_manifest(tombstone.manifest).segments:
            self.tier.delete(segment_key(ref.id))
    return _bury(self, tombstone, deletions)


def _no_tombstone(self: Any, tombstone: Any, deletions: int = 0) -> bool:
    self.tier.delete(manifest_key(tombstone.stream, tombstone.save_id, deletions))
    return True


def _tombstone_over_a_commit(self: Any, tombstone: Any, deletions: int = 0) -> bool:
    return _bury(self, msgspec.structs.replace(tombstone, cause="retention"), deletions)


def _pending_late(self: Any, upload: Any) -> Any:
    _put_pending(self._catalog, upload.data)
    return _commit(self, upload)


def _pending_goes_first(self: Any, upload: Any) -> Any:
    self._catalog.drop_pending(upload.manifest.stream, upload.manifest.save_id)
    return _commit(self, upload)


def _manifests_first(self: Any) -> Any:
    self._catalog.refresh_commits()
    manifests = {(m.stream, m.save_id): m for m in self._catalog.manifests()}
    pending = self._catalog.refresh_pending()
    listing = _list(self)
    keep = {k: v for k, v in listing.pending.items() if k in pending}
    return dataclasses.replace(listing, manifests=manifests, pending=keep)


def _unconditional(self: Any, data: bytes) -> Any:
    manifest = decode_manifest(data)
    key = manifest_key(manifest.stream, manifest.save_id)
    self.tier.replace(key, data)
    self.noted(key, manifest)
    return "committed"


def _conflict_is_success(self: Any, data: bytes) -> Any:
    manifest = decode_manifest(data)
    with contextlib.suppress(UsageError):
        self.tier.put(manifest_key(manifest.stream, manifest.save_id), data)
    return "committed"


def _lost_is_failed(self: Any, data: bytes) -> Any:
    manifest = decode_manifest(data)
    try:
        self.tier.put(manifest_key(manifest.stream, manifest.save_id), data)
    except UsageError:
        raise
    except TieredCkptError as error:
        raise UsageError(str(error)) from error
    return "committed"


def _any_copy(self: Any, plan_id: str, read: Any, fresh_s: float) -> None:
    _ensure(self, plan_id, read, float("inf"))


def _times_with(**changes: float) -> Callable[[Any], Any]:
    return lambda self, spec: dataclasses.replace(_times(self, spec), **changes)


def _host_clock(self: Any) -> float:
    return self._world.now_s + 1500.0 * (sum(self._actor.name.encode()) % 3)


def _ignoring(**changes: Any) -> Callable[..., Any]:
    return lambda listing, times: _sweep(dataclasses.replace(listing, **changes), times)


def _bare_tombstones(listing: Any, times: Any) -> Any:
    bare = {save: shared_tier.Found(each.age_s, None) for save, each in listing.tombstones.items()}
    return _sweep(dataclasses.replace(listing, tombstones=bare), times)


def _no_claim(catalog: Any, host: Any) -> None:
    for record in host.known_attempts():
        catalog.put_attempt(upload_module.encode_attempt(record))


def _bury_complete(listing: Any, times: Any) -> Any:
    found = _sweep(listing, times)
    return dataclasses.replace(found, bury=tuple(sorted({*found.bury, *found.finish})), finish=())


def _drop_all_pending(listing: Any, times: Any) -> Any:
    return dataclasses.replace(_sweep(listing, times), drop_pending=tuple(listing.pending))


def _never_drop(self: Any, stream: str, save_id: str) -> None:
    pass


def _looks_before_its_notice(
    self: Any, stream: str, going: Any, now_s: float, stopping: Any
) -> Any:
    agreed = _is_agreed(self, stream, going, now_s)
    self._is_agreed = lambda *_: agreed
    try:
        return _delete(self, stream, going, now_s, stopping)
    finally:
        del self._is_agreed


def _only_looks(self: Any, save: Any = None) -> Any:
    return [each for each in self.left() if save is None or each.names(*save)]


def _only_claims(self: Any, mine: Any, known: Any) -> None:
    self._claims.hold(mine, known)
    self._take_over()


def _overwrites(self: Any, nonce: str, *, goes: bool) -> bool:
    self._tier.replace(
        decision_key(nonce), encode_decision(DeletionDecision(notice=nonce, goes=goes))
    )
    return goes


def _all_claims(self: Any, born_before_s: float, namespace: str) -> Any:
    return [each for info, each in self.all().values() if info.modified_s < born_before_s]


def _drop_claims(self: Any, older_than_s: float, namespace: str) -> None:
    for each in self._claims.old_ones(self.tier.now_s() - older_than_s, namespace):
        self.tier.delete(each.key)


def _buries_what_is_there(self: Any, tombstone: Any, deletions: int = 0) -> bool:
    with contextlib.suppress(NotFoundError):
        deletions, _ = self.commits.read(tombstone.stream, tombstone.save_id)
    return _bury(self, tombstone, deletions)


def _takes_over(catalog: Any, save: Any, deletions: int, data: bytes) -> bytes:
    catalog.tier.replace(manifest_key(*save, deletions), data)
    return data


_NO = lambda *_: None  # noqa: E731
_YES = lambda *_: True  # noqa: E731
_FALSE = lambda *_: False  # noqa: E731

MUTATIONS: dict[str, list[Patch]] = {
    "segments are deleted before the tombstone": [
        (SharedCatalog, "bury", _segments_before_the_tombstone)
    ],
    "a manifest is deleted without a tombstone": [(SharedCatalog, "bury", _no_tombstone)],
    "giving up replaces what was committed": [(SharedCatalog, "bury", _tombstone_over_a_commit)],
    "nothing is pending": [(SharedCatalog, "put_pending", _NO)],
    "the pending manifest comes after the segments": [
        (SharedCatalog, "put_pending", _NO), (SharedUploads, "_commit", _pending_late)
    ],
    "the pending manifest goes before the commit": [
        (SharedUploads, "_commit", _pending_goes_first)
    ],
    "a sweep drops what is pending and not decided": [
        (pruner_module, "sweep", _drop_all_pending)
    ],
    "manifests and pending are listed before segments": [
        (SharedPruner, "_list", _manifests_first)
    ],
    "the manifest is put without If-None-Match": [
        (SharedCatalog, "put_manifest", _unconditional)
    ],
    "a refused manifest counts as committed": [
        (SharedCatalog, "put_manifest", _conflict_is_success)
    ],
    "a lost response counts as a failure": [(SharedCatalog, "put_manifest", _lost_is_failed)],
    "nobody looks whether segments are there": [(SharedCatalog, "has_segment", _YES)],
    "what was seen once is never looked at again": [
        (SharedUploads, "_begin_anew", lambda self, upload, *_: _commit(self, upload))
    ],
    "the age of a plan is not asked": [(SharedPlans, "ensure", _any_copy)],
    "the commit does not look for the plan": [
        (SharedPlans, "ensure", _NO)
    ],
    "copies of plans have one key": [(shared_world.World, "mint", lambda self: "0" * 16)],
    "pending ones name nothing in a sweep": [(pruner_module, "sweep", _ignoring(pending={}))],
    "tombstones name nothing in a sweep": [(pruner_module, "sweep", _bare_tombstones)],
    "a sweep asks no age": [(shared_world.World, "times", _times_with(sweep_after_s=0.0))],
    "ages are told by the host's clock": [(shared_store.SharedSimTier, "now_s", _host_clock)],
    "tombstones go at once": [(shared_world.World, "times", _times_with(tombstone_keep_s=0.0))],
    "complete ones are given up, not finished": [(pruner_module, "sweep", _bury_complete)],
    "claims are not looked at": [
        (upload_module, "check_claim", _no_claim), (pruner_module, "check_term", _no_claim)
    ],
    "an old listing is acted on": [
        (SharedPruner, "_may_act", lambda self, stopping: not stopping())
    ],
    "a pruner does not look again after its notice": [(SharedPruner, "_is_agreed", _YES)],
    "a pruner looks before its notice": [(SharedPruner, "_delete", _looks_before_its_notice)],
    "who pins stops no deletion": [(SharedNotices, "object", _only_looks)],
    "who pins asks for no verdict": [
        (SharedCatalog, "holds", lambda self, manifest: self.state_of(manifest) == "committed")
    ],
    "who claims stops no deletion": [(SharedCatalog, "claim", _only_claims)],
    "a verdict replaces another one": [(SharedNotices, "_create", _overwrites)],
    "who attaches finishes what others left": [(pruner_module, "is_superseded", _FALSE)],
    "claims are deleted when they are old": [(SharedClaims, "old_ones", _all_claims)],
    "claims are deleted with their attempts": [(SharedCatalog, "drop_old_claims", _drop_claims),
                                              (SharedCatalog, "has_attempt", _YES)],
    "what was decided is left alone": [(SharedCatalog, "carry_out", _NO)],
    "segments go and nobody decides it": [(pruner_module, "close", _YES)],
    "who takes back replaces what is there": [(catalog_module, "_create", _takes_over)],
    "a late deletion buries what was taken back": [(SharedCatalog, "bury", _buries_what_is_there)],
    "nobody takes over": [(SharedUploads, "_take_over", lambda *_: False)],
    "the pruner leaves what is pending": [(SharedCatalog, "drop_pending", _never_drop)],
}  # fmt: skip


NOT_VISIBLE = {"an old listing is acted on"}
"""docs/understand/testing.md says why."""


@contextlib.contextmanager
def broken(name: str) -> Iterator[None]:
    """The product with this mutation."""
    before = [(where, what, getattr(where, what)) for where, what, _ in MUTATIONS[name]]
    for where, what, how in MUTATIONS[name]:
        setattr(where, what, how)
    try:
        yield
    finally:
        for where, what, how in before:
            setattr(where, what, how)


def scenes_until_found(name: str, *, every: int = 1, only: str = "") -> tuple[int | None, str]:
    """How many scenes it took, of those that have ``only`` in their name, and which found it."""
    count = 0
    with broken(name):
        for count, (which, play) in enumerate(cases(every=every, only=only), 1):
            try:
                play()
            except (Broken, TieredCkptError) as error:
                return count, f"{which}: {error}"
    return None, f"not in {count} scenes"


def seeds_until_found(name: str, most: int, first: int = 0) -> tuple[int | None, str]:
    """How many seeds it took, and what was found."""
    with broken(name):
        for seed in range(first, first + most):
            try:
                run_case(seed)
            except (Broken, TieredCkptError) as error:
                return seed - first + 1, str(error)
    return None, f"not in {most} seeds"


def main() -> None:
    logging.disable(logging.CRITICAL)
    most = int(sys.argv[1]) if len(sys.argv) > 1 else 200
    for name in sys.argv[2:] or MUTATIONS:
        scenes, where = scenes_until_found(name, every=32)
        found, how = seeds_until_found(name, most) if most else (None, "")
        print(f"{scenes!s:>6} {found!s:>6}  {name}: {where}; {how}", flush=True)


if __name__ == "__main__":
    main()
