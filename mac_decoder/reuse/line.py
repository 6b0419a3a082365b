"""One sequence's blocks as they are kept, so that each of its cuts adds only what is new."""

from __future__ import annotations

from mac_decoder.reuse.resident import Pinned, Resident


class Line:
    """What was handed over of one sequence, and the cut that it was last kept as.

    ``blocks`` whole blocks were handed over; ``broken`` that they are not kept, so that the
    next cut has to bring all of them. The rest belongs to the keeping thread: the cut is pinned
    while the sequence goes on and only named while it rests.
    """

    def __init__(self, pinned: Pinned | None = None, blocks: int = 0) -> None:
        self.blocks = blocks
        self.broken = False
        self.pinned = pinned
        self._rested: tuple[bytes, object] | None = None

    def release(self) -> None:
        """Let the cut be evicted."""
        if self.pinned is not None:
            self.pinned.release()
            self.pinned = None

    def rest(self) -> None:
        """Let it be evicted until the sequence is gone on with."""
        if self.pinned is not None:
            self._rested = (self.pinned.key, self.pinned.token)
            self.release()

    def wake(self, resident: Resident) -> None:
        """Go on, from the cut that it rested as where that is still there."""
        rested, self._rested = self._rested, None
        if rested is not None:
            key, token = rested
            self.pinned = resident.pin(key, token=token)
        self.broken = self.broken or (self.blocks > 0 and self.pinned is None)
