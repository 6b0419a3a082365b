"""The lower part of a delta: a held cut's rows on their way into the shadow of a handoff.

They are placed while the producer computes the rest. A producer may send everything instead;
then what is placed here is given up first, so that nobody else writes to that memory.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from threading import Event

from mac_decoder.engine.restores import why
from mac_decoder.keeper import Keeper, Restored
from mac_decoder.kv.shadow import Shadow
from mac_decoder.reuse.facts import DeltaHandoff
from protocol.layout import Slot


class Composing:
    """One delta's lower part, and the place where its upper part arrives (``Destination``)."""

    def __init__(
        self, keeper: Keeper, delta: DeltaHandoff, shadow: Shadow, withdrawn: Event
    ) -> None:
        """Begin to place, in another thread. Any thread may call the methods."""
        self._shadow = shadow
        self._given_up = given_up = Event()
        # Holds nothing of this object: an outcome that knew it would keep the shadow alive.
        self._outcome: Future[Restored | None] = keeper.compose(
            delta,
            shadow.end,
            shadow.extra,
            shadow.place_piece,
            lambda: withdrawn.is_set() or given_up.is_set(),
        )

    @property
    def cut(self) -> int:
        """Where the rows that are asked for begin."""
        return self._shadow.cut

    @property
    def end(self) -> int:
        """Where they end."""
        return self._shadow.end

    @property
    def extra(self) -> tuple[int, ...]:
        """Where cuts are wanted too."""
        return self._shadow.extra

    def begin(self, cut: int) -> None:
        """The producer sends ``[cut, end)``, and not always what it was asked for."""
        if cut == self._shadow.cut:
            return
        self.give_up()
        self._shadow.begin(cut)

    def place(self, slot: Slot) -> memoryview:
        """See ``Shadow.place``."""
        return self._shadow.place(slot)

    def prefault(self, cancelled: Callable[[], bool]) -> None:
        """See ``Shadow.prefault``."""
        self._shadow.prefault(cancelled)

    @property
    def lost(self) -> bool:
        """Whether it is known that the lower part will not come."""
        if self._given_up.is_set() or not self._outcome.done():
            return False
        return self._ended()[0] is None

    def wait(self) -> tuple[Restored | None, str]:
        """What was placed, or why nothing was; neither where everything was sent instead."""
        return (None, "") if self._given_up.is_set() else self._ended()

    def give_up(self) -> None:
        """Stop placing, wait until nobody writes any more, and let go of the held cut.

        What has not begun, behind others' restores, never will.
        """
        self._given_up.set()
        if self._outcome.cancel():
            return
        restored, _ = self._ended()
        if restored is not None and restored.pinned is not None:
            restored.pinned.release()

    def _ended(self) -> tuple[Restored | None, str]:
        """What was placed, or why nothing was, once that is known."""
        try:
            error = self._outcome.exception()
        except CancelledError:
            return None, "cut_gone"
        restored = None if error is not None else self._outcome.result()
        return restored, "" if restored is not None else why(error)
