"""How often the load of a received model began and did not end, in a file of its directory.

A process can be killed while it loads, by a device or for its memory, and nobody is left who
could say so. What is loaded is therefore marked before, and the mark is taken away after: a
start that finds :data:`MOST` loads without an end leaves that model alone.
"""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path
from typing import Final

from trust.places import sync

log = logging.getLogger(__name__)

MARK: Final = ".loading"
"""The file in the directory of a received model: how often, in decimal digits."""
MOST: Final = 2
"""After so many loads that did not end a model is given up until it is sent again."""

_NEW: Final = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW


class Attempt:
    """One load of the received model in ``model``; no method raises.

    A mark that cannot be written costs the protection alone: the model is loaded all the same.
    """

    def __init__(self, model: Path) -> None:
        self._model = model
        self._before = unended(model)

    def begin(self) -> None:
        """The load begins; durable when this returns."""
        self._mark(self._before + 1)

    def end(self) -> None:
        """It has ended, well or with an error that was told."""
        self._mark(0)

    def withdraw(self) -> None:
        """Somebody wants this process to stop: as if it had not begun."""
        self._mark(self._before)

    def give_up(self) -> None:
        """It has failed, and the next process is not to try it again."""
        self._mark(MOST)

    def _mark(self, count: int) -> None:
        try:
            _write(self._model, count)
        except OSError as error:
            facts = {"model": self._model.name, "error": error.strerror}
            log.warning("a model that is loaded cannot be marked", extra=facts)


def unended(model: Path) -> int:
    """How many loads of the received model in ``model`` began and did not end."""
    try:
        with (model / MARK).open("rb") as file:
            raw = file.read(8)
    except OSError:
        return 0
    return int(raw) if raw.isdigit() else 0


def forget(model: Path) -> None:
    """It was sent again: it is tried again."""
    Attempt(model).end()


def _write(model: Path, count: int) -> None:
    """Raises ``OSError``."""
    place = os.open(model, _FOLDER)
    try:
        if not count:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(MARK, dir_fd=place)
            return  # a mark that the power brings back costs a try at most
        new = f"{MARK}.new"
        descriptor = os.open(new, _NEW, 0o600, dir_fd=place)
        try:
            os.write(descriptor, str(count).encode())
            sync(descriptor)
        finally:
            os.close(descriptor)
        os.rename(new, MARK, src_dir_fd=place, dst_dir_fd=place)
        sync(place)
    finally:
        os.close(place)
