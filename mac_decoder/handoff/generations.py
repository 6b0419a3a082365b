"""Generations: numbers that are used once per pairing key and epoch, whatever crashes.

A generation is drawn from a block that was reserved durably before its first number was
given out. A crash forgets the rest of a block, which leaves a gap; it never gives a number
out twice. Several processes may share the file: each reserves its own blocks under a lock.
"""

from __future__ import annotations

import contextlib
import copy
import errno
import fcntl
import hashlib
import os
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from protocol.errors import BatonError, ConfigError, TransferError
from protocol.messages import MAX_GENERATION
from trust import plain_file

if TYPE_CHECKING:
    from collections.abc import Iterator

BLOCK: Final = 1024
"""Numbers reserved by one durable write."""

MAX_SERIES: Final = 64
"""Series kept in the file. The longest unused goes first: by then its key is long replaced."""

PATIENCE_S: Final = 1.0
"""How long another process may hold the lock: it writes a small file. One that was stopped
would hold it for ever."""

RETRY_S: Final = 5.0
"""From one attempt of :meth:`Generations.retry` to the next."""

_LOOK_S: Final = 0.02
_KEY_TAG: Final = b"baton generations key\x00"
_MAX_FILE_BYTES: Final = 1 << 16


class _Series(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``reserved`` is the first number of ``(key, epoch)`` that was never reserved."""

    key: str
    epoch: int
    reserved: int


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The whole file, least recently used series first."""

    version: int
    series: tuple[_Series, ...]


class Generations:
    """The generations of one pairing key and epoch, counted upwards from 1.

    ``path`` is a file of this decoder's state directory; it holds a digest of the key, never
    the key. All methods may be called from any thread.
    """

    def __init__(self, path: Path, key: bytes, epoch: int) -> None:
        self._path = path
        self._key = hashlib.sha256(_KEY_TAG + key).hexdigest()[:32]
        self._epoch = epoch
        self._lock = threading.Lock()
        self._next = 0
        self._end = 0
        self._failure: BatonError | None = None
        self._retry_at = 0.0

    @property
    def failure(self) -> BatonError | None:
        """Why the last attempt to reserve a block failed; ``None`` once one succeeded."""
        return self._failure

    def take(self) -> int:
        """The next generation, never given out before.

        Raises ``ConfigError`` (``generations_unreadable``) if the file is not ours, and
        ``TransferError`` if a block could not be reserved: ``generations_not_durable``,
        ``generations_used_up``, or ``state_dir_locked`` where another process held the lock for
        ``PATIENCE_S``.
        """
        with self._lock:
            self._refill(PATIENCE_S)
            taken = self._next
            self._next += 1
            return taken

    def reserve(self) -> None:
        """Reserve a block now if none is left, so that a fault shows before a request needs it.

        Raises like :meth:`take`.
        """
        with self._lock:
            self._refill(PATIENCE_S)

    def retry(self) -> None:
        """Try again, now and then, after a failure; :attr:`failure` tells the outcome.

        Waits for nobody's lock and raises nothing.
        """
        if self._failure is None or time.monotonic() < self._retry_at:
            return
        if not self._lock.acquire(blocking=False):
            return
        try:
            with contextlib.suppress(BatonError):
                self._refill(0.0)
        finally:
            self._lock.release()

    def _refill(self, patience_s: float) -> None:
        if self._next == self._end:
            try:
                self._next = self._reserve(patience_s)
            except BatonError as error:
                self._failure = copy.copy(error)
                self._retry_at = time.monotonic() + RETRY_S
                raise
            self._end = self._next + BLOCK
        self._failure = None

    def _reserve(self, patience_s: float) -> int:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            with _locked(self._path.with_suffix(".lock"), patience_s):
                series = list(_read(self._path))
                first = 1
                for entry in series:
                    if (entry.key, entry.epoch) == (self._key, self._epoch):
                        first = entry.reserved
                        series.remove(entry)
                        break
                if first + BLOCK - 1 > MAX_GENERATION:
                    raise TransferError(
                        "all generations of the pairing's key are used",
                        reason="generations_used_up",
                        hint="agree on a new key: baton node rotate NAME",
                    )
                series.append(_Series(self._key, self._epoch, first + BLOCK))
                _write(self._path, _File(1, tuple(series[-MAX_SERIES:])))
                return first
        except OSError as error:
            raise TransferError(
                f"no generation could be reserved in {self._path.name}: {error.strerror}",
                reason="generations_not_durable",
                hint="check the free space and the permissions of the state directory",
            ) from error


@contextlib.contextmanager
def _locked(path: Path, patience_s: float) -> Iterator[None]:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        _lock(descriptor, path, patience_s)
        yield
    finally:
        os.close(descriptor)


def _lock(descriptor: int, path: Path, patience_s: float) -> None:
    """Take the lock, or raise ``TransferError`` (``state_dir_locked``) after ``patience_s``."""
    until = time.monotonic() + patience_s
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError as error:
            if time.monotonic() >= until:
                raise TransferError(
                    f"another process holds {path.name} of the state directory",
                    reason="state_dir_locked",
                    hint="end the process that holds it, or give another --state-dir",
                ) from error
        time.sleep(_LOOK_S)


def _read(path: Path) -> tuple[_Series, ...]:
    try:
        decoded = msgspec.json.decode(plain_file.read(path, _MAX_FILE_BYTES).content, type=_File)
        if decoded.version != 1 or not all(
            1 <= entry.reserved <= MAX_GENERATION + 1 for entry in decoded.series
        ):
            raise msgspec.ValidationError("not a version that is known here")
    except FileNotFoundError:
        return ()
    except ValueError as error:  # of msgspec too
        # Starting over would use numbers twice: only a new pairing makes that harmless.
        raise ConfigError(
            f"{path.name} is not a file of generations",
            reason="generations_unreadable",
            field=path.name,
            hint="pair again, then remove the file",
        ) from error
    return decoded.series


def _write(path: Path, content: _File) -> None:
    """Replace ``path`` durably: exclusive temporary file, sync, rename, directory sync."""
    # Nobody else writes while the lock is held: one that is there was left by a crash.
    temporary = path.with_suffix(".tmp")
    temporary.unlink(missing_ok=True)
    descriptor = os.open(
        temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600
    )
    try:
        try:
            remaining = memoryview(msgspec.json.encode(content))
            while remaining:
                remaining = remaining[os.write(descriptor, remaining) :]
            _sync(descriptor)
        finally:
            os.close(descriptor)
        temporary.rename(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    directory = os.open(path.parent, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _sync(directory)
    finally:
        os.close(directory)


def _sync(descriptor: int) -> None:
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
