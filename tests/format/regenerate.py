"""Writes the golden files: ``python -m tests.format.regenerate [--overwrite]``.

A golden file stands for checkpoints that people have on disk. Overwriting one is right only
before the first release of its version; after that a changed format gets a new version, a new
file beside the old one, and a decoder that reads both. So existing files are left alone unless
told otherwise.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import zstandard

from tests.format.samples import GOLDEN, VERSIONS

FOLDER = Path(__file__).parent / "golden"
ZSTD_VERSION_FILE = FOLDER / "zstd-version.txt"
"""The zstd that compressed the files: another one may compress the same payload differently."""


def zstd_version() -> str:
    return ".".join(str(part) for part in zstandard.ZSTD_VERSION)


def golden_path(name: str, version: int | None = None) -> Path:
    """Of the version that is written today, if none is named."""
    return FOLDER / f"{name}.v{version or VERSIONS.get(name, 1)}.bin"


def regenerate(*, overwrite: bool) -> int:
    """Write what is missing, or everything. Returns how many files would change but may not."""
    FOLDER.mkdir(exist_ok=True)
    refused = 0
    for name, make in GOLDEN.items():
        path, data = golden_path(name), make()
        if path.exists() and path.read_bytes() == data:
            print(f"{path.name}: unchanged")
        elif path.exists() and not overwrite:
            print(f"{path.name}: DIFFERS from what today's encoder makes; left as it is")
            refused += 1
        else:
            path.write_bytes(data)
            print(f"{path.name}: written, {len(data)} bytes")
    if not refused:
        ZSTD_VERSION_FILE.write_text(zstd_version() + "\n")
    return refused


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--overwrite", action="store_true", help="replace files that differ")
    return 1 if regenerate(overwrite=parser.parse_args().overwrite) else 0


if __name__ == "__main__":
    sys.exit(main())
