"""Output of the commands: tables for people, JSON for programs, sizes and ages in units."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tieredckpt.format.manifest import MAX_TAG_VALUE_CHARS

TABLE_WIDTH_MAX = 10_000
"""Columns that a table may take. The terminal wraps wider lines, which is ugly; but a table that is
fitted to the terminal loses contents, and a log needs no fitting."""


def printable(text: str) -> str:
    """Return ``text`` with escapes for all but line breaks that a terminal would obey."""
    return "".join(
        each if each.isprintable() or each == "\n" else each.encode("unicode_escape").decode()
        for each in text
    )


def one_line(text: str) -> str:
    """Return ``text`` without line breaks, which would end a row or a message early."""
    return printable(" ".join(text.split()))


def record_text(text: str) -> str:
    """Return ``text`` as a record stores it: in one line, cut at the limit of a record."""
    return one_line(text)[:MAX_TAG_VALUE_CHARS]


def size(num_bytes: int | None) -> str:
    """Return ``num_bytes`` in binary units, with three digits."""
    if num_bytes is None:
        return "-"
    value, units = float(num_bytes), iter(("B", "KiB", "MiB", "GiB", "TiB", "PiB"))
    unit = next(units)
    while value >= 1000 and (larger := next(units, None)) is not None:
        value, unit = value / 1024, larger
    return f"{value:.0f} {unit}" if unit == "B" or value >= 100 else f"{value:.3g} {unit}"


def age(at_s: float) -> str:
    """Return how long ago a wall-clock time was, in one unit. For people only."""
    seconds = max(0.0, time.time() - at_s)
    for limit, per, unit in ((120, 1, "s"), (7200, 60, "min"), (172_800, 3600, "h")):
        if seconds < limit:
            return f"{seconds / per:.0f} {unit} ago"
    return f"{seconds / 86_400:.0f} d ago"


def short(identifier: str | None) -> str:
    """Return the first digits of an id, enough for people to distinguish a few."""
    return identifier[:8] if identifier else "-"


def count(number: int, what: str) -> str:
    """Return ``number`` and the noun, in the plural unless ``number`` is 1."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


# --- answers of commands --------------------------------------------------------------------------

NUMBERS = frozenset({
    "attempt", "checkpoints", "held", "hosts reachable", "lag", "newest replicated", "newest step",
    "pulled", "quarantined", "queued", "replicas", "rtt", "segment", "segments", "sessions", "size",
    "skipped", "slots used", "slots' size", "speed", "step", "stored",
})  # fmt: skip
"""Titles of the columns that are right-aligned."""

COLUMNS: Mapping[str, tuple[str, Callable[[Any], str]]] = {
    "save_id": ("save id", short),
    "bytes": ("size", size),
    "size": ("size", size),
    "created_at_s": ("age", age),
    "tags": ("tags", lambda tags: ", ".join(f"{name}={value}" for name, value in tags.items())),
    "deleted_for_s": ("deleted", lambda seconds: age(time.time() - seconds)),
}
"""By key of a row, the title of its column and the text of its values; others are as they are."""


def print_json(**answer: Any) -> None:
    """Print ``answer`` as indented JSON."""
    text = json.dumps(answer, indent=2, ensure_ascii=False, default=str)
    # JSON itself escapes the lower control characters.
    click.echo(text.translate({each: f"\\u{each:04x}" for each in range(0x7F, 0xA0)}))


def print_table(
    title: str | None, rows: Sequence[Mapping[str, Any]], columns: Sequence[str] = ()
) -> None:
    """Print the named columns of ``rows``; without names all columns, and nothing if no rows.

    Cells are one line each, and are not parsed as markup.
    """
    if not rows and not columns:
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    shown = [(key, *COLUMNS.get(key, (key, str))) for key in columns or rows[0]]
    for _, name, _ in shown:
        table.add_column(name, justify="right" if name in NUMBERS else "left", no_wrap=True)
    for row in rows:
        table.add_row(*(_cell(row[key], text_of) for key, _, text_of in shown))
    target = Console(width=TABLE_WIDTH_MAX, highlight=False, emoji=False)
    with target.capture() as captured:
        target.print(table)
    if title is not None:
        click.secho(title, italic=True)
    # The last column's padding is noise in a pipe.
    for line in captured.get().splitlines():
        click.echo(line.rstrip())


def _cell(value: Any, text_of: Callable[[Any], str]) -> Text:
    if isinstance(value, Text):
        return value
    return Text("-" if value is None else one_line(text_of(value)))
