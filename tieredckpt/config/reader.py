"""From a YAML file, a dict or environment variables to one tree of plain values.

The tree holds dicts with string keys, lists, strings, ints, floats, bools and None, and records the
origin of each value, so that an error can name the line or the variable. The meaning of values is
not known here. YAML is read with PyYAML's safe parser, restricted further: no anchors, no tags,
no duplicate keys, no deep nesting, 1 MiB at most; only ``true``/``false`` are booleans and
``010`` is text, so that no value is quietly turned into another.
"""

from __future__ import annotations

import difflib
import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import yaml

from tieredckpt.config.units import show
from tieredckpt.errors import ConfigError

Tree: TypeAlias = "dict[str, Tree] | list[Tree] | str | int | float | bool | None"

CONFIG_BYTES_MAX = 1 << 20
"""Largest configuration, as a file or in one environment variable."""
DEPTH_MAX = 16
"""Deepest nesting of lists and mappings."""
NODES_MAX = 10_000
"""Most values in one configuration."""
ENV_PREFIX = "TIEREDCKPT_"
OWN_VARIABLES = ("CONFIG", "FAILPOINTS", "LIVE", "NODE_NAME", "RUNTIME_DIR")
"""Variables with this prefix that are no keys (docs/reference/configuration.md)."""
UNSHOWN_SECTION = "security"
"""No error message repeats a value of this section."""
NO_SPACE = "write a space after the colon of a key"
_LEVEL = "__"

_FOREIGN = re.compile(r"TEST_.*|(.*_)?(SERVICE_HOST|SERVICE_PORT.*|PORT|PORT_\d.*)")
"""Our own tests' variables, and those that Kubernetes sets for a service whose name begins so."""
_INT = re.compile(r"[-+]?(?:0|[1-9][0-9]{0,18})")
_FLOAT = re.compile(r"[-+]?(?:[0-9]{1,18}\.[0-9]{0,18}|\.[0-9]{1,18})(?:[eE][-+]?[0-9]{1,3})?")
_CONSTANTS: dict[str, bool | None] = {
    "": None, "~": None, "null": None, "Null": None, "NULL": None,
    "true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False,
}  # fmt: skip


@dataclass(slots=True)
class Source:
    """A tree of values and, by dotted key, the origin of each value."""

    tree: dict[str, Tree] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)

    def origin(self, key: str) -> str | None:
        """The origin of ``key`` or of the nearest mapping around it; None if unknown."""
        while key not in self.origins:
            cut = max(key.rfind("."), key.rfind("["))
            if cut < 0:
                return self.origins.get("")
            key = key[:cut]
        return self.origins[key]


def child(path: str, key: str | int) -> str:
    """The dotted key of an entry: ``tiers[0]``, ``tiers[0].keep``."""
    if isinstance(key, int):
        return f"{path}[{key}]"
    plain = re.fullmatch(r"[A-Za-z0-9_-]{1,64}", key)
    return f"{path}.{key if plain else show(key)}".removeprefix(".")


def read_source(source: str | os.PathLike[str] | Mapping[str, object] | None) -> Source:
    """The values of a YAML file or of a mapping; no values for None.

    Raises:
        ConfigError: It cannot be read, is no valid YAML, or is not a mapping.
    """
    if source is None:
        return Source()
    if isinstance(source, Mapping):
        tree = _plain(source, "", depth=0)
        assert isinstance(tree, dict)
        return Source(tree)
    if not isinstance(source, str | os.PathLike):
        raise ConfigError(
            f"the configuration is {show(source)}; pass the path of a YAML file, a dict or None",
            key="",
        )
    return parse_yaml(_read_file(Path(source)), name=Path(source).name)


def _read_file(path: Path) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(CONFIG_BYTES_MAX + 1)
    except FileNotFoundError as error:
        raise ConfigError(
            f'there is no configuration file "{path}" (looked from the folder "{Path.cwd()}")',
            key="",
        ) from error
    except OSError as error:
        raise ConfigError(
            f'the configuration file "{path}" cannot be read: {error.strerror}', key=""
        ) from error
    if len(data) > CONFIG_BYTES_MAX:
        raise ConfigError(
            f'"{path}" is larger than {CONFIG_BYTES_MAX} bytes: not a configuration file', key=""
        )
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f'"{path}" is not UTF-8 text (byte {error.start}): not a configuration file', key=""
        ) from error


def parse_yaml(text: str, *, name: str) -> Source:
    """The mapping in ``text``; ``name`` is the file's name in messages.

    Raises:
        ConfigError: Not valid YAML of the restricted kind, or not a mapping.
    """
    found = Source()
    tree = _yaml_value(text, name=name, path="", source=found)
    if tree is None:
        return found
    if not isinstance(tree, dict):
        raise ConfigError(
            f'the configuration is {show(tree)} ({name}); write "key: value" lines, '
            "such as namespace: my-run",
            key="",
        )
    found.tree = tree
    return found


class _Composer(yaml.SafeLoader):
    """Composes nodes without anchors and without deep recursion; never constructs anything."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = 0
        self._num_nodes = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            # A few aliases of aliases stand for gigabytes ("billion laughs").
            raise _refuse(event, "anchors and aliases (& and *) are not supported")
        if getattr(event, "tag", None):
            raise _refuse(event, "tags (!) are not supported; quote the text if it begins with !")
        self._depth += 1
        self._num_nodes += 1
        if self._depth > DEPTH_MAX:
            raise _refuse(event, f"nested deeper than {DEPTH_MAX} levels")
        if self._num_nodes > NODES_MAX:
            raise _refuse(event, f"more than {NODES_MAX} values")
        node: yaml.Node | None = super().compose_node(parent, index)
        self._depth -= 1
        return node


def _refuse(at: yaml.Event | yaml.Node, problem: str) -> yaml.MarkedYAMLError:
    mark = at.start_mark if isinstance(at.start_mark, yaml.Mark) else None
    return yaml.MarkedYAMLError(problem=problem, problem_mark=mark)


def _yaml_value(text: str, *, name: str, path: str, source: Source, where: str = "") -> Tree:
    """The one value in ``text``; origins are recorded below ``path``.

    ``where`` is the origin of all its values if line numbers mean nothing (environment variables).
    """

    def origin(node: yaml.Node) -> str:
        return where or f"{name}, line {node.start_mark.line + 1}"

    try:
        loader = _Composer(text)
        try:
            root = loader.get_single_node()
            return None if root is None else _convert(root, path, source, origin)
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        at = f", line {mark.line + 1}, column {mark.column + 1}" if mark and not where else ""
        reason = error.problem or error.context
        rows = text.splitlines()[mark.line : mark.line + 1] if mark else []
        if any(re.search(r"\w:[{[\"']", row) for row in rows):
            reason = f"{reason}; {NO_SPACE}"
        raise ConfigError(f"{name}{at}: {reason}", key=path) from error
    except yaml.YAMLError as error:  # characters that YAML does not allow
        raise ConfigError(
            f"{name}: not valid YAML: {' '.join(str(error).split())}", key=path
        ) from error


def _convert(
    node: yaml.Node, path: str, source: Source, origin: Callable[[yaml.Node], str]
) -> Tree:
    source.origins[path] = origin(node)
    if isinstance(node, yaml.MappingNode):
        found: dict[str, Tree] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                raise _refuse(key_node, "a key must be a word")
            key = key_node.value
            if key == "<<" and key_node.style is None:
                raise _refuse(key_node, "merge keys (<<) are not supported")
            if key in found:
                raise _refuse(key_node, f'the key "{child(path, key)}" is given twice')
            found[key] = _convert(value_node, child(path, key), source, origin)
            # Messages name the line of the key, also if the value begins below it.
            source.origins[child(path, key)] = origin(key_node)
        return found
    if isinstance(node, yaml.SequenceNode):
        return [
            _convert(item, child(path, number), source, origin)
            for number, item in enumerate(node.value)
        ]
    assert isinstance(node, yaml.ScalarNode)
    if node.style is not None:  # quoted, or a block of text
        return str(node.value)
    return _scalar(node.value)


def _scalar(text: str) -> str | int | float | bool | None:
    """An unquoted YAML scalar by the rules of YAML 1.2's core schema, decimal numbers only."""
    if text in _CONSTANTS:
        return _CONSTANTS[text]
    if _INT.fullmatch(text):
        return int(text)
    return float(text) if _FLOAT.fullmatch(text) else text


class _Dumper(yaml.SafeDumper):
    """Quotes text that would be read as another type, also by the rules of :func:`_scalar`."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)  # lists are indented below their key


_Dumper.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(rf"(?:{_FLOAT.pattern})$"), list("+-.0123456789")
)


def to_yaml(tree: object) -> str:
    """Dicts, lists and scalars as YAML; :func:`parse_yaml` reads the same from it."""
    return yaml.dump(tree, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=math.inf)


def _plain(value: object, path: str, *, depth: int) -> Tree:
    """A copy of a caller's dict, so that later changes to it have no effect."""
    if depth > DEPTH_MAX:
        raise ConfigError(f"{path}: nested deeper than {DEPTH_MAX} levels", key=path)
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, os.PathLike):
        return str(Path(value))
    if isinstance(value, Mapping):
        found: dict[str, Tree] = {}
        for key, item in value.items():
            if not isinstance(key, str):
                raise ConfigError(f"{path or 'the configuration'}: the key {show(key)} is not text",
                                  key=path)  # fmt: skip
            found[key] = _plain(item, child(path, key), depth=depth + 1)
        return found
    if isinstance(value, list | tuple):
        return [_plain(item, child(path, n), depth=depth + 1) for n, item in enumerate(value)]
    raise ConfigError(f"{path}: {show(value)} is not possible in a configuration", key=path)


def apply_environment(
    source: Source, environ: Mapping[str, str], *, top_keys: tuple[str, ...]
) -> None:
    """Override values in ``source`` by variables such as ``TIEREDCKPT_MEMORY__CAPACITY=8GiB``.

    Two underscores separate levels, a number is an index into a list, case is ignored, the value is
    YAML; an empty value is the same as no variable.

    Raises:
        ConfigError: A value is not valid YAML, or a name leads nowhere, or is not known.
    """
    unknown = []
    for variable in sorted(environ):
        rest = variable.removeprefix(ENV_PREFIX)
        if rest == variable or not environ[variable].strip():
            continue
        names = rest.lower().split(_LEVEL)
        if len(names) == 1 and names[0] not in top_keys:
            if rest not in OWN_VARIABLES and not _FOREIGN.fullmatch(rest):
                unknown.append(variable)
            continue
        _override(source, names, variable, environ[variable])
    security = source.tree.get(UNSHOWN_SECTION)
    token = security.get("token_env") if isinstance(security, dict) else None
    for variable in unknown:
        if variable != token:
            allowed = [*OWN_VARIABLES, *(key.upper() for key in top_keys)]
            name = variable.removeprefix(ENV_PREFIX)
            close = difflib.get_close_matches(name.upper(), allowed, n=1, cutoff=0.75)
            hint = f"did you mean {ENV_PREFIX}{close[0]}?" if close else "unset it"
            raise ConfigError(
                f"the environment variable {variable} sets nothing; {hint}",
                key=name.lower(),
                allowed=[ENV_PREFIX + each for each in allowed],
            )


def _override(source: Source, names: list[str], variable: str, text: str) -> None:
    if len(text) > CONFIG_BYTES_MAX:
        raise ConfigError(f"{variable} has more than {CONFIG_BYTES_MAX} characters", key="")
    path = ""
    place: Any = source.tree
    for depth, name in enumerate(names):
        step: str | int = name
        if isinstance(place, list):
            if not re.fullmatch(r"[0-9]{1,6}", name) or int(name) >= len(place):
                raise ConfigError(
                    f"the environment variable {variable} leads nowhere: the entries of {path} "
                    f"are numbered from 0, and there are {len(place)}",
                    key=path,
                )
            step = int(name)
        elif isinstance(place, dict):
            place.setdefault(name, None)
        else:
            # The value may be a token, and errors are printed and logged.
            hidden = path.partition(".")[0] == UNSHOWN_SECTION
            found = "no mapping" if hidden else show(place)
            raise ConfigError(
                f"the environment variable {variable} leads nowhere: {path} is {found}",
                key=path,
            )
        path = child(path, step)
        where = f"environment variable {variable}"
        if depth == len(names) - 1:
            place[step] = _yaml_value(text, name=variable, path=path, source=source, where=where)
            return
        if place[step] is None:
            place[step] = [] if names[depth + 1].isdecimal() else {}
            source.origins[path] = where
        place = place[step]
