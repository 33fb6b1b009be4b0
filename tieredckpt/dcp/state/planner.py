"""A load planner that does not run code in a checkpoint.

DCP turns every value that is not a tensor into a ``torch.save`` stream, and its own planner reads
it back with ``weights_only=False``. This one rebuilds it with :mod:`tieredckpt.dcp.state.values`.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from os.path import commonprefix
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint._sharded_tensor_utils import _flatten_sharded_tensors
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import (
    _create_read_item_for_byteio,
    _init_state_dict,
)

from tieredckpt.dcp.state.items import check_kind
from tieredckpt.dcp.state.per_rank_keys import Found, coordinate_of, parse_key, saved_places
from tieredckpt.dcp.state.value_archive import BadValueError, NotArchiveError
from tieredckpt.dcp.state.values import RefusedTypesError, SafeGlobal, rebuild
from tieredckpt.errors import UsageError

CHECKED_KEYS_MAX = 10_000
"""Most keys whose values are checked, as each is remembered; further ones are not checked."""


class SafeLoadPlanner(DefaultLoadPlanner):
    """DCP's default planner, but non-tensor values are rebuilt without running their code.

    Args:
        allow: Further types that loaded values may contain.
        unsafe_pickle: Read everything, as DCP does. Then anyone who can write the checkpoint can
            run code in this process.
        flatten_state_dict: As in DCP's planner.
        flatten_sharded_tensors: As in DCP's planner.
        allow_partial_load: Leave keys alone that are missing in the checkpoint (they are then in
            :attr:`missing_keys`) instead of raising.
    """

    missing_keys: tuple[str, ...] = ()
    """Flattened keys of the state that the checkpoint does not have; known after planning."""
    prefix_text = ""
    """For messages, a prefix that explains most missing keys; known after planning."""

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
        self._allow = tuple(allow)
        self._unsafe_pickle = unsafe_pickle
        self._per_rank: dict[str, tuple[Found, str]] = {}

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Set the state, as DCP does, but leave values of types unknown to DCP as they are.

        Raises:
            UsageError: It holds tensors on the meta device, and there is no process group: DCP asks
                the group for the device to make them on.
        """
        super().set_up_planner({}, metadata, is_coordinator)  # with a state, DCP makes those None
        self.original_state_dict = state_dict
        if self.flatten_sharded_tensors:
            state_dict = _flatten_sharded_tensors(state_dict)
        if self.flatten_state_dict:
            state_dict, self.mappings = flatten_state_dict(state_dict)
        self.state_dict = state_dict
        for key, value in state_dict.items():
            if isinstance(value, torch.Tensor) and value.device.type == "meta":
                if not (dist.is_available() and dist.is_initialized()):
                    text = f"{key!r} is on the meta device: call model.to_empty(device=...) before"
                    raise UsageError(text, state_key=key)
                made = {key: value}
                _init_state_dict(made)
                self._put(key, made[key])

    def _put(self, key: str, value: Any) -> None:
        """Put a value into the state, the caller's and the flattened one."""
        self.state_dict[key] = value
        *above, last = self.mappings.get(key, (key,))
        into: Any = self.original_state_dict
        for part in above:
            into = into[_own_key(into, part)]
        into[_own_key(into, last)] = value

    def create_local_plan(self) -> LoadPlan:
        """Plan as DCP does, and record the keys that are missing in the checkpoint.

        Of per-rank values the own one is asked for, or all if they were saved with another number.
        The plan's ``planner_data`` has the error for a state whose tensors are all missing.

        Raises:
            UsageError: Per-rank values were saved under another kind of coordinate, or a key is a
                tensor in the checkpoint or in the state, and not in both, or a tensor of the state
                is of a kind that cannot be loaded into.
        """
        assert self.metadata is not None
        stored = self.metadata.state_dict_metadata
        for key, value in self.state_dict.items():
            saved = isinstance(stored.get(key), TensorStorageMetadata)
            asked = isinstance(value, torch.Tensor) or hasattr(value, "__create_chunk_list__")
            if key in stored and saved != asked:
                there, here = (("a plain value", "a tensor")[kind] for kind in (saved, asked))
                text = f"{key!r} is {there} in the checkpoint and {here} in the state"
                raise UsageError(f"{text}: load into {there}, then convert it", state_key=key)
            if saved and isinstance(value, torch.Tensor):
                check_kind(key, value)
        others = self._others_of_per_rank(stored)
        # DCP's planner would ask for the own value, which may not be there.
        self.state_dict = {k: v for k, v in self.state_dict.items() if k not in others}
        try:
            plan: LoadPlan = super().create_local_plan()
        except RuntimeError as error:
            if "Missing key" in str(error):
                missing = [key for key in self.state_dict if key not in stored]
                error.add_note(
                    f"{_prefix_text(missing, stored)}the state has more than was saved: load what "
                    "was saved, or call engine.load(..., strict=False), which leaves the rest of "
                    "the state as it is"
                )
            raise
        self.missing_keys = tuple(key for key in self.state_dict if key not in stored)
        tensors = [k for k in self.missing_keys if isinstance(self.state_dict[k], torch.Tensor)]
        if tensors:
            self.prefix_text = _prefix_text(tensors, stored)
            lost = f"{self.prefix_text}{len(tensors)} tensor(s) of the state are not "
            lost += f"in the checkpoint, among them {tensors[0]!r}: load into what was saved"
            plan = replace(plan, planner_data=f"no tensor would be restored: {lost}")
        wanted = [MetadataIndex(name) for names in others.values() for name in names]
        items = [
            _create_read_item_for_byteio(each, 0, each, 0, 0)  # type: ignore[no-untyped-call]
            for each in wanted
        ]
        return replace(plan, items=[*plan.items, *items])

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """As DCP does.

        Raises:
            UsageError: No rank would restore a tensor, and some rank's state holds tensors.
        """
        lost = [plan.planner_data for plan in global_plan if plan.planner_data is not None]
        items = (item for plan in global_plan for item in plan.items)
        if lost and all(item.type == LoadItemType.BYTE_IO for item in items):
            raise UsageError(lost[0])
        return list(super().create_global_plan(global_plan))

    def _others_of_per_rank(self, stored: Iterable[str]) -> dict[str, list[str]]:
        """Own keys of per-rank values of which all saved ones are needed, and those."""
        self._per_rank = {}
        leaves = {key: coordinate_of(value) for key, value in self.state_dict.items()}
        own = {key: coordinate for key, coordinate in leaves.items() if coordinate is not None}
        if not own:
            return {}
        places = saved_places(stored)
        needed: dict[str, list[str]] = {}
        for key, coordinate in own.items():
            parsed = parse_key(key)
            if parsed is None:
                continue  # a leaf under another key is a value like any other
            kinds = places.get(parsed[0], {})
            indices = kinds.get(coordinate.kind, {})
            if kinds and not indices:
                raise UsageError(
                    f"{key!r} is asked for by {coordinate.kind!r}, but was saved by "
                    f"{', '.join(map(repr, kinds))}: use the coordinate of the save",
                    state_key=key,
                )
            names = [key]
            if indices and indices.keys() != set(range(coordinate.size)):
                names = needed[key] = [name for _, name in sorted(indices.items())]
            found = Found(coordinate, allow=self._allow, unsafe_pickle=self._unsafe_pickle)
            for name in names:
                self._per_rank[name] = found, key
        return needed

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Read one value and put it into the state.

        Raises:
            UsageError: The value contains a type that is not allowed, or no writer made it.
        """
        key = read_item.dest_index.fqn
        loaded = safe_loads(key, value, self._allow, unsafe_pickle=self._unsafe_pickle)
        if key in self._per_rank:
            found, own = self._per_rank[key]
            found.leaves[key.rpartition(".")[2]] = loaded
            key, loaded = own, found
        self._put(key, loaded)


def _own_key(container: Any, part: str | int) -> Any:
    """The key of a container of which DCP's path holds the text."""
    if isinstance(container, list) or part in container:
        return part
    likely = [int(part)] if str(part).isdecimal() else []
    return next(key for key in (*likely, *container) if str(key) == part and key in container)


def _prefix_text(missing: Sequence[str], stored: Mapping[str, object]) -> str:
    """The message for a prefix that most ``missing`` keys of a state have or miss, or ""."""
    probe = max(missing, key=lambda key: key.count("."))  # the fewest other keys resemble it
    tried: set[str] = set()
    for name in stored:
        short, long = sorted((probe, name), key=len)
        at = commonprefix([short, long]).rfind(".") + 1  # noqa: RUF071  (of texts, not paths)
        prefix = long[at : at + len(long) - len(short)]
        fits = prefix.endswith(".") and long.endswith(short[at:])
        if not fits or prefix in tried or len(tried) == _PREFIXES_MAX:
            continue
        too_many, tried = long == probe, tried | {prefix}
        keys, others = (missing, stored) if too_many else (stored, missing)
        found = {f".{key}".replace(f".{prefix}", ".")[1:] for key in keys}.intersection(others)
        if 2 * len(found) > len(missing):
            longer, shorter = ("state", "checkpoint") if too_many else ("checkpoint", "state")
            return (
                f"the keys of the {longer} have the prefix {prefix!r}, which those of the "
                f"{shorter} do not have ({name!r} was saved, {probe!r} is asked for): save and "
                "load the state of the model inside the wrapper (torch.compile adds '_orig_mod.', "
                "DDP 'module.'), or rename the keys; "
            )
    return ""


_PREFIXES_MAX = 8
"""How many prefixes are tried; each costs a look at all keys."""


def safe_loads(
    key: str,
    value: io.BytesIO,
    allow: Sequence[SafeGlobal] = (),
    *,
    unsafe_pickle: bool = False,
    device: str | None = None,
) -> Any:
    """The value that ``torch.save`` wrote; no function in it is called, see :func:`rebuild`.

    Args:
        key: Of the value, for messages.
        value: The stream.
        allow: Types that it may contain besides plain data, arrays and tensors.
        unsafe_pickle: Unpickle anything.
        device: Where its tensors shall be; None: where they were.

    Raises:
        UsageError: It contains a type that is not allowed, or no writer made it.
    """
    if unsafe_pickle:
        return torch.load(value, map_location=device, weights_only=False)
    try:
        # Not its buffer: an error may keep views of that, of which Python 3.13 warns at the end.
        return rebuild(memoryview(value.getvalue()), allow, device)
    except RefusedTypesError as error:
        raise UsageError(
            f"the value of {key!r} contains {error}, which is not loaded by default because "
            f"unpickling it may run code: {_REMEDY}",
            state_key=key,
            types=str(error),
        ) from error
    except BadValueError as error:
        raise UsageError(
            f"the value of {key!r} is refused ({error}): open the engine with unsafe_pickle=True "
            "if you trust the writer of the checkpoint",
            state_key=key,
        ) from error


_REMEDY = (
    "pass planner=SafeLoadPlanner(allow=[that type]) to engine.load, or open the engine with "
    "unsafe_pickle=True if you trust the writer of the checkpoint"
)


def warn_if_refused(key: str, data: memoryview, allow: Sequence[SafeGlobal] = ()) -> None:
    """Warn of a value that is being saved and that ``engine.load`` would refuse by default.

    A warning at the first save is better than an error at the first restart.
    """
    if data[:2] != _ZIP or len(data) > _CHECKED_BYTES_MAX:
        return  # not written by torch.save: the planner that wrote it reads it
    try:
        rebuild(data, allow, "cpu")
    except NotArchiveError:
        return  # an archive, but not one of torch's
    except RefusedTypesError as error:
        warnings.warn(
            f"the value of {key!r} contains {error}, which engine.load will not load by default: "
            f"save plain values, or at the restart {_REMEDY}",
            stacklevel=2,
        )
    except BadValueError as error:
        warnings.warn(
            f"engine.load will refuse the value of {key!r} by default ({error}): save plain "
            "values, or load with unsafe_pickle=True",
            stacklevel=2,
        )


def warn_of_refused(checked: set[str], keys: Iterable[str], blobs: Iterable[memoryview]) -> None:
    """:func:`warn_if_refused` once per key of this process; it costs as much as a load."""
    if len(checked) >= CHECKED_KEYS_MAX:
        return
    for key, blob in zip(keys, blobs, strict=True):
        if key not in checked:
            checked.add(key)
            warn_if_refused(key, blob)


_ZIP = b"PK"
_CHECKED_BYTES_MAX = 16 << 20
