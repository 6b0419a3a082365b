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
        self._held: deque[tuple[bytes, NDArray[np.uint32]]] = deque(maxlen=PROMPTS)

    def __len__(self) -> int:
        return len(self._held)

    def holds(self, space: bytes, tokens: NDArray[np.uint32], tile: int) -> int:
        """How many of ``tokens`` the producer should not have to compute, in their namespace."""
        shared = (common_prefix(held, tokens) for owner, held in self._held if owner == space)
        return max(shared, default=0) // tile * tile

    def handed_off(
        self, space: bytes, tokens: NDArray[np.uint32], computed: int, tile: int
    ) -> None:
        """The producer computed the last ``computed`` of ``tokens``, and now holds them all.

        What it was thought to hold, and computed all the same, it does not hold for others.
        """
        reused = len(tokens) - computed
        kept: list[tuple[bytes, NDArray[np.uint32]]] = []
        for owner, held in self._held:
            shared = common_prefix(held, tokens) if owner == space else 0
            if owner == space and shared == len(held):
                continue  # the newest prompt goes on from it
            kept.append((owner, held if shared // tile * tile <= reused else held[:reused]))
        if space:
            kept.append((space, tokens[: len(tokens) // tile * tile].copy()))
        self._held = deque((each for each in kept if len(each[1])), maxlen=PROMPTS)

    def forget(self) -> None:
        """The producer may be another one by now."""
        self._held.clear()
