"""The log of a decoder that the app started: a file that is moved aside when it is full."""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path
from typing import Final

log = logging.getLogger(__name__)

MOST_BYTES: Final = 4 << 20
KEPT: Final = 3
"""How many full ones are kept beside the one that is written."""

_LAST_LINES: Final = 12
_LAST_BYTES: Final = 4096


class LogFile:
    """``path``, ``path.1`` and so on, the newest first. Used by one thread at a time.

    What cannot be written (a full disk) is dropped: a decoder must not wait for its log.
    """

    def __init__(self, path: Path, most_bytes: int = MOST_BYTES, kept: int = KEPT) -> None:
        self.path = path
        self._most, self._kept = most_bytes, kept
        self._file: int | None = None
        self._size = 0
        self._last = b""

    def write(self, data: bytes) -> None:
        """Append what a decoder said."""
        self._last = (self._last + data)[-_LAST_BYTES:]
        try:
            if self._file is None:
                self._open()
            if self._size and self._size + len(data) > self._most:
                self._move_aside()
            assert self._file is not None
            self._size += os.write(self._file, data)
        except OSError as error:
            log.warning("the decoder's log cannot be written", extra={"error": error.strerror})
            self.close()

    def last_words(self) -> str:
        """The last lines that were written."""
        lines = self._last.decode("utf-8", "replace").splitlines()
        return "\n".join(lines[-_LAST_LINES:])

    def close(self) -> None:
        """Let go of the file; writing opens it again."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                os.close(self._file)
        self._file = None

    def _open(self) -> None:
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        self._file = os.open(self.path, flags, 0o600)
        self._size = os.fstat(self._file).st_size

    def _move_aside(self) -> None:
        self.close()
        for number in range(self._kept - 1, -1, -1):
            older = self._numbered(number + 1)
            with contextlib.suppress(FileNotFoundError):
                self._numbered(number).replace(older)
        self._open()

    def _numbered(self, number: int) -> Path:
        return self.path.with_name(f"{self.path.name}.{number}") if number else self.path


def tail(path: Path, most_bytes: int = 64 * 1024) -> str:
    """The end of a log as text, from the beginning of a line on; empty if there is none."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - most_bytes))
            found = file.read(most_bytes)
    except OSError:
        return ""
    if size > most_bytes:
        found = found.partition(b"\n")[2]
    return found.decode("utf-8", "replace")
