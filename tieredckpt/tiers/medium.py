"""Where what the operating system says becomes one of our errors; nowhere else in the tiers."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator
from typing import TypedDict

from tieredckpt.errors import CapacityError, NotFoundError, Outcome, TierUnavailableError


class Known(TypedDict, total=False):
    """What is known of a call that may fail, for its error; see :func:`medium`."""

    outcome: Outcome
    missing_key: str | None
    needed_bytes: int


# ENOMEM: what tmpfs says when the memory cgroup refuses a page instead of killing.
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOMEM})


@contextlib.contextmanager
def medium(
    tier: str,
    doing: str,
    *,
    outcome: Outcome = "not_applied",
    missing_key: str | None = None,
    needed_bytes: int = 0,
    advice: str = "",
) -> Iterator[None]:
    """Run a few system calls for ``tier``; ``doing`` completes "cannot ...".

    Args:
        tier: The tier's name, for the error.
        doing: What is tried.
        outcome: What is known if it fails.
        missing_key: The key that does not exist if the system says ENOENT; None if ENOENT means
            that the medium itself is broken (its folder was removed).
        needed_bytes: Bytes wanted, for CapacityError.
        advice: What to do when there is no space.

    Raises:
        NotFoundError, CapacityError, TierUnavailableError: In place of any OSError.
    """
    try:
        yield
    except OSError as error:
        if error.errno == errno.ENOENT and missing_key is not None:
            raise NotFoundError(f"tier {tier} has no {missing_key}", key=missing_key) from error
        if error.errno in _FULL:
            raise CapacityError(
                f"cannot {doing}: {error.strerror or error}; {advice or 'no space left'}",
                tier=tier,
                needed_bytes=needed_bytes,
                available_bytes=0,
                limit="file system",
            ) from error
        raise TierUnavailableError(
            f"cannot {doing}: {error}", tier=tier, outcome=outcome
        ) from error
