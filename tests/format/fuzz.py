"""Feeds mutated bytes to every decoder: ``python -m tests.format.fuzz --rounds 10000 --seed 1``.

A decoder may return a value or raise IntegrityError (FormatVersionError is one). Anything else,
more memory than a small multiple of the input, or a call of over five seconds is a finding: it is
printed with what reproduces it, saved if ``--save FOLDER`` is given, and makes the exit status 1.
"""

from __future__ import annotations

import argparse
import random
import resource
import sys
import time
import traceback
import tracemalloc
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from tests.format.samples import Target, mutate, targets
from tieredckpt.errors import IntegrityError

MEMORY_SLACK_BYTES = 1 << 15
CALL_SECONDS_MAX = 5.0
FINDINGS_MAX = 20
MEASURE_EVERY = 8  # tracemalloc makes a decoder several times slower


@dataclass
class Report:
    """What a run did and found."""

    calls: Counter[str] = field(default_factory=Counter)
    accepted: Counter[str] = field(default_factory=Counter)
    peak_factor: dict[str, float] = field(default_factory=dict)
    slowest_s: float = 0.0
    findings: list[tuple[str, str, bytes]] = field(default_factory=list)


def feed(target: Target, data: bytes, report: Report, *, measure: bool) -> None:
    """One call; whatever is wrong with it goes into the report."""
    report.calls[target.name] += 1
    if measure:
        tracemalloc.start()
    start_s = time.perf_counter()
    try:
        target.decode(data)
        report.accepted[target.name] += 1
    except IntegrityError:
        pass
    except Exception:
        report.findings.append((target.name, traceback.format_exc(limit=-6), data))
    elapsed_s = time.perf_counter() - start_s
    report.slowest_s = max(report.slowest_s, elapsed_s)
    if elapsed_s > CALL_SECONDS_MAX:
        report.findings.append((target.name, f"took {elapsed_s:.1f} s", data))
    if measure:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        factor = max(0, peak - MEMORY_SLACK_BYTES) / max(len(data), 1)
        report.peak_factor[target.name] = max(report.peak_factor.get(target.name, 0.0), factor)
        if factor > target.memory_factor:
            report.findings.append((target.name, f"allocated {peak} bytes", data))


def one_input(target: Target, others: list[bytes], rng: random.Random) -> bytes:
    """Mostly mutated samples, sometimes plain noise."""
    if rng.random() < 0.02:
        return rng.randbytes(rng.randrange(2000))
    return mutate(rng.choice(target.samples), rng.choice(others), rng)


def run(rounds: int, seed: int) -> Report:
    """Feed every target one input in each round; the same seed gives the same inputs."""
    rng = random.Random(seed)
    everything = targets()
    others = [sample for target in everything for sample in target.samples]
    report = Report()
    number = 0
    for _ in range(rounds):
        if len(report.findings) >= FINDINGS_MAX:
            break
        for target in everything:
            number += 1
            measure = number % MEASURE_EVERY == 0
            feed(target, one_input(target, others, rng), report, measure=measure)
    return report


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--save", type=Path, help="folder for the inputs of findings")
    options = parser.parse_args()
    report = run(options.rounds, options.seed)
    for name, calls in report.calls.items():
        print(
            f"{name:22} {calls:8} calls, {report.accepted[name]:7} accepted, "
            f"memory at most {report.peak_factor.get(name, 0.0):5.1f} x input + 32 KiB"
        )
    rss_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    print(
        f"{sum(report.calls.values())} calls, slowest {report.slowest_s:.3f} s, {rss_mib} MiB RSS"
    )
    for number, (name, what, data) in enumerate(report.findings):
        print(f"\nFINDING {number} in {name}: {what}\ninput begins {data[:64].hex()}")
        if options.save:
            options.save.mkdir(parents=True, exist_ok=True)
            (options.save / f"finding-{number}").write_bytes(data)
    return 1 if report.findings else 0


if __name__ == "__main__":
    sys.exit(main())
