"""Where one tier of one namespace is: a folder or a store, opened, and anew if it is gone."""

from __future__ import annotations

from tieredckpt.errors import TierUnavailableError
from tieredckpt.rpc.messages.agent import TierSpec
from tieredckpt.storage.backends.file import FileTier, device_of, folder_of_url
from tieredckpt.storage.backends.open import open_store
from tieredckpt.storage.base import Scope, Tier
from tieredckpt.storage.object.supplied import Handed


class TierPlace:
    """See the module; used by the tier's worker alone.

    Args:
        spec: Of the tier.
        namespace: Name of the namespace.
        script: Credentials of the training script.
    """

    def __init__(self, spec: TierSpec, namespace: str, script: Handed | None = None) -> None:
        self._spec = spec
        self._namespace = namespace
        self._script = script
        self._tier: Tier | None = None
        self._device: int | None = None
        """The file system on which the folder was found first."""

    def open(self) -> Tier:
        """The tier, made anew if its folders are gone; never on another file system than before.

        Raises:
            ConfigError: A store's URL or setting, or a package that is not installed.
            CapacityError, TierUnavailableError: It cannot be had now.
        """
        if not self._spec.is_file:
            if self._tier is None:
                spec = self._spec
                self._tier = open_store(
                    spec.name, spec.url, self._namespace, spec.object, self._script
                )
            self._tier.check()
            return self._tier
        if self.is_gone():
            self.close()
        if self._tier is None:
            folder = folder_of_url(self._spec.url)
            if self._device not in (None, device_of(folder)):
                raise TierUnavailableError(
                    f"{folder} is on another file system than before: is the disk mounted?",
                    tier=self._spec.name,
                    outcome="not_applied",
                )
            scope = Scope(self._spec.scope)
            self._tier = FileTier(self._spec.name, folder, self._namespace, scope=scope)
        return self._tier

    def found(self) -> None:
        """What the tier holds was read: from now on it stays on this file system."""
        if isinstance(self._tier, FileTier):
            self._device = device_of(self._tier.root)

    def is_gone(self) -> bool:
        """Whether its folders were deleted or unmounted since it was opened."""
        return isinstance(self._tier, FileTier) and not self._tier.is_intact()

    def retrying(self) -> str | None:
        """From any thread: why requests to a store fail that are being repeated."""
        tier = self._tier
        return tier.retrying() if tier is not None else None

    def abandon(self) -> None:
        """From any thread: end requests to a store, which may be repeated for minutes."""
        tier = self._tier
        if tier is not None and not isinstance(tier, FileTier):
            tier.close()

    def close(self) -> None:
        """Give it up. Idempotent."""
        tier, self._tier = self._tier, None
        if tier is not None:
            tier.close()
