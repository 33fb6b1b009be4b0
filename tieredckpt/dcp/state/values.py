"""The values of a checkpoint that are not tensors: rebuilt from ``torch.save`` streams, safely.

A stream is a program: push this, call that. This interpreter knows the operations that
``torch.save`` and the metadata of stock DCP consist of. It only calls the functions of
:mod:`tieredckpt.dcp.state.value_types`, and types that the user allows by name. So a forged stream
cannot run code, and its memory is limited by its length: data (arrays, tensors, bytes) takes at
most 4 times the item's bytes, and Python's own objects as much as Python needs for them.
"""

from __future__ import annotations

import ctypes
import enum
import re
import struct
import sys
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from tieredckpt.dcp.state.value_archive import BadValueError, entries
from tieredckpt.dcp.state.value_types import (
    INTERNAL,
    NAMES,
    ArrayToBe,
    DtypeToBe,
    Storage,
    StorageKind,
    make_of,
    need,
)

SafeGlobal = Callable[..., Any] | tuple[Callable[..., Any], str]
"""A type or function that loaded values may name; or it and the name it was saved under."""

DATA_FACTOR = 4
"""Bytes of arrays, tensors, bytes and text in a value, as a multiple of the item's bytes."""

OBJECT_FACTOR = 64
"""Bytes that Python's objects take, likewise: a list of empty dicts takes 43."""

OBJECT_BYTES = 256 << 20
"""Bytes of Python's objects beyond ``DATA_FACTOR``: large values have large parts. The metadata of
stock DCP, of any size, consists of small ones (24 to 35 times its bytes): it is not limited so."""

SLACK_BYTES = 64 << 10

_U8, _U16, _U32, _U64, _I32, _F64 = map(struct.Struct, ("B", "<H", "<I", "<Q", "<i", ">d"))
_NAME_BYTES_MAX = 512
_REFUSED_MAX = 20
_KEY_PARTS_MAX = 1000
_EQUAL_HASHES_MAX = 100
_LOCATION = re.compile(r"[a-z]{1,20}(:[0-9]{1,3})?")


class RefusedTypesError(BadValueError):
    """A value names types or functions that are neither plain data nor allowed."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__(", ".join(sorted(set(names))))


class _Refused:
    """Stands for a refused type or function, so that all of them can be named."""


class _Args(tuple[Any, ...]):
    """A tuple with an object that must not be part of a value: arguments for our functions."""


_INTERNAL = INTERNAL | {_Args, _Refused}


def rebuild(
    data: memoryview,
    allow: Sequence[SafeGlobal] = (),
    device: str | None = None,
    *,
    in_place: bool = False,
    bare: bool = False,
) -> Any:
    """The value that ``torch.save`` wrote as ``data``.

    Args:
        data: The whole archive.
        allow: Types that are called with the stream's arguments, since the user trusts them.
        device: "cpu" to leave tensors there; None: where they were.
        in_place: Tensors on the CPU are views of ``data``, which must be writable; otherwise
            nothing shares memory with it.
        bare: ``data`` is no archive but the stream alone, as ``pickle.dump`` writes it.

    Raises:
        RefusedTypesError: It names another type or function.
        BadValueError: It is no such archive, or one that no writer makes.
    """
    archive = {"data.pkl": data} if bare else entries(data)
    interpreter = _Interpreter(len(data), archive, allow, device, in_place=in_place, bare=bare)
    try:
        return interpreter.run()
    except RefusedTypesError:
        raise
    except (
        BadValueError, struct.error, ArithmeticError, AttributeError, LookupError, TypeError,
        ValueError, RuntimeError, MemoryError,
    ) as error:  # fmt: skip
        if interpreter.refused:  # the error was caused by their stand-ins
            raise RefusedTypesError(interpreter.refused) from error
        raise BadValueError(str(error) or type(error).__name__) from error


class _Interpreter:
    def __init__(
        self,
        size: int,
        archive: dict[str, memoryview],
        allow: Sequence[SafeGlobal],
        device: str | None,
        *,
        in_place: bool,
        bare: bool,
    ) -> None:
        self._objects_left = OBJECT_FACTOR * size + SLACK_BYTES
        if not bare:
            self._objects_left = min(self._objects_left, DATA_FACTOR * size + OBJECT_BYTES)
        self._data_left = DATA_FACTOR * size + SLACK_BYTES
        self._storage_left = size
        self._archive = archive
        self._program = self._archive["data.pkl"]
        self._at = 0
        self._stack: list[Any] = []
        self._marks: list[list[Any]] = []
        self._memo: list[Any] = []
        self._storages: dict[str, Storage] = {}
        self._hashes: dict[tuple[int, int], int] = {}
        self._allowed = _by_name(allow)
        self._device = device
        self._in_place = in_place
        self.refused: list[str] = []

    def run(self) -> Any:
        """The value."""
        order = self._archive.get("byteorder", memoryview(sys.byteorder.encode()))
        need(order == sys.byteorder.encode(), "a value of another byte order, or one")
        program = self._program
        size = len(program)
        while self._at < size:
            code = program[self._at]
            self._at += 1
            cost, operation = _OPERATIONS[code]
            self._objects_left -= cost
            if self._objects_left < 0 or operation is None:
                break
            operation(self)
        else:
            raise BadValueError("a stream that does not end")
        self.charge(0)
        if self.refused:
            raise RefusedTypesError(self.refused)
        need(len(self._stack) == 1 and not self._marks, "a stream")
        need(type(self._stack[0]) not in _INTERNAL, "a value")
        return self._stack[0]

    # --- limits ----------------------------------------------------------------------------------

    def charge(self, object_bytes: int, data_bytes: int = 0) -> None:
        self._objects_left -= object_bytes
        self._data_left -= data_bytes
        if self._objects_left < 0 or self._data_left < 0:
            raise BadValueError("a value that would take much more memory than it has bytes")

    def check_keys(self, container: Any, keys: Any) -> None:
        for key in keys:
            kind = type(key)
            # Their hashes are random, or differ whenever the keys differ.
            if kind in (str, bytes, bool) or key is None or (kind is int and abs(key) < 1 << 60):
                continue
            self._check_parts(key)
            if len(container) > _EQUAL_HASHES_MAX:
                self.charge(200)
                at = (id(container), hash(key))
                self._hashes[at] = equal = self._hashes.get(at, 0) + 1
                need(equal <= _EQUAL_HASHES_MAX, "keys of equal hashes")

    def _check_parts(self, key: Any) -> None:
        # A tuple of tuples is hashed recursively, and a deep one ends the process.
        parts = [key]
        for part in parts:
            # Of a type that is allowed, its attributes are hashed.
            nested = isinstance(part, tuple | frozenset)
            inner = part if nested else getattr(part, "__dict__", {}).values()
            need(len(parts) + len(inner) <= _KEY_PARTS_MAX, "a key")
            parts.extend(inner)

    # --- operations ------------------------------------------------------------------------------

    def _read(self, size: int) -> memoryview:
        at = self._at
        self._at += size
        need(self._at <= len(self._program), "a stream that is cut off, or one")
        return self._program[at : at + size]

    def _number(self, layout: struct.Struct) -> Any:
        at = self._at
        self._at += layout.size
        return layout.unpack_from(self._program, at)[0]

    def _content(self, items: Any) -> Any:
        """``items``, all of which may be part of a value."""
        need(self.refused or _INTERNAL.isdisjoint(map(type, items)), "a value")
        return items

    def _pop_mark(self) -> list[Any]:
        items = self._stack
        self._stack = self._marks.pop()
        return items

    def _mark(self) -> None:
        self._marks.append(self._stack)
        self._stack = []

    def _text(self, length: struct.Struct = _U32) -> None:
        text = str(self._read(self._number(length)), "utf-8", "surrogatepass")
        self.charge(0, text.__sizeof__() - 48)
        self._stack.append(text)

    def _long(self) -> None:
        data = self._read(self._number(_U8))
        self.charge(len(data))
        self._stack.append(int.from_bytes(data, "little", signed=True))

    def _tuple(self, items: Sequence[Any]) -> None:
        plain = _INTERNAL.isdisjoint(map(type, items))
        self._stack.append(tuple(items) if plain else _Args(items))

    def _tuple_of(self, count: int) -> None:
        need(len(self._stack) >= count, "a tuple")
        items = self._stack[-count:]
        del self._stack[-count:]
        self._tuple(items)

    def _append(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if type(target) is list:
            target.extend(self._content(items))
        else:
            need(type(target) is _Refused, "a list")

    def _set_items(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if type(target) is _Refused:
            return
        need(type(target) in (dict, OrderedDict, Counter) and len(items) % 2 == 0, "a dict")
        self._content(items)
        new = len(items) // 2
        large = 100 * new if len(target) + new > 5 else 0
        self.charge(large + (0 if target else 170) + (0 if type(target) is dict else 100 * new))
        for at in range(0, len(items), 2):
            self.check_keys(target, (items[at],))
            target[items[at]] = items[at + 1]

    def _put(self, index: int) -> None:
        need(index == len(self._memo), "a stream")
        self._memo.append(self._stack[-1])

    def _get(self, index: int) -> None:
        found = self._memo[index]
        if type(found) in (ArrayToBe, DtypeToBe):
            need(found.made is not None, "a NumPy array inside itself, or one")
            found = found.made
        self._stack.append(found)

    def _global(self) -> None:
        text = bytes(self._program[self._at : self._at + _NAME_BYTES_MAX])
        module, name, _ = text.split(b"\n", 2)
        self._at += len(module) + len(name) + 2
        self._name((str(module, "utf-8"), str(name, "utf-8")))

    def _stack_global(self) -> None:
        pair = self._stack.pop(-2), self._stack.pop()
        need(type(pair[0]) is type(pair[1]) is str, "a name")
        self._name(pair)

    def _name(self, pair: tuple[str, str]) -> None:
        where, what = NAME_MAPPING.get(pair, (IMPORT_MAPPING.get(pair[0], pair[0]), pair[1]))
        found = NAMES.get(f"{where}.{what}") or self._allowed.get(f"{where}.{what}")
        if found is None:
            self.refused.append(f"{where}.{what}")
            if len(self.refused) >= _REFUSED_MAX:
                raise RefusedTypesError(self.refused)
            found = _Refused()
        self._stack.append(found)

    def _call(self) -> None:
        args = self._stack.pop()
        called = self._stack.pop()
        need(isinstance(args, tuple), "arguments")
        make = make_of(called)
        if type(called) is _Refused:
            made: Any = called
        elif make is not None:
            made = make(self, args)
        else:
            need(self._is_allowed(called), "a call")
            made = called(*self._content(args))
        self._stack.append(made)

    def _new(self) -> None:
        args = self._stack.pop()
        kind = self._stack.pop()
        need(isinstance(args, tuple), "arguments")
        if type(kind) is not _Refused:
            need(isinstance(kind, type) and self._is_allowed(kind), "an object")
            kind = kind.__new__(kind, *self._content(args))
        self._stack.append(kind)

    def _is_allowed(self, called: Any) -> bool:
        return any(called is each for each in self._allowed.values())

    def _build(self) -> None:
        state = self._stack.pop()
        made = self._stack[-1]
        if type(made) in (ArrayToBe, DtypeToBe):
            self._stack[-1] = made.build(self, state)
        elif type(made) is OrderedDict:  # a model's state has its versions as an attribute
            need(
                type(state) is dict and not any(hasattr(made, str(key)) for key in state), "a dict"
            )
            vars(made).update({str(key): value for key, value in state.items()})
        elif type(made) is not _Refused:
            need(self._is_allowed(type(made)) and not isinstance(made, enum.Enum), "an object")
            _set_state(made, *self._content((state,)))

    def _storage(self) -> None:
        about = self._stack.pop()
        need(type(about) is _Args and len(about) == 5 and about[0] == "storage", "a storage")
        _, kind, key, location, count = about
        need(type(kind) is StorageKind and type(key) is str and type(location) is str, "a storage")
        need(len(key) < 20, "a storage")
        content = self._archive[f"data/{key}"]
        size = 1 if kind.dtype is None else kind.dtype.itemsize
        need(type(count) is int and count * size == len(content), "a storage")
        if key not in self._storages:
            self._storage_left -= len(content)
            need(self._storage_left >= 0, "storages that overlap, or some")
            self.charge(1024, len(content))
            self._storages[key] = Storage(self._filled(content, location), kind.dtype)
        need(self._storages[key].dtype == kind.dtype, "a storage of two element types")
        self._stack.append(self._storages[key])

    def _filled(self, content: memoryview, location: str) -> torch.UntypedStorage:
        if self._in_place and content:
            return torch.frombuffer(content, dtype=torch.uint8).untyped_storage()
        memory = torch.empty(len(content), dtype=torch.uint8, device="cpu").untyped_storage()
        if content:  # not through torch or NumPy, after which it could not be resized any more
            there = np.frombuffer(content, np.uint8)
            ctypes.memmove(memory.data_ptr(), there.ctypes.data, len(content))
        if self._device is not None or location == "cpu":
            return memory
        need(_LOCATION.fullmatch(location) and location != "meta", "a device")
        restore: Callable[..., torch.UntypedStorage] = torch.serialization.default_restore_location
        return restore(memory, location)


def _set_state(made: Any, state: Any) -> None:
    """Set the state as pickle does, for a type that the user allows."""
    if hasattr(made, "__setstate__"):
        made.__setstate__(state)
        return
    slots = None
    if isinstance(state, tuple) and len(state) == 2:
        state, slots = state
    vars(made).update(state or {})
    for name, value in (slots or {}).items():
        setattr(made, name, value)


def _by_name(allow: Sequence[SafeGlobal]) -> dict[str, Any]:
    pairs = (each if isinstance(each, tuple) else (each, None) for each in allow)
    return {name or f"{kind.__module__}.{kind.__qualname__}": kind for kind, name in pairs}


def _unknown(_: _Interpreter) -> None:
    raise BadValueError("a stream with an operation that torch.save does not write")


_Operation = Callable[[_Interpreter], None] | None


def _push(make: Callable[[_Interpreter], Any]) -> Callable[[_Interpreter], None]:
    return lambda run: run._stack.append(make(run))


_OPERATIONS_BY_CODE: dict[bytes, tuple[int, _Operation]] = {
    # Code: the bytes of Python objects that it costs at least, and its operation.
    b"\x80": (0, lambda run: run._number(_U8)),
    b".": (0, None),
    b"(": (120, _Interpreter._mark),
    b"N": (20, _push(lambda _: None)),
    b"\x88": (20, _push(lambda _: True)),
    b"\x89": (20, _push(lambda _: False)),
    b"K": (20, _push(lambda run: run._number(_U8))),
    b"M": (52, _push(lambda run: run._number(_U16))),
    b"J": (52, _push(lambda run: run._number(_I32))),
    b"G": (44, _push(lambda run: run._number(_F64))),
    b"\x8a": (52, _Interpreter._long),
    b"X": (100, _Interpreter._text),
    b")": (20, _push(lambda _: ())),
    b"]": (80, _push(lambda _: [])),
    b"}": (90, _push(lambda _: {})),
    b"t": (100, lambda run: run._tuple(run._pop_mark())),
    b"\x85": (100, lambda run: run._tuple_of(1)),
    b"\x86": (100, lambda run: run._tuple_of(2)),
    b"\x87": (120, lambda run: run._tuple_of(3)),
    b"a": (32, lambda run: run._append([run._stack.pop()])),
    b"e": (64, lambda run: run._append(run._pop_mark())),
    b"s": (20, lambda run: run._set_items([run._stack.pop(-2), run._stack.pop()])),
    b"u": (20, lambda run: run._set_items(run._pop_mark())),
    b"q": (12, lambda run: run._put(run._number(_U8))),
    b"r": (12, lambda run: run._put(run._number(_U32))),
    b"h": (20, lambda run: run._get(run._number(_U8))),
    b"j": (20, lambda run: run._get(run._number(_U32))),
    b"c": (100, _Interpreter._global),
    b"R": (20, _Interpreter._call),
    b"\x81": (100, _Interpreter._new),
    b"b": (0, _Interpreter._build),
    b"Q": (150, _Interpreter._storage),
    # Of pickle's newer protocols.
    b"\x95": (0, lambda run: run._number(_U64)),  # the length of a part; parts mean nothing here
    b"\x8c": (100, lambda run: run._text(_U8)),
    b"\x93": (100, _Interpreter._stack_global),
    b"\x94": (12, lambda run: run._put(len(run._memo))),
}
_OPERATIONS = [_OPERATIONS_BY_CODE.get(bytes((code,)), (0, _unknown)) for code in range(256)]
