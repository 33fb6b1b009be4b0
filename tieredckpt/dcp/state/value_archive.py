"""The archive that ``torch.save`` writes, opened without a copy and without trust.

A zip file whose entries are not compressed. Its directory is checked against the bytes that are
there. A compressed entry is refused, since it could grow.
"""

from __future__ import annotations

import struct

_END = struct.Struct("<4s4H2IH")
_LOCATOR = struct.Struct("<4sIQI")
_END64 = struct.Struct("<4sQ2H2I4Q")
_CENTRAL = struct.Struct("<4s6H3I5H2I")
_LOCAL = struct.Struct("<4s5H3I2H")
_FULL16, _FULL32 = 0xFFFF, 0xFFFFFFFF
_ENTRIES_MAX = 1 << 20
_NAME_BYTES_MAX = 1024


class BadValueError(Exception):
    """The bytes are no value that is rebuilt here; the text is the reason."""


class NotArchiveError(BadValueError):
    """The bytes are not an archive as ``torch.save`` writes them."""


def entries(data: memoryview) -> dict[str, memoryview]:
    """The content of each entry of the archive, by its name without the archive's own folder.

    Raises:
        NotArchiveError: No archive of torch's, or an entry that is compressed.
    """
    try:
        found = _entries(data)
        if "data.pkl" not in found:
            raise NotArchiveError("no archive of torch.save")
        return found
    except (struct.error, UnicodeDecodeError) as error:
        raise NotArchiveError(f"an archive that is cut off or malformed: {error}") from error


def _entries(data: memoryview) -> dict[str, memoryview]:
    found: dict[str, memoryview] = {}
    count, at = _directory(data)
    for _ in range(count):
        entry = _CENTRAL.unpack_from(data, at)
        signature, flags, method, stored, size = entry[0], entry[3], entry[4], entry[8], entry[9]
        name_bytes, extra_bytes, comment_bytes, offset = entry[10], entry[11], entry[12], entry[16]
        if signature != b"PK\1\2":
            raise NotArchiveError("an archive with a malformed directory")
        name_at = at + _CENTRAL.size
        at = name_at + name_bytes + extra_bytes + comment_bytes
        name = data[name_at : name_at + name_bytes]
        if _FULL32 in (size, stored, offset):
            extra = data[name_at + name_bytes : name_at + name_bytes + extra_bytes]
            size, stored, offset = _large(extra, size, stored, offset)
        if offset > len(data) or name_bytes > _NAME_BYTES_MAX:
            raise NotArchiveError("an archive whose directory names missing bytes")
        local = _LOCAL.unpack_from(data, offset)
        if method or local[3] or flags & 1 or stored != size:
            raise NotArchiveError("an archive that is compressed or encrypted")
        start = offset + _LOCAL.size + local[9] + local[10]
        if local[0] != b"PK\3\4" or start + size > len(data):
            raise NotArchiveError("an archive whose directory names missing bytes")
        key = str(name, "utf-8").partition("/")[2]
        if key in found:
            raise NotArchiveError("an archive with an entry twice")
        found[key] = data[start : start + size]
    return found


def _directory(data: memoryview) -> tuple[int, int]:
    """Number of entries, and the offset of the first one's description."""
    end = len(data) - _END.size
    if end < 0:
        raise NotArchiveError("no archive of torch.save")
    signature, _, _, _, count, _, at, comment = _END.unpack_from(data, end)
    if signature != b"PK\5\6" or comment:
        raise NotArchiveError("no archive of torch.save")
    if count == _FULL16 or at == _FULL32:
        signature, _, place, _ = _LOCATOR.unpack_from(data, max(0, end - _LOCATOR.size))
        wide = _END64.unpack_from(data, place) if place < end else (b"",)
        if signature != b"PK\6\7" or wide[0] != b"PK\6\6":
            raise NotArchiveError("an archive with a malformed end")
        count, at = wide[7], wide[9]
    if count > _ENTRIES_MAX or at > end:
        raise NotArchiveError("an archive whose directory names missing bytes")
    return count, at


def _large(extra: memoryview, size: int, stored: int, offset: int) -> tuple[int, int, int]:
    """The numbers that do not fit into 32 bits, from the field that has them instead."""
    at = 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<2H", extra, at)
        if kind == 1:
            numbers = iter(struct.unpack_from(f"<{length // 8}Q", extra, at + 4))
            wide = [next(numbers, n) if n == _FULL32 else n for n in (size, stored, offset)]
            return wide[0], wide[1], wide[2]
        at += 4 + length
    return size, stored, offset
