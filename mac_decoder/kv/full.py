"""Full layers: mlx-lm's ``KVCache``, rows for every position (MLA latents included).

The cache holds keys and values as ``(1, heads, rows, dim)`` and may have allocated more rows
than it filled; only the first ``offset`` count. It is canonical as it is.
"""

from __future__ import annotations

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from mac_decoder.kv.elements import dtype_name, filled
from protocol.layout import KEY, FullLayer


def measure(cache: KVCache, layer: int, member: int) -> FullLayer:
    """The layout of a cache that has seen a token."""
    keys, values = filled(cache.keys), filled(cache.values)
    return FullLayer(layer, keys.shape[1], keys.shape[3], values.shape[3], dtype_name(keys), member)


def install(cache: KVCache, keys: mx.array, values: mx.array, end: int) -> None:
    """Fill an empty cache with rows ``[0, end)``, each array ``(1, heads, end, dim)``."""
    cache.state = (keys, values, end)


def round_up(cache: KVCache) -> None:
    """Give a cache that is full room up to a multiple of its step, as one that grew has.

    By itself it would add a whole step to whatever it holds. Either is one copy.
    """
    spare = -cache.offset % cache.step
    if cache.keys is None or cache.keys.shape[2] != cache.offset or not spare:
        return
    cache.keys = _with_room(cache.keys, spare)
    cache.values = _with_room(filled(cache.values), spare)


def _with_room(array: mx.array, spare: int) -> mx.array:
    batch, heads, _, width = array.shape
    return mx.concatenate([array, mx.zeros((batch, heads, spare, width), array.dtype)], axis=2)


def rows(cache: KVCache, role: int) -> mx.array:
    """All rows of ``role``, ``(1, heads, offset, dim)``."""
    array = filled(cache.keys if role == KEY else cache.values)
    return array[..., : cache.offset, :]
