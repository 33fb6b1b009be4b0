"""The runtime folder: whose it is, what lies in it, and the lock that elects its one agent."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import stat
from collections.abc import Mapping
from pathlib import Path

from tieredckpt.errors import AgentError
from tieredckpt.rpc.agent_client import AGENT_SOCKET, FDS_SOCKET
from tieredckpt.rpc.fd_passing import check_socket_path
from tieredckpt.storage.memory.slot import try_lock_exclusive, try_lock_shared

MOUNTS = Path("/proc/self/mountinfo")
MEMORY_FILE_SYSTEMS = ("tmpfs", "ramfs")
RUNTIME_DIR_VARIABLE = "TIEREDCKPT_RUNTIME_DIR"
NODE_NAME_VARIABLE = "TIEREDCKPT_NODE_NAME"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_INITIAL_PID_NAMESPACE = "pid:[4026531836]"
_HOST_CHARS_MAX = 255
_ENTRY = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
"""How each part of the way to the folder is opened: itself, be it a link."""
_LINKS_MAX = 40
_ID = re.compile(r"[0-9a-f]{32}", re.ASCII)

log = logging.getLogger(__name__)


class RuntimeDir:
    """Paths inside one runtime folder.

    Args:
        path: Of the folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lock = path / "agent.lock"
        """Locked by the agent as long as it lives; holds its process id, for people."""
        self.launch_lock = path / "launch.lock"
        """Locked by the one process that is starting an agent."""
        self.agent_socket = path / AGENT_SOCKET
        """HTTP."""
        self.fds_socket = path / FDS_SOCKET
        """Descriptors."""
        self.log = path / "agent.log"
        """Log of a detached agent."""
        self.slots = path / "slots"
        """Slot files."""
        self.sessions = path / "sessions"
        """Lease files of sessions."""
        self.namespaces = path / "ns"
        """Manifests, plans, attempt records in memory, one folder per namespace."""
        self.specs = path / "specs"
        """Of each namespace the run that saved last and its spec, so that spills resume alone."""
        self.data = path / "data"
        """Entries of the data cache, one folder per namespace, in it one per stream."""
        self.peers = path / "peers"
        """Tokens, addresses and known hosts, so that an agent that restarts is found again."""
        self.incarnation = path / "incarnation"
        """Of this host's memory; see :func:`incarnation`."""


def default_runtime_dir(environ: Mapping[str, str]) -> Path:
    """``$TIEREDCKPT_RUNTIME_DIR``, else ``/dev/shm/tieredckpt-<uid>``."""
    named = environ.get(RUNTIME_DIR_VARIABLE)
    return Path(named) if named else Path(f"/dev/shm/tieredckpt-{os.geteuid()}")  # noqa: S108


def prepare_runtime_dir(path: Path, *, make: bool = True) -> RuntimeDir:
    """Make sure that ``path`` is a folder of ours, and private, that no link leads to.

    A warning is logged if it is on a disk and is to be used (``make``).

    Args:
        path: It, below folders that other users may write to.
        make: False: what is not there is not made, and can be made.

    Raises:
        AgentError: It is another user's, open to others, no folder, a link, or below a link of
            another user's; or its name is too long.
    """
    path = path.absolute()
    check_socket_path(path / AGENT_SOCKET)
    try:
        info = _walk(path, make)
    except OSError as error:
        if not make and isinstance(error, FileNotFoundError):
            return RuntimeDir(path)
        raise _refused(f"cannot use the runtime folder {path}: {error.strerror}") from error
    mode = stat.S_IMODE(info.st_mode)
    if not stat.S_ISDIR(info.st_mode):
        raise _refused(f"the runtime folder {path} is not a folder")
    if info.st_uid != os.geteuid():
        raise _refused(
            f"the runtime folder {path} belongs to user {info.st_uid}, this process runs as "
            f"{os.geteuid()}"
        )
    if mode & 0o077:
        raise _refused(
            f"the runtime folder {path} is open to other users (mode {mode:o})",
            f"run `chmod 700 {path}`, or ",
        )
    if make and (why := why_slow(path, file_system_of(path))) is not None:
        log.warning("%s", why)
    return RuntimeDir(path)


def _walk(path: Path, make: bool) -> os.stat_result:
    """What lies at ``path``, reached folder by folder: between two looks nothing can be changed.

    Other users could lead us by a link into a folder of our own, to write what they like to see
    there, and into one of theirs later: ``fs.protected_symlinks`` is not set everywhere.
    """
    at, left, links = os.open("/", _ENTRY), list(path.parts[:0:-1]), 0
    try:
        while left:
            name = left.pop()
            try:
                found = os.open(name, _ENTRY, dir_fd=at)
            except FileNotFoundError:
                if not make:
                    raise
                with contextlib.suppress(FileExistsError):  # another process was faster
                    os.mkdir(name, 0o777 if left else 0o700, dir_fd=at)
                found = os.open(name, _ENTRY, dir_fd=at)
            info = os.fstat(found)
            if not stat.S_ISLNK(info.st_mode):
                os.close(at)
                at = found
                continue
            try:
                target = Path(os.readlink("", dir_fd=found))
            finally:
                os.close(found)
            links += 1
            if not left or info.st_uid not in (0, os.geteuid()) or links > _LINKS_MAX:
                raise _refused(
                    f"the runtime folder {path} is reached by a link ({name}, of user "
                    f"{info.st_uid}) to {target}",
                    "name the folder itself, or ",
                )
            if target.is_absolute():
                os.close(at)
                at = os.open("/", _ENTRY)
            left += [part for part in reversed(target.parts) if part != "/"]
        return os.fstat(at)
    finally:
        os.close(at)


def _refused(text: str, remedy: str = "") -> AgentError:
    return AgentError(
        f"{text}: {remedy}set agent.runtime_dir (or {RUNTIME_DIR_VARIABLE}) to a folder of your "
        "own on a tmpfs",
        outcome="not_applied",
    )


def file_system_of(path: Path) -> str | None:
    """The type of the file system of ``path``, as in "ext4"; None if it is not known."""
    device = path.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        mounts = MOUNTS.read_text("utf-8", "surrogateescape")
    except OSError:
        return None
    for line in mounts.splitlines():
        before, _, after = line.partition(" - ")
        if before.split()[2] == number:
            return after.split()[0]
    # Btrfs and overlays report numbers of their own; memory file systems never do.
    return "another file system"


def why_slow(path: Path, kind: str | None) -> str | None:
    """Why a runtime folder on this kind of file system is no memory; None: it is, or may be."""
    if kind in (None, *MEMORY_FILE_SYSTEMS):
        return None
    return (
        f"{path} is on {kind}, not on a tmpfs: saves are as slow as that disk, and checkpoints in "
        "memory may not survive any crash; name a folder below /dev/shm (agent.runtime_dir)"
    )


def remove_empty(folder: Path) -> None:
    """Delete what was a namespace's folder, or the next agent would know the namespace again.

    A folder that still holds a file stays.
    """
    for path, _, _ in os.walk(folder, topdown=False):
        with contextlib.suppress(OSError):
            os.rmdir(path)


def take_agent_lock(runtime: RuntimeDir) -> int:
    """Become the one agent of ``runtime``; returns the locked descriptor, kept until the end.

    Raises:
        AgentError: Another agent is running; field ``running`` is True.
    """
    fd = os.open(runtime.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    if not try_lock_exclusive(fd):
        pid = os.pread(fd, 32, 0).decode("ascii", "replace").strip()
        os.close(fd)
        raise AgentError(
            f"an agent runs in {runtime.path} already (process {pid or 'unknown'}): use it, or "
            f"stop it with `tieredckpt agent stop`",
            outcome="not_applied",
            running=True,
        )
    os.ftruncate(fd, 0)
    os.pwrite(fd, f"{os.getpid()}\n".encode("ascii"), 0)
    return fd


def is_agent_running(runtime: RuntimeDir) -> bool:
    """Whether some process holds the agent's lock (it may still be starting or stopping)."""
    try:
        fd = os.open(runtime.lock, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        return not try_lock_shared(fd)
    finally:
        os.close(fd)


def host_id(environ: Mapping[str, str]) -> str:
    """What names this host in manifests: ``$TIEREDCKPT_NODE_NAME``, else the kernel's boot id.

    Never the host name: pods and clones lie.
    """
    name = environ.get(NODE_NAME_VARIABLE, "").strip()
    return (name or boot_id())[:_HOST_CHARS_MAX]


def boot_id() -> str:
    """The kernel's: another one after each boot."""
    return _BOOT_ID.read_text("ascii").strip()


def incarnation(runtime: RuntimeDir, boot: str) -> str:
    """The id of what this host holds in memory (32 hex digits).

    It lies beside the slots, so it goes when they go, and counts for one boot only: a runtime
    folder on a disk outlives its slots' contents as little as a tmpfs does.

    Raises:
        AgentError: It cannot be noted.
    """
    try:
        found = runtime.incarnation.read_text("ascii", "replace").split()
        if len(found) == 2 and found[1] == boot and _ID.fullmatch(found[0]):
            return found[0]
    except FileNotFoundError:
        pass
    except OSError as error:
        raise _refused(f"cannot read {runtime.incarnation}: {error.strerror}") from error
    made = secrets.token_hex(16)
    write_private(runtime.incarnation, f"{made} {boot}\n".encode("ascii"))
    return made


def write_private(path: Path, data: bytes) -> None:
    """Put ``data`` in the place of the file ``path``, readable for this user alone from the start.

    Raises:
        AgentError: It cannot be written; the old contents stay.
    """
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "wb") as file:
            file.write(data)
        os.replace(temporary, path)
    except OSError as error:
        raise AgentError(f"cannot write {path}: {error.strerror}", outcome="not_applied") from error


def what_it_survives(*, detached: bool, environ: Mapping[str, str]) -> str:
    """What the memory tier outlives here: "process", "container" or "host user session".

    A detached agent inside a container or a Slurm step dies with it, whatever its session id.
    """
    in_container = _pid_namespace() != _INITIAL_PID_NAMESPACE or Path("/.dockerenv").exists()
    if detached and (in_container or "SLURM_STEP_ID" in environ):
        return "process"
    return "container" if in_container else "host user session"


def _pid_namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:  # hidden from us: then we are in a container
        return ""
