"""What a survivor keeps, what must not change meanwhile, and which version is saved."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tieredckpt import UsageError, per_rank
from tieredckpt.live import survivor
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


def offer(version: int, *names: str, needed: str = "ab") -> Offer:
    return Offer(version=version, names=frozenset(names), needed=frozenset(needed))


def test_the_newest_version_of_which_no_name_is_missing_is_saved():
    nothing = Offer()
    assert to_save([nothing, nothing], saved=-1) == []
    assert to_save([offer(7, "a"), offer(7, "b"), nothing], saved=4) == [(7, frozenset())]
    # Of a pipeline's second stage no rank is left with the newest update.
    both = [offer(7, "a"), offer(6, "a", "b"), nothing]
    assert to_save(both, saved=4) == [(7, frozenset("b")), (6, frozenset())]
    assert to_save(both, saved=6) == [(7, frozenset("b"))]
    assert to_save(both, saved=7) == []
