"""Streams as ``torch.save`` writes them, made by hand: an archive around a program of opcodes."""

from __future__ import annotations

import io
import struct
import zipfile
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


def tensor(memory: bytes, offset: int, size: bytes, stride: bytes) -> bytes:
    hooks = call("collections.OrderedDict")
    return call(
        "torch._utils._rebuild_tensor_v2", memory, number(offset), size, stride, FALSE, hooks
    )


def archive(
    program: bytes, entries: Mapping[str, bytes] | None = None, *, compressed: bool = False
) -> bytes:
    """The archive with a program (STOP is added), and the content of storages."""
    out = io.BytesIO()
    method = zipfile.ZIP_DEFLATED if compressed else zipfile.ZIP_STORED
    with zipfile.ZipFile(out, "w", method) as made:
        made.writestr("archive/data.pkl", b"\x80\x02" + program + STOP)
        made.writestr("archive/byteorder", b"little")
        for name, content in (entries or {}).items():
            made.writestr(f"archive/{name}", content)
        made.writestr("archive/version", b"3\n")
    return out.getvalue()


def overlapping(program: bytes, content: bytes, count: int) -> bytes:
    """An archive in which ``count`` storages are one and the same piece of the file."""
    one = archive(program, {"data/0": content})
    out = bytearray(one[: one.index(b"PK\1\2")])
    directory = len(out)
    with zipfile.ZipFile(io.BytesIO(one)) as made:
        places = {info.filename: info for info in made.infolist()}
    wanted = ["archive/data.pkl", *(f"archive/data/{key}" for key in range(count))]
    for name in wanted:
        info = places[name if name in places else "archive/data/0"]
        head = (b"PK\1\2", 20, 20, 0, 0, 0, 0, info.CRC, info.file_size, info.file_size)
        tail = (len(name), 0, 0, 0, 0, 0, info.header_offset)
        out += struct.pack("<4s6H3I5H2I", *head, *tail) + name.encode()
    end = (b"PK\5\6", 0, 0, len(wanted), len(wanted), len(out) - directory, directory, 0)
    return bytes(out + struct.pack("<4s4H2IH", *end))
