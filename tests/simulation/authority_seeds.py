"""Which promises are broken by which seeds, as a table.

python -m tests.simulation.authority_seeds 1000
"""

from __future__ import annotations

import sys
import textwrap

from tests.simulation.authority_adapter import simulated
from tests.simulation.authority_oracle import Violation
from tests.simulation.authority_world import run_case

TRACE_LINES = 8


def table(seen: dict[tuple[str, str], list[tuple[int, Violation]]], most: int) -> list[str]:
    """Lines of Markdown: what was found by finding and promise, and how the first ones ended."""
    lines = [
        "| finding | promise | first seed | seeds until found | found in |",
        "| --- | --- | --- | --- | --- |",
    ]
    for (finding, promise), cases in sorted(seen.items()):
        first = min(seed for seed, _ in cases)
        count = f"{len(cases)} of {most}"
        lines.append(f"| {finding} | {promise} | {first} | {first + 1} | {count} |")
    for (finding, promise), cases in sorted(seen.items()):
        seed, violation = min(cases, key=lambda case: case[0])
        lines += ["", f"### Finding {finding}, promise {promise}: seed {seed}", ""]
        trace = [line for line in violation.trace if " is given back" not in line]
        lines += [f"    {line[:112].rstrip()}" for line in trace[-TRACE_LINES:]]
        lines += ["", *textwrap.wrap(f"Then: {violation.text[:240]}", 118)]
    return lines


def main() -> None:
    """Print Markdown."""
    most = int(sys.argv[1])
    seen: dict[tuple[str, str], list[tuple[int, Violation]]] = {}
    with simulated():
        for seed in range(most):
            try:
                run_case(seed)
            except Violation as violation:
                key = (violation.finding, violation.promise)
                seen.setdefault(key, []).append((seed, violation))
    print(*table(seen, most), sep="\n")


if __name__ == "__main__":
    main()
