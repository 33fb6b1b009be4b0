"""Names, folders and URLs of a configuration, and which namespace a run has."""

from __future__ import annotations

import re
from collections.abc import Mapping

from tieredckpt.errors import ConfigError
from tieredckpt.format.manifest import NAME_PATTERN
from tieredckpt.policy.units import show

PATH_CHARS_MAX = 1024
FILE_URL_EXAMPLE = "file:///mnt/nvme/checkpoints"


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
    return "/" + "/".join(parts)


def parse_url(value: object) -> str:
    """A tier's URL, normalised. Raises ValueError if no tier of this release has it."""
    scheme, colon, rest = value.partition("://") if isinstance(value, str) else ("", "", "")
    if not colon:
        hint = (
            f"file://{value}" if isinstance(value, str) and value[:1] == "/" else FILE_URL_EXAMPLE
        )
        raise ValueError(f'{show(value)} is not a URL; write "{hint}"')
    if scheme.lower() in ("s3", "gs", "gcs", "az", "abfs", "http", "https", "hf"):
        raise ValueError(
            f"{show(value)}: object stores are not in this release; "
            f'write a folder, such as "{FILE_URL_EXAMPLE}"'
        )
    if scheme != "file":
        raise ValueError(
            f'{show(value)}: there is no tier for "{scheme}://"; write "{FILE_URL_EXAMPLE}"'
        )
    if not rest.startswith("/"):
        raise ValueError(
            f"{show(value)} names a host or a relative path; write three slashes and an absolute "
            f'path, as in "{FILE_URL_EXAMPLE}"'
        )
    return "file://" + parse_folder(rest)


_RANDOM_RUN_ID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}")


def resolve_namespace(configured: str | None, environ: Mapping[str, str]) -> str:
    """The name under which this run finds its own checkpoints again after a restart.

    In this order: configured; ``slurm-<SLURM_JOB_ID>`` (kept by a requeue);
    ``jobset-<JOBSET_NAME>`` (kept by a JobSet's restarts); ``run-<TORCHELASTIC_RUN_ID>``, if
    somebody chose that id. There is no other default: two runs that share a namespace by accident
    would continue each other.

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
        # torchrun --standalone draws a new one at every start, so a restart would find nothing.
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
        raise ConfigError(
            f"namespace: missing, and {variable}={show(value)} cannot be used in a name; "
            'add a line such as "namespace: my-run"',
            key="namespace",
            allowed=[],
        )
    return name
