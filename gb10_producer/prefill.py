"""What a source of rows looks like to the rest of the producer, and the loop over the tile grid.

Rows and states leave here in the decoder's form (design, section 3 and interop.md): rows are
position-major ``(positions, heads, width)``, states have the decoder's shape without its batch
axis, all in the layout's dtype. The sender only cuts them into frames.

This module imports no torch: a synthetic source for the bench and the server's tests use its
types alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from protocol.layout import Layout
    from protocol.messages import Recipe


class Rows(NamedTuple):
    """Keys and values of positions ``[first, last)`` of ``layout.layers[index]``.

    ``key`` and ``value`` are C-contiguous bytes in host memory, position-major, in the layout's
    dtype; the receiver may keep them, nobody writes to them again. A role whose rows are empty
    (width 0) has an empty view.
    """

    index: int
    first: int
    last: int
    key: memoryview
    value: memoryview


class State(NamedTuple):
    """State ``number`` of the recurrent ``layout.layers[index]``, valid at ``position`` only."""

    index: int
    number: int
    position: int
    data: memoryview


Emit = Callable[[Rows | State], None]


class Prefiller(Protocol):
    """A source of rows for one layout: a torch model, or synthetic rows for the bench.

    Not thread-safe: one job at a time, all calls from the device thread.
    """

    @property
    def layout(self) -> Layout:
        """What the rows are rows of."""
        ...

    @property
    def tile(self) -> int:
        """Positions per tile; tiles end at absolute multiples of it."""
        ...

    @property
    def recipe(self) -> Recipe:
        """How rows are computed: device, dtype and tile."""
        ...

    @property
    def device(self) -> str:
        """``cuda`` or ``cpu``."""
        ...

    def prefill(
        self,
        tokens: Sequence[int],
        cut: int,
        end: int,
        emit: Emit,
        cancelled: Callable[[], bool],
        progress: Callable[[int], None],
    ) -> int:
        """Compute what a handoff over ``[cut, end)`` ships and hand it to ``emit``; return the
        number of tokens computed.

        ``tokens`` holds at least ``end`` token ids. ``emit`` gets rows tile by tile and within a
        tile in the layout's order (the order of ``protocol.layout.schedule``), then every state
        at ``end``; only what lies inside ``protocol.layout.spans``. It may block to hold the
        computation back, is called from one thread at a time (not always the caller's), and what
        it raises ends the prefill and is raised here. ``cancelled`` is asked before each tile;
        ``progress`` gets the position reached after each tile, counted from 0.

        Raises ``Cancelled``; ``CapacityError`` (reason ``producer_out_of_memory``) when the rows
        do not fit; ``EngineFault`` when the device failed, after which nothing must run on it.
        """
        ...
