"""Pages: links lead to pages and headings that are there, and lines fit a screen."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parent.parent
LINE_CHARS_MAX = 100
LINK = re.compile(r"\]\(([^)\s#]*)(?:#([^)\s]*))?\)")
MENTION = re.compile(r"(?<![\w/.-])docs/[\w/.-]+\.\w+")
CODE = re.compile(r"^(```|~~~).*?^\1|^(?: {4}|\t).*?$|`[^`\n]*`", re.MULTILINE | re.DOTALL)


def tracked(*patterns: str) -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", *patterns], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return [ROOT / name for name in listed.stdout.splitlines()]


def anchors(page: Path) -> set[str]:
    """Of its headings, as GitHub makes them."""
    text = re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    found: set[str] = set()
    for heading in re.findall(r"^#+ +(.+?) *$", text, re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        anchor = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
        number, unique = 0, anchor
        while unique in found:
            unique = f"{anchor}-{(number := number + 1)}"
        found.add(unique)
    return found


def test_links_between_pages():
    dangling = []
    for page in tracked("*.md"):
        for target, anchor in LINK.findall(CODE.sub("", page.read_text("utf-8"))):
            if "://" in target or target.startswith("mailto:"):
                continue
            to = (page.parent / target).resolve() if target else page
            if not to.exists():
                dangling.append(f"{page.relative_to(ROOT)}: {target}")
            elif anchor and to.suffix == ".md" and anchor not in anchors(to):
                dangling.append(f"{page.relative_to(ROOT)}: {target}#{anchor}")
    assert not dangling, "\n".join(dangling)


def test_lines_of_pages():
    long = [
        f"{page.relative_to(ROOT)}:{number}"
        for page in tracked("*.md", ":!benchmarks/results")  # those are written by a program
        for number, line in enumerate(page.read_text("utf-8").splitlines(), 1)
        if len(line) > LINE_CHARS_MAX
    ]
    assert not long, "\n".join(long)


def test_pages_that_code_and_messages_name():
    dangling = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in tracked("*.py", "*.md", "*.toml", "Makefile")
        if path.name != "CHANGELOG.md"  # its older entries name pages where they were
        for name in MENTION.findall(path.read_text("utf-8"))
        if not (ROOT / name).exists()
    ]
    assert not dangling, "\n".join(dangling)


def test_both_checks_see_what_they_check():
    links = [
        each for page in tracked("*.md") for each in LINK.findall(CODE.sub("", page.read_text()))
    ]
    assert len([target for target, _ in links if target.endswith(".md")]) > 50
    assert "what-is-run-when" in anchors(ROOT / "docs/understand/testing.md")
