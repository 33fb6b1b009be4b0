"""The package's description, the site and the workflows: what no other test would notice."""

from __future__ import annotations

import re
import runpy
from typing import Any

import pytest
import yaml

import tieredckpt
from tests.test_links import LINK, ROOT, tracked

SETUP = runpy.run_path(str(ROOT / "setup.py"))
HOOKS = runpy.run_path(str(ROOT / "docs/hooks.py"))
URL = "https://host.example/owner/name"


def test_the_description_has_no_link_that_leads_nowhere():
    readme = (ROOT / "README.md").read_text("utf-8")
    relative = {target for target, _ in LINK.findall(readme) if "://" not in target}
    assert len(relative) > 20
    bare, linked = SETUP["long_description"](""), SETUP["long_description"](URL)
    assert not [target for target, _ in LINK.findall(bare) if "://" not in target]
    assert "](https://" in bare
    prefix = f"{URL}/blob/v{tieredckpt.__version__}/"
    found = [target for target, _ in LINK.findall(linked)]
    assert {each.removeprefix(prefix) for each in found if each.startswith(prefix)} == relative
    assert not [target for target in found if "://" not in target]
    assert re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", linked) == re.sub(
        r"\[([^\]]*)\]\([^)]*\)", r"\1", readme
    )
    assert "![" not in readme, "a picture's text alone says nothing"


def test_code_is_no_link():
    page = "a `b[0](c.md)`\n\n    d[1](e.md)\n\n```\nf[2](g.md)\n```\n[`h`](i.md#j) [k](m:/n)"
    text = SETUP["relink"](page, lambda target: None)
    assert text == page.replace("[`h`](i.md#j) [k](m:/n)", "`h` k")
    assert SETUP["relink"]("[a](mailto:b@c) [d](e://f)", lambda target: None).count("](") == 2


def test_the_navigation_is_the_list_of_readme():
    sections = HOOKS["navigation"]((ROOT / "README.md").read_text("utf-8"))
    entries = [
        entry for section in sections[1:] for (each,) in [section.values()] for entry in each
    ]
    places = [place for entry in entries for place in entry.values()]
    assert [*sections[1]] == ["Start"]
    assert sections[1]["Start"][0] == {"Tutorial": "start/tutorial.md"}
    assert None not in places
    pages = {page.relative_to(ROOT / "docs").as_posix() for page in tracked("docs/*.md")}
    pages = {page for page in pages if not page.startswith("design/")}
    pages |= {"ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md", "design/decisions.md"}
    assert sorted(places) == sorted(pages)


@pytest.mark.parametrize(
    ("path", "link", "without", "to"),
    [
        ("docs/use/live.md", "../../ARCHITECTURE.md#a", "../ARCHITECTURE.md#a", None),
        ("docs/use/live.md", "elastic.md", "elastic.md", None),
        ("docs/use/live.md", "#a", "#a", None),
        ("docs/reference/format/plan.md", "../../../README.md", "../../index.md", None),
        ("README.md", "docs/use/live.md#a", "use/live.md#a", None),
        ("docs/use/live.md", "../../examples/live/loader.py", "", "examples/live/loader.py"),
        ("docs/use/clusters.md", "../../examples/cluster", "", "examples/cluster"),
        ("docs/use/live.md", "../../examples/none.py", "../../examples/none.py", None),
    ],
)
def test_links_of_the_site(path: str, link: str, without: str, to: str | None):
    bare = f"[text]({without})" if without else "text"
    assert HOOKS["relink"](f"[text]({link})", path, "") == bare
    linked = bare if to is None else f"[text]({URL}/blob/HEAD/{to})"
    assert HOOKS["relink"](f"[text]({link})", path, URL) == linked


def test_workflows_run_targets_that_exist_and_may_only_read():
    targets = re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
    runs = set()
    for path in tracked(".github/workflows"):
        workflow: dict[str, Any] = yaml.safe_load(path.read_text("utf-8"))
        assert workflow["permissions"] == {"contents": "read"}, path
        for job in workflow["jobs"].values():
            assert job["timeout-minutes"], path
            assert "permissions" not in job, path
            for step in job["steps"]:
                assert re.fullmatch(r"actions/[\w-]+@v\d+", step.get("uses", "actions/a@v1")), path
                runs |= {step["run"]} if "run" in step else set()
    assert runs >= {"make check", "make test"}
    assert {run.split()[0] for run in runs} == {"make"}
    assert {run.split()[1] for run in runs} <= set(targets)


def test_the_version_has_its_dated_section():
    text = (ROOT / "CHANGELOG.md").read_text("utf-8")
    sections = re.findall(r"^## (.+)$", text, re.MULTILINE)
    newest = next(each for each in sections if each != "[Unreleased]")
    version = re.escape(tieredckpt.__version__)
    assert re.fullmatch(rf"\[{version}\] - \d{{4}}-\d\d-\d\d", newest)
