"""Reads the token that the hosts of a job share, from the place that the configuration names.

A token is a password: it appears in no error, no log and no traceback. So nothing here raises while
an exception that holds it is being handled, and messages state only its length.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping

from tieredckpt.config.network import MAKE_TOKEN, SecurityConfig
from tieredckpt.config.sections import fail

TOKEN_CHARS_MIN = 16
"""Fewer can be guessed."""
TOKEN_CHARS_MAX = 1024
_FILE_BYTES_MAX = TOKEN_CHARS_MAX + 64
"""Includes blanks and a newline around the token."""


def read_token(security: SecurityConfig, environ: Mapping[str, str]) -> str | None:
    """The token in ``security.token_file`` or ``security.token_env``; None if there is neither.

    Blanks around it are removed. Nothing is cached, so a token can be replaced in its file.

    Raises:
        ConfigError: It cannot be read; others than its owner may read the file, or its owner is
            neither this user nor root; it is no text of 16 to 1024 visible ASCII characters.
    """
    if security.token_file is not None:
        key, data = "security.token_file", _file(security.token_file)
        where = f'the file "{security.token_file}"'
    elif security.token_env is not None:
        key, name = "security.token_env", security.token_env
        where = f"the environment variable {name}"
        text = environ.get(name)
        if text is None:
            fail(key, f"{where} is not set; put the token into it (`{MAKE_TOKEN}` makes one)")
        data = text.encode("utf-8", "surrogateescape")
    else:
        return None
    token = data.strip()
    if not all(0x21 <= byte <= 0x7E for byte in token):
        fail(key, f"{where} holds more than one word of visible ASCII characters; write only the "
                  f"token (`{MAKE_TOKEN}` makes one)")  # fmt: skip
    if not TOKEN_CHARS_MIN <= len(token) <= TOKEN_CHARS_MAX:
        fail(key, f"{where} holds a token of {len(token)} characters; allowed are "
                  f"{TOKEN_CHARS_MIN} to {TOKEN_CHARS_MAX} (`{MAKE_TOKEN}` makes one)")  # fmt: skip
    return token.decode("ascii")


def _file(path: str) -> bytes:
    key = "security.token_file"
    try:
        # Without O_NONBLOCK a pipe in its place would wait for a writer for ever.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError as error:
        fail(key, f'the file "{path}" cannot be opened: {error.strerror}')
    try:
        info = os.fstat(fd)  # of the open file; another one may have the name by now
        if not stat.S_ISREG(info.st_mode):
            fail(key, f'"{path}" is not a file')
        if info.st_uid not in (0, os.geteuid()):
            fail(key, f'the file "{path}" belongs to user {info.st_uid}; it must be this user\'s '
                      f"({os.geteuid()}) or root's")  # fmt: skip
        mode = stat.S_IMODE(info.st_mode)
        if mode & 0o077:
            fail(key, f'others may use the file "{path}" (mode {mode:04o}); run '
                      f"`chmod 600 {path}`")  # fmt: skip
        data = b""
        while len(data) <= _FILE_BYTES_MAX and (piece := os.read(fd, _FILE_BYTES_MAX + 1)):
            data += piece
    except OSError as error:
        fail(key, f'the file "{path}" cannot be read: {error.strerror}')
    finally:
        os.close(fd)
    if len(data) > _FILE_BYTES_MAX:
        fail(key, f'the file "{path}" is longer than {_FILE_BYTES_MAX} bytes: it holds no token')
    return data
