"""Names, folders, URLs and buckets of a configuration, and the namespace of a run.

Names of buckets are checked here, so that a wrong one is found before anything starts.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping

from tieredckpt.config.sections import fail
from tieredckpt.config.units import show
from tieredckpt.errors import ConfigError
from tieredckpt.format.manifest import NAME_PATTERN

PATH_CHARS_MAX = 1024
FILE_URL_EXAMPLE = "file:///mnt/nvme/checkpoints"
_URL_EXAMPLES = f'"{FILE_URL_EXAMPLE}" or "s3://bucket/checkpoints"'
_SCHEME = re.compile(r"[a-z][a-z0-9+.-]{0,19}")
_NEARLY_URL = re.compile(r"(s3|gs|az)(?::/?|//?)([^/].*)", re.IGNORECASE)
_UNUSABLE_SCHEMES = {
    "http": "nothing can be written there",
    "https": "nothing can be written there",
    "memory": "it ends with the process",
}
_BUCKETS = {
    "s3": (
        re.compile(
            r"(?!\d+\.\d+\.\d+\.\d+$)(?!.*\.\.)[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]",
        ),
        "Amazon's have 3 to 63 lower-case letters, digits, dots and hyphens, the first and the "
        "last a letter or digit, no two dots side by side, and are no addresses (for another store "
        "set its endpoint)",
    ),
    "gs": (
        re.compile(r"(?!.*\.\.)(?!.*[^.]{64})[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]"),
        "Google's have 3 to 63 lower-case letters, digits, dots, underscores and hyphens, the "
        "first and the last a letter or digit",
    ),
    "az": (
        re.compile(r"(?!.{64})[a-z0-9](?:-?[a-z0-9]){2,62}|\$(?:root|web|logs)"),
        "a container's has 3 to 63 lower-case letters, digits and single hyphens, the first and "
        "the last a letter or digit",
    ),
}
"""By scheme, the pattern of a bucket's name and the message for other names."""
_S3_COMPATIBLE = (
    re.compile(r"[A-Za-z0-9._-]{1,255}"),
    "use letters, digits, dots, underscores and hyphens",
)
"""Names that other stores than Amazon's accept, old buckets included."""
_UNUSABLE = frozenset("?#@ ")


def parse_name(value: object) -> str:
    """A namespace or a tier's name. Raises ValueError if it is no name."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        raise ValueError(f'{show(value)} is a number; put it in quotes: "{show(value)}"')
    if not isinstance(value, str) or not NAME_PATTERN.fullmatch(value):
        raise ValueError(
            f'{show(value)} is not a name; use letters, digits, ".", "_" and "-", at most 128, '
            "the first one a letter or digit"
        )
    return value


def parse_folder(value: object) -> str:
    """An absolute path, normalised. Raises ValueError if it is none."""
    if not isinstance(value, str) or not value.startswith("/"):
        home = ' ("~" is not expanded)' if isinstance(value, str) and value[:1] == "~" else ""
        raise ValueError(f'{show(value)} is not an absolute path{home}; begin it with "/"')
    if len(value) > PATH_CHARS_MAX or not value.isprintable():
        raise ValueError(
            f"{show(value)} is not a usable path: over {PATH_CHARS_MAX} characters, "
            "or with control characters"
        )
    parts = [part for part in value.split("/") if part not in ("", ".")]
    if ".." in parts or not parts:
        raise ValueError(
            f'{show(value)} is not a usable path: name a folder below "/", without ".."'
        )
    if parts[0].startswith("~"):
        raise ValueError(f'{show(value)}: "~" is not expanded; write out the absolute path')
    return "/" + "/".join(parts)


def parse_url(value: object) -> str:
    """A tier's URL, normalised. Raises ValueError if no tier can have it."""
    scheme, colon, rest = value.partition("://") if isinstance(value, str) else ("", "", "")
    if not colon:
        hint = FILE_URL_EXAMPLE
        if isinstance(value, str) and value[:1] == "/":
            hint = f"file://{value}"
        elif isinstance(value, str) and (near_url := _NEARLY_URL.fullmatch(value)):
            hint = f"{near_url[1].lower()}://{near_url[2]}"
        raise ValueError(f'{show(value)} is not a URL; write "{hint}"')
    if scheme == "file":
        if not rest.startswith("/"):
            raise ValueError(
                f"{show(value)} names a host or a relative path; write three slashes and an "
                f'absolute path, as in "{FILE_URL_EXAMPLE}"'
            )
        return "file://" + parse_folder(rest)
    if (why := _UNUSABLE_SCHEMES.get(scheme.removeprefix("fsspec+"))) is not None:
        raise ValueError(f"{show(value)}: {why}; write {_URL_EXAMPLES}")
    meant = difflib.get_close_matches(scheme.lower(), ("file", "s3"), n=1, cutoff=0.75)
    if (meant and meant[0] != scheme) or not _SCHEME.fullmatch(scheme):
        near = f' (did you mean "{meant[0]}://"?)' if meant else ""
        raise ValueError(
            f'{show(value)}: there is no tier for "{scheme[:20]}://"{near}; write {_URL_EXAMPLES}'
        )
    if scheme in _BUCKETS and rest.startswith("/"):
        raise ValueError(f'{show(value)} names no bucket; write "{scheme}://bucket/checkpoints"')
    if scheme not in _BUCKETS and "::" in rest:
        raise ValueError(
            f'{show(value)}: fsspec takes "::" as a chain of file systems, and a tier is in one; '
            "write the host's name in place of such an address"
        )
    return f"{scheme}://{_place(value, rest)}"


def _place(value: object, rest: str) -> str:
    """Bucket or host and path, without empty parts. Raises ValueError."""
    if len(rest) > PATH_CHARS_MAX or not rest.isprintable() or set(rest) & set("?#"):
        raise ValueError(
            f"{show(value)} is not a usable URL: over {PATH_CHARS_MAX} characters, or with "
            'control characters, "?" or "#"'
        )
    host, *path = rest.split("/")
    if "@" in host and ":" in host.partition("@")[0]:
        # Not shown: an error is printed and logged.
        raise ValueError("there is a password in it, and configurations are printed; remove it")
    parts = [part for part in path if part]
    if {".", ".."} & {host, *parts} or not (host or parts):
        raise ValueError(
            f'{show(value)} is not a usable URL: name a bucket or host, and a path without ".."'
        )
    return "/".join([host, *parts])


def check_bucket(url: str, *, own_endpoint: bool) -> None:
    """Refuse a URL whose bucket no such store can have; other schemes are not checked.

    Args:
        url: ``scheme://bucket/path``.
        own_endpoint: The store is not the scheme's own, so only the characters are checked.

    Raises:
        ValueError: A bucket cannot have this name.
    """
    scheme, _, rest = url.partition("://")
    if scheme not in _BUCKETS:
        return
    bucket = rest.partition("/")[0]
    pattern, why = _S3_COMPATIBLE if scheme == "s3" and own_endpoint else _BUCKETS[scheme]
    if not pattern.fullmatch(bucket):
        raise ValueError(f"{show(bucket)} is not the name of a bucket: {why}")
    if not rest.isascii() or set(rest) & _UNUSABLE:
        raise ValueError(f"{show(url)} is not a usable URL: no spaces, no @, ASCII only")


_RANDOM_RUN_ID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}")


def resolve_namespace(configured: str | None, environ: Mapping[str, str]) -> str:
    """The name under which this run finds its own checkpoints again after a restart.

    In this order: configured; ``slurm-<SLURM_JOB_ID>`` (kept by a requeue);
    ``jobset-<JOBSET_NAME>`` (kept by a JobSet's restarts); ``run-<TORCHELASTIC_RUN_ID>``, unless
    torchrun generated that id. There is no other default: two runs that share a namespace by
    accident would continue each other.

    Raises:
        ConfigError: Nothing identifies the run for certain; the text names the line to add.
    """
    if configured is not None:
        return configured
    for variable, prefix in (("SLURM_JOB_ID", "slurm"), ("JOBSET_NAME", "jobset")):
        if environ.get(variable):
            return _derived(variable, prefix, environ[variable])
    run_id = environ.get("TORCHELASTIC_RUN_ID", "")
    if not run_id or run_id == "none":
        why = "nothing identifies this run for certain (no SLURM_JOB_ID, JOBSET_NAME or --rdzv-id)"
    elif _RANDOM_RUN_ID.fullmatch(run_id):
        # torchrun --standalone draws a new id at every start, so a restart would find nothing.
        why = f"torchrun made up the run id {run_id}, the next start will have another one"
    else:
        return _derived("TORCHELASTIC_RUN_ID", "run", run_id)
    raise ConfigError(
        f'namespace: missing, and {why}; add a line such as "namespace: my-run", '
        "or set TIEREDCKPT_NAMESPACE",
        key="namespace",
        allowed=[],
    )


def _derived(variable: str, prefix: str, value: str) -> str:
    name = f"{prefix}-{value}"
    if not NAME_PATTERN.fullmatch(name):
        fail(
            "namespace",
            f"missing, and {variable}={show(value)} cannot be used in a name; "
            'add a line such as "namespace: my-run"',
        )
    return name
