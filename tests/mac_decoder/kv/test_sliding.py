"""Rings in every rotation that mlx-lm leaves them in: the canonical form has the last rows."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.models.cache import RotatingKVCache

from mac_decoder.kv import sliding
from protocol.layout import KEY, VALUE, SlidingLayer
from tests.ordinary import examples

WINDOW = 8


def _row(first: int, count: int) -> mx.array:
    """``(1, 2, count, 3)``, in which row ``p`` of head ``h`` is ``10 p + h``."""
    positions = 10 * mx.arange(first, first + count)[:, None] + mx.zeros((1, 3))
    return mx.stack([positions, positions + 1])[None]


@examples(120)
@given(pieces=st.lists(st.integers(1, 20), min_size=1, max_size=12))
def test_the_last_rows_in_the_order_of_time(pieces: list[int]) -> None:
    ring, position = RotatingKVCache(max_size=WINDOW), 0
    for count in pieces:
        ring.update_and_fetch(_row(position, count), -_row(position, count))
        position += count
    kept = min(position, WINDOW)
    expected = np.array(_row(position - kept, kept))
    assert np.array_equal(np.array(sliding.rows(ring, KEY)), expected)
    sliding.canonical(ring)
    assert np.array_equal(np.array(ring.keys), expected)
    assert np.array_equal(np.array(ring.values), -expected)
    assert ring.state[2:] == (position, 0, WINDOW, kept)
    # the ring goes on as if nothing had happened
    keys, _ = ring.update_and_fetch(_row(position, 1), -_row(position, 1))
    after = min(position + 1, WINDOW)
    seen = np.sort(np.array(keys)[0, 0, :, 0])
    assert np.array_equal(seen, 10.0 * np.arange(position + 1 - after, position + 1))


def test_an_empty_ring_stays_empty() -> None:
    ring = RotatingKVCache(max_size=WINDOW)
    sliding.canonical(ring)
    assert ring.keys is None


def test_measure() -> None:
    ring = RotatingKVCache(max_size=WINDOW)
    ring.update_and_fetch(_row(0, 1), mx.zeros((1, 2, 1, 5), mx.float32))
    assert sliding.measure(ring, 4, 1) == SlidingLayer(4, 2, 3, 5, "float32", WINDOW, 1)
    assert sliding.rows(ring, VALUE).shape == (1, 2, 1, 5)
