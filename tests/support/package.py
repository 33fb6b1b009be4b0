"""``make test-package``: builds the package, and runs its wheel without torch in new environments.

Needs an index of packages. Not part of the gate, which needs none.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path

from packaging.requirements import Requirement

import tieredckpt
from tests.test_links import ROOT, tracked

COMMAND_S_MAX = 600
CONFIG = """
namespace: package
memory: {{capacity: 64MiB, keep: {{last: 1}}}}
tiers: [{{name: disk, url: "file://{folder}/tier"}}]
"""


def call(*command: str | Path, folder: Path) -> str:
    """What the command prints; a command that fails ends this one."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        command, cwd=folder, env=env, stdout=subprocess.PIPE, text=True, timeout=COMMAND_S_MAX
    )
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))} exited with {done.returncode}\n{done.stdout}")
    return done.stdout


def build(folder: Path) -> Path:
    """The wheel, from the source distribution: files that only the checkout has are not in it."""
    call(sys.executable, "-m", "build", "--outdir", folder, ROOT, folder=folder)
    call(sys.executable, "-m", "twine", "check", "--strict", *folder.iterdir(), folder=folder)
    (wheel,) = folder.glob("*.whl")
    return wheel


def check_files(wheel: Path) -> int:
    """The package is what git has of it: no file is missing, and none is there by accident."""
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
    known = {path.relative_to(ROOT).as_posix() for path in tracked("tieredckpt")}
    if packed != known:
        sys.exit(f"missing {sorted(known - packed)}, unexpected {sorted(packed - known)}")
    return len(packed)


def needs(wheel: Path) -> list[str]:
    """What the wheel requires, but torch."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (each for each in archive.namelist() if each.endswith(".dist-info/METADATA"))
        required = Parser().parsestr(archive.read(name).decode()).get_all("Requires-Dist", [])
    found = [Requirement(each) for each in required]
    return [str(each) for each in found if each.marker is None and each.name != "torch"]


def interpreter(version: str) -> str | None:
    """A command for this Python that runs: pyenv has commands for those that it does not run."""
    for command in (sys.executable, f"python{version}"):
        try:
            asked = "import sys, venv, ensurepip; print('%d.%d' % sys.version_info[:2])"
            done = subprocess.run([command, "-c", asked], capture_output=True, text=True)
        except FileNotFoundError:
            continue
        if done.stdout.strip() == version:
            return command
    return None


def try_it(wheel: Path, python: str, folder: Path) -> None:
    """The command line without torch, in an environment with the wheel and what it needs."""
    call(python, "-m", "venv", folder, folder=folder.parent)
    pip = (folder / "bin/python", "-m", "pip", "--disable-pip-version-check", "install", "-q")
    call(*pip, *needs(wheel), folder=folder)
    call(*pip, "--no-deps", wheel, folder=folder)
    ours = folder / "bin/tieredckpt"
    (folder / "tieredckpt.yaml").write_text(CONFIG.format(folder=folder))
    torch = "import importlib.util, tieredckpt; print(importlib.util.find_spec('torch'))"
    assert call(folder / "bin/python", "-c", torch, folder=folder) == "None\n"
    assert tieredckpt.__version__ in call(ours, "--version", folder=folder)
    assert "Usage: tieredckpt doctor" in call(ours, "doctor", "--help", folder=folder)
    checked = json.loads(call(ours, "config", "check", "tieredckpt.yaml", "--json", folder=folder))
    assert not [each for each in checked["problems"] if each["fatal"]], checked


def main() -> None:
    """Work in the folder that is given, which the caller removes."""
    folder = Path(sys.argv[1])
    (folder / "dist").mkdir()
    wheel = build(folder / "dist")
    print(f"{wheel.name}: {check_files(wheel)} files, as in git; twine has no complaint")
    about = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    versions = [each.rpartition(" ")[2] for each in about["classifiers"] if ":: 3." in each]
    tried = 0
    for version in versions:
        if (python := interpreter(version)) is None:
            print(f"Python {version}: not found, skipped")
            continue
        try_it(wheel, python, folder / version)
        print(f"Python {version}: --version, doctor --help and config check run without torch")
        tried += 1
    if not tried:
        sys.exit("no Python was found that the classifiers of pyproject.toml name")


if __name__ == "__main__":
    main()
