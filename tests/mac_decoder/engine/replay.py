"""Computing a sequence again from its history alone, with mlx-lm and nothing of the engine's.

Restored, continued and handed over, a cache must have the bytes that this gives: the same
tiles, the same segment ends, the same single steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from mac_decoder.engine.model import LoadedModel
from mac_decoder.kv.install import canonical, extract
from protocol.layout import tiles
from protocol.messages import History


class Replay:
    """Caches made by following ``history`` over ``tokens``; ``drawn`` the greedy choice after
    each decoded token, by its position.
    """

    def __init__(
        self, loaded: LoadedModel, tokens: Sequence[int], history: Sequence[History]
    ) -> None:
        self._model = loaded.model
        self._tokens = [int(token) for token in tokens]
        self.drawn: dict[int, int] = {}
        self.caches: list[Any] = make_prompt_cache(loaded.model)
        for span in history:
            if span.recipe.who == "decoder_decode":
                self._decode(span)
            else:
                for first, last in tiles(span.first, span.last, span.recipe.tile):
                    self._feed(self.caches, self._tokens[first:last])
            canonical(self.caches)
        self.rows = extract(self.caches, loaded.layout, history[-1].last)

    def _feed(self, caches: list[Any], tokens: list[int]) -> mx.array:
        logits = self._model(mx.array([tokens]), cache=caches)
        mx.eval(logits, [cache.state for cache in caches])
        return logits

    def _decode(self, span: History) -> None:
        for position in range(span.first, span.last):
            logits = self._feed(self.caches, [self._tokens[position]])[:, -1, :]
            self.drawn[position] = int(mx.argmax(logits, axis=-1).item())

    def differences(self, rows: dict[tuple[int, int], np.ndarray]) -> list[tuple[int, int]]:
        """The places whose bytes are not those of ``rows``."""
        assert rows.keys() == self.rows.keys()
        return [place for place, ours in self.rows.items() if not np.array_equal(ours, rows[place])]
