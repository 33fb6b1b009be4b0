"""What `retention plan --after` foresees."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tests.unit.policy.test_history import saves, start
from tieredckpt.cli.checkpoints.ls import Listed, decide, foresee
from tieredckpt.config.schema import Best, Config, Every, Keep, MemoryConfig
from tieredckpt.config.tiers import TierSpec

CONFIG = Config(
    memory=MemoryConfig(keep=Keep(last=1)),
    tiers=(
        TierSpec(
            name="disk", url="file:///disk", every=Every(steps=10),
            keep=Keep(last=2, best=Best(metric="loss", mode="min")),
        ),
    ),
)  # fmt: skip


def listed(stream: str = "default") -> list[Listed]:
    """Saves at each fifth step; the newest is in memory, each second one on disk."""
    made = saves(start([], [], default=None), 5, 10, 15, 20, 25, 30, 35, stream=stream)
    where = {10: ("disk",), 20: ("disk",), 30: ("disk",), 35: ("memory",)}
    loss = {10: "0.1", 20: "0.9"}
    found = []
    for each in made[::-1]:
        if tiers := where.get(each.step):
            tags = {"loss": loss[each.step]} if each.step in loss else {}
            manifest = msgspec.structs.replace(
                each, tiers=("disk",) * (tiers == ("disk",)), tags=tags
            )
            place = dict.fromkeys(tiers, "whole")
            found.append(Listed(manifest=manifest, status="candidate", tiers=place))
    return found


def foreseen(
    held: Sequence[Listed], saves: int, in_use: dict[str, dict[str, str]] | None = None
) -> dict[tuple[str, int], tuple[bool, int | None]]:
    decided = decide(held, CONFIG, 1e9, in_use)
    foresee(decided, held, CONFIG, saves)
    return {(e["tier"], e["step"]): (e["stays"], e["goes_after"]) for e in decided}


def test_what_goes_after_the_next_saves() -> None:
    held = listed()
    now = {("memory", 35): (True, None), ("disk", 30): (True, None), ("disk", 20): (True, None)}
    now["disk", 10] = (True, None)
    assert foreseen(held, 0) == now
    now["memory", 35], now["disk", 20] = (True, 40), (True, 40)
    assert foreseen(held, 1) == foreseen(held, 2) == now
    now["disk", 30] = (True, 50)
    assert foreseen(held, 3) == foreseen(held, 30) == now, "the best stays"
    # What goes now is not counted then, and what is read now is not read for ever.
    reading = {"disk": {held[3].manifest.save_id: "it is being read"}}
    assert foreseen(held, 3, reading) == now


def test_streams_that_save_at_the_same_steps() -> None:
    decided = decide(held := [*listed("a"), *listed("b")], CONFIG, 1e9, None)
    foresee(decided, held, CONFIG, 30)
    goes = {(e["stream"], e["tier"], e["step"], e["goes_after"]) for e in decided}
    each = {("memory", 35, 40), ("disk", 30, 50), ("disk", 20, 40), ("disk", 10, None)}
    assert goes == {(stream, *row) for stream in "ab" for row in each}


def test_of_one_checkpoint_nothing_is_foreseen() -> None:
    held = listed()[:1]
    reading = {"memory": {held[0].manifest.save_id: "it is being read"}}
    assert foreseen(held, 5, reading) == {("memory", 35): (True, None)}
