"""The live tier: finished sequences whose caches stay as they are, while memory allows.

Only a true continuation takes a sequence, and takes it away: its caches are gone on with in
place. Whoever branches off finds the cuts that were kept on the way.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from mac_decoder.keeper import Line
from mac_decoder.reuse import facts
from mac_decoder.reuse.radix import common_prefix
from protocol.messages import History

MOST: Final = 64
"""Sequences kept; each is compared with every prompt."""


@dataclass(frozen=True)
class LiveCut:
    """A live sequence as whoever keeps house sees it."""

    key: int
    space: bytes
    tokens: NDArray[np.uint32] = field(repr=False)
    history: tuple[History, ...]
    nbytes: int
    ended_at: float


@dataclass(frozen=True, eq=False)
class LiveSequence:
    """A sequence in mlx-lm's caches, one per layer, canonical, with ``tokens`` in them."""

    space: bytes
    tokens: NDArray[np.uint32] = field(repr=False)
    caches: list[Any]
    history: tuple[History, ...]
    line: Line
    nbytes: int
    ended_at: float = field(default_factory=time.time)

    @property
    def position(self) -> int:
        """Tokens in the caches."""
        return len(self.tokens)


class LiveTier:
    """Finished sequences, least recently used first. MLX thread only."""

    def __init__(self) -> None:
        self._held: OrderedDict[int, LiveSequence] = OrderedDict()
        self._keys = 0
        self.nbytes = 0
        self.evicted = 0

    def __len__(self) -> int:
        return len(self._held)

    def put(self, sequence: LiveSequence) -> list[LiveSequence]:
        """Keep a sequence; returns those that it goes on from or repeats, which go."""
        replaced = [
            self.take(key)
            for key, held in list(self._held.items())
            if held.space == sequence.space
            and held.position <= sequence.position
            and common_prefix(held.tokens, sequence.tokens) == held.position
        ]
        self._keys += 1
        self._held[self._keys] = sequence
        self.nbytes += sequence.nbytes
        return replaced

    def take(self, key: int) -> LiveSequence:
        """Give up a sequence to be gone on with."""
        sequence = self._held.pop(key)
        self.nbytes -= sequence.nbytes
        return sequence

    def offers(self, space: bytes, prompt: NDArray[np.uint32]) -> tuple[facts.Live, ...]:
        """What each sequence shares with a prompt, for the ladder; those with nothing left out."""
        found = (
            facts.Live(key, held.position, common_prefix(held.tokens, prompt))
            for key, held in self._held.items()
            if held.space == space
        )
        return tuple(live for live in found if live.shared)

    def continued_by(self, space: bytes, prompt: NDArray[np.uint32]) -> int | None:
        """The deepest sequence that ``prompt`` goes on from."""
        going = [
            (held.position, key)
            for key, held in self._held.items()
            if held.space == space
            and held.position < len(prompt)
            and common_prefix(held.tokens, prompt) == held.position
        ]
        return max(going)[1] if going else None

    def bytes_of(self, key: int) -> int:
        """Bytes of a sequence; 0 if it is gone."""
        held = self._held.get(key)
        return held.nbytes if held else 0

    def cuts(self) -> tuple[LiveCut, ...]:
        """All sequences, the least recently used first."""
        return tuple(
            LiveCut(key, held.space, held.tokens, held.history, held.nbytes, held.ended_at)
            for key, held in self._held.items()
        )

    def forget(self, keys: Collection[int] | None = None) -> list[LiveSequence]:
        """Give up these sequences, or all: those that there were."""
        return [self.take(key) for key in list(self._held) if keys is None or key in keys]

    def evict(self, nbytes: int, keep: frozenset[int] = frozenset()) -> list[LiveSequence]:
        """Let go of sequences until ``nbytes`` are free, or only those of ``keep`` are left."""
        gone: list[LiveSequence] = []
        for key in [key for key in self._held if key not in keep]:
            if sum(sequence.nbytes for sequence in gone) >= nbytes:
                break
            gone.append(self.take(key))
        self.evicted += len(gone)
        return gone

    def evict_beyond(self, count: int, keep: frozenset[int] = frozenset()) -> list[LiveSequence]:
        """Let go of the least recently used beyond ``count``, but for those of ``keep``."""
        going = [key for key in self._held if key not in keep]
        gone = [self.take(key) for key in going[: max(0, len(self._held) - count)]]
        self.evicted += len(gone)
        return gone
