"""What waits to be kept: its bytes, and the beginnings of the prompts that it belongs to."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from protocol.blocks import BLOCK

MOST_QUEUED: Final = 1 << 30
"""Bytes of rows that may wait to be kept, beside one cut that is longer."""

Beginning = tuple[bytes, bytes]
"""A namespace and the first block's tokens: by it a prompt knows what it may have to wait for."""


@dataclass(frozen=True)
class _Cut:
    begins: Beginning
    nbytes: int


class Waiting:
    """The cuts that were handed over and are not kept yet. Any thread may call."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._cuts: dict[int, _Cut] = {}
        self._numbers = 0

    @property
    def nbytes(self) -> int:
        """Bytes of rows that wait."""
        with self._changed:
            return self._queued()

    def accepts(self, nbytes: int) -> bool:
        """Whether so many bytes of rows may wait too."""
        with self._changed:
            queued = self._queued()
            return not queued or queued + nbytes <= MOST_QUEUED

    def add(self, space: bytes, tokens: NDArray[np.uint32], nbytes: int) -> int:
        """A cut was handed over; the number to take it out by."""
        with self._changed:
            self._numbers += 1
            self._cuts[self._numbers] = _Cut(_beginning(space, tokens), nbytes)
            return self._numbers

    def remove(self, number: int) -> None:
        """The cut is kept, or was given up."""
        with self._changed:
            del self._cuts[number]
            self._changed.notify_all()

    def now(self) -> Mapping[int, Beginning]:
        """What waits now."""
        with self._changed:
            return {number: cut.begins for number, cut in self._cuts.items()}

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

    def _queued(self) -> int:
        return sum(cut.nbytes for cut in self._cuts.values())


def _beginning(space: bytes, tokens: NDArray[np.uint32]) -> Beginning:
    return space, tokens[:BLOCK].tobytes()


def _related(one: Beginning, other: Beginning) -> bool:
    (space, ours), (another, theirs) = one, other
    return space == another and (ours.startswith(theirs) or theirs.startswith(ours))
