"""One writer per cache directory, whatever the number of processes.

The lock is the kernel's (``flock``), so a crash releases it; the file stays. It holds the
process id of the last writer, for the message only.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import Final

from protocol.errors import ConfigError

NAME: Final = "lock"


class WriterLock:
    """Held from construction to :meth:`release`.

    Raises ``ConfigError`` (``store_locked``) while another process, or another store of this
    one, holds it.
    """

    def __init__(self, directory: Path) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        self._handle = os.open(directory / NAME, flags, 0o600)
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            owner = os.pread(self._handle, 20, 0).strip().decode("ascii", "replace")
            os.close(self._handle)
            raise ConfigError(
                f"the cache directory {directory} is in use by process {owner or 'unknown'}; "
                "one process writes to it at a time",
                reason="store_locked",
                field="cache_dir",
                found=owner or None,
                hint="stop the `baton serve` that has it, or give another --cache-dir or --no-disk",
            ) from error
        # A fixed width: the file's size is part of what a walk counts.
        os.pwrite(self._handle, f"{os.getpid():>19}\n".encode("ascii"), 0)

    def release(self) -> None:
        """Let the next writer in; may be called again."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1
