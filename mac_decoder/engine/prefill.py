"""Prefilling one prompt on this machine, a tile at a time, up to the boundary token.

Always one sequence alone, and tiles end at absolute multiples of the step, so that the rows
depend on the prompt and the step and never on what else the engine is doing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from mac_decoder.kv.install import canonical, check_position
from protocol.layout import tiles


class LocalPrefill:
    """A prompt on its way into caches. MLX thread only."""

    def __init__(self, model: Any, tokens: Sequence[int], step: int) -> None:
        """Prepare to compute positions ``[0, len(tokens) - 1)`` in tiles of ``step``."""
        self._model = model
        self._tokens = tokens
        self._tiles = list(tiles(0, len(tokens) - 1, step))
        self._tiles.reverse()
        self.end = len(tokens) - 1
        self.position = 0
        self.caches: list[Any] = make_prompt_cache(model)

    @property
    def remaining(self) -> int:
        """Positions not computed yet."""
        return self.end - self.position

    def advance(self) -> int:
        """Compute the next tile and return its length in tokens.

        After the last one the caches are canonical and their position is checked.
        """
        first, last = self._tiles.pop()
        tile = mx.array(list(self._tokens[first:last]), dtype=mx.uint32)
        self._model(tile[None], cache=self.caches)
        mx.eval([cache.state for cache in self.caches])
        mx.clear_cache()
        self.position = last
        if not self._tiles:
            canonical(self.caches)
            check_position(self.caches, self.end)
        return last - first
