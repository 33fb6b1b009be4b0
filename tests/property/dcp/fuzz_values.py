"""Feeds forged values to what rebuilds them: ``python -m tests.property.dcp.fuzz_values --seed 7``.

Each round makes an item as a forger would who can write right digests: a program of opcodes from a
grammar that knows what each call takes and often gives it something else; the program of a real
value with opcodes and arguments changed; an archive whose directory lies; and our own plain format.
It must be refused by an error of ours, or give a value

- of plain types only, arrays and tensors inside of memory that the item paid for,
- equal to what Python's own unpickler makes of the same bytes,

and meanwhile take no more than 4 times the item and 1 MiB (tracemalloc's peak, which counts NumPy;
torch's storages are counted in the value, and the address space of the process has a limit).
Whatever else happens, or a round of over five seconds, is a finding: it is printed with its number,
and the exit status is 1. A signal ends the process: ``--at FILE`` has the round's number.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import datetime
import io
import math
import os
import pathlib
import pickletools
import random
import resource
import signal
import struct
import sys
import time
import traceback
import tracemalloc
import warnings
import zipfile
from collections.abc import Callable
from typing import Any, BinaryIO

import numpy as np
import torch

from tests.format.samples import mutate, plain_value
from tests.support import forged_values as forged
from tieredckpt.dcp.state import value_types, values
from tieredckpt.dcp.state.value_archive import BadValueError
from tieredckpt.errors import IntegrityError
from tieredckpt.format.plain import decode_plain, encode_plain

FACTOR = 4
SLACK_BYTES = 1 << 20
ITEM_BYTES_MAX = 15_000
"""With larger ones Python's objects alone may exceed the slack (docs/operate/security.md)."""

ROUND_SECONDS_MAX = 5
ADDRESS_SPACE_BYTES = 1 << 30
COMPARE_EVERY = 8  # torch.load takes longer than all the rest

Decode = Callable[[bytes], Any]
ENDS = (
    0,
    1,
    -1,
    2,
    7,
    8,
    255,
    256,
    1 << 16,
    (1 << 31) - 1,
    1 << 31,
    1 << 40,
    (1 << 63) - 1,
    1 << 63,
)
KINDS = "? b1 i1 i2 i4 i8 u1 u8 f2 f4 f8 f16 c8 c16 c32 S3 U2 V8 M8 m8 O8 O V0 U0 S0 V9999999 T16"
NAMES = [*value_types.NAMES, "builtins.exec", "numpy.dtypes.ObjectDType", "numpy.frombuffer"]
TEXTS = [
    *KINDS.split(), "latin1", "utf-8", "storage", "0", "1", "2", "cpu", "cuda:0", "meta", "<", ">",
    "|", "=", "a", "b", "torch.strided", "é", "\U0001f600", "\ud800", "x" * 300, "items", "D",
]  # fmt: skip
OPERATIONS = [bytes((code,)) for code, (_, made) in enumerate(values._OPERATIONS) if made]
PATTERNS = [b"\0\0\0\0\1" * 100] * 2 + [b"\0\0\2" * 100, b"\xff" * 300]
STORAGES = {f"data/{n}": bytes(range(8)) * 4 for n in range(3)} | {"data/b": b"\0\1\2\1"}


# --- real values, and how they are changed --------------------------------------------------------


def real_values() -> list[Any]:
    grid = torch.arange(8.0).view(2, 4)
    records = np.zeros(2, dtype=[("a", "i4"), ("b", "U3")])
    about = {"names": ["a", "b"], "formats": ["i1", "<i4"], "offsets": [1, 4], "itemsize": 9}
    apart = np.frombuffer(bytes(range(18)), dtype=np.dtype(about))
    return [
        random.Random(1).getstate()[1][:40],
        np.random.RandomState(1).get_state(),
        np.random.default_rng(1).bit_generator.state,
        [np.float64(2.5), np.bool_(True), np.datetime64("2026-01-01"), np.str_("é"), np.void(b"a")],
        [np.arange(6.0).reshape(2, 3).T, np.array([True, False]), np.array(["a", "bc"])],
        [records, apart],
        {"grid": grid, "view": grid.t(), "bool": grid > 2, "half": grid.half(), "none": grid[:0]},
        [torch.nn.Parameter(grid), torch.ones(1).expand(3), torch.zeros(3, dtype=torch.uint16)],
        torch.nn.BatchNorm1d(2).state_dict(),
        [torch.bfloat16, torch.Size([1, 2]), torch.device("cpu"), torch.strided, float],
        [datetime.datetime(2026, 1, 2, 3, tzinfo=datetime.timezone.utc), datetime.date(1, 2, 3)],  # noqa: UP017
        [datetime.time(1, 2, 3, 4), datetime.timedelta(5), pathlib.PurePosixPath("/x/y"), slice(1)],
        {(1, "a"): frozenset({1, (2,)}), None: {1.5}, 1 << 99: range(3), 2.0: bytearray(b"y")},
        collections.OrderedDict(a=collections.Counter("aab"), b=(1j, b"abc\xff", [[], {}, ()])),
        {"text": "a\xe9\u20ac\U0001f600", "list": list(range(250, 280)), "deep": [[[[[1]]]]]},
    ]  # fmt: skip


def split(program: bytes) -> list[bytes]:
    """A program's operations, with their arguments."""
    places = [place for _, _, place in pickletools.genops(program) if place is not None]
    return [program[at:end] for at, end in zip(places, [*places[1:], len(program)], strict=True)]


class Real:
    """Programs of real values, as operations, and their storages."""

    def __init__(self) -> None:
        self.archives: list[bytes] = []
        self.programs: list[tuple[list[bytes], dict[str, bytes]]] = []
        for value in real_values():
            out = io.BytesIO()
            torch.save(value, out)
            self.archives.append(out.getvalue())
            with zipfile.ZipFile(out) as made:
                content = {n.partition("/")[2]: made.read(n) for n in made.namelist()}
            self.programs.append((split(content["data.pkl"])[1:-1], content))

    def changed(self, rng: random.Random) -> bytes:
        """One with up to four operations changed."""
        operations, content = rng.choice(self.programs)
        operations = list(operations)
        for _ in range(rng.choice((0, 1, 1, 1, 2, 4))):
            at = rng.randrange(len(operations))
            kind = rng.randrange(8)
            if kind == 0:
                del operations[at]
            elif kind == 1:
                operations.insert(at, operations[rng.randrange(len(operations))])
            elif kind == 2:
                operations.insert(at, rng.choice(OPERATIONS))
            elif kind == 3:
                other, _ = rng.choice(self.programs)
                start = rng.randrange(len(other))
                operations[at : at + 1] = other[start : start + rng.randrange(1, 12)]
            else:
                operations[at] = another(operations[at], rng)
            if not operations:
                break
        if rng.random() < 0.7:
            renumber(operations)
        entries = {name: data for name, data in content.items() if name.startswith("data/")}
        return forged.archive(b"".join(operations), entries)


def another(operation: bytes, rng: random.Random) -> bytes:
    """One of the same kind with another argument."""
    code = operation[:1]
    if code in b"KMJG\x8a\x88\x89N":
        return rng.choice((forged.number(rng.choice(ENDS)), forged.number(rng.randrange(30)), b"N"))
    if code == b"X":
        size = len(operation) - 5
        return rng.choice((forged.text(rng.choice(TEXTS)), forged.text("\1" * size), operation))
    if code == b"c":
        return forged.named(rng.choice(NAMES))
    if code in b"hj":
        return b"h" + bytes((rng.randrange(60),))
    return rng.choice(OPERATIONS) if rng.random() < 0.5 else mutate(operation, b"", rng)


def renumber(operations: list[bytes]) -> None:
    """Let the memo have no holes, or nothing behind the first one is ever reached."""
    count = 0
    for at, operation in enumerate(operations):
        if operation[:1] in (b"q", b"r"):
            operations[at] = b"q%c" % count if count < 256 else b"r" + struct.pack("<I", count)
            count += 1


# --- programs from a grammar ----------------------------------------------------------------------


class Grammar:
    """Writes programs: most parts are as they should be, each may be something else."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.memo = 0
        self.wrong = rng.choice((0.0, 0.02, 0.1, 0.3))

    def value(self, depth: int = 0) -> bytes:
        rng = self.rng
        if self.memo and rng.random() < 0.1:
            return b"h%c" % rng.randrange(self.memo)
        made = rng.choice(self.LEAVES if depth > 3 else self.ALL)(self, depth + 1)
        if self.memo < 250 and rng.random() < 0.3:
            made += b"q%c" % self.memo
            self.memo += 1
        return made

    def either(self, right: bytes) -> bytes:
        if self.rng.random() >= self.wrong:
            return right
        wrong = (
            lambda: self.value(3),
            lambda: self.any_number(0),
            lambda: forged.named(self.rng.choice(NAMES)),
            lambda: self.rng.choice(OPERATIONS),
            lambda: b"",
        )
        return self.rng.choice(wrong)()

    def call(self, name: str, *args: bytes) -> bytes:
        return self.either(
            self.either(forged.named(name)) + forged.group(*map(self.either, args)) + b"R"
        )

    def any_number(self, _: int) -> bytes:
        return forged.number(self.rng.choice((*ENDS, self.rng.randrange(100), 1 << 2000)))

    def any_text(self, _: int) -> bytes:
        return forged.text(self.rng.choice(TEXTS))

    def constant(self, _: int) -> bytes:
        named = forged.named(self.rng.choice(NAMES))
        return self.rng.choice((b"N", b"\x88", b"\x89", b")", b"]", b"}", b"G" + bytes(8), named))

    def raw(self, _: int) -> bytes:
        content = self.rng.choice((self.rng.randbytes(self.rng.randrange(20)), bytes(200)))
        return self.call(
            "_codecs.encode", forged.text(content.decode("latin-1")), forged.text("latin1")
        )

    def parts(self, depth: int) -> list[bytes]:
        return [self.value(depth) for _ in range(self.rng.randrange(5))]

    def group(self, depth: int) -> bytes:
        return forged.group(*self.parts(depth))

    def listed(self, depth: int) -> bytes:
        return b"](" + b"".join(map(self.either, self.parts(depth))) + b"e"

    def mapped(self, depth: int) -> bytes:
        start = self.rng.choice((b"}", forged.call("collections.OrderedDict")))
        made = start + b"(" + b"".join(self.parts(depth)) + self.either(b"u")
        return (
            made + self.either(b"}" + forged.text("_metadata") + b"Nsb")
            if start[-1:] == b"R"
            else made
        )

    def python(self, depth: int) -> bytes:
        # Only what is used may be made: it may have got a number in the memo.
        name, *takes = self.rng.choice(self.PYTHON).split()
        return self.call(name, *[getattr(self, take)(depth) for take in takes])

    def moment(self, _: int) -> bytes:
        content = bytes(self.rng.randrange(1, 60) for _ in range(self.rng.choice((4, 6, 10))))
        return forged.raw(content)

    def floating(self, _: int) -> bytes:
        return b"G" + self.rng.randbytes(8)

    def ints(self, _: int) -> bytes:
        return forged.numbers(*[self.rng.randrange(9) for _ in range(self.rng.randrange(4))])

    PYTHON = tuple(
        """builtins.set listed|builtins.frozenset listed|builtins.bytearray raw|builtins.bytes
        builtins.range any_number any_number any_number|builtins.complex floating floating
        builtins.slice any_number constant any_number|collections.Counter mapped
        datetime.date moment|datetime.datetime moment|datetime.time moment
        torch.Size ints|torch.device any_text
        datetime.timedelta any_number any_number any_number|pathlib.PurePosixPath any_text any_text
        torch.serialization._get_layout any_text""".replace("\n", "|").split("|")
    )

    def kind(self) -> tuple[bytes, int]:
        """A NumPy type, and its size as far as that is simple."""
        name = self.rng.choice(KINDS.split()[1:])
        names = fields = b"N"
        if name == "V8" and self.rng.random() < 0.5:
            names = forged.group(*[self.either(forged.text(each)) for each in "ab"])
            at = [forged.number(self.rng.choice((0, 0, 4, 5, -1))) for _ in "ab"]
            inner = [
                forged.group(self.either(forged.dtype("i4")), self.either(each)) for each in at
            ]
            fields = forged.mapped(
                *[forged.text(n) + each for n, each in zip("ab", inner, strict=True)]
            )
        right = "|" if name[0] in "SV?" or name in ("b1", "i1", "u1") else self.rng.choice("<>")
        order = right if self.rng.random() < 0.9 else self.rng.choice("<>|=")
        made = forged.dtype(name, order, names, fields)
        if name in ("M8", "m8"):
            unit = forged.group(
                forged.raw(self.rng.choice((b"D", b"ns", b"O"))),
                *map(self.either, [forged.number(1)] * 3),
            )
            made = made[:-2] + b"N" + forged.group(b"N", unit) + made[-2:]
        return made, int(name[1:] or 8) * (4 if name[0] == "U" else 1)

    def array(self, _: int) -> bytes:
        kind, size = self.kind()
        counts = [self.rng.choice((0, 1, 2, 3)) for _ in range(self.rng.randrange(3))]
        content = forged.raw(self.rng.choice(PATTERNS)[: size * math.prod(counts)])
        shape = forged.group(*[self.either(forged.number(n)) for n in counts])
        if self.rng.random() < 0.3:
            return self.call("numpy._core.multiarray.scalar", kind, self.either(content))
        core = self.rng.choice(("core", "_core"))
        made = self.call(
            f"numpy.{core}.multiarray._reconstruct",
            forged.named("numpy.ndarray"),
            forged.numbers(0),
            forged.raw(b"b"),
        )
        order = self.rng.choice((b"\x88", b"\x89"))
        state = map(self.either, (forged.number(1), shape, kind, order, content))
        made += forged.group(*state) + self.either(b"b")
        if self.rng.random() < 0.05:  # once more, with what is there by now
            made += self.group(3) + b"b"
        return made

    def tensor(self, _: int) -> bytes:
        rng = self.rng
        key, width = rng.choice((("0", 4), ("1", 4), ("2", 8), ("b", 1)))
        kind = {4: "torch.FloatStorage", 8: "torch.LongStorage", 1: "torch.BoolStorage"}[width]
        there = len(STORAGES[f"data/{key}"]) // width
        memory = forged.group(
            *map(
                self.either,
                (
                    forged.text("storage"),
                    forged.named(kind),
                    forged.text(key),
                    forged.text("cpu"),
                    forged.number(there),
                ),
            )
        ) + self.either(b"Q")
        size = [rng.choice((0, 1, 2, 3)) for _ in range(rng.randrange(3))]
        stride = [rng.choice((0, 1, 2)) for _ in size]
        shape, steps = (
            forged.group(*[self.either(forged.number(n)) for n in each]) for each in (size, stride)
        )
        more = (
            forged.number(rng.choice((0, 0, 1))),
            shape,
            steps,
            b"\x89",
            forged.call("collections.OrderedDict"),
        )
        if rng.random() < 0.2:
            return self.call(
                "torch._utils._rebuild_tensor_v3", memory, *more, forged.named("torch.int32")
            )
        made = self.call("torch._utils._rebuild_tensor_v2", memory, *more)
        if rng.random() < 0.2:
            made = self.call("torch._utils._rebuild_parameter", made, b"\x89", more[-1])
        return made

    def bomb(self, depth: int) -> bytes:
        """The same thing very often, of something that is there once."""
        long, latin = forged.text("x" * 3000), forged.text("latin1")
        name, what, more = self.rng.choice(
            (
                ("_codecs.encode", long, latin + b"\x86R"),
                ("pathlib.PurePosixPath", long, b"\x85R"),
                ("builtins.set", b"](" + b"N" * 900 + b"e", b"\x85R"),
                ("builtins.frozenset", b"](" + forged.number(1) * 900 + b"e", b"\x85R"),
                ("torch.Size", forged.group(*[forged.number(1)] * 60), b"\x85R"),
                ("builtins.bytearray", self.raw(depth), b"\x85R"),
            )
        )
        start, at = b"](", self.memo
        for each in (what, forged.named(name)):
            if at > 250:
                break
            start += each + b"q%c" % at
            at += 1
        first, self.memo = self.memo, at
        once = b"h%c" % min(first, 255)
        calls = (
            *[b"h%c" % min(first + 1, 255) + once + more] * 4,
            once + once + b"\x86", once, b"]", b"}", b"(",
        )  # fmt: skip
        return start + self.rng.choice(calls) * self.rng.choice((3, 300, 560)) + b"e"

    LEAVES: tuple[Callable[[Grammar, int], bytes], ...] = (any_number, any_text, constant, raw)
    ALL = (
        *LEAVES,
        group,
        listed,
        mapped,
        python,
        python,
        array,
        array,
        array,
        tensor,
        tensor,
        bomb,
    )


# --- one round ------------------------------------------------------------------------------------


def one_item(real: Real, rng: random.Random) -> tuple[bool, bytes]:
    """Whether it is our own plain format, and the item."""
    kind = rng.random()
    if kind < 0.08:
        return True, mutate(encode_plain(plain_value()), encode_plain([1, "a", {2}]), rng)
    if kind < 0.5:
        data = real.changed(rng)
    else:
        data = forged.archive(Grammar(rng).value(), STORAGES, compressed=rng.random() < 0.02)
    if rng.random() < 0.06:
        if rng.random() < 0.5:
            data = forged.overlapping(
                Grammar(rng).value(), bytes(rng.randrange(3000)), rng.randrange(9)
            )
        else:
            at = rng.choice((data.find(b"PK\1\2"), len(data) - 22, 0))
            data = data[:at] + mutate(data[at:], real.archives[0], rng)
    return False, data


def is_plain(value: Any, item_bytes: int) -> str:
    """What is wrong with a value; "" if it is of plain types inside of their memory."""
    seen: dict[int, Any] = {}
    todo, storages = [value], {}
    while todo:
        each = todo.pop()
        if id(each) in seen:
            continue
        seen[id(each)] = each
        if isinstance(each, np.ndarray | np.generic):
            wrong = wrong_array(np.asarray(each))
            if wrong:
                return wrong
        elif type(each) in (torch.Tensor, torch.nn.Parameter):
            memory = each.untyped_storage()
            storages[memory.data_ptr()] = memory.nbytes()
            last = each.storage_offset() + sum(
                (n - 1) * s for n, s in zip(each.shape, each.stride(), strict=True)
            )
            if each.numel() and (last + 1) * each.itemsize > memory.nbytes():
                return "a tensor beyond its storage"
            if each.dtype == torch.bool and each.numel() and int(each.view(torch.uint8).max()) > 1:
                return "a bool that is neither"
        elif isinstance(each, dict):
            todo += (
                [*each, *each.values(), *vars(each).values()]
                if type(each) is not dict
                else [*each, *each.values()]
            )
        elif type(each) in (list, tuple, set, frozenset):
            todo += each
        elif not isinstance(each, PLAIN):
            return f"a {type(each)}"
    return "storages of more than the item" if sum(storages.values()) > item_bytes else ""


PLAIN = (
    *(type(None), bool, int, float, complex, str, bytes, bytearray, slice, range, type),
    *(datetime.date, datetime.time, datetime.timedelta, datetime.timezone, pathlib.PurePath),
    *(torch.Size, torch.device, torch.dtype, torch.layout, np.dtype),
)


def wrong_array(array: np.ndarray[Any, Any]) -> str:
    for part in [array[name] for name in array.dtype.names] if array.dtype.names else [array]:
        if part.dtype.kind not in "biufcSUMmV" or part.dtype.hasobject:
            return f"an array of {part.dtype}"
        if part.dtype.kind == "b" and part.size and part.view(np.uint8).max() > 1:
            return "a bool that is neither"
        if part.dtype.kind == "U" and part.size:
            part.tolist()
    return ""


def alike(one: Any, other: Any, seen: set[tuple[int, int]]) -> bool:
    """Whether they are equal in every bit and type."""
    if type(one) is not type(other):
        return False
    if (id(one), id(other)) in seen:
        return True
    seen.add((id(one), id(other)))
    if isinstance(one, np.ndarray | np.generic):
        if one.dtype.names:
            same = one.dtype.newbyteorder("=") == other.dtype.newbyteorder("=")
            same = same and one.shape == other.shape
            if same and one.dtype.isnative and other.dtype.isnative:
                # With what lies between the fields. Types with objects are refused: they are bytes.
                same = one.tobytes("A") == other.tobytes("A")
            return same and all(alike(one[n], other[n], seen) for n in one.dtype.names)
        # NumPy's own makes the byte order the machine's; ours leaves it.
        native = [np.asarray(a).astype(a.dtype.newbyteorder("=")) for a in (one, other)]
        return native[0].dtype == native[1].dtype and alike(
            *[(a.shape, a.tobytes()) for a in native], seen
        )
    if isinstance(one, torch.Tensor):
        about = [
            (t.dtype, t.shape, t.stride(), t.storage_offset(), t.requires_grad)
            for t in (one, other)
        ]
        content = [bytes(t.untyped_storage()) for t in (one, other)] if one.numel() else [0, 0]
        return about[0] == about[1] and content[0] == content[1]
    if isinstance(one, dict):
        return alike([*one], [*other], seen) and alike([*one.values()], [*other.values()], seen)
    if type(one) in (set, frozenset):
        return sorted(map(repr, one)) == sorted(map(repr, other))
    if type(one) in (list, tuple):
        return len(one) == len(other) and all(
            alike(a, b, seen) for a, b in zip(one, other, strict=True)
        )
    return repr(one) == repr(other)


class Fuzz:
    """Rounds, one after the other, and what they found."""

    def __init__(self, seed: int, decode: Decode) -> None:
        self.seed = seed
        self.decode = decode
        self.real = Real()
        self.accepted = self.compared = 0
        self.peak = 0.0
        self.findings: list[str] = []

    def round(self, number: int) -> None:
        rng = random.Random((self.seed << 32) + number)
        is_ours, data = one_item(self.real, rng)
        if len(data) > ITEM_BYTES_MAX:
            return
        tracemalloc.start()
        try:
            value = decode_plain(data) if is_ours else self.decode(data)
            problem = ""
            self.accepted += 1
        except (BadValueError, IntegrityError) as error:
            value = error
            out_of = isinstance(error.__cause__, MemoryError) or "alloc" in str(error)
            problem = f"asked for too much memory: {error}" if out_of else ""
        except Exception:
            value, problem = None, traceback.format_exc(limit=-4)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        if peak > FACTOR * len(data) + SLACK_BYTES:
            problem = problem or f"took {peak} bytes for an item of {len(data)}"
        if not (problem or is_ours or isinstance(value, BadValueError)):
            problem = is_plain(value, len(data))
            if not problem and number % COMPARE_EVERY == 0:
                problem = self.compare(data, value)
        if problem:
            self.findings.append(f"round {number} of seed {self.seed}: {problem}")

    def compare(self, data: bytes, value: Any) -> str:
        """How Python's own unpickler makes something else of it; "" if it does not.

        In a process of its own, which that may end: it builds what ours refuses to. What ends it
        afterwards, while the two are compared, is a finding.
        """
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            signal.alarm(0)
            with contextlib.suppress(BaseException), open(write, "wb", buffering=0) as out:
                tell_compared(data, value, out)
            os._exit(0)
        os.close(write)
        with open(read, "rb") as told:
            found = told.read()
        _, status = os.waitpid(pid, 0)
        if not found:
            return ""
        self.compared += 1
        if not found.endswith(TOLD):
            return f"comparing ended with {os.waitstatus_to_exitcode(status)} after {found!r}"
        return found.removeprefix(LOADED).removesuffix(TOLD).decode()


LOADED, TOLD = b"=", b"\0"
"""Around what :func:`tell_compared` writes: there is something to compare with; that was done."""


def tell_compared(data: bytes, value: Any, out: BinaryIO) -> None:
    """Write how Python's own unpickler makes something else; nothing if it makes nothing."""
    try:
        other = torch.load(io.BytesIO(data), weights_only=False)
    except Exception:  # torch looks at checksums of the archive, which is not ours to do
        return
    out.write(LOADED)
    try:
        found = "" if alike(value, value, set()) else "is not like itself"
        found = found or how_unlike(value, other)
    except BaseException:
        found = traceback.format_exc(limit=-4)
    out.write(found.encode("utf-8", "replace") + TOLD)


def how_unlike(value: Any, other: Any) -> str:
    try:
        return "" if alike(value, other, set()) else f"is not {other!r:.200}"
    except RuntimeError:  # NumPy believes the flags of a type in the stream, which ours ignores
        return ""


def ours(data: bytes) -> Any:
    return values.rebuild(memoryview(data))


def former(data: bytes) -> Any:
    """What was there before: torch's unpickler, with all that NumPy's values name allowed."""
    kinds = [kind for kind in vars(np.dtypes).values() if isinstance(kind, type)]
    names = [
        (np.zeros(0).__reduce__()[0], f"numpy.{core}.multiarray._reconstruct")
        for core in ("core", "_core")
    ]
    scalars = [
        (np.float64(0).__reduce__()[0], f"numpy.{core}.multiarray.scalar")
        for core in ("core", "_core")
    ]
    plain = [bool, int, float, str, bytes, list, tuple, dict, frozenset, slice, range]
    allowed = [np.ndarray, np.dtype, *names, *scalars, *kinds, *plain, pathlib.PurePosixPath]
    with torch.serialization.safe_globals([each for each in allowed if each]):
        try:
            return torch.load(io.BytesIO(data), weights_only=True)
        except Exception as error:
            raise BadValueError(str(error)) from error


def weaken(how: str) -> Decode:
    """Leave something out, so that a test sees that it is missed."""
    if how == "former":
        return former
    if how == "charge":
        values._Interpreter.charge = lambda *_: None  # type: ignore[method-assign]
    elif how == "content":
        value_types._check_content = lambda _: None
    elif how == "order":
        values._Interpreter._tuple_of = lambda run, n: run._tuple(  # type: ignore[method-assign]
            [run._stack.pop() for _ in range(n)]
        )
    elif how == "padding":
        value_types._array = without_padding(value_types._array)
    elif how == "dies":
        globals()["alike"] = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    elif how == "raises":
        globals()["alike"] = not_alike
    return ours


def not_alike(*_: object) -> bool:
    raise KeyError("this comparison breaks")


def without_padding(whole: Callable[..., Any]) -> Callable[..., Any]:
    """As ``whole`` makes arrays, but with anything between fields."""

    def made(*args: Any) -> Any:
        found = whole(*args)
        if found.dtype.names is None or not found.size:
            return found
        anything = np.full(found.nbytes, 0xEE, np.uint8).view(found.dtype)
        anything = anything.reshape(found.shape, order=args[-1])
        anything[...] = found
        return anything

    return made


def too_long(*_: object) -> None:
    raise TimeoutError(f"a round took over {ROUND_SECONDS_MAX} s")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--findings", type=int, default=5, help="end after so many")
    parser.add_argument("--weaken", default="", help="what a test leaves out")
    parser.add_argument("--at", help="a file for the number of the round")
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    fuzz = Fuzz(options.seed, weaken(options.weaken))
    at = os.open(options.at, os.O_RDWR | os.O_CREAT) if options.at else -1
    signal.signal(signal.SIGALRM, too_long)
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[0])
    used = pages * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (used + ADDRESS_SPACE_BYTES,) * 2)
    start_s = time.process_time()
    done = 0
    for number in range(options.first, options.first + options.rounds):
        if at >= 0:
            os.pwrite(at, number.to_bytes(8, "little"), 0)
        signal.alarm(ROUND_SECONDS_MAX)
        fuzz.round(number)
        signal.alarm(0)
        done += 1
        if len(fuzz.findings) >= options.findings:
            break
    print("\n".join(fuzz.findings))
    print(
        f"{done} rounds, {fuzz.accepted} accepted, {fuzz.compared} compared, "
        f"{len(fuzz.findings)} findings, {time.process_time() - start_s:.1f} s of CPU"
    )
    return 1 if fuzz.findings else 0


if __name__ == "__main__":
    sys.exit(main())
