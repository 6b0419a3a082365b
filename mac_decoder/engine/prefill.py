"""Prefilling one prompt on this machine, a tile at a time, up to the boundary token.

Always one sequence alone. Tiles end at absolute multiples of the step and at the segments'
ends, so that the rows depend on the prompt, the step and the position that the prefill went on
from, and never on what else the engine is doing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from mac_decoder.engine.cuts import Segment, segments
from mac_decoder.kv.install import canonical, check_position
from protocol.layout import tiles


class LocalPrefill:
    """A prompt on its way into caches. MLX thread only."""

    def __init__(
        self,
        model: Any,
        tokens: Sequence[int],
        step: int,
        stops: Sequence[Segment] | None = None,
        *,
        caches: list[Any] | None = None,
        position: int = 0,
    ) -> None:
        """Prepare to compute positions ``[position, len(tokens) - 1)`` in tiles of ``step``.

        ``stops`` are the segments of the whole prompt (one alone, if ``None``), ``caches``
        canonical ones at ``position``, which are taken over.
        """
        self.end = len(tokens) - 1
        self.position = position
        self.start = position
        self.caches: list[Any] = make_prompt_cache(model) if caches is None else caches
        self._model = model
        self._tokens = tokens
        stops = segments(self.end)[-1:] if stops is None else stops
        self._tiles: list[tuple[int, int, Segment | None]] = []
        for stop in stops:
            if stop.end > position:
                grid = list(tiles(position, stop.end, step))
                self._tiles += [(first, last, None) for first, last in grid[:-1]]
                self._tiles.append((*grid[-1], stop))
                position = stop.end
        self._tiles.reverse()

    @property
    def remaining(self) -> int:
        """Positions not computed yet."""
        return self.end - self.position

    def advance(self) -> Segment | None:
        """Compute the next tile; the segment that it ends, if it does.

        At a segment's end the caches are canonical and their position is checked, so that
        going on here is the same as going on from a cut that was taken here.
        """
        first, last, stop = self._tiles.pop()
        tile = mx.array(list(self._tokens[first:last]), dtype=mx.uint32)
        self._model(tile[None], cache=self.caches)
        mx.eval([cache.state for cache in self.caches])
        mx.clear_cache()
        self.position = last
        if stop is not None:
            canonical(self.caches)
            check_position(self.caches, last)
        return stop
