"""The spec that a namespace was last opened with, in a file, so that spills resume alone."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import msgspec

from tieredckpt.agent.memory_retention import MEMORY
from tieredckpt.agent.sessions import FULL_ADVICE
from tieredckpt.tiers.medium import medium
from tieredckpt.transport.messages import NamespaceSpec

log = logging.getLogger(__name__)


def read_spec(path: Path) -> NamespaceSpec | None:
    """The spec of before; None if there is none, or it cannot be used."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=NamespaceSpec)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        log.warning("%s: the remembered spec is unusable: %s", path, error)
        return None


def write_spec(path: Path, spec: NamespaceSpec) -> None:
    """Remember ``spec``. Raises CapacityError or TierUnavailableError."""
    data = msgspec.json.encode(spec)
    with medium(MEMORY, f"note the configuration in {path}", advice=FULL_ADVICE):
        try:
            if path.read_bytes() == data:
                return  # a restart in a full tmpfs needs no room for this
        except FileNotFoundError:
            pass
        temporary = path.with_suffix(".tmp")
        temporary.write_bytes(data)
        os.replace(temporary, path)
