"""A seed does the same every time: also in another process, where sets have another order."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def printed_by_each_process(code: str) -> str:
    """What ``code`` prints in two processes, which is the same."""
    said = [
        subprocess.run(
            [sys.executable, "-c", code], cwd=Path(__file__).parents[2], check=True, timeout=200,
            capture_output=True, text=True, env={**os.environ, "PYTHONHASHSEED": str(number)},
        ).stdout
        for number in (1, 2)
    ]  # fmt: skip
    assert said[0] == said[1]
    return said[0]
