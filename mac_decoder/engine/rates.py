"""Measured speeds, and from which prompt length the producer is worth asking. Pure.

Times are seconds, given by the caller; nothing here reads a clock.
"""

from __future__ import annotations

from dataclasses import dataclass

FIRST_GUESS = 256
"""Threshold in tokens while either side has not been measured."""

MEMORY = 0.8
"""Weight that everything measured before keeps when a new measurement comes."""

HALF_LIFE_S = 60.0
"""Age at which what was measured weighs half as much again: networks and machines change."""

PROBE_AFTER_S = 60.0
"""How long the rates may refuse the producer before one prompt asks it all the same."""

LONGEST_PROBE_PAUSE_S = 960.0
"""The pause between probes doubles up to this, as long as the rates still refuse."""


@dataclass(frozen=True)
class Average:
    """A moving average of amount per second, weighted by amount.

    A tile of 512 tokens therefore counts for more than one of 8, whose fixed costs would
    make the machine look slow. ``at`` is when the last measurement came, on the caller's
    clock: the longer ago, the less it weighs beside the next.
    """

    amount: float = 0.0
    seconds: float = 0.0
    at: float = 0.0

    def with_sample(self, amount: float, seconds: float, now: float) -> Average:
        """The average after one more measurement; one without amount or time changes nothing."""
        if amount <= 0 or seconds <= 0:
            return self
        kept = MEMORY * 0.5 ** (max(0.0, now - self.at) / HALF_LIFE_S)
        return Average(self.amount * kept + amount, self.seconds * kept + seconds, now)

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


def all_measured(speeds: Speeds) -> bool:
    """Whether everything is known that :func:`threshold` weighs; else it is a first guess."""
    return speeds.local > 0 and speeds.producer > 0 and speeds.link > 0


def local_seconds(tokens: int, speeds: Speeds) -> float | None:
    """Expected time to prefill ``tokens`` here; ``None`` where nothing was measured."""
    return tokens / speeds.local if speeds.local > 0 else None


def remote_seconds(tokens: int, nbytes: float, speeds: Speeds) -> float | None:
    """Expected time of a handoff that computes ``tokens`` and ships ``nbytes``.

    Rows travel while the next are computed. ``None`` where nothing was measured.
    """
    if speeds.producer <= 0 or speeds.link <= 0:
        return None
    return speeds.overhead_s + max(tokens / speeds.producer, nbytes / speeds.link)


def threshold(bytes_per_token: float, speeds: Speeds) -> int | None:
    """The uncached prompt length from which a handoff is expected to be faster.

    ``None`` when no length is: the producer and the link together are slower per token.
    """
    if not all_measured(speeds):
        return FIRST_GUESS
    gain = 1 / speeds.local - max(1 / speeds.producer, bytes_per_token / speeds.link)
    if gain <= 0:
        return None
    return max(1, int(speeds.overhead_s / gain) + 1)


@dataclass(frozen=True)
class Probing:
    """When a producer that the rates refuse is asked once more, so that its recovery shows.

    Only handoffs measure it, and rates that refuse it make none. ``since`` is when they began
    to refuse it, or when it was last probed; ``None`` while they do not.
    """

    since: float | None = None
    pause_s: float = PROBE_AFTER_S

    def due(self, now: float) -> bool:
        """Whether the next prompt that the rates would refuse should be a probe."""
        return self.since is not None and now - self.since >= self.pause_s

    def refused(self, now: float) -> Probing:
        """The rates have refused a prompt that a handoff could have been worth."""
        return Probing(now, self.pause_s) if self.since is None else self

    def probed(self, now: float) -> Probing:
        """A prompt is sent to the producer although the rates refuse it."""
        return Probing(now, min(2 * self.pause_s, LONGEST_PROBE_PAUSE_S))
