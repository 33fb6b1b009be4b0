"""Sizes, durations and schedules as people write them, and back.

Every parser takes a value of YAML or of a Python dict, returns one plain value, and raises
ValueError with the part of the message that follows the key: the value, and what to write instead.
Every value that a formatter prints parses to the same value again.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from fractions import Fraction
from typing import Annotated

import msgspec

SIZE_BYTES_MAX = 1 << 60
"""Largest accepted size: one exbibyte."""
DURATION_S_MAX = 366 * 86400.0
"""Longest accepted duration: a year."""
EVERY_STEPS_MAX = 10**12
"""Longest schedule by steps."""

_SIZE_UNITS = {"B": 1} | {
    prefix + suffix: factor**power
    for power, prefix in enumerate("KMGTPE", start=1)
    for suffix, factor in (("iB", 1024), ("B", 1000))
}
_SIZE_UNITS["kB"] = 1000
_DURATION_MS = {
    "ms": 1, "s": 1000, "sec": 1000, "second": 1000, "seconds": 1000,
    "min": 60_000, "minute": 60_000, "minutes": 60_000,
    "h": 3_600_000, "hour": 3_600_000, "hours": 3_600_000,
    "d": 86_400_000, "day": 86_400_000, "days": 86_400_000,
}  # fmt: skip
# Bounded digits: a number of a megabyte's length must not cost a quadratic conversion.
_QUANTITY = re.compile(r"\s*([0-9]{1,19}(?:\.[0-9]{1,9})?)\s*([A-Za-z]*)\s*")
_PER_SECOND = re.compile(r"\s*(?:/\s*s(?:ec(?:ond)?)?|ps)\s*$")
_BITS = re.compile(r"\s*[0-9.]{1,19}\s*[kKMGT]i?(?:bit|bits|b)\s*")
_SHOWN_CHARS_MAX = 60

SIZE_EXAMPLES = 'a number and a unit, as in "64GiB" (1024^3), "64GB" (1000^3) or "512MiB"'
DURATION_EXAMPLES = 'a number and a unit, as in "500 ms", "30 s", "10 min", "2 h" or "1 d"'
EVERY_EXAMPLES = '"10 steps", "30 min" or "save"'


def show(value: object) -> str:
    """``value`` as a user wrote it, for an error message: one line, never long."""
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        cut = value if len(value) <= _SHOWN_CHARS_MAX else value[: _SHOWN_CHARS_MAX - 3] + "..."
        escaped = cut.encode("unicode_escape").decode("ascii") if not cut.isprintable() else cut
        return f'"{escaped}"'
    if isinstance(value, int) and abs(value) < 10**18:
        return str(value)
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list | tuple):
        return "a list"
    return f"a value of type {type(value).__name__}"


def one_of(values: Iterable[str]) -> str:
    """The values as a choice in a sentence: ``"a", "b" or "c"``."""
    quoted = [f'"{value}"' for value in values]
    return quoted[0] if len(quoted) == 1 else ", ".join(quoted[:-1]) + " or " + quoted[-1]


def _quantity(value: object) -> tuple[Fraction, str] | None:
    """The number (exact) and the unit ("" if none) in ``value``, or None."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return Fraction(value), ""
    if isinstance(value, float):
        # Only finite floats have a ratio; nan and inf are not quantities.
        return (Fraction(repr(value)), "") if abs(value) < 1e18 else None
    match = _QUANTITY.fullmatch(value) if isinstance(value, str) else None
    return (Fraction(match[1]), match[2]) if match else None


def parse_size(value: object, *, least_bytes: int = 1) -> int:
    """Bytes of ``"64GiB"``, ``"1.5 GB"`` or a whole number of bytes; fractions round down.

    Raises:
        ValueError: Not a size, or outside ``least_bytes`` .. :data:`SIZE_BYTES_MAX`.
    """
    quantity = _quantity(value)
    if quantity is None:
        raise ValueError(f"{show(value)} is not a size; write {SIZE_EXAMPLES}")
    number, unit = quantity
    if unit and unit not in _SIZE_UNITS:
        # "64G" may mean either of two; "64Gi" and "64gib" only one.
        meant = [
            name
            for name in _SIZE_UNITS
            if name != "kB"  # the same as KB
            and unit.lower() in (name.lower(), name[:-1].lower(), name[0].lower())
        ]
        hint = f"; did you mean {one_of(meant)}?" if meant else f"; write {SIZE_EXAMPLES}"
        raise ValueError(f'{show(value)} is not a size: there is no unit "{unit}"{hint}')
    if not unit and number.denominator != 1:
        raise ValueError(f"{show(value)} is not a size; write {SIZE_EXAMPLES}")
    size_bytes = int(number * _SIZE_UNITS[unit or "B"])
    if not least_bytes <= size_bytes <= SIZE_BYTES_MAX:
        bare = "" if unit else " (without a unit it is bytes)"
        raise ValueError(
            f"{show(value)} is out of range{bare}; allowed are {format_size(least_bytes)} to "
            f"{format_size(SIZE_BYTES_MAX)}"
        )
    return size_bytes


def format_size(size_bytes: int) -> str:
    """The shortest exact form in binary units, such as ``"64GiB"``; parses to the same number."""
    for unit in ("EiB", "PiB", "TiB", "GiB", "MiB", "KiB"):
        if size_bytes and size_bytes % _SIZE_UNITS[unit] == 0:
            return f"{size_bytes // _SIZE_UNITS[unit]}{unit}"
    return f"{size_bytes}B"


def parse_rate(value: object, *, least_bytes_per_s: int = 1) -> int:
    """Bytes per second of ``"2GiB/s"``, ``"2GiB"`` or a whole number of bytes.

    Raises:
        ValueError: Not a rate, or outside ``least_bytes_per_s`` .. :data:`SIZE_BYTES_MAX`.
    """
    text = _PER_SECOND.sub("", value) if isinstance(value, str) else value
    if isinstance(text, str) and _BITS.fullmatch(text):
        raise ValueError(f'{show(value)} is not bytes per second: write "1GB/s" for 8 Gbit/s')
    try:
        return parse_size(text, least_bytes=least_bytes_per_s)
    except ValueError as error:
        # The message has the text without "/s"; the user knows the one with it.
        message = str(error)
        raise ValueError(message.replace(show(text), show(value), 1)) from None


def format_rate(bytes_per_s: int) -> str:
    """The shortest exact form, such as ``"2GiB/s"``; parses to the same number."""
    return format_size(bytes_per_s) + "/s"


def approximate_size(size_bytes: int) -> str:
    """A size for reading, with three digits: ``"1.25 GiB"``. Not exact."""
    for unit in ("EiB", "PiB", "TiB", "GiB", "MiB", "KiB"):
        if size_bytes >= _SIZE_UNITS[unit]:
            return f"{size_bytes / _SIZE_UNITS[unit]:.4g} {unit}"
    return f"{size_bytes} B"


def parse_duration(value: object, *, least_s: float = 0.0, most_s: float = DURATION_S_MAX) -> float:
    """Seconds of ``"500 ms"``, ``"1.5 h"`` or a number of seconds, to the millisecond.

    Raises:
        ValueError: Not a duration, or outside ``least_s`` .. ``most_s``.
    """
    quantity = _quantity(value)
    if quantity is None:
        raise ValueError(f"{show(value)} is not a duration; write {DURATION_EXAMPLES}")
    number, unit = quantity
    if unit and unit not in _DURATION_MS:
        hint = 'write "min" for minutes' if unit in ("m", "M") else f"write {DURATION_EXAMPLES}"
        raise ValueError(f'{show(value)} is not a duration: there is no unit "{unit}"; {hint}')
    duration_s = round(number * _DURATION_MS[unit or "s"]) / 1000
    if not least_s <= duration_s <= most_s:
        raise ValueError(
            f"{show(value)} is out of range; allowed are {format_duration(least_s)} to "
            f"{format_duration(most_s)}"
        )
    return duration_s


def format_duration(duration_s: float) -> str:
    """The shortest exact form, such as ``"30 min"``; parses to the same number."""
    ms = round(duration_s * 1000)
    for unit in ("d", "h", "min", "s"):
        if ms and ms % _DURATION_MS[unit] == 0:
            return f"{ms // _DURATION_MS[unit]} {unit}"
    return f"{ms} ms" if ms else "0 s"


class Every(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How often a tier gets a checkpoint: by steps, by seconds, or (both None) at every save."""

    steps: Annotated[int, msgspec.Meta(ge=1, lt=1 << 62)] | None = None
    """At most :data:`EVERY_STEPS_MAX` in a configuration."""
    seconds: Annotated[float, msgspec.Meta(gt=0, le=1e9)] | None = None
    """At least 1 ms, at most :data:`DURATION_S_MAX` in a configuration."""

    def __post_init__(self) -> None:
        if self.steps is not None and self.seconds is not None:
            raise ValueError("by steps or by seconds, not both")

    def __str__(self) -> str:
        """As it is written in the configuration."""
        if self.steps is not None:
            return "1 step" if self.steps == 1 else f"{self.steps} steps"
        return "save" if self.seconds is None else format_duration(self.seconds)


def parse_every(value: object) -> Every:
    """The schedule that ``"10 steps"``, ``"30 min"`` or ``"save"`` means.

    Raises:
        ValueError: Not a schedule, or out of range.
    """
    if isinstance(value, str) and value.strip().lower() == "save":
        return Every()
    quantity = _quantity(value)
    if quantity is not None and not quantity[1]:
        number = show(value).strip('"')
        raise ValueError(
            f'{show(value)} is not a schedule: {number} of what? Write "{number} steps" or '
            f'"{number} min"'
        )
    if quantity is not None and quantity[1] in ("step", "steps"):
        steps = quantity[0]
        if steps.denominator != 1 or not 1 <= steps <= EVERY_STEPS_MAX:
            raise ValueError(
                f"{show(value)} is out of range; allowed are integer numbers of steps, "
                f"1 to {EVERY_STEPS_MAX}"
            )
        return Every(steps=int(steps))
    if quantity is not None and quantity[1] in _DURATION_MS:
        seconds = parse_duration(value)
        if not seconds:
            raise ValueError(f'{show(value)} is out of range; write "save" for every save')
        return Every(seconds=seconds)
    hint = ' ("min" for minutes)' if quantity is not None and quantity[1] in ("m", "M") else ""
    raise ValueError(f"{show(value)} is not a schedule; write {EVERY_EXAMPLES}{hint}")


def parse_step(value: object) -> Every:
    """A schedule that is not "save". Raises ValueError."""
    every = parse_every(value)
    if every == Every():
        raise ValueError(f'{show(value)} is not allowed; write "1000 steps" or "6 h"')
    return every
