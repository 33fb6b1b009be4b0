"""The site as ``make docs`` builds it: README is its first page, and its list is the navigation.

mkdocs calls the functions whose names begin with ``on_``.
"""

from __future__ import annotations

import posixpath
import re
import runpy
from pathlib import Path
from typing import TYPE_CHECKING
from xml.etree import ElementTree

if TYPE_CHECKING:
    from markdown import Markdown
    from markdown.extensions import Extension
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
SETUP = runpy.run_path(str(ROOT / "setup.py"))
OUTSIDE = {
    "README.md": "index.md",
    "ARCHITECTURE.md": "ARCHITECTURE.md",
    "CHANGELOG.md": "CHANGELOG.md",
    "CONTRIBUTING.md": "CONTRIBUTING.md",
    "SECURITY.md": "SECURITY.md",
}
"""Pages that are not in ``docs/``, and their places on the site."""


def place(path: str) -> str | None:
    """Where a file of the repository is on the site; None if it is not there."""
    return path.removeprefix("docs/") if path.startswith("docs/") else OUTSIDE.get(path)


def navigation(readme: str) -> list[dict[str, object]]:
    """The list of pages at README's end: sections with titles and places."""
    _, _, pages = readme.partition("\n## Pages\n")
    found: list[dict[str, object]] = [{"tieredckpt": "index.md"}]
    for name, items in re.findall(r"^- \*\*(.+?):\*\*(.*\n(?:  .*\n)*)", pages, re.MULTILINE):
        links = re.findall(r"\[([^\]]+)\]\(([^)]+)\)", items)
        found.append({name: [{title[0].upper() + title[1:]: place(to)} for title, to in links]})
    return found


def relink(page: str, path: str, url: str) -> str:
    """A page whose links lead to other pages of the site, and else to the repository.

    Args:
        page: its Markdown
        path: of its file in the repository
        url: of the repository; if it is empty, links to what the site does not have become text
    """
    folder = posixpath.dirname(path)

    def address(target: str) -> str | None:
        file, mark, anchor = target.partition("#")
        to = posixpath.normpath(posixpath.join(folder, file))
        if not file or not (ROOT / to).exists():
            return target  # the latter ends a strict build
        if (there := place(to)) is not None:
            here = posixpath.dirname(place(path) or "")
            return posixpath.relpath(there, here or ".") + mark + anchor
        return f"{url}/blob/HEAD/{to}{mark}{anchor}" if url else None

    return str(SETUP["relink"](page, address))


def slug(heading: str, separator: str) -> str:
    """Its anchor as GitHub makes it, for which the links are written."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", separator)


def commonmark() -> Extension:
    """Makes Python-Markdown read pages as GitHub does; by itself it flattens most lists of ours."""
    from markdown.extensions import Extension
    from markdown_it import MarkdownIt

    reader = MarkdownIt("commonmark", {"html": False}).enable("table")

    def parse(lines: list[str]) -> ElementTree.ElementTree:
        page = reader.render("\n".join(lines))
        return ElementTree.ElementTree(ElementTree.fromstring(f"<div>{page}</div>"))  # noqa: S314

    class CommonMark(Extension):
        def extendMarkdown(self, md: Markdown) -> None:
            md.preprocessors.deregister("html_block")
            md.preprocessors.deregister("fenced_code_block")
            md.treeprocessors.deregister("inline")
            md.parser.parseDocument = parse

    return CommonMark()


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Set what mkdocs.yml cannot have."""
    config.nav = navigation((ROOT / "README.md").read_text("utf-8"))
    config.repo_url = SETUP["repository"]() or None
    config.markdown_extensions.append(commonmark())
    config.mdx_configs["toc"] = {"slugify": slug}
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Bring in the pages that are not in ``docs/``."""
    from mkdocs.structure.files import File

    for name, to in OUTSIDE.items():
        files.append(File.generated(config, to, abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Correct the links of each page."""
    path = Path(page.file.abs_src_path).relative_to(ROOT).as_posix()
    return relink(markdown, path, SETUP["repository"]())
