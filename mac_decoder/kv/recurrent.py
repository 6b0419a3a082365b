"""Recurrent layers: mlx-lm's ``ArraysCache``, states that are valid at exactly one position.

The first array is the convolution's tail ``(1, K - 1, C)``, the second, where there is one, the
recurrence's state. The cache does not know its position: whoever holds it does.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache

from mac_decoder.kv.elements import dtype_name, filled
from protocol.layout import RecurrentLayer, StateArray

STATE_NAMES = ("conv", "state")


def measure(cache: ArraysCache, layer: int, member: int) -> RecurrentLayer:
    """The layout of a cache that has seen a token."""
    found = tuple(
        StateArray(name, tuple(array.shape[1:]), dtype_name(array))
        for name, array in zip(STATE_NAMES, states(cache), strict=False)
    )
    return RecurrentLayer(layer, found, member)


def install(cache: ArraysCache, arrays: Sequence[mx.array]) -> None:
    """Fill an empty cache with its states, each with a batch axis of one."""
    cache.state = (list(arrays), None, None)


def states(cache: ArraysCache) -> list[mx.array]:
    """The states, each with a batch axis of one."""
    return [filled(array) for array in cache.cache]
