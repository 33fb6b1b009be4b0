"""The keys of a state that are no text: what is kept of them, and what ranks keep together."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from typing import Any

import pytest

from tieredckpt.errors import IntegrityError
from tieredckpt.format.nested import (
    OF_RANK_BYTES_MAX,
    Real,
    decode_nested,
    merge_nested,
    nested_of,
    real_path,
)
from tieredckpt.format.plain import encode_plain


def test_a_state_whose_names_have_all_keeps_nothing():
    assert nested_of({}) == b""
    assert nested_of({"model": {"0.weight": 1, "b": [1, [2], {"c": 3}]}, "step": 7}) == b""


def test_collections_are_dicts():
    state = {"a": Counter({3: 1}), "b": OrderedDict({None: 1}), "c": defaultdict(list), "d": [{}]}
    assert decode_nested(nested_of(state)) == {
        ("a",): True, ("b",): {"None": None}, ("c",): {}, ("d", 0): {}
    }  # fmt: skip


def test_keys_that_cannot_be_kept_stay_text():
    class Key:
        def __str__(self) -> str:
            return "key"

    assert nested_of({"a": {Key(): 1}}) == b""
    assert decode_nested(nested_of({"a": {Key(): 1, 2: 3}})) == {("a",): {"2": 2}}
    assert nested_of({"a": {("x", Key()): 1}}) == b""


def test_the_table_is_bounded():
    itself: dict[Any, Any] = {0: 1}
    itself["a"] = [itself]
    assert nested_of(itself) == b""
    large = {"a": {(0, n): 1 for n in range(10_000)}, "optim": {"state": {}, "seen": {0: 1}}}
    assert decode_nested(nested_of(large)) == {("optim", "state"): {}, ("optim", "seen"): True}
    many = nested_of({"a": {str(n): {} for n in range(10_000)}})
    assert 0 < len(many) <= OF_RANK_BYTES_MAX
    numbers = nested_of({"optim": {"state": dict.fromkeys(range(100_000), 0)}})
    assert 0 < len(numbers) < 100 < OF_RANK_BYTES_MAX


def test_of_several_ranks():
    one = nested_of({"a": {1: 0}, "b": {}, "c": {None: 0}})
    other = nested_of({"a": {}, "b": {2: 0}, "d": {}})
    assert decode_nested(merge_nested([b"", one, other, one])) == {
        ("a",): True, ("b",): True, ("c",): {"None": None}, ("d",): {}
    }  # fmt: skip
    experts = [nested_of({"experts": {(0, n): 1, "x": 1}}) for n in range(3)]
    assert decode_nested(merge_nested(experts)) == {
        ("experts",): {f"(0, {n})": (0, n) for n in range(3)}
    }
    assert merge_nested([one, one, b""]) == one
    assert merge_nested([b"", b""]) == b""


def test_a_path_gets_its_keys_back():
    table = decode_nested(nested_of({"a": {-3: [{None: 1, "x": 2, 4: 3}]}, "b": {"7": 1}}))
    assert real_path(("a", "-3", 0, "None"), table) == ("a", Real(-3), 0, Real(None))
    assert real_path(("a", "-3", 0, "x"), table) == ("a", Real(-3), 0, "x")
    assert real_path(("a", "-3", 0, "4"), table) == ("a", Real(-3), 0, Real(4))
    assert real_path(("a", "text"), table) == ("a", "text"), "of another rank"
    assert real_path(("b", "7"), table) == ("b", Real("7")), "known to be text"


@pytest.mark.parametrize(
    "table",
    [
        1,
        [],
        {"a": True},
        {("a",): 1},
        {("a",): (1,)},
        {("a",): {"1": [1]}},
        {(b"a",): True},
        {(): {}},
    ],
)
def test_malformed_tables_are_refused(table: Any):
    with pytest.raises(IntegrityError):
        decode_nested(encode_plain(table))
