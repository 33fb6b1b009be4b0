"""Planning of mirrors, and what the coordinator makes of the receipts."""

from __future__ import annotations

import warnings
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan
from torch.distributed.checkpoint.planner import SavePlan

from tieredckpt.dcp.job.hosts import JobHosts
from tieredckpt.dcp.save.mirrors import Mirrors, MirrorWork, item_digest
from tieredckpt.dcp.save.receipt import MirrorSegment, Receipt
from tieredckpt.format.manifest import Holders

STATE = {"w": torch.zeros(4, 6), "v": torch.zeros(3), "plain": {"lr": 0.1}}


def session(cached: dict[str, Any] | None = None) -> Any:
    held = (cached or {}).values()
    return SimpleNamespace(dcp_plans=SimpleNamespace(local_plans=lambda stream: list(held)))


def local_plan(host: str, state: dict[str, Any] | None = None) -> SavePlan:
    plan = create_default_local_save_plan(STATE if state is None else state, False)
    return Mirrors.declare(plan, host)


def keeping(plan: SavePlan, *names: str) -> SavePlan:
    return replace(plan, items=[item for item in plan.items if item.index.fqn in names])


def work_of(plan: SavePlan) -> list[tuple[int, int]]:
    assert isinstance(plan.storage_data, MirrorWork)
    return [(owner, ordinal) for owner, ordinal, _ in plan.storage_data.segments]


def test_each_rank_mirrors_what_the_other_host_writes():
    one, two = local_plan("a"), local_plan("b")
    found = Mirrors("s").assign([keeping(one, "w"), keeping(two, "v", "plain")], session())
    assert [work_of(plan) for plan in found] == [[(1, 1)], [(0, 0)]]
    (mirror,) = found[0].storage_data.segments
    assert mirror[2] == b"".join(map(item_digest, found[1].items))  # the tensor comes first


def test_segments_are_numbered_as_in_the_manifest():
    """A rank that writes nothing has none."""
    plans = [keeping(local_plan("a")), keeping(local_plan("a"), "w"), keeping(local_plan("b"), "v")]
    found = Mirrors("s").assign(plans, session())
    assert sorted(work_of(found[0]) + work_of(found[1])) == [(2, 1)]
    assert work_of(found[2]) == [(1, 0)]


def test_bytes_items_alone_are_not_worth_a_MirrorSegment():
    found = Mirrors("s").assign(
        [keeping(local_plan("a"), "w", "v"), keeping(local_plan("b"), "plain")], session()
    )
    assert [work_of(plan) for plan in found] == [[], [(0, 0)]]


def test_other_pieces_of_equal_name_are_other_items():
    other = STATE | {"w": torch.zeros(4, 6, dtype=torch.bfloat16)}
    found = Mirrors("s").assign(
        [keeping(local_plan("a"), "w"), keeping(local_plan("b", other), "v")], session()
    )
    assert [work_of(plan) for plan in found] == [[(1, 1)], []]


def test_unchanged_plans_are_left_alone():
    copies = Mirrors("s")
    first = copies.assign([keeping(local_plan("a"), "w"), keeping(local_plan("b"), "v")], session())
    cached = [SavePlan([], usable=False)] * 2
    assert copies.assign(cached, session()) == cached
    assert work_of(first[0]) == [(1, 1)]


def test_a_rank_whose_own_part_is_unchanged_receives_new_mirrors():
    copies = Mirrors("s")
    copies.assign([keeping(local_plan("a"), "w"), keeping(local_plan("b"), "v")], session())
    more = STATE | {"more": torch.zeros(2)}
    local = [local_plan("a", more), local_plan("b", more)]
    plans = [SavePlan([], usable=False), keeping(local[1], "v", "more")]
    found = copies.assign(plans, session({"DefaultSavePlanner": local}))
    assert [item.index.fqn for item in found[0].items] == ["w"]
    assert work_of(found[0]) == [(1, 1)]
    assert work_of(found[1]) == [(0, 0)]


def test_plans_of_somebody_elses_planner_pass():
    plans = [SavePlan(local_plan("a").items), SavePlan([])]
    found = Mirrors("s").assign(plans, session())
    assert [work_of(plan) for plan in found] == [[], []]


def receipt(rank: int, host: str, footer: bytes, *mirrors: MirrorSegment) -> Receipt:
    return Receipt(
        rank=rank, run_id="r", host_id=host, stream="s", step=1, segment_id=f"{rank:032x}",
        footer=footer, mirrors=mirrors,
    )  # fmt: skip


def test_hosts_with_mirrors_of_all_that_a_host_writes():
    receipts = [
        receipt(0, "a", b"0", MirrorSegment(2, b"2", complete=True)),
        receipt(1, "a", b"1"),
        receipt(
            2,
            "b",
            b"2",
            MirrorSegment(0, b"0", complete=True),
            MirrorSegment(1, b"x", complete=False),
        ),
        receipt(
            3,
            "c",
            b"3",
            MirrorSegment(0, b"0", complete=True),
            MirrorSegment(2, b"2", complete=True),
        ),
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = Mirrors("s").hosts_with_mirrors(receipts)
    assert found == {"a": ("b",), "b": ("a", "c")}


def test_replicas_that_differ_are_warned_of_once():
    copies = Mirrors("s")
    receipts = [receipt(0, "a", b"0"), receipt(1, "b", b"1", MirrorSegment(0, b"x", complete=True))]
    with pytest.warns(UserWarning, match="ranks 0 and 1 have different values"):
        assert copies.hosts_with_mirrors(receipts) == {"a": ("b",)}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        copies.hosts_with_mirrors(receipts)


def test_a_manifest_names_hosts_with_mirrors_before_others():
    job = JobHosts(by_rank=("a", "b", "c"), wanted=1, possible=1,
                   holders={"a": ("b",), "b": ("c",), "c": ("a",)})  # fmt: skip
    assert job.replicas_of(["a", "b"]) == (Holders("a", ("b",)), Holders("b", ("c",)))
    found = job.replicas_of(["a", "b"], {"a": ("c",)})
    assert found == (Holders("a", ("c",)), Holders("b", ("c",)))
