"""ARCHITECTURE.md names each folder of the package with its docstring, and modules that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "tieredckpt"
PAGE = (ROOT / "ARCHITECTURE.md").read_text("utf-8")


def jobs() -> dict[str, str]:
    """By folder, the first paragraph of the docstring of its ``__init__``."""
    found = {}
    for path in PACKAGE.rglob("__init__.py"):
        folder = path.parent.relative_to(PACKAGE)
        if folder.parts and folder.parts[0] != "testing":
            text = ast.get_docstring(ast.parse(path.read_text("utf-8"))) or ""
            found[f"{folder.as_posix()}/"] = " ".join(text.split("\n\n")[0].split())
    return found


def test_each_folder_has_its_job_in_the_table():
    rows = re.findall(r"^\| `([\w/]+/)` \| (.*) \|$", PAGE, re.MULTILINE)
    assert len(dict(rows)) == len(rows)
    assert dict(rows) == jobs()


def test_each_job_is_one_sentence():
    bad = {folder: job for folder, job in jobs().items() if not re.fullmatch(r"[^.]+\.", job)}
    assert not bad


def test_each_module_that_is_named_exists():
    named = set(re.findall(r"`([\w/]+\.py)`", PAGE))
    assert len(named) > 40
    assert not sorted(name for name in named if not (PACKAGE / name).exists())
