"""One sequence's blocks as they are kept, so that each of its cuts adds only what is new."""

from __future__ import annotations

import threading

from mac_decoder.reuse.resident import Pinned, Resident


class Line:
    """What was handed over of one sequence, and where that is kept: in memory, on disk, or both.

    ``blocks`` whole blocks were handed over, ``new_to_memory`` while memory was offered none of
    them though the disk has them: both are the MLX thread's. ``files`` are digests
    of the files of the first of them, which are on disk; the publisher's thread puts them here.
    ``broken``: some of what was handed over is kept nowhere, so that the next cut has to bring
    what :meth:`renewed` does not have. ``pinned`` is the resident cut that the sequence was last
    kept as, while the sequence goes on; it is only named while it rests, and ``None`` where
    memory has no room for it: then the disk is gone on from.
    """

    def __init__(
        self, pinned: Pinned | None = None, blocks: int = 0, files: tuple[bytes, ...] = ()
    ) -> None:
        self.blocks = blocks
        self.new_to_memory = pinned is None and bool(files)
        self.files = files
        self.broken = False
        self.pinned = pinned
        self._rested: tuple[bytes, object] | None = None
        self._sent = len(files)
        self._lock = threading.Lock()

    def renewed(self) -> Line:
        """The same sequence, of which no more is kept than what is on disk."""
        line = Line(None, len(self.files), self.files)
        line.new_to_memory = False
        return line

    # -- in the keeping thread

    def follows(self, known: int) -> bool:
        """Whether the first ``known`` blocks are kept, or on their way; if not, it is broken."""
        with self._lock:
            self.broken |= self.pinned is None and known > max(self._sent, len(self.files))
            return not (known and self.broken)

    def hold(self, pinned: Pinned) -> None:
        """The sequence is kept as another resident cut."""
        with self._lock:
            before, self.pinned = self.pinned, pinned
        if before is not None:
            before.release()

    def leave_memory(self) -> Pinned | None:
        """Go on from the disk alone; the resident cut is the caller's to release."""
        with self._lock:
            pinned, self.pinned = self.pinned, None
            return pinned

    def sent(self, blocks: int) -> None:
        """A cut with so many whole blocks is about to be published."""
        with self._lock:
            self._sent = blocks

    def release(self) -> None:
        """Let the resident cut be evicted."""
        pinned = self.leave_memory()
        if pinned is not None:
            pinned.release()

    def rest(self) -> None:
        """Let it be evicted until the sequence is gone on with."""
        with self._lock:
            pinned, self.pinned = self.pinned, None
            if pinned is not None:
                self._rested = (pinned.key, pinned.token)
        if pinned is not None:
            pinned.release()

    def wake(self, resident: Resident, known: int) -> None:
        """Go on with ``known`` blocks, from the cut that it rested as where that is still there."""
        with self._lock:
            rested, self._rested = self._rested, None
            if rested is not None:
                key, token = rested
                self.pinned = resident.pin(key, token=token)
        self.follows(known)

    # -- in the publisher's thread

    def told(self, blocks: int) -> None:
        """The publication of a cut with so many whole blocks has ended, however it did."""
        with self._lock:
            if len(self.files) < blocks:
                self._sent = len(self.files)
                self.broken |= self.pinned is None and self._rested is None
