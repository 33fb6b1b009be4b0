"""Streams as ``torch.save`` writes them, made by hand: an archive around a program of opcodes."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping

NONE, TRUE, FALSE, STOP = b"N", b"\x88", b"\x89", b"."


def named(name: str) -> bytes:
    """Push what a name stands for."""
    module, _, what = name.rpartition(".")
    return f"c{module}\n{what}\n".encode()


def text(value: str) -> bytes:
    encoded = value.encode("utf-8", "surrogatepass")
    return b"X" + struct.pack("<I", len(encoded)) + encoded


def number(value: int) -> bytes:
    encoded = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes((len(encoded),)) + encoded


def numbers(*values: int) -> bytes:
    return group(*map(number, values))


def group(*parts: bytes) -> bytes:
    """A tuple."""
    return b"(" + b"".join(parts) + b"t"


def listed(*parts: bytes) -> bytes:
    return b"](" + b"".join(parts) + b"e"


def mapped(*parts: bytes) -> bytes:
    return b"}(" + b"".join(parts) + b"u"


def call(name: str, *args: bytes) -> bytes:
    return named(name) + group(*args) + b"R"


def raw(value: bytes) -> bytes:
    """Bytes, as protocol 2 has them."""
    return call("_codecs.encode", text(value.decode("latin-1")), text("latin1"))


def dtype(name: str, order: str = "<", names: bytes = NONE, fields: bytes = NONE) -> bytes:
    made = call("numpy.dtype", text(name), FALSE, TRUE)
    flexible = {"V": 1, "S": 1, "U": 4}.get(name[0])
    size = number(-1 if flexible is None else flexible * int(name[1:]))
    state = (number(3), text(order), NONE, names, fields, size, number(1), number(16))
    return made + group(*state) + b"b"


def array(kind: bytes, shape: bytes, content: bytes) -> bytes:
    made = call(
        "numpy._core.multiarray._reconstruct", named("numpy.ndarray"), numbers(0), raw(b"b")
    )
    return made + group(number(1), shape, kind, FALSE, content) + b"b"


def storage(key: str, count: int, kind: str = "torch.FloatStorage", where: str = "cpu") -> bytes:
    return group(text("storage"), named(kind), text(key), text(where), number(count)) + b"Q"


def tensor(memory: bytes, offset: int, size: bytes, stride: bytes, *metadata: bytes) -> bytes:
    about = (number(offset), size, stride, FALSE, call("collections.OrderedDict"), *metadata)
    return call("torch._utils._rebuild_tensor_v2", memory, *about)


def archive(
    program: bytes, entries: Mapping[str, bytes] | None = None, *, compressed: bool = False
) -> bytes:
    """The archive with a program (STOP is added), and the content of storages."""
    content = {"data.pkl": b"\x80\x02" + program + STOP, "byteorder": b"little"}
    content |= {**(entries or {}), "version": b"3\n"}
    return zipped({f"archive/{name}": data for name, data in content.items()}, compressed)


def zipped(content: Mapping[str, bytes], compressed: bool = False, same_from: str = "") -> bytes:
    """A zip file; the content of all entries from ``same_from`` on is there only once."""
    out, directory = bytearray(), bytearray()
    place = None
    for name, data in content.items():
        encoded = name.encode()
        stored = zlib.compress(data)[2:-4] if compressed else data
        numbers = (20, 0, 8 if compressed else 0, 0, 0, zlib.crc32(data), len(stored), len(data))
        start = len(out) if place is None else place
        if place is None:
            out += b"PK\3\4" + struct.pack("<5H3I2H", *numbers, len(encoded), 0) + encoded + stored
        if name == same_from:
            place = start
        directory += b"PK\1\2" + struct.pack(
            "<6H3I5H2I", 20, *numbers, len(encoded), 0, 0, 0, 0, 0, start
        )
        directory += encoded
    count = len(content)
    end = struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, count, count, len(directory), len(out), 0)
    return bytes(out + directory + end)


def overlapping(program: bytes, content: bytes, count: int) -> bytes:
    """An archive in which ``count`` storages are one and the same piece of the file."""
    names = {f"archive/data/{key}": content for key in range(count)}
    start = {"archive/data.pkl": b"\x80\x02" + program + STOP}
    return zipped(start | names, same_from="archive/data/0")
