"""A file that fsspec reaches, opened for reading; and what fsspec says, as ours."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator
from datetime import datetime
from typing import Any, Unpack

from tieredckpt.errors import TieredCkptError, TierUnavailableError
from tieredckpt.tiers.base import RangedObject
from tieredckpt.tiers.medium import Known, medium


class FsspecObject(RangedObject):
    """Ranges of a file, as long as it is the one that was opened.

    Args:
        fs: Its file system.
        path: Where it is there.
        found: What the file system said of it.
        tier: The tier's name, for errors.
        key: The object's, for errors.
    """

    has_descriptor = False

    def __init__(self, fs: Any, path: str, found: dict[str, Any], *, tier: str, key: str) -> None:
        super().__init__(tier, key, int(found["size"]))
        self._fs, self._path = fs, path
        self._was = identity(found)

    def _read(self, offset: int, into: memoryview) -> None:
        stop = offset + len(into)
        with fsspec_call(self._tier, f"read {self._key}", missing_key=self._key):
            data = self._fs.cat_file(self._path, start=offset, end=stop)
            # fsspec has no condition: what was replaced meanwhile shows in what it says after.
            changed = identity(self._fs.info(self._path)) != self._was
        if changed or len(data) != len(into):
            raise self._damaged(
                f"had {self.size} bytes; {offset} to {stop} are not to be had, or it was changed "
                "after it was opened",
                expected=stop,
                actual=self.size,
            )
        into[:] = data


def modified_s(found: dict[str, Any]) -> float | None:
    """When a file was written, in one of the ways in which fsspec's file systems say it."""
    for name in ("mtime", "LastModified", "last_modified", "modified", "updated", "created"):
        value = found.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
        if isinstance(value, str):
            with contextlib.suppress(ValueError):
                value = datetime.fromisoformat(value)
        if isinstance(value, datetime):
            return value.timestamp()
    return None


def identity(found: dict[str, Any]) -> tuple[object, ...]:
    """What differs between a file and the one that took its place, as far as it is said."""
    return (*map(found.get, ("size", "ino", "ETag", "etag")), modified_s(found))


class UnusableError(Exception):
    """fsspec lacks what it needs for a URL, or does not know it."""


@contextlib.contextmanager
def fsspec_call(tier: str, doing: str, **known: Unpack[Known]) -> Iterator[None]:
    """As :func:`medium`, for libraries that raise what they like. Raises our errors.

    UnusableError: what is wrong is not the store, but what is installed here.
    """
    advice = f"free space there, or keep fewer checkpoints in tier {tier} (tiers[].keep)"
    with medium(tier, doing, advice=advice, **known):
        try:
            yield
        except (TieredCkptError, UnusableError):
            raise
        except (FileNotFoundError, KeyError) as error:
            raise FileNotFoundError(errno.ENOENT, str(error)) from error
        except OSError as error:
            # (as when a library's own error is one, without a number)
            raise OSError(error.errno or errno.EIO, str(error)) from error
        except Exception as error:
            raise TierUnavailableError(
                f"cannot {doing}: {type(error).__name__}: {error}",
                tier=tier,
                outcome=known.get("outcome", "not_applied"),
            ) from error
