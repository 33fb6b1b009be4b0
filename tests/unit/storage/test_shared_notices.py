"""Nothing committed is deleted from a shared tier before it was told, over a real folder."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from tests.format.samples import (
    hex_id,
    save_record,
    small_attempt,
    small_manifest,
    small_notice,
    small_verdict,
)
from tieredckpt.errors import IntegrityError
from tieredckpt.format.envelope import seal_record
from tieredckpt.format.manifest import encode_manifest
from tieredckpt.format.records import (
    SAVES_MAX,
    DeletionIntent,
    decode_decision,
    decode_intent,
    encode_intent,
    encode_save_record,
)
from tieredckpt.storage.backends.file import FileTier
from tieredckpt.storage.base import Scope, decision_key, intent_key, manifest_key
from tieredckpt.storage.shared.catalog import SharedCatalog

SAVED = small_manifest()
SAVE = (SAVED.stream, SAVED.save_id)
ABOUT = DeletionIntent(saves=(SAVE,), host="h0")
OTHERS = DeletionIntent(saves=((SAVED.stream, hex_id(77)),), host="h0")
PIN = encode_save_record(
    msgspec.structs.replace(save_record("pin"), stream=SAVED.stream, save_id=SAVED.save_id)
)


@pytest.fixture
def tier(tmp_path: Path) -> FileTier:
    found = FileTier("bucket", tmp_path, "gpt-run-7", scope=Scope.SHARED)
    found.put(manifest_key(*SAVE), encode_manifest(SAVED))
    return found


def test_who_objects_first_wins(tier: FileTier):
    pruner, other = SharedCatalog(tier), SharedCatalog(tier)
    nonce = pruner.notices.give(ABOUT)
    other.put_record(PIN)
    assert not pruner.notices.decide(nonce)
    assert other.holds(SAVED)
    pruner.notices.withdraw(nonce)
    assert not list(tier.list("notices/"))
    assert list(tier.list("verdicts/")), "a late request could create another one"


def test_who_decides_first_wins(tier: FileTier):
    pruner, other = SharedCatalog(tier), SharedCatalog(tier)
    nonce = pruner.notices.give(ABOUT)
    assert pruner.notices.decide(nonce)
    assert pruner.notices.decide(nonce), "an answer was lost, and it is asked again"
    other.put_record(PIN)
    assert not other.holds(SAVED), "it is still there, and nobody may rely on that"


def test_a_pin_stops_only_what_is_about_it(tier: FileTier):
    pruner, other = SharedCatalog(tier), SharedCatalog(tier)
    nonce = pruner.notices.give(OTHERS)
    other.put_record(PIN)
    assert other.holds(SAVED)
    assert pruner.notices.decide(nonce)


def test_a_claim_stops_what_is_undecided_and_ends_what_is_decided(tier: FileTier):
    other_save = msgspec.structs.replace(SAVED, save_id=hex_id(77))
    tier.put(manifest_key(*OTHERS.saves[0]), encode_manifest(other_save))
    pruner, new = SharedCatalog(tier), SharedCatalog(tier)
    undecided, decided = pruner.notices.give(ABOUT), pruner.notices.give(OTHERS)
    assert pruner.notices.decide(decided)
    attempt = small_attempt()
    new.claim(attempt, [attempt])
    assert not pruner.notices.decide(undecided)
    assert (new.state_of(SAVED), new.state_of(other_save)) == ("committed", "buried")
    again = pruner.notices.give(ABOUT)
    new.claim(attempt, [attempt])
    assert pruner.notices.decide(again), "only the first look is for what others began"


def test_what_cannot_be_read_is_not_acted_on(tier: FileTier):
    pruner, other = SharedCatalog(tier), SharedCatalog(tier)
    nonce = pruner.notices.give(ABOUT)
    tier.put(decision_key(nonce), b"x")
    assert not pruner.notices.decide(nonce)
    assert not other.holds(SAVED), "nobody can tell"
    tier.put(intent_key("n2"), b"x")
    other.notices.object()
    other.carry_out(other.notices.left())
    assert other.state_of(SAVED) == "committed"


def test_only_what_is_old_is_swept(tier: FileTier):
    catalog = SharedCatalog(tier)
    catalog.notices.give(ABOUT)
    catalog.notices.object()
    catalog.notices.sweep(100.0)
    assert len([*tier.list("notices/"), *tier.list("verdicts/")]) == 2
    catalog.notices.sweep(-100.0)
    assert not [*tier.list("notices/"), *tier.list("verdicts/")]


@pytest.mark.parametrize("change", [{"saves": ()}, {"saves": (SAVE,) * (SAVES_MAX + 1)},
                                    {"saves": (("a/b", hex_id(1)),)}, {"saves": (("a", "x"),)},
                                    {"host": ""}, {"deletions": (1,)}, {"deletions": (0, -1)},
                                    {"deletions": (0, 1_000_000)}])  # fmt: skip
def test_bad_notices_are_refused_both_ways(change: dict[str, object]):
    bad = msgspec.structs.replace(small_notice(), **change)
    with pytest.raises(ValueError):
        encode_intent(bad)
    with pytest.raises(IntegrityError):
        decode_intent(seal_record(b"TCKNOTCE", 1, msgspec.msgpack.encode(bad), compress=False))


def test_bad_verdicts_are_refused():
    bad = msgspec.msgpack.encode(msgspec.structs.replace(small_verdict(), notice="../x"))
    with pytest.raises(IntegrityError):
        decode_decision(seal_record(b"TCKVERDT", 1, bad, compress=False))
