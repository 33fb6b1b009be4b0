"""Messages about the tiers of a job, between its agent and the training script."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from tieredckpt.rpc.messages.base import Message, NodeRequest, resolve


class TierTrouble(Message, frozen=True):
    """Why a tier does not get its checkpoints, for the log of training."""

    kind: Literal["failing", "full"]
    text: str
    since_s: float = 0.0
    """When this outage began, by the agent's clock; 0: not known."""


class Troubles(Message, frozen=True):
    """Reply to AskTroubles."""

    tiers: dict[str, TierTrouble]
    """By tier; one that works is left out."""
    wants_credentials: bool = False
    """A tier uses those of the training script, and the agent has none that the store accepts."""


class AskTroubles(NodeRequest[Troubles], frozen=True):
    """What training should know of its tiers now; no I/O."""

    slow: ClassVar[bool] = False


class HandCredentials(NodeRequest[None], frozen=True):
    """The training script's credentials, for tiers that use those. In the agent's memory only."""

    slow: ClassVar[bool] = False
    session_id: str
    access_key: str
    secret_key: str
    token: str | None
    expires_at_s: float | None
    """Unix time; None: unknown."""

    def __repr__(self) -> str:  # no secrets in a log or a traceback
        return f"HandCredentials(expires_at_s={self.expires_at_s})"

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        return [("expires_at_s", self.expires_at_s)]


resolve(globals().values())
