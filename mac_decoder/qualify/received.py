"""Plain memory that a handoff is received into, to be compared and let go of."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from protocol.errors import LocalProtocolError
from protocol.layout import Layout, Slot, regions


class Received:
    """The whole cache at ``end`` (``link.Destination``)."""

    cut = 0
    extra: tuple[int, ...] = ()

    def __init__(self, layout: Layout, end: int) -> None:
        self.end = end
        self.rows: dict[tuple[int, int], NDArray[np.uint8]] = {
            (region.index, region.role): np.empty(region.nbytes, np.uint8)
            for region in regions(layout, 0, end)
        }

    def begin(self, cut: int) -> None:
        """Everything is sent."""
        if cut:
            raise LocalProtocolError("all was asked for", reason="shadow_misplaced")

    def place(self, slot: Slot) -> memoryview:
        """See ``Destination.place``; order and size are the protocol's to check."""
        return self.rows[slot.index, slot.role].data[slot.offset : slot.offset + slot.nbytes]

    def prefault(self, cancelled: Callable[[], bool]) -> None:
        """Nothing: nobody waits."""
