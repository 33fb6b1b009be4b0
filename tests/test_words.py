"""Names and prose use the standard terms of docs/understand/glossary.md, not private words.

tests/words.txt has the words with the terms that replace them, and the exceptions with reasons.
What is left to do: python -m tests.test_words [PATH under tieredckpt ...]
"""

from __future__ import annotations

import ast
import fnmatch
import importlib
import io
import pkgutil
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

import tieredckpt
from tests.test_names import subclasses

ROOT = Path(tieredckpt.__file__).parent
WORDS = Path(__file__).parent / "words.txt"
CHECKED: tuple[str, ...] = (
    "bench/",
    "cli/",
    "config/",
    "data/",
    "dcp/",
    "engine.py",
    "export/",
    "format/",
    "live/",
    "recovery/",
    "rpc/",
    "storage/",
)
"""Folders and modules that have no private word left. All of FOLDERS, once they are done."""
FOLDERS = (
    "format/",
    "config/",
    "storage/",
    "rpc/",
    "recovery/",
    "dcp/",
    "live/",
    "data/",
    "export/",
    "bench/",
    "cli/",
    "engine.py",
)
LATER = ("storage/shared/", "dcp/process_executor.py", "dcp/job/history.py")
"""Modules that are about to be rewritten keep their words until then."""
RECORDS = ("tieredckpt.rpc.messages.", "tieredckpt.format.", "tieredckpt.config.")
"""Packages whose structs are records, messages and the configuration: their names are formats."""


class Word(NamedTuple):
    where: str
    pattern: re.Pattern[str]
    standard: str


class Use(NamedTuple):
    path: str
    line: int
    is_name: bool
    text: str


def read_words() -> tuple[list[Word], list[tuple[str, str, str]]]:
    """The words, and the exceptions: glob, word or name, reason."""
    words, exceptions = [], []
    for line in WORDS.read_text("utf-8").splitlines():
        if not line or line.startswith("#"):
            continue
        first, second, third = (part.strip() for part in line.split(" | "))
        if first in ("names", "text", "both"):
            pattern = re.compile(rf"\b(?:{second.replace(' ', ' +')})\b")
            words.append(Word(first, pattern, third))
        else:
            exceptions.append((first, second, third))
    return words, exceptions


def record_names() -> frozenset[str]:
    """Classes and fields of messages, records and the configuration."""
    for module in pkgutil.walk_packages(tieredckpt.__path__, "tieredckpt."):
        if module.name.startswith(RECORDS):
            importlib.import_module(module.name)
    records = [s for s in subclasses(msgspec.Struct) if s.__module__.startswith(RECORDS)]
    return frozenset(s.__name__ for s in records).union(*(s.__struct_fields__ for s in records))


def modules(within: tuple[str, ...]) -> Iterator[str]:
    for path in sorted(ROOT.rglob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        if name.startswith(within) and not name.startswith(LATER):
            yield name


def uses(path: str, source: str) -> Iterator[Use]:
    """The names that a module defines, and its docstrings, messages and comments."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield Use(path, token.start[0], False, token.string)
    for node in ast.walk(ast.parse(source)):
        defined: str | None = None
        match node:
            case ast.FunctionDef(name=defined) | ast.AsyncFunctionDef(name=defined):
                pass
            case ast.ClassDef(name=defined) | ast.alias(asname=defined) | ast.arg(arg=defined):
                pass
            case ast.Name(id=defined, ctx=ast.Store()) | ast.ExceptHandler(name=defined):
                pass
            case ast.Attribute(attr=defined, ctx=ast.Store()):
                pass
            case ast.Constant(value=str(text)) if " " in text:  # else a key, a path or a number
                yield Use(path, node.lineno, False, text)
        if defined:
            yield Use(path, node.lineno, True, defined)


def found(use: Use, words: list[Word]) -> Iterator[tuple[str, str]]:
    """The private words in a name or a text, with their standard terms."""
    if use.is_name:
        text = " ".join(re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", use.text)).lower()
    else:
        text = re.sub(r"``[^`]*``|:\w+:`[^`]*`", " ", re.sub(r"\s+#?\s*", " ", use.text)).lower()
    for word in words:
        if word.where in ("both", "names" if use.is_name else "text"):
            for match in word.pattern.finditer(text):
                yield match.group(), word.standard


def problems(within: tuple[str, ...]) -> list[str]:
    words, exceptions = read_words()
    formats, unused, left = record_names(), set(exceptions), []
    for path in modules(within):
        allowed = [each for each in exceptions if fnmatch.fnmatch(path, each[0])]
        for use in uses(path, (ROOT / path).read_text("utf-8")):
            if use.is_name and use.text in formats:
                continue
            for word, standard in found(use, words):
                reason = [each for each in allowed if each[1] in (word, use.text)]
                unused.difference_update(reason)
                if not reason:
                    shown = use.text if use.is_name else f"text: {word}"
                    left.append(f"{path}:{use.line}: {shown}: {standard}")
    needless = (each for each in sorted(unused) if each[0].startswith(within))
    return left + [f"{WORDS.name}: needless exception {each}" for each in needless]


def test_no_private_words():
    assert not problems(CHECKED)


def test_private_words_are_found():
    words, _ = read_words()
    name = Use("x.py", 1, True, "_heldFlightsOfRule")
    assert [word for word, _ in found(name, words)] == ["flights", "rule", "held"]
    text = Use("x.py", 1, False, "A stranger\n    # takes up what is ``held``; the cursor")
    assert [word for word, _ in found(text, words)] == ["takes up", "stranger"]


if __name__ == "__main__":
    print("\n".join(sorted(problems(tuple(sys.argv[1:]) or FOLDERS))))
