"""Where a token comes from, and that it goes nowhere else."""

from __future__ import annotations

import os
import traceback
from pathlib import Path

import pytest

from tieredckpt.config.schema import SecurityConfig, load_config
from tieredckpt.config.secrets import TOKEN_CHARS_MAX, read_token
from tieredckpt.errors import ConfigError

TOKEN = "5f" * 16  # fixed: it stands in the names of tests, which all workers must agree on


def of_file(path: Path) -> str | None:
    return read_token(SecurityConfig(token_file=str(path)), {})


def of_variable(value: str) -> str | None:
    return read_token(SecurityConfig(token_env="CKPT_TOKEN"), {"CKPT_TOKEN": value})


def write(folder: Path, data: bytes, mode: int = 0o600) -> Path:
    path = folder / "token"
    path.write_bytes(data)
    path.chmod(mode)
    return path


def refusal(path: Path) -> str:
    """What is said of a token file; never the token, not in the traceback either."""
    with pytest.raises(ConfigError) as refused:
        of_file(path)
    error = refused.value
    assert error.key == "security.token_file"
    assert error.__context__ is None or not isinstance(error.__context__, UnicodeError)
    assert TOKEN not in "".join(traceback.format_exception(error)) + repr(error)
    return str(error)


def test_without_a_place_there_is_none() -> None:
    assert read_token(SecurityConfig(), {"CKPT_TOKEN": TOKEN}) is None
    tls = load_config({"security": {"tls": {"cert": "/c", "key": "/k", "ca": "/a"}}}, {}).security
    assert read_token(tls, {}) is None


@pytest.mark.parametrize("mode", [0o600, 0o400])
def test_a_file(tmp_path: Path, mode: int) -> None:
    assert of_file(write(tmp_path, f" {TOKEN}\n\n".encode(), mode)) == TOKEN


def test_a_link_to_a_file_as_secrets_are_mounted(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(write(tmp_path, TOKEN.encode()))
    assert of_file(link) == TOKEN


def test_a_file_is_read_each_time(tmp_path: Path) -> None:
    path = write(tmp_path, TOKEN.encode())
    assert of_file(path) == TOKEN
    write(tmp_path, TOKEN[::-1].encode())
    assert of_file(path) == TOKEN[::-1]


def test_a_variable() -> None:
    assert of_variable(f"{TOKEN}\n") == TOKEN
    longest = "x" * TOKEN_CHARS_MAX
    assert of_variable(longest) == longest


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644, 0o660, 0o601])
def test_a_file_that_others_may_use(tmp_path: Path, mode: int) -> None:
    path = write(tmp_path, TOKEN.encode(), mode)
    assert refusal(path) == (
        f'security.token_file: others may use the file "{path}" (mode 0{mode:o}); '
        f"run `chmod 600 {path}`"
    )


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_file_of_somebody_else(tmp_path: Path) -> None:
    path = write(tmp_path, TOKEN.encode())
    os.chown(path, 4711, 4711)
    assert "belongs to user 4711" in refusal(path)


def test_what_is_no_file(tmp_path: Path) -> None:
    assert refusal(tmp_path / "nothing").endswith("cannot be opened: No such file or directory")
    assert "is not a file" in refusal(tmp_path)
    os.mkfifo(tmp_path / "pipe", 0o600)
    assert "is not a file" in refusal(tmp_path / "pipe")


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (b"", "a token of 0 characters; allowed are 16 to 1024"),
        (b" \n", "a token of 0 characters"),
        (TOKEN[:15].encode(), "a token of 15 characters"),
        (b"x" * 1025, "a token of 1025 characters"),
        (b"x" * 100_000, "longer than 1088 bytes: it holds no token"),
        (f"{TOKEN} {TOKEN}".encode(), "more than one word of visible ASCII characters"),
        (f"token={TOKEN}\nuser=a\n".encode(), "more than one word"),
        (TOKEN.encode() + b"\xff", "more than one word"),
        (TOKEN.encode() + b"\0", "more than one word"),
    ],
)
def test_what_is_no_token(tmp_path: Path, data: bytes, what: str) -> None:
    assert what in refusal(write(tmp_path, data))


@pytest.mark.parametrize(
    ("value", "what"),
    [
        ("", "holds a token of 0 characters"),
        (TOKEN[:15], "holds a token of 15 characters"),
        (TOKEN + "ü", "more than one word"),
        (TOKEN + "\udcff", "more than one word"),
    ],
)
def test_a_variable_without_a_token(value: str, what: str) -> None:
    with pytest.raises(ConfigError) as refused:
        of_variable(value)
    assert what in str(refused.value)
    assert refused.value.key == "security.token_env"
    assert not value or value not in "".join(traceback.format_exception(refused.value))


def test_a_variable_that_is_not_set() -> None:
    with pytest.raises(ConfigError) as refused:
        read_token(SecurityConfig(token_env="CKPT_TOKEN"), {})
    assert str(refused.value) == (
        "security.token_env: the environment variable CKPT_TOKEN is not set; put the token into it "
        "(`openssl rand -hex 32` makes one)"
    )
