"""Values of which each rank has its own: random states, data-loader positions, parameter groups.

DCP keeps one of the values that ranks save under one name, and loads it into all of them.
``per_rank`` gives each value a name of its own, and no rank loads another rank's value.
"""

from __future__ import annotations

import io
import random
from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from tieredckpt.dcp.state.per_rank_keys import (
    COUNT_MAX,
    Coordinate,
    Found,
    is_valid_kind,
    launched_ranks,
    make_leaf,
    read_leaf,
)
from tieredckpt.dcp.state.planner import safe_loads, warn_if_refused
from tieredckpt.dcp.state.values import SafeGlobal
from tieredckpt.errors import IntegrityError, UsageError


class StateHolder(Protocol):
    """Anything with a state: an optimizer, a data loader, a sampler, ``RandomState``."""

    def state_dict(self) -> Any: ...
    def load_state_dict(self, state: Any, /) -> Any: ...


_Obj = TypeVar("_Obj", bound=StateHolder)
Reshard = Callable[[list[Any]], Any]
CoordinateLike = tuple[str, int, int] | DeviceMesh | None


def per_rank(
    obj: _Obj,
    *,
    coordinate: CoordinateLike = None,
    reshard: Reshard | None = None,
    allow: Sequence[SafeGlobal] = (),
) -> PerRank[_Obj]:
    """Save and load ``obj`` for each rank on its own: a ``Stateful`` for the state's top level.

    ``state = {"model": ..., "rng": tieredckpt.per_rank(tieredckpt.RandomState())}``

    With as many coordinates as at the save, each gets its own value back. With another number the
    result of ``reshard`` is loaded, or the load raises: no rank ever gets another one's value.

    Args:
        obj: Has ``state_dict()`` and ``load_state_dict(state)``. The state may be anything that
            ``torch.save`` takes; its tensors come back on the CPU.
        coordinate: Identifies the value, the same at every save: ``(kind, index, size)``
            like ``("stage", 0, 4)``, or a mesh (``mesh["dp"]``); None: the rank among all ranks.
            Ranks with equal coordinates must have equal values: a save where they differ raises.
        reshard: Called on every rank with all saved states, ordered by index, if their number is
            not today's; returns the state for this rank, or None to leave ``obj`` alone.
        allow: Further types that the state may contain.

    Raises:
        UsageError: ``obj`` has no state, or the coordinate is not one.
    """
    return PerRank(obj, coordinate, reshard, allow)


class PerRank(Generic[_Obj]):
    """A value of each rank's own, made by :func:`per_rank`."""

    def __init__(
        self,
        obj: _Obj,
        coordinate: CoordinateLike,
        reshard: Reshard | None,
        allow: Sequence[SafeGlobal],
    ) -> None:
        for method in ("state_dict", "load_state_dict"):
            if not callable(getattr(obj, method, None)):
                raise UsageError(f"per_rank needs an object with {method}(), not {obj!r:.200}")
        if reshard is not None and not callable(reshard):
            raise UsageError(f"reshard must be a function of the saved states: {reshard!r:.200}")
        self.obj = obj
        """The object itself."""
        self._given = coordinate if isinstance(coordinate, DeviceMesh) else _checked(coordinate)
        self._reshard = reshard
        self._allow = tuple(allow)
        self._checked_loadable = False

    @property
    def coordinate(self) -> Coordinate:
        """Kind, index and size, as of now."""
        return resolve_coordinate(self._given)

    def state_dict(self) -> dict[str, bytes]:
        """The value as it is now, as one leaf under its coordinate."""
        coordinate = self.coordinate
        stream = io.BytesIO()
        torch.save(self.obj.state_dict(), stream)
        if not self._checked_loadable:
            self._checked_loadable = True
            warn_if_refused(f"per_rank, {coordinate}", stream.getbuffer(), self._allow)
        return {coordinate.key: make_leaf(coordinate, stream.getvalue())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the own value into the object, or the result of ``reshard`` for all.

        Raises:
            UsageError: The checkpoint has no value for this coordinate, and there is no ``reshard``
                or not all saved values were read; or the value contains a type that is refused.
            IntegrityError: A stored value is not one of this release.
        """
        own = self.coordinate
        given = state.get(own.key)
        if given is None:
            raise UsageError(f"there is no value for {own}, only {_some(state)}: {_HOW}")
        found = given if isinstance(given, Found) else Found(own, {own.key: given})
        saved = {key: _read(key, leaf) for key, leaf in found.leaves.items()}
        sizes = {coordinate.size for coordinate, _ in saved.values()}
        mine = saved.get(own.key)
        if sizes == {own.size} and mine is not None:
            self.obj.load_state_dict(self._loads(own.key, mine[1], found))
            return
        if found is not given:  # another planner read the own leaf only
            raise UsageError(
                f"the checkpoint was saved with {mine[0] if mine else sizes}, but this is {own}: "
                f"DCP's own planner reads one value only. {_HOW}"
            )
        self._load_resharded(own, saved, found)

    def _load_resharded(
        self, own: Coordinate, saved: dict[str, tuple[Coordinate, memoryview]], found: Found
    ) -> None:
        ordered = sorted(saved.items(), key=lambda each: each[1][0].index)
        what = f"{len(ordered)} of kind {own.kind!r}"
        first = ordered[0][1][0]
        whole = [Coordinate(own.kind, index, first.size) for index in range(len(ordered))]
        if len(ordered) != first.size or [each for _, (each, _) in ordered] != whole:
            names = ", ".join(str(each) for _, (each, _) in ordered[:10])
            raise UsageError(
                f"the checkpoint does not have all per-rank values, only {names}; this is {own}: "
                "give each value that is saved a coordinate among those that are saved"
            )
        if self._reshard is None:
            raise UsageError(
                f"the checkpoint has {what}, but this is {own}: pass reshard= to per_rank, a "
                "function that makes this rank's state of the list of all saved ones (or returns "
                "None, to leave it as it is)"
            )
        result = self._reshard([self._loads(key, data, found) for key, (_, data) in ordered])
        if result is not None:
            self.obj.load_state_dict(result)

    def _loads(self, key: str, stream: memoryview, found: Found) -> Any:
        return safe_loads(
            key,
            io.BytesIO(stream),
            (*found.allow, *self._allow),
            unsafe_pickle=found.unsafe_pickle,
            device="cpu",
        )

    def __reduce__(self) -> Any:
        raise UsageError(
            "a per_rank object was about to be pickled as a whole: DCP looks for Stateful objects "
            "on the top level of the state only, so put it there (or call its state_dict() "
            "yourself)"
        )


_HOW = "load with engine.load, or dcp.load(..., planner=tieredckpt.SafeLoadPlanner())"


def _some(state: dict[str, Any]) -> str:
    return ", ".join(map(repr, sorted(map(str, state))[:5])) or "nothing"


def _read(key: str, leaf: object) -> tuple[Coordinate, memoryview]:
    read = read_leaf(leaf)
    if read is None or read[0].key != key.rpartition(".")[2]:
        raise IntegrityError(
            f"the value stored as {key!r} is no per-rank value that this release can read"
        )
    return read


def resolve_coordinate(given: CoordinateLike | Coordinate) -> Coordinate:
    """What a ``coordinate`` argument means now. Raises UsageError: it is none."""
    if isinstance(given, DeviceMesh):
        return _mesh_coordinate(given)
    return _checked(given) or _world_coordinate()


def _checked(given: object) -> Coordinate | None:
    if given is None or isinstance(given, Coordinate):
        return given
    if isinstance(given, tuple) and len(given) == 3:
        kind, index, size = given
        numbers = type(index) is int and type(size) is int
        if is_valid_kind(kind) and numbers and 0 <= index < size <= COUNT_MAX:
            return Coordinate(kind, index, size)
    raise UsageError(
        f"coordinate={given!r:.200} is not (kind, index, size) with a kind of letters, digits, '_' "
        "and '-' and 0 <= index < size, nor a DeviceMesh"
    )


def _world_coordinate() -> Coordinate:
    if dist.is_available() and dist.is_initialized():
        return Coordinate("rank", dist.get_rank(), dist.get_world_size())
    if launched_ranks() > 1:
        raise UsageError(
            "WORLD_SIZE is above 1, but there is no process group for this rank's coordinate: "
            "call init_process_group first, or pass coordinate=(kind, index, size)"
        )
    return Coordinate("rank", 0, 1)


def _mesh_coordinate(mesh: DeviceMesh) -> Coordinate:
    at = mesh.get_coordinate()
    if at is None:
        raise UsageError(f"this rank is not in the mesh {mesh} that is its per_rank coordinate")
    names = mesh.mesh_dim_names
    if not names:
        raise UsageError("a mesh that is a per_rank coordinate needs mesh_dim_names")
    kind = "-".join(names)
    if not is_valid_kind(kind):
        raise UsageError(f"the mesh dimension {kind!r} cannot be part of a key")
    return Coordinate(kind, int(np.ravel_multi_index(at, mesh.shape)), mesh.size())


class RandomState:
    """The global generators of Python, NumPy, torch's CPU and this process's current CUDA device.

    Use it as ``tieredckpt.per_rank(tieredckpt.RandomState())``. After a load each generator
    continues with exactly the numbers that it would have given. Generators that are separate
    objects (``torch.Generator``, ``np.random.Generator``) are not included.

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
        # A call to a CUDA that is not in use yet would make a context on the device.
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
