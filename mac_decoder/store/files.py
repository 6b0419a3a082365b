"""The file layer: every operation on blocks and cuts goes through a ``Disk``.

The order in which the store calls it is its promise (FORMAT.md, "Commit order"), so tests put
a disk that fails, fills up or forgets in place of the real one. Handles are small integers.
Every method raises ``OSError``; none retries.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Final, NamedTuple, Protocol

_MOST_BUFFERS: Final = 512
_LONGEST_BUFFER: Final = 1 << 20
"""So no ``writev`` has more than 512 MiB; macOS refuses 2 GiB, and more than 1024 buffers."""


class NotAFileError(OSError):
    """What has a file's name is none: a directory, a pipe, a link, a socket."""


class Found(NamedTuple):
    """A regular file: its path relative to the directory walked, in POSIX form, and its size."""

    path: str
    nbytes: int
    modified_ns: int


class Disk(Protocol):
    """What the store needs of a file system. Files are 0600, directories 0700."""

    def make_directory(self, path: Path) -> None:
        """Create ``path`` and its parents where missing; ``path`` itself ends up at 0700."""
        ...

    def create(self, path: Path) -> int:
        """A handle for writing a file that did not exist."""
        ...

    def write(self, handle: int, buffers: Sequence[memoryview]) -> None:
        """Append all bytes of all buffers."""
        ...

    def sync(self, handle: int) -> None:
        """The file's bytes reach the drive (``fsync``)."""
        ...

    def barrier(self, handle: int) -> None:
        """Everything synced before reaches the medium (``F_FULLFSYNC`` where it exists)."""
        ...

    def close(self, handle: int) -> None:
        """Give the handle back."""
        ...

    def rename(self, source: Path, target: Path) -> None:
        """Replace ``target`` atomically. What ``source`` is does not matter."""
        ...

    def sync_directory(self, path: Path) -> None:
        """The names in ``path`` reach the drive."""
        ...

    def open(self, path: Path) -> int:
        """A handle for reading a regular file; ``NotAFileError`` for anything else."""
        ...

    def size(self, handle: int) -> int:
        """Bytes of the open file."""
        ...

    def read_into(self, handle: int, view: memoryview, offset: int) -> int:
        """Read at ``offset`` into ``view``; the number of bytes, short only at the end."""
        ...

    def file_size(self, path: Path) -> int | None:
        """Bytes of the file of that name; ``None`` for what is no regular file."""
        ...

    def unlink(self, path: Path) -> None:
        """Remove a file, or what else has its name. A directory goes only if it is empty."""
        ...

    def walk(self, path: Path) -> Iterator[Found]:
        """All regular files below ``path``, however deep."""
        ...

    def free(self, path: Path) -> int:
        """Bytes that this user may still write to the volume of ``path``."""
        ...


class RealDisk:
    """The operating system's files."""

    def make_directory(self, path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        if stat.S_IMODE(path.stat().st_mode) != 0o700:
            path.chmod(0o700)

    def create(self, path: Path) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        return os.open(path, flags, 0o600)

    def write(self, handle: int, buffers: Sequence[memoryview]) -> None:
        pending = deque(
            part for buffer in buffers if buffer.nbytes for part in _parts(buffer.cast("B"))
        )
        while pending:
            written = os.writev(handle, list(islice(pending, _MOST_BUFFERS)))
            while pending and written >= pending[0].nbytes:
                written -= pending.popleft().nbytes
            if written:
                pending[0] = pending[0][written:]

    def sync(self, handle: int) -> None:
        os.fsync(handle)

    def barrier(self, handle: int) -> None:
        full_sync = getattr(fcntl, "F_FULLFSYNC", None)
        if full_sync is None:
            # Here fsync itself waits for the medium, and each file had its own.
            return
        try:
            fcntl.fcntl(handle, full_sync)
        except OSError as error:
            # A network volume may know no more than fsync.
            if error.errno not in (errno.ENOTSUP, errno.EINVAL, errno.ENOTTY):
                raise
            os.fsync(handle)

    def close(self, handle: int) -> None:
        os.close(handle)

    def rename(self, source: Path, target: Path) -> None:
        os.rename(source, target)

    def sync_directory(self, path: Path) -> None:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    def open(self, path: Path) -> int:
        try:
            handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError as error:
            # Links and sockets cannot be opened, each in its own words.
            if isinstance(error, FileNotFoundError) or self.file_size(path) is not None:
                raise
            raise NotAFileError(errno.EINVAL, "not a regular file") from error
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            os.close(handle)
            raise NotAFileError(errno.EINVAL, "not a regular file")
        return handle

    def size(self, handle: int) -> int:
        return os.fstat(handle).st_size

    def read_into(self, handle: int, view: memoryview, offset: int) -> int:
        done = 0
        while done < view.nbytes:
            count = _read_at(handle, view[done:], offset + done)
            if count == 0:
                break
            done += count
        return done

    def file_size(self, path: Path) -> int | None:
        status = os.lstat(path)
        return status.st_size if stat.S_ISREG(status.st_mode) else None

    def unlink(self, path: Path) -> None:
        try:
            os.unlink(path)
        except (IsADirectoryError, PermissionError):
            # macOS does not permit it for a directory.
            if not stat.S_ISDIR(os.lstat(path).st_mode):
                raise
            os.rmdir(path)

    def walk(self, path: Path) -> Iterator[Found]:
        for folder, _folders, names in os.walk(path):
            for name in names:
                full = os.path.join(folder, name)
                try:
                    status = os.lstat(full)
                except FileNotFoundError:
                    continue
                if stat.S_ISREG(status.st_mode):
                    relative = os.path.relpath(full, path).replace(os.sep, "/")
                    yield Found(relative, status.st_size, status.st_mtime_ns)

    def free(self, path: Path) -> int:
        volume = os.statvfs(path)
        return volume.f_bavail * volume.f_frsize


class ReadOnlyDisk(RealDisk):
    """The operating system's files, of which none is made, renamed or removed."""

    def make_directory(self, path: Path) -> None:
        raise _read_only(path)

    def create(self, path: Path) -> int:
        raise _read_only(path)

    def rename(self, source: Path, target: Path) -> None:
        raise _read_only(target)

    def unlink(self, path: Path) -> None:
        raise _read_only(path)


def _read_only(path: Path) -> OSError:
    return OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))


def _parts(buffer: memoryview) -> Iterator[memoryview]:
    for start in range(0, buffer.nbytes, _LONGEST_BUFFER):
        yield buffer[start : start + _LONGEST_BUFFER]


def _read_at(handle: int, view: memoryview, offset: int) -> int:
    if hasattr(os, "preadv"):
        return os.preadv(handle, [view], offset)
    # Older systems copy once more.
    data = os.pread(handle, view.nbytes, offset)
    view[: len(data)] = data
    return len(data)
