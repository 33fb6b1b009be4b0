"""What identifies a loader: a digest of its settings, data set and functions, as far as they show.

Two loaders that differ should have different digests, or one would get the other's batches. Two
that are equal, in two processes, should have equal digests, or they would share nothing, which
costs time and memory only. So what may make a difference counts.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sized
from contextlib import suppress
from functools import partial
from itertools import chain
from os import PathLike, fspath
from types import BuiltinMethodType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from tieredckpt.format.digest import Hasher, digest

MAX_VALUES = 10_000
"""So many values count. A list of plain values is one."""
MAX_DEPTH = 24
_SAMPLES, _SAMPLE_BYTES = 64, 1 << 16
"""Of an array of more than 4 MiB, so many parts of so many bytes count."""
_PLAIN = (bool, int, float, complex, str, bytes, type(None), range)
_OF_LOADERS = (
    "dataset", "sampler", "batch_sampler", "collate_fn", "worker_init_fn", "generator",
    "batch_size", "drop_last", "num_workers",
)  # fmt: skip
_METHODS = ("__call__", "__getitem__", "__getitems__", "__iter__", "__len__", "__next__")


def identify(thing: Any) -> bytes:
    """The digest of a loader, a function, a data set or anything else, 16 bytes.

    Attributes count, private ones too, and theirs, to a depth of 24 and up to 10,000 values;
    functions by their code, defaults, closures and the objects that they are bound to; tensors and
    arrays by type, shape and content, of large ones samples; generators by what they draw. Of other
    objects without attributes type, length and ``repr`` count. Nothing is consumed.
    """
    return digest(repr(_Walk().tree(thing, 0)).encode())


class _Walk:
    def __init__(self) -> None:
        self._left = MAX_VALUES
        self._seen: dict[int, tuple[int, Any]] = {}
        """By id, the number of an object, and the object: its id is not to be used again."""

    def tree(self, thing: Any, depth: int) -> Any:
        """Lists, numbers and text that differ where the values differ."""
        kind = type(thing)
        name = f"{kind.__module__}.{kind.__qualname__}"
        if kind in _PLAIN:
            return [name, _short(repr(thing))]
        self._left -= 1
        if self._left < 0 or depth > MAX_DEPTH:
            return name
        if id(thing) in self._seen:
            return ["seen", self._seen[id(thing)][0]]
        self._seen[id(thing)] = len(self._seen), thing
        if isinstance(thing, list | tuple) and all(type(each) in _PLAIN for each in thing):
            return [name, _short(repr(thing))]
        found = [name, *_content(thing)]
        for part in _parts(thing):
            if self._left <= 0:
                break
            found.append(self.tree(part, depth + 1))
        return found


def _short(text: str) -> str:
    return text if len(text) < 64 else digest(text.encode()).hex()


def _content(thing: Any) -> list[Any]:
    """What counts of an object besides its parts."""
    if isinstance(thing, torch.Tensor):
        if thing.layout is not torch.strided or thing.is_meta or thing.is_quantized:
            return [str(thing.dtype), str(thing.shape)]
        thing = thing.detach().resolve_conj().resolve_neg().cpu().contiguous()
        shape = str(thing.shape)
        return [str(thing.dtype), shape, *_content(thing.reshape(-1).view(torch.uint8).numpy())]
    if isinstance(thing, np.ndarray) and not thing.dtype.hasobject:
        return [str(thing.dtype), thing.shape, _sample(thing)]
    if isinstance(thing, type | ModuleType):
        return [thing.__name__]
    if isinstance(thing, torch.Generator):
        return [thing.initial_seed()]
    if isinstance(thing, set | frozenset) and all(type(each) in _PLAIN for each in thing):
        return [_short(repr(sorted(map(repr, thing))))]
    found: list[Any] = []
    with suppress(Exception):  # it may not be known
        found += [len(thing)] if isinstance(thing, Sized) else []
    with suppress(Exception):
        if not _attributes(thing) and " at 0x" not in (text := repr(thing)):
            found.append(_short(text))
    return found


def _sample(array: np.ndarray[Any, Any]) -> str:
    """A digest of the bytes of an array, which may be mapped and of any size."""
    hasher, flat = Hasher(), array.reshape(-1) if array.flags.c_contiguous else array.flat
    count = max(1, _SAMPLE_BYTES // max(1, array.itemsize))
    starts = range(0, array.size, max(count, array.size // _SAMPLES))
    for start in starts:
        hasher.update(np.ascontiguousarray(flat[start : start + count]).view(np.uint8).data)
    return hasher.digest().hex()


def _parts(thing: Any) -> Iterable[Any]:
    """The values of which an object consists, in an order that does not depend on the process."""
    if isinstance(thing, np.ndarray | torch.Tensor | torch.Generator | type | ModuleType):
        return ()
    if isinstance(thing, DataLoader):
        return [getattr(thing, name, None) for name in _OF_LOADERS]
    if isinstance(thing, FunctionType):
        cells = [cell.cell_contents for cell in thing.__closure__ or () if _is_full(cell)]
        return [thing.__qualname__, thing.__code__, thing.__defaults__, thing.__kwdefaults__, cells]
    if isinstance(thing, CodeType):
        return [thing.co_code, thing.co_names, thing.co_consts]
    if isinstance(thing, MethodType):
        return [thing.__func__, thing.__self__]
    if isinstance(thing, BuiltinMethodType):
        return [thing.__qualname__, thing.__self__]
    if isinstance(thing, partial):
        return [thing.func, thing.args, thing.keywords]
    if isinstance(thing, PathLike):
        return [fspath(thing)]
    if isinstance(thing, random.Random):
        return [thing.getstate()]
    if isinstance(thing, np.random.Generator):
        return [thing.bit_generator.state]
    elements: Iterable[Any] = ()
    if isinstance(thing, Mapping):
        elements = chain.from_iterable(thing.items())
    elif isinstance(thing, list | tuple):
        elements = thing
    methods = [getattr(type(thing), name, None) for name in _METHODS]
    own = [each for each in methods if isinstance(each, FunctionType)]
    return chain(elements, chain.from_iterable(sorted(_attributes(thing).items())), own)


def _is_full(cell: Any) -> bool:
    with suppress(ValueError):
        return cell.cell_contents is cell.cell_contents
    return False


def _attributes(thing: Any) -> dict[str, Any]:
    found: dict[str, Any] = dict(getattr(thing, "__dict__", {}))
    for each in type(thing).__mro__:
        slots = each.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            with suppress(AttributeError):  # it is not set
                found[name] = getattr(thing, name)
    return found
