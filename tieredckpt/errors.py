"""The error tree, grouped by what the caller does next.

Every error that leaves the public interface is one of these. Errors have fields in addition to
text, and keep them when pickled: DCP sends a rank's exception to every other rank pickled.
"""

from __future__ import annotations

from typing import Any, Literal

Outcome = Literal["not_applied", "unknown"]
"""The state after a failed write: "not_applied" is certain, else it may have been applied."""


def _rebuild(cls: type[TieredCkptError], message: str, fields: dict[str, Any]) -> TieredCkptError:
    return cls(message, **fields)


class TieredCkptError(Exception):
    """Root of all errors raised by tieredckpt.

    Args:
        message: One or two sentences: what is wrong, and what to do next.
        **fields: Facts about the failure, readable as attributes and kept by pickling.
    """

    def __init__(self, message: str, /, **fields: Any) -> None:
        super().__init__(message)
        self.message = message
        self.fields = fields

    def __getattr__(self, name: str) -> Any:
        fields = self.__dict__.get("fields", {})
        if name in fields:
            return fields[name]
        raise AttributeError(name)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.message, self.fields)

    def __str__(self) -> str:
        return self.message


class ConfigError(TieredCkptError, ValueError):
    """The configuration is wrong: fix the file. Fields: ``key`` (dotted path), ``allowed``."""


class UsageError(TieredCkptError, ValueError):
    """The calling code is wrong (a writer used twice, ranks that name different steps): fix it."""


class NotFoundError(TieredCkptError, KeyError):
    """The named object does not exist in this place: try the next one. Field: ``key``."""

    __str__ = TieredCkptError.__str__


class IntegrityError(TieredCkptError):
    """The bytes of a copy differ from those that were written: never use this copy again.

    Fields: ``tier``, ``key``, ``expected``, ``actual`` as far as they are known.
    """


class FormatVersionError(IntegrityError):
    """The bytes are of a format version that this release cannot read: upgrade."""


class TierUnavailableError(TieredCkptError):
    """A tier, an agent or a peer does not answer or refuses: retry later.

    Fields: ``tier``, ``outcome`` (:data:`Outcome`; "unknown" means a write may have happened).
    """


class AgentError(TierUnavailableError):
    """The node agent cannot be started, reached or used as configured; the text says what to do."""


class CapacityError(TieredCkptError):
    """Too few free bytes: raise the limit, keep fewer checkpoints, or wait for a spill.

    Fields: ``needed_bytes``, ``available_bytes``, ``limit`` (the name of the limit that was hit).
    """


class StaleAttemptError(TieredCkptError):
    """A newer start of this training run has superseded this process, which must not save."""


class NamespaceInUseError(TieredCkptError):
    """Another job uses this namespace: choose another one, or stop that job."""


class ProtocolError(TieredCkptError):
    """An agent and its client disagree about the protocol."""


class RemoteProtocolError(ProtocolError):
    """The other side sent something malformed, oversized or out of order."""


class NoRecoverableCheckpointError(TieredCkptError):
    """No candidate can be restored: an operator must look.

    Field ``refused``: a list of (save id, step or None, reason), newest first.
    """


class RankError(TieredCkptError):
    """A collective step failed on another rank, with an error that is not of this tree.

    Field ``rank``.
    """


class WaitError(TieredCkptError):
    """A wait for a level will not be satisfied.

    Field ``reason``: "not_scheduled", "superseded", "failed", "timeout" or "not_found".
    """


class BackgroundSaveError(TieredCkptError):
    """Earlier saves in the background failed. Reported once, by the next committed save.

    Fields: ``what`` and ``cause``, a list each: the saves, and why ("": only its future knows).
    """


def how_to_install(extra: str) -> str:
    """Return how to install an extra: from our repository alone, never from the index.

    The project has no name in the index, so anybody could publish a package by that name.
    """
    return f"in a clone of tieredckpt's repository run `pip install '.[{extra}]'`"
