"""The one field that pyproject.toml cannot have: README without links that lead nowhere.

All else about the package is in pyproject.toml.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parent
LINK = re.compile(
    r"(?P<code>^(```|~~~).*?^\2|^(?: {4}|\t).*?$|`[^`\n]*`)"
    r"|\[(?P<text>[^\]]*)\]\((?P<target>[^)\s]+)\)",
    re.MULTILINE | re.DOTALL,
)


def relink(page: str, address: Callable[[str], str | None]) -> str:
    """The Markdown of a page with ``address(target)`` in each relative link, outside of code.

    Where that is None, the link's text stays, alone.
    """

    def relinked(found: re.Match[str]) -> str:
        text, target = found["text"], found["target"]
        if found["code"] or "://" in target or target.startswith("mailto:"):
            return found[0]
        new = address(target)
        return text if new is None else f"[{text}]({new})"

    return LINK.sub(relinked, page)


def repository() -> str:
    """The URL of the repository; empty until the owner has named one."""
    about = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    return str(about["urls"].get("Repository", "")).rstrip("/")


def long_description(url: str) -> str:
    """README for an index of packages, with links to the pages of this version, or with none."""
    init = (ROOT / "tieredckpt" / "__init__.py").read_text("utf-8")
    version = re.findall(r'^__version__ = "(.+)"$', init, re.MULTILINE)[0]
    readme = (ROOT / "README.md").read_text("utf-8")
    return relink(readme, lambda target: f"{url}/blob/v{version}/{target}" if url else None)


if __name__ == "__main__":
    from setuptools import setup

    setup(
        long_description=long_description(repository()),
        long_description_content_type="text/markdown",
    )
