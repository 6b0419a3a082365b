"""Local prefill: absolute tile ends, canonical caches, and rows that company cannot change."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import RotatingKVCache, make_prompt_cache

from mac_decoder.engine.prefill import LocalPrefill
from mac_decoder.kv.install import canonical, extract
from tests.mac_decoder.engine.drive import loaded_copy, prompt
from tests.tiny_models import WINDOW

MODELS = ("llama", "muse_glimmer")


@pytest.mark.parametrize(
    ("length", "step", "ends"),
    [
        (2, 16, [1]),
        (17, 16, [16]),
        (18, 16, [16, 17]),
        (49, 16, [16, 32, 48]),
        (50, 64, [49]),
    ],
)
def test_tiles_end_at_multiples_of_the_step(
    checkpoint: Callable[..., Path], length: int, step: int, ends: list[int]
) -> None:
    prefill = LocalPrefill(loaded_copy(checkpoint("llama")).model, prompt(length), step)
    found: list[int] = []
    while prefill.remaining:
        stop = prefill.advance()
        found.append(prefill.position)
        assert (stop is not None) == (prefill.position == length - 1)
    assert found == ends
    assert prefill.position == prefill.end == length - 1


@pytest.mark.both_blas
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("length", [2, 31, 33, 100, 129])
def test_rows_are_those_of_the_same_tiles_computed_by_hand(
    checkpoint: Callable[..., Path], name: str, length: int
) -> None:
    loaded = loaded_copy(checkpoint(name))
    tokens = prompt(length)
    prefill = LocalPrefill(loaded.model, tokens, 32)
    while prefill.remaining:
        prefill.advance()
    caches = make_prompt_cache(loaded.model)
    for first in range(0, length - 1, 32):
        last = min(first + 32, length - 1)
        loaded.model(mx.array([tokens[first:last]]), cache=caches)
        mx.eval([cache.state for cache in caches])
    canonical(caches)
    ours = extract(prefill.caches, loaded.layout, length - 1)
    by_hand = extract(caches, loaded.layout, length - 1)
    assert ours.keys() == by_hand.keys()
    for place, rows in ours.items():
        assert np.array_equal(rows, by_hand[place]), place


@pytest.mark.both_blas
def test_rows_at_a_tile_end_do_not_depend_on_what_follows(
    checkpoint: Callable[..., Path],
) -> None:
    loaded = loaded_copy(checkpoint("llama"))
    short, long = prompt(65), (*prompt(65), *prompt(40, salt=1))
    found = []
    for tokens in (short, long):
        prefill = LocalPrefill(loaded.model, tokens, 32)
        while prefill.remaining:
            prefill.advance()
        found.append(extract(prefill.caches, loaded.layout, prefill.end))
    for place, rows in found[0].items():
        assert np.array_equal(rows, found[1][place][: rows.size]), place


def test_rings_hold_the_window_in_order_before_decoding(checkpoint: Callable[..., Path]) -> None:
    loaded = loaded_copy(checkpoint("muse_glimmer"))
    prefill = LocalPrefill(loaded.model, prompt(3 * WINDOW + 6), 64)
    while prefill.remaining:
        prefill.advance()
    rings = [cache for cache in prefill.caches if isinstance(cache, RotatingKVCache)]
    assert rings
    for ring in rings:
        assert ring.keys.shape[2] == WINDOW == ring._idx
        assert ring.offset == prefill.end
