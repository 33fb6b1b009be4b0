"""Which session saves into which stream of a namespace.

Within one run each stream has one coordinator: two process groups that saved into the same stream,
or several ranks that each call ``dcp.save(no_dist=True)``, would make a time line of checkpoints
that do not follow from one another. An agent that starts anew has forgotten the owners and learns
them from the next commits; the numbers of the saves refuse the others meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from tieredckpt.errors import UsageError
from tieredckpt.format.manifest import Manifest


class StreamOwners:
    """See the module. Guarded by the node's lock.

    Args:
        is_live: Whether a session's process still holds its lease.
    """

    def __init__(self, is_live: Callable[[str], bool]) -> None:
        self._is_live = is_live
        self._owners: dict[str, tuple[str, str]] = {}
        """By stream: the run and the session that committed last."""

    def check(self, stream: str, run: str, session_id: str) -> None:
        """Raises UsageError if another live session of the same run saves into ``stream``."""
        owner = self._owners.get(stream)
        if owner is None or owner == (run, session_id):
            return
        if owner[0] == run and self._is_live(owner[1]):
            raise two_groups(stream)

    def committed(self, stream: str, run: str, session_id: str) -> None:
        """The session owns the stream from now on."""
        self._owners[stream] = (run, session_id)

    def release(self, streams: Iterable[str]) -> None:
        """The streams were loaded: whoever of those ranks saves next owns them."""
        for stream in streams:
            self._owners.pop(stream, None)


def check_number(manifest: Manifest, known: Iterable[Manifest]) -> None:
    """Raises UsageError if a save of this attempt with this number, or a later one, exists."""
    for other in known:
        if (
            (other.stream, other.attempt) == (manifest.stream, manifest.attempt)
            and other.seq >= manifest.seq
            and other.save_id != manifest.save_id
        ):
            raise two_groups(manifest.stream)


def two_groups(stream: str) -> UsageError:
    """Two coordinators of one stream in one run."""
    return UsageError(
        f"two process groups save into stream {stream!r} (or several ranks call dcp.save with "
        "no_dist=True): each checkpoint would hold the state of some ranks only. Give each group "
        "its own stream (engine.writer(step, stream=...)), or call dcp.save on all ranks; if other "
        "ranks shall go on with this stream, call engine.load on them first"
    )
