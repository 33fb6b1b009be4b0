"""Style, types, layers and shape, checked with every run of the tests."""

from __future__ import annotations

import ast
import graphlib
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "tieredckpt"
MODULE_LINES_MAX = 700
FOLDER_MODULES_MAX = 12
FUNCTION_LINES_MAX = 75

BROAD_EXCEPTS = {
    "tieredckpt/agent/copies/replicator.py": 1,  # top of a daemon thread
    "tieredckpt/agent/leader/holds.py": 1,  # top of a daemon thread
    "tieredckpt/agent/node.py": 1,  # top of the reaper
    "tieredckpt/agent/peering/failure_detector.py": 1,  # top of a daemon thread
    "tieredckpt/bench/launch.py": 1,  # to delete what the ranks left, raised again
    "tieredckpt/data/source.py": 1,  # of the loader, raised again
    "tieredckpt/data/batches.py": 2,  # of the loader, raised in the training loop
    "tieredckpt/data/identity.py": 1,  # of the script's objects: they cannot be seen
    "tieredckpt/data/entries.py": 1,  # an entry that cannot be read, logged, loaded again
    "tieredckpt/live/board.py": 1,  # top of the threads
    "tieredckpt/live/rank.py": 4,  # train's errors, hooks, what a rank keeps
    "tieredckpt/live/world.py": 1,  # of a save in a world that ended, logged
    "tieredckpt/live/survivor.py": 1,  # a state_dict(), named
    "tieredckpt/agent/tiers/worker.py": 1,  # top of a spilling thread
    "tieredckpt/dcp/slots/background_saves.py": 1,  # records the cause, raises it again
    "tieredckpt/dcp/process_executor.py": 3,  # likewise
    "tieredckpt/dcp/save/failures.py": 1,  # an error that cannot be pickled travels as its text
    "tieredckpt/dcp/save/writer.py": 1,  # raised again by the save, for all ranks
    "tieredckpt/storage/object/supplied.py": 1,  # of the script, raised when due
    "tieredckpt/testing/dcp/crews.py": 1,  # a rank's failure is its answer
    "tieredckpt/testing/dcp/job.py": 1,  # that it raises is what the scenario asks for
    "tieredckpt/testing/dcp/scenarios/asynchronous.py": 2,  # the ranks must agree on it
    "tieredckpt/testing/dcp/scenarios/groups.py": 1,  # printed: a writer may raise there
    "tieredckpt/testing/tier_suite.py": 1,  # handed from a thread to the test that asserts on it
    # Removes the half-written file, then raises it again; libraries raise what they like.
    "tieredckpt/storage/object/fsspec.py": 2,
    "tieredckpt/storage/object/s3_upload.py": 2,  # stops the other parts, then raises it again
    "tieredckpt/storage/file_io.py": 1,  # stops the other threads, then raises it again
    "tieredckpt/rpc/agent_client.py": 1,  # closes the connection, then raises it again
    "tieredckpt/rpc/peer_client.py": 2,  # close the connection, then raise it again
    "tieredckpt/rpc/peer_server.py": 2,  # tops of a request
    "tieredckpt/rpc/agent_server.py": 1,  # top of a request
}
"""Allowed ``except Exception`` (or wider) per module: top of a daemon task, or clean up and
re-raise. A new one needs its reason beside it and its number here."""


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def tool(*command: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}{done.stderr}"


def test_ruff_check():
    tool("ruff", "check", ".")


def test_ruff_format():
    tool("ruff", "format", "--check", ".")


def test_mypy_strict():
    tool("mypy")


def test_import_layers():
    code = "import sys; from importlinter.cli import lint_imports_command as run; run()"
    done = subprocess.run(
        [sys.executable, "-c", code, "--no-cache"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("module", ["tieredckpt", "tieredckpt.cli.main", "tieredckpt.agent.daemon"])
def test_import_without_torch(module: str):
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, f"importing {module} imports torch, or fails\n{done.stderr}"


def test_module_length():
    long = {
        relative(p): n
        for p in modules()
        if (n := len(p.read_text().splitlines())) > MODULE_LINES_MAX
    }
    assert not long, f"over {MODULE_LINES_MAX} lines: {long}"


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def test_function_length():
    long = [
        f"{relative(path)}:{fn.lineno} {fn.name}: {size} lines"
        for path in modules()
        for fn in functions(ast.parse(path.read_text()))
        if (size := (fn.end_lineno or fn.lineno) - fn.lineno + 1) > FUNCTION_LINES_MAX
    ]
    assert not long, "\n".join(long)


def test_folders_have_at_most_twelve_modules():
    count = Counter(
        path.parent for path in modules() if "testing" not in path.parts and path.stem != "__init__"
    )
    large = {relative(folder): n for folder, n in count.items() if n > FOLDER_MODULES_MAX}
    assert not large, f"over {FOLDER_MODULES_MAX} modules: {large}"


def test_no_import_circles():
    """Imports for types count, too: a reader follows them just as well."""
    known = {relative(path).removesuffix(".py").replace("/", "."): path for path in modules()}
    imports: dict[str, set[str]] = {}
    for name, path in known.items():
        found = imports[name] = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found.update(each.name for each in node.names)
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{name}: a relative import"
                found.update(f"{node.module}.{each.name}" for each in node.names)
                found.add(str(node.module))
        found &= known.keys() - {name}
    graphlib.TopologicalSorter(imports).prepare()  # a CycleError names them


def test_no_module_called_utils():
    assert not [relative(p) for p in modules() if p.stem in ("utils", "util", "helpers", "common")]


def test_package_inits_only_re_export():
    """An ``__init__`` holds a docstring, imports, ``__all__`` and the lazy ``__getattr__``."""
    allowed = (ast.Import, ast.ImportFrom, ast.Assign, ast.AnnAssign, ast.If, ast.Expr)
    bad = [
        f"{relative(path)}:{node.lineno}"
        for path in modules()
        if path.name == "__init__.py"
        for node in ast.parse(path.read_text()).body
        if not isinstance(node, allowed)
        and not (isinstance(node, ast.FunctionDef) and node.name in ("__getattr__", "__dir__"))
    ]
    assert not bad, f"logic in an __init__: {bad}"


def documented_methods() -> set[str]:
    """Names of methods that a class of ours or of torch documents: overrides inherit."""
    names = {
        "read_metadata", "set_up_storage_reader", "prepare_local_plan", "prepare_global_plan",
        "read_data", "set_up_storage_writer", "write_data", "finish", "reset", "stage", "close",
        "validate_checkpoint_id", "set_up_planner", "create_local_plan", "create_global_plan",
        "finish_plan", "load_bytes", "resolve_tensor", "resolve_bytes", "commit_tensor",
        "clone", "timeout", "set_timeout", "compare_set", "delete_key", "num_keys", "list_keys",
        "append", "multi_get", "multi_set", "queue_push", "queue_pop", "queue_len",
        "has_extended_api",
    }  # fmt: skip
    for path in modules():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                names |= {fn.name for fn in functions(node) if ast.get_docstring(fn)}
    return names


def undocumented(
    body: list[ast.stmt], inherited: set[str], *, in_class: bool = False
) -> Iterator[str]:
    for node in body:
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        if node.name.startswith("_"):
            continue
        is_class = isinstance(node, ast.ClassDef)
        overload = not is_class and any("overload" in ast.unparse(d) for d in node.decorator_list)
        inherits = in_class and not is_class and node.name in inherited
        if not ast.get_docstring(node) and not overload and not inherits:
            yield f"{node.lineno} {node.name}"
        if is_class and not any("Protocol" in ast.unparse(base) for base in node.bases):
            # Members of a Protocol are what somebody else documents.
            yield from undocumented(node.body, inherited, in_class=True)


def test_public_names_are_documented():
    inherited = documented_methods()
    missing = []
    for path in modules():
        tree = ast.parse(path.read_text())
        if not ast.get_docstring(tree):
            missing.append(f"{relative(path)}: the module")
        missing += [f"{relative(path)}:{name}" for name in undocumented(tree.body, inherited)]
    assert not missing, "\n".join(missing)


def is_broad(handler: ast.ExceptHandler) -> bool:
    types = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(t is None or getattr(t, "id", "") in ("Exception", "BaseException") for t in types)


def test_broad_excepts_are_counted():
    counts: dict[str, int] = {}
    for path in modules():
        tree = ast.parse(path.read_text())
        found = [n for n in ast.walk(tree) if isinstance(n, ast.ExceptHandler) and is_broad(n)]
        if found:
            counts[relative(path)] = len(found)
    assert counts == BROAD_EXCEPTS, "name each with its reason, and count it in BROAD_EXCEPTS"


def imported(tree: ast.AST, *, deep: bool = True) -> Iterator[tuple[int, str]]:
    """Line and top-level package of each import in ``tree``; not ``deep``: of its own body only."""
    for node in ast.walk(tree) if deep else ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name.split(".")[0]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.lineno, (node.module or "").split(".")[0]


CLIENTS = {"obstore": "", "botocore": "", "boto3": None, "fsspec": "fsspec"}
"""Which modules of ``storage/object/`` import the client of a store, by how their names begin."""


def test_only_object_tiers_import_clients_of_stores():
    """And none when it is imported itself: jobs without such a tier need no client."""
    bad = []
    for path in modules():
        tree = ast.parse(path.read_text())
        top = {line for line, _ in imported(tree, deep=False)}
        for line, name in imported(tree):
            if name not in CLIENTS:
                continue
            place = CLIENTS[name]
            inside = relative(path).startswith(f"tieredckpt/storage/object/{place}")
            allowed = place is not None and inside
            if not allowed or line in top:
                bad.append(f"{relative(path)}:{line} {name}")
    assert not bad, bad


PICKLES = [
    "tieredckpt/dcp/save/failures.py", "tieredckpt/dcp/process_executor.py",
    "tieredckpt/export/torch_files.py", "tieredckpt/export/imports.py",
    "tieredckpt/data/identity.py",
]  # fmt: skip
"""Whether DCP can pickle an error for other ranks, and part of what it pickles to the process of
its process executor; it goes nowhere else. The metadata of a stock DCP folder, which is a pickle:
written, and read with its own classes alone. And bytes of which only a digest is kept."""


def test_no_pickle_of_ours():
    """Formats and messages never pickle; the streams inside DCP's bytes items are torch's."""
    users = [
        f"{relative(path)}:{line}"
        for path in modules()
        if relative(path) not in PICKLES
        for line, name in imported(ast.parse(path.read_text()))
        if name in ("pickle", "marshal", "shelve", "dill", "cloudpickle")
    ]
    assert not users, users


def test_every_ignore_says_which_rule():
    bad = [
        f"{relative(path)}:{number}"
        for path in modules()
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if line.rstrip().endswith(("# noqa", "# type: ignore"))
    ]
    assert not bad, bad
