"""The spill thread without a thread: the simulation's scheduler says when it takes a step."""

from __future__ import annotations

from collections.abc import Callable

from tieredckpt.agent.tiers.worker import TierWorker
from tieredckpt.storage.catalog import Catalog
from tieredckpt.storage.holdings import TierFacts


class InlineLook:
    """Looks at once."""

    def ask(self, look: Callable[[], TierFacts]) -> int:
        return 1

    def wait(self, number: int, look: Callable[[], TierFacts], until_s: float) -> TierFacts | None:
        return look()


class SimWorker(TierWorker):
    """A :class:`TierWorker` that is stepped."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        self.look = InlineLook()  # type: ignore[assignment]

    def start(self) -> None:
        pass

    def why(self) -> str | None:
        """Without the time, which no seed decides."""
        return self.error

    def attach(self, timeout_s: float) -> Catalog | None:
        if self.catalog is None:
            self.step()
        return self.catalog
