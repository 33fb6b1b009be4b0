"""The agent process: one per runtime folder, from its lock to its clean stop.

``python -m tieredckpt.agent.daemon --runtime-dir DIR`` runs one without the command line's
libraries. A stop (SIGTERM, SIGINT, a client's request, the idle time-out) never deletes a
checkpoint; what is spilling is abandoned between two blocks and taken up by the next agent.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import logging.handlers
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tieredckpt.agent.host.launch import READY
from tieredckpt.agent.host.runtime import (
    RuntimeDir,
    default_runtime_dir,
    host_id,
    prepare_runtime_dir,
    take_agent_lock,
    what_it_survives,
)
from tieredckpt.agent.node import Node
from tieredckpt.errors import TieredCkptError
from tieredckpt.rpc.agent_server import AgentServer
from tieredckpt.rpc.fd_passing import FdServer, listen
from tieredckpt.rpc.messages.base import encode_error, package_version

LOG_FILE_BYTES_MAX = 4 << 20
LOG_FILES_KEPT = 1
LOG_LEVELS = ("debug", "info", "warning", "error")
WATCH_INTERVAL_S = 0.5

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentOptions:
    """How one agent runs."""

    runtime_dir: Path
    detached: bool = False
    """Leave the starter's session and process tree, and log to a file."""
    idle_timeout_s: float | None = None
    """Stop after this long without sessions, requests and spills; None: never."""
    log_level: str = "info"
    """One of :data:`LOG_LEVELS`."""
    log_file: Path | None = None
    """None: ``agent.log`` in the runtime folder if detached, else standard error."""
    ready_fd: int | None = None
    """A pipe that is told when the agent serves, or why it does not; used by the launcher."""


def run(options: AgentOptions) -> int:
    """Run the agent until it is stopped; returns the process's exit status.

    Raises:
        AgentError: The runtime folder cannot be used or another agent runs in it.
    """
    if options.detached and _fork_off():
        return 0
    try:
        runtime = prepare_runtime_dir(options.runtime_dir)
        lock_fd = take_agent_lock(runtime)
        try:
            _set_up_log(options, runtime)
            return _run_locked(options, runtime)
        finally:
            os.close(lock_fd)
    except TieredCkptError as error:
        _tell(options.ready_fd, encode_error(error)[1])
        raise


def _fork_off() -> bool:
    """True in the process that was started: the agent is its orphan, nobody's child to wait for."""
    if os.fork():
        return True
    with contextlib.suppress(PermissionError):  # the starter made the session already
        os.setsid()
    return False


def _tell(fd: int | None, text: bytes) -> None:
    if fd is None:
        return
    with contextlib.suppress(OSError):  # the starter gave up waiting; the agent is of use anyway
        os.write(fd, text)
        os.close(fd)


def _set_up_log(options: AgentOptions, runtime: RuntimeDir) -> None:
    path = options.log_file or (runtime.log if options.detached else None)
    handler: logging.Handler = logging.StreamHandler()
    if options.detached and path is not None:
        # Whatever is said past the log (a crash of the interpreter) must not go to a terminal.
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        os.dup2(fd, 1)
        os.dup2(fd, 2)
        os.close(fd)
    if path is not None:
        handler = logging.handlers.RotatingFileHandler(
            path, maxBytes=LOG_FILE_BYTES_MAX, backupCount=LOG_FILES_KEPT
        )
    form = logging.Formatter(
        "%(asctime)s.%(msecs)03dZ %(levelname)s %(name)s: %(message)s", "%Y-%m-%dT%H:%M:%S"
    )
    form.converter = time.gmtime
    handler.setFormatter(form)
    logging.basicConfig(level=options.log_level.upper(), handlers=[handler], force=True)


def _run_locked(options: AgentOptions, runtime: RuntimeDir) -> int:
    fds = FdServer(runtime.fds_socket)
    node = Node(
        runtime,
        fds,
        host_id=host_id(os.environ),
        survives=what_it_survives(detached=options.detached, environ=os.environ),
    )
    try:
        node.start()
        fds.start()
        asyncio.run(_serve(options, runtime, node))
    finally:
        node.stop()
        fds.stop()
        runtime.agent_socket.unlink(missing_ok=True)
        runtime.fds_socket.unlink(missing_ok=True)
        log.info("stopped; committed checkpoints stay in %s", runtime.path)
    return 0


async def _serve(options: AgentOptions, runtime: RuntimeDir, node: Node) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, _stop_by_signal, number, stop)
    listener = listen(runtime.agent_socket)
    server = AgentServer(node, listener, stop.set)
    await server.start()
    log.info(
        "agent %s (process %d, host %s) serves %s; memory survives the %s",
        package_version(), os.getpid(), node.host_id, runtime.path, node.survives,
    )  # fmt: skip
    ours = runtime.agent_socket.stat().st_ino
    _tell(options.ready_fd, READY)
    watch = asyncio.create_task(_watch(options, runtime, node, server, stop, ours))
    try:
        await stop.wait()
    finally:
        watch.cancel()
        await server.stop()


def _stop_by_signal(number: int, stop: asyncio.Event) -> None:
    log.info("stopping: %s", signal.Signals(number).name)
    stop.set()


async def _watch(
    options: AgentOptions,
    runtime: RuntimeDir,
    node: Node,
    server: AgentServer,
    stop: asyncio.Event,
    ours: int,
) -> None:
    """Stop when idle for too long, or when the socket (inode ``ours``) was deleted under us."""
    busy_s = time.monotonic()
    while True:
        await asyncio.sleep(WATCH_INTERVAL_S)
        now_s = time.monotonic()
        if node.is_busy():
            busy_s = now_s
        try:
            gone = runtime.agent_socket.stat().st_ino != ours
        except OSError:
            gone = True
        idle_s = now_s - max(busy_s, server.last_request_s)
        if gone:
            log.warning("stopping: %s was deleted", runtime.agent_socket)
        elif options.idle_timeout_s is not None and idle_s >= options.idle_timeout_s:
            log.info("stopping: idle for %.1f s", idle_s)
        else:
            continue
        stop.set()


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point without the command line's libraries."""
    parser = argparse.ArgumentParser(prog="python -m tieredckpt.agent.daemon")
    parser.add_argument("--runtime-dir", type=Path, default=default_runtime_dir(os.environ))
    parser.add_argument("--detached", action="store_true")
    parser.add_argument("--idle-timeout", type=float, metavar="SECONDS", dest="idle_timeout_s")
    parser.add_argument("--log-level", choices=LOG_LEVELS, default="info")
    parser.add_argument("--log-file", type=Path)
    parser.add_argument("--ready-fd", type=int)
    options = AgentOptions(**vars(parser.parse_args(arguments)))
    try:
        return run(replace(options, runtime_dir=options.runtime_dir.absolute()))
    except TieredCkptError as error:
        print(f"tieredckpt agent: {error}", file=sys.stderr)  # noqa: T201
        return 1


if __name__ == "__main__":
    sys.exit(main())
