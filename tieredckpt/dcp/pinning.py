"""Pins from a training script: no collectives."""

from __future__ import annotations

import logging
import time
from typing import Literal

from tieredckpt.dcp.held import manifests_in, read_holdings
from tieredckpt.dcp.session import Session
from tieredckpt.errors import NotFoundError
from tieredckpt.format.manifest import Manifest
from tieredckpt.policy.timeline import candidates
from tieredckpt.recovery.evidence import read_attempts
from tieredckpt.transport.client import LEAST_WAIT_S
from tieredckpt.transport.messages import PIN_WAIT_S_MAX, AddRecord

log = logging.getLogger(__name__)


def pin(session: Session, step: int, stream: str, reason: str, timeout_s: float) -> str:
    """See ``Engine.pin``."""
    return _say(session, "pin", step, stream, reason[:4096], timeout_s)


def unpin(session: Session, step: int, stream: str, timeout_s: float) -> str:
    """See ``Engine.unpin``."""
    return _say(session, "unpin", step, stream, "", timeout_s)


def _say(
    session: Session,
    kind: Literal["pin", "unpin"],
    step: int,
    stream: str,
    text: str,
    timeout_s: float,
) -> str:
    until_s = time.monotonic() + max(0.0, timeout_s)  # in this order, not a number is 0
    manifest = _find(session, step, stream, until_s)
    found = session.client.pin(
        AddRecord(
            stream=stream,
            save_id=manifest.save_id,
            kind=kind,
            text=text,
            wait_s=min(max(until_s - time.monotonic(), 0.0), PIN_WAIT_S_MAX),
        )
    )
    for tier, why in found.owed.items():
        log.warning(
            "the %s of step %d counts, and is not in tier %s yet, which gets it when it answers: "
            "%s", kind, step, tier, why,
        )  # fmt: skip
    return manifest.save_id


def _find(session: Session, step: int, stream: str, until_s: float) -> Manifest:
    # What is in memory is pinned while a tier is silent, and the other tiers have time to note it.
    for tiers in (False, True):
        left_s = max(LEAST_WAIT_S, until_s - time.monotonic())
        holdings = read_holdings(session.client, within_s=left_s, tiers=tiers)
        line = candidates(manifests_in(holdings), read_attempts([holdings])[0], stream)
        for manifest in line:
            if manifest.step == step:
                return manifest
    raise NotFoundError(
        f"this host knows no checkpoint of step {step} of stream {stream!r} on the time line",
        key=str(step),
        what="step",
    )
