"""Cuts with random bytes, for tests of the tiers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mac_decoder.reuse.cut import BlockBody, CutBody, Place, divide
from mac_decoder.reuse.facts import Publication
from mac_decoder.reuse.resident import Resident
from protocol.blocks import namespace
from protocol.layout import FullLayer, Layout, RecurrentLayer, SlidingLayer, StateArray, regions
from protocol.messages import History, Recipe

SPACE = namespace(bytes(32), bytes(range(32)))
OTHER_SPACE = namespace(bytes(32), bytes(32))
PREFILL = Recipe("decoder_prefill", "cpu", "float32", 64)
DECODE = Recipe("decoder_decode", "cpu", "float32", 1)

FULL = Layout((FullLayer(0, 1, 2, 2, "bfloat16"), FullLayer(1, 2, 1, 0, "float32")))
SLIDING = Layout((SlidingLayer(0, 1, 1, 1, "bfloat16", 300), FullLayer(1, 1, 2, 2, "bfloat16")))
STATES = (StateArray("conv", (2, 3), "bfloat16"), StateArray("delta", (1, 2, 2), "float32"))
RECURRENT = Layout((RecurrentLayer(0, STATES), FullLayer(1, 1, 1, 1, "bfloat16")))
BLOCKLESS = Layout((SlidingLayer(0, 1, 1, 1, "bfloat16", 32), RecurrentLayer(1, STATES)))
LAYOUTS = (FULL, SLIDING, RECURRENT, BLOCKLESS)


def some_rows(layout: Layout, position: int, seed: int = 0) -> dict[Place, np.ndarray]:
    """Random bytes in the form of ``kv.install.extract``; equal for equal arguments."""
    draw = np.random.default_rng((seed, position))
    return {
        (r.index, r.role): draw.integers(0, 256, r.nbytes, np.uint8)
        for r in regions(layout, 0, position)
    }


def causal_rows(layout: Layout, tokens: Sequence[int]) -> dict[Place, np.ndarray]:
    """Bytes that depend on the tokens up to their row, and on nothing else, as a model's do."""
    digests = np.cumsum(np.asarray(tokens, np.uint64) * np.uint64(0x9E3779B97F4A7C15) + 1)
    found: dict[Place, np.ndarray] = {}
    for r in regions(layout, 0, len(tokens)):
        count = max(r.last - r.first, 1)
        seeds = digests[r.first : r.last] if r.last > r.first else digests[-1:]
        width = r.nbytes // count
        steps = np.arange(1, width + 1, dtype=np.uint64) * np.uint64(131 + 7 * r.index + r.role)
        found[r.index, r.role] = (
            ((seeds[:, None] * steps) >> np.uint64(13)).astype(np.uint8).ravel()
        )
    return found


def made_of(
    layout: Layout,
    tokens: Sequence[int],
    *,
    space: bytes = SPACE,
    history: tuple[History, ...] | None = None,
    rows: dict[Place, np.ndarray] | None = None,
) -> tuple[CutBody, tuple[BlockBody, ...]]:
    """A cut of ``tokens`` with its blocks; rows as :func:`causal_rows` gives them."""
    past = history or (History(0, len(tokens), PREFILL),)
    return divide(layout, space, list(tokens), rows or causal_rows(layout, tokens), past)


def publication_of(tier: Resident, key: bytes) -> Publication | None:
    """What became of the cut's publication; ``None`` if the cut is not held."""
    held = tier._cuts.get(key)
    return held.publication if held else None


def dropped(tier: Resident, key: bytes) -> bool:
    """Take a cut out, pinned or not, as the tier does to replace it; whether it was there."""
    with tier._lock:
        held = tier._cuts.get(key)
        if held is not None:
            tier._remove(held)
        return held is not None


def emptied(tier: Resident) -> None:
    """Take all cuts out."""
    for key in list(tier._cuts):
        dropped(tier, key)
