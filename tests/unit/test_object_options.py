"""What a configuration says of a store, what the agent is told, what the tier takes: one thing.

Three declarations, since those layers do not import each other; nobody may add to one alone.
"""

from __future__ import annotations

import dataclasses

import msgspec

from tieredckpt.policy.config_object import ObjectOptions
from tieredckpt.tiers.object_settings import ObjectSettings
from tieredckpt.transport import messages as m


def test_all_three_have_the_same_fields_and_defaults():
    configured = dataclasses.asdict(ObjectOptions())
    assert configured == dataclasses.asdict(ObjectSettings())
    assert configured == msgspec.structs.asdict(m.ObjectOptions())
