"""What the producer probably still holds of a prompt: a guess, which costs time where it is wrong.

A producer keeps whole tiles of what it prefilled, as long as it has room and lives. Only its
manifests say what it had; from them, the last prompts are remembered here.
"""

from __future__ import annotations

from collections import deque
from typing import Final

import numpy as np
from numpy.typing import NDArray

from mac_decoder.reuse.radix import common_prefix

PROMPTS: Final = 8
"""How many prompts are remembered: 512 KB each at 131,072 tokens."""


class RemotePrefixes:
    """The last prompts that were handed off, as far as the producer should still hold them.

    MLX thread only.
    """

    def __init__(self) -> None:
        self._held: deque[NDArray[np.uint32]] = deque(maxlen=PROMPTS)

    def __len__(self) -> int:
        return len(self._held)

    def holds(self, tokens: NDArray[np.uint32], tile: int) -> int:
        """How many of ``tokens`` the producer should not have to compute."""
        shared = (common_prefix(held, tokens) for held in self._held)
        return max(shared, default=0) // tile * tile

    def handed_off(self, tokens: NDArray[np.uint32], computed: int, tile: int) -> None:
        """The producer computed the last ``computed`` of ``tokens``, and now holds them all.

        What it was thought to hold, and computed all the same, it does not hold for others.
        """
        reused = len(tokens) - computed
        kept: list[NDArray[np.uint32]] = []
        for held in self._held:
            shared = common_prefix(held, tokens)
            if shared == len(held):
                continue  # the newest prompt goes on from it
            kept.append(held if shared // tile * tile <= reused else held[:reused])
        whole = tokens[: len(tokens) // tile * tile].copy()
        self._held = deque((held for held in [*kept, whole] if len(held)), maxlen=PROMPTS)

    def forget(self) -> None:
        """The producer may be another one by now."""
        self._held.clear()
