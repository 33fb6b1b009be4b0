"""docs/understand/testing.md names tests for each promise: all are part of `make test`."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SECTION = "## Promises, and the tests that keep them\n"
MARKS = ("full", "nightly")
"""Of tests that `make test` leaves out."""
BULLET = re.compile(r"^- .*\n(?:  .*\n)*", re.MULTILINE)
NESTED = re.compile(r"^ *- ", re.MULTILINE)
NAMED = re.compile(r"`([\w/]+\.py)`: (`\w+`(?:, `\w+`)*)")


def promises(page: str) -> list[tuple[str, list[str]]]:
    """Each bullet of the section, and what it names below it: a file and its tests."""
    _, _, rest = page.partition(f"\n{SECTION}")
    section, _, _ = rest.partition("\n## ")
    found = []
    for bullet in BULLET.findall(f"{section}\n"):
        promise, *named = (" ".join(each.split()) for each in NESTED.split(bullet)[1:])
        found.append((promise, named))
    assert sum(1 + len(named) for _, named in found) == len(NESTED.findall(section)), "stray lines"
    return found


def is_left_out(node: ast.stmt) -> bool:
    """Whether all cases of a function or class are: itself, or all of one list of parameters."""
    for decorator in getattr(node, "decorator_list", ()):
        if ast.unparse(decorator).startswith(tuple(f"pytest.mark.{mark}" for mark in MARKS)):
            return True
        if ast.unparse(decorator).startswith("pytest.mark.parametrize("):
            assert isinstance(decorator, ast.Call)
            if all(is_marked(case) for case in cases(decorator.args[1])):
                return True
    return False


def is_marked(case: ast.expr) -> bool:
    """Whether a case of a list of parameters names one of the marks, as itself or as a constant."""
    words = re.findall(r"\w+", ast.unparse(case).lower())
    return any(mark in words for mark in MARKS)


def cases(values: ast.expr) -> list[ast.expr]:
    """The parts of a list of parameters."""
    if isinstance(values, ast.BinOp):
        return [*cases(values.left), *cases(values.right)]
    return values.elts if isinstance(values, ast.List | ast.Tuple) else [values]


def in_text(text: str) -> dict[str, bool]:
    """Functions and classes at the top of a file, and whether `make test` leaves each out."""
    body = ast.parse(text).body
    whole = any(
        isinstance(each, ast.Assign)
        and ast.unparse(each.targets[0]) == "pytestmark"
        and is_marked(each.value)
        for each in body
    )
    return {
        node.name: whole or is_left_out(node)
        for node in body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    }


@cache
def in_file(path: Path) -> dict[str, bool]:
    return in_text(path.read_text("utf-8")) if path.exists() else {}


def problems(page: str) -> list[str]:
    wrong = []
    for promise, named in promises(page):
        if not named:
            wrong.append(f"no test of {promise!r}")
        for each in named:
            match = NAMED.fullmatch(each)
            if match is None:
                wrong.append(f"not read: {each!r}, for {promise!r}")
                continue
            tests = in_file(ROOT / "tests" / match[1])
            wrong += [
                f"missing or left out: {match[1]}::{name}, for {promise!r}"
                for name in re.findall(r"\w+", match[2])
                if tests.get(name, True)
            ]
    return wrong


def test_each_promise_has_a_test_in_every_run():
    page = (ROOT / "docs" / "understand" / "testing.md").read_text()
    found = promises(page)
    assert len(found) > 60
    assert sum(len(named) for _, named in found) > 100
    wrong = problems(page)
    assert not wrong, "\n".join(wrong)


def test_what_is_wrong_is_seen():
    here = "test_testing_page.py"
    page = f"""
{SECTION}
- One that is kept,
  over two lines.
  - `{here}`: `test_what_is_wrong_is_seen`,
    `test_each_promise_has_a_test_in_every_run`
- One without a test.
- One that is not there.
  - `{here}`: `test_what_is_wrong_is_seen`, `test_gone`
- One in another form.
  - `{here}::test_what_is_wrong_is_seen`
  - `nowhere.py`: `test_gone`

## Another section

- Not a promise.
"""
    kinds = ["no test of", "missing or left out", "not read", "missing or left out"]
    found = problems(page)
    assert len(found) == len(kinds), found
    assert all(text.startswith(kind) for text, kind in zip(found, kinds, strict=True)), found


@pytest.mark.parametrize("mark", MARKS)
def test_what_is_left_out_is_seen(mark: str):
    some = f"[1, pytest.param(2, marks=pytest.mark.{mark})]"
    every = f"[pytest.param(2, marks=pytest.mark.{mark})]"
    ranged = f"[pytest.param(n, marks={mark.upper()}) for n in range(9)]"
    text = f"""
@pytest.mark.parametrize("n", {some})
def test_some(): ...
@pytest.mark.parametrize("n", {every})
def test_every(): ...
@pytest.mark.parametrize("n", {ranged})
def test_ranged(): ...
@pytest.mark.parametrize("n", [1] + {ranged})
def test_sum(): ...
@pytest.mark.parametrize("m", [1, 2])
@pytest.mark.{mark}
class TestAll: ...
"""
    assert {name for name, left_out in in_text(text).items() if not left_out} == {
        "test_some",
        "test_sum",
    }
    assert all(in_text(f"pytestmark = pytest.mark.{mark}\n{text}").values())
    assert all(in_text(f"pytestmark = [pytest.mark.{mark}, other]\n{text}").values())
