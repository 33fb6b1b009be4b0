"""torchtitan's checkpoint manager for torchft, saving into tieredckpt and loading from it.

Each replica group also saves the position of its data loader at every step, to
``<folder>/ft-replicat-<id>/step-N``: in a stream of its own, ``ft-replicat-<id>``.
"""

from __future__ import annotations

from dataclasses import dataclass

from tieredckpt.integrations.torchtitan import TieredCheckpointManager

try:
    from torchtitan.experiments.torchft.checkpoint import TorchFTCheckpointManager
except ImportError as error:
    raise ImportError(
        "tieredckpt.integrations.torchtitan_ft needs torchtitan 0.3 with its torchft experiment, "
        f"which cannot be imported: {error}"
    ) from error


class TieredTorchFTCheckpointManager(TieredCheckpointManager, TorchFTCheckpointManager):
    """``TorchFTCheckpointManager`` on tieredckpt.

    Each replica group is a job of its own, and needs a namespace of its own: set it by an
    environment variable that differs between the groups (``TIEREDCKPT_NAMESPACE``). The checkpoint
    of all groups is in the namespace of the group that was the first at that time; the others
    receive the state from that group through torchft.

    Args:
        config: As for :class:`TieredCheckpointManager`.
        parts: The arguments that torchtitan's trainer passes to its manager, with ``ft_manager``.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(TorchFTCheckpointManager.Config):
        """torchtitan's settings, and those of tieredckpt."""

        tieredckpt: str = "tieredckpt.yaml"
        """Path of tieredckpt's YAML file."""

        unsafe_pickle: bool = False
        """Allow a load to unpickle anything that a checkpoint contains."""

        abandon_newer: bool = False
        """After checkpoint.load_step, saves may abandon checkpoints newer than that step."""

    def _load(self, step: int = -1) -> bool:
        if self.enable_ft_dataloader_checkpoints:
            self._ft_load()
        return super()._load(step)

    def _ft_load(self) -> None:
        self._restore(self.ft_states, self._ft_folder(), None)
