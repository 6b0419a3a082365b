"""The prompts of a qualification: random tokens, the same for everybody with the same model."""

from __future__ import annotations

import hashlib
from typing import Final

import numpy as np

from protocol.layout import Layout, SlidingLayer

DEEP: Final = 2048 + 149
"""Beyond 2,048 tokens, where long-context variants of RoPE begin to differ."""
SHORT: Final = 97
_BEYOND: Final = 33

Probe = tuple[int, ...]


def probes(layout: Layout, identity: bytes, vocabulary: int, most: int) -> tuple[Probe, ...]:
    """A short one, one that crosses every window, and one that is deep; boundary token included.

    None is longer than ``most``. Token ids come from ``identity``, 32 bytes: nothing of them is
    anybody's prompt.
    """
    windows = [layer.window for layer in layout.layers if isinstance(layer, SlidingLayer)]
    crossing = max(windows, default=SHORT) + _BEYOND + SHORT
    return tuple(
        _tokens(identity, number, min(length, most), vocabulary)
        for number, length in enumerate((SHORT, crossing, DEEP))
    )


def _tokens(identity: bytes, number: int, length: int, vocabulary: int) -> Probe:
    seed = hashlib.sha256(b"baton probe 1" + bytes([number]) + identity).digest()
    drawn = np.random.default_rng(np.frombuffer(seed, np.uint32)).integers(0, vocabulary, length)
    return tuple(int(token) for token in drawn)
