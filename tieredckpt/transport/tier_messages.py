"""What the agent is told of a tier."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from tieredckpt.policy.config_object import ObjectOptions
from tieredckpt.transport.message_base import Message

Positive = Annotated[int, msgspec.Meta(ge=1, lt=1 << 62)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e9)]


class KeepBest(Message, frozen=True):
    """As :class:`tieredckpt.policy.retention.Best`."""

    metric: str
    mode: Literal["min", "max"]
    n: Positive


class KeepRules(Message, frozen=True):
    """What stays beside the newest: :class:`tieredckpt.policy.retention.Keep` without ``last``."""

    every_steps: Positive | None = None
    every_s: Seconds | None = None
    max_age_s: Seconds | None = None
    max_bytes: Positive | None = None
    best: KeepBest | None = None
    everything: bool = False


class Flush(Message, frozen=True):
    """POST /v1/namespaces/{ns}/flush -> Flushed: bring the newest checkpoints to a tier now."""

    tier: str = ""
    """"": the one that can be reached."""
    left_s: Seconds | None = None
    """None: as long as it takes."""


class FlushedSave(Message, frozen=True):
    """One stream's newest checkpoint."""

    stream: str
    step: int
    save_id: str


class Flushed(Message, frozen=True):
    """Reply to Flush, at once; how far it comes is asked with ``progress``."""

    tier: str
    saves: tuple[FlushedSave, ...]
    remaining_bytes: int
    """This host's, what is being copied before included."""
    estimate_s: float | None
    """None: nothing was copied there yet."""


class RetentionNeeds(Message, frozen=True):
    """GET /v1/namespaces/{ns}/needs: what retention leaves alone at this moment, beside pins."""

    tiers: dict[str, dict[str, str]]
    """By tier, memory included, and save id: who needs the checkpoint there (a sentence's end)."""


class TierSpec(Message, frozen=True):
    """The part of a tier's configuration that the agent acts on."""

    name: str
    url: str
    scope: Literal["host", "shared"]
    keep_last: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)]
    keep: KeepRules = KeepRules()
    source: str = "memory"
    """What it is filled from: memory, or a tier before it."""
    on_pressure: Literal["drop_oldest_queued", "keep"] = "drop_oldest_queued"
    lag_alarm_steps: Positive | None = None
    lag_alarm_s: Seconds | None = None
    takeover_after_s: Seconds = 60.0
    delete_delay_s: Seconds = 600.0
    sweep_after_s: Seconds = 86400.0
    object: ObjectOptions = ObjectOptions()
