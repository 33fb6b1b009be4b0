"""The command line: every scenario on one plug-in, beside PyTorch's own where that one fails."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

from tieredckpt.testing.dcp.scenario import SCENARIOS
from tieredckpt.testing.dcp.storage import BUILT_IN, StockStorage, find, hooks_of
from tieredckpt.testing.dcp.suite import Outcome, Suite, select

PASS, FAIL, DCP_CANNOT = "pass", "fail", "dcp cannot"
USAGE = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the suite; 0 if nothing failed but what stock DCP cannot do, 1 otherwise."""
    options = _parser().parse_args(arguments)
    names = select(options.k)
    if options.list:
        for name in names:
            print(f"{name:42} {SCENARIOS[name].title}")
        return 0
    if not names:
        print(f"no scenario has {options.k!r} in its name: see --list", file=sys.stderr)
        return USAGE
    # The author's module lies here. `python -m` has put it first already, a plain call has not.
    sys.path.append(os.getcwd())
    try:
        found = find(options.factory)
        hooks_of(found)
    except (ValueError, TypeError, ImportError, AttributeError) as error:
        print(f"--factory {options.factory}: {error}", file=sys.stderr)
        return USAGE
    began_s = time.monotonic()
    rows = run(found, names, quiet=options.json, compare=not options.no_compare, long=options.v)
    failed = sum(row["result"] == FAIL for row in rows)
    if options.json:
        json.dump({"factory": options.factory, "failed": failed, "scenarios": rows}, sys.stdout)
        print()
    else:
        counts = {kind: sum(row["result"] == kind for row in rows)
                  for kind in (PASS, FAIL, DCP_CANNOT)}  # fmt: skip
        text = ", ".join(f"{count} {kind}" for kind, count in counts.items())
        print(f"\n{len(rows)} scenarios in {time.monotonic() - began_s:.0f} s: {text}")
    return 1 if failed else 0


def run(
    found: Any, names: Sequence[str], *, quiet: bool, compare: bool, long: bool
) -> list[dict[str, Any]]:
    """Run scenarios and print a line for each.

    Args:
        found: The storage class or factory.
        names: Of the scenarios.
        quiet: Print nothing.
        compare: Run on stock DCP what fails.
        long: Print what each rank said of a failure.
    """
    rows = []
    with contextlib.ExitStack() as stack:
        suite = stack.enter_context(Suite(found))
        stock: Suite | None = None
        for name in names:
            outcome = suite.run(name)
            judged, reason = PASS, ""
            if not outcome.passed:
                judged, reason = FAIL, outcome.reason
                if compare and found is not StockStorage:
                    stock = stock or stack.enter_context(Suite(StockStorage))
                    theirs = stock.run(name)
                    if not theirs.passed:
                        judged = DCP_CANNOT
                        reason = f"{outcome.reason} (stock: {theirs.reason})"
            rows.append(_row(outcome, judged, reason))
            if not quiet:
                print(f"{name:42} {judged:10} {outcome.seconds:5.1f} s  {reason}", flush=True)
                if long and not outcome.passed:
                    print(outcome.details)
    return rows


def _row(outcome: Outcome, judged: str, reason: str) -> dict[str, Any]:
    return {
        "scenario": outcome.scenario.name,
        "subject": outcome.scenario.subject,
        "title": outcome.scenario.title,
        "result": judged,
        "reason": reason,
        "seconds": round(outcome.seconds, 3),
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tieredckpt.testing.dcp_suite",
        description="Run every scenario of torch.distributed.checkpoint on a storage plug-in.",
        epilog="'dcp cannot' means that PyTorch's own FileSystemWriter and -Reader fail as well.",
    )
    parser.add_argument(
        "--factory",
        required=True,
        metavar="MODULE:NAME",
        help="a subclass of Storage, a function path -> (writer, reader), or built in: "
        + ", ".join(BUILT_IN),
    )
    parser.add_argument("-k", metavar="NAME", help="only scenarios with this in their name")
    parser.add_argument(
        "-v", action="store_true", help="print what each rank reported of a failure"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end")
    parser.add_argument(
        "--no-compare", action="store_true", help="do not run stock DCP for comparison"
    )
    parser.add_argument("--list", action="store_true", help="list the scenarios and exit")
    return parser
