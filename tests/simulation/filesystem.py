"""A POSIX file system in memory that forgets what was not synced, and fails where it is told to.

What it knows of real ones, because the product's promises hang on it:

- A file's bytes are in the page cache until ``fsync``; a power cut keeps, of each 512-byte sector
  that was not synced, the old or the new content, in any order, and a size in between.
- A name is durable after ``fsync`` of its folder; before that a power cut keeps an arbitrary subset
  of the changes of names, whatever happened to the files' bytes. A rename is one change.
- tmpfs loses everything with the power, and nothing with a process.
- A killed process loses its descriptors, and so its locks (flock, per open file description).
- After a failed ``fsync`` of a file the kernel forgets that its pages are dirty.

Everything random comes from one generator. Not thread-safe: the simulation has one thread.
"""

from __future__ import annotations

import errno
import fcntl as real_fcntl
import os as real_os
import stat
from collections.abc import Callable, Iterable
from random import Random

SECTOR = 512
FIRST_FD = 1 << 24
"""No real descriptor is as large: a call that went past the simulation fails with EBADF."""


class Died(BaseException):
    """The process that runs at this moment ends here. Not an Exception: no code may survive it."""


class Inode:
    """A file or a folder."""

    __slots__ = (
        "bad", "data", "dirty", "durable", "entries", "folder", "locks", "lost", "mount", "number",
        "synced",
    )  # fmt: skip

    def __init__(self, mount: Mount, number: int, *, folder: bool) -> None:
        self.mount = mount
        self.number = number
        self.folder = folder
        self.data = bytearray()
        self.synced = b""
        self.dirty = False
        self.lost = False
        """A sync failed: what was written before it never becomes durable."""
        self.bad = False
        """Reading it fails with EIO."""
        self.entries: dict[str, Inode] = {}
        self.durable: dict[str, Inode] = {}
        self.locks: dict[Description, int] = {}


class Mount:
    """One file system."""

    def __init__(self, path: str, device: int, *, volatile: bool) -> None:
        self.path = path
        self.device = device
        self.volatile = volatile
        self.full = False
        self.links = True
        self.direct = True
        self.pending: list[list[tuple[Inode, str, Inode | None]]] = []
        """Changes of names that are not durable, oldest first."""


class Description:
    """An open file description: what dup shares, and what holds a lock."""

    __slots__ = ("flags", "inode", "position", "refs")

    def __init__(self, inode: Inode, flags: int) -> None:
        self.inode = inode
        self.flags = flags
        self.position = 0
        self.refs = 1


class Stat:
    """What stat tells."""

    __slots__ = ("st_blocks", "st_dev", "st_ino", "st_mode", "st_mtime", "st_size")

    def __init__(self, inode: Inode) -> None:
        self.st_mode = stat.S_IFDIR | 0o700 if inode.folder else stat.S_IFREG | 0o600
        self.st_size = len(inode.data)
        self.st_mtime = 0.0  # no test here asks for ages
        self.st_dev = inode.mount.device
        self.st_ino = inode.number
        self.st_blocks = -(-len(inode.data) // SECTOR)


def oserror(code: int, path: str = "") -> OSError:
    return OSError(code, real_os.strerror(code), path)


class FileSystem:
    """See the module.

    Args:
        rng: Decides what a power cut keeps, in which order folders are listed, and so on.
        mounts: Path and whether it is volatile.
    """

    def __init__(self, rng: Random, mounts: Iterable[tuple[str, bool]]) -> None:
        self.rng = rng
        self.process = "test"
        """Who calls: descriptors that are opened belong to it."""
        self.before: Callable[[str, Mount | None], int | None] | None = None
        """Asked at each call by a simulated process; may raise, or limit how much is done."""
        self.calls = 0
        self._numbers = 0
        self._fds: dict[int, tuple[Description, str]] = {}
        self._next_fd = FIRST_FD
        self._found: dict[str, Inode] = {}
        """What paths were found to name, since the last name that went."""
        self.mounts: list[Mount] = []
        base = Mount("/", 1, volatile=False)
        self.root = self._inode(base, folder=True)
        for number, (path, volatile) in enumerate(mounts):
            mount = Mount(path, number + 2, volatile=volatile)
            self.mounts.append(mount)
            folder = self.root
            *above, name = path.strip("/").split("/")
            for each in above:
                folder = folder.entries.setdefault(each, self._inode(base, folder=True))
            folder.entries[name] = self._inode(mount, folder=True)

    def _inode(self, mount: Mount, *, folder: bool) -> Inode:
        self._numbers += 1
        return Inode(mount, self._numbers, folder=folder)

    # --- faults -----------------------------------------------------------------------------------

    def _call(self, name: str, mount: Mount | None) -> int | None:
        if self.process == "test":
            return None
        self.calls += 1
        return self.before(name, mount) if self.before is not None else None

    def kill(self, process: str) -> None:
        """All descriptors of a process are closed, as the kernel does."""
        for fd in [fd for fd, (_, owner) in self._fds.items() if owner == process]:
            self._close(fd)

    def send(self, fd: int, process: str) -> int:
        """A descriptor goes to another process (SCM_RIGHTS, and closed here)."""
        description, _ = self._fds[fd]
        self._fds[fd] = (description, process)
        return fd

    def lose_power(self) -> None:
        """Every process ends, tmpfs is empty, disks keep what was synced and some of the rest."""
        for fd in list(self._fds):
            self._close(fd)
        self._found.clear()
        for mount in self.mounts:
            top = self.find(mount.path)
            if mount.volatile:
                top.entries.clear()
                continue
            names, data = self.rng.choice(_KEEP)
            for changes in mount.pending:
                if self.rng.random() < names:
                    for folder, name, inode in changes:
                        _apply(folder.durable, name, inode)
            mount.pending.clear()
            self._reread(top, data)

    def _reread(self, inode: Inode, keep: float) -> None:
        inode.locks.clear()
        inode.lost = False
        if not inode.folder:
            if inode.dirty:
                inode.data = bytearray(self._torn(inode.synced, inode.data, keep))
                inode.dirty = False
                inode.synced = bytes(inode.data)
            return
        inode.entries = dict(inode.durable)
        for each in inode.entries.values():
            self._reread(each, keep)

    def _torn(self, old: bytes, new: bytearray, keep: float) -> bytes:
        size = self.rng.choice((len(old), len(new), self._between(len(old), len(new))))
        size = len(new) if keep == 1.0 else size
        found = bytearray(old[:size].ljust(size, b"\0"))
        for at in range(0, size, SECTOR):
            if self.rng.random() < keep:
                piece = bytes(new[at : min(at + SECTOR, size)])
                found[at : at + len(piece)] = piece
        return bytes(found)

    def _between(self, one: int, other: int) -> int:
        low, high = sorted((one, other))
        return low + self.rng.randrange((high - low) // SECTOR + 1) * SECTOR

    # --- looking, for tests and for the path class ------------------------------------------------

    def find(self, path: str) -> Inode:
        """The inode at ``path``. Raises ENOENT or ENOTDIR."""
        known = self._found.get(path)
        if known is not None:
            return known
        inode = self.root
        for name in path.split("/")[1:]:
            found = inode.entries.get(name)
            if found is None:
                raise oserror(errno.ENOENT if inode.folder else errno.ENOTDIR, path)
            inode = found
        self._found[path] = inode
        return inode

    def files(self, path: str) -> dict[str, Inode]:
        """All files below ``path`` by their path below it."""
        try:
            top = self.find(path)
        except OSError:
            return {}
        found: dict[str, Inode] = {}
        todo = [("", top)]
        while todo:
            prefix, folder = todo.pop()
            for name, inode in folder.entries.items():
                if inode.folder:
                    todo.append((f"{prefix}{name}/", inode))
                else:
                    found[prefix + name] = inode
        return found

    def _parent(self, path: str) -> tuple[Inode, str]:
        above, _, name = path.rpartition("/")
        folder = self.find(above)
        if not folder.folder:
            raise oserror(errno.ENOTDIR, path)
        return folder, name

    def _change(self, *changes: tuple[Inode, str, Inode | None]) -> None:
        mount = changes[0][0].mount
        for folder, name, inode in changes:
            if name in folder.entries:
                self._found.clear()
            _apply(folder.entries, name, inode)
        if not mount.volatile:
            mount.pending.append(list(changes))

    def forget(self, folder: Inode, name: str) -> None:
        """A name is gone, now and after any power cut, without a call."""
        self._found.clear()
        folder.entries.pop(name, None)
        folder.durable.pop(name, None)
        for changes in folder.mount.pending:
            changes[:] = [c for c in changes if (c[0], c[1]) != (folder, name)]

    # --- calls about names ------------------------------------------------------------------------

    def open(self, path: object, flags: int, mode: int = 0o777) -> int:
        name = real_os.fspath(path)  # type: ignore[call-overload]
        folder, last = self._parent(name)
        inode = folder.entries.get(last)
        creates = inode is None and flags & real_os.O_CREAT
        self._call("create" if creates else "open", folder.mount)
        if inode is None:
            if not flags & real_os.O_CREAT:
                raise oserror(errno.ENOENT, name)
            self._check_space(folder.mount, name)
            inode = self._inode(folder.mount, folder=False)
            self._change((folder, last, inode))
        elif flags & real_os.O_CREAT and flags & real_os.O_EXCL:
            raise oserror(errno.EEXIST, name)
        if flags & real_os.O_DIRECTORY and not inode.folder:
            raise oserror(errno.ENOTDIR, name)
        return self._new_fd(Description(inode, flags))

    def _new_fd(self, description: Description) -> int:
        self._next_fd += 1
        self._fds[self._next_fd] = (description, self.process)
        return self._next_fd

    def mkdir(self, path: str) -> None:
        folder, name = self._parent(path)
        self._call("mkdir", folder.mount)
        if name in folder.entries:
            raise oserror(errno.EEXIST, path)
        self._check_space(folder.mount, path)
        self._change((folder, name, self._inode(folder.mount, folder=True)))

    def link(self, source: object, target: object, *, follow_symlinks: bool = True) -> None:
        inode = self.find(real_os.fspath(source))  # type: ignore[call-overload]
        path = real_os.fspath(target)  # type: ignore[call-overload]
        folder, name = self._parent(path)
        self._call("link", folder.mount)
        if name in folder.entries:
            raise oserror(errno.EEXIST, path)
        if not folder.mount.links:
            raise oserror(errno.EPERM, path)
        self._check_space(folder.mount, path)
        self._change((folder, name, inode))

    def unlink(self, path: object) -> None:
        where = real_os.fspath(path)  # type: ignore[call-overload]
        folder, name = self._parent(where)
        self._call("unlink", folder.mount)
        if name not in folder.entries:
            raise oserror(errno.ENOENT, where)
        if folder.entries[name].folder:
            raise oserror(errno.EISDIR, where)
        self._change((folder, name, None))

    def rename(self, source: object, target: object) -> None:
        old_path = real_os.fspath(source)  # type: ignore[call-overload]
        old, old_name = self._parent(old_path)
        new, new_name = self._parent(real_os.fspath(target))  # type: ignore[call-overload]
        self._call("rename", old.mount)
        if old_name not in old.entries:
            raise oserror(errno.ENOENT, old_path)
        self._change((new, new_name, old.entries[old_name]), (old, old_name, None))

    replace = rename

    def listdir(self, path: object) -> list[str]:
        where = real_os.fspath(path)  # type: ignore[call-overload]
        folder = self.find(where)
        self._call("listdir", folder.mount)
        if not folder.folder:
            raise oserror(errno.ENOTDIR, where)
        names = list(folder.entries)
        self.rng.shuffle(names)
        return names

    def scandir(self, path: object) -> list[Entry]:
        where = real_os.fspath(path)  # type: ignore[call-overload]
        folder = self.find(where)
        return [Entry(f"{where}/{n}", n, folder.entries[n]) for n in self.listdir(path)]

    def stat(self, path: object, *, follow_symlinks: bool = True) -> Stat:
        inode = self.find(real_os.fspath(path))  # type: ignore[call-overload]
        self._call("stat", inode.mount)
        return Stat(inode)

    def statvfs(self, path: object) -> real_os.statvfs_result:
        mount = self.find(real_os.fspath(path)).mount  # type: ignore[call-overload]
        self._call("statvfs", mount)
        free = 0 if mount.full else 1 << 20
        return real_os.statvfs_result((4096, 4096, 1 << 20, free, free, 0, 0, 0, 0, 255))

    def _check_space(self, mount: Mount, path: str) -> None:
        if mount.full:
            raise oserror(errno.ENOSPC, path)

    # --- calls about descriptors ------------------------------------------------------------------

    def _of(self, fd: int) -> Description:
        found = self._fds.get(fd)
        if found is None:
            raise oserror(errno.EBADF)
        return found[0]

    def close(self, fd: int) -> None:
        self._of(fd)
        self._close(fd)

    def _close(self, fd: int) -> None:
        description, _ = self._fds.pop(fd)
        description.refs -= 1
        if not description.refs:
            description.inode.locks.pop(description, None)

    def dup(self, fd: int) -> int:
        description = self._of(fd)
        description.refs += 1
        return self._new_fd(description)

    def fstat(self, fd: int) -> Stat:
        inode = self._of(fd).inode
        self._call("fstat", inode.mount)
        return Stat(inode)

    def fsync(self, fd: int) -> None:
        inode = self._of(fd).inode
        try:
            self._call("fsync", inode.mount)
        except OSError:
            inode.lost = not inode.folder
            raise
        if inode.mount.volatile:
            return
        if not inode.folder:
            if inode.dirty and not inode.lost:
                inode.synced, inode.dirty = bytes(inode.data), False
            return
        pending = []
        for changes in inode.mount.pending:
            if any(folder is inode for folder, _, _ in changes):
                for folder, name, target in changes:
                    _apply(folder.durable, name, target)
            else:
                pending.append(changes)
        inode.mount.pending = pending

    def write(self, fd: int, data: bytes | memoryview) -> int:
        description = self._of(fd)
        count = self._write(description, data, description.position)
        description.position += count
        return count

    def pwrite(self, fd: int, data: bytes | memoryview, offset: int) -> int:
        return self._write(self._of(fd), data, offset)

    def _write(self, description: Description, data: bytes | memoryview, offset: int) -> int:
        inode = description.inode
        piece = bytes(data)
        most = self._call("write", inode.mount)
        direct = description.flags & real_os.O_DIRECT
        if direct and (offset | len(piece)) % 4096:
            raise oserror(errno.EINVAL)
        if most is not None and len(piece) > most:
            piece = piece[: most // 4096 * 4096 or 4096] if direct else piece[:most]
        if offset + len(piece) > len(inode.data):
            if inode.mount.full:
                raise oserror(errno.ENOSPC)
            inode.data.extend(bytes(offset - len(inode.data)))
        inode.data[offset : offset + len(piece)] = piece
        inode.dirty = True
        return len(piece)

    def posix_fallocate(self, fd: int, offset: int, size: int) -> None:
        inode = self._of(fd).inode
        self._call("fallocate", inode.mount)
        if inode.mount.full:
            raise oserror(errno.ENOSPC)
        inode.data.extend(bytes(max(0, offset + size - len(inode.data))))

    def ftruncate(self, fd: int, size: int) -> None:
        inode = self._of(fd).inode
        self._call("truncate", inode.mount)
        inode.data[size:] = b""
        inode.data.extend(bytes(size - len(inode.data)))
        inode.dirty = True

    def pread(self, fd: int, size: int, offset: int) -> bytes:
        description = self._of(fd)
        inode = description.inode
        most = self._call("read", inode.mount)
        if inode.bad:
            raise oserror(errno.EIO)
        if most is not None and size > most:
            size = most // 4096 * 4096 or 4096 if description.flags & real_os.O_DIRECT else most
        return bytes(inode.data[offset : offset + size])

    def preadv(self, fd: int, buffers: list[memoryview], offset: int) -> int:
        (into,) = buffers
        data = self.pread(fd, len(into), offset)
        into[: len(data)] = data
        return len(data)

    def fdopen(self, fd: int, mode: str, buffering: int = -1) -> OpenStream:
        assert mode == "rb"
        return OpenStream(self, fd)

    # --- fcntl ------------------------------------------------------------------------------------

    def flock(self, fd: int, kind: int) -> None:
        description = self._of(fd)
        inode = description.inode
        self._call("flock", None)
        if kind == real_fcntl.LOCK_UN:
            inode.locks.pop(description, None)
            return
        assert kind & real_fcntl.LOCK_NB, "nothing may wait in the simulation"
        kind &= ~real_fcntl.LOCK_NB
        others = [held for who, held in inode.locks.items() if who is not description]
        # As the kernel does it: a conversion that fails loses what was held before.
        inode.locks.pop(description, None)
        if real_fcntl.LOCK_EX in others or (others and kind == real_fcntl.LOCK_EX):
            raise BlockingIOError(errno.EWOULDBLOCK, "locked")
        inode.locks[description] = kind

    def fcntl(self, fd: int, command: int, argument: int = 0) -> int:
        description = self._of(fd)
        if command == real_fcntl.F_GETFL:
            return description.flags
        assert command == real_fcntl.F_SETFL
        if argument & real_os.O_DIRECT and not description.inode.mount.direct:
            raise oserror(errno.EINVAL)
        description.flags = argument
        return 0


class Entry:
    """What scandir gives."""

    def __init__(self, path: str, name: str, inode: Inode) -> None:
        self.path = path
        self.name = name
        self._inode = inode

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        return self._inode.folder

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        return not self._inode.folder

    def stat(self, *, follow_symlinks: bool = True) -> Stat:
        return Stat(self._inode)


class OpenStream:
    """A raw binary stream over a descriptor that it owns."""

    def __init__(self, fs: FileSystem, fd: int) -> None:
        self._fs = fs
        self._fd = fd
        self._at = 0

    def read(self, size: int) -> bytes:
        data = self._fs.pread(self._fd, size, self._at)
        self._at += len(data)
        return data

    def __enter__(self) -> OpenStream:
        return self

    def __exit__(self, *exc: object) -> None:
        self._fs.close(self._fd)


# Of what is not synced a power cut keeps these shares of (names, sectors).
_KEEP = ((0.0, 0.0), (1.0, 0.0), (1.0, 0.5), (0.5, 0.5), (0.8, 0.9), (0.0, 1.0), (1.0, 1.0))


def _apply(entries: dict[str, Inode], name: str, inode: Inode | None) -> None:
    if inode is None:
        entries.pop(name, None)
    else:
        entries[name] = inode
