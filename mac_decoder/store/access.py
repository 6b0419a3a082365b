"""Reading one file: what can be wrong with it, and bytes that are digested as they come.

Whatever is wrong is an ``IntegrityError`` that names the file in ``field``: ``file_missing``,
``not_a_file`` (a directory, a pipe, a link), ``file_unreadable`` (the medium),
``length_differs``, ``file_malformed``, ``format_differs``,
``key_differs``, ``mac_differs``, ``digest_differs``. Nothing here touches a device.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from mac_decoder.store import container
from mac_decoder.store.container import Header
from mac_decoder.store.files import Disk, NotAFileError
from mac_decoder.store.manifest import BLOCK_FORMAT, CUT_FORMAT
from protocol.errors import Cancelled, IntegrityError

CHUNK: Final = 1 << 20
"""Bytes read and then digested at a time: they are still in the processor's cache."""


@dataclass(slots=True)
class Effort:
    """What a read cost: bytes read, and seconds in all threads together."""

    nbytes: int = 0
    read_s: float = 0.0
    digest_s: float = 0.0
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def add(self, nbytes: int, read_s: float, digest_s: float) -> None:
        """Count some bytes."""
        with self.lock:
            self.nbytes += nbytes
            self.read_s += read_s
            self.digest_s += digest_s


def fault(reason: str, path: str, found: object = None, expected: object = None) -> IntegrityError:
    """The error for a file that is not what was written."""
    return IntegrityError(
        f"{path} is not the file that was written",
        reason=reason,
        field=path,
        found=found,
        expected=expected,
    )


@contextmanager
def named(path: str) -> Iterator[None]:
    """Let errors about the form of a file say which one."""
    try:
        yield
    except IntegrityError as error:
        if error.field == path:
            raise
        raise fault(error.reason, path, error.found, error.expected) from error


class Access:
    """The files of one directory, by their path in it. ``number`` is the store key's."""

    def __init__(self, disk: Disk, directory: Path, number: str) -> None:
        self.number = number
        self._disk = disk
        self._directory = directory

    @contextmanager
    def opened(self, path: str) -> Iterator[File]:
        """The file ``path``, until the block ends."""
        with _translated(path):
            handle = self._disk.open(self._directory / path)
        try:
            with _translated(path):
                size = self._disk.size(handle)
            yield File(self._disk, handle, path, size)
        finally:
            # What was read was digested: closing has no say in it.
            with suppress(OSError):
                self._disk.close(handle)

    def header(self, file: File, kind: str) -> Header:
        """The header of a file that should have the format ``kind``.

        Checked in the order format, key, lengths, so that neither an upgrade nor another
        store key looks like damage. Nothing is authenticated yet.
        """
        with named(file.path):
            start = file.read(0, min(container.LENGTH.size, file.nbytes))
            length = container.header_length(start)
            if length > file.nbytes:
                raise container.malformed("shorter than its header")
            raw = file.read(0, length)
            self._check_kind(container.peek(raw), file.path, kind)
            header = container.parse(raw)
        if header.file_nbytes != file.nbytes:
            raise fault("length_differs", file.path, file.nbytes, header.file_nbytes)
        return header

    def _check_kind(self, metadata: dict[str, str], path: str, kind: str) -> None:
        found = metadata.get("format", "")
        if found != kind:
            known = found in (CUT_FORMAT, BLOCK_FORMAT) or not found.startswith("baton ")
            raise fault("file_malformed" if known else "format_differs", path, found, kind)
        if metadata.get("key") != self.number:
            raise fault("key_differs", path, metadata.get("key"), self.number)


class File:
    """An open file. Reads may come from several threads."""

    def __init__(self, disk: Disk, handle: int, path: str, nbytes: int) -> None:
        self.path = path
        self.nbytes = nbytes
        self._disk = disk
        self._handle = handle

    def read(self, offset: int, nbytes: int) -> memoryview:
        """``nbytes`` at ``offset``, in memory of their own."""
        view = memoryview(bytearray(nbytes))
        self.read_into(view, offset)
        return view

    def read_into(self, view: memoryview, offset: int) -> None:
        """Fill ``view`` with the bytes at ``offset``."""
        with _translated(self.path):
            count = self._disk.read_into(self._handle, view, offset)
        if count != view.nbytes:
            raise fault("length_differs", self.path, offset + count, offset + view.nbytes)


class Source:
    """Bytes of a file from ``at`` on, in order: every one is digested, some are kept."""

    def __init__(self, file: File, at: int, effort: Effort, stop: Callable[[], bool]) -> None:
        self._sha = hashlib.sha256()
        self._file = file
        self._at = at
        self._effort = effort
        self._stop = stop

    def take(self, view: memoryview) -> None:
        """Read the next bytes into ``view``, all of it. Raises ``Cancelled`` when stopped."""
        read_s = digest_s = 0.0
        for start in range(0, view.nbytes, CHUNK):
            if self._stop():
                raise Cancelled("the read was given up")
            part = view[start : start + CHUNK]
            began = time.perf_counter()
            self._file.read_into(part, self._at)
            came = time.perf_counter()
            self._sha.update(part)
            read_s += came - began
            digest_s += time.perf_counter() - came
            self._at += part.nbytes
        self._effort.add(view.nbytes, read_s, digest_s)

    def skip(self, nbytes: int) -> None:
        """Digest the next bytes without keeping them."""
        scratch = memoryview(bytearray(min(nbytes, CHUNK)))
        while nbytes:
            part = scratch[: min(nbytes, CHUNK)]
            self.take(part)
            nbytes -= part.nbytes

    def digest(self) -> bytes:
        """SHA-256 of the bytes so far."""
        return self._sha.digest()


@contextmanager
def _translated(path: str) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise fault("file_missing", path) from error
    except NotAFileError as error:
        raise fault("not_a_file", path) from error
    except OSError as error:
        raise fault("file_unreadable", path, error.strerror) from error
