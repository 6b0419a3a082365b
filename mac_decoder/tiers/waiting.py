"""What waits to be kept: its bytes, and the beginnings of the prompts that it belongs to."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Final

import numpy as np
from numpy.typing import NDArray

from protocol.blocks import BLOCK

MOST_QUEUED: Final = 1 << 30
"""Bytes of rows that may wait to be kept, beside one cut that is longer."""

Beginning = tuple[bytes, bytes]
"""A namespace and the first block's tokens: by it a prompt knows what it may have to wait for."""


class Waiting:
    """The cuts that were handed over and are not kept yet. Any thread may call.

    The rows of a cut that memory has no room for wait longer than the cut: until it is on disk.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._cuts: dict[int, Beginning] = {}
        self._rows: dict[int, int] = {}
        self._numbers = 0
        self._brought = 0

    @property
    def nbytes(self) -> int:
        """Bytes of rows that wait."""
        with self._changed:
            return sum(self._rows.values())

    @property
    def brought(self) -> int:
        """Bytes of rows that were ever handed over."""
        with self._changed:
            return self._brought

    def accepts(self, nbytes: int) -> bool:
        """Whether so many bytes of rows may wait too."""
        with self._changed:
            usual = sum(rows for rows in self._rows.values() if rows <= MOST_QUEUED)
            longer = any(rows > MOST_QUEUED for rows in self._rows.values())
        return not longer if nbytes > MOST_QUEUED else usual + nbytes <= MOST_QUEUED

    def add(self, space: bytes, tokens: NDArray[np.uint32], nbytes: int) -> int:
        """A cut was handed over; its number."""
        with self._changed:
            self._numbers += 1
            self._brought += nbytes
            self._cuts[self._numbers] = _beginning(space, tokens)
            self._rows[self._numbers] = nbytes
            return self._numbers

    def kept(self, number: int) -> None:
        """The cut is kept, or was given up: nobody waits for it any more."""
        with self._changed:
            del self._cuts[number]
            self._changed.notify_all()

    def freed(self, number: int) -> None:
        """Nobody needs the rows of the cut any more."""
        with self._changed:
            del self._rows[number]

    def now(self) -> Mapping[int, Beginning]:
        """What waits now."""
        with self._changed:
            return dict(self._cuts)

    def wait(
        self, space: bytes, prompt: NDArray[np.uint32], before: Mapping[int, Beginning]
    ) -> None:
        """Wait until what was waiting ``before`` of the same beginning is kept."""
        mine = _beginning(space, prompt)
        related = {number for number, other in before.items() if _related(mine, other)}
        with self._changed:
            self._changed.wait_for(lambda: related.isdisjoint(self._cuts))

    def drain(self, timeout_s: float | None = None) -> bool:
        """Wait until nothing waits; whether that was reached."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._cuts, timeout_s)


def _beginning(space: bytes, tokens: NDArray[np.uint32]) -> Beginning:
    return space, tokens[:BLOCK].tobytes()


def _related(one: Beginning, other: Beginning) -> bool:
    (space, ours), (another, theirs) = one, other
    return space == another and (ours.startswith(theirs) or theirs.startswith(ours))
