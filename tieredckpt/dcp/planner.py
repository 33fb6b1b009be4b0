"""A load planner that does not run code which a checkpoint carries.

DCP turns every value that is not a tensor into a ``torch.save`` stream, and its own planner reads
it back with ``weights_only=False``. This one reads with ``weights_only=True`` and an allow-list of
types that only hold data.
"""

from __future__ import annotations

import datetime
import io
import pathlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import _weights_only_unpickler
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.serialization import get_safe_globals, safe_globals

from tieredckpt.errors import UsageError

# Named through torch: nothing of ours pickles, and a test holds us to that.
_UnpicklingError: type[Exception] = vars(_weights_only_unpickler)["UnpicklingError"]

SafeGlobal = Callable[..., Any] | tuple[Callable[..., Any], str]
"""A type or function that loaded values may name; or it and the name it was saved under."""


def _numpy_globals() -> list[SafeGlobal]:
    reconstruct = np.zeros(0).__reduce__()[0]
    scalar = np.float64(0).__reduce__()[0]
    assert callable(reconstruct)
    assert callable(scalar)
    found: list[SafeGlobal] = [np.ndarray, np.dtype]
    # NumPy 2 renamed the module; checkpoints written under either name must load under both.
    for module in ("numpy.core.multiarray", "numpy._core.multiarray"):
        found.append((reconstruct, f"{module}._reconstruct"))
        found.append((scalar, f"{module}.scalar"))
    found.extend(kind for kind in vars(np.dtypes).values() if isinstance(kind, type))
    return found


SAFE_GLOBALS: tuple[SafeGlobal, ...] = (
    *_numpy_globals(),
    *(bool, int, float, str, bytes, list, tuple, dict, frozenset, slice, range),
    *(datetime.datetime, datetime.date, datetime.time, datetime.timedelta, datetime.timezone),
    *(pathlib.PurePosixPath, pathlib.PosixPath),
)
"""What may appear in a value besides what ``weights_only=True`` accepts anyway."""


@contextmanager
def _allowing(wanted: Sequence[SafeGlobal]) -> Iterator[None]:
    # torch's context manager removes at exit what it was given, also what the user had added for
    # good; so it is given only what is not there yet.
    present = set(get_safe_globals())
    with safe_globals([item for item in wanted if item not in present]):
        yield


class SafeLoadPlanner(DefaultLoadPlanner):
    """DCP's default planner, reading non-tensor values with ``weights_only=True``.

    Args:
        allow: Further types that loaded values may contain.
        unsafe_pickle: Read everything, as DCP does: whoever can write the checkpoint can then run
            code in this process.
        flatten_state_dict: As in DCP's planner.
        flatten_sharded_tensors: As in DCP's planner.
        allow_partial_load: Leave keys alone that the checkpoint lacks (they are then in
            :attr:`missing_keys`) instead of raising.
    """

    missing_keys: tuple[str, ...] = ()
    """Flattened keys of the state that the checkpoint does not have; known after planning."""

    def __init__(
        self,
        *,
        allow: Sequence[SafeGlobal] = (),
        unsafe_pickle: bool = False,
        flatten_state_dict: bool = True,
        flatten_sharded_tensors: bool = True,
        allow_partial_load: bool = False,
    ) -> None:
        super().__init__(flatten_state_dict, flatten_sharded_tensors, allow_partial_load)
        self._allow = (*SAFE_GLOBALS, *allow)
        self._unsafe_pickle = unsafe_pickle

    def create_local_plan(self) -> LoadPlan:
        """Plan as DCP does, and note which keys the checkpoint lacks."""
        plan: LoadPlan = super().create_local_plan()
        assert self.metadata is not None
        stored = self.metadata.state_dict_metadata
        self.missing_keys = tuple(key for key in self.state_dict if key not in stored)
        return plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Read one value and put it into the state.

        Raises:
            UsageError: The value contains a type that is not on the allow-list.
        """
        key = read_item.dest_index.fqn
        loaded = self._loads(key, value)
        if self.flatten_state_dict:
            set_element(self.original_state_dict, self.mappings[key], loaded)
        else:
            self.state_dict[key] = loaded

    def _loads(self, key: str, value: io.BytesIO) -> Any:
        if self._unsafe_pickle:
            return torch.load(value, weights_only=False)
        try:
            with _allowing(self._allow):
                return torch.load(value, weights_only=True)
        except _UnpicklingError as error:
            names = _refused_globals(value, self._allow)
            raise UsageError(
                f"the value of {key!r} contains {names}, which is not loaded by default because "
                f"unpickling it may run code: {_REMEDY}",
                state_key=key,
                types=names,
            ) from error


_REMEDY = (
    "pass planner=SafeLoadPlanner(allow=[that type]) to engine.load, or open the engine with "
    "unsafe_pickle=True if you trust who wrote the checkpoint"
)


def warn_if_refused(key: str, data: memoryview) -> None:
    """Warn of a value that is being saved and that ``engine.load`` would refuse by default.

    To hear of it at the first save is better than at the first restart.
    """
    if data[:2] != _ZIP or len(data) > _CHECKED_BYTES_MAX:
        return  # not written by torch.save: whose planner wrote it reads it
    value = io.BytesIO(data)
    try:
        with _allowing(SAFE_GLOBALS):
            torch.load(value, weights_only=True)
    except _UnpicklingError:
        names = _refused_globals(value, SAFE_GLOBALS)
        warnings.warn(
            f"the value of {key!r} contains {names}, which engine.load will not load by default: "
            f"save plain values, or at the restart {_REMEDY}",
            stacklevel=2,
        )
    except (RuntimeError, ValueError, EOFError, OSError, LookupError, AttributeError):
        return  # an archive, but not one of torch's


_ZIP = b"PK"
_CHECKED_BYTES_MAX = 16 << 20


def _refused_globals(value: io.BytesIO, allow: Sequence[SafeGlobal]) -> str:
    value.seek(0)
    try:
        with _allowing(allow):
            names = torch.serialization.get_unsafe_globals_in_checkpoint(value)
    except ValueError:  # not in the format that torch.save has written since 1.6
        names = []
    return ", ".join(sorted(names)) or "something that weights_only=True does not accept"
