"""The types that a value of a checkpoint may consist of, and how each is rebuilt.

The stream names functions of NumPy, torch and Python; none of those is ever called. Each name
stands for a function of this module. It gets the arguments in the stream, checks all of them, and
charges the memory of its result before it makes it. NumPy's arrays and types are made in two steps
(an empty one, then its content): :class:`ArrayToBe` and :class:`DtypeToBe` stand for them in
between.
"""

from __future__ import annotations

import collections
import datetime
import enum
import math
import pathlib
import re
import struct
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch

from tieredckpt.dcp.state.value_archive import BadValueError


class Purse(Protocol):
    """Limits the memory of a value."""

    def charge(self, object_bytes: int, data_bytes: int = 0) -> None:
        """Raise BadValueError if Python objects or data take more than is allowed."""

    def check_keys(self, container: object, keys: Any) -> None:
        """Raise BadValueError if hashing or comparing ``keys`` could take long."""


Make = Callable[[Purse, tuple[Any, ...]], Any]


class Function:
    """Stands for a function that a stream calls."""

    def __init__(self, make: Make) -> None:
        self.make = make


def need(condition: object, what: str) -> None:
    """Raise BadValueError unless ``condition``."""
    if not condition:
        raise BadValueError(f"{what} that no writer makes")


def _ints(values: Any, what: str) -> tuple[int, ...]:
    need(isinstance(values, tuple) and len(values) <= 64, what)
    need(all(type(n) is int and 0 <= n < 1 << 62 for n in values), what)
    return tuple(values)


# --- NumPy ----------------------------------------------------------------------------------------


class DtypeToBe:
    """A NumPy type of which only the name is known yet."""

    _NAME = re.compile(r"([biufcSUMmV])([0-9]{0,9})")
    _UNIT = re.compile(r"generic|Y|M|W|D|h|m|s|ms|us|μs|ns|ps|fs|as")

    def __init__(self, purse: Purse, args: tuple[Any, ...]) -> None:
        purse.charge(600)
        need(args and type(args[0]) is str, "a NumPy type")
        self._name = args[0]
        if self._NAME.fullmatch(self._name) is None:
            raise BadValueError(f"a NumPy type {self._name[:20]!r}, which is not plain data")
        self.made: np.dtype[Any] | None = None

    def build(self, purse: Purse, state: Any) -> np.dtype[Any]:
        """The type, once its byte order, unit and fields are known."""
        need(self.made is None and isinstance(state, tuple) and len(state) >= 8, "a NumPy type")
        order, subtype, names, fields, size, alignment, flags = state[1:8]
        need(order in ("<", ">", "|"), "a NumPy type's byte order")
        # The flags are of pointers: NumPy's own unpickler accepts them for plain bytes, too, and
        # divides by the alignment.
        plain = subtype is None and type(flags) is type(alignment) is int and not flags & 0x07
        need(plain and alignment in (-1, 1, 2, 4, 8, 16, 32), "a NumPy type of more than data")
        if names is not None:
            made = self._structured(purse, names, fields, size, flags)
        else:
            unit = self._unit(state) if self._name[0] in "Mm" else ""
            made = np.dtype(f"{order}{self._name}{unit}")
            # Types of any size have it in the stream, and NumPy's own unpickler does not check it.
            need(size == (made.itemsize if made.kind in "SUV" else -1), "a NumPy type's size")
        need(made.str[0] == order, "a NumPy type's byte order")
        self.made = made
        return made

    def _unit(self, state: tuple[Any, ...]) -> str:
        need(len(state) == 9 and isinstance(state[8], tuple) and len(state[8]) == 2, "a unit")
        about = state[8][1]
        need(isinstance(about, tuple) and len(about) == 4 and type(about[0]) is bytes, "a unit")
        unit = str(about[0], "utf-8")
        need(self._UNIT.fullmatch(unit) and about[2:] == (1, 1), "a unit")
        need(type(about[1]) is int and 0 < about[1] < 1 << 31, "a unit")
        return "" if unit == "generic" else f"[{about[1]}{unit}]"

    def _structured(
        self, purse: Purse, names: Any, fields: Any, size: Any, flags: int
    ) -> np.dtype[Any]:
        what = "a structured NumPy type"
        need(self._name[0] == "V" and isinstance(names, tuple) and type(fields) is dict, what)
        need(type(size) is int and 0 < size < 1 << 31 and len(fields) == len(names), what)
        purse.charge(400 * len(names))
        formats, offsets = [], []
        for name in names:
            need(type(name) is str and name in fields, what)
            field = fields[name]
            need(isinstance(field, tuple) and len(field) == 2 and type(field[1]) is int, what)
            need(isinstance(field[0], np.dtype) and field[0].names is None, what)
            need(0 <= field[1] <= field[1] + field[0].itemsize <= size, what)
            formats.append(field[0])
            offsets.append(field[1])
        about: Any = {"names": names, "formats": formats, "offsets": offsets, "itemsize": size}
        made: np.dtype[Any] = np.dtype(about, align=bool(flags & 0x80))
        return made


class ArrayToBe:
    """A NumPy array of which nothing is known yet."""

    def __init__(self, purse: Purse, args: tuple[Any, ...]) -> None:
        purse.charge(600)
        need(args and args[0] is np.ndarray, "a NumPy array of a class of its own")
        self.made: np.ndarray[Any, Any] | None = None

    def build(self, purse: Purse, state: Any) -> np.ndarray[Any, Any]:
        """The array, once its type, shape and bytes are known."""
        need(self.made is None and isinstance(state, tuple) and len(state) == 5, "a NumPy array")
        _, shape, dtype, fortran, raw = state
        need(type(fortran) is bool, "a NumPy array")
        self.made = _array(purse, _ints(shape, "a shape"), dtype, raw, "F" if fortran else "C")
        return self.made


def _array(
    purse: Purse, shape: tuple[int, ...], dtype: Any, raw: Any, order: Any
) -> np.ndarray[Any, Any]:
    need(isinstance(dtype, np.dtype) and type(raw) is bytes, "a NumPy array")
    count = math.prod(shape)
    if count * dtype.itemsize != len(raw) or (count > 1 and not raw):
        raise BadValueError(f"a NumPy array of shape {shape} with {len(raw)} bytes")
    purse.charge(0, len(raw))
    if dtype.names and raw:  # with the bytes between fields, which a copy would leave undefined
        flat = np.frombuffer(raw, np.uint8).copy().view(dtype)
        made: np.ndarray[Any, Any] = flat.reshape(shape, order=order)
    else:
        made = np.ndarray(shape, dtype, raw, order=order).copy(order="K")
    for part in [made[name] for name in dtype.names] if dtype.names else [made]:
        _check_content(part)
    return made


def _check_content(part: np.ndarray[Any, Any]) -> None:
    # Other code relies on it: it counts by adding bools, and a character must be one.
    if not part.size:
        return
    if part.dtype.kind == "b":
        need(part.view(np.uint8).max() <= 1, "a NumPy bool")
    elif part.dtype.kind == "U" and part.dtype.itemsize:
        characters = part.ravel("K").view(np.dtype("u4").newbyteorder(part.dtype.byteorder))
        need(characters.max() <= 0x10FFFF, "a NumPy character")


def _scalar(purse: Purse, args: tuple[Any, ...]) -> Any:
    need(len(args) == 2, "a NumPy scalar")
    purse.charge(200)
    return _array(purse, (), args[0], args[1], "C")[()]


# --- torch ----------------------------------------------------------------------------------------


class StorageKind:
    """The element type that the stream names for a storage; None: bytes."""

    def __init__(self, dtype: torch.dtype | None) -> None:
        self.dtype = dtype


class Storage:
    """Memory of tensors, and its element type."""

    def __init__(self, memory: torch.UntypedStorage, dtype: torch.dtype | None) -> None:
        self.memory = memory
        self.dtype = dtype


_NEGATED = frozenset(
    (torch.float16, torch.bfloat16, torch.float32, torch.float64,
     torch.complex32, torch.complex64, torch.complex128,
     torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
)  # fmt: skip
"""Types that torch can negate, which it does when a tensor with the lazy bit is copied."""


def _tensor_v2(purse: Purse, args: tuple[Any, ...]) -> torch.Tensor:
    need(6 <= len(args) <= 7 and isinstance(args[0], Storage), "a tensor")
    return _tensor(purse, args[0], args[1:6], args[0].dtype, args[6:])


def _tensor_v3(purse: Purse, args: tuple[Any, ...]) -> torch.Tensor:
    need(7 <= len(args) <= 8 and isinstance(args[0], Storage), "a tensor")
    return _tensor(purse, args[0], args[1:6], args[6], args[7:])


def _tensor(
    purse: Purse, storage: Storage, about: tuple[Any, ...], dtype: Any, metadata: tuple[Any, ...]
) -> torch.Tensor:
    offset, size, stride, requires_grad, hooks = about
    size, stride = _ints(size, "a shape"), _ints(stride, "strides")
    need(isinstance(dtype, torch.dtype) and type(offset) is int and offset >= 0, "a tensor")
    need(len(size) == len(stride) and type(requires_grad) is bool, "a tensor")
    need(not hooks, "a tensor with more than its content")
    count = math.prod(size)
    last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    there = storage.memory.nbytes() // dtype.itemsize
    if count and last >= there:  # torch would make the storage larger
        raise BadValueError(f"a tensor of shape {size} in a storage of {there} elements")
    is_bool = dtype == torch.bool  # each is looked at
    purse.charge(1024, count * dtype.itemsize if count > there or is_bool else 0)
    made = torch.empty(0, dtype=dtype, device=storage.memory.device)
    made.set_(storage.memory, offset, size, stride)
    if is_bool and count:
        need(made.view(torch.uint8).max() <= 1, "a bool")
    return _with_bits(made, metadata).requires_grad_(requires_grad)


def _with_bits(made: torch.Tensor, metadata: tuple[Any, ...]) -> torch.Tensor:
    """A view of ``made`` with torch's lazy bits: its bytes are not conjugated or negated yet."""
    bits = metadata[0] if metadata and metadata[0] is not None else {}
    what = "a tensor with more than its content"
    need(type(bits) is dict and bits.keys() <= {"conj", "neg"}, what)
    need(all(bit is True for bit in bits.values()), what)
    if "conj" in bits:
        need(made.is_complex(), what)
        made = made.conj()
    if "neg" in bits:
        need(made.dtype in _NEGATED, what)
        made = torch._neg_view(made)  # the only way to set it
    return made


def _parameter(purse: Purse, args: tuple[Any, ...]) -> torch.nn.Parameter:
    need(len(args) == 3 and type(args[0]) is torch.Tensor, "a parameter")
    need(type(args[1]) is bool and not args[2], "a parameter")
    purse.charge(1024)
    return torch.nn.Parameter(args[0].detach(), args[1])


def _parameter_with_state(purse: Purse, args: tuple[Any, ...]) -> torch.nn.Parameter:
    """A parameter with attributes of its own, such as how it is split."""
    need(len(args) == 4 and type(args[3]) is dict, "a parameter")
    made = _parameter(purse, args[:3])
    need(not any(hasattr(torch.nn.Parameter, str(key)) for key in args[3]), "a parameter")
    vars(made).update({str(key): value for key, value in args[3].items()})
    return made


def _size(purse: Purse, args: tuple[Any, ...]) -> torch.Size:
    need(len(args) == 1, "a torch.Size")
    return torch.Size(_ints(args[0], "a torch.Size"))


def _device(purse: Purse, args: tuple[Any, ...]) -> torch.device:
    need(1 <= len(args) <= 2 and type(args[0]) is str and len(args[0]) < 64, "a device")
    need(all(type(index) is int for index in args[1:]), "a device")
    return torch.device(*args)


def _layout(purse: Purse, args: tuple[Any, ...]) -> torch.layout:
    need(len(args) == 1 and type(args[0]) is str, "a layout")
    found = vars(torch).get(args[0].removeprefix("torch."))  # an attribute might import something
    need(isinstance(found, torch.layout), "a layout")
    assert isinstance(found, torch.layout)
    return found


# --- Python ---------------------------------------------------------------------------------------


def _encode(purse: Purse, args: tuple[Any, ...]) -> bytes:
    need(len(args) == 2 and type(args[0]) is str and args[1] == "latin1", "bytes")
    purse.charge(40, len(args[0]))
    return bytes(args[0], "latin-1")


def _bytearray(purse: Purse, args: tuple[Any, ...]) -> bytearray:
    need(not args or (len(args) == 1 and type(args[0]) is bytes), "a bytearray")
    purse.charge(80, len(args[0]) if args else 0)
    return bytearray(*args)


def _set(kind: Callable[[Any], Any]) -> Make:
    def make(purse: Purse, args: tuple[Any, ...]) -> Any:
        need(len(args) == 1 and type(args[0]) is list, "a set")
        purse.charge(216 + 130 * len(args[0]))
        made: set[Any] = set()
        for each in args[0]:
            purse.check_keys(made, (each,))
            made.add(each)
        return made if kind is set else kind(made)

    return make


def _plain_args(kind: Callable[..., Any], types: tuple[type, ...], counts: range) -> Make:
    def make(purse: Purse, args: tuple[Any, ...]) -> Any:
        what = getattr(kind, "__name__", "a value")
        need(len(args) in counts and all(type(each) in types for each in args), f"a {what}")
        purse.charge(100)
        return kind(*args)

    return make


def _ordered_dict(purse: Purse, args: tuple[Any, ...]) -> Any:
    need(not args, "an OrderedDict")
    purse.charge(200)
    return collections.OrderedDict()


def _counter(purse: Purse, args: tuple[Any, ...]) -> Any:
    need(len(args) <= 1 and all(type(each) is dict for each in args), "a Counter")
    purse.charge(400 + 150 * len(args[0] if args else ()))
    made: Any = collections.Counter()
    dict.update(made, *args)
    return made


def _moment(state: Any, layout: str) -> list[int]:
    need(type(state) is bytes and len(state) == struct.calcsize(layout), "a moment")
    return list(struct.unpack(layout, state))


def _date(purse: Purse, args: tuple[Any, ...]) -> datetime.date:
    need(len(args) == 1, "a date")
    return datetime.date(*_moment(args[0], ">HBB"))


def _datetime(purse: Purse, args: tuple[Any, ...]) -> datetime.datetime:
    need(1 <= len(args) <= 2, "a datetime")
    year, month, day, hour, minute, second, high, low = _moment(args[0], ">HBBBBBBH")
    micros = high << 16 | low
    zone = args[1] if len(args) == 2 else None
    fold = month >> 7
    month &= 127
    return datetime.datetime(year, month, day, hour, minute, second, micros, zone, fold=fold)


def _time(purse: Purse, args: tuple[Any, ...]) -> datetime.time:
    need(1 <= len(args) <= 2, "a time")
    hour, minute, second, high, low = _moment(args[0], ">BBBBH")
    zone = args[1] if len(args) == 2 else None
    micros = high << 16 | low
    return datetime.time(hour & 127, minute, second, micros, tzinfo=zone, fold=hour >> 7)


def _member(purse: Purse, args: tuple[Any, ...]) -> Any:
    need(len(args) == 2 and isinstance(args[0], enum.EnumMeta), "an attribute")
    need(type(args[1]) is str and args[1] in args[0].__members__, "a member of an enum")
    return args[0][args[1]]


def _path(kind: type[pathlib.PurePath]) -> Make:
    def make(purse: Purse, args: tuple[Any, ...]) -> Any:
        need(all(type(part) is str for part in args), "a path")
        purse.charge(400 + 200 * len(args), 4 * sum(map(len, args)))
        return kind(*args)

    return make


_NONE = type(None)
_CLASSES: dict[type, Make] = {
    np.dtype: DtypeToBe,
    torch.Size: _size,
    torch.device: _device,
    bytes: _plain_args(bytes, (), range(1)),
    bytearray: _bytearray,
    set: _set(set),
    frozenset: _set(frozenset),
    complex: _plain_args(complex, (float,), range(2, 3)),
    slice: _plain_args(slice, (int, _NONE), range(3, 4)),
    range: _plain_args(range, (int,), range(3, 4)),
    collections.OrderedDict: _ordered_dict,
    collections.Counter: _counter,
    datetime.date: _date,
    datetime.time: _time,
    datetime.datetime: _datetime,
    datetime.timedelta: _plain_args(datetime.timedelta, (int,), range(3, 4)),
    datetime.timezone: _plain_args(datetime.timezone, (datetime.timedelta, str), range(1, 3)),
    pathlib.PurePosixPath: _path(pathlib.PurePosixPath),
    pathlib.PosixPath: _path(pathlib.PosixPath),
}
_FUNCTIONS: dict[str, Make] = {
    # NumPy 2 renamed the module; checkpoints written under either name must load under both.
    **{f"numpy.{core}.multiarray._reconstruct": ArrayToBe for core in ("core", "_core")},
    **{f"numpy.{core}.multiarray.scalar": _scalar for core in ("core", "_core")},
    "torch._utils._rebuild_tensor_v2": _tensor_v2,
    "torch._utils._rebuild_tensor_v3": _tensor_v3,
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_parameter_with_state": _parameter_with_state,
    "torch.serialization._get_layout": _layout,
    "_codecs.encode": _encode,
    "builtins.getattr": _member,  # so Python 3.11.0 to 3.11.3 pickle an enum, which is allowed
}
_STORAGES = {
    "Double": "float64", "Float": "float32", "Half": "float16", "BFloat16": "bfloat16",
    "Long": "int64", "Int": "int32", "Short": "int16", "Char": "int8", "Byte": "uint8",
    "Bool": "bool", "ComplexDouble": "complex128", "ComplexFloat": "complex64",
}  # fmt: skip

NAMES: dict[str, Any] = {
    **{f"{kind.__module__}.{kind.__qualname__}": kind for kind in _CLASSES},
    **{name: Function(make) for name, make in _FUNCTIONS.items()},
    # Python 3.13 renamed the module, and 3.14 renamed it back.
    **{
        f"{module}.{kind.__name__}": kind
        for module in ("pathlib", "pathlib._local")
        for kind in (pathlib.PurePosixPath, pathlib.PosixPath)
    },
    **{f"builtins.{kind.__name__}": kind for kind in (bool, int, float, str, list, tuple, dict)},
    "numpy.ndarray": np.ndarray,
    "torch.storage.UntypedStorage": StorageKind(None),
    **{f"torch.{n}Storage": StorageKind(getattr(torch, dtype)) for n, dtype in _STORAGES.items()},
    # Quantized ones are no data without their scale.
    **{
        f"torch.{name}": dtype
        for name, dtype in vars(torch).items()
        if isinstance(dtype, torch.dtype) and not name.startswith(("q", "bits"))
    },
}
"""The names that a stream may have: types that may be part of a value, and our functions."""

INTERNAL = frozenset((ArrayToBe, DtypeToBe, Function, Storage, StorageKind))
"""Types of ours that must not be part of a value."""


def make_of(called: Any) -> Make | None:
    """The function for a type or function that a stream calls; None: it must not call it."""
    return called.make if type(called) is Function else _CLASSES.get(called)
