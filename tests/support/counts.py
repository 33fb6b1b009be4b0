"""Counts of what was tried, per operation and fault, printed when pytest ends."""

from __future__ import annotations

import json
from collections import Counter

counts: dict[str, Counter[tuple[str, str]]] = {}
"""By name of a layer ("simulation", "processes"): how often each (operation, fault) was tried."""


def of(layer: str) -> Counter[tuple[str, str]]:
    """The counter of one layer, to be added to."""
    return counts.setdefault(layer, Counter())


def table(found: Counter[tuple[str, str]]) -> list[str]:
    """Lines of a table: operations down, faults across, and the sums."""
    faults = sorted({fault for _, fault in found})
    operations = sorted({operation for operation, _ in found})
    rows = [["", *faults, "all"]]
    rows += [
        [name, *(str(found[name, fault] or "") for fault in faults),
         str(sum(found[name, fault] for fault in faults))]
        for name in operations
    ]  # fmt: skip
    rows.append(["all", *(str(sum(found[n, f] for n in operations)) for f in faults),
                 str(found.total())])  # fmt: skip
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(
            [
                row[0].ljust(widths[0]),
                *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True)),
            ]
        )
        for row in rows
    ]


def as_json() -> str:
    """All layers, for a machine to read."""
    layers = {
        layer: [
            {"operation": operation, "fault": fault, "cases": count}
            for (operation, fault), count in sorted(found.items())
        ]
        for layer, found in counts.items()
    }
    return json.dumps(layers, indent=1) + "\n"
