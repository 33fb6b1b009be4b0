"""Which promises are broken by which seeds, as a table; the seeds are spread over all cores.

python -m tests.simulation.authority_seeds 1000
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator

from tests.simulation.authority_adapter import simulated
from tests.simulation.authority_oracle import Violation
from tests.simulation.authority_world import run_case

TRACE_LINES = 8
AT_ONCE = 50
"""Seeds that a process is given together: a second of work."""

Found = tuple[int, Violation]


def search(seeds: range) -> Iterator[tuple[Counter[str], list[Found]]]:
    """What happened, and what was violated, in some of the seeds after others: as they are done.

    Each seed does the same in whatever process it runs.
    """
    parts = [seeds[at : at + AT_ONCE] for at in range(0, len(seeds), AT_ONCE)]
    # A process is new after 100 parts, so that what it keeps of earlier cases does not grow.
    with multiprocessing.get_context("spawn").Pool(os.cpu_count(), maxtasksperchild=100) as pool:
        yield from pool.imap_unordered(part, parts)


def part(seeds: range) -> tuple[Counter[str], list[Found]]:
    """One after another, in this process."""
    counts: Counter[str] = Counter()
    violated: list[Found] = []
    with simulated():
        for seed in seeds:
            try:
                run_case(seed, counts)
            except Violation as violation:
                violated.append((seed, violation))
    return counts, violated


def table(seen: dict[tuple[str, str], list[Found]], most: int) -> list[str]:
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
    """Print Markdown; how far it is goes to a terminal."""
    most = int(sys.argv[1])
    seen: dict[tuple[str, str], list[Found]] = {}
    done = 0
    for _, violated in search(range(most)):
        done = min(most, done + AT_ONCE)
        for seed, violation in violated:
            seen.setdefault((violation.finding, violation.promise), []).append((seed, violation))
        if sys.stderr.isatty():
            print(
                f"\r{done} of {most}, {sum(map(len, seen.values()))} found", end="", file=sys.stderr
            )
    if sys.stderr.isatty():
        print(file=sys.stderr)
    print(*table(seen, most), sep="\n")


if __name__ == "__main__":
    main()
