"""The random generators of a process, as something that can be saved."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from tieredckpt.errors import UsageError


class RandomState:
    """The global generators of Python, NumPy, torch's CPU and this process's current CUDA device.

    Use it as ``tieredckpt.per_rank(tieredckpt.RandomState())``. After a load each generator goes on
    with exactly the numbers that it would have given. Generators that are objects of their own
    (``torch.Generator``, ``np.random.Generator``) are not included.

    Args:
        cuda: Include the CUDA generator, if CUDA is in use in this process at the time.
    """

    def __init__(self, *, cuda: bool = True) -> None:
        self._cuda = cuda

    def state_dict(self) -> dict[str, Any]:
        """The states; draws nothing."""
        state = {
            "python": random.getstate(),
            "numpy": np.random.get_state(),
            "torch": torch.get_rng_state(),
        }
        # Asking a CUDA that nobody has used yet would make a context on the device.
        if self._cuda and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            state["cuda"] = torch.cuda.get_rng_state()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the generators.

        Raises:
            UsageError: There is a state of a CUDA generator, but no CUDA.
        """
        cuda = state.get("cuda") if self._cuda else None
        if cuda is not None and not torch.cuda.is_available():
            raise UsageError(
                "the state has a CUDA generator, but there is no CUDA here: leave it out with "
                "RandomState(cuda=False)"
            )
        random.setstate(state["python"])
        np.random.set_state(state["numpy"])
        torch.set_rng_state(state["torch"])
        if cuda is not None:
            torch.cuda.set_rng_state(cuda)
