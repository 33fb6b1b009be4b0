"""Floors of dependencies are above the holes that are known, and no page sends users elsewhere."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from tieredckpt.dcp.torch_release import TRIED

ROOT = Path(__file__).parent.parent

FLOORS: dict[str, tuple[str, str]] = {
    "aiohttp": ("3.14.3", "CVE-2026-69244: reads beyond the buffer of a bad request; before it "
                "CVE-2026-54273 to 54280, 34993, 47265, and below 3.13.4 CVE-2026-22815"),
    "botocore": ("1.36", "none known"),
    "click": ("8.3.3", "CVE-2026-7246: click.edit() runs parts of a name (we do not call it)"),
    "fsspec": ("2026.6", "CVE-2026-104851: files of another file system run code (reference://), "
               "and so do pickles in the folder of a cache"),
    "lightning": ("2.6.4", "2.6.2 and 2.6.3 were somebody else's, and stole credentials "
                  "(GHSA-w37p-236h-pfx3)"),
    "matplotlib": ("3.9", "none known"),
    "msgspec": ("0.19", "none known"),
    "numpy": ("1.26", "none known"),
    "obstore": ("0.12", "RUSTSEC-2026-0194 and 0195: an answer of the store takes the processor or "
                "the memory (quick-xml 0.40 in obstore 0.11)"),
    "prometheus-client": ("0.20", "none known"),
    "pytest": ("9.0.3", "CVE-2025-71176: a folder in /tmp that others can foresee"),
    "pyyaml": ("6", "CVE-2020-14343 was before"),
    "rich": ("13.9", "none known"),
    "setuptools": ("78.1.1", "CVE-2025-47273: a package's name writes files anywhere"),
    "torch": ("2.10", "CVE-2026-24747: what weights_only unpickles corrupts memory; before it "
              "CVE-2025-32434"),
    "transformers": ("5.24", "none known; examples/hf_trainer.py overrides methods of this one"),
    "xxhash": ("3.5", "none known"),
    "zstandard": ("0.23", "none known"),
}  # fmt: skip
"""Least version of each dependency, and the hole that the one before it has."""

TOOLS = {
    "accelerate", "boto3", "build", "hypothesis", "import-linter", "kubeflow-trainer-api",
    "markdown-it-py", "mkdocs", "mypy", "pytest-timeout", "pytest-xdist", "ruff", "s3fs",
    "safetensors", "spmd-types", "torchao", "torchdata", "trustme", "twine", "types-pyyaml", "tyro",
}  # fmt: skip
"""Of the tests and the Makefile alone, and no hole is known: `make` installs the pinned ones."""


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def requirements(project: Mapping[str, object]) -> Iterator[str]:
    """All that ``pyproject.toml`` requires, to build, to run and as an extra."""
    build, about = project["build-system"], project["project"]
    assert isinstance(build, dict)
    assert isinstance(about, dict)
    yield from build["requires"]
    yield from about["dependencies"]
    for extra in about["optional-dependencies"].values():
        yield from extra


def floor_of(requirement: Requirement) -> Version | None:
    floors = [Version(each.version) for each in requirement.specifier if each.operator == ">="]
    return max(floors, default=None)


def too_low(project: Mapping[str, object]) -> dict[str, str]:
    """What admits a version with a known hole, or was never looked at."""
    found = {}
    for text in requirements(project):
        requirement = Requirement(text)
        name = canonical(requirement.name)
        if name in TOOLS:
            continue
        if name not in FLOORS:
            found[name] = "look for known holes, and write its floor into FLOORS"
        elif (floor := floor_of(requirement)) is None or floor < Version(FLOORS[name][0]):
            found[name] = f"{text} admits versions before {FLOORS[name][0]}: {FLOORS[name][1]}"
    return found


def project() -> dict[str, object]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_floors_admit_no_known_hole():
    assert not too_low(project())


def test_every_floor_is_in_use():
    used = {canonical(Requirement(each).name) for each in requirements(project())}
    assert FLOORS.keys() | TOOLS == used


@pytest.mark.parametrize(
    ("table", "old", "new", "name"),
    [
        ("dependencies", "torch>=2.10", "torch>=2.9", "torch"),
        ("dependencies", "aiohttp>=3.14.3,<4", "aiohttp", "aiohttp"),
        ("dependencies", "aiohttp>=3.14.3,<4", "aiohttp!=3.12,<4", "aiohttp"),
        ("dependencies", "torch>=2.10", "left_Pad>=1", "left-pad"),
        ("s3", "obstore>=0.12", "obstore>=0.9", "obstore"),
        ("fsspec", "fsspec>=2026.6", "fsspec>=2026.4", "fsspec"),
        ("build", "setuptools>=78.1.1", "setuptools>=77.0.3", "setuptools"),
    ],
)
def test_a_lowered_floor_is_seen(table: str, old: str, new: str, name: str):
    text = (ROOT / "pyproject.toml").read_text()
    assert text.count(f'"{old}') == 1, table
    assert too_low(tomllib.loads(text.replace(f'"{old}', f'"{new}'))).keys() == {name}


def test_what_is_pinned_is_admitted():
    pins = dict(
        line.split("==")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if line and not line.startswith("#")
    )
    pins = {canonical(name): version for name, version in pins.items()}
    refused = [
        text
        for text in requirements(project())
        if not Requirement(text).specifier.contains(pins[canonical(Requirement(text).name)])
    ]
    assert not refused


def test_pages_say_the_versions_that_are_required():
    torch = next(Requirement(e) for e in requirements(project()) if e.startswith("torch>"))
    assert str(torch.specifier) == f">={floor_of(torch)}"  # a bound would replace a user's torch
    readme = (ROOT / "README.md").read_text()
    assert f"torch >= {floor_of(torch)}" in readme
    assert f"({', '.join(TRIED[:-1])} and {TRIED[-1]} were tried)" in " ".join(readme.split())
    assert f"({floor_of(torch)} or newer" in (ROOT / "docs/start/tutorial.md").read_text()


# --- how to install it ----------------------------------------------------------------------------

NAMED = re.compile(r"tieredckpt\[|\bpip3? install\b[^\n]*(?<![/\w.])tieredckpt(?![/\w.])")
"""The index's name of the project, from which nothing of ours is installed."""

TREE = ("tieredckpt", "docs", "tests", "examples", "benchmarks", ".ci", ".github")
TEXTS = {".py", ".md", ".toml", ".txt", ".yaml", ".yml", ".sh", ".cfg", ".json", ""}


def texts() -> Iterator[Path]:
    for folder in TREE:
        yield from (path for path in (ROOT / folder).rglob("*") if path.suffix in TEXTS)
    yield from (path for path in ROOT.iterdir() if path.suffix in TEXTS)


def test_nobody_is_told_to_install_a_name_that_is_not_ours():
    told = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}"
        for path in texts()
        if path.is_file() and path != Path(__file__) and "__pycache__" not in path.parts
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1)
        if NAMED.search(line)
    ]
    assert not told, "\n".join(told)


@pytest.mark.parametrize(
    ("line", "bad"),
    [
        ("pip install 'tieredckpt[s3]'", True),
        ('install "tieredckpt[plot]"', True),
        ("python -m pip install -U tieredckpt", True),
        ("pip install tieredckpt==1.0", True),
        ("pip install -e '.[s3]'   # in a clone of the repository", False),
        ("pip install ./tieredckpt", False),
        ("pip install /opt/src/tieredckpt/", False),
        ("tieredckpt status", False),
    ],
)
def test_the_unclaimed_name_is_recognised(line: str, bad: bool):
    assert bool(NAMED.search(line)) == bad
