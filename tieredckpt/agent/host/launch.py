"""Find the agent of a runtime folder, or start one: race-safe, with a deadline.

Used by trainers and by the command line, so it imports neither the daemon nor any server library.
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from tieredckpt.agent.host.runtime import RuntimeDir, is_agent_running, prepare_runtime_dir
from tieredckpt.errors import AgentError, RemoteProtocolError
from tieredckpt.rpc.agent_client import AgentClient
from tieredckpt.rpc.http1 import Broken
from tieredckpt.rpc.messages.agent import API_VERSION
from tieredckpt.rpc.messages.base import decode_error, package_version
from tieredckpt.storage.memory.slot import try_lock_exclusive

READY = b"ready\n"
"""What an agent writes into ``--ready-fd`` when it serves; else an encoded ErrorReply."""
HEALTH_WAIT_S = 5.0
_POLL_S = 0.02
_READY_BYTES_MAX = 1 << 16
_LOG_TAIL_BYTES = 2000


def find_or_start(
    runtime_dir: Path,
    *,
    start: Literal["auto", "never"] = "auto",
    start_timeout_s: float = 60.0,
    idle_timeout_s: float | None = None,
    log_level: str = "info",
    wait_s: float = 0.0,
) -> Path:
    """The runtime folder in which an agent of our API answers; starts a detached one if none does.

    Safe to call from many processes at once: exactly one agent results.

    Args:
        wait_s: How long one is waited for where none runs and ``start`` is "never".

    Raises:
        AgentError: None runs and ``start`` is "never"; the folder cannot be used; an agent of
            another version runs; a new one did not answer within ``start_timeout_s`` (with the
            end of its log).
    """
    runtime = prepare_runtime_dir(runtime_dir)
    until_s = time.monotonic() + start_timeout_s
    if _answers(runtime):
        return runtime.path
    if start == "never":
        _await(runtime, start_timeout_s, wait_s)
        return runtime.path
    with _launch_lock(runtime, until_s):
        if _answers(runtime):
            return runtime.path
        # Somebody else's agent (a service manager's) may be on its way up. One that is being killed
        # loses its sockets before its lock: whether one runs is asked again in each round.
        while not _answers(runtime):
            running = is_agent_running(runtime)
            if time.monotonic() > until_s:
                raise _failed(runtime, f"did not answer within {start_timeout_s:g} s", None)
            if not running:
                _spawn(runtime, until_s, idle_timeout_s=idle_timeout_s, log_level=log_level)
            else:
                time.sleep(_POLL_S)
    return runtime.path


def _await(runtime: RuntimeDir, start_timeout_s: float, wait_s: float) -> None:
    """Until an agent answers that a service manager starts. Raises as :func:`find_or_start`."""
    began_s = gone_s = time.monotonic()
    while not _answers(runtime):
        now_s = time.monotonic()
        if is_agent_running(runtime):  # it stops or starts
            gone_s = now_s
            if now_s - began_s > start_timeout_s + wait_s:
                raise _failed(runtime, f"did not answer within {start_timeout_s:g} s", None)
        elif now_s - gone_s >= wait_s:
            raise AgentError(
                f"no agent runs in {runtime.path} after {wait_s:g} s and agent.start is never: run "
                f"`tieredckpt agent run --runtime-dir {runtime.path}`, or set agent.start: auto",
                outcome="not_applied",
            )
        time.sleep(_POLL_S)


def _other_version(which: str) -> AgentError:
    return AgentError(
        f"the running agent is of another version ({which}; this is API {API_VERSION}, version "
        f"{package_version()}): stop it with `tieredckpt agent stop`, checkpoints stay in memory, "
        "then retry; or install the same version on both sides",
        outcome="not_applied",
    )


def _answers(runtime: RuntimeDir) -> bool:
    """Whether an agent of our API answers. Raises AgentError if one runs but is of no use."""
    # Without this test each poll would build an exception with a remedy that nobody reads.
    if not runtime.agent_socket.exists():
        return False
    client = AgentClient(runtime.path, deadline_s=HEALTH_WAIT_S)
    try:
        health = client.health()
    except RemoteProtocolError as error:
        raise _other_version("an unknown one") from error
    except AgentError as error:
        if isinstance(error.__cause__, ConnectionError | FileNotFoundError | Broken):
            return False  # a socket file that a killed agent left, or one starting, or ending
        raise
    finally:
        client.close()
    if health.api != API_VERSION:
        raise _other_version(f"API {health.api}, version {health.version}")
    return True


@contextlib.contextmanager
def _launch_lock(runtime: RuntimeDir, until_s: float) -> Iterator[None]:
    """One starter at a time: sixteen ranks must not start sixteen interpreters to keep one."""
    fd = os.open(runtime.launch_lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        while not try_lock_exclusive(fd):
            if time.monotonic() > until_s:
                raise _failed(runtime, "is being started, but never answered", None)
            time.sleep(_POLL_S)
        yield
    finally:
        os.close(fd)


def _spawn(
    runtime: RuntimeDir, until_s: float, *, idle_timeout_s: float | None, log_level: str
) -> None:
    command = [sys.executable, "-m", "tieredckpt.agent.daemon", "--detached"]
    command += ["--runtime-dir", str(runtime.path), "--log-level", log_level]
    if idle_timeout_s is not None:
        command += ["--idle-timeout", f"{idle_timeout_s:g}"]
    ready_r, ready_w = os.pipe2(os.O_CLOEXEC)
    try:
        # Until its own log is open, what it says (an import that fails) goes to the same file.
        with runtime.log.open("ab") as output:
            process = subprocess.Popen(
                [*command, "--ready-fd", str(ready_w)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd="/",
                env=_environment(),
                start_new_session=True,
                pass_fds=(ready_w,),
            )
        os.close(ready_w)
        ready_w = -1
        answer = _read_ready(ready_r, until_s)
        # It forked its working self off and ended; a failed one has ended too.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.1, until_s - time.monotonic()))
    finally:
        os.close(ready_r)
        if ready_w >= 0:
            os.close(ready_w)
    if answer == READY:
        return
    if answer is None:
        raise _failed(runtime, "did not get ready in time", None)
    error = decode_error(503, answer) if answer else None
    if error is not None and error.fields.get("running"):
        return  # somebody was faster; the caller waits for that one
    raise _failed(runtime, "ended while starting", error)


def _read_ready(fd: int, until_s: float) -> bytes | None:
    """What the agent wrote until it closed the pipe (nothing: it died); None at the deadline."""
    data = b""
    while len(data) < _READY_BYTES_MAX:
        left_s = until_s - time.monotonic()
        if left_s <= 0 or not select.select([fd], [], [], left_s)[0]:
            return None
        piece = os.read(fd, 4096)
        if not piece:
            break
        data += piece
    return data


def _environment() -> dict[str, str]:
    environment = dict(os.environ)
    # A checkout that is not installed must be found from another working folder.
    root = Path(__file__).parents[2]
    if root.name not in ("site-packages", "dist-packages"):
        parts = [str(root), environment.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, parts))
    # The agent computes nothing: BLAS threads would only cost memory.
    environment.setdefault("OPENBLAS_NUM_THREADS", "1")
    environment.setdefault("MALLOC_ARENA_MAX", "2")
    return environment


def _failed(runtime: RuntimeDir, what: str, error: Exception | None) -> AgentError:
    reason = f": {error}" if error is not None else ""
    return AgentError(
        f"the agent for {runtime.path} {what}{reason}. To see why, run it in the foreground: "
        f"`tieredckpt agent run --runtime-dir {runtime.path}`{_log_tail(runtime)}",
        outcome="unknown",
    )


def _log_tail(runtime: RuntimeDir) -> str:
    try:
        with runtime.log.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _LOG_TAIL_BYTES))
            tail = file.read(_LOG_TAIL_BYTES).decode("utf-8", "replace").strip()
    except OSError:
        return ""
    return f"\nThe end of its log, {runtime.log}:\n{tail}" if tail else ""
