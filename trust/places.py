"""Private files: a directory that nobody else may enter, and files that appear whole or not at all.

The directory is opened once per operation, looked at, and everything then happens relative to
that open directory: whoever swaps a path in between gains nothing. Symbolic links are not
followed, except in a path that the user named. Writers take turns (a lock file), so a file
that is still being written is told apart from one that a crash left behind. Both keep apart
from the files proper by a leading dot.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import stat
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from protocol.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PATIENCE_S: Final = 5.0
"""How long another process may hold the lock: it writes a small file."""

_LOOK_S: Final = 0.02
_LOCK: Final = ".lock"
_NAME: Final = re.compile(r"[0-9A-Za-z][0-9A-Za-z._-]{0,127}")
_OTHERS: Final = stat.S_IRWXG | stat.S_IRWXO
_OTHERS_WRITE: Final = stat.S_IWGRP | stat.S_IWOTH


@dataclass(frozen=True)
class Kind:
    """How refusals name a kind of private file; its reader promises the reasons."""

    called: str
    field: str
    exposed: str
    unreadable: str
    hint: str


def read_named(path: Path, most: int, kind: Kind) -> bytes:
    """The whole file that the user named, at most ``most`` bytes.

    Raises ``OSError`` where it cannot be opened, and ``ConfigError``: ``kind.exposed`` if
    others have access, ``kind.unreadable`` if it is no file or too large.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        return _contents(descriptor, path, most, kind)
    finally:
        os.close(descriptor)


class Place:
    """One private directory (0700, of this user) and its files (0600).

    Any process of this user may use it at the same time, and be killed at any moment: a file
    is always the old one or the new one. Made when something is first written. Every method
    raises ``ConfigError``: ``directory_exposed`` if others may enter, ``directory_unusable``, also
    where what is no file lies in the place of the lock.
    """

    def __init__(self, path: Path, patience_s: float = PATIENCE_S) -> None:
        self.path = path
        self._patience_s = patience_s

    def names(self) -> list[str]:
        """The names of all files but the lock, sorted; empty if there is no directory.

        What another process is just writing is left out; what a crash left is not.
        """
        with _usable(self.path), self._entered() as directory:
            if directory is None:
                return []
            with _shared(directory, self.path) as shared:
                found = os.listdir(directory)
        # Without a lock nobody wrote yet, or somebody has just begun to.
        quiet = shared if shared is not None else _LOCK not in found
        return sorted(
            name for name in found if name != _LOCK and (quiet or not name.startswith("."))
        )

    def read(self, name: str, most: int, kind: Kind) -> bytes | None:
        """The whole file, at most ``most`` bytes; ``None`` if there is none.

        Raises ``ConfigError`` also like :func:`read_named`; here another owner's file and a
        symbolic link are ``kind.unreadable`` as well.
        """
        with _usable(self.path), self._entered() as directory:
            return None if directory is None else self._read(directory, name, most, kind)

    def write(self, name: str, content: bytes) -> None:
        """Make or replace the file, durably.

        Raises ``ConfigError`` also with ``trust_not_durable``: then the file is whole, and
        the old or the new one; and with ``state_dir_locked``.
        """
        self._write(name, content, replace=True)

    def create(self, name: str, content: bytes) -> bool:
        """Make the file, durably; ``False``, and nothing is done, if it exists.

        Raises like :meth:`write`.
        """
        return self._write(name, content, replace=False)

    def rewrite(
        self, name: str, most: int, kind: Kind, change: Callable[[bytes], bytes | None]
    ) -> bool:
        """Replace the file by what ``change`` makes of it, durably; nobody writes in between.

        ``False``, and nothing is done, if there is none, or ``change`` returns ``None``.
        Raises like :meth:`read`, :meth:`write` and ``change``.
        """
        _require_name(name)
        with self._entered() as directory:
            if directory is None:
                return False
            with _durably(self.path / name), self._alone(directory):
                found = self._read(directory, name, most, kind)
                changed = None if found is None else change(found)
                if changed is None:
                    return False
                _put(name, changed, directory)
        return True

    def remove(self, name: str) -> bool:
        """Remove the file, durably; ``False`` if there is none. Raises like :meth:`write`."""
        _require_name(name)
        with self._entered() as directory:
            if directory is None:
                return False
            with _durably(self.path / name), self._alone(directory):
                try:
                    os.unlink(name, dir_fd=directory)
                except FileNotFoundError:
                    return False
                sync(directory)
        return True

    def stamp(self) -> object:
        """A value that differs, in comparison, whenever a file was made, replaced or removed.

        It costs one look at each file's status.
        """
        with _usable(self.path), self._entered() as directory:
            if directory is None:
                return None
            seen: list[tuple[str, int, int, int, int]] = []
            with os.scandir(directory) as entries:
                for entry in entries:
                    if entry.name.startswith("."):
                        continue
                    try:
                        status = entry.stat(follow_symlinks=False)
                    except FileNotFoundError:
                        continue
                    seen.append(
                        (
                            entry.name,
                            status.st_ino,
                            status.st_size,
                            status.st_mtime_ns,
                            status.st_ctime_ns,
                        )
                    )
            return tuple(sorted(seen))

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """While the block runs no other process writes here; the directory is made.

        Not while holding it: :meth:`write`, :meth:`create` and :meth:`remove` take it
        themselves. Raises like :meth:`write`.
        """
        with self._made() as directory, contextlib.ExitStack() as stack:
            with _durably(self.path / _LOCK):
                stack.enter_context(self._alone(directory))
            yield

    def _read(self, directory: int, name: str, most: int, kind: Kind) -> bytes | None:
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW
        try:
            descriptor = os.open(name, flags, dir_fd=directory)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise _unreadable(self.path / name, kind, _why(error)) from error
        try:
            if os.fstat(descriptor).st_uid != os.geteuid():
                raise _unreadable(self.path / name, kind, "it belongs to another user")
            return _contents(descriptor, self.path / name, most, kind)
        finally:
            os.close(descriptor)

    def _write(self, name: str, content: bytes, *, replace: bool) -> bool:
        _require_name(name)
        with self._made() as directory, _durably(self.path / name), self._alone(directory):
            if not replace and _exists(name, directory):
                return False
            _put(name, content, directory)
        return True

    @contextlib.contextmanager
    def _made(self) -> Iterator[int]:
        with _usable(self.path):
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.path.mkdir(mode=0o700, exist_ok=True)
        with self._entered() as directory:
            if directory is None:
                raise _unusable(self.path, "it was removed")
            yield directory

    @contextlib.contextmanager
    def _entered(self) -> Iterator[int | None]:
        """The open directory, looked at; ``None`` if there is none."""
        with contextlib.ExitStack() as stack:
            directory = self._open()
            if directory is None:
                yield None
                return
            stack.callback(os.close, directory)
            status = os.fstat(directory)
            if status.st_uid != os.geteuid():
                raise _unusable(self.path, "it belongs to another user")
            if status.st_mode & _OTHERS:
                raise _exposed(self.path, status.st_mode, "mode 0700", "700")
            with _usable(self.path):
                around = os.stat("..", dir_fd=directory)
            if around.st_uid not in (os.geteuid(), 0):
                raise _unusable(self.path.parent, "it belongs to another user")
            # Who may rename what is in there could put an older copy in place.
            if around.st_mode & _OTHERS_WRITE and not around.st_mode & stat.S_ISVTX:
                raise _exposed(self.path.parent, around.st_mode, "mode 0755 or less", "go-w")
            yield directory

    def _open(self) -> int | None:
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW
        with _usable(self.path):
            try:
                return os.open(self.path, flags)
            except FileNotFoundError:
                return None

    @contextlib.contextmanager
    def _alone(self, directory: int) -> Iterator[None]:
        """While the lock is held. Raises ``ConfigError`` (``state_dir_locked``), ``OSError``."""
        with contextlib.ExitStack() as stack:
            lock = _open_lock(directory, self.path, os.O_RDWR | os.O_CREAT)
            stack.callback(os.close, lock)
            until = time.monotonic() + self._patience_s
            while not _locked(lock, fcntl.LOCK_EX):
                if time.monotonic() >= until:
                    raise ConfigError(
                        f"Another process holds the lock of {self.path}.",
                        reason="state_dir_locked",
                        field=self.path.name,
                        hint="end the process that holds it, or give another --state-dir",
                    )
                time.sleep(_LOOK_S)
            yield


def sync(descriptor: int) -> None:
    """What was written reaches the medium. Raises ``OSError``."""
    # os.fsync on macOS reaches the drive's cache only; some file systems know no more.
    full_sync = getattr(fcntl, "F_FULLFSYNC", None)
    if full_sync is not None:
        try:
            fcntl.fcntl(descriptor, full_sync)
            return
        except OSError as error:
            if error.errno not in (errno.ENOTSUP, errno.EINVAL, errno.ENOTTY):
                raise
    os.fsync(descriptor)


def _put(name: str, content: bytes, directory: int) -> None:
    temporary = f".{name}.{secrets.token_hex(8)}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    descriptor = os.open(temporary, flags, 0o600, dir_fd=directory)
    try:
        try:
            remaining = memoryview(content)
            while remaining:
                remaining = remaining[os.write(descriptor, remaining) :]
            sync(descriptor)
        finally:
            os.close(descriptor)
        os.rename(temporary, name, src_dir_fd=directory, dst_dir_fd=directory)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(temporary, dir_fd=directory)
        raise
    sync(directory)


def _contents(descriptor: int, path: Path, most: int, kind: Kind) -> bytes:
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        raise _unreadable(path, kind, "it is not a file")
    if status.st_mode & _OTHERS:
        raise ConfigError(
            f"The {kind.called} {path} is a secret, and other users have access to it.",
            reason=kind.exposed,
            field=kind.field,
            found=_octal(status.st_mode),
            expected="mode 0600",
            hint=f"chmod 600 {path}; if others had access, pair again",
        )
    with os.fdopen(descriptor, "rb", closefd=False) as file:
        raw = file.read(most + 1)
    if len(raw) > most:
        raise _unreadable(path, kind, f"it has more than {most} bytes")
    return raw


@contextlib.contextmanager
def _usable(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise _unusable(path, _why(error)) from error


@contextlib.contextmanager
def _durably(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        hint = "check the free space and the permissions of the directory"
        if path.is_dir() and not path.is_symlink():
            hint = f"remove {path}, which is no file but a directory"
        raise ConfigError(
            f"{path} could not be written to disk: {_why(error)}.",
            reason="trust_not_durable",
            field=path.name,
            hint=hint,
        ) from error


@contextlib.contextmanager
def _shared(directory: int, path: Path) -> Iterator[bool | None]:
    """Whether nobody writes, nor begins to before the block ends; ``None`` without a lock."""
    lock = None
    with contextlib.suppress(OSError):
        lock = _open_lock(directory, path, os.O_RDONLY)
    if lock is None:
        yield None
        return
    try:
        yield _locked(lock, fcntl.LOCK_SH)
    finally:
        os.close(lock)


def _open_lock(directory: int, path: Path, flags: int) -> int:
    """The open lock of the directory at ``path``.

    Raises ``OSError``, and ``ConfigError`` where it is no file. That is not replaced: of two who
    did so, each would hold another lock. Nor is it waited for: it may be a pipe.
    """
    flags |= os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY
    try:
        lock = os.open(_LOCK, flags, 0o600, dir_fd=directory)
    except FileNotFoundError:
        raise
    except OSError as error:
        # Opening does not say of all that is no file what it is.
        mode = os.stat(_LOCK, dir_fd=directory, follow_symlinks=False).st_mode
        if stat.S_ISREG(mode):
            raise
        raise _no_lock(path) from error
    if not stat.S_ISREG(os.fstat(lock).st_mode):
        os.close(lock)
        raise _no_lock(path)
    return lock


def _locked(lock: int, how: int) -> bool:
    try:
        fcntl.flock(lock, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _exists(name: str, directory: int) -> bool:
    try:
        os.stat(name, dir_fd=directory, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def _require_name(name: str) -> None:
    if not _NAME.fullmatch(name):
        raise ValueError(f"{name!r} is no name of a private file")


def _unreadable(path: Path, kind: Kind, why: str) -> ConfigError:
    return ConfigError(
        f"The {kind.called} {path} cannot be used: {why}.",
        reason=kind.unreadable,
        field=kind.field,
        hint=kind.hint,
    )


def _exposed(path: Path, mode: int, expected: str, change: str) -> ConfigError:
    return ConfigError(
        f"Others have access to {path}, where secrets are kept.",
        reason="directory_exposed",
        field=path.name,
        found=_octal(mode),
        expected=expected,
        hint=f"chmod {change} {path}; if others had access, pair again",
    )


def _unusable(path: Path, why: str) -> ConfigError:
    return ConfigError(
        f"{path} cannot be used as a private directory: {why}.",
        reason="directory_unusable",
        field=path.name,
        hint="it must be a directory of this user, not a link; see --state-dir",
    )


def _no_lock(path: Path) -> ConfigError:
    return ConfigError(
        f"{path / _LOCK} is no file, and so nobody can lock the directory.",
        reason="directory_unusable",
        field=path.name,
        hint=f"remove {path / _LOCK}; it is made anew, and nothing is kept in it",
    )


def _octal(mode: int) -> str:
    return f"mode {stat.S_IMODE(mode):04o}"


def _why(error: OSError) -> str:
    return error.strerror or type(error).__name__
