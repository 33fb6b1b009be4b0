"""What waits for a tier gets its turn, also behind what fails every time."""

from __future__ import annotations

import msgspec
import pytest

from tests.format.samples import hex_id, small_manifest
from tieredckpt.agent.tiers.queue import TRIES, SpillQueue


@pytest.mark.parametrize("stuck", [1, 2, 5])
def test_what_always_fails_does_not_starve_a_newer_one(stuck: int):
    queue = SpillQueue()
    saves = [
        msgspec.structs.replace(small_manifest(), save_id=hex_id(900 + seq), seq=seq)
        for seq in range(stuck + 1)
    ]
    for save in saves:
        queue.add(save)
    tried = []
    while (job := queue.take(lambda _: True)) != saves[-1]:
        assert job is not None
        tried.append(job.seq)
        queue.back(job)
    assert tried == [seq for seq in range(stuck) for _ in range(TRIES)]
