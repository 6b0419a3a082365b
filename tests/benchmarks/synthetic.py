"""Cuts without a model: random rows in the shape of Muse Glimmer's caches, and who keeps them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import numpy as np

from mac_decoder.keeper import Keeper
from mac_decoder.reuse.cut import BlockBody, Bytes, CutBody, Place, divide
from mac_decoder.store.store import Store
from protocol.blocks import namespace
from protocol.identity import Identity
from protocol.layout import Layout, regions
from protocol.layouts_named import muse_glimmer, stand_in_identity
from protocol.messages import History, Recipe

KEY: Final = bytes(32)
MUSE: Final = muse_glimmer()
IDENTITY: Final = stand_in_identity(MUSE)
SPACE: Final = namespace(KEY, IDENTITY.digest())
VOCABULARY: Final = 1 << 17
CAP: Final = 1 << 40
PREFILL: Final = Recipe("decoder_prefill", "cpu", "bfloat16", 512)
DECODE: Final = Recipe("decoder_decode", "cpu", "bfloat16", 1)


@contextmanager
def keeping(
    directory: Path, ram_bytes: int, identity: Identity = IDENTITY, layout: Layout = MUSE
) -> Iterator[tuple[Keeper, Store]]:
    """A keeper with a durable tier in ``directory``, and that tier."""
    keeper = Keeper(identity, layout, KEY, ram_bytes)
    store = Store.open(directory, KEY, CAP, 0, listener=keeper.heard)
    keeper.attach(store)
    try:
        yield keeper, store
    finally:
        keeper.close()


def tokens(count: int, seed: int = 1) -> np.ndarray:
    """A prompt without structure; a shorter one is the beginning of a longer one."""
    return np.random.default_rng(seed).integers(0, VOCABULARY, count, dtype=np.uint32)


def rows(position: int) -> dict[Place, Bytes]:
    """Random finite bfloat16 for every row of Muse at ``position``.

    Full rows of a longer cache begin as those of a shorter one do.
    """
    found: dict[Place, Bytes] = {}
    for region in regions(MUSE, 0, position):
        draw = np.random.default_rng((region.index, region.role, region.first))
        bits = draw.integers(0, 1 << 16, region.nbytes // 2, dtype=np.uint16)
        # Without the exponent's first bit no number is larger than 2, and none is no number.
        found[region.index, region.role] = (bits & 0xBFFF).view(np.uint8)
    return found


def cut(
    text: np.ndarray, held: Mapping[Place, Bytes], space: bytes = SPACE
) -> tuple[CutBody, tuple[BlockBody, ...]]:
    """The cut of the tokens ``text`` that has the rows ``held``, and its blocks."""
    return divide(MUSE, space, text, held, (History(0, len(text), PREFILL),))
