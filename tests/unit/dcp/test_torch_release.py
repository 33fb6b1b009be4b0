"""Releases of torch that were not tried are named once, and so are private parts that changed."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import planner_helpers
from torch.distributed.checkpoint.planner import SavePlanner

from tieredckpt import Engine, live
from tieredckpt.dcp import torch_release
from tieredckpt.dcp.state.plan_caches import PlanCaches, put_back
from tieredckpt.dcp.torch_release import ENGINE, LIVE, changed


@pytest.fixture(autouse=True)
def _warns_again() -> Iterator[None]:
    yield
    put_back()
    torch_release.warn_of_release.cache_clear()


def warned(folder: Path) -> list[str]:
    config = {"namespace": "here", "agent": {"runtime_dir": str(folder)}}
    torch_release.warn_of_release.cache_clear()
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(2):
            Engine.open(config, read_only=True).close()
            live.run(lambda world: None)
    return [str(each.message) for each in found]


def test_this_torch_has_the_private_parts():
    assert changed((*ENGINE, *LIVE)) == []
    PlanCaches().use("default")  # as a save of an engine does
    assert changed((*ENGINE, *LIVE)) == []


def test_a_release_that_was_not_tried_warns_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    assert torch_release.is_tried() == (warned(tmp_path) == [])
    monkeypatch.setattr(torch, "__version__", "2.99.1+cpu")
    [text] = warned(tmp_path)
    assert "torch 2.99.1+cpu: it was not tried" in text
    assert f"(tried: {', '.join(torch_release.TRIED)})" in text


def test_changed_parts_are_named_with_what_is_lost(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(torch, "__version__", torch_release.TRIED[0])
    monkeypatch.delattr(SavePlanner, "_cached_metadata")
    monkeypatch.delattr(torch, "_neg_view")
    monkeypatch.setattr(planner_helpers, "_create_write_items", lambda object, fqn: [])
    [text] = warned(tmp_path)
    assert "SavePlanner._cached_metadata is not as expected (streams share their" in text
    assert "torch:_neg_view is not as expected (values with a negated view" in text
    assert "_create_write_items is not as expected (wrapper subclasses" in text
    assert text.count("not as expected") == 3
