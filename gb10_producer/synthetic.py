"""Random rows of any layout without a model: for benchmarks of the handoff, and tests.

Rows are views of one pool of random bytes, so that making them costs nothing and the wire is
what is measured; where in the pool a span begins depends on layer, role and position.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence

import numpy as np

from gb10_producer.memory import Ledger
from gb10_producer.prefill import SYNTHETIC, Emit, Rows, State, Tokens
from protocol.errors import Cancelled
from protocol.layout import (
    KEY,
    STATE,
    VALUE,
    Layout,
    RecurrentLayer,
    row_bytes,
    spans,
    tiles,
)
from protocol.messages import Recipe

TILE = 2048
_POOL_BYTES = 64 << 20
_PAGE = 4096


class Synthetic:
    """A :class:`gb10_producer.prefill.Prefiller` of random rows; equal calls, equal bytes.

    ``seconds_per_tile`` stands for computing time; ``emitted`` counts bytes handed out.
    """

    device = "cpu"

    def __init__(self, layout: Layout, tile: int = TILE, seconds_per_tile: float = 0.0) -> None:
        self.layout = layout
        self.tile = tile
        first = layout.layers[0]
        dtype = first.states[0].dtype if isinstance(first, RecurrentLayer) else first.dtype
        self.recipe = Recipe(who="producer", device=SYNTHETIC, dtype=dtype, tile=tile)
        self.emitted = 0
        self._seconds_per_tile = seconds_per_tile
        largest = max(_largest_piece(layout, index, tile) for index in range(len(layout.layers)))
        self._pool = memoryview(_random_bytes(max(_POOL_BYTES, 2 * largest)))
        self._starts = self._pool.nbytes - largest

    def keep_prefixes(self, ledger: Ledger, budget: int) -> None:
        """Nothing: what is not computed need not be kept."""

    def turn_to(self, space: bytes) -> None:
        """Nothing is kept."""

    def recall(self, tokens: Tokens, end: int, extra: Sequence[int] = ()) -> int:
        """Nothing is held of any prompt."""
        return 0

    def prefill(
        self,
        tokens: Sequence[int],
        cut: int,
        end: int,
        emit: Emit,
        cancelled: Callable[[], bool],
        progress: Callable[[int], None],
        extra: Sequence[int] = (),
    ) -> int:
        """Emit what a handoff over ``[cut, end)`` ships; see the seam. Computes ``end`` tokens."""
        shipped = spans(self.layout, cut, end, extra)
        for first, last in tiles(0, end, self.tile, extra):
            if cancelled():
                raise Cancelled("The prefill was withdrawn.")
            if self._seconds_per_tile:
                time.sleep(self._seconds_per_tile)
            for span in shipped:
                layer = self.layout.layers[span.index]
                if isinstance(layer, RecurrentLayer):
                    continue
                low, high = max(first, span.first), min(last, span.last)
                if low < high:
                    rows = high - low
                    key = self._piece(span.index, KEY, low, rows * row_bytes(layer, KEY))
                    value = self._piece(span.index, VALUE, low, rows * row_bytes(layer, VALUE))
                    emit(Rows(span.index, low, high, key, value))
            progress(last)
            for span in shipped:
                layer = self.layout.layers[span.index]
                if isinstance(layer, RecurrentLayer) and span.last == last:
                    for number, state in enumerate(layer.states):
                        data = self._piece(span.index, STATE + number, last, state.nbytes)
                        emit(State(span.index, number, last, data))
        return end

    def _piece(self, index: int, role: int, position: int, nbytes: int) -> memoryview:
        page = (index * 7919 + role * 104729 + position * 31) * _PAGE
        start = page % (self._starts or 1)
        self.emitted += nbytes
        return self._pool[start : start + nbytes]


@functools.lru_cache(maxsize=1)
def _random_bytes(nbytes: int) -> bytes:
    return np.random.default_rng(20).bytes(nbytes)


def _largest_piece(layout: Layout, index: int, tile: int) -> int:
    layer = layout.layers[index]
    if isinstance(layer, RecurrentLayer):
        return max((state.nbytes for state in layer.states), default=0)
    return tile * max(row_bytes(layer, KEY), row_bytes(layer, VALUE))
