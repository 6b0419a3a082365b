"""Reading a file that somebody has named, whatever lies there: a pipe is not waited for, and what
has no end is not read to it.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import NamedTuple


class Read(NamedTuple):
    """A whole file, and its mode."""

    content: bytes
    mode: int


def read(path: Path, most: int) -> Read:
    """A plain file of at most ``most`` bytes; a link to one is followed.

    Raises ``OSError`` where it cannot be opened, ``ValueError`` where it is no plain file, or a
    longer one: its text says which, and nothing of what it holds.
    """
    # Without waiting: it may be a pipe that nobody writes to.
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
    descriptor = os.open(path, flags)
    try:
        mode = os.fstat(descriptor).st_mode
        # Before Python makes a file of it, which leaves a directory's descriptor open.
        if not stat.S_ISREG(mode):
            raise ValueError("it is no file")
        with open(descriptor, "rb", closefd=False) as file:
            content = file.read(most + 1)
    finally:
        os.close(descriptor)
    if len(content) > most:
        raise ValueError(f"it has more than {most} bytes")
    return Read(content, mode)
