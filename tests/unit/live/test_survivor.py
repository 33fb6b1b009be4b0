"""What a survivor keeps, what must not change meanwhile, and which version is saved."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.testing._internal.two_tensor import TwoTensor

from tests.support.plan_hooks import hook
from tieredckpt import UsageError, per_rank
from tieredckpt.live import survivor, torch_private
from tieredckpt.live.survivor import HEAVY_BYTES, Offer, SurvivorState, to_save


class Stateful:
    """Its tensor has ``size`` bytes."""

    def __init__(self, size: int = 4) -> None:
        self.content: dict[str, Any] = {"w": torch.zeros(size // 4), "rate": 0.1}

    def state_dict(self) -> dict[str, Any]:
        return self.content

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.content = state


class Loader(Stateful):
    def __iter__(self) -> Any:
        return iter(())


def test_light_values_are_as_of_the_update_and_heavy_ones_as_they_are():
    state = {"heavy": Stateful(2 * HEAVY_BYTES), "light": Stateful(), "step": 1}
    kept = SurvivorState(state)
    kept.record(1)
    state["step"] = 2
    for value in (state["heavy"], state["light"]):
        value.content["w"] += 1
    found = kept.read()
    assert (found["step"], found["light"]["w"].tolist()) == (1, [0.0])
    assert found["heavy"]["w"] is state["heavy"].content["w"]


def test_hooks_of_dcp_are_kept_as_the_plan_that_they_gave():
    rows = torch.ones(4, 3)
    hook(rows, [(2, rows[:3]), (0, rows[3:])], torch.Size((6, 3)))
    kept = SurvivorState({"rows": rows})
    kept.record(1)
    rows.fill_(2)
    found = kept.read()["rows"]
    whole, boxes = torch_private.parts({"rows": found})["rows"]
    assert (whole, boxes) == (18, {((2, 0), (3, 3)), ((0, 0), (1, 3))})
    assert found.__get_tensor_shard__(MetadataIndex("rows", (0, 0))).tolist() == [[1.0] * 3]


def test_buffers_of_modules_that_are_not_saved_are_no_matter():
    module = torch.nn.Module()
    module.mask = torch.nn.Buffer(torch.eye(2).to_sparse())
    module.later = torch.nn.Buffer(torch.empty(2, device="meta"))
    kept = SurvivorState({"step": 1})
    kept.record(1)
    assert kept.read() == {"step": 1}


@pytest.mark.parametrize("size", [4, 2 * HEAVY_BYTES])
def test_inner_tensors_of_wrappers_are_kept_and_watched(size: int):
    value = Stateful()
    value.content = {"w": TwoTensor(torch.zeros(size // 4), torch.ones(size // 4)), "rate": 0.1}
    kept = SurvivorState({"states": value})
    kept.record(1)
    heavy = size > HEAVY_BYTES
    kept.check_unchanged(heavy=heavy)
    value.content["w"].b.add_(1)
    with pytest.raises(UsageError, match=r"'states\.w' changed outside of world\.update"):
        kept.check_unchanged(heavy=heavy)
    found = kept.read()["states"]["w"]
    assert isinstance(found, TwoTensor)
    assert found.b[0] == (2 if heavy else 1)


def test_a_wrapper_is_not_replaced_by_a_buffer_of_its_shape():
    model = torch.nn.Linear(200, 200)
    for number in range(3):
        table = torch.full((3,), float(number))
        model.register_buffer(f"table{number}", TwoTensor(table, table.clone()))
    kept = SurvivorState({"model": model})
    kept.record(1)
    found = torch_private.flat(kept.read())
    assert [found[f"model.table{number}"].a[0].item() for number in range(3)] == [0, 1, 2]


@pytest.mark.parametrize("name", ["w", "rate"])
def test_a_heavy_value_may_not_change_before_the_next_update(name: str):
    state = {"model": Stateful(2 * HEAVY_BYTES)}
    kept = SurvivorState(state)
    kept.record(1)
    kept.check_unchanged(heavy=True)
    state["model"].content[name] = state["model"].content[name] + 1
    kept.check_unchanged(heavy=False)
    with pytest.raises(UsageError, match=rf"'model\.{name}' changed outside of world\.update"):
        kept.check_unchanged(heavy=True)


def test_a_light_value_may_not_change_before_the_next_step_begins():
    state = {"schedule": Stateful(), "loader": Loader(), "own": per_rank(Stateful()), "step": 1}
    kept = SurvivorState(state)
    kept.record(1)
    state["loader"].content["w"] += 1
    state["own"].obj.content["w"] += 1
    kept.check_unchanged(heavy=False)
    state["schedule"].content["w"] += 1
    with pytest.raises(UsageError, match=r"'schedule\.w' changed outside"):
        kept.check_unchanged(heavy=False)


def test_buffers_change_in_forward_passes_and_are_put_back():
    model = torch.nn.Sequential(torch.nn.Linear(200, 200), torch.nn.BatchNorm1d(200))
    kept = SurvivorState({"model": model})
    before = model[1].running_mean.clone()
    kept.record(1)
    model(torch.randn(8, 200))
    kept.check_unchanged(heavy=True)
    assert torch.equal(kept.read()["model"]["1.running_mean"], before)
    assert not torch.equal(model[1].running_mean, before)


def test_the_first_three_updates_and_every_thousandth_are_watched():
    state = {"model": Stateful(2 * HEAVY_BYTES)}
    kept = SurvivorState(state)
    watched = []
    for version in range(1, 2 * survivor.WATCHED_EVERY + 1):
        kept.record(version)
        state["model"].content["rate"] += 1
        try:
            kept.check_unchanged(heavy=True)
        except UsageError:
            watched.append(version)
    assert watched == [1, 2, 3, 1000, 2000]


def test_a_state_dict_that_fails_is_named():
    class Communicates(Stateful):
        def state_dict(self) -> dict[str, Any]:
            raise RuntimeError("Connection closed by peer")

    with pytest.raises(UsageError, match=r"'ema' failed .*must not communicate"):
        SurvivorState({"ema": Communicates()}).names()


WHOLE = (4, frozenset({((0,), (4,))}))


def offer(version: int, needed: str = "ab", **parts: Any) -> Offer:
    return Offer(version=version, parts=parts, needed=frozenset(needed))


def test_the_newest_version_of_which_no_name_is_missing_is_saved():
    assert to_save([], saved=-1) == []
    assert to_save([offer(7, a=WHOLE), offer(7, b=WHOLE)], saved=4) == [(7, ())]
    # Of a pipeline's second stage no rank is left with the newest update.
    both = [offer(7, a=WHOLE), offer(6, a=WHOLE, b=WHOLE)]
    assert to_save(both, saved=4) == [(7, ("b",)), (6, ())]
    assert to_save(both, saved=6) == [(7, ("b",))]
    assert to_save(both, saved=7) == []


def test_a_tensor_of_which_a_part_is_missing_is_not_whole():
    first, second = ((0,), (3,)), ((3,), (1,))
    value = (0, frozenset())
    low, high = offer(7, "ab", a=(4, {first}), b=value), offer(7, "ab", a=(4, {second}), b=value)
    assert to_save([low, low], saved=4) == [(7, ("a",))]
    assert to_save([low, high, low], saved=4) == [(7, ())]
    names = torch_private.parts({"m": {"w": torch.zeros(2, 3)}, "step": 3})
    assert names == {"m.w": (6, {((0, 0), (2, 3))}), "step": (0, frozenset())}


def test_a_plain_value_that_changes_is_noticed_whatever_its_type():
    for value in ({"w": torch.zeros(2)}, torch.zeros(2), [torch.zeros(2)], np.zeros(2000)):
        state = {"ema": value}
        kept = SurvivorState(state)
        kept.record(1)
        kept.check_unchanged(heavy=False)
        change = value["w"] if isinstance(value, dict) else value
        (change[0] if isinstance(change, list) else change)[1] += 1
        with pytest.raises(UsageError, match="'ema"):
            kept.check_unchanged(heavy=False)


def test_a_large_loader_is_copied_as_it_changes_before_a_step_begins():
    state = {"loader": Loader(2 * HEAVY_BYTES)}
    kept = SurvivorState(state)
    kept.record(1)
    state["loader"].content["w"] += 1
    assert kept.read()["loader"]["w"].sum() == 0


def test_buffers_that_share_memory_are_kept_each():
    model = torch.nn.Linear(200, 200)
    stats = torch.arange(8.0).reshape(2, 4)
    model.register_buffer("low", stats[0])
    model.register_buffer("high", stats[1])
    model.register_buffer("sparse", torch.eye(2).to_sparse(), persistent=False)
    kept = SurvivorState({"model": model})
    kept.record(1)
    stats += 10
    kept.check_unchanged(heavy=True)
    found = kept.read()["model"]
    assert (found["low"].tolist(), found["high"].tolist()) == ([0, 1, 2, 3], [4, 5, 6, 7])
    assert torch.equal(found["weight"], model.weight)


def test_what_cannot_be_digested_is_no_false_alarm():
    content = {
        "meta": torch.zeros(2, device="meta"),
        "conjugate": torch.ones(2, dtype=torch.complex64).conj(),
        "sparse": torch.eye(2).to_sparse(),
        "half": torch.ones(2, 3, dtype=torch.bfloat16).T,
        "empty": torch.zeros(0),
        "call": lambda: None,
        "w": torch.zeros(HEAVY_BYTES),
    }
    model = Stateful()
    model.content = content
    kept = SurvivorState({"model": model})
    kept.record(1)
    kept.check_unchanged(heavy=True)
    content["half"] += 1
    with pytest.raises(UsageError, match=r"'model\.half'"):
        kept.check_unchanged(heavy=True)
