"""The log of a decoder that the app started: a file that is moved aside when it is full."""

from __future__ import annotations

import contextlib
import logging
import os
import re
from pathlib import Path
from typing import Final

log = logging.getLogger(__name__)

MOST_BYTES: Final = 4 << 20
KEPT: Final = 3
"""How many full ones are kept beside the one that is written."""

_LAST_LINES: Final = 6
_LAST_LETTERS: Final = 300
_LAST_BYTES: Final = 1 << 16

_LOGGED: Final = re.compile(r"\S+ \S+ ([A-Z]+) [\w.]+: (.*)")
"""A line of the decoder's log: day, time, level, place, and what it says."""

_TELLING: Final = ("ERROR", "CRITICAL")


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
        """The last lines that may say why it ended, for people: errors without time and place,
        and what was printed; of neither there may be any.
        """
        told: list[str] = []
        for line in self._last.decode("utf-8", "replace").splitlines():
            logged = _LOGGED.fullmatch(line)
            if logged is None and not line.startswith("ready "):
                told.append(line)
            elif logged is not None and logged[1] in _TELLING:
                told.append(logged[2])
        return "\n".join(line[:_LAST_LETTERS] for line in told[-_LAST_LINES:])

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
