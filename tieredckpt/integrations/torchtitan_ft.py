"""torchtitan's checkpoint manager for torchft, saving into tieredckpt and loading from it.

Beside the checkpoints of the job, each replica group saves the position of its data loader at every
step, to ``<folder>/ft-replicat-<id>/step-N``: a stream of its own, ``ft-replicat-<id>``.
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

    Each replica group is a job of its own, and needs a namespace of its own: let it come from an
    environment variable that differs between them (``TIEREDCKPT_NAMESPACE``). The checkpoint of the
    whole job is in the namespace of the replica group that was the first at that time; the others
    get the state from it through torchft.

    Args:
        config: As for :class:`TieredCheckpointManager`.
        parts: What torchtitan's trainer hands to its manager, with ``ft_manager``.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(TorchFTCheckpointManager.Config):
        """torchtitan's, and where tieredckpt is configured."""

        tieredckpt: str = "tieredckpt.yaml"
        """Configuration of tieredckpt: the path of a YAML file."""

        unsafe_pickle: bool = False
        """Let a load unpickle anything that a checkpoint contains."""

        abandon_newer: bool = False
        """After checkpoint.load_step, saves may abandon what is newer than that step."""

    def _load(self, step: int = -1) -> bool:
        if self.enable_ft_dataloader_checkpoints:
            self._ft_load()
        return super()._load(step)

    def _ft_load(self) -> None:
        self._restore(self.ft_states, self._ft_folder(), None)
