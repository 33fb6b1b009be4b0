"""The tests that docs/understand/testing.md names for each promise exist and are not nightly."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
PROMISES = re.findall(
    r"^\| (.+?) \| (`[\w/]+\.py::.+) \|$",
    (ROOT / "docs" / "understand" / "testing.md").read_text(),
    re.MULTILINE,
)


@cache
def in_file(path: Path) -> dict[str, bool]:
    """Functions and classes at the top of a file, and whether each is wholly nightly."""
    return {
        node.name: any(
            ast.unparse(each).startswith("pytest.mark.nightly") for each in node.decorator_list
        )
        for node in ast.parse(path.read_text("utf-8")).body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    }


def test_each_promise_has_a_test_in_every_run():
    wrong = []
    assert len(PROMISES) > 60
    for promise, cell in PROMISES:
        for name in re.findall(r"`(.+?)`", cell):
            file, _, test = name.partition("::")
            path = ROOT / "tests" / file
            if in_file(path).get(test, True) if path.exists() else True:
                wrong.append(f"{name}, for {promise!r}")
    assert not wrong, "missing or nightly:\n" + "\n".join(wrong)
