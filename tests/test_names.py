"""Names on the wire, on disk and in scripts are those of tests/names.txt.

A change of the code's structure must not change them. A change on purpose writes the file anew,
and is in the changelog: python -m tests.test_names > tests/names.txt
"""

from __future__ import annotations

import importlib
import pkgutil
import re
from pathlib import Path
from typing import Any, get_args

import tieredckpt
from tieredckpt import errors
from tieredckpt.format.records import Cause, RecordKind
from tieredckpt.rpc.messages.base import Message, Request

NAMES = Path(__file__).parent / "names.txt"
PACKAGE = Path(tieredckpt.__file__).parent


def subclasses(kind: type[Any]) -> set[type[Any]]:
    return {kind}.union(*map(subclasses, kind.__subclasses__()))


def names() -> list[str]:
    """Each with its kind, sorted."""
    for module in pkgutil.iter_modules([str(PACKAGE / "rpc" / "messages")]):
        importlib.import_module(f"tieredckpt.rpc.messages.{module.name}")
    known = [each for each in vars(errors).values() if isinstance(each, type)]
    found = {f"error {e.__name__}" for e in known if issubclass(e, errors.TieredCkptError)}
    for message in subclasses(Message):
        if not message.__module__.startswith("tieredckpt.rpc.") or not message.__struct_fields__:
            continue
        verb = f" verb {message.verb()}" if issubclass(message, Request) else ""
        found.add(f"message {message.__name__}{verb}: {' '.join(message.__struct_fields__)}")
    found |= {f"record {kind}" for kind in get_args(RecordKind)}
    found |= {f"tombstone cause {cause}" for cause in get_args(Cause)}
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text("utf-8")
        found |= {f"failpoint {n}" for n in re.findall(r'failpoints\.reach\(\s*f?"([^"]+)"', text)}
    return sorted(found)


def test_names_are_as_they_were():
    assert names() == NAMES.read_text("utf-8").splitlines()


if __name__ == "__main__":
    print("\n".join(names()))
