"""One app for each user: a lock of the kernel's, which a crash releases."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from protocol.errors import ConfigError


@contextmanager
def alone(state: Path) -> Iterator[None]:
    """Within, no other app of this user runs.

    Raises ``ConfigError``: ``app_running``, ``state_dir_unwritable``.
    """
    try:
        state.mkdir(mode=0o700, parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        lock = os.open(state / "app.lock", flags, 0o600)
    except OSError as error:
        raise ConfigError(
            f"{state} cannot be written: {error.strerror}",
            reason="state_dir_unwritable",
            field="state-dir",
        ) from error
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(
                "the app runs already: its icon is in the menu bar",
                reason="app_running",
                hint="quit it from its menu first; if it is quitting, wait a moment",
            ) from error
        yield
    finally:
        os.close(lock)
