"""Where what the operating system says becomes one of our errors; nowhere else in the tiers."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator
from typing import TypedDict, Unpack

from tieredckpt.errors import CapacityError, NotFoundError, Outcome, TierUnavailableError


class Known(TypedDict, total=False):
    """What is known of a call that may fail, for its error."""

    outcome: Outcome
    """What is known if it fails; else "not_applied"."""
    missing_key: str | None
    """The key that does not exist if the system or the store says that something is not there; None
    if that means that the medium itself is broken (its folder, its bucket was removed)."""
    needed_bytes: int
    """Bytes wanted, for CapacityError; else 0."""


# ENOMEM: what tmpfs says when the memory cgroup refuses a page instead of killing.
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOMEM})


@contextlib.contextmanager
def medium(tier: str, doing: str, *, advice: str = "", **known: Unpack[Known]) -> Iterator[None]:
    """Run a few system calls for ``tier``; ``doing`` completes "cannot ...".

    Args:
        tier: The tier's name, for the error.
        doing: What is tried.
        advice: What to do when there is no space.
        known: For the error. What is not there: ENOENT.

    Raises:
        NotFoundError, CapacityError, TierUnavailableError: In place of any OSError.
    """
    try:
        yield
    except OSError as error:
        missing_key = known.get("missing_key")
        if error.errno == errno.ENOENT and missing_key is not None:
            raise NotFoundError(f"tier {tier} has no {missing_key}", key=missing_key) from error
        if error.errno in _FULL:
            raise CapacityError(
                f"cannot {doing}: {error.strerror or error}; {advice or 'no space left'}",
                tier=tier,
                needed_bytes=known.get("needed_bytes", 0),
                available_bytes=0,
                limit="file system",
            ) from error
        raise TierUnavailableError(
            f"cannot {doing}: {error}", tier=tier, outcome=known.get("outcome", "not_applied")
        ) from error
