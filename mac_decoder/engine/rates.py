"""Measured speeds, and from which prompt length the producer is worth asking. Pure.

Times are seconds, given by the caller; nothing here reads a clock.
"""

from __future__ import annotations

from dataclasses import dataclass

FIRST_GUESS = 256
"""Threshold in tokens while either side has not been measured."""

MEMORY = 0.8
"""Weight that everything measured before keeps when a new measurement comes."""


@dataclass(frozen=True)
class Average:
    """A moving average of amount per second, weighted by amount.

    A tile of 512 tokens therefore counts for more than one of 8, whose fixed costs would
    make the machine look slow.
    """

    amount: float = 0.0
    seconds: float = 0.0

    def with_sample(self, amount: float, seconds: float) -> Average:
        """The average after one more measurement; one without amount or time changes nothing."""
        if amount <= 0 or seconds <= 0:
            return self
        return Average(self.amount * MEMORY + amount, self.seconds * MEMORY + seconds)

    @property
    def per_second(self) -> float:
        """Amount per second, 0.0 where nothing was measured."""
        return self.amount / self.seconds if self.seconds > 0 else 0.0


@dataclass(frozen=True)
class Speeds:
    """What the choice of lane rests on; 0.0 where nothing was measured.

    ``local`` and ``producer`` in prompt tokens per second, ``link`` in payload bytes per
    second, ``overhead_s`` the part of a handoff that does not depend on its length.
    """

    local: float = 0.0
    producer: float = 0.0
    link: float = 0.0
    overhead_s: float = 0.0


def local_seconds(tokens: int, speeds: Speeds) -> float | None:
    """Expected time to prefill ``tokens`` here; ``None`` where nothing was measured."""
    return tokens / speeds.local if speeds.local > 0 else None


def remote_seconds(tokens: int, bytes_per_token: float, speeds: Speeds) -> float | None:
    """Expected time of a handoff of ``tokens``: rows travel while the next are computed."""
    if speeds.producer <= 0 or speeds.link <= 0:
        return None
    return speeds.overhead_s + tokens * max(1 / speeds.producer, bytes_per_token / speeds.link)


def threshold(bytes_per_token: float, speeds: Speeds) -> int | None:
    """The uncached prompt length from which a handoff is expected to be faster.

    ``None`` when no length is: the producer and the link together are slower per token.
    """
    if speeds.local <= 0 or speeds.producer <= 0 or speeds.link <= 0:
        return FIRST_GUESS
    gain = 1 / speeds.local - max(1 / speeds.producer, bytes_per_token / speeds.link)
    if gain <= 0:
        return None
    return max(1, int(speeds.overhead_s / gain) + 1)
