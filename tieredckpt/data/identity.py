"""What identifies a loader: a digest of its settings, data set and functions, as far as they show.

Two loaders that differ should have different digests, or one would get the other's batches. Two
that are equal, in two processes, should have equal digests, or they would share nothing, which
costs time and memory only. So what may make a difference counts, and what cannot be seen is named.
"""

from __future__ import annotations

import logging
import marshal
import random
import sys
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from itertools import chain
from os import PathLike, fspath
from types import BuiltinMethodType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader

from tieredckpt.format.digest import Hasher, digest

MAX_VALUES = 20_000
"""Objects that are looked at."""
_SAMPLES, _SAMPLE_BYTES = 64, 1 << 16
"""Of an array of more than 4 MiB, so many parts of so many bytes count."""
_SCALARS = (bool, int, float, complex, str, bytes)
_BY_TYPE = {
    "_thread",
    "threading",
    "_multiprocessing",
    "multiprocessing.synchronize",
    "weakref",
    "_abc",
}
"""Modules of locks, events and references, which hold no data."""
_OF_LOADERS = (
    "collate_fn", "worker_init_fn", "generator", "batch_size", "drop_last", "num_workers",
    "sampler", "batch_sampler", "dataset",
)  # fmt: skip

_NO_SETTINGS = set(vars(DataLoader(range(1))))  # type: ignore[arg-type]


class Identity(NamedTuple):
    """Of a loader.

    Attributes:
        digest: 16 bytes.
        unseen: Where something is that may differ unseen, and its type; "": nothing is.
    """

    digest: bytes
    unseen: str


def identify(thing: Any) -> Identity:
    """The identity of a loader, functions, a data set or anything else. Consumes nothing.

    What counts: attributes, private ones too, and theirs; plain data, nested and as a whole; the
    content of tensors and arrays, of large ones samples; the states of generators; of functions and
    classes their code, what that names, defaults, closures and bound objects. Code of installed
    packages, modules, loggers and locks count by their names.
    """
    found: list[Any] = []
    unseen = ""
    seen: dict[int, tuple[int, Any]] = {}  # by id; the object, so that its id is not used again
    queue: deque[tuple[str, Any]] = deque([("", thing)])
    while queue:
        # Breadth first: what is near the loader counts before the depths of a data set.
        path, each = queue.popleft()
        name = f"{type(each).__module__}.{type(each).__qualname__}"
        if len(found) == MAX_VALUES:
            unseen = unseen or f"{path or 'it'}: more than {MAX_VALUES} objects"
            break
        if id(each) in seen:
            found.append([path, seen[id(each)][0]])
            continue
        seen[id(each)] = len(found), each
        try:
            content, parts = _seen_of(each)
        except Exception:  # noqa: BLE001  of foreign code: it cannot be seen
            content, parts = None, {}
        if content is None:
            unseen = unseen or f"{path.removeprefix('.') or 'it'} is a {name}"
        found.append([path, name, content])
        queue.extend((f"{path}.{key}", part) for key, part in parts.items())
    return Identity(digest(repr(found).encode("utf-8", "backslashreplace")), unseen)


def _seen_of(thing: Any) -> tuple[Any, dict[str, Any]]:
    """What counts of an object itself, None if it cannot be seen, and the parts that count."""
    if thing is None or isinstance(thing, range | torch.dtype | torch.device):
        return repr(thing), {}
    if isinstance(thing, torch.Tensor | np.ndarray | np.generic):
        return _of_array(thing)
    if isinstance(thing, ModuleType):
        return thing.__name__, {}
    if isinstance(thing, logging.Logger):
        return thing.name, {}
    if type(thing) is object or type(thing).__module__ in _BY_TYPE:
        return "", {}
    if isinstance(thing, type | FunctionType | CodeType):
        return _of_code(thing)
    if isinstance(thing, torch.Generator):
        return _of_array(thing.get_state())
    if (state := _state_of(thing)) is not None:
        return "", {"state": state}
    content, parts = _of_content(thing)
    attributes = _attributes(thing)
    if isinstance(thing, DataLoader):
        # Of its own attributes those that decide what it loads: others change as it is used.
        own = set(attributes) - _NO_SETTINGS if _is_own(type(thing)) else ()
        attributes = {name: getattr(thing, name, None) for name in (*_OF_LOADERS, *sorted(own))}
    if content is None and not hasattr(thing, "__dict__") and not attributes:
        return _of_opaque(thing)
    kind = {"class": type(thing)} if _is_own(type(thing)) else {}
    return content or "", {**kind, **parts, **attributes}


def _of_opaque(thing: Any) -> tuple[Any, dict[str, Any]]:
    """Of an object that is not Python's: what pickle would store, else its text."""
    if not type(thing).__module__.startswith("pyarrow"):  # which would copy the whole table
        with suppress(TypeError):  # it cannot be pickled
            reduced = thing.__reduce_ex__(4)
            return "", {"reduced": reduced if isinstance(reduced, str) else list(reduced[:3])}
    text = repr(thing)
    return None if " at 0x" in text else _short(text.encode()), {}


def _of_content(thing: Any) -> tuple[Any, dict[str, Any]]:
    """Of plain data and containers."""
    if isinstance(thing, _SCALARS):
        plain: Any = next(kind for kind in _SCALARS if isinstance(thing, kind))
        return _short(repr(plain(thing)).encode()), {}
    if type(thing) in (list, tuple, dict):
        with suppress(ValueError):  # something in it is no plain data
            return _short(marshal.dumps(thing, 2)), {}  # version 2: the same bytes for equal values
    if isinstance(thing, set | frozenset):
        elements = sorted(map(repr, thing))
        return None if any(" at 0x" in each for each in elements) else elements, {}
    if isinstance(thing, dict):
        pairs = chain.from_iterable(thing.items())
        return len(thing), {str(number): each for number, each in enumerate(pairs)}
    if isinstance(thing, list | tuple | deque):
        return len(thing), {str(number): each for number, each in enumerate(thing)}
    if isinstance(thing, PathLike):
        return str(fspath(thing)), {}
    return None, {}


def _short(content: bytes) -> str:
    return content.hex() if len(content) < 16 else digest(content).hex()


def _state_of(thing: Any) -> Any:
    """Of a partial, a bound method or a generator of random numbers; None: it is none."""
    if isinstance(thing, partial):
        return [thing.func, thing.args, thing.keywords]
    if isinstance(thing, MethodType):
        return [thing.__func__, thing.__self__]
    if isinstance(thing, BuiltinMethodType):
        return [thing.__qualname__, thing.__self__]
    if isinstance(thing, random.Random):
        return thing.getstate()
    if isinstance(thing, np.random.RandomState):
        return thing.get_state(legacy=False)
    if isinstance(thing, np.random.Generator):
        return thing.bit_generator.state
    return thing.state if isinstance(thing, np.random.BitGenerator) else None


def _of_code(thing: type | FunctionType | CodeType) -> tuple[Any, dict[str, Any]]:
    if isinstance(thing, CodeType):
        consts = {str(number): each for number, each in enumerate(thing.co_consts)}
        return [_short(thing.co_code), thing.co_names], consts
    name = f"{thing.__module__}.{thing.__qualname__}"
    if not _is_own(thing):
        return name, {}
    if isinstance(thing, type):
        own = {key: _unwrapped(value) for key, value in vars(thing).items()}
        own = {k: v for k, v in own.items() if isinstance(v, FunctionType) or k[:2] != "__"}
        return name, {**own, "bases": list(thing.__bases__)}
    parts = {"code": thing.__code__, "defaults": [thing.__defaults__, thing.__kwdefaults__]}
    for cell_name, cell in zip(thing.__code__.co_freevars, thing.__closure__ or (), strict=False):
        with suppress(ValueError):  # it is not set yet
            parts[cell_name] = cell.cell_contents
    known = thing.__globals__
    parts |= {
        f"global {each}": known[each] for each in sorted(_named(thing.__code__)) if each in known
    }
    return name, parts


def _unwrapped(value: Any) -> Any:
    """The function of a method of a class."""
    if isinstance(value, property):
        return value.fget
    return value.__func__ if isinstance(value, staticmethod | classmethod) else value


def _named(code: CodeType) -> set[str]:
    inner = (each for each in code.co_consts if isinstance(each, CodeType))
    return set(code.co_names).union(*map(_named, inner))


def _is_own(thing: type | FunctionType) -> bool:
    """Whether it is of the script, and not of an installed package or of Python."""
    top = (thing.__module__ or "").partition(".")[0]
    if top in sys.stdlib_module_names and top != "__main__":
        return False
    file = getattr(sys.modules.get(thing.__module__ or ""), "__file__", None) or ""
    return not any(folder in file for folder in ("site-packages", "dist-packages"))


def _of_array(thing: Any) -> tuple[Any, dict[str, Any]]:
    if isinstance(thing, torch.Tensor):
        about = [str(thing.dtype), tuple(thing.shape)]
        if thing.is_meta:
            return about, {}
        if thing.layout is not torch.strided or thing.is_quantized:
            return None, {}
        thing = thing.detach().resolve_conj().resolve_neg().cpu().contiguous()
        return [*about, _sample(thing.reshape(-1).view(torch.uint8).numpy())], {}
    about = [str(thing.dtype), thing.shape]
    if thing.dtype.hasobject:
        return about, {"values": thing.tolist()}
    return [*about, _sample(np.asarray(thing))], {}


def _sample(array: np.ndarray[Any, Any]) -> str:
    """A digest of the bytes of an array, which may be mapped and of any size."""
    hasher, flat = Hasher(), array.reshape(-1) if array.flags.c_contiguous else array.flat
    count = max(1, _SAMPLE_BYTES // max(1, array.itemsize))
    for start in range(0, array.size, max(count, array.size // _SAMPLES)):
        hasher.update(np.ascontiguousarray(flat[start : start + count]).view(np.uint8).data)
    return hasher.hexdigest()


def _attributes(thing: Any) -> dict[str, Any]:
    found: dict[str, Any] = dict(sorted(getattr(thing, "__dict__", {}).items()))
    for each in type(thing).__mro__:
        slots: Iterable[str] = each.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            is_private = name.startswith("__") and not name.endswith("__")
            with suppress(AttributeError):  # it is not set
                found[name] = getattr(thing, f"_{each.__name__}{name}" if is_private else name)
    return found
