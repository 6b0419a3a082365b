"""Sliding layers: mlx-lm's ``RotatingKVCache``, a ring of the last ``window`` rows.

After a long prefill the ring may hold more than ``window`` rows, and after decoding they may
be in any rotation. The canonical form has exactly the last ``min(offset, window)`` rows in the
order of time: ``(k, v, offset, keep=0, max_size=window, _idx=rows)``. The oldest of ``window``
rows is never read by the next step, yet the ring needs its place.
"""

from __future__ import annotations

import mlx.core as mx
from mlx_lm.models.cache import RotatingKVCache

from mac_decoder.kv.elements import dtype_name, filled
from protocol.layout import KEY, VALUE, SlidingLayer


def measure(cache: RotatingKVCache, layer: int, member: int) -> SlidingLayer:
    """The layout of a cache that has seen a token."""
    keys, values = filled(cache.keys), filled(cache.values)
    return SlidingLayer(
        layer,
        keys.shape[1],
        keys.shape[3],
        values.shape[3],
        dtype_name(keys),
        cache.max_size,
        member,
    )


def install(cache: RotatingKVCache, keys: mx.array, values: mx.array, end: int) -> None:
    """Fill an empty ring with the last ``min(end, window)`` rows before ``end``, in order."""
    cache.state = (keys, values, end, 0, cache.max_size, keys.shape[2])


def rows(cache: RotatingKVCache, role: int) -> mx.array:
    """The last ``min(offset, window)`` rows of ``role`` in the order of time."""
    array = filled(cache.keys if role == KEY else cache.values)
    count = min(cache.offset, cache.max_size)
    stop = cache._idx
    # A ring that wrapped holds exactly ``max_size`` rows, the oldest at ``_idx``.
    if stop < cache.offset and stop < array.shape[2]:
        array = mx.concatenate([array[..., stop:, :], array[..., :stop, :]], axis=2)
        stop = array.shape[2]
    return array[..., stop - count : stop, :]


def canonical(cache: RotatingKVCache) -> None:
    """Put the ring in its canonical form, in place; an empty ring stays empty."""
    if cache.keys is None:
        return
    keys, values = mx.contiguous(rows(cache, KEY)), mx.contiguous(rows(cache, VALUE))
    # Evaluated here, so that the longer arrays are let go of layer by layer.
    mx.eval(keys, values)
    install(cache, keys, values, cache.offset)
